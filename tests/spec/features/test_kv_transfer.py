"""Transfers: synchronous and asynchronous loads, failed loads, holds, and recurrent groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from groups_support import ALIGN, ALL, NONE, full, recurrent, window

from blockstep.spec import Config, Oracle, Outputs, Policy, RejectedEvent, Request
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    FinishReason,
    HeldBlocks,
    KVLoadFailurePolicy,
    KVTransfers,
    MambaCacheMode,
    OutputRow,
    Plan,
    RejectCode,
    Status,
    TransfersReported,
    TransfersSnapshot,
    config_problems,
)

RECOMPUTE = {"kv_load_failure_policy": KVLoadFailurePolicy.RECOMPUTE}
AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
LOADING = Status.WAITING_FOR_REMOTE_KVS


def build(**changes: Any) -> Oracle:
    fields: dict[str, Any] = {"num_blocks": 12, "block_size": 2, "max_model_len": 16}
    return Oracle(Config(**fields | {"kv_connector": True} | changes))


def submit(oracle: Oracle, name: str, num_tokens: int, max_tokens: int = 2, **more: Any) -> None:
    oracle.submit(Request(name, tuple(range(num_tokens)), max_tokens=max_tokens, **more))


def step(oracle: Oracle, *invalid: int, token: int = 9) -> tuple[Plan, Outputs | None]:
    plan = oracle.schedule()
    return plan, answer(oracle, plan, *invalid, token=token) if plan.rows else None


def answer(oracle: Oracle, plan: Plan, *invalid: int, token: int = 9) -> Outputs:
    frame = next(f for f in oracle.state.frames if f.frame_id == plan.frame_id)
    sampled = {row.request_id: (token,) * row.samples for row in frame.rows}
    outputs = oracle.commit(plan, sampled, KVTransfers(invalid_block_ids=invalid))
    assert get_broken_invariants(oracle.state) == ()
    return outputs


def moving(oracle: Oracle) -> TransfersSnapshot:
    shown = oracle.snapshot().transfers
    assert shown is not None
    return shown


def status(oracle: Oracle, name: str = "A") -> Status:
    return oracle.state.requests[name].status


def begin_load(oracle: Oracle, name: str, num_tokens: int, num_offered: int, **more: Any) -> Plan:
    submit(oracle, name, num_tokens, **more)
    oracle.offer_kv(name, num_offered, is_async=True)
    plan = oracle.schedule()
    assert status(oracle, name) is LOADING
    return plan


# Synchronous loads.


def test_a_failed_load_rolls_back_and_later_frames_deliver_no_token() -> None:
    oracle = build(**RECOMPUTE, **AHEAD)
    submit(oracle, "A", 6, max_tokens=4)
    oracle.offer_kv("A", 5)
    first, second = oracle.schedule(), oracle.schedule()
    assert answer(oracle, first, 2).rows == ()
    shown = oracle.snapshot().request("A")
    assert shown is not None
    assert (shown.num_computed_tokens, shown.num_output_placeholders) == (2, 0)
    assert shown.num_cached_blocks == (1,)
    assert answer(oracle, second).rows == ()
    (row,) = oracle.schedule().cached
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (2, 4)


def test_a_failed_load_finishes_the_request_with_the_fail_policy() -> None:
    oracle = build()
    submit(oracle, "A", 6)
    oracle.offer_kv("A", 5)
    _, outputs = step(oracle, 3)
    assert outputs == Outputs((OutputRow("A", (), FinishReason.ERROR, num_cached_tokens=5),))
    assert oracle.num_free_blocks == 11
    assert oracle.peek(Request("B", (0, 1, 2, 3, 4, 5, 6))) == 0


def test_no_frame_delivers_a_token_after_preemption_and_a_failed_load() -> None:
    """The frame with the load samples nothing; the next frame would sample."""
    oracle = build(max_num_batched_tokens=4, **RECOMPUTE, **AHEAD)
    submit(oracle, "A", 10, max_tokens=3)
    oracle.offer_kv("A", 2)
    first, second = oracle.schedule(), oracle.schedule()
    assert [row.samples for frame in oracle.state.frames for row in frame.rows] == [False, True]
    assert oracle.reset(reset_running_requests=True)
    assert answer(oracle, first, first.kv_loads[0].block_ids[0][0]).rows == ()
    assert answer(oracle, second).rows == ()
    assert oracle.state.requests["A"].num_output_placeholders == 0


def test_a_failed_load_does_not_fail_a_later_load_of_the_request() -> None:
    oracle = build(max_num_batched_tokens=4, max_frames_in_flight=2, **RECOMPUTE)
    submit(oracle, "A", 10)
    oracle.offer_kv("A", 2)
    first = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    second = oracle.schedule()
    assert [load.request_id for load in second.kv_loads] == ["A"]
    computed = oracle.state.requests["A"].num_computed_tokens
    answer(oracle, first, first.kv_loads[0].block_ids[0][0])
    assert oracle.state.requests["A"].num_computed_tokens == computed
    assert moving(oracle).unsettled == ("A",)
    answer(oracle, second)
    assert moving(oracle).unsettled == ()


def test_an_abort_or_a_failure_does_not_affect_other_loads_of_the_frame() -> None:
    oracle = build(**RECOMPUTE)
    for name in "AB":
        submit(oracle, name, 6)
        oracle.offer_kv(name, 5)
    plan = oracle.schedule()
    oracle.abort("A")
    answer(oracle, plan)
    assert moving(oracle).unsettled == ()
    oracle = build(max_frames_in_flight=2)
    for name in "AB":
        submit(oracle, name, 6)
        oracle.offer_kv(name, 5)
    plan = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    outputs = answer(oracle, plan, plan.kv_loads[1].block_ids[0][0])
    assert [(row.request_id, row.finish_reason) for row in outputs.rows] == [
        ("A", None),
        ("B", FinishReason.ERROR),
    ]


# Asynchronous loads.


def test_a_request_is_offered_kv_again_after_a_failed_load() -> None:
    oracle = build(**RECOMPUTE)
    begin_load(oracle, "A", 8, 7)
    oracle.report(["A"], invalid_block_ids=[1])
    (load,) = oracle.schedule().kv_loads
    assert load.is_async
    assert moving(oracle).received == ()
    oracle.report(["A"], invalid_block_ids=list(load.block_ids[0][:1]))
    oracle.offer_kv("A", 0)
    assert [row.num_computed_tokens for row in oracle.schedule().new] == [0]


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_a_loaded_request_is_admitted_past_a_head_that_does_not_fit(policy: Policy) -> None:
    oracle = build(num_blocks=8, policy=policy)
    submit(oracle, "R", 2, max_tokens=8)
    submit(oracle, "H", 12, max_tokens=1, priority=1)
    submit(oracle, "A", 4, max_tokens=1, priority=2)
    oracle.offer_kv("H", None)
    oracle.offer_kv("A", 3, is_async=True)
    step(oracle)
    assert oracle.state.skipped_waiting == ("H", "A")
    oracle.offer_kv("H", 0)
    assert step(oracle)[0].new == ()
    oracle.report(["A"])
    assert [row.request_id for row in oracle.schedule().new] == ["A"]
    assert [*oracle.state.skipped_waiting] == ["H"]


def test_blocks_of_a_confirmed_load_are_reclaimed_for_the_queue_head() -> None:
    """Each request lacks the blocks that the other holds, and no request runs."""
    oracle = build(num_blocks=5, scheduler_reserve_full_isl=False)
    submit(oracle, "A", 7, max_tokens=1)
    submit(oracle, "B", 6, max_tokens=1)
    oracle.offer_kv("A", 4, is_async=True)
    oracle.offer_kv("B", 4, is_async=True)
    oracle.schedule()
    assert oracle.num_free_blocks == 0
    oracle.report(["A"])
    assert oracle.schedule().rows == (), "blocks of an unconfirmed load are not reclaimed"
    oracle.report(["B"])
    assert [row.request_id for row in oracle.schedule().new] == ["A"]
    assert (status(oracle, "B"), moving(oracle).received) == (Status.WAITING, ())


def test_a_session_is_sent_as_a_new_row_after_its_load() -> None:
    oracle = build(num_blocks=17, max_model_len=32)
    submit(oracle, "A", 8, 1, resumable=True)
    plan = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    answer(oracle, plan)
    oracle.update(Request("A", (1, 2, 3), max_tokens=1, resumable=True))
    oracle.offer_kv("A", 6, is_async=True)
    oracle.schedule()
    assert status(oracle) is LOADING
    oracle.report(["A"])
    (row,) = oracle.schedule().new
    assert (row.request.prompt_token_ids[-3:], row.num_computed_tokens) == ((1, 2, 3), 6)


# Aborts and resets.


def test_blocks_of_an_aborted_request_are_held_until_its_last_transfer_ends() -> None:
    oracle = build()
    submit(oracle, "A", 6)
    oracle.offer_kv("A", 4, is_async=True, delays_free=True)
    oracle.schedule()
    oracle.abort("A")
    assert moving(oracle).held == (HeldBlocks("A", ((1, 2),), is_recving=True, is_sending=True),)
    with pytest.raises(RejectedEvent) as refused:
        submit(oracle, "A", 6)
    assert refused.value.rejected.code is RejectCode.REQUEST_IN_FLIGHT
    oracle.report(finished_sending=["A", "A"])
    assert oracle.num_free_blocks == 9
    oracle.report(["A"])
    assert (oracle.num_free_blocks, moving(oracle)) == (11, TransfersSnapshot())


def test_transfer_reports_of_unknown_requests_change_nothing() -> None:
    oracle = build()
    submit(oracle, "A", 4)
    step(oracle)
    before = oracle.state
    oracle.report(["A", "X"], ["A", "X"], [1, 2, 77])
    oracle.offer_kv("X", 3)
    assert oracle.state == before
    plain = Oracle(Config(num_blocks=12, block_size=2, max_model_len=16))
    submit(plain, "A", 4)
    before = plain.state
    plain.offer_kv("A", 3)
    assert plain.apply(TransfersReported(KVTransfers(("A",), ("A",), (1,)))) == Outputs()
    assert plain.state == before
    assert not plain.reset(reset_connector=True)
    assert plain.snapshot().transfers is None


def test_a_reset_fails_during_a_load_and_takes_blocks_of_a_confirmed_one() -> None:
    oracle = build()
    begin_load(oracle, "A", 6, 4)
    before = oracle.state
    assert not oracle.reset(reset_running_requests=True, reset_connector=True)
    assert oracle.state == before
    oracle.report(["A"])
    assert not oracle.reset()
    assert oracle.reset(reset_running_requests=True, reset_connector=True)
    assert (oracle.num_free_blocks, moving(oracle)) == (11, TransfersSnapshot())
    assert status(oracle) is Status.WAITING


# Groups.


def test_only_a_request_rolled_back_to_0_leaves_the_previous_step() -> None:
    oracle = build(num_blocks=40, groups=(full(2), window(2, 3)), **RECOMPUTE)
    for name in "ABC":
        submit(oracle, name, 8)
    oracle.offer_kv("B", 7)
    plan = oracle.schedule()
    answer(oracle, plan, plan.kv_loads[0].block_ids[0][-1])
    assert oracle.snapshot().prev_scheduled_req_ids == ("A", "C")


# Recurrent groups.


@pytest.mark.parametrize("mode", [ALIGN, ALL])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_with_recurrent_groups_ends_where_the_offer_ends(
    mode: MambaCacheMode, is_async: bool
) -> None:
    oracle = build(groups=(full(2), recurrent(2, mode)), max_model_len=32)
    submit(oracle, "A", 8)
    oracle.offer_kv("A", 7, is_async=is_async)
    (load,) = oracle.schedule().kv_loads
    assert (load.num_external_tokens, load.is_async) == (7, is_async)
    assert load.block_ids == ((1, 2, 3, 4), (0, 0, 0, 5))


def test_one_state_is_loaded_without_prefix_caching() -> None:
    oracle = build(
        groups=(full(2), recurrent(16, NONE)), enable_prefix_caching=False, num_blocks=12
    )
    begin_load(oracle, "A", 8, 7)
    assert oracle.state.requests["A"].block_tables == ((1, 2, 3, 4), (5,))
    oracle.report(["A"])
    (row,) = oracle.schedule().new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (7, 1)


def test_a_loaded_state_and_the_state_of_the_chunk_take_one_block_each() -> None:
    """Upstream counts one block here (#46892)."""
    fields: dict[str, Any] = {"groups": (recurrent(2),), "scheduler_reserve_full_isl": False}
    oracle = build(num_blocks=3, max_model_len=16, **fields)
    submit(oracle, "A", 6)
    oracle.offer_kv("A", 2)
    (row,) = oracle.schedule().new
    assert (row.block_ids, oracle.num_free_blocks) == (((1, 0, 2),), 0)
    short = build(num_blocks=4, max_model_len=16, **fields)
    submit(short, "B", 1, max_tokens=2)
    submit(short, "C", 1, max_tokens=2)
    submit(short, "A", 6)
    short.offer_kv("A", 2)
    assert [row.request_id for row in short.schedule().new] == ["B", "C"]


def test_a_loaded_state_is_hit_after_its_load_is_confirmed() -> None:
    oracle = build(groups=(full(2), recurrent(2)), num_blocks=40, max_model_len=32)
    begin_load(oracle, "A", 8, 4)
    submit(oracle, "B", 5)
    plan, _ = step(oracle)
    assert [(row.request_id, row.num_computed_tokens) for row in plan.new] == [("B", 0)]
    oracle.abort("B")
    assert oracle.reset() is False
    oracle.report(["A"])
    submit(oracle, "C", 5)
    plan, _ = step(oracle)
    assert [(row.request_id, row.num_computed_tokens) for row in plan.new] == [("A", 4), ("C", 4)]


def test_the_state_of_a_finished_request_is_held_until_it_is_sent() -> None:
    oracle = build(groups=(full(2), recurrent(2)), max_model_len=32)
    submit(oracle, "A", 4, max_tokens=1)
    oracle.offer_kv("A", 0, delays_free=True)
    step(oracle)
    (held,) = moving(oracle).held
    assert held.block_tables[1][-1] != 0
    assert held.is_sending
    oracle.report(finished_sending=["A"])
    assert oracle.num_free_blocks == 11


def test_victims_with_states_are_not_saved() -> None:
    config = Config(9, 2, kv_connector=True, groups=(full(2), recurrent(2)))
    assert config_problems(config) == ()
    (problem,) = config_problems(replace(config, swap_min_tokens=2))
    assert problem.field == "swap_min_tokens"
