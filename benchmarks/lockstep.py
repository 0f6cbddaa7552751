"""Events per second of processor time of the lock-step as `check` runs it, one process.

    python -m benchmarks.lockstep [--events N] [--engine NAME] [--with FEATURE]... [--json FILE]
    python -m benchmarks.lockstep --each FEATURE --each FEATURE ...

Prints one line per preset and what each part of an event costs: the spec alone, the engine alone,
and everything (spec, engine, both snapshots compared, worker, witnesses). What came
after the core is in no run, unless `--with` has it in every one. `--each` measures what `--with`
says first, and then the same with one feature more, one after the other.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from blockstep.conformance.protocol.features import BY_NAME, LATE
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.episodes import record_episode, run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config, Event


@dataclass
class Figures:
    """Figures of one preset."""

    features: tuple[str, ...]
    preset: str
    engine: str
    events: int
    events_per_second: float
    spec_us: float
    """Microseconds per event of the spec alone, without snapshots."""
    engine_us: float


def measure(preset: str, engine: str, num_events: int, features: tuple[str, ...] = ()) -> Figures:
    """Time whole episodes, then replay their events through each side alone."""
    never = tuple(name for name in LATE if name in BY_NAME and name not in features)
    options = CheckOptions(
        engine=engine, preset=preset, with_features=features, without_features=never
    )
    make_engine = load_engine(engine)
    run_episode(options, 0, make_engine)  # warm up
    events, index = 0, 1
    start = time.process_time()
    while events < num_events:
        episode = run_episode(options, index, make_engine)
        assert episode.first is None, episode.first
        events += episode.num_events
        index += 1
    seconds = time.process_time() - start
    recorded = []
    for number in range(1, min(index, 60)):
        run, exchanges = record_episode(replace(options, episode=number))
        recorded.append((run.config, [event for event, _ in exchanges]))
    spec_us = alone(SpecEngine, recorded)
    engine_us = alone(make_engine, recorded)
    return Figures(features, preset, engine, events, events / seconds, spec_us, engine_us)


def alone(make_engine: object, recorded: list[tuple[Config, list[Event]]]) -> float:
    """Microseconds per event of one side alone."""
    assert callable(make_engine)
    count, seconds = 0, 0.0
    for config, events in recorded:
        engine = make_engine(config)
        start = time.process_time()
        for event in events:
            engine.apply(event)
        seconds += time.process_time() - start
        count += len(events)
    return 1e6 * seconds / count


def main() -> None:
    """Measure tiny and small, for each set of features asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--engine", default="host")
    parser.add_argument("--with", dest="features", action="append", default=[])
    parser.add_argument("--each", dest="each", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, one process")
    always = tuple(args.features)
    figures = []
    for features in (always, *((*always, name) for name in args.each)):
        print(" and ".join(features) or "the core")
        for preset in ("tiny", "small"):
            row = measure(preset, args.engine, args.events, features)
            figures.append(row)
            print(
                f"  {row.preset:<6} {row.events:>7,} events  {row.events_per_second:>7,.0f} "
                f"events/s  spec {row.spec_us:5.1f} us/event  {row.engine} {row.engine_us:5.1f} "
                "us/event",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
