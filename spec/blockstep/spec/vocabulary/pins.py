"""Pins: blocks that stay between two turns of a job, for a time."""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.spec.vocabulary.request import BlockTables


@dataclass(frozen=True, slots=True)
class Pin:
    """What a turn that has ended keeps for the next one of its job: blocks that can be found.

    A pin of its job from before ends, and its blocks are free before those that the turn does not
    leave. A turn that leaves nothing leaves that pin as it is, unless it is the last one. Who lacks
    blocks while nobody else runs has pins end one by one: of other jobs first, of these the one
    with the least `end`, of equal ones that of the turn that ended first. A reset ends all of them,
    in order, behind what requests hold. Source: seed 001 "Change 4", made sound: blocks that nobody
    can find are free at once.
    """

    job_id: str
    block_tables: BlockTables
    """Per group: its leading blocks whose hash is settled. Null blocks stand for what is not
    attended any more."""
    end: int
    """Ticks: the first step from this time on frees them, before it takes any block."""


@dataclass(frozen=True, slots=True)
class PinEstimate:
    """What the estimator gives for a job from now on, instead of before.

    Whose turn ends then keeps its blocks for so long; and if the job has a pin, it has so long from
    now. Of a job of which there is neither a pin nor an unfinished turn it says nothing. Source:
    seed 001 "Change 12", where the estimator is asked as a turn ends. Observation: `Ack`.
    """

    job_id: str
    ttl: int = 0
    """Ticks; 0: nothing stays."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The time, as an event: what was planned before does not know it. Observation: `Ack`."""

    now: int
    """Ticks since some beginning, as `Request.arrival_time`; an earlier time than one that was told
    changes nothing."""
