"""Pins: blocks kept between two turns of a job, for a time."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.spec.vocabulary.request import BlockTables


@dataclass(frozen=True, slots=True)
class Pin:
    """The cached blocks of a finished turn, kept for the next turn of its job.

    An earlier pin of the job ends, and its blocks are freed before the turn's own blocks that are
    not kept. If a turn leaves nothing to keep, the earlier pin stays, unless it is the last turn.
    If a request lacks blocks while no other one runs, pins end one by one: first those of other
    jobs, of these the one with the least `end`, of equal ones that of the turn that ended first. A
    reset ends all of them, in order, after the blocks of requests were released. Source: seed 001
    "Change 4", corrected: blocks that are not cached are freed at once.
    """

    job_id: str
    block_tables: BlockTables
    """Per group: its leading blocks that were published or hit. Null blocks take the places of
    skipped blocks."""
    end: int
    """Ticks: the first step from this time on frees them, before it takes any block."""


@dataclass(frozen=True, slots=True)
class PinEstimate:
    """The estimator's answer about a job from now on, replacing the previous one.

    If a turn of the job ends later, its blocks are kept for `ttl` ticks; if the job has a pin, it
    ends `ttl` ticks from now. Ignored for a job with neither a pin nor an unfinished turn. Source:
    seed 001 "Change 12", where the estimator is asked when a turn ends. Observation: `Ack`.
    """

    job_id: str
    ttl: int = 0
    """Ticks; 0: no blocks are kept."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The time. Plans made before do not know it. Observation: `Ack`."""

    now: int
    """Ticks since some origin, as `Request.arrival_time`; a time earlier than the last one changes
    nothing."""
