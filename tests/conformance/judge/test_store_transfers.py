"""Store transfers: what a worker says of a store, of plans that are wrong in one thing each."""

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
"""D is given the second of them."""


def hearing(plan: v.Plan) -> Worker:
    """A worker that knows three requests, and has run a plan."""
    worker = Worker(STORE, token_function(1, 50))
    for asked in (A, B, D):
        worker.observe(v.Submit(asked), v.Ack())
    assert worker.observe(v.Schedule(), plan) == []
    return worker


def list_complaints(worker: Worker, plan: v.Plan) -> list[str]:
    return [found.sentence for found in worker.observe(v.Schedule(), plan)]


def report(worker: Worker, transfers: v.KVTransfers) -> None:
    assert worker.observe(v.TransfersReported(transfers), v.Outputs()) == []


def test_no_request_touches_a_block_while_it_is_loaded() -> None:
    plan = v.Plan(0, kv_loads=(LATER,))
    assert "block_under_way_is_not_read" in list_complaints(hearing(plan), SHARING)
    assert list_complaints(hearing(plan), TAKING) == ["block_in_transfer_is_not_written"]


def test_what_has_come_is_read_and_what_has_not_is_not() -> None:
    worker = hearing(v.Plan(0, kv_loads=(LATER,)))
    report(worker, v.KVTransfers(("A",)))
    assert list_complaints(worker, SHARING) == []
    worker = hearing(v.Plan(0, kv_loads=(LATER,)))
    report(worker, v.KVTransfers(("A",), invalid_block_ids=(2,)))
    assert list_complaints(worker, SHARING) == ["attended_slot_was_loaded"]


def test_a_load_of_a_plan_in_flight_is_its_own_request_s() -> None:
    plan = v.Plan(0, new=(ROW_OF_A,), kv_loads=(NOW,))
    assert set(list_complaints(hearing(plan), SHARING)) == {
        "block_is_shared_once_its_load_has_come"
    }
    worker = hearing(plan)
    answer = v.Commit(0, worker.answer(0))
    worker.observe(answer, v.Outputs())
    assert list_complaints(worker, SHARING) == []


def test_what_was_computed_on_a_failed_load_is_spoiled() -> None:
    worker = hearing(v.Plan(0, new=(ROW_OF_A,), kv_loads=(NOW,)))
    answer = v.Commit(0, worker.answer(0), v.KVTransfers(invalid_block_ids=(1,)))
    worker.observe(answer, v.Outputs())
    assert worker.views["A"].num_computed == 0
    assert worker.views["A"].tokens == list(A.prompt_token_ids)
    assert list_complaints(worker, SHARING) == ["attended_slot_was_loaded"]


def test_a_failed_load_of_a_session_spoils_nothing_of_the_next_with_its_id() -> None:
    worker = Worker(STORE, token_function(1, 50))
    worker.observe(v.Submit(replace(A, resumable=True)), v.Ack())
    assert list_complaints(worker, v.Plan(0, kv_loads=(LATER,))) == []
    failed = v.KVTransfers(("A",), invalid_block_ids=(2,))
    ended = v.OutputRow("A", (), v.FinishReason.ERROR)
    worker.observe(v.TransfersReported(failed), v.Outputs((ended,)))
    worker.observe(v.Submit(A), v.Ack())
    assert list_complaints(worker, v.Plan(1, finished_req_ids=("A",), kv_loads=(LATER,))) == []
    report(worker, v.KVTransfers(("A",)))
    assert list_complaints(worker, v.Plan(2, new=(ROW_OF_A,))) == []


