"""Telling: which blocks become findable and which are no longer, as the log of KV events says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from blockstep.spec.features.kv_events import get_stored
from blockstep.spec.oracle import Oracle
from blockstep.spec.profiles import Profile, get_profile
from blockstep.spec.releases import Quirk
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    Config,
    GroupKind,
    KVEvent,
    KVGroup,
    MambaCacheMode,
    Policy,
    Request,
    Reset,
    ResetDone,
)

CONFIG = Config(num_blocks=6, block_size=2, max_model_len=12, enable_kv_cache_events=True)
AHEAD = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)
A = Request("A", (1, 2, 3, 4, 5), max_tokens=2)
FIRST = BlockKey(None, (1, 2))
SECOND = BlockKey(FIRST, (3, 4))
THIRD = BlockKey(SECOND, (5, 7))


def step(oracle: Oracle, **sampled: int) -> tuple[KVEvent, ...]:
    """What a plan and its commit tell."""
    plan = oracle.schedule()
    return oracle.commit(plan, {name: (token,) for name, token in sampled.items()}).kv_events


def told_by_reset(oracle: Oracle, forced: bool = False) -> tuple[KVEvent, ...]:
    done = oracle.apply(Reset(forced))
    assert isinstance(done, ResetDone)
    assert done.success
    return done.kv_events


def test_blocks_are_told_with_their_parent_and_their_tokens() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    assert step(oracle, A=7) == (BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2),)
    assert step(oracle, A=8) == (BlockStored((THIRD,), SECOND, (5, 7), 2),)


def test_who_asks_for_no_log_is_told_nothing() -> None:
    oracle = Oracle(replace(CONFIG, enable_kv_cache_events=False))
    oracle.submit(A)
    assert step(oracle, A=7) == ()
    assert oracle.state.pool.journal is None
    oracle.abort("A")
    assert told_by_reset(oracle) == ()


def test_what_is_evicted_is_told_before_what_takes_its_place() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    step(oracle, A=7)
    step(oracle, A=8)
    oracle.submit(Request("B", (9,) * 8, max_tokens=1))
    events = step(oracle, B=9)
    assert events[:2] == (BlockRemoved((THIRD,)), BlockRemoved((SECOND,)))
    assert isinstance(events[2], BlockStored)
    assert len(events[2].keys) == 4
    assert len(events) == 3


def test_an_adapter_is_told_and_other_names_are_in_the_key() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(replace(A, adapter="x", cache_salt="s"))
    (event,) = step(oracle, A=7)
    assert isinstance(event, BlockStored)
    assert event.adapter == "x"
    assert event.keys[0] == BlockKey(None, (1, 2), "x", "s")


def test_a_plan_in_flight_is_told_with_the_commit_before_it() -> None:
    """Its blocks can be found, so whoever follows the log must know of them."""
    oracle = Oracle(replace(AHEAD, long_prefill_token_threshold=2))
    oracle.submit(A)
    first, _ = oracle.schedule(), oracle.schedule()
    assert oracle.commit(first, {}).kv_events == (
        BlockStored((FIRST,), None, (1, 2), 2),
        BlockStored((SECOND,), FIRST, (3, 4), 2),
    )


def test_each_copy_is_told_and_each_is_removed() -> None:
    oracle = Oracle(replace(CONFIG, num_blocks=9, max_num_batched_tokens=4))
    for name in "AB":
        oracle.submit(Request(name, (1, 2), max_tokens=4))
    events = step(oracle, A=5, B=6)
    assert events == (BlockStored((FIRST,), None, (1, 2), 2),) * 2
    assert len(oracle.state.pool.cached[FIRST]) == 2


def test_what_a_step_takes_back_is_told_to_be_gone_in_the_same_batch() -> None:
    """An urgent row preempts one that was planned before it, whose blocks nobody will write."""
    config = replace(CONFIG, num_blocks=9, block_size=1, max_model_len=9, policy=Policy.PRIORITY)
    oracle = Oracle(replace(config, long_prefill_token_threshold=2))
    oracle.submit(Request("A", (1, 2, 3, 4, 5, 6, 7), max_tokens=1, priority=1))
    step(oracle)
    oracle.submit(Request("B", (7, 8), max_tokens=2))
    for tokens in ({"B": 5}, {"B": 6}):
        events = step(oracle, **tokens)
    assert oracle.state.waiting == ("A",)
    stored = [key for event in events if isinstance(event, BlockStored) for key in event.keys]
    gone = [key for event in events if isinstance(event, BlockRemoved) for key in event.keys]
    assert stored[0] in gone
    assert stored[0] not in oracle.state.pool.cached


def follow(copies: Counter[BlockKey], events: tuple[KVEvent, ...]) -> None:
    """Take in what is told, copy by copy."""
    for event in events:
        match event:
            case BlockStored(keys=keys):
                copies.update(keys)
            case BlockRemoved(keys=keys):
                copies.subtract(keys)
                assert min(copies.values()) >= 0
                copies += Counter()
            case AllBlocksCleared():
                copies.clear()
    for key in [key for key, count in copies.items() if not count]:
        del copies[key]


def test_a_reset_is_told_at_once_with_what_came_before_it() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    oracle.schedule()
    stored = BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2)
    assert told_by_reset(oracle, forced=True)[0] == stored
    assert oracle.state.pool.journal == ()
    assert told_by_reset(oracle) == (AllBlocksCleared(),)


def test_a_reset_that_is_refused_tells_nothing_and_forgets_nothing() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    plan = oracle.schedule()
    assert oracle.apply(Reset()) == ResetDone(False)
    assert len(oracle.commit(plan, {"A": (7,)}).kv_events) == 1


@pytest.mark.parametrize("quirk", [False, True])
def test_a_release_tells_null_blocks(quirk: bool) -> None:
    """A recurrent group keeps the last state of a chunk only."""
    state = KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=MambaCacheMode.ALIGN)
    quirks = frozenset({Quirk.NULL_BLOCKS_ARE_TOLD} if quirk else ())
    oracle = Oracle(replace(CONFIG, groups=(state,)), Profile("null", quirks))
    oracle.submit(A)
    (event,) = step(oracle)
    assert isinstance(event, BlockStored)
    assert event.keys == (SECOND,)
    assert event.parent == (None if quirk else FIRST)
    assert event.token_ids == ((1, 2, 3, 4) if quirk else (3, 4))


def test_a_release_tells_a_reset_with_the_next_commit() -> None:
    oracle = Oracle(CONFIG, Profile("late", frozenset({Quirk.RESETS_ARE_TOLD_LATE})))
    oracle.submit(A)
    step(oracle, A=7)
    step(oracle, A=8)
    assert told_by_reset(oracle) == ()
    oracle.submit(replace(A, request_id="B"))
    events = step(oracle, B=7)
    assert events[0] == AllBlocksCleared()
    assert isinstance(events[1], BlockStored)


WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 4, sliding_window=4)


def test_keys_of_several_groups_name_their_group_and_larger_blocks_all_of_their_tokens() -> None:
    full = KVGroup(GroupKind.FULL, 2)
    oracle = Oracle(replace(CONFIG, num_blocks=12, groups=(full, WINDOW)))
    oracle.submit(A)
    assert step(oracle, A=7) == (
        BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2),
        BlockStored((SECOND.in_group(1),), None, (1, 2, 3, 4), 4),
    )


@pytest.mark.parametrize("num_steps", [8])
def test_what_a_window_has_left_behind_is_not_told_again(num_steps: int) -> None:
    """Behind a hit some blocks of a window are null: what follows has a parent all the same."""
    window = replace(WINDOW, block_size=2, sliding_window=2)
    oracle = Oracle(replace(CONFIG, num_blocks=12, groups=(window,)))
    oracle.submit(replace(A, max_tokens=6))
    copies: Counter[BlockKey] = Counter()
    for token in range(num_steps):
        if not oracle.num_running + oracle.num_waiting:
            oracle.submit(Request("B", (*A.prompt_token_ids, 0, 1, 2), max_tokens=3))
        events = step(oracle, **{"B" if "B" in oracle.state.requests else "A": token})
        for event in events:
            if isinstance(event, BlockStored):
                assert event.parent == event.keys[0].parent
        follow(copies, events)
        assert copies == {key: len(held) for key, held in oracle.state.pool.cached.items()}


def test_blocks_on_both_sides_of_a_null_one_are_two_events() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(replace(A, prompt_token_ids=(1, 2, 3, 4, 5, 6, 7, 8, 9)))
    told = get_stored(CONFIG, oracle.state.requests["A"], 0, (2, 0, 3, 4), 0)
    third = BlockKey(SECOND, (5, 6))
    assert told == (
        BlockStored((FIRST,), None, (1, 2), 2),
        BlockStored((third, BlockKey(third, (7, 8))), SECOND, (5, 6, 7, 8), 2),
    )


@pytest.mark.parametrize("quirk", [False, True])
def test_where_all_that_is_verified_has_slid_out_of_a_window_a_release_tells_of_no_block(
    quirk: bool,
) -> None:
    window = KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=1)
    config = Config(
        num_blocks=4,
        block_size=1,
        max_model_len=8,
        max_frames_in_flight=2,
        async_scheduling=True,
        groups=(window,),
        enable_kv_cache_events=True,
    )
    quirks = frozenset({Quirk.NULL_BLOCKS_ARE_TOLD} if quirk else ())
    oracle = Oracle(config, Profile("one", quirks))
    oracle.submit(Request("A", (0,), max_tokens=3))
    plans = [oracle.schedule(), oracle.schedule()]
    oracle.commit(plans[0], {"A": (6,)})
    oracle.schedule()
    told = oracle.commit(plans[1], {"A": (7,)}).kv_events
    nothing = BlockStored((), BlockKey(None, (0,)), (6,), 1)
    assert told == ((nothing,) if quirk else ())


@pytest.mark.parametrize("quirk", [False, True])
def test_a_release_does_not_tell_the_group_of_a_block(quirk: bool) -> None:
    """A reader of such a log loses the block of full attention with that of the window."""
    full, window = KVGroup(GroupKind.FULL, 2), replace(WINDOW, block_size=2, sliding_window=2)
    config = replace(CONFIG, num_blocks=10, groups=(full, window))
    quirks = frozenset({Quirk.EVENTS_NAME_NO_GROUP} if quirk else ())
    oracle = Oracle(config, Profile("one", quirks))
    oracle.submit(A)
    told = 0 if quirk else 1
    assert step(oracle, A=7) == (
        BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2),
        BlockStored((FIRST.in_group(told), SECOND.in_group(told)), None, (1, 2, 3, 4), 2),
    )
    stored = oracle.commit(oracle.schedule(), {"A": (8,)}).kv_events[1]
    assert isinstance(stored, BlockStored)
    assert (stored.keys, stored.parent) == ((THIRD.in_group(told),), SECOND.in_group(told))
    oracle.submit(Request("B", (9, 9, 9), max_tokens=1))
    removed = [event for event in step(oracle, B=7) if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved((SECOND.in_group(told),))]
    assert SECOND in oracle.state.pool.cached


def test_what_is_cleared_has_no_group() -> None:
    quirks = frozenset({Quirk.EVENTS_NAME_NO_GROUP})
    assert told_by_reset(Oracle(CONFIG, Profile("one", quirks))) == (AllBlocksCleared(),)


@pytest.mark.parametrize("quirks", [(), (Quirk.NULL_BLOCKS_ARE_TOLD,)])
def test_blocks_of_a_confirmed_load_are_told_as_others_are(quirks: tuple[Quirk, ...]) -> None:
    groups = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=2),)
    config = replace(CONFIG, groups=groups, kv_connector=True)
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(A)
    oracle.offer_kv("A", 4)
    (told,) = step(oracle, A=7)
    assert isinstance(told, BlockStored)
    assert told.keys == (SECOND,)
    assert (told.parent, told.token_ids) == ((None, (1, 2, 3, 4)) if quirks else (FIRST, (3, 4)))


NARROW = KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=2)


@pytest.mark.parametrize("name", ["strict", "vllm-0.19.1", "vllm-0.27.0", "vllm-0.33.0"])
def test_a_confirmed_load_tells_no_null_block(name: str) -> None:
    """As releases do: of six loaded tokens the window has left four."""
    config = replace(CONFIG, groups=(NARROW,), kv_connector=True)
    profile = get_profile(name)
    assert profile is not None
    oracle = Oracle(config, profile)
    oracle.submit(Request("A", (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=2))
    oracle.offer_kv("A", 6, is_async=True)
    (load,) = oracle.schedule().kv_loads
    assert load.block_ids == ((0, 0, 1),)
    assert oracle.report(finished_recving=["A"]).kv_events == ()
    loaded, computed = step(oracle, A=9)
    assert isinstance(loaded, BlockStored)
    assert isinstance(computed, BlockStored)
    assert (loaded.token_ids, computed.token_ids) == ((5, 6), (7, 8))
    assert loaded.parent == SECOND
