"""Events per second of processor time of the lock-step, all checks on, one process.

    python -m benchmarks.lockstep [--events N] [--engine NAME] [--with FEATURE] [--json FILE]

Prints one line per preset and what each part of an event costs: the spec alone, the engine alone,
and everything (spec, engine, both snapshots compared, worker, properties, witnesses). There is one
KV group, unless `--with groups` has several in every run.
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
    """What was measured for one preset."""

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
    return Figures(preset, engine, events, events / seconds, spec_us, engine_us)


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
    """Measure tiny and small."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--engine", default="host")
    parser.add_argument("--with", dest="features", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, one process")
    features = tuple(args.features)
    figures = [measure(name, args.engine, args.events, features) for name in ("tiny", "small")]
    for row in figures:
        print(
            f"{row.preset:<6} {row.events:>7,} events  {row.events_per_second:>7,.0f} events/s  "
            f"spec {row.spec_us:5.1f} us/event  {row.engine} {row.engine_us:5.1f} us/event"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
