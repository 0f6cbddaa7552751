"""Profile: in which functions the steps of an engine spend their time.

The workload is the one of `measure`, and the profiler runs only inside the timed calls. It makes
small functions look more expensive than they are, so read shares, not microseconds. Its clock is
wall time: reading processor time costs ten times as much at each call.
"""

from __future__ import annotations

import cProfile
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

from blockstep.conformance.bench.measure import Advance, garbage_collection
from blockstep.conformance.bench.player import Pilot, play
from blockstep.conformance.bench.scenarios import Scenario
from blockstep.conformance.bench.timed_engines import get_terms

ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Line:
    """A function in a profile."""

    function: str
    calls: float
    """Calls per step."""
    own: float
    """Share of the time spent in the function itself, 0 to 1."""
    total: float
    """Share of the time including the functions that it called."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine in one scenario."""

    scenario: str
    num_running: int
    engine: str
    num_steps: int
    step: float
    """Microseconds of a step under the profiler."""
    lines: tuple[Line, ...]


def profile(
    scenario: Scenario,
    num_running: int,
    engine: str,
    num_steps: int,
    num_lines: int,
    advance: Advance,
) -> Profile:
    """Look at `num_steps` steps: the `num_lines` functions that take most with what they call.

    Raises: as `measure`.
    """
    pilot, profiler = Pilot(scenario, num_running, get_terms([engine])), cProfile.Profile()
    side = pilot.open_side(engine)
    advance(0.0, f"{engine}, {scenario.name} {num_running}: filling")
    play(side, pilot.fill(), engine, pilot)
    side.ask = partial(side.ask, profiler.runcall)
    with garbage_collection(on=False):
        play(side, pilot.play(num_steps), engine, pilot)
    entries = [entry for entry in profiler.getstats() if "_lsprof" not in str(entry.code)]
    whole = sum(entry.inlinetime for entry in entries)
    lines = [
        Line(
            name_function(e.code),
            e.callcount / num_steps,
            e.inlinetime / whole,
            e.totaltime / whole,
        )
        for e in entries
    ]
    lines.sort(key=lambda line: (-line.total, line.function))
    step = 1e6 * whole / num_steps
    return Profile(scenario.name, num_running, engine, num_steps, step, tuple(lines[:num_lines]))


def name_function(code: str | CodeType) -> str:
    """`impl/host/scheduler.py: HostEngine.schedule`; no paths and addresses of this machine."""
    if isinstance(code, str):
        return ADDRESS.sub("", code)  # built in
    path = Path(code.co_filename)
    for root in ("blockstep", "site-packages"):
        _, found, inside = path.parent.as_posix().rpartition(f"/{root}/")
        if found:
            return f"{inside}/{path.name}: {code.co_qualname}"
    return f"{path.name}: {code.co_qualname}"


def to_lines(found: Profile) -> list[str]:
    """Return the profile as lines of text."""
    what = f"{found.scenario}, {found.num_running:,} running, {found.engine}"
    return [
        f"{what}: {found.step:,.0f} us a step under the profiler",
        "  with calls   itself   calls a step",
        *(
            f"  {line.total:>9.1%} {line.own:>8.1%} {line.calls:>14,.1f}   {line.function}"
            for line in found.lines
        ),
    ]
