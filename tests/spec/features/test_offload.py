"""Swap-out: which blocks of a victim are saved to the store, and when nothing is saved."""

from __future__ import annotations

from typing import Any

import pytest
from groups_support import full, window

from blockstep.spec import Config, ConfigError, Oracle, Request
from blockstep.spec.features.offload import compute_break_even, compute_num_saved
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import STRICT, Profile, Quirk
from blockstep.spec.vocabulary import KVLoad, KVSave, KVTransfers, Plan, RequestId, Status

AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
UNFENCED = Profile("unfenced", frozenset({Quirk.BLOCKS_FREED_WHILE_FRAMES_WRITE}))
"""A victim may have a row in flight; without the quirk it waits for the answer instead."""


def build(profile: Profile = STRICT, **changes: Any) -> Oracle:
    fields: dict[str, Any] = {"num_blocks": 5, "block_size": 2, "max_model_len": 16}
    config = Config(**fields | {"kv_connector": True, "swap_min_tokens": 1} | changes)
    return Oracle(config, profile)


def submit(oracle: Oracle, name: str, num_tokens: int, max_tokens: int = 4, **more: Any) -> None:
    prompt = tuple(range(ord(name), ord(name) + num_tokens))
    oracle.submit(Request(name, prompt, max_tokens=max_tokens, **more))


def answer(oracle: Oracle, plan: Plan, *invalid: int) -> None:
    frame = next(f for f in oracle.state.frames if f.frame_id == plan.frame_id)
    sampled = {row.request_id: (9,) * row.samples for row in frame.rows}
    oracle.commit(plan, sampled, KVTransfers(invalid_block_ids=invalid))
    assert get_broken_invariants(oracle.state) == ()


def step(oracle: Oracle) -> Plan:
    plan = oracle.schedule()
    if plan.rows:
        answer(oracle, plan)
    return plan


def run_names(plan: Plan) -> list[RequestId]:
    return [row.request_id for row in plan.rows]


@pytest.mark.parametrize(
    ("computed", "known", "sizes", "least", "saved"),
    [
        (8, 9, (4,), 8, 8),
        (8, 9, (4,), 9, 0),
        (7, 9, (4,), 5, 0),  # the limit applies to the tokens that are saved
        (9, 7, (4,), 1, 4),  # unverified tokens are not saved
        (11, 12, (2, 4), 1, 8),
        (11, 12, (2, 4, 6), 1, 0),
        (23, 23, (2, 4, 6), 12, 12),
        (8, 8, (4,), 0, 0),
        (3, 3, (1,), 3, 3),
    ],
)
def test_only_tokens_in_full_blocks_of_all_groups_are_saved(
    computed: int, known: int, sizes: tuple[int, ...], least: int, saved: int
) -> None:
    assert compute_num_saved(computed, known, sizes, least) == saved


@pytest.mark.parametrize(
    ("setup", "moved", "computed", "least"),
    [
        (0, 22, 250, 1),  # figures of the seed: 11 us a token each way, 4000 tokens a second
        (10_000, 22, 250, 44),
        (0, 250, 250, 0),
        (5, 22, 23, 5),
        (6, 20, 25, 2),
        (6, 25, 20, 0),
    ],
)
def test_break_even_is_the_length_from_which_a_transfer_is_not_slower(
    setup: int, moved: int, computed: int, least: int
) -> None:
    assert compute_break_even(setup, moved, computed) == least
    paying = [n for n in range(1, 100) if setup + n * moved <= n * computed and moved < computed]
    assert paying == ([*range(least, 100)] if least else [])


@pytest.mark.parametrize(("least", "is_saved"), [(0, False), (4, True), (5, False)])
def test_a_preempted_request_is_saved_before_its_blocks_are_reused(
    least: int, is_saved: bool
) -> None:
    oracle = build(swap_min_tokens=least)
    submit(oracle, "A", 4)
    submit(oracle, "B", 4)
    assert step(oracle).kv_saves == ()
    plan = oracle.schedule()
    assert plan.preempted_req_ids == ("B",)
    assert plan.cached[0].new_block_ids == ((4,),), "it is written in the same step"
    assert plan.kv_saves == ((KVSave("B", ((3, 4),), 4),) if is_saved else ())


