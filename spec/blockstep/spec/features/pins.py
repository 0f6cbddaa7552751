"""Pins: blocks kept between two turns of a job, and how pins end.

    | cached: pinned | not full, not verified, lookahead: free |   table of a turn that ends

A state machine of its own (architecture D11): it knows jobs and blocks, and no queue. There is at
most one pin per job, and each has an end: its time, the job's next pin, the end of the last turn, a
reset, or a request that lacks blocks while no other one runs (P10, P17).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.core.block_pool import Pool, free_blocks, touch_blocks
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.preemption import get_victim_index
from blockstep.spec.core.queues import Requests
from blockstep.spec.core.requests import RequestState, without_nulls
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import (
    Ack,
    BlockTables,
    Clock,
    Config,
    Pin,
    PinEstimate,
    PinsSnapshot,
    RequestId,
    Status,
)

NO_ESTIMATES: Final[FrozenMap[str, int]] = FrozenMap()


@wide_dataclass(frozen=True, slots=True)
class Pins:
    """The pins, estimates and time."""

    now: int = 0
    """Ticks: the latest time of a `Clock`."""
    pins: tuple[Pin, ...] = ()
    """The pins, in the order in which turns ended."""
    estimates: FrozenMap[str, int] = NO_ESTIMATES
    """Ticks for which a job's blocks are pinned, by job; without those of 0."""


NO_PINS: Final = Pins()
PINS: Final = Part("pins", NO_PINS)
"""The pins of a state, or of a step."""


# What events say.


def set_time(pins: Pins, now: int) -> Pins:
    """Set the time to `now`, unless that is earlier. Source: architecture D12; P18."""
    return replace(pins, now=max(pins.now, now))


def take_estimate(pins: Pins, estimate: PinEstimate) -> Pins:
    """Replace the estimate of a job; its pin, if any, ends that many ticks from now.

    Source: seed 001 "Change 12"; architecture D12.
    """
    job_id, end = estimate.job_id, pins.now + estimate.ttl
    estimates = pins.estimates.without(job_id)
    if estimate.ttl:
        estimates = estimates.having(job_id, estimate.ttl)
    kept = [replace(pin, end=end) if pin.job_id == job_id else pin for pin in pins.pins]
    return replace(pins, pins=tuple(kept), estimates=estimates)


def list_unfinished_jobs(requests: Mapping[RequestId, RequestState]) -> list[str | None]:
    """Return the jobs of unfinished requests, one entry per request. Source: P17."""
    return [requests[name].request.job_id for name in sorted(requests)]


def forget_jobs(pins: Pins, unfinished: Collection[str | None]) -> Pins:
    """Drop estimates for jobs that have neither a pin nor an unfinished turn. Source: P17."""
    known = {*unfinished, *list_jobs(pins)}
    gone = [job_id for job_id in sorted(pins.estimates) if job_id not in known]
    if not gone:
        return pins
    estimates = pins.estimates
    for job_id in gone:
        estimates = estimates.without(job_id)
    return replace(pins, estimates=estimates)


# Selections of pins.


def list_jobs(pins: Pins) -> list[str]:
    """Return the jobs that have a pin. Source: seed 001 "Change 5"."""
    return [pin.job_id for pin in pins.pins]


def list_of_job(pins: Pins, job_id: str) -> list[Pin]:
    """Return the pin of a job, if it has one. Source: seed 001 "Change 4"; P17."""
    return [pin for pin in pins.pins if pin.job_id == job_id]


def list_expired(pins: Pins) -> list[Pin]:
    """Return pins whose time is over, the oldest first. Source: seed 001 "Change 4"; P17."""
    return [pin for pin in pins.pins if is_expired(pin.end, pins.now)]


def is_expired(end: int, now: int) -> bool:
    """Whether a pin's time is over. Source: seed 001 "Change 4"."""
    return end <= now


