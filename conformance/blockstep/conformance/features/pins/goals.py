"""Goals that need pins: blocks kept between turns of jobs, and their end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec import vocabulary as v

TEXTS = {
    "pins_set": "a turn ended, and its cached blocks were pinned",
    "pins_replaced": "a turn ended, and its pin replaced that of an earlier turn",
    "pins_last_step": "the last turn of a job ended, and so did the job's pin",
    "pins_not_worth_it": "a turn of a job without an estimate ended",
    "pins_nothing_to_find": "a turn ended before a block of it was cached",
    "pins_beside_another_turn": "a turn ended while another one of its job was unfinished",
    "pins_of_whom_gave_up": "a turn was aborted, and nothing of it was pinned",
    "pins_expired": "a pin ended at its time",
    "pins_gave_way_to_one_who_runs": (
        "a pin was reclaimed for a request that ran alone and lacked blocks"
    ),
    "pins_gave_way_to_one_who_waits": "a pin was reclaimed for a waiting request while none ran",
    "pins_preempted_beside": "a request was preempted while pins held blocks",
    "pins_hit": "the next turn of a job hit blocks that its pin had kept",
    "pins_outlived_its_next_turn": (
        "a turn of a job with a pin was admitted and hit none of its blocks"
    ),
    "pins_victim_stands_ahead": "a victim was before a request of a pinned job in the running list",
    "pins_victim_of_a_job": "a request of a pinned job was preempted",
    "pins_warm_goes_ahead": "a request of a pinned job overtook another waiting one",
    "pins_preempted_stays_ahead": "a preempted request stayed before one of a pinned job",
    "pins_estimated_anew": "the time of a pin was changed by an estimate",
    "pins_estimate_of_nobody": "an estimate came for a job without turn and pin",
    "pins_clock_backward": "a Clock gave an earlier time",
    "pins_reset": "a reset ended pins, which alone held blocks",
    "pins_reset_forced": "a forced reset ended pins and preempted running requests",
    "pins_reset_refused": "a reset failed, and pins stayed",
}


def of_pins(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of an event with pins."""
    before, after = step.before.pins, step.after.pins
    if before is None or after is None:
        return
    match step.event, step.observation:
        case v.Schedule(), v.Plan():
            yield from _of_plan(step, history, before, after)
        case (v.Commit(), v.Outputs()) | (v.Abort(), v.Aborted()):
            yield from _of_ends(step, history, before, after)
        case v.Clock(now=now), _ if now < before.now:
            yield "pins_clock_backward"
        case v.PinEstimate(job_id=job_id), _:
            if before.pins != after.pins:
                yield "pins_estimated_anew"
            jobs = {pin.job_id for pin in before.pins}
            jobs |= {str(history.lives[name].request.job_id) for name in step.old}
            if job_id not in jobs:
                yield "pins_estimate_of_nobody"
        case v.Reset(), v.ResetDone(success=success) if before.pins:
            forced = "pins_reset_forced" if step.before.running else "pins_reset"
            yield forced if success else "pins_reset_refused"


def _of_plan(
    step: Step, history: History, before: v.PinsSnapshot, after: v.PinsSnapshot
) -> Iterator[str]:
    kept = {pin.job_id: pin for pin in before.pins if pin.end > before.now}
    if len(kept) < len(before.pins):
        yield "pins_expired"
    if len(after.pins) < len(kept):
        winner = "one_who_runs" if step.before.running else "one_who_waits"
        yield f"pins_gave_way_to_{winner}"
    if step.preempted and kept:
        yield "pins_preempted_beside"
    for row in step.admitted_rows:
        pin = kept.get(str(history.lives[row.request_id].request.job_id))
        if pin is not None:
            is_found = not set(row.hits).isdisjoint(chain(*pin.block_tables))
            yield "pins_hit" if is_found else "pins_outlived_its_next_turn"
    yield from _of_order(step, history, set(kept))


def _of_order(step: Step, history: History, warm: set[str]) -> Iterator[str]:
    """Yield the goals of requests that overtake others, or are preempted, because of pins."""

    def is_warm(name: v.RequestId) -> bool:
        return history.lives[name].request.job_id in warm

    first_cold = first_returned = False
    for name in step.before.waiting:
        if step.old[name].status is v.Status.PREEMPTED:
            first_returned = True
        elif not is_warm(name):
            first_cold = True
        else:
            if first_cold:
                yield "pins_warm_goes_ahead"
            if first_returned:
                yield "pins_preempted_stays_ahead"
    for name in step.preempted:
        if is_warm(name):
            yield "pins_victim_of_a_job"
        elif any(is_warm(other) for other in step.before.running[step.place[name] :]):
            yield "pins_victim_stands_ahead"


def _of_ends(
    step: Step, history: History, before: v.PinsSnapshot, after: v.PinsSnapshot
) -> Iterator[str]:
    """Yield the goals of turns that end."""
    estimates = {estimate.job_id for estimate in before.estimates}
    had, has = ({pin.job_id: pin for pin in it.pins} for it in (before, after))
    for name in step.ended:
        asked = history.lives[name].request
        job_id = asked.job_id
        if job_id is None:
            continue
        if isinstance(step.event, v.Abort):
            if job_id in estimates and any(step.old[name].num_cached_blocks):
                yield "pins_of_whom_gave_up"
        elif asked.is_last_step:
            if job_id in had and job_id not in has:
                yield "pins_last_step"
        elif job_id not in estimates:
            yield "pins_not_worth_it"
        elif has.get(job_id) == had.get(job_id):
            yield "pins_nothing_to_find"
        else:
            yield "pins_replaced" if job_id in had else "pins_set"
            if any(history.lives[other].request.job_id == job_id for other in step.new):
                yield "pins_beside_another_turn"


GOALS = Goals(
    TEXTS,
    dict.fromkeys((v.Schedule, v.Commit, v.Abort, v.Clock, v.PinEstimate, v.Reset), of_pins),
)
