"""KV events: which blocks are reported as stored and removed, and when a reset is reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

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
    Request,
    Reset,
    ResetDone,
)

CONFIG = Config(num_blocks=6, block_size=2, max_model_len=12, enable_kv_cache_events=True)
A = Request("A", (1, 2, 3, 4, 5), max_tokens=2)
FIRST = BlockKey(None, (1, 2))
SECOND = BlockKey(FIRST, (3, 4))
THIRD = BlockKey(SECOND, (5, 7))


def step(oracle: Oracle, **sampled: int) -> tuple[KVEvent, ...]:
    """Plan a step, commit it, and return its KV events."""
    plan = oracle.schedule()
    return oracle.commit(plan, {name: (token,) for name, token in sampled.items()}).kv_events


def list_events_of_reset(oracle: Oracle, forced: bool = False) -> tuple[KVEvent, ...]:
    done = oracle.apply(Reset(forced))
    assert isinstance(done, ResetDone)
    assert done.success
    return done.kv_events


def test_each_copy_of_a_block_is_reported_as_stored_and_as_removed() -> None:
    oracle = Oracle(replace(CONFIG, num_blocks=5, max_num_batched_tokens=4))
    for name in "AB":
        oracle.submit(Request(name, (1, 2), max_tokens=1))
    events = step(oracle, A=5, B=6)
    assert events == (BlockStored((FIRST,), None, (1, 2), 2),) * 2
    assert len(oracle.state.pool.cached[FIRST]) == 2
    oracle.submit(Request("C", (7, 7, 7, 7), max_tokens=5))
    removed = [event for token in range(5) for event in step(oracle, C=token)]
    assert [event for event in removed if isinstance(event, BlockRemoved)] == [
        BlockRemoved((FIRST,)),
        BlockRemoved((FIRST,)),
    ]


def follow(copies: Counter[BlockKey], events: tuple[KVEvent, ...]) -> None:
    """Apply events to the number of copies of each key."""
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


def test_a_reset_returns_its_events_and_those_before_it() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    oracle.schedule()
    stored = BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2)
    assert list_events_of_reset(oracle, forced=True)[0] == stored
    assert oracle.state.pool.journal == ()
    assert list_events_of_reset(oracle) == (AllBlocksCleared(),)


def test_a_failed_reset_reports_no_event_and_loses_none() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    plan = oracle.schedule()
    assert oracle.apply(Reset()) == ResetDone(False)
    assert len(oracle.commit(plan, {"A": (7,)}).kv_events) == 1


@pytest.mark.parametrize("quirk", [False, True])
def test_a_release_reports_null_blocks(quirk: bool) -> None:
    """A recurrent group keeps the last state of a chunk only."""
    state = KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=MambaCacheMode.ALIGN)
    quirks = frozenset({Quirk.NULL_BLOCKS_ARE_REPORTED} if quirk else ())
    oracle = Oracle(replace(CONFIG, groups=(state,)), Profile("null", quirks))
    oracle.submit(A)
    (event,) = step(oracle)
    assert isinstance(event, BlockStored)
    assert event.keys == (SECOND,)
    assert event.parent == (None if quirk else FIRST)
    assert event.token_ids == ((1, 2, 3, 4) if quirk else (3, 4))


def test_a_release_reports_a_reset_with_the_next_commit() -> None:
    oracle = Oracle(CONFIG, Profile("late", frozenset({Quirk.RESET_EVENT_IS_LATE})))
    oracle.submit(A)
    step(oracle, A=7)
    step(oracle, A=8)
    assert list_events_of_reset(oracle) == ()
    oracle.submit(replace(A, request_id="B"))
    events = step(oracle, B=7)
    assert events[0] == AllBlocksCleared()
    assert isinstance(events[1], BlockStored)


WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 4, sliding_window=4)


def test_null_blocks_of_a_window_hit_are_not_reported_again() -> None:
    """The parent of the next stored block is right although that block is null."""
    window = replace(WINDOW, block_size=2, sliding_window=2)
    oracle = Oracle(replace(CONFIG, num_blocks=12, groups=(window,)))
    oracle.submit(replace(A, max_tokens=6))
    copies: Counter[BlockKey] = Counter()
    for token in range(8):
        if not oracle.num_running + oracle.num_waiting:
            oracle.submit(Request("B", (*A.prompt_token_ids, 0, 1, 2), max_tokens=3))
        events = step(oracle, **{"B" if "B" in oracle.state.requests else "A": token})
        for event in events:
            if isinstance(event, BlockStored):
                assert event.parent == event.keys[0].parent
        follow(copies, events)
        assert copies == {key: len(held) for key, held in oracle.state.pool.cached.items()}


@pytest.mark.parametrize("quirk", [False, True])
def test_a_release_does_not_report_the_group_of_a_block(quirk: bool) -> None:
    """With the quirk, a reader of the log loses the full group's block with that of the window."""
    full, window = KVGroup(GroupKind.FULL, 2), replace(WINDOW, block_size=2, sliding_window=2)
    config = replace(CONFIG, num_blocks=10, groups=(full, window))
    quirks = frozenset({Quirk.EVENTS_WITHOUT_GROUPS} if quirk else ())
    oracle = Oracle(config, Profile("one", quirks))
    oracle.submit(A)
    group = 0 if quirk else 1
    assert step(oracle, A=7) == (
        BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2),
        BlockStored((FIRST.in_group(group), SECOND.in_group(group)), None, (1, 2, 3, 4), 2),
    )
    stored = oracle.commit(oracle.schedule(), {"A": (8,)}).kv_events[1]
    assert isinstance(stored, BlockStored)
    assert (stored.keys, stored.parent) == ((THIRD.in_group(group),), SECOND.in_group(group))
    oracle.submit(Request("B", (9, 9, 9), max_tokens=1))
    removed = [event for event in step(oracle, B=7) if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved((SECOND.in_group(group),))]
    assert SECOND in oracle.state.pool.cached


def test_a_cleared_event_is_the_same_without_groups() -> None:
    quirks = frozenset({Quirk.EVENTS_WITHOUT_GROUPS})
    assert list_events_of_reset(Oracle(CONFIG, Profile("one", quirks))) == (AllBlocksCleared(),)


@pytest.mark.parametrize("quirks", [(), (Quirk.NULL_BLOCKS_ARE_REPORTED,)])
def test_blocks_of_a_confirmed_load_are_reported(quirks: tuple[Quirk, ...]) -> None:
    groups = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=2),)
    config = replace(CONFIG, groups=groups, kv_connector=True)
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(A)
    oracle.offer_kv("A", 4)
    (event,) = step(oracle, A=7)
    assert isinstance(event, BlockStored)
    assert event.keys == (SECOND,)
    assert (event.parent, event.token_ids) == ((None, (1, 2, 3, 4)) if quirks else (FIRST, (3, 4)))


NARROW = KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=2)


@pytest.mark.parametrize("name", ["strict", "vllm-0.19.1", "vllm-0.27.0", "vllm-0.33.0"])
def test_a_confirmed_load_reports_no_null_block(name: str) -> None:
    """The window has skipped 4 of 6 loaded tokens. Releases behave like this too."""
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
