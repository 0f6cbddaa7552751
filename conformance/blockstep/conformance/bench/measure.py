"""Measure: several sides in turn, step by step, in one process, as long as they decide alike."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from blockstep.conformance.bench.player import Moment, Pilot, Timing, Track, play
from blockstep.conformance.bench.scenarios import SCENARIOS, Scenario
from blockstep.conformance.bench.sides import OffTrackError, Side, make_side
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Config

FILL_STEPS_MAX = 20_000
"""Steps until enough requests run, at most; a scenario that takes longer is broken."""
REHEARSAL = {"decode": 1, "storm": 14, "drafts": 14, "async": 14, "priority": 14, "hits": 2}
"""What is played before anything counts: scenarios, and how many run."""
PILOT = "fastest"
"""The engine on which the traffic is written down. Where engines are asked in arrays it is one of
them: a plan of the protocol does not say how new and resumed rows mix."""

Advance: TypeAlias = Callable[[float, str], None]


class NotMeasuredError(RuntimeError):
    """An engine runs here as nobody should run it; `slow_because` of its factory says why."""


class NotEqualError(RuntimeError):
    """Two sides decided differently, so their times cannot be compared."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds over all measured steps."""

    p50: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One side in one reading: what its steps took."""

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
    """Scheduled in a step."""
    new_mean: float
    """New requests admitted in a step."""
    preempted_mean: float
    digest: str
    """Of all decisions and deliveries, from the first step on; the same for every side."""
    readings: tuple[Reading, ...]
    num_rounds: int = 1
    """Times that this was measured; of several, each figure is the median."""


def open_side(name: str, config: Config) -> Side:
    """The side of an engine by name: vLLM's own scheduler for `vllm`, else by what it can do.

    Raises:
        NotMeasuredError: the engine says that its times would mean nothing here.
        EngineNotFoundError: it cannot be loaded.
    """
    if name == "vllm":
        module: Any = load_engine("blockstep.conformance.bench.vllm_side:VllmSide")
        side: Side = module(config)
        return side
    make_engine = load_engine(name)
    slow_because: str = getattr(make_engine, "slow_because", "")
    if slow_because:
        raise NotMeasuredError(f"engine {name!r} is not measured: {slow_because}")
    return make_side(make_engine(config))


def measure(
    scenario: Scenario,
    num_running: int,
    engines: Sequence[str],
    num_steps: int,
    gc_on: bool,
    advance: Advance,
) -> Measurement:
    """Time `num_steps` steps of every engine, or all steps there are if the traffic ends.

    The pilot plays ahead and writes down what comes in; each side plays the same after it, a few
    steps in turn.

    Raises:
        NotEqualError: two sides decided or delivered differently.
        NotMeasuredError: an engine says that its times would mean nothing here.
        EngineNotFoundError: an engine cannot be loaded.
    """
    config = scenario.get_config(num_running)
    pilot = Pilot(open_side(PILOT, config), scenario, num_running, config)
    advance(0.0, f"{scenario.name} {num_running}: filling")
    warm = fill(pilot, scenario, num_running)
    sides: dict[str, tuple[Side, Track]] = {}
    memory: dict[str, float] = {}
    for name in engines:
        before = _memory_mib()
        side, track = open_side(name, config), Track()
        for moments in _in_turns(warm, scenario.steps_per_turn):
            _play_alike(None, name, side, track, moments, scenario)
        sides[name], memory[name] = (side, track), _memory_mib() - before
        _play_alike(pilot, name, side, track, (), scenario)
    del warm
    moments, timings = _play(pilot, sides, scenario, num_running, num_steps, gc_on, advance)
    return Measurement(
        scenario.name,
        num_running,
        len(moments),
        statistics.fmean(moment.num_rows for moment in moments),
        statistics.fmean(moment.num_tokens for moment in moments),
        statistics.fmean(moment.num_new for moment in moments),
        statistics.fmean(moment.num_preempted for moment in moments),
        pilot.track.digest,
        tuple(
            reading
            for name, (side, _) in sides.items()
            for reading in _read(name, side.readings, timings[name], memory[name])
        ),
    )


def rehearse(engines: Sequence[str], advance: Advance) -> None:
    """Play a little of everything on each engine, so that nothing is imported or compiled later.

    Raises: as `measure`.
    """
    for name, size in REHEARSAL.items():
        measure(SCENARIOS[name], size, engines, SCENARIOS[name].steps_per_turn, False, advance)


def fill(pilot: Pilot, scenario: Scenario, num_running: int) -> list[Moment]:
    """Play until enough requests run, then the warm-up."""
    wanted = scenario.min_running * num_running
    moments: list[Moment] = []
    while len(pilot.running) < wanted:
        if len(moments) == FILL_STEPS_MAX:
            raise RuntimeError(f"scenario {scenario.name}: only {len(pilot.running)} ever run")
        moments.append(pilot.step())
    return moments + [pilot.step() for _ in range(scenario.num_warmup)]


def _in_turns(moments: Sequence[Moment], steps_per_turn: int) -> Iterator[Sequence[Moment]]:
    for start in range(0, len(moments), steps_per_turn):
        yield moments[start : start + steps_per_turn]


def _play(
    pilot: Pilot,
    sides: Mapping[str, tuple[Side, Track]],
    scenario: Scenario,
    num_running: int,
    num_steps: int,
    gc_on: bool,
    advance: Advance,
) -> tuple[list[Moment], dict[str, list[Timing]]]:
    """A turn of the pilot, then of each side, in an order that turns round each time.

    The first step of a turn warms the caches up and is not counted.
    """
    order = list(sides.items())
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    counted: list[Moment] = []
    skipped = 0 if scenario.counts_every_step else 1
    with garbage_collection(on=gc_on):
        while len(counted) < num_steps and not pilot.is_done:
            left = min(scenario.steps_per_turn, num_steps - len(counted) + skipped)
            moments: list[Moment] = []
            while len(moments) < left and not pilot.is_done:
                moments.append(pilot.step())
            for name, (side, track) in order:
                played = _play_alike(pilot, name, side, track, moments, scenario)
                timings[name] += played[skipped:]
            counted += moments[skipped:]
            order.reverse()
            advance(len(counted) / num_steps, f"{scenario.name} {num_running}: {len(counted):,}")
    return counted, timings


@contextmanager
def garbage_collection(*, on: bool) -> Iterator[None]:
    """How it is while a clock runs; what was built before is not looked through again, as in vLLM.

    Afterwards it is on, as it was.
    """
    gc.collect()
    gc.freeze()
    if not on:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _play_alike(
    pilot: Pilot | None,
    name: str,
    side: Side,
    track: Track,
    moments: Sequence[Moment],
    scenario: Scenario,
) -> list[Timing]:
    """Play, and demand that the side then stands where the pilot does; None: it is ahead."""
    try:
        timings = play(side, track, moments)
    except OffTrackError as error:
        raise NotEqualError(_say_not_equal(scenario, name)) from error
    if pilot is not None:
        demand_equal(pilot, scenario, name, track)
    return timings


def demand_equal(pilot: Pilot, scenario: Scenario, name: str, track: Track) -> None:
    """An engine has decided and delivered what the pilot has, or NotEqualError."""
    if track.digest != pilot.track.digest:
        raise NotEqualError(_say_not_equal(scenario, name))


def _say_not_equal(scenario: Scenario, name: str) -> str:
    return (
        f"scenario {scenario.name}: {name} does not decide as {PILOT} does, so their times cannot "
        "be compared; `blockstep check` finds out why"
    )


def _read(
    engine: str, names: Sequence[str], timings: Sequence[Timing], memory: float
) -> list[Reading]:
    found = []
    for index, name in enumerate(names):
        schedule = [timing.schedule[index] for timing in timings]
        commit = [timing.commit[index] for timing in timings]
        whole = list(map(sum, zip(schedule, commit, strict=True)))
        spreads = _spread(schedule), _spread(commit), _spread(whole)
        found.append(Reading(engine, name, *spreads, memory_mib=memory))
    return found


def _spread(seconds: Sequence[float]) -> Spread:
    ordered = sorted(1e6 * value for value in seconds)
    last = len(ordered) - 1
    return Spread(
        statistics.median(ordered), ordered[round(0.99 * last)], statistics.fmean(ordered)
    )


def merge_rounds(measurements: Sequence[Measurement]) -> list[Measurement]:
    """One for each scenario and size, those of a scenario together; medians of several rounds."""
    rounds: dict[str, dict[int, list[Measurement]]] = {}
    for entry in measurements:
        rounds.setdefault(entry.scenario, {}).setdefault(entry.num_running, []).append(entry)
    return [_merge(entries) for sizes in rounds.values() for entries in sizes.values()]


def _merge(rounds: Sequence[Measurement]) -> Measurement:
    """Of the same traffic, so that what was decided is the same; memory grows in the first."""
    first = rounds[0]
    assert {entry.digest for entry in rounds} == {first.digest}
    readings = tuple(
        replace(
            found[0],
            schedule=_take_medians([one.schedule for one in found]),
            commit=_take_medians([one.commit for one in found]),
            step=_take_medians([one.step for one in found]),
        )
        for found in zip(*(entry.readings for entry in rounds), strict=True)
    )
    return replace(first, readings=readings, num_rounds=len(rounds))


def _take_medians(spreads: Sequence[Spread]) -> Spread:
    return Spread(
        statistics.median(spread.p50 for spread in spreads),
        statistics.median(spread.p99 for spread in spreads),
        statistics.median(spread.mean for spread in spreads),
    )


def get_slope(measurements: Sequence[Measurement], engine: str, reading: str) -> float | None:
    """Nanoseconds per running request: a line through the p50 of a step at 64 and more."""
    points = [
        (entry.num_running, found.step.p50)
        for entry in measurements
        for found in entry.readings
        if (found.engine, found.reading) == (engine, reading) and entry.num_running >= 64
    ]
    if len(points) < 2:
        return None
    sizes, times = zip(*points, strict=True)
    return 1e3 * statistics.linear_regression(sizes, times).slope


def describe_machine() -> dict[str, object]:
    """What the figures were taken on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "processor": model,
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
