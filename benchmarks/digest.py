"""Digests: do two trees of the specification answer the same to the same events?

    python -m benchmarks.digest record FILE [--events N] [--with FEATURES]... [--profile NAME]...
    python -m benchmarks.digest replay FILE

The first command runs in the tree before a change: it draws N events of each preset for each
profile, and again with each set of features (`groups,transfers`), and keeps configs and events. The
second runs in any tree. It prints, for each profile, the number of events and a digest of the text
of all answers and snapshots. A recording holds values of the vocabulary only, so it outlives every
change of the specification's own state. Hashes must not be random: PYTHONHASHSEED is 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import Config, Oracle
from blockstep.spec.profiles import Profile, get_profile
from blockstep.spec.vocabulary import Event

PROFILES = ("strict", "vllm-0.19.1", "vllm-0.27.0", "vllm-0.33.0")
PRESETS = ("tiny", "small")
Run: TypeAlias = tuple[str, Config, list[Event]]
"""The name of a profile, a config, and the events."""


def find_profile(name: str) -> Profile:
    """Return a profile by its name."""
    profile = get_profile(name)
    if profile is None:
        raise SystemExit(f"no profile is called {name!r}")
    return profile


def record(
    profiles: Sequence[str], num_events: int, sets: Sequence[tuple[str, ...]], seed: int = 0
) -> list[Run]:
    """Return runs of at least `num_events` for each profile, preset and set of features."""
    runs: list[Run] = []
    for name in profiles:
        make_engine = partial(SpecEngine, profile=find_profile(name))
        for preset, features in [(preset, names) for preset in PRESETS for names in sets]:
            options = CheckOptions(
                "spec", preset=preset, profile=name, seed=seed, with_features=features
            )
            count, index = 0, 1
            while count < num_events:
                run, _, _ = play_episode(options, index, make_engine, keep_exchanges=True)
                runs.append((name, run.config, [exchange.event for exchange in run.exchanges]))
                count, index = count + len(runs[-1][2]), index + 1
    return runs


def replay(runs: Sequence[Run]) -> dict[str, tuple[int, str]]:
    """Return the number of events and the digest of each profile."""
    sums = {name: hashlib.sha256() for name, _, _ in runs}
    counts = dict.fromkeys(sums, 0)
    for name, config, events in runs:
        oracle = Oracle(config, find_profile(name))
        for event in events:
            sums[name].update(repr(oracle.apply(event)).encode())
            sums[name].update(repr(oracle.snapshot()).encode())
        counts[name] += len(events)
    return {name: (counts[name], digest.hexdigest()[:16]) for name, digest in sums.items()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "replay"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--with", dest="sets", action="append", default=[])
    parser.add_argument("--profile", dest="profiles", action="append")
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        parser.error("set PYTHONHASHSEED=0: the text of a set depends on it")
    if asked.command == "record":
        sets = [(), *[tuple(names.split(",")) for names in asked.sets]]
        asked.file.write_bytes(pickle.dumps(record(asked.profiles or PROFILES, asked.events, sets)))
        return
    runs = pickle.loads(asked.file.read_bytes())  # noqa: S301 - a recording of one's own
    for name, (num_events, digest) in replay(runs).items():
        print(f"{name:12} {num_events:>9,} {digest}")


if __name__ == "__main__":
    main()
