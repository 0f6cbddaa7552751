"""Asynchronous scheduling: steps planned before the tokens of the one before are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    CachedRow,
    Commit,
    Drafts,
    FinishReason,
    Outputs,
    PauseState,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    Request,
    Reset,
    ResetDone,
    RowTokens,
    Schedule,
    SetPause,
    SpecMethod,
    Status,
    Submit,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession, Session

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
THREE = (-1, -1, -1)
"""The drafts of a row, as a plan shows them."""


def pipeline(session: OpenSession, **fields: Any) -> Session:
    sizes = {
        "num_blocks": 20,
        "block_size": 4,
        "max_model_len": 64,
        "max_frames_in_flight": 2,
        "async_scheduling": True,
    }
    return session(**{**sizes, **fields})


def drafting(session: OpenSession, **fields: Any) -> Session:
    return pipeline(
        session, **{"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 3, **fields}
    )


def counters(s: Session, request_id: str = "a") -> tuple[int, int, int]:
    """Of a request: verified outputs, placeholders, computed tokens."""
    request = s.request(request_id)
    return (
        len(request.output_token_ids),
        request.num_output_placeholders,
        request.num_computed_tokens,
    )


def answer(frame_id: int, **tokens: tuple[int, ...]) -> Commit:
    return Commit(frame_id, tuple(RowTokens(name, row) for name, row in tokens.items()))


# The pipeline, without drafts.


def test_a_decode_runs_one_frame_ahead_until_its_last_token_is_promised(
    session: OpenSession,
) -> None:
    s = pipeline(session)
    s.submit("a", range(5), max_tokens=4)
    frames = [s.plan()]
    assert counters(s) == (0, 1, 5)
    frames.append(s.plan())
    assert frames[1].cached == (CachedRow("a", False, ((),), None, 5, 1, 1),)
    assert counters(s) == (0, 2, 6)
    assert s.apply(Schedule()) == Rejected(RejectCode.PIPELINE_FULL)
    assert s.state().frames_in_flight == (0, 1)

    assert s.commit(frames[0], a=(10,)).rows[0].new_token_ids == (10,)
    assert counters(s) == (1, 1, 6)
    frames.append(s.plan())
    assert frames[2].cached == (CachedRow("a", False, ((),), None, 6, 2, 1),)
    s.commit(frames[1], a=(11,))
    frames.append(s.plan())
    assert frames[3].cached == (CachedRow("a", False, ((),), None, 7, 3, 1),)
    s.commit(frames[2], a=(12,))
    assert counters(s) == (3, 1, 8)
    # 3 verified and 1 promised are max_tokens.
    assert s.plan() == Plan(4)
    assert s.state().frames_in_flight == (3,)
    assert s.commit(frames[3], a=(13,)).rows[0].finish_reason is LENGTH
    assert s.state().requests == ()


def test_who_skips_ahead_does_not_end_the_phase(session: OpenSession) -> None:
    s = pipeline(session)
    s.submit("a", range(5), max_tokens=1)
    s.submit("b", range(10, 15))
    s.plan()
    assert [row.request_id for row in s.plan().cached] == ["b"]
    assert counters(s, "a") == (0, 1, 5)
    assert counters(s, "b") == (0, 2, 6)


def test_one_promised_token_is_counted_as_sure_however_many_frames(session: OpenSession) -> None:
    s = pipeline(session, max_frames_in_flight=3, async_scheduling=True)
    s.submit("a", range(5), max_tokens=2)
    frames = [s.plan(), s.plan(), s.plan()]
    # The third row is in vain: the two before it end the request.
    assert [plan.total_num_scheduled_tokens for plan in frames] == [5, 1, 1]
    s.commit(frames[0], a=(10,))
    assert s.plan() == Plan(3)
    assert s.commit(frames[1], a=(11,)).rows[0].finish_reason is LENGTH
    assert s.commit(frames[2], a=(12,)).rows == ()


def test_the_model_length_ends_the_pipeline_as_well(session: OpenSession) -> None:
    s = pipeline(session, max_model_len=8)
    s.submit("a", range(5), max_tokens=50)
    frames = [s.plan(), s.plan()]
    s.commit(frames[0], a=(10,))
    frames.append(s.plan())
    s.commit(frames[1], a=(11,))
    assert counters(s) == (2, 1, 7)
    assert s.plan() == Plan(3)
    assert s.commit(frames[2], a=(12,)).rows[0].finish_reason is LENGTH


def test_a_chunk_of_prefill_promises_nothing(session: OpenSession) -> None:
    s = drafting(session, max_num_batched_tokens=4)
    s.submit("a", range(6))
    first = s.plan()
    assert counters(s) == (0, 0, 4)
    assert s.request("a").is_prefill_chunk
    assert s.request("a").spec_token_ids == ()
    second = s.plan()
    assert second.cached == (CachedRow("a", False, ((2,),), None, 4, 0, 2),)
    assert counters(s) == (0, 1, 6)
    assert not s.request("a").is_prefill_chunk
    assert s.request("a").spec_token_ids == THREE
    assert s.apply(answer(0, a=(10,))) == Rejected(RejectCode.BAD_RESULT)
    assert s.commit(first).rows == ()
    assert counters(s) == (0, 1, 6)
    assert s.commit(second, a=(10,)).rows[0].new_token_ids == (10,)


def test_a_stop_leaves_the_frames_after_it_in_flight(session: OpenSession) -> None:
    s = pipeline(session)
    s.submit("a", range(5), eos_token_id=9)
    first, second = s.plan(), s.plan()
    assert s.commit(first, a=(9,)).rows[0].finish_reason is STOP
    assert s.state().frames_in_flight == (1,)
    assert s.apply(Submit(Request("a", (1,)))) == Rejected(RejectCode.REQUEST_IN_FLIGHT)
    s.submit("b", range(10, 15))
    third = s.plan()
    assert third.finished_req_ids == ("a",)
    # Frame 1 says nothing about b, although b may be kept where a was.
    assert s.commit(second, a=(1,)).rows == ()
    assert counters(s, "b") == (0, 1, 5)
    s.commit(third, b=(1,))
    assert counters(s, "b") == (1, 0, 5)


def test_frames_are_committed_oldest_first_and_once(session: OpenSession) -> None:
    s = pipeline(session, max_frames_in_flight=3, async_scheduling=True)
    s.submit("a", range(5))
    for _ in range(3):
        s.plan()
    before = s.state()
    for late in (answer(1, a=(1,)), answer(2, a=(1,)), Commit(1, ())):
        assert s.apply(late) == Rejected(RejectCode.FRAME_OUT_OF_ORDER)
    assert s.apply(answer(3, a=(1,))) == Rejected(RejectCode.UNKNOWN_FRAME)
    assert s.apply(Commit(0, ())) == Rejected(RejectCode.BAD_RESULT)
    assert s.state() == before
    assert isinstance(s.apply(answer(0, a=(1,))), Outputs)
    assert s.apply(answer(0, a=(1,))) == Rejected(RejectCode.UNKNOWN_FRAME)
    assert s.apply(answer(2, a=(3,))) == Rejected(RejectCode.FRAME_OUT_OF_ORDER)
    for frame_id in (1, 2):
        assert isinstance(s.apply(answer(frame_id, a=(1 + frame_id,))), Outputs)
    assert s.request("a").output_token_ids == (1, 2, 3)
    assert counters(s) == (3, 0, 7)


# Drafts: the plan says how many, the worker knows which.


def test_drafts_are_accepted_in_part_while_the_next_step_is_in_flight(
    session: OpenSession,
) -> None:
    s = drafting(session)
    s.submit("a", range(6), max_tokens=20)
    frames = [s.plan()]
    assert counters(s) == (0, 1, 6)
    assert s.request("a").spec_token_ids == THREE
    frames.append(s.plan())
    assert frames[1].cached == (CachedRow("a", False, ((3,),), None, 6, 1, 4, THREE),)
    assert counters(s) == (0, 5, 10)
    s.commit(frames[0], a=(10,))
    assert counters(s) == (1, 4, 10)
    frames.append(s.plan())
    assert frames[2].cached == (CachedRow("a", False, ((4,),), None, 10, 5, 4, THREE),)
    assert counters(s) == (1, 8, 14)

    # One of three accepted: two uncomputed, under the frame in flight as well.
    assert s.commit(frames[1], a=(11, 12)).rows[0].new_token_ids == (11, 12)
    assert counters(s) == (3, 4, 12)
    assert (s.state().stats.drafts_scheduled, s.state().stats.drafts_accepted) == (3, 1)
    frames.append(s.plan())
    assert frames[3].cached == (CachedRow("a", False, ((),), None, 12, 7, 4, THREE),)
    s.commit(frames[2], a=(13, 14, 15, 16))
    assert counters(s) == (7, 4, 16)
    s.commit(frames[3], a=(17,))
    assert counters(s) == (8, 0, 13)
    assert (s.state().stats.drafts_scheduled, s.state().stats.drafts_accepted) == (9, 4)


def test_a_row_accepts_no_more_drafts_than_it_has(session: OpenSession) -> None:
    s = drafting(session, long_prefill_token_threshold=2)
    s.submit("a", range(2))
    first, second = s.plan(), s.plan()
    # The threshold cuts three drafts to one; the next step may have three again.
    assert second.cached == (CachedRow("a", False, ((),), None, 2, 1, 2, (-1,)),)
    assert s.request("a").spec_token_ids == THREE
    assert counters(s) == (0, 3, 4)
    s.commit(first, a=(10,))
    for tokens in ((), (1, 2, 3)):
        assert s.apply(answer(1, a=tokens)) == Rejected(RejectCode.BAD_RESULT)
    assert s.commit(second, a=(11, 12)).rows[0].new_token_ids == (11, 12)


def test_placeholders_are_dropped_after_a_plan_without_rows(session: OpenSession) -> None:
    s = drafting(session)
    s.submit("a", range(6))
    s.plan()
    assert s.request("a").spec_token_ids == THREE
    s.apply(SetPause(PauseState.PAUSED_ALL))
    assert s.plan() == Plan(1)
    assert s.request("a").spec_token_ids == ()
    s.apply(SetPause(PauseState.UNPAUSED))
    # The tokens are sent again after the gap: those that are known, which is the prompt.
    assert s.plan().cached == (CachedRow("a", False, ((),), tuple(range(6)), 6, 1, 1),)
    assert s.request("a").spec_token_ids == THREE


def test_placeholders_are_dropped_of_those_whom_the_plan_leaves_out(session: OpenSession) -> None:
    s = drafting(session, max_num_batched_tokens=6)
    for name, start in (("a", 0), ("b", 10), ("c", 20)):
        s.submit(name, range(start, start + 2), max_tokens=2 if name == "a" else 20)
    first = s.plan()
    assert all(s.request(name).spec_token_ids == THREE for name in "abc")
    second = s.plan()
    assert [row.num_scheduled_tokens for row in second.cached] == [4, 2]
    assert s.request("c").spec_token_ids == ()
    s.commit(first, a=(1,), b=(1,), c=(1,))
    third = s.plan()
    # One token of a is sure, and would be its last. The budget is enough for the others now.
    assert [(row.request_id, row.draft_token_ids) for row in third.cached] == [
        ("b", THREE),
        ("c", ()),
    ]
    assert s.request("a").spec_token_ids == ()


def test_the_proposer_keeps_its_drafts(session: OpenSession) -> None:
    s = drafting(session)
    s.submit("a", range(6))
    s.step(a=(1,))
    for event in (Drafts(()), Drafts((RowTokens("a", (7,)),))):
        assert s.apply(event) == Rejected(RejectCode.BAD_DRAFTS)


# Preemption and resets in flight.


def preempted_in_flight(session: OpenSession) -> tuple[Session, list[Plan]]:
    """b has lost its blocks to a; frames 1 and 2 are in flight, and b has a row in frame 1."""
    s = pipeline(session, num_blocks=5, max_frames_in_flight=3, async_scheduling=True)
    s.submit("a", range(7), max_tokens=6)
    s.submit("b", range(10, 17), max_tokens=6)
    frames = [s.plan(), s.plan()]
    s.commit(frames[0], a=(1,), b=(1,))
    frames.append(s.plan())
    assert frames[2] == Plan(
        2, (), (CachedRow("a", False, ((4,),), None, 8, 2, 1),), preempted_req_ids=("b",)
    )
    assert s.request("b").status is Status.PREEMPTED
    assert counters(s, "b") == (1, 1, 0)
    assert s.state().waiting == ("b",)
    return s, frames


def test_tokens_of_the_preempted_are_delivered_before_it_is_resumed(session: OpenSession) -> None:
    s, frames = preempted_in_flight(session)
    s.submit("c", range(20, 23), max_tokens=1)
    frames.append(s.plan())
    # b is passed over and c, behind it, takes the one free block.
    assert [row.request_id for row in frames[3].rows] == ["c", "a"]
    assert (s.state().waiting, s.state().skipped_waiting) == ((), ("b",))
    assert s.request("b").status is Status.PREEMPTED

    outputs = s.commit(frames[1], a=(2,), b=(2,))
    assert [(row.request_id, row.new_token_ids) for row in outputs.rows] == [
        ("a", (2,)),
        ("b", (2,)),
    ]
    assert counters(s, "b") == (2, 0, 0)
    assert s.request("b").num_cached_blocks == (0,)
    s.commit(frames[2], a=(3,))
    s.commit(frames[3], a=(4,), c=(9,))
    for token in (5, 6):
        plan, _ = s.step(a=(token,))
        assert [row.request_id for row in plan.rows] == ["a"]
    assert s.state().free_queue == (3, 4, 2, 1)
    plan = s.plan()
    assert plan.cached == (CachedRow("b", True, ((3, 4, 2),), (*range(10, 17), 1, 2), 0, 2, 9),)
    assert counters(s, "b") == (2, 1, 9)


def test_nobody_is_resumed_while_his_tokens_are_in_flight(session: OpenSession) -> None:
    s, frames = preempted_in_flight(session)
    s.apply(Abort(("a",)))
    # The pool is empty but for b, which still has to wait for frame 1.
    plan = s.plan()
    assert plan.rows == ()
    assert s.state().skipped_waiting == ("b",)
    s.commit(frames[1], a=(2,), b=(2,))
    plan = s.plan()
    assert [(row.request_id, row.num_scheduled_tokens) for row in plan.rows] == [("b", 5)]
    assert s.state().skipped_waiting == ()


def test_who_waits_for_tokens_can_end_in_either_queue(session: OpenSession) -> None:
    for passed_over in (False, True):
        for aborted in (False, True):
            s = pipeline(session)
            s.submit("a", range(5), max_tokens=1)
            first = s.plan()
            s.apply(Reset(True))
            if passed_over:
                assert s.plan() == Plan(1)
            assert s.state().skipped_waiting == (("a",) if passed_over else ())
            if aborted:
                assert s.apply(Abort(("a",))) == Aborted(("a",))
                assert s.apply(Submit(Request("a", (1,)))) == Rejected(RejectCode.REQUEST_IN_FLIGHT)
            reasons = [row.finish_reason for row in s.commit(first, a=(9,)).rows]
            assert reasons == ([] if aborted else [LENGTH])
            assert s.state().requests == ()
            assert s.state().waiting == s.state().skipped_waiting == ()


@pytest.mark.parametrize("policy", Policy)
def test_the_passed_over_keep_their_order(session: OpenSession, policy: Policy) -> None:
    s = pipeline(session, policy=policy)
    s.submit("a", range(5), arrival_time=1)
    s.submit("b", range(5), arrival_time=2)
    s.plan()
    s.submit("d", range(5), arrival_time=4)
    s.submit("g", range(5), arrival_time=3, structured_output=True)
    s.apply(Reset(True))
    assert s.state().waiting == ("a", "b", "d")
    plan = s.plan()
    assert [row.request_id for row in plan.rows] == ["d"]
    assert s.state().waiting == ()
    expected = ("a", "b", "g") if policy is Policy.PRIORITY else ("g", "a", "b")
    assert s.state().skipped_waiting == expected


def test_a_forced_reset_leaves_two_frames_to_deliver(session: OpenSession) -> None:
    s = drafting(session)
    s.submit("a", range(6), max_tokens=20)
    first, second = s.plan(), s.plan()
    assert s.apply(Reset(True)) == ResetDone(True)
    assert counters(s) == (0, 5, 0)
    assert s.request("a").spec_token_ids == ()
    assert s.state().frames_in_flight == (0, 1)
    s.commit(first, a=(10,))
    assert counters(s) == (1, 4, 0)
    assert s.plan() == Plan(2)
    # Nothing is rolled back or published of a request that has started again.
    assert s.commit(second, a=(11, 12)).rows[0].new_token_ids == (11, 12)
    assert counters(s) == (3, 0, 0)
    assert (s.state().stats.drafts_scheduled, s.state().stats.drafts_accepted) == (3, 1)
    assert s.state().cached == {}
    known = (*range(6), 10, 11, 12)
    assert s.plan().cached == (CachedRow("a", True, ((4, 5, 6),), known, 0, 3, 9),)
    assert counters(s) == (3, 1, 9)
    assert s.request("a").spec_token_ids == THREE


def test_an_abort_in_flight_silences_every_frame(session: OpenSession) -> None:
    s = drafting(session)
    s.submit("a", range(6))
    s.submit("b", range(10, 16))
    first, second = s.plan(), s.plan()
    s.apply(Abort(("a",)))
    # The rows of the aborted are checked all the same.
    assert s.apply(answer(0, a=(), b=(1,))) == Rejected(RejectCode.BAD_RESULT)
    assert [row.request_id for row in s.commit(first, a=(1,), b=(1,)).rows] == ["b"]
    assert s.apply(Submit(Request("a", (1,)))) == Rejected(RejectCode.REQUEST_IN_FLIGHT)
    assert [row.request_id for row in s.commit(second, a=(2, 3), b=(2,)).rows] == ["b"]
    assert s.state().stats.drafts_scheduled == 3
    assert not isinstance(s.submit("a", (1,)), Rejected)
    assert counters(s, "a") == (0, 0, 0)


# Publication: what a commit verifies is findable at once.


def test_a_commit_publishes_what_it_verifies(session: OpenSession) -> None:
    s = pipeline(session)
    s.submit("a", range(3), max_tokens=5)
    first, second = s.plan(), s.plan()
    s.commit(first, a=(10,))
    # Block 0 is full, but its last token runs in frame 1 only.
    assert s.request("a").num_cached_blocks == (0,)
    s.commit(second, a=(11,))
    assert s.request("a").num_cached_blocks == (1,)
    assert list(s.state().cached.values()) == [(1,)]


def test_schedule_publishes_the_block_that_a_frame_in_flight_completes(
    session: OpenSession,
) -> None:
    s = pipeline(session)
    s.submit("a", range(3), max_tokens=5)
    first, _ = s.plan(), s.plan()
    s.commit(first, a=(10,))
    s.plan()
    assert s.request("a").num_cached_blocks == (1,)


def test_what_a_request_says_last_stays_findable(session: OpenSession) -> None:
    s = drafting(session)
    s.submit("a", range(3), max_tokens=3)
    first, second = s.plan(), s.plan()
    s.commit(first, a=(10,))
    assert s.state().cached == {}
    outputs = s.commit(second, a=(11, 12, 13))
    assert outputs.rows[0].new_token_ids == (11, 12)
    assert outputs.rows[0].finish_reason is LENGTH
    # Six tokens are known; the five before the last fill one block.
    assert list(s.state().cached.values()) == [(1,)]
    assert s.state().free_queue[-2:] == (2, 1)
    s.submit("b", (0, 1, 2, 10, 11), max_tokens=1)
    assert s.plan().new[0].num_computed_tokens == 4


def test_without_caching_a_commit_publishes_nothing(session: OpenSession) -> None:
    s = pipeline(session, enable_prefix_caching=False)
    s.submit("a", range(3), max_tokens=5)
    first, second = s.plan(), s.plan()
    s.commit(first, a=(10,))
    s.commit(second, a=(11,))
    assert s.request("a").num_cached_blocks == (0,)
    assert s.state().cached == {}
