"""Mutation score of the judges: what is taken from them, and who misses it.

    python -m benchmarks.judges [--only PREFIX] [--fine] [--sample N] [--journal FILE]

Each sentence, each complaint, each voice of the worker and each call that asks one is switched off,
one at a time; `--fine` moves boundaries and negates conditions as well. Tests should fail, or the
exhibits of the museum no longer be found at `safety`. Each survivor is printed as it comes:

    python -m benchmarks.judges --only judge/worker          all that stands in these modules
    python -m benchmarks.judges --only 'voice P26'           by the title of the mutants
    python -m benchmarks.judges --only lockstep/safety.py --no-museum --tests test_claims

`--no-museum` is quick: the programs of the museum take minutes to find, and are kept in the folder
of `--corpus`. With `--journal FILE` a campaign goes on where it ended; with `--again` too, and what
survived is played once more: for when tests were written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.judges.campaign import Campaign, Plan, Played, run_campaign
from benchmarks.judges.mutants import KINDS
from benchmarks.judges.playing import MODULES, UnsoundError
from benchmarks.mutation.journal import Journal
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the campaign and say who survived."""
    args = parse_arguments(arguments)
    plan = Plan(
        only=tuple(args.only or ()),
        fine=args.fine,
        sample=args.sample,
        seed=args.seed,
        jobs=max(args.jobs, 1),
        tests=tuple(args.tests or MODULES),
        museum=args.museum,
        corpus=args.corpus,
        again=args.again,
    )
    try:
        campaign = play(plan, Journal(args.journal))
    except (LookupError, UnsoundError) as error:
        print(f"judges: {error}", file=sys.stderr)
        return 2
    return report(campaign)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.judges",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", help="mutants whose module or title begins so: judge/worker"
    )
    parser.add_argument("--fine", action="store_true", help="with the finer changes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", type=int, help="so many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", action="append", help="test modules, instead of those chosen")
    parser.add_argument("--no-museum", dest="museum", action="store_false", help="tests only")
    parser.add_argument("--corpus", type=Path, help="a folder for the programs of the museum")
    parser.add_argument(
        "--journal", type=Path, help="where each result is kept, to go on after an interruption"
    )
    parser.add_argument("--again", action="store_true", help="play what survived once more")
    return parser.parse_args(arguments)


def play(plan: Plan, journal: Journal) -> Campaign:
    """The campaign behind a progress bar, which has no thread: processes are forked meanwhile."""
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
    """A survivor, as it comes."""
    outcome, mutant = played.outcome, played.mutant
    if not outcome.killed_by:
        met = f"{outcome.num_trials} tests" if outcome.num_trials else "never executed"
        where = f"{mutant.module}:{mutant.lines[0]}"
        print(f"SURVIVED {mutant.title}\n    {where} ({met})  {played.change}", flush=True)


def report(campaign: Campaign) -> int:
    """Say what came out; the exit code of the process."""
    for kind in KINDS:
        outcomes = [one.outcome for one in campaign.played if one.mutant.kind == kind]
        made = [one for one in outcomes if one.killed_by != "no change"]
        if made:
            killed = sum(bool(one.killed_by) for one in made)
            by = {name: sum(one.killed_by == name for one in made) for name in KILLERS}
            parts = ", ".join(f"{name} {count}" for name, count in by.items() if count)
            print(f"{kind:<10} {killed / len(made):6.1%}  {killed:>4} of {len(made):<4} {parts}")
    return int(any(not one.outcome.killed_by for one in campaign.played))


KILLERS = ("tests", "museum", "hang", "crash")


if __name__ == "__main__":
    sys.exit(main())
