"""Mutation score of our engines and of the specification, as `blockstep check` sees it.

    python -m benchmarks.mutation [--only impl/host/pool.py] [--jobs N] [--seed N] [--json FILE]

The whole campaign writes benchmarks/results/DATE-mutation-Ncore.json and
docs/reference/mutation.md; a part of it (--only, --sample, --drawn, other --events) prints and
writes only what is asked for. `--last` reports on the last results again, after
benchmarks/mutation/survivors.toml was edited; `--last --put FILE` puts the results of some modules
(--only, --json FILE) into them before. `--claims` has each survivor of the last results play the
tests of which survivors.toml says that they catch it. Exit code 1: a survivor is unexplained or a
hole, a class of survivors.toml explains nothing or more than it may, the score of an engine is too
low, or a test does not catch what it is said to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.mutation.campaign import (
    Plan,
    Played,
    UnsoundError,
    preload,
    run_campaign,
)
from benchmarks.mutation.claims import find_broken_claims, list_claims
from benchmarks.mutation.journal import Journal
from benchmarks.mutation.mutants import WINGS, Source, find_sources
from benchmarks.mutation.results import (
    describe,
    dump,
    put_into,
    say_command,
    to_json,
)
from benchmarks.mutation.survivors import (
    SCORE_MIN,
    Explanation,
    Verdicts,
    judge,
    read_explanations,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HOUSE = Path(__file__).resolve().parents[2]
RESULTS = HOUSE / "benchmarks" / "results"
SURVIVORS = Path(__file__).with_name("survivors.toml")


def main() -> int:
    """Play the campaign, or read the last results, and report on them."""
    args = parse_arguments()
    explanations = read_explanations(SURVIVORS)
    if args.last or args.claims:
        files = sorted(RESULTS.glob("*-mutation-*.json"))
        if not files:
            print(f"no results in {RESULTS}: run `make mutation` first", file=sys.stderr)
            return 2
        whole = json.loads(files[-1].read_text())
        if args.claims:
            return check_claims(judge(whole, explanations), args.only or (), args.jobs)
        if args.put is not None:
            whole = put_into(whole, json.loads(args.put.read_text()))
            files[-1].write_text(dump(whole), encoding="utf-8")
        return report(judge(whole, explanations))
    plan = make_plan(args)
    is_whole = not args.only and plan == Plan(seed=plan.seed, jobs=plan.jobs)
    try:
        preload()
        known = [] if args.again else [one for one in explanations if one.verdict == "equivalent"]
        results = play(find_sources(args.only or ()), plan, known, Journal(args.journal))
    except (ImportError, LookupError, UnsoundError) as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    verdicts = judge(results, explanations, is_whole)
    file = args.json
    if file is None and is_whole:
        day = datetime.now(tz=UTC).date().isoformat()
        file = RESULTS / f"{day}-mutation-{os.cpu_count()}core.json"
    if file is not None:
        file.write_text(dump(results), encoding="utf-8")
    return report(verdicts)


def check_claims(verdicts: Verdicts, only: Sequence[str], jobs: int) -> int:
    """Report the claims about tests that do not hold; returns the exit code."""
    claims = list_claims(verdicts, only)
    num_broken = 0
    for line in find_broken_claims(claims, HOUSE, max(jobs, 1)):
        num_broken += 1
        print(line, flush=True)
    print(f"{len(claims)} survivors that a test should catch: {num_broken} are not caught")
    return 1 if num_broken else 0


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    plan = Plan()
    parser.add_argument("--only", action="append", help="modules beginning so: impl/host/pool.py")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=plan.seed, help="of the episodes")
    parser.add_argument("--sample", type=int, help="this number of mutants, drawn by the seed")
    parser.add_argument("--drawn", action="append", help="only runs drawn so: 'small transfers'")
    parser.add_argument("--events", type=int, help="of each short run, for every mutant")
    parser.add_argument("--deep-events", type=int, help="of each long run of survivors; 0: none")
    parser.add_argument(
        "--again", action="store_true", help="long runs also for what is explained as equivalent"
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument(
        "--journal",
        type=Path,
        help="file that keeps each result, to continue after an interruption",
    )
    parser.add_argument("--last", action="store_true", help="only report on the last results")
    parser.add_argument(
        "--claims", action="store_true", help="only play the tests that survivors.toml names"
    )
    parser.add_argument(
        "--put", type=Path, help="with --last: results of some modules, to go into the last ones"
    )
    return parser.parse_args()


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan that the options describe."""
    plan = Plan()
    first, deep = plan.first, plan.deep
    if args.drawn:
        first = tuple(stage for stage in first if stage[1] in args.drawn)
        deep = tuple(stage for stage in deep if stage[1] in args.drawn)
    if args.events is not None:
        first = tuple((engine, preset, args.events) for engine, preset, _ in first)
    if args.deep_events is not None:
        deep = tuple((engine, preset, args.deep_events) for engine, preset, _ in deep)
        deep = deep if args.deep_events else ()
    return Plan(first, deep, args.seed, max(args.jobs, 1), args.sample)


def play(
    sources: list[Source], plan: Plan, known: list[Explanation], journal: Journal
) -> dict[str, Any]:
    """Run the campaign with a progress bar without a thread, since processes are forked
    meanwhile.
    """
    what = TextColumn("{task.description:<14}")
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total, refresh=True)

        def is_settled(played: Played) -> bool:
            survivor = describe(played)
            return any(explanation.is_about(survivor) for explanation in known)

        campaign = run_campaign(sources, plan, is_settled, tell, journal)
    return to_json(campaign, say_command("benchmarks.mutation", sys.argv[1:]))


def report(verdicts: Verdicts) -> int:
    """Say what came out; the exit code of the process."""
    results = verdicts.results
    for module in results["modules"]:
        print(format_module(module, verdicts))
    for wing in WINGS:
        score = verdicts.score(wing)
        if score.mutants:
            print(f"{wing:<26} {score.of_all:6.1%}  told apart {score.of_told_apart:6.1%}")
    for survivor in verdicts.unexplained:
        where = f"{survivor['module']}:{survivor['line']} {survivor['function']}"
        print(f"UNEXPLAINED {where}\n  {survivor['change']}")
    for line in verdicts.list_misfits():
        print(line)
    print(
        f"{len(results['survivors'])} survivors: {len(verdicts.unexplained)} unexplained, ", end=""
    )
    print(f"{len(verdicts.holes)} holes; wanted: none, and {SCORE_MIN:.0%}")
    return 0 if verdicts.is_good else 1


def format_module(module: Mapping[str, Any], verdicts: Verdicts) -> str:
    """Return one line about a module."""
    score = verdicts.score(module["module"])
    kinds = " ".join(f"{name} {count}" for name, count in module["killed"].items())
    numbers = f"{score.of_all:6.1%}  {score.killed:>4} of {score.mutants:<4}"
    return f"{module['module']:<26} {numbers} {kinds}"


if __name__ == "__main__":
    sys.exit(main())
