"""Pins: which cached blocks a turn leaves for the next turn of its job, and until when."""

from __future__ import annotations

from typing import Any

import pytest
from groups_support import full, window

from blockstep.spec import Config, Oracle, Outputs, Policy, Request
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Clock,
    Event,
    FinishReason,
    KVOffer,
    KVTransfers,
    Observation,
    PauseState,
    Pin,
    PinEstimate,
    PinsSnapshot,
    Plan,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    StreamingUpdate,
    Submit,
    TransfersReported,
    config_problems,
)


def build(**changes: Any) -> Oracle:
    fields: dict[str, Any] = {
        "num_blocks": 9,
        "block_size": 2,
        "max_model_len": 32,
        "scheduler_reserve_full_isl": False,
        "policy": Policy.CONTINUUM,
    }
    return Oracle(Config(**fields | changes))


def apply(oracle: Oracle, event: Event) -> Observation:
    answer = oracle.apply(event)
    assert get_broken_invariants(oracle.state) == ()
    return answer


def bring(oracle: Oracle, name: str, num_tokens: int, job: str | None = None, **more: Any) -> None:
    """Submit a turn. Prompts of one job share a prefix, those of two jobs do not."""
    first = 100 * ord((job or name)[0])
    prompt = tuple(range(first, first + num_tokens))
    fields: dict[str, Any] = {"max_tokens": 1, **more}
    assert apply(oracle, Submit(Request(name, prompt, job_id=job, **fields))) == Ack()


def plan(oracle: Oracle) -> Plan:
    found = apply(oracle, Schedule())
    assert isinstance(found, Plan)
    return found


def answer(oracle: Oracle, planned: Plan) -> Outputs:
    frame = next(f for f in oracle.state.frames if f.frame_id == planned.frame_id)
    sampled = {row.request_id: (9,) * row.samples for row in frame.rows}
    outputs = oracle.commit(planned, sampled)
    assert get_broken_invariants(oracle.state) == ()
    return outputs


def step(oracle: Oracle) -> Plan:
    planned = plan(oracle)
    answer(oracle, planned)
    return planned


def keep(oracle: Oracle, name: str, num_tokens: int, job: str, ttl: int, **more: Any) -> None:
    """Run a turn of one output alone, until it is pinned."""
    bring(oracle, name, num_tokens, job, **more)
    apply(oracle, PinEstimate(job, ttl))
    step(oracle)


def kept(oracle: Oracle) -> PinsSnapshot:
    found = oracle.snapshot().pins
    assert found is not None
    return found


def ends(oracle: Oracle) -> dict[str, int]:
    """Return the end of each job's pin, in the order in which the jobs were pinned."""
    return {pin.job_id: pin.end for pin in kept(oracle).pins}


# A turn finishes.


@pytest.mark.parametrize("event", [Abort(("a",)), StreamingUpdate(Request("a", (1,)))])
def test_an_aborted_turn_or_a_closed_session_leaves_no_pin(event: Event) -> None:
    oracle = build()
    bring(oracle, "a", 5, "j", resumable=True, max_tokens=1)
    apply(oracle, PinEstimate("j", 3))
    step(oracle)  # the session is idle, not finished
    assert kept(oracle).pins == ()
    assert kept(oracle).estimates == (PinEstimate("j", 3),)
    apply(oracle, event)
    assert kept(oracle) == PinsSnapshot()
    assert oracle.num_free_blocks == 8


def test_a_session_that_finishes_at_its_stop_is_pinned() -> None:
    oracle = build()
    bring(oracle, "a", 5, "j", resumable=True)
    apply(oracle, PinEstimate("j", 3))
    apply(oracle, StreamingUpdate(Request("a", (1,))))
    planned = plan(oracle)
    assert answer(oracle, planned).rows[0].finish_reason is FinishReason.LENGTH
    assert ends(oracle) == {"j": 3}


@pytest.mark.parametrize(("num_tokens", "ttl"), [(1, 6), (5, 0)])
def test_a_turn_without_a_new_pin_keeps_the_older_pin(num_tokens: int, ttl: int) -> None:
    oracle = build()
    keep(oracle, "a", 5, "j", ttl=4)
    bring(oracle, "b", num_tokens, "j")
    planned = plan(oracle)
    apply(oracle, PinEstimate("j", ttl))
    answer(oracle, planned)
    assert kept(oracle).pins == (Pin("j", ((1, 2),), ttl),)


# Steps and the order of requests.


def test_null_blocks_of_a_pin_do_not_prevent_a_reset() -> None:
    oracle = build(num_blocks=17, groups=(full(2), window(2, 3)), max_num_batched_tokens=4)
    bring(oracle, "a", 8, "j", max_tokens=2)
    apply(oracle, PinEstimate("j", 4))
    for _ in range(3):
        step(oracle)
    assert kept(oracle).pins == (Pin("j", ((1, 2, 5, 6), (0, 0, 0, 8)), 4),)
    assert apply(oracle, Reset()) == ResetDone(True)
    assert kept(oracle).pins == ()


