"""Jobs: agents whose requests come in turns, and the estimates of the time until the next turn.

A next turn comes early, late, twice or never; estimates are short, so that a pin ends between any
two events; the clock advances, repeats a time, and sometimes goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.spec import vocabulary as v

JOBS = ("x", "y", "z")


def draw_pins(config: v.Config) -> v.Config:
    """Return the config, which has prefix caching, with the policy that pins blocks."""
    return replace(config, policy=v.Policy.CONTINUUM)


def draw_job(request: v.Request, draw: Draw, job_id: str | None = None) -> v.Request:
    """Return the request as a turn of `job_id`, of any job, or of none; sometimes as the last
    turn."""
    job_id = job_id or draw.choice((None, *JOBS, *JOBS))
    return replace(request, job_id=job_id, is_last_step=draw.chance(12))


def draw_estimate(jobs: Collection[str], draw: Draw) -> v.PinEstimate:
    """Draw for how long a job's blocks are pinned: not at all, for some ticks, or for ever."""
    job_id = draw.choice((*jobs, *jobs, *JOBS))
    return v.PinEstimate(job_id, draw.choice((0, 1, 2, 3, 6, 20, 20, v.MAX_INT)))


def draw_clock(now: int, draw: Draw) -> v.Clock:
    """Draw a clock event: a later time, the same one, or sometimes an earlier one."""
    return v.Clock(max(now + draw.choice((-3, 0, 1, 1, 1, 2, 3, 8)), 0))


def list_strange_pins(names: Sequence[v.RequestId]) -> list[v.Event]:
    """Return malformed events, and estimates for unknown jobs."""
    return [
        v.Clock(-1),
        v.PinEstimate("", 1),
        v.PinEstimate("x", -1),
        v.PinEstimate("nobody", 5),
        v.Submit(v.Request(names[-1], (0,), job_id="")),
    ]
