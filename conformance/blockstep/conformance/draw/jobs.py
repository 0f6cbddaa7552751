"""Jobs: agents that come back in turns, and what they are told to be worth waiting for.

A next turn is early, late, comes twice or never; estimates are short, so that a pin ends between
any two events; the time goes on, stands, and is told once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.spec import vocabulary as v

JOBS = ("x", "y", "z")


def draw_pins(config: v.Config) -> v.Config:
    """The config, which has prefix caching, with blocks that stay between turns."""
    return replace(config, policy=v.Policy.CONTINUUM)


def draw_job(request: v.Request, draw: Draw, job_id: str | None = None) -> v.Request:
    """The request as a turn of this job, or of any, or of none; at times as its last."""
    job_id = job_id or draw.choice((None, *JOBS, *JOBS))
    return replace(request, job_id=job_id, is_last_step=draw.chance(12))


def draw_estimate(jobs: Collection[str], draw: Draw) -> v.PinEstimate:
    """How long a job's blocks stay: not at all, for some ticks, or for ever."""
    job_id = draw.choice((*jobs, *jobs, *JOBS))
    return v.PinEstimate(job_id, draw.choice((0, 1, 2, 3, 6, 20, 20, v.MAX_INT)))


def draw_clock(now: int, draw: Draw) -> v.Clock:
    """The time goes on, or is told again; at times an earlier one is."""
    return v.Clock(max(now + draw.choice((-3, 0, 1, 1, 1, 2, 3, 8)), 0))


def list_strange_pins(names: Sequence[v.RequestId]) -> list[v.Event]:
    """Malformed ones, and those about jobs that nobody knows."""
    return [
        v.Clock(-1),
        v.PinEstimate("", 1),
        v.PinEstimate("x", -1),
        v.PinEstimate("nobody", 5),
        v.Submit(v.Request(names[-1], (0,), job_id="")),
    ]