def list_givers(pins: Pins, job_id: str | None) -> list[Pin]:
    """Return the pins in the order in which they are reclaimed for a turn of this job.

    Its own is the last, and of others the one that would end first, and then the oldest. Source:
    P10.
    """
    return sorted(pins.pins, key=lambda pin: (pin.job_id == job_id, pin.end))


# Blocks.


def get_findable_tables(request: RequestState) -> BlockTables:
    """Return, per group, the leading blocks that a next turn can hit; () if there are none.

    Source: seed 001 "Change 12", where all blocks are kept, even those that cannot be hit; P17.
    """
    tables = tuple(
        [holding.block_table[: holding.num_cached_blocks] for holding in request.holdings]
    )
    return tables if any(map(any, tables)) else ()


def hold_pin(pool: Pool, pins: Pins, pin: Pin) -> tuple[Pool, Pins]:
    """Return pool and pins with one more pin, which holds a reference to each of its blocks.

    Source: seed 001 "Change 4"; P17.
    """
    for table in pin.block_tables:
        pool = touch_blocks(pool, without_nulls(table))
    return pool, replace(pins, pins=(*pins.pins, pin))


def free_pins(pool: Pool, pins: Pins, gone: Sequence[Pin]) -> tuple[Pool, Pins]:
    """Return pool and pins after these have ended, in this order: the last block of each table
    first.

    Other holders of a block keep it. Source: seed 001 "Change 4"; P1, P17.
    """
    for pin in gone:
        for table in pin.block_tables:
            pool = free_blocks(pool, without_nulls(table))
    return pool, replace(pins, pins=tuple([pin for pin in pins.pins if pin not in gone]))


# Events.


def process_clock(state: State, clock: Clock) -> tuple[State, Ack]:
    """Set the time to `clock.now`: the next step ends pins that expire by then.

    Source: architecture D12; P18.
    """
    if not state.config.has_pins:
        return state, Ack()
    return PINS.put(state, set_time(PINS.of(state), clock.now)), Ack()


def process_estimate(state: State, estimate: PinEstimate) -> tuple[State, Ack]:
    """Store an estimate for a job; ignore it for an unknown one.

    Source: seed 001 "Change 12"; P18.
    """
    if not state.config.has_pins:
        return state, Ack()
    return without_unknown_jobs(PINS.put(state, take_estimate(PINS.of(state), estimate))), Ack()


def get_after_turn(state: State, request_id: RequestId) -> State:
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
    pins = PINS.of(state)
    tables, estimates = get_findable_tables(request), pins.estimates
    is_kept = bool(tables) and job_id in estimates and not is_last
    if not is_kept and not is_last:
        return state
    pool, pins = free_pins(state.pool, pins, list_of_job(pins, job_id))
    if is_kept:
        pin = Pin(job_id, tables, pins.now + estimates[job_id])
        pool, pins = hold_pin(pool, pins, pin)
    return PINS.put(replace(state, pool=pool), pins)


def without_pins(state: State) -> State:
    """End all pins, the oldest first. Source: P25."""
    pins = PINS.of(state)
    if not pins.pins:
        return state
    pool, pins = free_pins(state.pool, pins, pins.pins)
    return without_unknown_jobs(PINS.put(replace(state, pool=pool), pins))


def without_unknown_jobs(state: State) -> State:
    """Drop the estimates of jobs that have neither a pin nor an unfinished turn. Source: P17."""
    pins = PINS.of(state)
    if not pins.estimates:
        return state
    return PINS.put(state, forget_jobs(pins, list_unfinished_jobs(state.requests)))


# A step.


def process_pin_expiry(step: Step) -> None:
    """End pins whose time is over, before any allocation; then sort jobs with a pin to the front.

    Source: seed 001 "Change 5"; P16, P17.
    """
    process_unpin(step, list_expired(PINS.of(step)))
    step.waiting = get_pinned_jobs_first(step.waiting, step.requests, list_jobs(PINS.of(step)))


