"""Situations that there are only with pins: what stays between turns of jobs, and how it goes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec import vocabulary as v

PINS = {
    "pins_set": "a turn ended, and what can be found of it stays",
    "pins_replaced": "a turn ended, and its pin took the place of that of a turn before",
    "pins_last_step": "the last turn of a job ended, and the pin of the job with it",
    "pins_not_worth_it": "a turn ended, and the estimate gave nothing for its job",
    "pins_nothing_to_find": "a turn ended before a block of it could be found",
    "pins_beside_another_turn": "a turn ended while another one of its job had not",
    "pins_of_whom_gave_up": "a turn was aborted, and nothing of it stayed",
    "pins_expired": "a pin went because its time was over",
    "pins_gave_way_to_one_who_runs": "a pin went for one who ran alone and lacked blocks",
    "pins_gave_way_to_one_who_waits": "a pin went for one who waited while nobody ran",
    "pins_preempted_beside": "somebody was preempted while pins held blocks",
    "pins_hit": "the next turn of a job found blocks that its pin had kept",
    "pins_outlived_its_next_turn": "a job had a pin, and a turn of it was admitted and found none",
    "pins_victim_stands_ahead": "who was preempted stood ahead of one of a job with a pin",
    "pins_victim_of_a_job": "one of a job with a pin was preempted",
    "pins_warm_goes_ahead": "one of a job with a pin overtook another who waited",
    "pins_preempted_stays_ahead": "who was preempted stayed ahead of one of a job with a pin",
    "pins_estimated_anew": "a pin was given another time",
    "pins_estimate_of_nobody": "an estimate came for a job with no turn and no pin",
    "pins_clock_backward": "an earlier time was told",
    "pins_reset": "a reset ended pins, which alone held blocks",
    "pins_reset_forced": "a reset by force ended pins beside requests that ran",
    "pins_reset_refused": "a reset was refused, and pins stayed",
}


def of_pins(step: Step, ledger: Ledger) -> Iterator[str]:
    """What an event shows of pins."""
    before, after = step.before.pins, step.after.pins
    if before is None or after is None:
        return
    match step.event, step.observation:
        case v.Schedule(), v.Plan():
            yield from _of_plan(step, ledger, before, after)
        case (v.Commit(), v.Outputs()) | (v.Abort(), v.Aborted()):
            yield from _of_ends(step, ledger, before, after)
        case v.Clock(now=now), _ if now < before.now:
            yield "pins_clock_backward"
        case v.PinEstimate(job_id=job_id), _:
            if before.pins != after.pins:
                yield "pins_estimated_anew"
            jobs = {pin.job_id for pin in before.pins}
            jobs |= {str(ledger.lives[name].request.job_id) for name in step.old}
            if job_id not in jobs:
                yield "pins_estimate_of_nobody"
        case v.Reset(), v.ResetDone(success=success) if before.pins:
            forced = "pins_reset_forced" if step.before.running else "pins_reset"
            yield forced if success else "pins_reset_refused"


def _of_plan(
    step: Step, ledger: Ledger, before: v.PinsSnapshot, after: v.PinsSnapshot
) -> Iterator[str]:
    kept = {pin.job_id: pin for pin in before.pins if pin.end > before.now}
    if len(kept) < len(before.pins):
        yield "pins_expired"
    if len(after.pins) < len(kept):
        who = "one_who_runs" if step.before.running else "one_who_waits"
        yield f"pins_gave_way_to_{who}"
    if step.preempted and kept:
        yield "pins_preempted_beside"
    for row in step.admitted_rows:
        pin = kept.get(str(ledger.lives[row.request_id].request.job_id))
        if pin is not None:
            is_found = not set(row.hits).isdisjoint(chain(*pin.block_tables))
            yield "pins_hit" if is_found else "pins_outlived_its_next_turn"
    yield from _of_order(step, ledger, set(kept))


def _of_order(step: Step, ledger: Ledger, warm: set[str]) -> Iterator[str]:
    """Who goes ahead of whom, and who has to go, for the sake of jobs that have a pin."""

    def is_warm(name: v.RequestId) -> bool:
        return ledger.lives[name].request.job_id in warm

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
    step: Step, ledger: Ledger, before: v.PinsSnapshot, after: v.PinsSnapshot
) -> Iterator[str]:
    """What the ends of turns leave behind."""
    estimates = {estimate.job_id for estimate in before.estimates}
    had, has = ({pin.job_id: pin for pin in it.pins} for it in (before, after))
    for name in step.ended:
        asked = ledger.lives[name].request
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
            if any(ledger.lives[other].request.job_id == job_id for other in step.new):
                yield "pins_beside_another_turn"
