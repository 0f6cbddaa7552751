"""Pins on the host: what a turn leaves for the next one of its job, for how long, and for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from groups_support import full, window

from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Clock,
    FinishReason,
    PauseState,
    Pin,
    PinEstimate,
    PinsSnapshot,
    Plan,
    Policy,
    Rejected,
    Request,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    SpecMethod,
    StreamingUpdate,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession, Session


def open_with_pins(session: OpenSession, **fields: Any) -> Session:
    """Blocks of 2 tokens, as many as are given; all else large."""
    given = {
        "num_blocks": 17,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "scheduler_reserve_full_isl": False,
        "policy": Policy.CONTINUUM,
        **fields,
    }
    return session(block_size=2, max_model_len=32, **given)


def bring(s: Session, name: str, num_prompt: int, job: str | None = None, **fields: Any) -> None:
    """Submit a turn; prompts of two jobs differ, those of one are alike."""
    first = 100 * ord((job or name)[0])
    fields.setdefault("max_tokens", 1)
    prompt = range(first, first + num_prompt)
    assert s.submit(name, prompt, job_id=job, **fields) == Ack()


def take_turn(s: Session, name: str, num_prompt: int, job: str, ttl: int, **fields: Any) -> Plan:
    """Bring a turn of one output token, and let it run to its end; nobody else is there."""
    bring(s, name, num_prompt, job, **fields)
    s.apply(PinEstimate(job, ttl))
    plan, outputs = s.step(**{name: (7,)})
    assert outputs.rows[0].finish_reason is FinishReason.LENGTH
    return plan


def kept(s: Session) -> PinsSnapshot:
    found = s.state().pins
    assert found is not None
    return found


def list_pins(s: Session) -> list[tuple[str, int]]:
    """Job and end of each."""
    return [(pin.job_id, pin.end) for pin in kept(s).pins]


def admitted(plan: Plan) -> list[str]:
    return [row.request_id for row in plan.new]


# A turn ends.


def test_what_can_be_found_stays_and_the_rest_is_free(session: OpenSession) -> None:
    s = open_with_pins(
        session, num_speculative_tokens=2, spec_method=SpecMethod.NGRAM, num_blocks=9
    )
    s.apply(Clock(5))
    take_turn(s, "a", 5, "j", ttl=3)
    assert kept(s) == PinsSnapshot(5, (Pin("j", ((1, 2),), 8),), (PinEstimate("j", 3),))
    assert s.state().free_queue[-1] == 3
    take_turn(s, "b", 7, "j", ttl=3)
    assert kept(s).pins == (Pin("j", ((1, 2, 4),), 8),)
    assert s.state().stats.prefix_cache_hits == 4


def test_only_what_ends_by_its_outputs_leaves_something(session: OpenSession) -> None:
    s = open_with_pins(session)
    bring(s, "a", 5, "j", max_tokens=9)
    bring(s, "b", 5, "k", max_tokens=9, eos_token_id=7)
    bring(s, "c", 5, None, max_tokens=9, eos_token_id=7)
    for job in ("j", "k"):
        s.apply(PinEstimate(job, 3))
    plan = s.plan()
    s.apply(Abort(("a",)))
    s.commit(plan, a=(7,), b=(7,), c=(7,))
    assert list_pins(s) == [("k", 3)]
    assert kept(s).estimates == (PinEstimate("k", 3),)


@pytest.mark.parametrize(("num_prompt", "ttl"), [(1, 6), (5, 0)])
def test_without_an_estimate_or_anything_to_be_found_the_older_pin_stays(
    session: OpenSession, num_prompt: int, ttl: int
) -> None:
    s = open_with_pins(session)
    take_turn(s, "a", 5, "j", ttl=4)
    bring(s, "b", num_prompt, "j")
    plan = s.plan()
    s.apply(PinEstimate("j", ttl))
    s.commit(plan, b=(7,))
    assert kept(s).pins == (Pin("j", ((1, 2),), ttl),)
    assert kept(s).estimates == ((PinEstimate("j", 6),) if ttl else ())


def test_the_last_turn_of_a_job_ends_its_pin(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=9)
    take_turn(s, "a", 5, "j", ttl=4)
    take_turn(s, "b", 7, "j", ttl=4, is_last_step=True)
    assert kept(s) == PinsSnapshot()
    assert len(s.state().free_queue) == 8
    assert s.state().free_queue[-2:] == (2, 1)
    bring(s, "c", 7, "j")
    assert s.plan().new[0].num_computed_tokens == 6


def test_of_turns_that_end_at_once_the_last_one_leaves_the_pin(session: OpenSession) -> None:
    s = open_with_pins(session)
    bring(s, "a", 5, "j")
    bring(s, "b", 9, "j")
    s.apply(PinEstimate("j", 4))
    s.step(a=(7,), b=(7,))
    assert kept(s).pins == (Pin("j", ((1, 2, 4, 5),), 4),)


def test_windows_leave_null_blocks_in_a_pin(session: OpenSession) -> None:
    s = open_with_pins(session, groups=(full(2), window(2, 3)), max_num_batched_tokens=4)
    bring(s, "a", 8, "j", max_tokens=2)
    s.apply(PinEstimate("j", 4))
    s.step()
    s.step(a=(7,))
    s.step(a=(7,))
    assert kept(s).pins == (Pin("j", ((1, 2, 5, 6), (0, 0, 0, 8)), 4),)
    assert sorted(s.state().free_queue)[:3] == [3, 4, 7]
    bring(s, "b", 9, "j", max_tokens=2)
    assert s.plan().new[0].num_computed_tokens == 8
    s.apply(Abort(("b",)))
    assert s.apply(Reset()) == ResetDone(True)
    assert len(s.state().free_queue) == 16


def test_a_session_that_rests_has_not_ended(session: OpenSession) -> None:
    s = open_with_pins(session)
    bring(s, "a", 5, "j", resumable=True)
    bring(s, "b", 5, "k", resumable=True)
    s.apply(PinEstimate("j", 4))
    s.apply(PinEstimate("k", 4))
    s.apply(StreamingUpdate(Request("b", (1,))))
    s.step(a=(7,), b=(7,))
    assert list_pins(s) == [("k", 4)]
    assert s.apply(StreamingUpdate(Request("a", (1,)))) == Aborted(("a",))
    assert list_pins(s) == [("k", 4)]
    assert kept(s).estimates == (PinEstimate("k", 4),)


def test_a_turn_that_ends_while_it_waits_leaves_nothing(session: OpenSession) -> None:
    s = open_with_pins(session, async_scheduling=True, max_frames_in_flight=2)
    bring(s, "a", 5, "j")
    s.apply(PinEstimate("j", 4))
    plan = s.plan()
    s.apply(Reset(reset_running_requests=True))
    s.commit(plan, a=(7,))
    assert kept(s) == PinsSnapshot()


# Time and estimates.


def test_time_does_not_go_back(session: OpenSession) -> None:
    s = open_with_pins(session)
    for now, told in ((4, 4), (2, 4), (9, 9)):
        assert s.apply(Clock(now)) == Ack()
        assert kept(s).now == told


def test_of_a_job_that_is_not_there_nothing_is_known(session: OpenSession) -> None:
    s = open_with_pins(session)
    s.apply(PinEstimate("j", 4))
    assert kept(s) == PinsSnapshot()
    bring(s, "a", 5, "j")
    bring(s, "b", 5, "j")
    assert kept(s).estimates == ()
    s.apply(PinEstimate("j", 4))
    s.apply(Abort(("a",)))
    assert kept(s).estimates == (PinEstimate("j", 4),)
    s.apply(Abort(("b",)))
    assert kept(s) == PinsSnapshot()


def test_an_estimate_counts_from_now_and_keeps_the_place(session: OpenSession) -> None:
    s = open_with_pins(session)
    take_turn(s, "a", 5, "j", ttl=4)
    take_turn(s, "b", 5, "k", ttl=4)
    s.apply(Clock(3))
    s.apply(PinEstimate("j", 4))
    assert list_pins(s) == [("j", 7), ("k", 4)]
    s.apply(PinEstimate("j", 0))
    assert list_pins(s) == [("j", 3), ("k", 4)]
    assert kept(s).estimates == (PinEstimate("k", 4),)
    s.plan()
    assert list_pins(s) == [("k", 4)]


@pytest.mark.parametrize("pause", list(PauseState))
def test_a_step_frees_what_has_had_its_time_before_it_takes_any(
    session: OpenSession, pause: PauseState
) -> None:
    s = open_with_pins(session, num_blocks=7)
    take_turn(s, "a", 5, "j", ttl=4)
    take_turn(s, "b", 5, "k", ttl=3)
    s.apply(SetPause(pause))
    bring(s, "c", 9)
    s.apply(Clock(3))
    assert list_pins(s) == [("j", 4), ("k", 3)]
    assert (admitted(s.plan()) == ["c"]) is (pause is PauseState.UNPAUSED)
    assert list_pins(s) == ([] if pause is PauseState.UNPAUSED else [("j", 4)])


def test_pins_that_end_together_are_freed_as_they_were_pinned(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=9)
    take_turn(s, "a", 5, "j", ttl=4)
    take_turn(s, "b", 5, "k", ttl=3)
    s.apply(Clock(9))
    s.plan()
    assert s.state().free_queue[-4:] == (2, 1, 5, 4)
    assert kept(s) == PinsSnapshot(9)


def test_a_step_that_is_refused_frees_nothing(session: OpenSession) -> None:
    s = open_with_pins(session)
    take_turn(s, "a", 5, "j", ttl=4)
    bring(s, "b", 5)
    s.plan()
    s.apply(Clock(9))
    refused = s.apply(Schedule())
    assert isinstance(refused, Rejected)
    assert list_pins(s) == [("j", 4)]


def test_under_another_policy_jobs_say_nothing(session: OpenSession) -> None:
    s = open_with_pins(session, policy=Policy.FCFS)
    assert s.apply(Clock(4)) == Ack()
    take_turn(s, "a", 5, "j", ttl=4)
    assert s.state().pins is None
    assert len(s.state().free_queue) == 16


# In a step.


def test_the_line_is_sorted_as_a_step_begins_and_stays(session: OpenSession) -> None:
    s = open_with_pins(session, max_num_seqs=1)
    take_turn(s, "a", 3, "j", ttl=4)
    for name, job in (("x", None), ("b", "j"), ("y", "k"), ("c", "j")):
        bring(s, name, 3, job)
    s.apply(SetPause(PauseState.PAUSED_ALL))
    assert s.state().waiting == ("x", "b", "y", "c")
    s.plan()
    assert s.state().waiting == ("b", "c", "x", "y")
    s.apply(Clock(9))
    s.plan()
    assert kept(s).pins == ()
    assert s.state().waiting == ("b", "c", "x", "y")


def test_who_is_warm_is_preempted_last_even_for_one_with_a_row(session: OpenSession) -> None:
    """x | 3 blocks: scheduled, taken back |   b | 2 blocks, lacks one |   of 5 that there are"""
    s = open_with_pins(session, num_blocks=6)
    take_turn(s, "a", 3, "j", ttl=9)
    bring(s, "x", 3, max_tokens=6)
    s.step(x=(7,))
    bring(s, "b", 3, "j", max_tokens=6)
    s.step(x=(7,), b=(7,))
    s.step(x=(7,), b=(7,))
    bring(s, "c", 3, "j")
    plan = s.plan()
    assert plan.preempted_req_ids == ("x",)
    assert [row.request_id for row in plan.cached] == ["b"]
    assert s.state().running == ("b",)
    s.commit(plan, b=(7,))
    s.apply(SetPause(PauseState.PAUSED_ALL))
    s.plan()
    assert s.state().waiting == ("x", "c")  # who was preempted stays before who is warm


def test_where_everybody_is_warm_the_last_is_preempted(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=7)
    for name in ("a", "b"):
        take_turn(s, name, 3, name, ttl=9)
    for name in ("c", "d"):
        bring(s, name, 3, {"c": "a", "d": "b"}[name], max_tokens=9)
    s.step(c=(7,), d=(7,))
    s.step(c=(7,), d=(7,))
    bring(s, "e", 3)
    plan = s.plan()
    assert plan.preempted_req_ids == ()
    s.commit(plan, c=(7,), d=(7,))
    s.step(c=(7,), d=(7,))
    assert s.plan().preempted_req_ids == ("d",)


def test_a_block_that_a_pin_holds_beside_one_is_not_common_to_two(session: OpenSession) -> None:
    s = open_with_pins(session)
    take_turn(s, "a", 5, "j", ttl=9)
    bring(s, "b", 5, "j")
    bring(s, "x", 5)
    plan = s.plan()
    assert admitted(plan) == ["b", "x"]
    assert plan.num_common_prefix_blocks == (0,)


# Giving way.


@pytest.mark.parametrize(
    ("num_prompt", "job", "left"),
    [
        (5, None, ["j", "k", "l"]),
        (7, None, ["j", "l"]),
        (11, None, ["j"]),
        (15, None, []),
        (9, "k", ["j", "k", "l"]),
        (11, "k", ["j", "k"]),
        (15, "k", ["k"]),
    ],
)
def test_a_pin_gives_way_to_one_that_lacks_room_while_nobody_runs(
    session: OpenSession, num_prompt: int, job: str | None, left: list[str]
) -> None:
    """Of 9 blocks three jobs keep two each; those of other jobs go first, then the soonest."""
    s = open_with_pins(session, num_blocks=10)
    for name, ttl in (("j", 9), ("k", 5), ("l", 5)):
        take_turn(s, f"{name}1", 5, name, ttl)
    bring(s, "x", num_prompt, job)
    assert admitted(s.plan()) == ["x"]
    assert [pin.job_id for pin in kept(s).pins] == left


def test_while_somebody_runs_pins_stay(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=7)
    take_turn(s, "a", 5, "j", ttl=9)
    bring(s, "x", 3, max_tokens=9)
    s.step(x=(7,))
    bring(s, "y", 7)
    assert admitted(s.plan()) == []
    assert list_pins(s) == [("j", 9)]


def test_a_pin_gives_way_to_the_only_one_that_runs(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=5)
    take_turn(s, "a", 5, "j", ttl=9)
    bring(s, "x", 3, max_tokens=4)
    for _ in range(3):
        s.step(x=(7,))
    assert list_pins(s) == []
    assert s.state().running == ("x",)
    assert s.state().stats.preemptions == 0


def test_a_pin_gives_way_before_a_session_that_rests(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=9)
    bring(s, "s", 5, resumable=True)
    s.step(s=(7,))
    take_turn(s, "a", 5, "j", ttl=9)
    bring(s, "x", 7)
    s.plan()
    assert list_pins(s) == []
    assert s.request("s").num_computed_tokens == 5
    assert s.state().running == ("x",)


# Resets.


def test_pins_do_not_stand_against_a_reset(session: OpenSession) -> None:
    s = open_with_pins(session, num_blocks=9)
    s.apply(Clock(2))
    bring(s, "b", 7, "j", max_tokens=2)
    for name, job in (("a", "j"), ("c", "k")):
        bring(s, name, 3, job)
        s.apply(PinEstimate(job, 4))
    plan = s.plan()
    s.commit(plan, a=(7,), b=(7,), c=(7,))
    assert list_pins(s) == [("j", 6), ("k", 6)]
    assert s.apply(Reset()) == ResetDone(False)
    assert s.apply(Reset(reset_connector=True)) == ResetDone(False)
    assert list_pins(s) == [("j", 6), ("k", 6)]
    s.apply(Abort(("b",)))
    assert s.apply(Reset()) == ResetDone(True)
    assert kept(s) == PinsSnapshot(2)
    assert len(s.state().free_queue) == 8
    assert s.state().cached == {}


def test_a_forced_reset_ends_pins_and_keeps_estimates(session: OpenSession) -> None:
    s = open_with_pins(session)
    take_turn(s, "a", 5, "j", ttl=4)
    bring(s, "b", 7, "j", max_tokens=9)
    s.step(b=(7,))
    assert s.apply(Reset(reset_running_requests=True)) == ResetDone(True)
    assert kept(s) == PinsSnapshot(0, (), (PinEstimate("j", 4),))
    assert len(s.state().free_queue) == 16
