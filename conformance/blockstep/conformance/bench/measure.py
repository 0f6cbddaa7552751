"""Measure: several sides in turn, step by step, in one process, as long as they decide alike."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from blockstep.conformance.bench.player import Player, Timing
from blockstep.conformance.bench.scenarios import Scenario
from blockstep.conformance.bench.sides import Side, make_side
from blockstep.conformance.registry import load_engine
from blockstep.spec.vocabulary import Config

FILL_STEPS_MAX = 20_000
"""Steps until enough requests run, at most; a scenario that takes longer is broken."""

Advance: TypeAlias = Callable[[float, str], None]


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


def open_side(name: str, config: Config) -> Side:
    """The side of an engine by name: vLLM's own scheduler for `vllm`, else by what it can do."""
    if name == "vllm":
        module: Any = load_engine("blockstep.conformance.bench.vllm_side:VllmSide")
        side: Side = module(config)
        return side
    return make_side(load_engine(name)(config))


def measure(
    scenario: Scenario,
    num_running: int,
    engines: Sequence[str],
    num_steps: int,
    gc_on: bool,
    advance: Advance,
) -> Measurement:
    """Time `num_steps` steps of every engine, or all steps there are if the traffic ends.

    Each side is filled alone, then all are played in turn, a step at a time, in an order that
    turns round with every step.

    Raises:
        NotEqualError: two sides decided or delivered differently.
        EngineNotFoundError: an engine cannot be loaded.
    """
    config = scenario.get_config(num_running)
    players: dict[str, Player] = {}
    memory: dict[str, float] = {}
    for name in engines:
        advance(0.0, f"{scenario.name} {num_running}: filling {name}")
        before = _memory_mib()
        player = Player(open_side(name, config), scenario, num_running, config)
        fill(player, scenario, num_running)
        players[name], memory[name] = player, _memory_mib() - before
    _demand_equal(players, scenario, num_running)
    timings = _play(players, scenario, num_running, num_steps, gc_on, advance)
    steps = next(iter(timings.values()))
    return Measurement(
        scenario.name,
        num_running,
        len(steps),
        statistics.fmean(timing.num_rows for timing in steps),
        statistics.fmean(timing.num_tokens for timing in steps),
        statistics.fmean(timing.num_new for timing in steps),
        statistics.fmean(timing.num_preempted for timing in steps),
        next(iter(players.values())).digest,
        tuple(
            reading
            for name, player in players.items()
            for reading in _read(name, player.side.readings, timings[name], memory[name])
        ),
    )


def fill(player: Player, scenario: Scenario, num_running: int) -> None:
    """Play until enough requests run, then the warm-up."""
    wanted = scenario.min_running * num_running
    for _ in range(FILL_STEPS_MAX):
        if len(player.running) >= wanted:
            break
        player.step()
    else:
        raise RuntimeError(f"scenario {scenario.name}: only {len(player.running)} ever run")
    for _ in range(scenario.num_warmup):
        player.step()


def _play(
    players: Mapping[str, Player],
    scenario: Scenario,
    num_running: int,
    num_steps: int,
    gc_on: bool,
    advance: Advance,
) -> dict[str, list[Timing]]:
    order = list(players.items())
    timings: dict[str, list[Timing]] = {name: [] for name in players}
    gc.collect()
    gc.freeze()  # what was built before is not looked through again, as in vLLM's own loop
    if not gc_on:
        gc.disable()
    try:
        for step in range(num_steps):
            if all(player.is_done for player in players.values()):
                break
            for name, player in order:
                timings[name].append(player.step())
            order.reverse()
            if step % 16 == 0:
                advance(step / num_steps, f"{scenario.name} {num_running}: step {step:,}")
                _demand_equal(players, scenario, num_running)
    finally:
        gc.enable()
        gc.unfreeze()
    _demand_equal(players, scenario, num_running)
    return timings


def _demand_equal(players: Mapping[str, Player], scenario: Scenario, num_running: int) -> None:
    if len({player.digest for player in players.values()}) > 1:
        raise NotEqualError(
            f"scenario {scenario.name}, {num_running} running: {', '.join(players)} do not decide "
            "the same, so their times cannot be compared; `blockstep check` finds out why"
        )


def _read(
    engine: str, names: Sequence[str], timings: Sequence[Timing], memory: float
) -> list[Reading]:
    found = []
    for index, name in enumerate(names):
        schedule = [timing.schedule[index] for timing in timings]
        commit = [timing.commit[index] if timing.commit else 0.0 for timing in timings]
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
