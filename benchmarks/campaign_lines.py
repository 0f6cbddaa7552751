"""Measure whether the lines of an engine, as a guide, make a campaign find seeded bugs earlier.

    python3.12 -m benchmarks.campaign_lines [--events 10000] [--seeds 10] [NAME ...]

Plays a campaign on each seeded bug until its first failure, once steered by goals alone and once by
goals and lines, in turns, for several seeds. Prints and stores medians of the numbers of events up
to the failure and of the CPU seconds before its unit; a run that found nothing counts as all its
events. Needs Python 3.12, which can record lines.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks._pages import get_commit, make_table

from blockstep.conformance.campaign import play
from blockstep.conformance.campaign.folder import open_store
from blockstep.conformance.campaign.plan import Plan, read_plan
from blockstep.conformance.campaign.records import encode, split_name
from blockstep.conformance.campaign.steering import get_base
from blockstep.conformance.campaign.worker import Campaign
from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.options import load

RESULTS = Path(__file__).with_name("results") / "campaign-lines.json"
NAMES = (
    "blocks-of-victim-announced",
    "chunk-cut-to-nothing",
    "chunk-run-on",
    "head-on-top-of-the-stack",
    "hits-within-a-chunk",
    "last-copy-alone-is-told",
    "last-group-counts",
    "row-of-victim-stays",
    "states-charged-once",
    "windows-leave-too-early",
)
"""Ten seeded bugs that one run without lines at seed 0 found after 2,000 to 3,500 events: late
enough for a guide to matter. Of 161 bugs 131 fell earlier, and 20 later or not within 6,000."""
PLAN = """
name = "lines"
presets = ["tiny", "small"]
features = [[], ["groups"], ["transfers"]]
seeds = [{seed}]
episodes = 4
round = 4
[[engines]]
engine = "museum:{name}"
lines = {lines}
"""
MODULES = ["blockstep.spec", "blockstep.conformance.museum"]
"""A seeded bug runs the code of the specification, but for the functions that it replaces."""


def find(plan: Plan, folder: Path, max_events: int) -> tuple[bool, int, float]:
    """Play a campaign until its first failure.

    Returns whether there was one, the events up to it, and the CPU seconds of the units before.
    """
    campaign = Campaign(plan, open_store(str(folder), plan.key))
    call = call_here(load(plan.make_options(plan.cells[0])))
    events, seconds = 0, 0.0
    while events < max_events:
        name = campaign.store.take("here", 1e6)
        if name is None:
            campaign.advance()
            continue
        number, place = split_name(name)
        unit = campaign.get_round(number).units[place]
        totals = campaign.get_totals(get_base(number))
        assert totals is not None
        files = campaign.store.get([f"program/{it}" for it in unit.parents])
        parents = [str(it, "utf-8") for it in files if it is not None]
        started = time.process_time()
        outcome = play.play_unit(plan, unit, name, totals, parents, call)
        seconds += time.process_time() - started
        for digest, text in outcome.programs.items():
            campaign.store.put(f"program/{digest}", text.encode())
        outcome.result.at = time.time()
        campaign.store.commit(name, encode(outcome.result))
        events += outcome.result.events
        if outcome.result.sayings:
            return True, events, seconds
        seconds += time.process_time() - started
    return False, events, seconds


def measure(name: str, seeds: int, max_events: int, is_guided: Sequence[bool]) -> dict[str, object]:
    """Return the numbers of one seeded bug, for every seed with and without lines."""
    numbers: dict[str, object] = {}
    runs: dict[bool, list[tuple[bool, int, float]]] = {it: [] for it in is_guided}
    for seed in range(seeds):
        for guided, found in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "plan.toml"
                lines = json.dumps(MODULES if guided else [])
                path.write_text(PLAN.format(name=name, seed=seed, lines=lines))
                found.append(find(read_plan(path), Path(folder) / "store", max_events))
    for guided, found in runs.items():
        numbers["lines" if guided else "goals"] = {
            "found": sum(it for it, _, _ in found),
            "events": [it for _, it, _ in found],
            "median_events": median(it for _, it, _ in found),
            "median_seconds": round(median(it for _, _, it in found), 2),
        }
    return numbers


def main() -> int:
    """Measure, print a table, and store the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.campaign_lines", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="seeded bugs (museum --all)")
    parser.add_argument("--events", type=int, default=10_000, help="events of a run, at most")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only-goals", action="store_true", help="no runs with lines")
    args = parser.parse_args()
    unknown = set(args.names) - EXHIBITS.keys()
    if unknown:
        parser.error(f"no such seeded bug: {', '.join(sorted(unknown))}")
    guides = (False,) if args.only_goals else (False, True)
    results: dict[str, dict[str, object]] = {}
    for name in args.names or NAMES:
        results[name] = measure(name, args.seeds, args.events, guides)
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    print(make_table(("seeded bug", *HEADS), list_rows(results)))
    if not args.names:
        run = {"day": f"{datetime.now(UTC):%Y-%m-%d}", "commit": get_commit()}
        run |= {"python": platform.python_version()}
        record = {**run, "events": args.events, "seeds": args.seeds, "bugs": results}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    return 0


HEADS = ("goals: found", "events", "s", "lines: found", "events", "s")


def list_rows(results: dict[str, dict[str, object]]) -> list[tuple[str, ...]]:
    """Return the rows of the table: medians over the seeds."""
    rows = []
    for name, modes in results.items():
        cells = [name]
        for values in modes.values():
            assert isinstance(values, dict)
            numbers = (values["found"], values["median_events"], values["median_seconds"])
            cells += [f"{it:,}" for it in numbers]
        rows.append(tuple(cells))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
