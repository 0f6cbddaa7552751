"""The encoder cache: encoding, eviction, withdrawal of planned items, and cross attention.

Prompts are written as letters: an item is a run of one letter, text is `t`. So `ccccttdd` is an
item of four tokens, two of text, and an item of two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from groups_support import recurrent

from blockstep.spec import (
    Config,
    MultiModalItem,
    Oracle,
    Policy,
    RejectedEvent,
    Request,
    SpecMethod,
)
from blockstep.spec.features.encoder.cache import (
    ENCODER,
    Encoder,
    Entry,
    PlannedItem,
    get_with_evicted,
    withdraw_items,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.vocabulary import (
    GroupKind,
    KVGroup,
    Plan,
    RequestId,
)

CONFIG = Config(
    num_blocks=40,
    block_size=1,
    max_model_len=32,
    max_num_batched_tokens=16,
    encoder_compute_budget=8,
    encoder_cache_size=8,
)
HEAD: dict[str, Any] = {"spec_method": SpecMethod.EAGLE, "num_speculative_tokens": 1}
BESIDE: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
    "max_num_batched_tokens": 32,
}
RANKED: dict[str, Any] = {
    "policy": Policy.PRIORITY,
    "enable_prefix_caching": False,
    "scheduler_reserve_full_isl": False,
    "long_prefill_token_threshold": 1,
}


def oracle_of(*quirks: Quirk, **fields: Any) -> Oracle:
    config = replace(CONFIG, **fields)
    return Oracle(config, Profile("some", frozenset(quirks)))


def request(name: str, prompt: str, priority: int = 0, max_tokens: int = 4) -> Request:
    """Return a request with the items in `prompt`.

    Each run of a letter is an item; `t` is text. A capital is a token of its item without an
    embedding.
    """
    items, start = [], 0
    while start < len(prompt):
        end = start
        while end < len(prompt) and prompt[end].lower() == prompt[start].lower():
            end += 1
        run = prompt[start:end]
        if run[0] != "t":
            mask = () if run.islower() else tuple(letter.islower() for letter in run)
            items.append(MultiModalItem(run[0].lower(), start, len(run), mask))
        start = end
    tokens = tuple(ord(name[0]) for _ in prompt)
    return Request(name, tokens, max_tokens, priority=priority, items=tuple(items))


def step(oracle: Oracle) -> Plan:
    """Plan a step and commit it."""
    plan = oracle.schedule()
    if plan.rows:
        frame = oracle.state.frames[-1]
        oracle.commit(plan, {row.request_id: [50] for row in frame.rows if row.samples})
    return plan


def amounts(plan: Plan) -> dict[RequestId, int]:
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


def made(plan: Plan) -> dict[RequestId, tuple[int, ...]]:
    return {one.request_id: one.item_indices for one in plan.scheduled_encoder_inputs}


def holders(oracle: Oracle) -> dict[str, tuple[RequestId, ...]]:
    kept = oracle.snapshot().encoder
    assert kept is not None
    return {entry.identifier: entry.holders for entry in kept.entries}


# Items and the end of a chunk.


WHOLE: dict[str, Any] = {"disable_chunked_mm_input": True}


def test_a_whole_item_waits_for_a_step_with_enough_budget() -> None:
    """The budget has one token left and the prompt begins with an item of two (upstream #52306)."""
    oracle = oracle_of(max_num_batched_tokens=3, **WHOLE)
    oracle.submit(request("O", "tt"))
    oracle.submit(request("A", "cct"))
    assert [amounts(step(oracle)) for _ in range(2)] == [{"O": 2}, {"O": 1, "A": 2}]


def test_a_chunk_ends_before_a_whole_item_if_the_next_has_no_space() -> None:
    """The draft head reads one token ahead, so the chunk would end inside of item d."""
    oracle = oracle_of(encoder_cache_size=4, encoder_compute_budget=4, **WHOLE, **HEAD)
    oracle.submit(request("A", "tccddee", max_tokens=1))
    assert [amounts(step(oracle)) for _ in range(2)] == [{"A": 3}, {"A": 4}]


# Events without an encoder.


def test_encoder_events_change_nothing_without_an_encoder() -> None:
    oracle = Oracle(Config(num_blocks=4))
    before = oracle.state
    oracle.reset_encoder()
    oracle.offer("c")
    assert oracle.state == before
    assert oracle.snapshot().encoder is None


# Rows that are withdrawn from the plan that is being made.


def rolled_back(*quirks: Quirk, **fields: Any) -> tuple[Oracle, Plan]:
    """Return a plan where A is scheduled with its item, then preempted for B; C is after B."""
    oracle = oracle_of(*quirks, num_blocks=8, **RANKED | fields)
    oracle.submit(request("A", "tttc", priority=2))
    step(oracle)
    oracle.submit(request("B", "ttd", priority=1))
    step(oracle)
    oracle.submit(request("C", "te"))
    step(oracle)
    plan = step(oracle)
    assert plan.preempted_req_ids == ("A",)
    return oracle, plan


def test_a_withdrawn_row_leaves_no_entry_and_returns_its_encoder_budget() -> None:
    oracle, plan = rolled_back(encoder_compute_budget=2, encoder_cache_size=3)
    assert made(plan) == {"B": (0,), "C": (0,)}
    assert sorted(holders(oracle)) == ["d", "e"]


def test_items_evicted_for_a_withdrawn_row_are_restored() -> None:
    oracle = oracle_of(num_blocks=8, encoder_compute_budget=2, encoder_cache_size=2, **RANKED)
    oracle.submit(request("Z", "z", max_tokens=1))
    step(oracle)
    oracle.submit(request("Y", "y", max_tokens=1))
    step(oracle)
    assert list(holders(oracle)) == ["y", "z"]
    oracle.submit(request("A", "tttc", priority=2))
    step(oracle)
    oracle.submit(request("B", "ttt", priority=1))
    step(oracle)
    oracle.submit(request("C", "tt"))
    step(oracle)
    plan = step(oracle)
    assert plan.preempted_req_ids == ("A",)
    assert plan.free_encoder_mm_hashes == ()
    kept = oracle.snapshot().encoder
    assert kept is not None
    assert kept.freeable == ("z", "y")


def test_an_evicted_item_that_is_encoded_again_does_not_block_restoring_others() -> None:
    reencoded = FrozenMap({"b": Entry(1, (("A", 0),))})
    before = Encoder(3, entries=reencoded, evicted=(("a", 1), ("b", 1)))
    after = get_with_evicted(before)
    assert (after.freeable, after.evicted) == (("a",), (("b", 1),))


def test_a_request_that_shares_a_withdrawn_item_encodes_it() -> None:
    oracle = oracle_of(num_blocks=9, encoder_compute_budget=1, encoder_cache_size=3, **RANKED)
    oracle.submit(request("A", "tttc", priority=2))
    step(oracle)
    oracle.submit(request("H", "ttc"))
    step(oracle)
    oracle.submit(request("B", "tt", priority=1))
    step(oracle)
    assert oracle.state.running == ("A", "H", "B")
    oracle.submit(request("C", "t"))
    plan = step(oracle)
    assert (plan.preempted_req_ids, made(plan)) == (("A",), {"H": (0,)})
    assert get_broken_invariants(oracle.state) == ()


def test_an_item_evicted_and_encoded_again_in_one_step_is_not_dropped() -> None:
    for quirks, dropped in (((), ("d",)), ((Quirk.REENCODED_ITEMS_ARE_DROPPED,), ("c", "d"))):
        oracle = oracle_of(*quirks, encoder_cache_size=4)
        for name, prompt in (("A", "c"), ("B", "dd")):
            oracle.submit(request(name, prompt, max_tokens=1))
            step(oracle)
        oracle.submit(request("D", "eee"))
        oracle.submit(request("E", "tc"))
        plan = step(oracle)
        assert made(plan) == {"D": (0,), "E": (0,)}
        assert plan.free_encoder_mm_hashes == dropped


def test_a_failed_admission_evicts_and_holds_no_item() -> None:
    for quirks, kept in (((), ["c"]), ((Quirk.ENCODER_CACHE_CHANGES_BEFORE_ADMISSION,), [])):
        oracle = oracle_of(*quirks, num_blocks=4, encoder_cache_size=3, encoder_compute_budget=3)
        oracle.submit(request("A", "ccc", max_tokens=1))
        step(oracle)
        oracle.submit(request("B", "t", max_tokens=3))
        step(oracle)
        oracle.submit(request("D", "ddd", max_tokens=1))
        plan = step(oracle)
        assert list(amounts(plan)) == ["B"]
        assert list(holders(oracle)) == kept
        assert plan.free_encoder_mm_hashes == (() if kept else ("c",))


def test_a_loaded_item_uses_no_encoder_budget() -> None:
    oracle = oracle_of(encoder_compute_budget=2)
    oracle.offer("c")
    for name, prompt in (("A", "c"), ("B", "d"), ("C", "ee")):
        oracle.submit(request(name, prompt))
    assert made(step(oracle)) == {"B": (0,)}


# Encoder-decoder models.


def test_an_encoder_decoder_model_loads_no_item() -> None:
    oracle = oracle_of(**BESIDE)
    oracle.offer("c")
    oracle.submit(request("A", "cc"))
    assert made(step(oracle)) == {"A": (0,)}


@pytest.mark.parametrize(("quirk", "expected"), [(False, ["B"]), (True, ["B", "C"])])
def test_cross_attention_cache_overcounts_free_space(quirk: bool, expected: list[str]) -> None:
    """Upstream #55733: each token of a request frees the space of its item once more."""
    fields = BESIDE | {"encoder_cache_size": 2, "encoder_compute_budget": 4}
    oracle = oracle_of(
        *([Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE] if quirk else []), **fields
    )
    oracle.submit(request("A", "cc"))
    step(oracle)
    step(oracle)
    oracle.submit(request("B", "dd"))
    oracle.submit(request("C", "ee"))
    assert list(made(step(oracle))) == expected


def test_space_for_encoder_decoder_input_is_freed_by_the_commit() -> None:
    """0.33.0: while the first item is in flight, no second one is encoded."""
    fields = BESIDE | {"encoder_cache_size": 2, "max_frames_in_flight": 2}
    grows = (Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE, Quirk.ITEMS_HELD_WITHOUT_A_ROW)
    oracle = oracle_of(*grows, Quirk.ITEMS_HELD_UNTIL_THE_COMMIT, **fields)
    oracle.submit(request("A", "cc", max_tokens=1))
    oracle.submit(request("B", "dd"))
    first = oracle.schedule()
    assert [list(made(plan)) for plan in (first, oracle.schedule())] == [["A"], []]
    oracle.commit(first, {"A": [5]})
    assert list(made(step(oracle))) == ["B"]
    assert get_broken_invariants(oracle.state) == ()


@pytest.mark.parametrize("quirk", [False, True])
def test_reencoded_cross_attention_items_are_dropped(quirk: bool) -> None:
    quirks = [Quirk.REENCODED_CROSS_ATTENTION_ITEMS_ARE_DROPPED] if quirk else []
    oracle = oracle_of(*quirks, **BESIDE)
    dropped = []
    for name in "AB":
        oracle.submit(request(name, "cc", max_tokens=1))
        dropped.append(step(oracle).free_encoder_mm_hashes)
    assert dropped == [(), ("c",) if quirk else ()]
    oracle = oracle_of(*quirks, encoder_cache_size=3)
    for name, prompt in (("A", "cc"), ("B", "dd"), ("C", "cc")):
        oracle.submit(request(name, prompt, max_tokens=1))
        dropped.append(step(oracle).free_encoder_mm_hashes)
    assert dropped[2:] == [(), ("c",), ("d",)], "of an encoder-decoder model only"


def test_decoding_adds_no_cross_attention_block() -> None:
    groups = (KVGroup(GroupKind.FULL, 1), KVGroup(GroupKind.CROSS_ATTENTION, 2))
    oracle = oracle_of(**BESIDE, groups=groups, num_blocks=12)
    oracle.submit(request("A", "ccccc", max_tokens=3))
    oracle.submit(request("B", "t", max_tokens=3))
    for num_tokens in (5, 6, 7):
        step(oracle)
        if num_tokens < 7:
            full, across = oracle.state.requests["A"].block_tables
            assert (len(full), len(across)) == (num_tokens, 3)
            assert oracle.state.requests["B"].block_tables[1] == ()
        assert get_broken_invariants(oracle.state) == ()
    assert oracle.num_free_blocks == 11


def test_a_request_that_lacks_a_cross_attention_block_is_not_admitted() -> None:
    groups = (KVGroup(GroupKind.FULL, 1), KVGroup(GroupKind.CROSS_ATTENTION, 1))
    oracle = oracle_of(**BESIDE, groups=groups, num_blocks=12)
    oracle.submit(request("A", "cccc", max_tokens=1))
    oracle.submit(request("B", "dd", max_tokens=1))
    assert amounts(step(oracle)) == {"A": 4}
    assert amounts(step(oracle)) == {"B": 2}


# Other quirks of 0.19.1.


def test_repeated_item_is_released_at_its_first_place() -> None:
    oracle = oracle_of(Quirk.REPEATED_ITEM_IS_RELEASED_AT_ITS_FIRST_PLACE, max_num_batched_tokens=4)
    oracle.submit(request("A", "cctcc"))
    step(oracle)
    assert holders(oracle) == {"c": ()}


@pytest.mark.parametrize("quirk", [False, True])
def test_items_held_without_a_row(quirk: bool) -> None:
    """With the quirk, each request holds its item for ever and waits for the other's space."""
    oracle = oracle_of(
        *([Quirk.ITEMS_HELD_WITHOUT_A_ROW] if quirk else []),
        encoder_cache_size=4,
        long_prefill_token_threshold=1,
        **HEAD,
    )
    oracle.submit(request("A", "ccd", max_tokens=1))
    oracle.submit(request("B", "eef", max_tokens=1))
    for _ in range(12):
        step(oracle)
    assert sorted(oracle.state.requests) == (["A", "B"] if quirk else [])


def test_withdrawn_items_count_as_encoded() -> None:
    """A resumes and finds its item in the cache although it was never encoded."""
    oracle, plan = rolled_back(Quirk.WITHDRAWN_ITEMS_COUNT_AS_ENCODED)
    assert made(plan) == {"B": (0,), "C": (0,)}
    assert sorted(holders(oracle)) == ["c", "d", "e"]
    oracle.abort("B", "C")
    plans = [step(oracle) for _ in range(5)]
    assert [amounts(plan) for plan in plans] == [{"A": 1}] * 5
    assert [made(plan) for plan in plans] == [{}] * 5


def test_encoder_budget_of_withdrawn_rows_is_lost() -> None:
    _, plan = rolled_back(Quirk.ENCODER_BUDGET_OF_WITHDRAWN_ROWS_IS_LOST, encoder_compute_budget=2)
    assert made(plan) == {"B": (0,)}


@pytest.mark.parametrize(("quirk", "expected"), [(False, 2), (True, 1)])
def test_chunk_ends_before_an_unneeded_item(quirk: bool, expected: int) -> None:
    oracle = oracle_of(
        *([Quirk.CHUNK_ENDS_BEFORE_AN_UNNEEDED_ITEM] if quirk else []),
        encoder_cache_size=3,
        long_prefill_token_threshold=2,
    )
    oracle.submit(request("A", "ccc"))
    oracle.submit(request("B", "tDdd"))
    assert amounts(step(oracle)) == {"A": 2, "B": expected}


def test_an_item_without_an_embedding_left_is_not_encoded_again() -> None:
    oracle = oracle_of(Quirk.CHUNK_ENDS_BEFORE_AN_UNNEEDED_ITEM, long_prefill_token_threshold=3)
    oracle.submit(request("A", "ttdDc"))
    assert made(step(oracle)) == {"A": (0,)}
    oracle.reset_encoder()  # then the item is not in the cache and not needed
    assert made(step(oracle)) == {"A": (1,)}


def test_draft_head_reads_an_unencoded_item() -> None:
    oracle = oracle_of(Quirk.DRAFT_HEAD_READS_AN_UNENCODED_ITEM, max_num_batched_tokens=2, **HEAD)
    oracle.submit(request("A", "ttcc"))
    assert made(step(oracle)) == {}
    oracle.submit(request("B", "ttDd"))
    oracle.abort("A")
    assert made(step(oracle)) == {"B": (0,)}


@pytest.mark.parametrize(("quirk", "expected"), [(False, [1, 2]), (True, [None, None])])
@pytest.mark.parametrize("splits", [False, True])
def test_draft_head_stops_before_whole_items(
    quirk: bool, expected: list[int | None], splits: bool
) -> None:
    quirks = [Quirk.DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS] if quirk else []
    if splits:
        quirks.append(Quirk.WHOLE_ITEMS_ARE_SPLIT)
        expected = expected if quirk else [2, 1]
    oracle = oracle_of(*quirks, max_num_batched_tokens=2, **WHOLE, **HEAD)
    oracle.submit(request("A", "tcc", max_tokens=1))
    assert [amounts(step(oracle)).get("A") for _ in range(2)] == expected


def test_a_chunk_with_a_draft_head_may_end_right_before_a_whole_item() -> None:
    """With the quirk, the chunk ends one token earlier."""
    for quirks, expected in (((), 2), ((Quirk.DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS,), 1)):
        oracle = oracle_of(*quirks, max_num_batched_tokens=2, **WHOLE, **HEAD)
        oracle.submit(request("A", "ttcc", max_tokens=1))
        assert amounts(step(oracle)) == {"A": expected}


@pytest.mark.parametrize(
    "quirk", [Quirk.WHOLE_ITEMS_ARE_SPLIT, Quirk.REMAINDER_OF_AN_ITEM_IS_SPLIT]
)
def test_remainder_of_an_item_is_split(quirk: Quirk) -> None:
    """The hit ends inside of the item, and the chunk after it does too."""
    oracle = oracle_of(quirk, block_size=2, max_num_batched_tokens=4, **WHOLE)
    oracle.submit(request("A", "tcccct", max_tokens=1))
    for _ in range(3):
        step(oracle)
    oracle.submit(request("O", "ttt", max_tokens=2))
    again = request("A2", "tcccct")
    oracle.submit(replace(again, prompt_token_ids=(*again.prompt_token_ids[:2], 9, 9, 9, 9)))
    assert amounts(step(oracle)) == {"O": 3, "A2": 1}


@pytest.mark.parametrize(("quirk", "expected"), [(False, 5), (True, 3)])
def test_loaded_items_need_encoder_budget(quirk: bool, expected: int) -> None:
    quirks = [Quirk.LOADED_ITEMS_NEED_ENCODER_BUDGET] if quirk else []
    oracle = oracle_of(*quirks, encoder_compute_budget=3)
    oracle.offer("d")
    oracle.submit(request("A", "cccdd"))
    assert amounts(step(oracle)) == {"A": expected}


# An identifier stands for one content.


def test_an_identifier_in_use_is_rejected_with_another_size() -> None:
    """The size is known while a request or the cache has the item, until a reset of the cache."""
    oracle = oracle_of()
    oracle.submit(request("A", "cc", max_tokens=1))
    for event in ((), (step,)):
        for do in event:
            do(oracle)
        with pytest.raises(RejectedEvent, match="has 3 embeddings, and 2 elsewhere: an identifi"):
            oracle.submit(request("B", "ccc"))
    assert holders(oracle) == {"c": ()}
    oracle.submit(request("C", "tcc"))
    oracle.abort("C")
    oracle.reset_encoder()
    oracle.submit(request("B", "ccc"))
    assert made(step(oracle)) == {"B": (0,)}


def test_session_input_is_rejected_if_its_item_has_another_size() -> None:
    oracle = oracle_of()
    oracle.submit(request("A", "cc"))
    oracle.submit(replace(request("S", "t"), resumable=True))
    with pytest.raises(RejectedEvent, match="item 'c' at 0 has 1 embeddings, and 2 elsewhere"):
        oracle.update(replace(request("S", "c"), resumable=True))
    oracle.update(replace(request("S", "cc"), resumable=True))


def test_a_request_that_waits_for_a_fresh_state_holds_no_item() -> None:
    quirks = (
        Quirk.REQUESTS_WAIT_FOR_STATES_OF_THE_SAME_STEP,
        Quirk.ENCODER_CACHE_CHANGES_BEFORE_ADMISSION,
    )
    oracle = oracle_of(*quirks, groups=(recurrent(1),))
    oracle.submit(request("A", "c", max_tokens=1))
    oracle.submit(request("B", "t", max_tokens=1))
    oracle.submit(request("B2", "tc", max_tokens=1))
    assert amounts(step(oracle)) == {"A": 1, "B": 1}
    assert holders(oracle) == {"c": ()}


# Quirks of 0.33.0.


def test_a_dropped_token_releases_no_item() -> None:
    ahead: dict[str, Any] = {"async_scheduling": True, "max_frames_in_flight": 2}
    quirks = (Quirk.ITEMS_HELD_UNTIL_THE_COMMIT, Quirk.RESET_DROPS_TOKENS)
    oracle = oracle_of(*quirks, **ahead)
    oracle.submit(request("A", "ct"))
    first = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    second = oracle.schedule()
    assert amounts(second) == {"A": 2}
    oracle.commit(first, {"A": [5]})
    assert holders(oracle) == {"c": ("A",)}
    oracle.commit(second, {"A": [5]})
    assert holders(oracle) == {"c": ()}


def test_a_commit_releases_items_in_the_order_of_rows() -> None:
    """Both requests finish in the same commit."""
    ahead: dict[str, Any] = {"async_scheduling": True, "max_frames_in_flight": 2}
    oracle = oracle_of(Quirk.ITEMS_HELD_UNTIL_THE_COMMIT, **ahead)
    oracle.submit(request("B", "tcc", max_tokens=1))
    oracle.submit(request("C", "dt", max_tokens=1))
    oracle.commit(oracle.schedule(), {"B": [5], "C": [5]})
    assert ENCODER.of(oracle.state).freeable == ("c", "d")


@pytest.mark.parametrize(("quirk", "expected"), [(False, 2), (True, 3)])
def test_draft_head_reads_an_item_without_space(quirk: bool, expected: int) -> None:
    quirks = [Quirk.DRAFT_HEAD_READS_AN_ITEM_WITHOUT_SPACE] if quirk else []
    oracle = oracle_of(*quirks, encoder_compute_budget=2, **HEAD)
    oracle.submit(request("A", "cctdd"))
    assert amounts(step(oracle)) == {"A": expected}


@pytest.mark.parametrize("quirk", [False, True])
def test_request_without_encoder_space_is_skipped(quirk: bool) -> None:
    oracle = oracle_of(
        *([Quirk.REQUEST_WITHOUT_ENCODER_SPACE_IS_SKIPPED] if quirk else []),
        encoder_cache_size=3,
        long_prefill_token_threshold=2,
    )
    oracle.submit(request("A", "ccc"))
    oracle.submit(request("B", "dd"))
    oracle.submit(request("C", "t"))
    assert amounts(step(oracle)) == ({"A": 2, "C": 1} if quirk else {"A": 2})
    assert oracle.state.skipped_waiting == (("B",) if quirk else ())


@pytest.mark.parametrize("quirk", [False, True])
def test_chunk_is_cut_for_states_before_items(quirk: bool) -> None:
    """With the quirk, a chunk may end within a block of states; later items are not encoded."""
    quirks = [Quirk.CHUNK_IS_CUT_FOR_STATES_BEFORE_ITEMS] if quirk else []
    states: dict[str, Any] = {"block_size": 2, "groups": (recurrent(2),)}
    oracle = oracle_of(*quirks, encoder_compute_budget=2, **states)
    oracle.submit(request("A", "cctddttt"))
    found = [amounts(step(oracle))["A"] for _ in range(2)]
    assert found == ([3, 1] if quirk else [2, 6])
    oracle = oracle_of(*quirks, max_num_batched_tokens=3, **states)
    oracle.submit(request("A", "ttcct"))
    plan = step(oracle)
    assert amounts(plan) == {"A": 2}
    assert made(plan) == ({} if quirk else {"A": (0,)})
    assert get_broken_invariants(oracle.state) == ()
    oracle = oracle_of(*quirks, max_num_batched_tokens=3, **states)
    oracle.submit(request("A", "ttttcct"))
    plans = [step(oracle), step(oracle)]  # in the second, A is running
    assert [amounts(plan) for plan in plans] == [{"A": 2}] * 2
    assert [made(plan) for plan in plans] == ([{}, {}] if quirk else [{}, {"A": (0,)}])


def test_a_holder_without_a_row_does_not_inherit_an_item_of_a_victim() -> None:
    """One quirk of a release lets a request hold an item without a row.

    If the request that the item was planned for is preempted, the item is not encoded and has no
    entry.
    """
    planned = PlannedItem(("A", 0), "c", 2, is_external=False)
    entries = FrozenMap({"c": Entry(2, (("A", 0), ("B", 0)))})
    encoder = Encoder(8, entries=entries, budget=1, planned=(planned,))
    left = withdraw_items(encoder, ["C"])
    assert (left.planned, dict(left.entries), left.budget) == ((), {}, 3)
    shared = withdraw_items(encoder, ["C", "B"])
    assert [item.holder for item in shared.planned] == [("B", 0)]