def get_pinned_jobs_first(
    waiting: Iterable[RequestId], requests: Requests, warm: Collection[str]
) -> list[RequestId]:
    """Return the queue with preempted requests first, then those of jobs with a pin; stable.

    A preempted request has waited longest, and computes its tokens again. Source: seed 001 "Change
    5"; P16.
    """
    return sorted(waiting, key=lambda name: compute_queue_class(requests[name], warm))


def compute_queue_class(request: RequestState, warm: Collection[str]) -> int:
    """Return the request's class in the queue; the least goes first.

    Source: seed 001 "Change 5"; P16.
    """
    if request.status is Status.PREEMPTED:
        return 0
    return 1 if request.request.job_id in warm else 2


def process_yielding(step: Step, receiver_id: RequestId) -> bool:
    """End a pin for a request that lacks blocks, because no request holds these; return whether
    there was one. Source: P10, P17.
    """
    givers = list_givers(PINS.of(step), step.requests[receiver_id].request.job_id)
    process_unpin(step, givers[:1])
    return bool(givers)


def process_unpin(step: Step, gone: list[Pin]) -> None:
    """End these pins now. Source: seed 001 "Change 4"; P17."""
    if gone:
        step.pool, pins = free_pins(step.pool, PINS.of(step), gone)
        PINS.set(step, forget_jobs(pins, list_unfinished_jobs(step.requests)))


def get_cold_victim_index(step: Step) -> int:
    """Return the index in `running` of the request to preempt: the last one without a pinned job.

    Source: seed 001 "Change 7"; P16.
    """
    return select_cold_victim(step.running, step.requests, list_jobs(PINS.of(step)))


def select_cold_victim(
    running: Sequence[RequestId], requests: Requests, warm: Collection[str]
) -> int:
    """Return the index of the last request whose job is not in `warm`, or of the last one.

    Source: seed 001 "Change 7"; P16.
    """
    jobs = [requests[name].request.job_id for name in running]
    cold = [index for index, job_id in enumerate(jobs) if job_id not in warm]
    return max(cold, default=len(running) - 1)


# Every state.


def is_every_pin_of_a_job_and_findable(state: State) -> bool:
    """A job has at most one pin, of cached blocks.

    An estimate is for a job that has a pin or an unfinished turn. Source: P3, P17.
    """
    pins = PINS.of(state)
    jobs = list_jobs(pins)
    known = {*jobs, *list_unfinished_jobs(state.requests)}
    blocks = [without_nulls(sum(pin.block_tables, ())) for pin in pins.pins]
    return (
        len({*jobs}) == len(jobs)
        and all(blocks)
        and all(state.pool.block_keys[block_id] is not None for held in blocks for block_id in held)
        and all(job in known and pins.estimates[job] > 0 for job in sorted(pins.estimates))
        and (state.config.has_pins or pins == NO_PINS)
    )


# The feature.


def list_pinned(state: State) -> list[BlockTables]:
    """Return the tables of each pin. Source: P1, P17."""
    return [pin.block_tables for pin in PINS.of(state).pins]


def get_snapshot(state: State) -> PinsSnapshot:
    """Return the pins of jobs, and estimates by job. Source: architecture D1."""
    pins = PINS.of(state)
    estimates = [PinEstimate(*entry) for entry in sorted(pins.estimates.items())]
    return PinsSnapshot(now=pins.now, pins=pins.pins, estimates=tuple(estimates))


def has_pins(config: Config) -> bool:
    """Whether blocks may be pinned between two turns of a job. Source: seed 001 "Feature A"."""
    return config.has_pins


FEATURE: Final = Feature(
    "pins",
    has_pins,
    Hooks(
        givers=(process_yielding,),
        begins=(process_pin_expiry,),
        stops=(get_after_turn,),
        ends=(without_unknown_jobs,),
        resets=(without_pins,),
    ),
    instead={get_victim_index: get_cold_victim_index},
    events={Clock: process_clock, PinEstimate: process_estimate},
    shows={"pins": get_snapshot},
    list_held=list_pinned,
    invariants=(is_every_pin_of_a_job_and_findable,),
)
