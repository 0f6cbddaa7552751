"""Profile: in which functions the steps of an engine spend their time.

The same traffic as when it is timed, and the profiler runs only inside the calls that are timed.
It makes small functions look dearer than they are, so what counts are shares, not microseconds. Its
clock is the one on the wall: reading processor time costs ten times as much at each call.
"""

from __future__ import annotations

import cProfile
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from blockstep.conformance.bench.measure import (
    PILOT,
    Advance,
    demand_equal,
    fill,
    garbage_collection,
    open_side,
)
from blockstep.conformance.bench.player import Pilot, Track, play
from blockstep.conformance.bench.scenarios import Scenario
from blockstep.spec.vocabulary import Commit, Schedule

STEPS = frozenset({"apply", "schedule_arrays", "commit_arrays", "schedule", "update_from_output"})
"""The calls of a step: of any engine, of one with arrays, and of vLLM's scheduler."""
PLACES = ("arrays", "scheduler", "engine")
"""Where a side keeps what it asks."""
ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Line:
    """One function."""

    function: str
    calls: float
    """In a step."""
    own: float
    """Share of all time that was spent in itself, 0 to 1."""
    total: float
    """The same, with what it called."""


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


class Watched:
    """An engine or scheduler whose steps the profiler sees, and nothing else of it."""

    def __init__(self, inner: Any, profiler: cProfile.Profile) -> None:
        self._inner = inner
        self._profiler = profiler

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._watch(found) if name in STEPS else found

    def _watch(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            if step.__name__ == "apply" and not isinstance(arguments[0], (Schedule, Commit)):
                return step(*arguments)
            self._profiler.enable()
            try:
                return step(*arguments)
            finally:
                self._profiler.disable()

        return watched


def profile(
    scenario: Scenario,
    num_running: int,
    engine: str,
    num_steps: int,
    num_lines: int,
    advance: Advance,
) -> Profile:
    """Look at `num_steps` steps: the `num_lines` functions that take most with what they call.

    Raises:
        NotMeasuredError: the engine says that its times would mean nothing here.
        NotEqualError: the engine decided differently from the pilot.
        EngineNotFoundError: it cannot be loaded.
    """
    config = scenario.get_config(num_running)
    side, track, profiler = open_side(engine, config), Track(), cProfile.Profile()
    pilot = Pilot(open_side(PILOT, config), scenario, num_running, config)
    advance(0.0, f"{engine}, {scenario.name} {num_running}: filling")
    play(side, track, fill(pilot, scenario, num_running))
    place = next(name for name in PLACES if hasattr(side, name))
    setattr(side, place, Watched(getattr(side, place), profiler))
    with garbage_collection(on=False):
        moments = [pilot.step() for _ in range(num_steps)]
        play(side, track, moments)
    demand_equal(pilot, scenario, engine, track)
    return _read(profiler, scenario.name, num_running, engine, num_steps, num_lines)


def _read(
    profiler: cProfile.Profile,
    scenario: str,
    num_running: int,
    engine: str,
    num_steps: int,
    num_lines: int,
) -> Profile:
    entries = [entry for entry in profiler.getstats() if "_lsprof" not in str(entry.code)]
    whole = sum(entry.inlinetime for entry in entries)
    lines = [
        Line(
            name_function(entry.code),
            entry.callcount / num_steps,
            entry.inlinetime / whole,
            entry.totaltime / whole,
        )
        for entry in entries
    ]
    lines.sort(key=lambda line: (-line.total, line.function))
    step = 1e6 * whole / num_steps
    return Profile(scenario, num_running, engine, num_steps, step, tuple(lines[:num_lines]))


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
    """For people."""
    what = f"{found.scenario}, {found.num_running:,} running, {found.engine}"
    return [
        f"{what}: {found.step:,.0f} us a step under the profiler",
        "  with calls   itself   calls a step",
        *(
            f"  {line.total:>9.1%} {line.own:>8.1%} {line.calls:>14,.1f}   {line.function}"
            for line in found.lines
        ),
    ]
