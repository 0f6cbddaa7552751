"""Pins: blocks kept between two turns of a job, and how pins end.

    | cached: pinned | not full, not verified, lookahead: free |   table of a turn that ends

A state machine of its own (architecture D11): it knows jobs and blocks, and no queue. There is at
most one pin per job, and each has an end: its time, the job's next pin, the end of the last turn, a
reset, or a request that lacks blocks while no other one runs (P10, P17).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.maps import FrozenMap
from blockstep.spec.pool import Pool, free_blocks, touch_blocks
from blockstep.spec.requests import RequestState, without_nulls
from blockstep.spec.vocabulary import BlockTables, Pin, PinEstimate, RequestId

NO_ESTIMATES: Final[FrozenMap[str, int]] = FrozenMap()


@dataclass(frozen=True, slots=True)
class Pins:
    """The pins, estimates and time."""

    now: int = 0
    """Ticks: the latest time of a `Clock`."""
    pins: tuple[Pin, ...] = ()
    """The pins, in the order in which turns ended."""
    estimates: FrozenMap[str, int] = NO_ESTIMATES
    """Ticks for which a job's blocks are pinned, by job; without those of 0."""


NO_PINS: Final = Pins()


# Events.


def tell_time(pins: Pins, now: int) -> Pins:
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
