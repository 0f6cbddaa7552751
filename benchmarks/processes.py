"""Processes: what an event costs an engine in its own process, and one in this process.

    python -m benchmarks.processes [--events N] [--rounds N] [--json FILE]

The events are those of `check` for the example engine in C++ (docs/how-to/process-engine.cpp, which
is compiled here). Each side plays them in turn: our host engine in this process, the same behind
lines of JSON in Python, and the example. Processor time in microseconds per event, of this process
and of the engine's, quickest round; then the same with the state after each event, as `check` asks.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.engines.process import ProcessEngine
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import record_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config, Event

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "how-to" / "process-engine.cpp"
SERVE = ROOT / "tests" / "support" / "process_support" / "serve.py"
HOST = "host, in this process"


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time per event of one side."""

    side: str
    with_state: bool
    here_us: float
    there_us: float
    """Time of the engine's own process; 0 if it has none."""


def record_events(engine: str, num_events: int) -> list[tuple[Config, list[Event]]]:
    """Return the configs and events of the first episodes of a check of this engine."""
    found: list[tuple[Config, list[Event]]] = []
    while sum(len(events) for _, events in found) < num_events:
        options = CheckOptions(engine=engine, preset="small", episode=len(found))
        run, exchanges = record_episode(options)
        found.append((run.config, [event for event, _ in exchanges]))
    return found


def play(
    make_engine: EngineFactory, runs: Sequence[tuple[Config, list[Event]]], with_state: bool
) -> tuple[float, float]:
    """Return the seconds of this process and of the engine's process for all events."""
    here = there = 0.0
    for config, events in runs:
        engine = make_engine(config)
        pid = engine._link._process.pid if isinstance(engine, ProcessEngine) else None
        began, began_there = time.process_time(), get_seconds(pid)
        for event in events:
            engine.apply(event)
            if with_state:
                engine.snapshot()
        here += time.process_time() - began
        there += get_seconds(pid) - began_there
    return here, there


def get_seconds(pid: int | None) -> float:
    """Return the processor time of a process so far; 0 for None."""
    # The number of another process's clock is made of its id (clock_getcpuclockid of Linux).
    return 0.0 if pid is None else time.clock_gettime((~pid << 3) | 2)


def measure(
    sides: Mapping[str, EngineFactory], runs: Sequence[tuple[Config, list[Event]]], rounds: int
) -> list[Cost]:
    """Return the cost of each side without and with states; all take turns."""
    best: dict[tuple[str, bool], tuple[float, float]] = {}
    for _ in range(rounds + 1):
        for with_state in (False, True):
            for name, make_engine in sides.items():
                times = play(make_engine, runs, with_state)
                best[name, with_state] = min(best.get((name, with_state), times), times, key=sum)
    num_events = sum(len(events) for _, events in runs)
    return [
        Cost(name, with_state, *(round(1e6 * seconds / num_events, 1) for seconds in times))
        for (name, with_state), times in best.items()
    ]


def main() -> None:
    """Compile the example, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "process-engine"
        command = ["g++", "-std=c++17", "-O2", "-o", str(built), str(EXAMPLE)]
        subprocess.run(command, check=True)  # noqa: S603 - a command of ours
        names = {
            HOST: "host",
            "host, behind lines of JSON": f"cmd:{shlex.join([sys.executable, str(SERVE), 'host'])}",
            "example in C++, behind lines of JSON": f"cmd:{built}",
        }
        sides = {name: load_engine(engine) for name, engine in names.items()}
        costs = measure(sides, record_events(f"cmd:{built}", given.events), given.rounds)
        del sides
    print(f"{'us per event':46}{'here':>8}{'there':>8}")
    for cost in costs:
        name = f"{cost.side}{' + state' if cost.with_state else ''}"
        print(f"{name:46}{cost.here_us:8.1f}{cost.there_us:8.1f}")
    if given.json is not None:
        record = {"machine": platform.processor(), "costs": [asdict(cost) for cost in costs]}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
