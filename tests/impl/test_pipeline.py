"""Several frames in flight, not asynchronous: a request waits for its own token, others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Drafts,
    DraftsTaken,
    FinishReason,
    NewRow,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    Reset,
    ResetDone,
    RowTokens,
    Schedule,
    SpecMethod,
    Status,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession, Session


def pipeline(either: OpenSession, **fields: Any) -> Session:
    sizes = {"num_blocks": 20, "block_size": 4, "max_model_len": 64, "max_frames_in_flight": 2}
    return either(**{**sizes, **fields})


def rows_of(plan: Plan) -> dict[str, int]:
    """Scheduled tokens by request."""
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


def test_a_request_waits_for_its_own_token_and_others_do_not(either: OpenSession) -> None:
    s = pipeline(either)
    s.submit("a", range(5))
    first = s.plan()
    s.submit("b", range(10, 13))
    second = s.plan()
    assert (rows_of(first), rows_of(second)) == ({"a": 5}, {"b": 3})
    assert s.apply(Schedule()) == Rejected(RejectCode.PIPELINE_FULL)
    assert s.request("a").num_output_placeholders == 0
    s.commit(first, a=(7,))
    third = s.plan()
    assert rows_of(third) == {"a": 1}
    s.commit(second, b=(8,))
    assert rows_of(s.plan()) == {"b": 1}
    assert s.request("a").num_computed_tokens == 6


def test_chunks_of_a_prompt_run_in_frames_one_behind_the_other(either: OpenSession) -> None:
    s = pipeline(either, max_num_batched_tokens=4)
    s.submit("a", range(7))
    first, second = s.plan(), s.plan()
    assert (rows_of(first), rows_of(second)) == ({"a": 4}, {"a": 3})
    assert second.cached[0].num_computed_tokens == 4
    assert len(s.state().cached) == 1, "full blocks are published by plans"
    s.commit(first)
    assert s.plan() == Plan(2), "it samples in the second frame"
    s.commit(second, a=(9,))
    third = s.plan()
    assert rows_of(third) == {"a": 1}
    s.commit(third, a=(9,))
    assert len(s.state().cached) == 2


def test_the_preempted_get_their_token_and_return_after_it(either: OpenSession) -> None:
    s = pipeline(
        either, num_blocks=4, policy=Policy.PRIORITY, max_num_batched_tokens=5,
        scheduler_reserve_full_isl=False, max_frames_in_flight=3,
    )  # fmt: skip
    s.submit("b", range(20, 24), priority=2, max_tokens=4)
    s.commit(s.plan(), b=(6,))
    s.submit("a", range(6), priority=0, max_tokens=4)
    first, second = s.plan(), s.plan()
    assert (rows_of(first), rows_of(second)) == ({"b": 1, "a": 4}, {"a": 2})
    assert second.preempted_req_ids == ("b",), "its block goes to the second chunk"
    assert s.request("b").status is Status.PREEMPTED
    assert s.plan() == Plan(3)
    assert s.state().skipped_waiting == ("b",)
    assert s.commit(first, b=(7,)).rows[0].new_token_ids == (7,)
    s.commit(second, a=(8,))
    s.apply(Abort(("a",)))
    (row,) = s.plan().cached
    assert (row.resumed, row.all_token_ids) == (True, (*range(20, 24), 6, 7))


def test_a_forced_reset_in_flight_loses_no_token(either: OpenSession) -> None:
    s = pipeline(either)
    s.submit("a", range(5), max_tokens=3)
    s.submit("b", range(10, 12))
    first = s.plan()
    assert s.apply(Reset(reset_running_requests=True)) == ResetDone(True)
    assert s.request("a").num_computed_tokens == 0
    s.submit("c", range(3))
    second = s.plan()
    assert rows_of(second) == {"c": 3}, "the preempted await their token, and others pass"
    assert s.state().skipped_waiting == ("a", "b")
    assert [row.new_token_ids for row in s.commit(first, a=(7,), b=(8,)).rows] == [(7,), (8,)]
    third = s.plan()
    assert rows_of(third) == {"a": 6, "b": 3}
    assert third.cached[0].all_token_ids == (*range(5), 7)
    assert [row.new_token_ids for row in s.commit(second, c=(9,)).rows] == [(9,)]
    assert [row.new_token_ids for row in s.commit(third, a=(1,), b=(2,)).rows] == [(1,), (2,)]
    assert s.request("a").output_token_ids == (7, 1)


def test_the_preempted_may_end_with_the_token_in_flight(either: OpenSession) -> None:
    s = pipeline(either)
    s.submit("a", range(5), max_tokens=1)
    first = s.plan()
    s.apply(Reset(reset_running_requests=True))
    assert s.plan() == Plan(1)
    assert s.commit(first, a=(7,)).rows[0].finish_reason is FinishReason.LENGTH
    assert s.plan() == Plan(2, finished_req_ids=("a",))
    assert s.state().requests == ()


def test_a_frame_with_a_chunk_holds_nobody(either: OpenSession) -> None:
    s = pipeline(either, max_num_batched_tokens=4)
    s.submit("a", range(6))
    first = s.plan()
    s.apply(Reset(reset_running_requests=True))
    second = s.plan()
    assert rows_of(second) == {"a": 4}
    assert second.cached[0].resumed
    assert s.commit(first).rows == ()
    assert s.request("a").num_computed_tokens == 4
    third = s.plan()
    s.commit(second)
    assert s.commit(third, a=(7,)).rows[0].new_token_ids == (7,)


def test_the_last_of_several_frames_counts(either: OpenSession) -> None:
    """A chunk, and then the rest: the first commit does not set it free."""
    s = pipeline(either, max_num_batched_tokens=4, max_frames_in_flight=3)
    s.submit("a", range(6))
    first, second = s.plan(), s.plan()
    s.apply(Reset(reset_running_requests=True))
    s.commit(first)
    third = s.plan()
    assert third == Plan(2)
    s.commit(second, a=(7,))
    assert rows_of(s.plan()) == {"a": 4}


def test_a_row_of_the_aborted_is_ignored_and_holds_its_id(either: OpenSession) -> None:
    s = pipeline(either)
    s.submit("a", range(5))
    first = s.plan()
    assert s.apply(Abort(("a",))) == Aborted(("a",))
    assert s.submit("a", range(5)) == Rejected(RejectCode.REQUEST_IN_FLIGHT)
    assert s.commit(first, a=(7,)).rows == ()
    s.submit("a", range(5))
    assert s.plan().new[0].request_id == "a"


def test_drafts_are_handed_in_and_must_be_among_those_that_are_accepted(
    either: OpenSession,
) -> None:
    s = pipeline(either, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    s.submit("a", range(5))
    s.submit("b", range(10, 13))
    proposals = Drafts((RowTokens("a", (8, 9)), RowTokens("b", (1,))))
    first = s.plan()
    assert s.apply(proposals) == DraftsTaken(()), "their own tokens are not known yet"
    s.commit(first, a=(7,), b=(7,))
    assert s.apply(proposals) == DraftsTaken(("a", "b"))
    second = s.plan()
    assert rows_of(second) == {"a": 3, "b": 2}
    assert [row.draft_token_ids for row in second.cached] == [(8, 9), (1,)]
    assert s.apply(proposals) == DraftsTaken(())
    assert s.plan() == Plan(2), "both wait for what is sampled after their drafts"
    s.commit(second, a=(8, 4), b=(3,))
    assert [s.request(name).num_computed_tokens for name in "ab"] == [7, 4]
    assert rows_of(s.plan()) == {"a": 1, "b": 1}


def test_drafts_in_flight_of_the_preempted_are_not_rolled_back(either: OpenSession) -> None:
    s = pipeline(either, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    s.submit("a", range(5))
    s.commit(s.plan(), a=(7,))
    s.apply(Drafts((RowTokens("a", (8, 9)),)))
    second = s.plan()
    s.apply(Reset(reset_running_requests=True))
    assert s.commit(second, a=(8, 4)).rows[0].new_token_ids == (8, 4)
    assert s.request("a").num_computed_tokens == 0
    assert s.request("a").output_token_ids == (7, 8, 4)
    assert s.state().stats.drafts_accepted == 1
    assert rows_of(s.plan()) == {"a": 8}


def test_a_hit_on_a_block_of_a_frame_in_flight(either: OpenSession) -> None:
    s = pipeline(either)
    s.submit("a", range(6))
    s.plan()
    s.submit("b", range(6))
    (row,) = s.plan().new
    assert isinstance(row, NewRow)
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (4, 2)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_as_many_requests_are_in_flight_as_the_pipeline_is_deep(
    either: OpenSession, depth: int
) -> None:
    s = pipeline(either, max_frames_in_flight=depth, max_num_seqs=depth)
    frames: list[Plan] = []
    for number in range(depth):
        s.submit(f"r{number}", range(3))
        frames.append(s.plan())
    assert [rows_of(plan) for plan in frames] == [{f"r{n}": 3} for n in range(depth)]
    for number in range(depth):
        s.commit(frames[number], **{f"r{number}": (9,)})
        assert rows_of(s.plan()) == {f"r{number}": 1}
