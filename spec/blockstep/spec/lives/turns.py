"""Turns: what is told of jobs and of the time, and what a turn leaves behind for the next."""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.memory.pins import (
    forget_jobs,
    free_pins,
    get_findable_tables,
    list_of_job,
    list_unfinished_jobs,
    take_estimate,
    tell_time,
    without_findable,
)
from blockstep.spec.state import State
from blockstep.spec.vocabulary import Ack, Pin, PinEstimate, RequestId


def process_clock(state: State, now: int) -> tuple[State, Ack]:
    """It is `now`: the next step looks at what is over by then. Source: architecture D12; P18."""
    if not state.config.has_pins:
        return state, Ack()
    return replace(state, pins=tell_time(state.pins, now)), Ack()


def process_estimate(state: State, estimate: PinEstimate) -> tuple[State, Ack]:
    """An estimator gives something for a job; for one that nobody knows it says nothing.

    Source: seed 001 "Change 12"; P18.
    """
    if not state.config.has_pins:
        return state, Ack()
    return without_strange_jobs(replace(state, pins=take_estimate(state.pins, estimate))), Ack()


def get_turn_ended(state: State, request_id: RequestId) -> State:
    """The state once a turn that has said what it had to say left its blocks to its job's next one.

    The request then ends like any other, with what is left to it. Blocks stay if the estimate for
    the job gives them time, and if any can be found; they take the place of those of a turn before.
    Behind the last turn nothing stays. Source: seed 001 "Change 4", "Change 12"; P17.
    """
    request = state.requests[request_id]
    job_id, is_last = request.request.job_id, request.request.is_last_step
    if job_id is None:
        return state
    tables, estimates = get_findable_tables(request), state.pins.estimates
    is_kept = bool(tables) and job_id in estimates and not is_last
    if not is_kept and not is_last:
        return state
    pool, pins = free_pins(state.pool, state.pins, list_of_job(state.pins, job_id))
    state = replace(state, pool=pool, pins=pins)
    if not is_kept:
        return state
    pins = replace(pins, pins=(*pins.pins, Pin(job_id, tables, pins.now + estimates[job_id])))
    requests = state.requests.having(request_id, without_findable(request))
    return replace(state, pins=pins, requests=requests)


def without_pins(state: State) -> State:
    """The state once all pins have ended, the oldest first. Source: P25."""
    if not state.pins.pins:
        return state
    pool, pins = free_pins(state.pool, state.pins, state.pins.pins)
    return without_strange_jobs(replace(state, pool=pool, pins=pins))


def without_strange_jobs(state: State) -> State:
    """The state without estimates for jobs of which there is nothing any more. Source: P17."""
    return replace(state, pins=forget_jobs(state.pins, list_unfinished_jobs(state.requests)))
