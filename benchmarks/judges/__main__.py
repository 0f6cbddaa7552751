"""Mutation score of the judges: what is taken from them, and who misses it.

    python -m benchmarks.judges [--only PREFIX] [--fine] [--sample N] [--journal FILE]

Each sentence, each complaint, each voice of the worker and each call that asks one is switched off,
one at a time; `--fine` moves boundaries and negates conditions as well. Tests should fail, or the
exhibits of the museum no longer be found at `safety`. The whole campaign writes
benchmarks/results/DATE-judges-Ncore.json, of which `make docs` makes the page; a part prints only.
Each survivor is printed as it comes:

    python -m benchmarks.judges --only judge/worker          all that stands in these modules
    python -m benchmarks.judges --only 'voice P26'           by the title of the mutants
    python -m benchmarks.judges --only lockstep/safety.py --no-museum --tests test_claims

`--no-museum` is quick: the programs of the museum take minutes to find, and are kept in the folder
of `--corpus`. With `--journal FILE` a campaign goes on where it ended; with `--again` too, and what
survived is played once more: for when tests were written. `--last` reports on the last results
again, after benchmarks/judges/survivors.toml was edited. Exit code 1: a survivor is
unexplained, a class of survivors.toml explains nothing or too much, or the score is too low.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.judges.campaign import Campaign, Plan, Played, run_campaign
from benchmarks.judges.playing import MODULES, UnsoundError
from benchmarks.judges.results import SCORE_MIN, get_score, is_good, to_json
from benchmarks.mutation.journal import Journal
from benchmarks.mutation.results import dump, say_command
from benchmarks.mutation.survivors import Verdicts, judge, read_explanations
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HOUSE = Path(__file__).resolve().parents[2]
RESULTS = HOUSE / "benchmarks" / "results"
SURVIVORS = Path(__file__).with_name("survivors.toml")
NUM_FINE = 60
"""Number of finer changes in the whole campaign."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the campaign, or read the last results, and report on them."""
    args = parse_arguments(arguments)
    explanations = read_explanations(SURVIVORS)
    if args.last:
        files = sorted(RESULTS.glob("*-judges-*.json"))
        if not files:
            print(f"no results in {RESULTS}: run `make judges` first", file=sys.stderr)
            return 2
        return report(judge(json.loads(files[-1].read_text()), explanations))
    plan = make_plan(args)
    is_whole = plan == Plan(
        fine=plan.fine, seed=plan.seed, jobs=plan.jobs, corpus=plan.corpus, again=plan.again
    )
    try:
        campaign = play(plan, Journal(args.journal))
    except (LookupError, UnsoundError) as error:
        print(f"judges: {error}", file=sys.stderr)
        return 2
    results = to_json(campaign, say_command("benchmarks.judges", sys.argv[1:]))
    file = args.json
    if file is None and is_whole and plan.fine != 0:
        day = results["runs"][0]["day"]
        file = RESULTS / f"{day}-judges-{os.cpu_count()}core.json"
    if file is not None:
        file.write_text(dump(results), encoding="utf-8")
    return report(judge(results, explanations, is_whole and plan.fine != 0))


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan that the options describe."""
    is_part = bool(args.only or args.sample is not None)
    few = 0 if is_part else NUM_FINE
    return Plan(
        only=tuple(args.only or ()),
        fine=few if args.fine == 0 else None if args.fine < 0 else args.fine,
        sample=args.sample,
        seed=args.seed,
        jobs=max(args.jobs, 1),
        tests=tuple(args.tests or MODULES),
        museum=args.museum,
        corpus=args.corpus,
        again=args.again,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.judges",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", help="mutants whose module or title begins so: judge/worker"
    )
    parser.add_argument(
        "--fine",
        type=int,
        nargs="?",
        default=0,
        const=-1,
        metavar="N",
        help=f"finer changes: all, or N, drawn by the seed; the whole campaign: {NUM_FINE}",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", type=int, help="this number of mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", action="append", help="test modules, instead of those chosen")
    parser.add_argument("--no-museum", dest="museum", action="store_false", help="tests only")
    parser.add_argument("--corpus", type=Path, help="a folder for the programs of the museum")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument(
        "--journal",
        type=Path,
        help="file that keeps each result, to continue after an interruption",
    )
    parser.add_argument("--again", action="store_true", help="play what survived once more")
    parser.add_argument("--last", action="store_true", help="only report on the last results")
    return parser.parse_args(arguments)


def play(plan: Plan, journal: Journal) -> Campaign:
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

        return run_campaign(plan, tell, journal, say)


def say(played: Played) -> None:
    """Print a survivor as soon as it is known."""
    outcome, mutant = played.outcome, played.mutant
    if not outcome.killed_by:
        met = f"{outcome.num_trials} tests" if outcome.num_trials else "never executed"
        where = f"{mutant.module}:{mutant.lines[0]}"
        print(f"SURVIVED {mutant.title}\n    {where} ({met})  {played.change}", flush=True)


def report(verdicts: Verdicts) -> int:
    """Report the results; returns the exit code."""
    results = verdicts.results
    for row in results["modules"]:
        score, by = verdicts.score(row["module"]), row["killed"]
        parts = ", ".join(f"{name} {count}" for name, count in by.items())
        shares = f"{score.of_all:6.1%}  told apart {score.of_told_apart:6.1%}"
        print(f"{row['module']:<10} {shares}  {score.killed:>4} of {score.mutants:<4} {parts}")
    for one in verdicts.unexplained:
        print(f"UNEXPLAINED {one['module']} {one['function']}\n  {one['change']}")
    for line in verdicts.list_misfits():
        print(line)
    told = f"{len(results['survivors'])} survivors, {len(verdicts.unexplained)} unexplained"
    print(f"{told}; told apart {get_score(results, verdicts):.1%}, wanted {SCORE_MIN:.0%}")
    return 0 if is_good(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
