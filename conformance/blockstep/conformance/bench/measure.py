"""Measure: several sides in turn, step by step, in one process, as long as they decide alike."""

from __future__ import annotations

import gc
import os
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from blockstep.conformance.bench.player import Moment, Pilot, Timing, play
from blockstep.conformance.bench.scenarios import SCENARIOS, Scenario
from blockstep.conformance.bench.timed_engines import (
    ArraySide,
    NotEqualError,
    SideError,
    TimedEngine,
    find_obstacle,
    get_terms,
)
from blockstep.conformance.protocol.features import UsageError

REHEARSAL = {"decode": 1, "storm": 14, "drafts": 14, "async": 14, "priority": 14, "hits": 2}
"""Scenarios that are played before any measurement, with their numbers of running requests."""

THROUGH_APPLY = " through apply"
"""The end of the title of a second side of an engine."""

Advance: TypeAlias = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds over all measured steps."""

    p50: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Step times of one side in one reading."""

    engine: str
    reading: str
    schedule: Spread
    commit: Spread
    step: Spread
    """Schedule and commit of a step together."""
    memory_mib: float
    """Growth of the process while this side was built and filled."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All sides in one scenario at one size."""

    scenario: str
    num_running: int
    num_steps: int
    rows_mean: float
    tokens_mean: float
    """Tokens scheduled in a step."""
    new_mean: float
    """New requests admitted in a step."""
    preempted_mean: float
    digest: str
    """Digest of all decisions and deliveries from the first step on; equal for all sides."""
    readings: tuple[Reading, ...]
    num_rounds: int = 1
    """Number of measurements; each figure is their median."""
    equivalence: str = "exact"
    """Equivalence that the sides are held to; at `safety` one side decides by itself."""


def measure(
    scenario: Scenario,
    num_running: int,
    engines: Sequence[str],
    num_steps: int,
    gc_on: bool,
    advance: Advance,
    through_apply: bool = False,
) -> Measurement:
    """Time `num_steps` steps of every engine, or all steps there are if the traffic ends.

    With `through_apply`, engines with arrays are timed a second time through `apply`, as a side of
    their own.

    The pilot plays ahead and writes down what comes in; each side plays the same after it, a few
    steps in turn. The first step of a turn warms the caches up and is not counted; the order of the
    sides turns round each time. An engine that is not exact is measured alone.

    Raises:
        NotEqualError: two sides decided or delivered differently.
        SideError: an engine broke.
        UsageError: an engine says that its times would mean nothing here, or lets too few run.
        EngineNotFoundError: an engine cannot be loaded.
    """
    title = f"{scenario.name} {num_running}"
    pilot = Pilot(scenario, num_running, get_terms(engines))
    advance(0.0, f"{title}: filling")
    warm = pilot.fill()
    sides, memory = _fill_sides(pilot, engines, warm, through_apply)
    del warm
    order = list(sides.items())
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    counts: list[tuple[int, int, int, int]] = []
    skipped = 0 if scenario.counts_every_step else 1
    with garbage_collection(on=gc_on):
        while len(counts) < num_steps:
            left = num_steps - len(counts) + skipped
            moments = pilot.play(min(scenario.steps_per_turn, left))
            if not moments:
                break  # the traffic has ended
            digest = moments[-1].digest
            for name, side in order:
                timings[name] += play(side, moments, name, pilot)[skipped:]
            counts += [moment.counts for moment in moments[skipped:]]
            order.reverse()
            advance(len(counts) / num_steps, f"{title}: {len(counts):,}")
    if not counts:
        raise UsageError(f"scenario {scenario.name}: no step is left to be measured: {title} ends")
    rows, tokens, new, preempted = map(statistics.fmean, zip(*counts, strict=True))
    readings = tuple(
        _read(name, reading, index, timings[name], memory[name])
        for name, side in sides.items()
        for index, reading in enumerate(side.readings)
    )
    return Measurement(
        *(scenario.name, num_running, len(counts)), rows, tokens, new, preempted, digest, readings,
        equivalence=pilot.terms.equivalence,
    )  # fmt: skip


def _fill_sides(
    pilot: Pilot, engines: Sequence[str], warm: Sequence[Moment], through_apply: bool
) -> tuple[dict[str, TimedEngine], dict[str, float]]:
    """Return the sides after the untimed steps, and the memory that each has taken, in MiB."""
    sides: dict[str, TimedEngine] = {}
    memory: dict[str, float] = {}
    for is_second in (False, True) if through_apply else (False,):
        for name in engines:
            if is_second and not isinstance(sides[name], ArraySide):
                continue
            title = f"{name}{THROUGH_APPLY}" if is_second else name
            before = _memory_mib()
            sides[title] = pilot.open_side(name, is_second)
            for moment in warm:
                play(sides[title], [moment], name, pilot)
            memory[title] = _memory_mib() - before
    return sides, memory


