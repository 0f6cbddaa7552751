"""Turns: estimates and time, and the pins of finished turns."""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.memory.pins import (
    forget_jobs,
    free_pins,
    get_findable_tables,
    hold_pin,
    list_of_job,
    list_unfinished_jobs,
    take_estimate,
    tell_time,
)
from blockstep.spec.state import State
from blockstep.spec.vocabulary import Ack, Pin, PinEstimate, RequestId


def process_clock(state: State, now: int) -> tuple[State, Ack]:
    """Set the time to `now`: the next step ends pins that expire by then.

    Source: architecture D12; P18.
    """
    if not state.config.has_pins:
        return state, Ack()
    return replace(state, pins=tell_time(state.pins, now)), Ack()


def process_estimate(state: State, estimate: PinEstimate) -> tuple[State, Ack]:
    """Store an estimate for a job; ignore it for an unknown one.

    Source: seed 001 "Change 12"; P18.
    """
    if not state.config.has_pins:
        return state, Ack()
    return without_strange_jobs(replace(state, pins=take_estimate(state.pins, estimate))), Ack()


def get_turn_ended(state: State, request_id: RequestId) -> State:
    """Pin the blocks of a turn that has finished by its outputs, for its job's next turn.

    The pin is one more holder of each block, so the request then finishes like any other: with a
    store its blocks may be held for a transfer, or wait for a frame in flight, while they are
    pinned. Blocks are pinned if the job has an estimate above 0, and if any are cached; the pin
    replaces that of an earlier turn. After the last turn there is no pin. Source: seed 001
    "Change 4", "Change 12"; P17.
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
    if is_kept:
        pin = Pin(job_id, tables, pins.now + estimates[job_id])
        pool, pins = hold_pin(pool, pins, pin)
    return replace(state, pool=pool, pins=pins)


def without_pins(state: State) -> State:
    """End all pins, the oldest first. Source: P25."""
    if not state.pins.pins:
        return state
    pool, pins = free_pins(state.pool, state.pins, state.pins.pins)
    return without_strange_jobs(replace(state, pool=pool, pins=pins))


def without_strange_jobs(state: State) -> State:
    """Drop the estimates of jobs that have neither a pin nor an unfinished turn. Source: P17."""
    return replace(state, pins=forget_jobs(state.pins, list_unfinished_jobs(state.requests)))