def test_saved_blocks_are_offered_and_loaded_like_others() -> None:
    oracle = build()
    submit(oracle, "A", 4, max_tokens=2)
    submit(oracle, "B", 4, max_tokens=2)
    step(oracle)
    (save,) = step(oracle).kv_saves
    assert oracle.state.requests["B"].num_computed_tokens == 0
    oracle.offer_kv("B", save.num_tokens)
    oracle.reset()
    plan = oracle.schedule()
    (row,) = plan.cached
    assert plan.kv_loads == (KVLoad("B", (row.new_block_ids[0][:2],), 0, 4),)
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (4, 1)


def test_a_victim_in_flight_is_saved_after_its_commit() -> None:
    oracle = build(block_size=1, num_blocks=8, **AHEAD)
    submit(oracle, "A", 3)
    submit(oracle, "B", 3)
    first = oracle.schedule()
    waiting = oracle.schedule()
    assert (waiting.kv_saves, waiting.preempted_req_ids) == ((), ())
    answer(oracle, first)
    answer(oracle, waiting)
    assert oracle.schedule().kv_saves == (KVSave("B", ((4, 5, 6),), 3),)


def test_a_victim_with_an_unconfirmed_load_is_not_saved() -> None:
    for is_answered in (False, True):
        oracle = build(UNFENCED, block_size=1, num_blocks=8, **AHEAD)
        submit(oracle, "A", 3)
        submit(oracle, "B", 3)
        oracle.offer_kv("B", 2)
        first = oracle.schedule()
        assert [load.request_id for load in first.kv_loads] == ["B"]
        if is_answered:
            answer(oracle, first)
        plan = oracle.schedule()
        assert plan.preempted_req_ids == ("B",)
        assert plan.kv_saves == ((KVSave("B", ((4, 5, 6),), 3),) if is_answered else ())


def test_blocks_that_a_window_skips_in_the_same_step_are_not_saved() -> None:
    oracle = build(num_blocks=9, groups=(full(2), window(2, 3)), max_num_batched_tokens=8)
    submit(oracle, "A", 3, max_tokens=2)
    submit(oracle, "B", 4, max_tokens=2)
    step(oracle)
    before = oracle.state.requests["B"]
    assert before.block_tables == ((5, 6), (7, 8))
    plan = oracle.schedule()
    assert plan.kv_saves == (KVSave("B", ((5, 6), (0, 8)), 4),)
    assert 7 in oracle.state.pool.free_queue


def test_requests_preempted_by_a_reset_are_not_saved() -> None:
    oracle = build()
    submit(oracle, "A", 4)
    step(oracle)
    assert oracle.reset(reset_running_requests=True)
    assert oracle.state.requests["A"].status is Status.PREEMPTED
    assert step(oracle).kv_saves == ()


def test_an_idle_session_is_not_saved_when_its_blocks_are_reclaimed() -> None:
    oracle = build(num_blocks=4, scheduler_reserve_full_isl=False)
    submit(oracle, "A", 4, max_tokens=1, resumable=True)
    step(oracle)
    assert oracle.state.requests["A"].status is Status.WAITING_FOR_STREAMING_REQ
    submit(oracle, "B", 4, max_tokens=2)
    plan = step(oracle)
    assert run_names(plan) == ["B"]
    assert oracle.state.requests["A"].block_tables == ((),)
    assert (plan.preempted_req_ids, plan.kv_saves) == ((), ())


def test_swap_out_without_a_store_is_rejected() -> None:
    with pytest.raises(ConfigError, match="swap_min_tokens"):
        build(kv_connector=False)
