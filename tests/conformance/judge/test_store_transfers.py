"""Store transfers: the worker finds each plan that is wrong about a load, a save or a read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from play_support.play import CONFIG, A, B, request

from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.judge.worker.prefix_names import SPOILED
from blockstep.conformance.protocol.token_function import token_function
from blockstep.spec import vocabulary as v

STORE = replace(
    CONFIG,
    kv_connector=True,
    kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE,
    max_frames_in_flight=2,
)
D = request("D", 9, 9)
LATER, NOW = (v.KVLoad("A", ((1, 2),), 0, 4, is_async) for is_async in (True, False))
ROW_OF_A = v.NewRow(A, ((1, 2, 3),), 4, 1)
SHARING = v.Plan(1, new=(v.NewRow(B, ((1, 2, 4),), 4, 1),))
"""B has the first two blocks of A as a hit."""
TAKING = v.Plan(1, new=(v.NewRow(D, ((2,),), 0, 2),))
"""D gets the second block of A."""


def start_worker(plan: v.Plan) -> Worker:
    """Return a worker that knows three requests and has executed a plan."""
    worker = Worker(STORE, token_function(1, 50))
    for asked in (A, B, D):
        worker.observe(v.Submit(asked), v.Ack())
    assert worker.observe(v.Schedule(), plan) == []
    return worker


def list_findings(worker: Worker, plan: v.Plan) -> list[str]:
    return [found.sentence for found in worker.observe(v.Schedule(), plan)]


def report(worker: Worker, transfers: v.KVTransfers) -> None:
    assert worker.observe(v.TransfersReported(transfers), v.Outputs()) == []


def test_no_request_touches_a_block_while_it_is_loaded() -> None:
    plan = v.Plan(0, kv_loads=(LATER,))
    assert "block_under_way_is_not_read" in list_findings(start_worker(plan), SHARING)
    assert list_findings(start_worker(plan), TAKING) == ["block_in_transfer_is_not_written"]


def test_a_loaded_block_may_be_read_and_one_that_failed_to_load_may_not() -> None:
    worker = start_worker(v.Plan(0, kv_loads=(LATER,)))
    report(worker, v.KVTransfers(("A",)))
    assert list_findings(worker, SHARING) == []
    worker = start_worker(v.Plan(0, kv_loads=(LATER,)))
    report(worker, v.KVTransfers(("A",), invalid_block_ids=(2,)))
    assert list_findings(worker, SHARING) == ["attended_slot_was_loaded"]


def test_loaded_blocks_are_not_shared_before_the_commit_of_their_plan() -> None:
    plan = v.Plan(0, new=(ROW_OF_A,), kv_loads=(NOW,))
    assert set(list_findings(start_worker(plan), SHARING)) == {
        "block_is_shared_once_its_load_has_come"
    }
    worker = start_worker(plan)
    answer = v.Commit(0, worker.answer(0))
    worker.observe(answer, v.Outputs())
    assert list_findings(worker, SHARING) == []


def test_tokens_computed_on_a_failed_load_are_rolled_back() -> None:
    worker = start_worker(v.Plan(0, new=(ROW_OF_A,), kv_loads=(NOW,)))
    answer = v.Commit(0, worker.answer(0), v.KVTransfers(invalid_block_ids=(1,)))
    worker.observe(answer, v.Outputs())
    assert worker.views["A"].num_computed == 0
    assert worker.views["A"].tokens == list(A.prompt_token_ids)
    assert list_findings(worker, SHARING) == ["attended_slot_was_loaded"]


def test_a_failed_load_does_not_affect_a_later_request_with_the_same_id() -> None:
    worker = Worker(STORE, token_function(1, 50))
    worker.observe(v.Submit(replace(A, resumable=True)), v.Ack())
    assert list_findings(worker, v.Plan(0, kv_loads=(LATER,))) == []
    failed = v.KVTransfers(("A",), invalid_block_ids=(2,))
    ended = v.OutputRow("A", (), v.FinishReason.ERROR)
    worker.observe(v.TransfersReported(failed), v.Outputs((ended,)))
    worker.observe(v.Submit(A), v.Ack())
    assert list_findings(worker, v.Plan(1, finished_req_ids=("A",), kv_loads=(LATER,))) == []
    report(worker, v.KVTransfers(("A",)))
    assert list_findings(worker, v.Plan(2, new=(ROW_OF_A,))) == []


def test_a_failed_load_does_not_affect_a_later_load_of_the_same_block() -> None:
    """A is preempted and loaded again into the same block before the first load is reported as
    failed."""
    config, asked = replace(STORE, max_frames_in_flight=3), request("A", 1, 2, 3)
    load = v.KVLoad("A", ((1,),), 0, 2, is_async=False)
    row = v.CachedRow("A", True, ((1, 2),), (1, 2, 3), 2, 0, 1)
    for is_preempted in (True, False):
        worker = Worker(config, token_function(1, 50))
        worker.observe(v.Submit(asked), v.Ack())
        gone = ("A",) if is_preempted else ()
        plans = [v.Plan(0, new=(v.NewRow(asked, ((1, 2),), 2, 1),), kv_loads=(load,))]
        plans += [v.Plan(1, preempted_req_ids=gone)] if is_preempted else []
        plans += [v.Plan(2, cached=(row,), kv_loads=(load,))] if is_preempted else []
        for plan in plans:
            worker.observe(v.Schedule(), plan)
        invalid = v.KVTransfers(invalid_block_ids=(1,))
        worker.observe(v.Commit(0, worker.answer(0), invalid), v.Outputs())
        assert (SPOILED in worker.kv[1]) is not is_preempted


def test_blocks_that_the_store_reads_are_not_overwritten() -> None:
    worker = start_worker(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    worker.observe(v.KVOffer("A", delays_free=True), v.Ack())
    worker.observe(v.Commit(0, (v.RowTokens("A", worker.answer(0)[0].token_ids),)), v.Outputs())
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    ended = replace(TAKING, finished_req_ids=("A",))
    assert list_findings(worker, ended) == ["block_in_transfer_is_not_written"]
    worker = start_worker(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    worker.observe(v.KVOffer("A", delays_free=True), v.Ack())
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    report(worker, v.KVTransfers((), ("A",)))
    assert list_findings(worker, ended) == []


@pytest.mark.parametrize("is_session", [False, True])
def test_the_store_holds_no_blocks_of_a_waiting_request_with_a_reused_id(
    is_session: bool,
) -> None:
    """The first A keeps its blocks until a plan names it as finished; the second A has none yet."""
    first = replace(A, resumable=is_session)
    worker = Worker(STORE, token_function(1, 50))
    for asked in (first, D):
        worker.observe(v.Submit(asked), v.Ack())
    assert list_findings(worker, v.Plan(0, new=(v.NewRow(first, ((1, 2, 3),), 0, 5),))) == []
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    worker.observe(v.Submit(A), v.Ack())
    worker.observe(v.KVOffer("A", delays_free=True), v.Ack())
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    assert list_findings(worker, replace(TAKING, finished_req_ids=("A",))) == []


def test_a_load_goes_into_the_table_of_its_request() -> None:
    worker = Worker(STORE, token_function(1, 50))
    worker.observe(v.Submit(A), v.Ack())
    for wrong in (
        v.Plan(0, kv_loads=(NOW,)),
        v.Plan(1, kv_loads=(replace(LATER, block_ids=((1,),)),)),
        v.Plan(2, kv_loads=(replace(LATER, block_ids=((1, 99),)),)),
    ):
        assert list_findings(worker, wrong) == ["load_goes_into_the_table_of_its_request"]


def test_a_victim_is_saved_before_the_plan_overwrites_its_blocks() -> None:
    """D gets the block in the same plan, which is right: the store has read it before."""
    worker = start_worker(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    save = v.KVSave("A", ((1, 2),), 4)
    plan = replace(TAKING, preempted_req_ids=("A",), kv_saves=(save,))
    assert list_findings(worker, plan) == []
    again = replace(plan, frame_id=2, new=())
    assert list_findings(worker, again) == ["saved_request_is_preempted_by_the_plan"]


@pytest.mark.parametrize(
    "save",
    [
        v.KVSave("A", ((1, 3),), 4),
        v.KVSave("A", ((2, 1),), 4),
        v.KVSave("A", ((1,),), 4),
        v.KVSave("A", ((1, 2, 3),), 8),
    ],
    ids=["other blocks", "other order", "too few", "too many"],
)
def test_saved_blocks_hold_the_tokens_of_their_request(save: v.KVSave) -> None:
    worker = start_worker(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    plan = v.Plan(1, preempted_req_ids=("A",), kv_saves=(save,))
    assert list_findings(worker, plan) == ["saved_slot_holds_the_text_of_its_request"]


def test_only_a_request_that_the_plan_preempts_is_saved() -> None:
    worker = start_worker(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    plan = v.Plan(1, kv_saves=(v.KVSave("A", ((1, 2),), 4),))
    assert list_findings(worker, plan) == ["saved_request_is_preempted_by_the_plan"]


# With recurrent groups.

STATES = replace(
    STORE,
    groups=(
        v.KVGroup(v.GroupKind.FULL, 2),
        v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALIGN),
    ),
)
WITH_STATE = v.KVLoad("A", ((1, 2), (0, 3)), 0, 4, is_async=True)
ROW_BEHIND = v.NewRow(A, ((1, 2, 4), (0, 3, 5)), 4, 1)


def offer_states(num_offered: int, plan: v.Plan) -> tuple[Worker, list[str]]:
    """Return a worker and its findings about `plan`; the store offers `num_offered` tokens of A."""
    worker = Worker(STATES, token_function(1, 50))
    worker.observe(v.Submit(A), v.Ack())
    worker.observe(v.KVOffer("A", num_offered, is_async=True), v.Ack())
    return worker, list_findings(worker, plan)


def test_a_request_continues_from_the_state_that_was_loaded() -> None:
    worker, found = offer_states(4, v.Plan(0, kv_loads=(WITH_STATE,)))
    assert found == []
    worker.observe(v.KVOffer("A", 0), v.Ack())  # a late offer changes nothing
    report(worker, v.KVTransfers(("A",)))
    assert list_findings(worker, v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,))) == []


def test_a_load_that_ends_before_the_end_of_the_offer_has_no_state() -> None:
    worker, found = offer_states(5, v.Plan(0, kv_loads=(WITH_STATE,)))
    assert found == ["load_ends_where_the_store_has_the_states"]
    report(worker, v.KVTransfers(("A",)))
    plan = v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,))
    assert list_findings(worker, plan) == ["attended_slot_was_loaded"]


def test_a_state_that_failed_to_load_is_not_read() -> None:
    worker, _ = offer_states(4, v.Plan(0, kv_loads=(WITH_STATE,)))
    report(worker, v.KVTransfers(("A",), invalid_block_ids=(3,)))
    plan = v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,))
    assert list_findings(worker, plan) == ["attended_slot_was_loaded"]


def test_a_state_is_not_read_while_it_is_loaded() -> None:
    worker, _ = offer_states(4, v.Plan(0, kv_loads=(WITH_STATE,)))
    found = list_findings(worker, v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,)))
    assert "block_under_way_is_not_read" in found


def test_a_plan_does_not_zero_blocks_that_the_store_writes() -> None:
    plan = v.Plan(0, kv_loads=(WITH_STATE,), new_block_ids_to_zero=(1, 2))
    assert offer_states(4, plan)[1] == ["block_in_transfer_is_not_written"]


def test_a_load_may_go_into_a_block_that_held_a_state() -> None:
    """The store writes the whole block, so nothing of the state of D is left in it."""
    worker = Worker(STATES, token_function(1, 50))
    for asked in (A, D):
        worker.observe(v.Submit(asked), v.Ack())
    row = v.NewRow(D, ((4,), (2,)), 0, 2)
    assert list_findings(worker, v.Plan(0, new=(row,), new_block_ids_to_zero=(4,))) == []
    worker.observe(v.Commit(0, worker.answer(0)), v.Outputs())
    worker.observe(v.KVOffer("A", 3, is_async=True), v.Ack())
    load = replace(WITH_STATE, num_external_tokens=3, block_ids=((1, 2), (0, 3)))
    assert list_findings(worker, v.Plan(1, finished_req_ids=("D",), kv_loads=(load,))) == []


def test_only_the_last_state_block_is_held_for_the_store() -> None:
    worker = Worker(STATES, token_function(1, 50))
    worker.observe(v.Submit(A), v.Ack())
    worker.observe(v.KVOffer("A", 0, delays_free=True), v.Ack())
    row = v.NewRow(A, ((1, 2, 4), (0, 3, 5)), 0, 5)
    assert list_findings(worker, v.Plan(0, new=(row,), new_block_ids_to_zero=(1, 2, 4))) == []
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    assert worker.is_in_transfer(5)
    assert not worker.is_in_transfer(3)