def test_a_preempted_request_stays_ahead_of_a_request_with_a_pin() -> None:
    oracle = build(num_blocks=6)
    keep(oracle, "a", 3, "j", ttl=9)
    bring(oracle, "x", 3, max_tokens=6)
    step(oracle)
    bring(oracle, "b", 3, "j", max_tokens=6)
    step(oracle)
    step(oracle)
    bring(oracle, "c", 3, "j")
    assert step(oracle).preempted_req_ids == ("x",)
    apply(oracle, SetPause(PauseState.PAUSED_ALL))
    plan(oracle)
    assert oracle.snapshot().waiting == ("x", "c")


@pytest.mark.parametrize(
    ("num_tokens", "job", "left"),
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
def test_pins_are_reclaimed_while_no_request_runs(
    num_tokens: int, job: str | None, left: list[str]
) -> None:
    """Three jobs have pins of 2 blocks each, 3 of 9 blocks are free.

    Pins of other jobs are reclaimed first, and of these the one with the earliest end.
    """
    oracle = build(num_blocks=10)
    for name, ttl in (("j", 9), ("k", 5), ("l", 5)):
        keep(oracle, f"{name}1", 5, name, ttl)
    bring(oracle, "x", num_tokens, job)
    assert [row.request_id for row in plan(oracle).new] == ["x"]
    assert list(ends(oracle)) == left


# Resets, and other policies.


@pytest.mark.parametrize("is_forced", [False, True])
def test_pins_alone_do_not_prevent_a_reset(is_forced: bool) -> None:
    oracle = build()
    keep(oracle, "a", 5, "j", ttl=4)
    bring(oracle, "b", 3, "j", max_tokens=4)
    step(oracle)
    done = apply(oracle, Reset(reset_running_requests=is_forced))
    assert done == ResetDone(is_forced)
    assert ends(oracle) == ({} if is_forced else {"j": 4})
    assert kept(oracle).estimates == (PinEstimate("j", 4),)
    apply(oracle, Abort(("b",)))
    assert apply(oracle, Reset()) == ResetDone(True)
    assert kept(oracle) == PinsSnapshot()
    assert oracle.num_free_blocks == 8


def test_jobs_have_no_effect_without_the_continuum_policy() -> None:
    oracle = build(policy=Policy.FCFS)
    assert apply(oracle, Clock(4)) == Ack()
    keep(oracle, "a", 5, "j", ttl=4)
    assert oracle.snapshot().pins is None
    assert oracle.num_free_blocks == 8


def test_pins_need_prefix_caching() -> None:
    config = Config(num_blocks=9, policy=Policy.CONTINUUM, enable_prefix_caching=False)
    (problem,) = config_problems(config)
    assert problem.field == "policy"


@pytest.mark.parametrize("is_pin_first", [False, True])
def test_blocks_of_a_turn_are_free_after_its_pin_and_its_hold_have_ended(
    is_pin_first: bool,
) -> None:
    """The order of both does not matter."""

    def end_pin() -> None:
        apply(oracle, Clock(4))
        apply(oracle, Schedule())

    def end_hold() -> None:
        apply(oracle, TransfersReported(KVTransfers(finished_sending=("a",))))

    oracle = build(kv_connector=True)
    bring(oracle, "a", 5, "j")
    apply(oracle, KVOffer("a", delays_free=True))
    apply(oracle, PinEstimate("j", 4))
    step(oracle)
    assert kept(oracle).pins == (Pin("j", ((1, 2),), 4),)
    shown = oracle.snapshot()
    assert shown.transfers is not None
    assert shown.transfers.held[0].block_tables == ((1, 2, 3),)
    assert shown.ref_counts[1:4] == (2, 2, 1)
    for end in (end_pin, end_hold) if is_pin_first else (end_hold, end_pin):
        assert oracle.num_free_blocks < 8
        end()
    assert oracle.num_free_blocks == 8


def test_blocks_of_an_ended_pin_wait_for_the_frame_that_reads_them() -> None:
    """Otherwise a load could write to them while that frame runs."""
    oracle = build(kv_connector=True, max_frames_in_flight=2, async_scheduling=True)
    bring(oracle, "a", 5, "j", max_tokens=2, stop_token_ids=(9,))
    apply(oracle, PinEstimate("j", 4))
    plans = [plan(oracle), plan(oracle)]
    answer(oracle, plans[0])
    assert kept(oracle).pins == (Pin("j", ((1, 2),), 4),)
    assert oracle.snapshot().ref_counts[1:4] == (2, 2, 1)
    apply(oracle, Clock(4))
    empty = plan(oracle)
    assert kept(oracle).pins == ()
    assert oracle.snapshot().ref_counts[1:4] == (1, 1, 1)
    answer(oracle, plans[1])
    assert oracle.num_free_blocks == 8
    assert empty.rows == ()
