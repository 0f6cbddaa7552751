"""Transfers: what a load starts behind, who is parked, what a failure takes back, and who holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from groups_support import ALIGN, ALL, NONE, full, recurrent, window

from blockstep.spec import Config, Oracle, Outputs, Policy, RejectedEvent, Request, SpecMethod
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    FinishReason,
    HeldBlocks,
    KVLoad,
    KVLoadFailurePolicy,
    KVTransfers,
    MambaCacheMode,
    OutputRow,
    Plan,
    RejectCode,
    Stats,
    Status,
    TransfersReported,
    TransfersSnapshot,
    config_problems,
)

CONFIG = Config(num_blocks=12, block_size=2, max_model_len=16, kv_connector=True)
RECOMPUTE = {"kv_load_failure_policy": KVLoadFailurePolicy.RECOMPUTE}
AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
PARKED = Status.WAITING_FOR_REMOTE_KVS


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


def park(oracle: Oracle, name: str, num_tokens: int, num_offered: int, **more: Any) -> Plan:
    submit(oracle, name, num_tokens, **more)
    oracle.offer_kv(name, num_offered, is_async=True)
    plan = oracle.schedule()
    assert status(oracle, name) is PARKED
    return plan


# At once.


def test_a_load_at_once_is_computed_behind_and_findable_once_it_is_answered() -> None:
    oracle = build()
    submit(oracle, "A", 6)
    oracle.offer_kv("A", 20)
    plan = oracle.schedule()
    (row,) = plan.new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (5, 1)
    assert plan.kv_loads == (KVLoad("A", ((1, 2, 3),), 0, 5),)
    assert moving(oracle).unsettled == ("A",)
    assert oracle.peek(Request("B", (0, 1, 2, 3, 4, 5, 6))) == 0
    answer(oracle, plan)
    assert moving(oracle).unsettled == ()
    assert oracle.peek(Request("B", (0, 1, 2, 3, 4, 5, 6))) == 6
    assert oracle.snapshot().stats == Stats(
        prefix_cache_queries=6, external_prefix_cache_queries=6, external_prefix_cache_hits=5
    )


def test_what_is_loaded_begins_behind_the_hit() -> None:
    oracle = build()
    submit(oracle, "A", 4, max_tokens=1)
    step(oracle)
    submit(oracle, "B", 8)
    oracle.offer_kv("B", 6)
    (load,) = oracle.schedule().kv_loads
    assert (load.num_computed_tokens, load.num_external_tokens) == (4, 2)
    assert load.block_ids == ((1, 2, 3),)
    stats = oracle.snapshot().stats
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits) == (4 + 4, 2)


@pytest.mark.parametrize("num_tokens", [0, 4, None])
def test_an_offer_of_no_more_than_the_hit_is_none_and_who_must_wait_is_passed_over(
    num_tokens: int | None,
) -> None:
    oracle = build()
    submit(oracle, "A", 4, max_tokens=1)
    step(oracle)
    submit(oracle, "B", 8)
    oracle.offer_kv("B", num_tokens, is_async=True)
    before = oracle.snapshot().stats
    plan = oracle.schedule()
    assert plan.kv_loads == ()
    if num_tokens is None:
        assert oracle.state.skipped_waiting == ("B",)
        assert oracle.snapshot().stats == before
        return
    assert [row.num_computed_tokens for row in plan.new] == [4]


def test_who_may_not_read_the_cache_asks_no_store_either() -> None:
    oracle = build()
    submit(oracle, "A", 4, skip_reading_prefix_cache=True)
    oracle.offer_kv("A", None)
    plan = oracle.schedule()
    assert [row.num_computed_tokens for row in plan.new] == [0]
    assert oracle.snapshot().stats == Stats()


def test_a_request_goes_back_behind_what_was_loaded_and_rows_on_more_deliver_nothing() -> None:
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


def test_a_request_whose_load_failed_ends_by_an_error_where_the_policy_says_so() -> None:
    oracle = build()
    submit(oracle, "A", 6)
    oracle.offer_kv("A", 5)
    _, outputs = step(oracle, 3)
    assert outputs == Outputs((OutputRow("A", (), FinishReason.ERROR, num_cached_tokens=5),))
    assert oracle.num_free_blocks == 11
    assert oracle.peek(Request("B", (0, 1, 2, 3, 4, 5, 6))) == 0


def test_of_what_was_preempted_behind_a_failed_load_no_frame_delivers() -> None:
    """The frame of the load samples nothing; the one behind it would."""
    oracle = build(max_num_batched_tokens=4, **RECOMPUTE, **AHEAD)
    submit(oracle, "A", 10, max_tokens=3)
    oracle.offer_kv("A", 2)
    first, second = oracle.schedule(), oracle.schedule()
    assert [row.samples for frame in oracle.state.frames for row in frame.rows] == [False, True]
    assert oracle.reset(reset_running_requests=True)
    assert answer(oracle, first, first.kv_loads[0].block_ids[0][0]).rows == ()
    assert answer(oracle, second).rows == ()
    assert oracle.state.requests["A"].num_output_placeholders == 0


def test_a_later_load_is_not_taken_for_an_earlier_one_that_failed() -> None:
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


def test_what_became_of_one_stops_no_other_load_of_its_frame() -> None:
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


# Later.


def test_a_parked_one_takes_neither_tokens_nor_seat_and_comes_back_behind_its_load() -> None:
    oracle = build(max_num_seqs=1, max_num_batched_tokens=4)
    submit(oracle, "A", 6)
    submit(oracle, "B", 4, max_tokens=1)
    oracle.offer_kv("A", 20, is_async=True)
    plan, _ = step(oracle)
    assert plan.kv_loads == (KVLoad("A", ((1, 2, 3),), 0, 5, is_async=True),)
    assert [row.request_id for row in plan.rows] == ["B"]
    assert oracle.schedule().rows == ()
    oracle.report(["A", "A"])
    assert moving(oracle).received == ("A",)
    (row,) = oracle.schedule().new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (5, 1)
    shown = oracle.snapshot().request("A")
    assert shown is not None
    assert (shown.num_cached_tokens, shown.num_cached_blocks) == (5, (3,))


def test_one_that_comes_back_and_is_refused_is_parked_and_not_findable() -> None:
    oracle = build(num_blocks=6, max_frames_in_flight=2, scheduler_reserve_full_isl=False)
    oracle.submit(Request("R", (7,) * 5, max_tokens=2))
    step(oracle)
    park(oracle, "A", 6, 3, max_tokens=1)
    assert oracle.num_free_blocks == 0
    oracle.report(["A"])
    before = oracle.snapshot()
    assert oracle.schedule().rows == (), "R waits for its token"
    after = oracle.snapshot()
    assert (after.request("A"), after.cached) == (before.request("A"), before.cached)
    assert moving(oracle).received == ("A",)


def test_of_a_parked_one_that_failed_what_came_is_kept_or_it_ends_and_holds() -> None:
    oracle = build(**RECOMPUTE)
    park(oracle, "A", 8, 7)
    assert oracle.report(invalid_block_ids=[3, 2, 99]).rows == ()
    oracle.report(["A"])
    (row,) = oracle.schedule().new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (2, 6)
    oracle = build()
    park(oracle, "A", 8, 7)
    (ended,) = oracle.report(invalid_block_ids=[4]).rows
    assert ended.finish_reason is FinishReason.ERROR
    assert moving(oracle).held == (HeldBlocks("A", ((1, 2, 3, 4),), is_recving=True),)
    oracle.report(["A"])
    assert oracle.num_free_blocks == 11


def test_one_of_whose_load_nothing_came_asks_anew() -> None:
    oracle = build(**RECOMPUTE)
    park(oracle, "A", 8, 7)
    oracle.report(["A"], invalid_block_ids=[1])
    (load,) = oracle.schedule().kv_loads
    assert load.is_async
    assert moving(oracle).received == ()
    oracle.report(["A"], invalid_block_ids=list(load.block_ids[0][:1]))
    oracle.offer_kv("A", 0)
    assert [row.num_computed_tokens for row in oracle.schedule().new] == [0]


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_who_has_come_goes_on_behind_a_head_that_does_not_fit(policy: Policy) -> None:
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


def test_of_those_who_have_come_behind_a_head_the_first_goes_on_first() -> None:
    oracle = build(num_blocks=9, max_num_seqs=2)
    submit(oracle, "R", 2, max_tokens=8)
    submit(oracle, "H", 12, max_tokens=1)
    oracle.offer_kv("H", None)
    for name in ("Z", "A"):
        submit(oracle, name, 4, max_tokens=1)
        oracle.offer_kv(name, 3, is_async=True)
    step(oracle)
    assert oracle.state.skipped_waiting == ("H", "Z", "A")
    oracle.offer_kv("H", 0)
    oracle.report(["Z", "A"])
    assert [row.request_id for row in oracle.schedule().new] == ["Z"]
    assert [*oracle.state.skipped_waiting] == ["H", "A"]


def test_loads_that_have_come_give_their_blocks_to_the_first_in_line() -> None:
    """Each lacks what the other holds, and nobody runs."""
    oracle = build(num_blocks=5, scheduler_reserve_full_isl=False)
    submit(oracle, "A", 7, max_tokens=1)
    submit(oracle, "B", 6, max_tokens=1)
    oracle.offer_kv("A", 4, is_async=True)
    oracle.offer_kv("B", 4, is_async=True)
    oracle.schedule()
    assert oracle.num_free_blocks == 0
    oracle.report(["A"])
    assert oracle.schedule().rows == (), "what is under way cannot give"
    oracle.report(["B"])
    assert [row.request_id for row in oracle.schedule().new] == ["A"]
    assert (status(oracle, "B"), moving(oracle).received) == (Status.WAITING, ())


def test_behind_a_head_that_does_not_fit_nobody_is_parked_without_budget() -> None:
    tight: dict[str, Any] = {"num_blocks": 11, "max_num_batched_tokens": 2, "max_model_len": 32}
    oracle = build(**tight, **RECOMPUTE)
    for name, num_tokens in (("H", 7), ("B", 5), ("C", 4)):
        submit(oracle, name, num_tokens, 3, cache_salt=name)
        oracle.offer_kv(name, 4, is_async=True)
    oracle.schedule()
    submit(oracle, "R", 5, 4, cache_salt="R")
    oracle.offer_kv("R", 0)
    for _ in range(3):
        step(oracle)
    failed = oracle.state.requests["C"].block_tables[0]
    oracle.report(["B", "C", "H"], invalid_block_ids=failed)
    plan = oracle.schedule()
    assert [row.request_id for row in plan.new] == ["B"]
    assert plan.kv_loads == ()
    assert moving(oracle).received == ("C", "H")


def test_one_that_asks_anew_and_does_not_fit_keeps_its_blocks() -> None:
    oracle = build(num_blocks=9, max_model_len=32, scheduler_reserve_full_isl=False, **RECOMPUTE)
    submit(oracle, "A", 13, 3)
    step(oracle, token=7)
    oracle.reset(reset_running_requests=True)
    oracle.offer_kv("A", 6, is_async=True)
    oracle.schedule()
    submit(oracle, "B", 3, 3, cache_salt="B")
    plan = oracle.schedule()
    failed = oracle.state.requests["A"].block_tables[0]
    oracle.report(["A"], invalid_block_ids=failed)
    assert oracle.state.requests["A"].num_computed_tokens == 0
    answer(oracle, plan)
    oracle.offer_kv("A", 0)
    before = oracle.snapshot()
    plan = oracle.schedule()
    after = oracle.snapshot()  # it needs 7 blocks, and would have 6
    assert after.request("A") == before.request("A")
    assert (after.free_queue, after.ref_counts) == (before.free_queue, before.ref_counts)
    assert moving(oracle).received == ("A",)
    answer(oracle, plan)
    oracle.abort("B")
    assert oracle.schedule().cached[0].resumed


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("policy", KVLoadFailurePolicy)
def test_one_preempted_since_its_load_fails_only_if_the_row_would_sample(
    policy: KVLoadFailurePolicy, samples: bool
) -> None:
    budget = 5 if samples else 3
    oracle = build(
        **AHEAD, max_num_batched_tokens=budget, kv_load_failure_policy=policy, max_model_len=32
    )
    submit(oracle, "A", 9)
    oracle.offer_kv("A", 4)
    plan = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    oracle.offer_kv("A", 6)
    outputs = answer(oracle, plan, 1)
    if samples and policy is KVLoadFailurePolicy.FAIL:
        assert outputs.rows == (OutputRow("A", (), FinishReason.ERROR, None, 4),)
        return
    assert outputs.rows == ()
    request = oracle.state.requests["A"]
    assert (request.status, request.output_token_ids) == (Status.PREEMPTED, ())
    assert request.num_output_placeholders == 0
    assert oracle.schedule().kv_loads[0].num_external_tokens == 6


def test_a_session_whose_load_has_come_is_new_to_the_worker() -> None:
    oracle = build(num_blocks=17, max_model_len=32)
    submit(oracle, "A", 8, 1, resumable=True)
    plan = oracle.schedule()
    oracle.reset(reset_running_requests=True)
    answer(oracle, plan)
    oracle.update(Request("A", (1, 2, 3), max_tokens=1, resumable=True))
    oracle.offer_kv("A", 6, is_async=True)
    oracle.schedule()
    assert status(oracle) is PARKED
    oracle.report(["A"])
    (row,) = oracle.schedule().new
    assert (row.request.prompt_token_ids[-3:], row.num_computed_tokens) == ((1, 2, 3), 6)


# Ends, and resets.


def test_blocks_of_an_ended_one_are_held_until_the_last_of_its_transfers_has_ended() -> None:
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


def test_reports_of_nobody_change_nothing() -> None:
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


def test_a_reset_waits_for_transfers_and_takes_what_has_come() -> None:
    oracle = build()
    park(oracle, "A", 6, 4)
    before = oracle.state
    assert not oracle.reset(reset_running_requests=True, reset_connector=True)
    assert oracle.state == before
    oracle.report(["A"])
    assert not oracle.reset()
    assert oracle.reset(reset_running_requests=True, reset_connector=True)
    assert (oracle.num_free_blocks, moving(oracle)) == (11, TransfersSnapshot())
    assert status(oracle) is Status.WAITING


# Groups.


def test_a_window_holds_nothing_of_a_load_that_it_does_not_attend_to() -> None:
    oracle = build(groups=(full(2), window(2, 3)), **RECOMPUTE)
    submit(oracle, "A", 8)
    oracle.offer_kv("A", 7)
    plan = oracle.schedule()
    (load,) = plan.kv_loads
    assert load.block_ids == ((1, 2, 3, 4), (0, 0, 5, 6))
    answer(oracle, plan, 0)
    assert moving(oracle).unsettled == ()
    assert status(oracle) is Status.RUNNING, "a null block is nobody's"
    oracle = build(groups=(full(2), window(2, 3)), **RECOMPUTE)
    submit(oracle, "A", 8)
    oracle.offer_kv("A", 7)
    plan = oracle.schedule()
    answer(oracle, plan, 6)
    assert (status(oracle), oracle.num_free_blocks) == (Status.PREEMPTED, 11)
    assert oracle.state.stats.preemptions == 1
    (row,) = oracle.schedule().cached
    assert (row.resumed, row.all_token_ids) == (True, tuple(range(8)))


def test_who_begins_anew_for_a_window_is_the_only_one_that_the_worker_forgets() -> None:
    oracle = build(num_blocks=40, groups=(full(2), window(2, 3)), **RECOMPUTE)
    for name in "ABC":
        submit(oracle, name, 8)
    oracle.offer_kv("B", 7)
    plan = oracle.schedule()
    answer(oracle, plan, plan.kv_loads[0].block_ids[0][-1])
    assert oracle.snapshot().prev_scheduled_req_ids == ("A", "C")


def test_no_group_counts_on_what_another_lacks() -> None:
    oracle = build(groups=(full(2), full(4)), **RECOMPUTE)
    park(oracle, "A", 12, 11, max_tokens=1)
    (table, larger) = oracle.state.requests["A"].block_tables
    oracle.report(["A"], invalid_block_ids=[table[5], larger[1]])
    assert oracle.state.requests["A"].num_computed_tokens == 4


# Beside recurrent groups.


@pytest.mark.parametrize("mode", [ALIGN, ALL])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_offer_is_loaded_up_to_its_end_where_the_states_are(
    mode: MambaCacheMode, is_async: bool
) -> None:
    oracle = build(groups=(full(2), recurrent(2, mode)), max_model_len=32)
    submit(oracle, "A", 8)
    oracle.offer_kv("A", 7, is_async=is_async)
    (load,) = oracle.schedule().kv_loads
    assert (load.num_external_tokens, load.is_async) == (7, is_async)
    assert load.block_ids == ((1, 2, 3, 4), (0, 0, 0, 5))


@pytest.mark.parametrize("num_offered", [8, 100])
def test_an_offer_behind_the_last_but_one_token_has_no_state_to_go_on_from(
    num_offered: int,
) -> None:
    oracle = build(groups=(full(2), recurrent(2)), max_model_len=32)
    submit(oracle, "A", 8)
    oracle.offer_kv("A", num_offered)
    plan = oracle.schedule()
    assert plan.kv_loads == ()
    assert [row.num_computed_tokens for row in plan.new] == [0]
    whole = build(groups=(full(2), full(2)))
    submit(whole, "A", 8)
    whole.offer_kv("A", num_offered)
    assert whole.schedule().kv_loads[0].num_external_tokens == 7


def test_an_offer_of_what_was_the_last_token_is_loaded_once_another_is_known() -> None:
    oracle = build(
        groups=(full(2), recurrent(8, NONE)), max_model_len=8, enable_prefix_caching=False
    )
    submit(oracle, "A", 3, max_tokens=4)
    oracle.offer_kv("A", 3)
    plan, _ = step(oracle)
    assert plan.kv_loads == ()
    assert oracle.reset(reset_running_requests=True)
    (load,) = oracle.schedule().kv_loads
    assert load.num_external_tokens == 3


def test_one_state_is_loaded_where_none_is_cached() -> None:
    oracle = build(
        groups=(full(2), recurrent(16, NONE)), enable_prefix_caching=False, num_blocks=12
    )
    park(oracle, "A", 8, 7)
    assert oracle.state.requests["A"].block_tables == ((1, 2, 3, 4), (5,))
    oracle.report(["A"])
    (row,) = oracle.schedule().new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (7, 1)


def test_a_state_that_is_loaded_has_a_block_beside_that_of_the_chunk() -> None:
    """Upstream counts one block where it takes two (#46892)."""
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


def test_states_of_drafts_stand_behind_the_one_that_is_loaded() -> None:
    oracle = build(
        groups=(full(4), recurrent(4, ALIGN, 1)), block_size=4, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1, max_model_len=32,
    )  # fmt: skip
    park(oracle, "A", 9, 5)
    assert oracle.state.requests["A"].block_tables == ((1, 2), (0, 3, 4))
    oracle.report(["A"])
    (row,) = oracle.schedule().new
    assert row.block_ids == ((1, 2), (0, 3, 4))
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (5, 3)


def test_a_loaded_state_is_found_once_it_has_come_if_it_ends_a_block() -> None:
    oracle = build(groups=(full(2), recurrent(2)), num_blocks=40, max_model_len=32)
    park(oracle, "A", 8, 4)
    submit(oracle, "B", 5)
    plan, _ = step(oracle)
    assert [(row.request_id, row.num_computed_tokens) for row in plan.new] == [("B", 0)]
    oracle.abort("B")
    assert oracle.reset() is False
    oracle.report(["A"])
    submit(oracle, "C", 5)
    plan, _ = step(oracle)
    assert [(row.request_id, row.num_computed_tokens) for row in plan.new] == [("A", 4), ("C", 4)]


@pytest.mark.parametrize("policy", KVLoadFailurePolicy)
def test_an_invalid_block_that_is_spare_fails_no_load(policy: KVLoadFailurePolicy) -> None:
    """It is for the state of a draft, so no load writes it; another load may have failed in it."""
    oracle = build(
        groups=(full(2), recurrent(2, ALL, 2)), num_blocks=20, max_model_len=32,
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=2, kv_load_failure_policy=policy,
    )  # fmt: skip
    plan = park(oracle, "A", 8, 5)
    *_, spare = oracle.state.requests["A"].block_tables[1]
    assert spare not in plan.kv_loads[0].block_ids[1]
    assert oracle.report(invalid_block_ids=[spare]).rows == ()
    assert oracle.state.requests["A"].num_computed_tokens == 5


def test_nothing_is_left_of_a_failed_load_beside_states() -> None:
    oracle = build(groups=(full(2), recurrent(2)), max_model_len=32, **RECOMPUTE)
    park(oracle, "A", 8, 7)
    last = oracle.state.requests["A"].block_tables[0][-1]
    oracle.report(["A"], invalid_block_ids=[last])
    assert oracle.state.requests["A"].num_computed_tokens == 0


def test_blocks_of_a_later_load_are_not_zeroed() -> None:
    oracle = build(groups=(full(2), recurrent(2)), max_model_len=32)
    plan = park(oracle, "A", 8, 7)
    assert plan.new_block_ids_to_zero == ()
    now = build(groups=(full(2), recurrent(2)), max_model_len=32)
    submit(now, "A", 8)
    now.offer_kv("A", 6)
    assert now.schedule().new_block_ids_to_zero == (1, 2, 3, 4)


def test_a_request_that_ends_holds_its_state_until_the_store_has_read_it() -> None:
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