def test_a_failed_load_spoils_nothing_of_the_load_after_it() -> None:
    """A is preempted, and loaded again into the same block, before the first load turns out to have
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


def test_blocks_that_the_store_reads_stay_as_they_are() -> None:
    worker = hearing(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    worker.observe(v.KVOffer("A", delays_free=True), v.Ack())
    worker.observe(v.Commit(0, (v.RowTokens("A", worker.answer(0)[0].token_ids),)), v.Outputs())
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    ended = replace(TAKING, finished_req_ids=("A",))
    assert list_complaints(worker, ended) == ["block_in_transfer_is_not_written"]
    worker = hearing(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    worker.observe(v.KVOffer("A", delays_free=True), v.Ack())
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    report(worker, v.KVTransfers((), ("A",)))
    assert list_complaints(worker, ended) == []


@pytest.mark.parametrize("is_session", [False, True])
def test_the_store_reads_nothing_of_a_waiting_request_with_the_id_of_an_ended_one(
    is_session: bool,
) -> None:
    """What the first A holds here a plan takes back later; the second holds nothing yet."""
    first = replace(A, resumable=is_session)
    worker = Worker(STORE, token_function(1, 50))
    for asked in (first, D):
        worker.observe(v.Submit(asked), v.Ack())
    assert list_complaints(worker, v.Plan(0, new=(v.NewRow(first, ((1, 2, 3),), 0, 5),))) == []
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    worker.observe(v.Submit(A), v.Ack())
    worker.observe(v.KVOffer("A", delays_free=True), v.Ack())
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    assert list_complaints(worker, replace(TAKING, finished_req_ids=("A",))) == []


def test_a_load_goes_into_the_table_of_its_request() -> None:
    worker = Worker(STORE, token_function(1, 50))
    worker.observe(v.Submit(A), v.Ack())
    for wrong in (
        v.Plan(0, kv_loads=(NOW,)),
        v.Plan(1, kv_loads=(replace(LATER, block_ids=((1,),)),)),
        v.Plan(2, kv_loads=(replace(LATER, block_ids=((1, 99),)),)),
    ):
        assert list_complaints(worker, wrong) == ["load_goes_into_the_table_of_its_request"]


def test_what_is_saved_of_a_victim_is_read_before_the_plan_does_anything() -> None:
    """D takes the block in the same plan, and that is none of the store's business."""
    worker = hearing(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    save = v.KVSave("A", ((1, 2),), 4)
    plan = replace(TAKING, preempted_req_ids=("A",), kv_saves=(save,))
    assert list_complaints(worker, plan) == []
    again = replace(plan, frame_id=2, new=())
    assert list_complaints(worker, again) == ["saved_request_is_preempted_by_the_plan"]


@pytest.mark.parametrize(
    "save",
    [
        v.KVSave("A", ((1, 3),), 4),
        v.KVSave("A", ((2, 1),), 4),
        v.KVSave("A", ((1,),), 4),
        v.KVSave("A", ((1, 2, 3),), 8),
    ],
    ids=["of another place", "in another order", "too few", "more than there is"],
)
def test_what_is_saved_is_the_text_of_its_request(save: v.KVSave) -> None:
    worker = hearing(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    plan = v.Plan(1, preempted_req_ids=("A",), kv_saves=(save,))
    assert list_complaints(worker, plan) == ["saved_slot_holds_the_text_of_its_request"]


def test_a_preempted_request_is_saved() -> None:
    worker = hearing(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    plan = v.Plan(1, kv_saves=(v.KVSave("A", ((1, 2),), 4),))
    assert list_complaints(worker, plan) == ["saved_request_is_preempted_by_the_plan"]


# Beside recurrent groups.

STATES = replace(
    STORE,
    groups=(
        v.KVGroup(v.GroupKind.FULL, 2),
        v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALIGN),
    ),
)
WITH_STATE = v.KVLoad("A", ((1, 2), (0, 3)), 0, 4, is_async=True)
ROW_BEHIND = v.NewRow(A, ((1, 2, 4), (0, 3, 5)), 4, 1)


def knowing_states(num_offered: int, plan: v.Plan) -> tuple[Worker, list[str]]:
    """A worker beside a store that has the states behind so many tokens of A."""
    worker = Worker(STATES, token_function(1, 50))
    worker.observe(v.Submit(A), v.Ack())
    worker.observe(v.KVOffer("A", num_offered, is_async=True), v.Ack())
    return worker, list_complaints(worker, plan)


def test_a_request_goes_on_from_the_state_that_was_loaded() -> None:
    worker, found = knowing_states(4, v.Plan(0, kv_loads=(WITH_STATE,)))
    assert found == []
    worker.observe(v.KVOffer("A", 0), v.Ack())  # it said so before the load began
    report(worker, v.KVTransfers(("A",)))
    assert list_complaints(worker, v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,))) == []


def test_a_load_that_ends_elsewhere_brings_no_state() -> None:
    worker, found = knowing_states(5, v.Plan(0, kv_loads=(WITH_STATE,)))
    assert found == ["load_ends_where_the_store_has_the_states"]
    report(worker, v.KVTransfers(("A",)))
    plan = v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,))
    assert list_complaints(worker, plan) == ["attended_slot_was_loaded"]


def test_a_state_that_could_not_be_loaded_is_spoiled() -> None:
    worker, _ = knowing_states(4, v.Plan(0, kv_loads=(WITH_STATE,)))
    report(worker, v.KVTransfers(("A",), invalid_block_ids=(3,)))
    plan = v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,))
    assert list_complaints(worker, plan) == ["attended_slot_was_loaded"]


def test_a_state_is_not_read_while_it_is_loaded() -> None:
    worker, _ = knowing_states(4, v.Plan(0, kv_loads=(WITH_STATE,)))
    found = list_complaints(worker, v.Plan(1, new=(ROW_BEHIND,), new_block_ids_to_zero=(4,)))
    assert "block_under_way_is_not_read" in found


def test_no_plan_has_blocks_zeroed_that_the_store_writes() -> None:
    plan = v.Plan(0, kv_loads=(WITH_STATE,), new_block_ids_to_zero=(1, 2))
    assert knowing_states(4, plan)[1] == ["block_in_transfer_is_not_written"]


def test_a_store_fills_whole_blocks_that_held_states() -> None:
    """So that nothing of another request's state is left behind the tokens that it loads."""
    worker = Worker(STATES, token_function(1, 50))
    for asked in (A, D):
        worker.observe(v.Submit(asked), v.Ack())
    row = v.NewRow(D, ((4,), (2,)), 0, 2)
    assert list_complaints(worker, v.Plan(0, new=(row,), new_block_ids_to_zero=(4,))) == []
    worker.observe(v.Commit(0, worker.answer(0)), v.Outputs())
    worker.observe(v.KVOffer("A", 3, is_async=True), v.Ack())
    load = replace(WITH_STATE, num_external_tokens=3, block_ids=((1, 2), (0, 3)))
    assert list_complaints(worker, v.Plan(1, finished_req_ids=("D",), kv_loads=(load,))) == []


def test_of_states_that_of_the_end_is_held_for_the_store() -> None:
    worker = Worker(STATES, token_function(1, 50))
    worker.observe(v.Submit(A), v.Ack())
    worker.observe(v.KVOffer("A", 0, delays_free=True), v.Ack())
    row = v.NewRow(A, ((1, 2, 4), (0, 3, 5)), 0, 5)
    assert list_complaints(worker, v.Plan(0, new=(row,), new_block_ids_to_zero=(1, 2, 4))) == []
    worker.observe(v.Abort(("A",)), v.Aborted(("A",)))
    assert worker.is_in_transfer(5)
    assert not worker.is_in_transfer(3)
