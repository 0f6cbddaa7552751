"""Digests: do two trees of the specification answer the same to the same events?

    python -m benchmarks.digest record FILE [--events N] [--with FEATURES]... [--profile NAME]...
    python -m benchmarks.digest replay FILE [--answers ANSWERS]
    python -m benchmarks.digest compare ANSWERS ANSWERS

The first command runs in the tree before a change: it draws N events of each preset for each
profile, and again with each set of features (`groups,transfers`), and keeps configs and events. The
second runs in any tree. It prints, for each profile, the number of events and a digest of the text
of all answers and snapshots, and can keep a digest for each event. The third reads what two trees
kept, and prints where they differ. A recording holds values of the vocabulary only, and names the
fields of a config, so it outlives changes of the specification's own state and new fields of a
config. Hashes must not be random: PYTHONHASHSEED is 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import Config, Oracle
from blockstep.spec.profiles import Profile, get_profile
from blockstep.spec.vocabulary import Event

PROFILES = ("strict", "vllm-0.19.1", "vllm-0.27.0", "vllm-0.33.0")
PRESETS = ("tiny", "small")
Run: TypeAlias = tuple[str, dict[str, Any], list[Event]]
"""The name of a profile, the fields of a config, and the events."""
Answers: TypeAlias = list[tuple[str, list[tuple[str, bytes, bytes]]]]
"""The profile of each run, and of each of its events the type and the digests of answer and
snapshot."""


def find_profile(name: str) -> Profile:
    """Return a profile by its name."""
    profile = get_profile(name)
    if profile is None:
        raise SystemExit(f"no profile is called {name!r}")
    return profile


def name_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a config by name. A pickled config names none: a new one shifts them."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


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
                events = [exchange.event for exchange in run.exchanges]
                runs.append((name, name_fields(run.config), events))
                count, index = count + len(events), index + 1
    return runs


def play(run: Run) -> Iterator[tuple[Event, str, str]]:
    """Yield each event of a run with the texts of the answer and of the snapshot behind it."""
    name, values, events = run
    oracle = Oracle(Config(**values), find_profile(name))
    for event in events:
        answer = repr(oracle.apply(event))
        yield event, answer, repr(oracle.snapshot())


def replay(runs: Sequence[Run], answers: Answers | None = None) -> dict[str, tuple[int, str]]:
    """Return the number of events and the digest of each profile.

    `answers`: a list to which the digests of all events are added, run by run.
    """
    sums = {name: hashlib.sha256() for name, _, _ in runs}
    counts = dict.fromkeys(sums, 0)
    for run in runs:
        name, events = run[0], []
        for event, answer, snapshot in play(run):
            texts = (answer.encode(), snapshot.encode())
            for text in texts:
                sums[name].update(text)
            if answers is not None:
                first, second = (hashlib.sha256(text).digest()[:8] for text in texts)
                events.append((type(event).__name__, first, second))
        counts[name] += len(run[2])
        if answers is not None:
            answers.append((name, events))
    return {name: (counts[name], digest.hexdigest()[:16]) for name, digest in sums.items()}


def list_differences(before: Answers, after: Answers) -> list[tuple[str, int, list[int]]]:
    """Return each run that differs: its profile, its number, and the events that differ."""
    assert [len(events) for _, events in before] == [len(events) for _, events in after]
    found = []
    for number, ((name, events), (_, others)) in enumerate(zip(before, after, strict=True)):
        unequal = [
            i for i, (event, other) in enumerate(zip(events, others, strict=True)) if event != other
        ]
        if unequal:
            found.append((name, number, unequal))
    return found


def print_differences(before: Answers, after: Answers) -> None:
    """Print a line for each run that differs, and one for each profile."""
    found = list_differences(before, after)
    for name, number, unequal in found:
        event, other = before[number][1][unequal[0]], after[number][1][unequal[0]]
        where = "answer" if event[1] != other[1] else "snapshot"
        print(
            f"{name}, run {number}: {len(unequal)} of {len(before[number][1])} events differ, "
            f"first the {where} of event {unequal[0]} ({event[0]})"
        )
    for profile in dict.fromkeys(name for name, _ in before):
        total = sum(len(events) for name, events in before if name == profile)
        num_unequal = sum(len(unequal) for name, _, unequal in found if name == profile)
        num_runs = sum(name == profile for name, _, _ in found)
        print(f"{profile:12} {total:>9,} events, {num_unequal:,} differ in {num_runs} runs")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "replay", "compare"))
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--with", dest="sets", action="append", default=[])
    parser.add_argument("--profile", dest="profiles", action="append")
    parser.add_argument("--answers", type=Path, help="keep a digest for each event in this file")
    asked = parser.parse_args()
    if len(asked.files) != (2 if asked.command == "compare" else 1):
        parser.error("compare reads two files, and the other commands have one")
    if asked.command == "compare":
        before, after = (pickle.loads(file.read_bytes()) for file in asked.files)  # noqa: S301
        print_differences(before, after)
        return
    if os.environ.get("PYTHONHASHSEED") != "0":
        parser.error("set PYTHONHASHSEED=0: the text of a set depends on it")
    (file,) = asked.files
    if asked.command == "record":
        sets = [(), *[tuple(names.split(",")) for names in asked.sets]]
        file.write_bytes(pickle.dumps(record(asked.profiles or PROFILES, asked.events, sets)))
        return
    runs = pickle.loads(file.read_bytes())  # noqa: S301 - a recording of one's own
    answers: Answers | None = None if asked.answers is None else []
    for name, (num_events, digest) in replay(runs, answers).items():
        print(f"{name:12} {num_events:>9,} {digest}")
    if asked.answers is not None:
        asked.answers.write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    main()