def rehearse(engines: Sequence[str], advance: Advance) -> None:
    """Play a short part of each scenario on each engine, so that nothing is compiled later.

    `engines` are timed together, as in `measure`. A scenario that an engine cannot play is left
    out here; `measure` reports it.
    """
    for name, size in REHEARSAL.items():
        scenario = SCENARIOS[name]
        able = [one for one in engines if not find_obstacle(one, scenario.get_config(size))]
        if not able:
            continue
        try:
            measure(scenario, size, able, scenario.steps_per_turn, False, advance)
        except NotEqualError:
            continue  # only what is measured has to be equal
        except (SideError, UsageError):
            if get_terms(able).weaker is None:
                raise


@contextmanager
def garbage_collection(*, on: bool) -> Iterator[None]:
    """While a clock runs; what was built before is not looked through again, as in vLLM."""
    gc.collect()
    gc.freeze()
    if not on:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _read(
    engine: str, reading: str, index: int, timings: Sequence[Timing], memory: float
) -> Reading:
    schedule = [planned[index] for planned, _ in timings]
    commit = [committed[index] for _, committed in timings]
    step = list(map(sum, zip(schedule, commit, strict=True)))
    engine = engine.removesuffix(THROUGH_APPLY)
    return Reading(engine, reading, _spread(schedule), _spread(commit), _spread(step), memory)


def _spread(seconds: Sequence[float]) -> Spread:
    ordered = sorted(1e6 * value for value in seconds)
    p99 = ordered[round(0.99 * (len(ordered) - 1))]
    return Spread(statistics.median(ordered), p99, statistics.fmean(ordered))


def merge_rounds(measurements: Sequence[Measurement]) -> list[Measurement]:
    """One for each scenario and size, those of a scenario together; medians of several rounds."""
    rounds: dict[tuple[str, int, tuple[str, ...]], list[Measurement]] = {}
    for entry in measurements:
        key = (entry.scenario, entry.num_running, get_engines(entry))
        rounds.setdefault(key, []).append(entry)
    merged = [_merge(entries) for entries in rounds.values()]
    return [entry for entries in group(merged) for entry in entries]


def _merge(rounds: Sequence[Measurement]) -> Measurement:
    """Return the medians of several measurements of the same workload, with the first's memory."""
    first = rounds[0]
    assert {entry.digest for entry in rounds} == {first.digest}
    readings = []
    for found in zip(*(entry.readings for entry in rounds), strict=True):
        spreads = [(one.schedule, one.commit, one.step) for one in found]
        schedule, commit, step = map(_take_medians, zip(*spreads, strict=True))
        readings.append(replace(found[0], schedule=schedule, commit=commit, step=step))
    return replace(first, readings=tuple(readings), num_rounds=len(rounds))


def _take_medians(spreads: Sequence[Spread]) -> Spread:
    return Spread(*map(statistics.median, zip(*map(astuple, spreads), strict=True)))


def group(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Return the measurements grouped by scenario and by the engines measured together."""
    found: dict[tuple[str, tuple[str, ...]], list[Measurement]] = {}
    for entry in measurements:
        found.setdefault((entry.scenario, get_engines(entry)), []).append(entry)
    return list(found.values())


def get_engines(entry: Measurement) -> tuple[str, ...]:
    """Return the names of the engines in a measurement."""
    return tuple(dict.fromkeys(found.engine for found in entry.readings))


def get_slope(measurements: Sequence[Measurement], engine: str, reading: str) -> float | None:
    """Return the slope of a line through the p50 at 64 and more, in ns per running request."""
    points = {
        entry.num_running: 1e3 * found.step.p50
        for entry in measurements
        for found in entry.readings
        if (found.engine, found.reading) == (engine, reading) and entry.num_running >= 64
    }
    if len(points) < 2:
        return None
    return statistics.linear_regression([*points], [*points.values()]).slope


def describe_machine() -> dict[str, object]:
    """Return processor, cores, Python, system, date and load of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    model = re.search(r"^model name.*?:(.*)", text, re.MULTILINE)
    return {
        "processor": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _memory_mib() -> float:
    """Resident memory now; the peak where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
