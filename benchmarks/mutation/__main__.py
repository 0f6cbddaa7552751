"""Mutation score of the specification, of the engines and of the property checks.

    python -m benchmarks.mutation TARGET [--only MODULE] [--sample N] [--seed N] [--trials PREFIX]

A mutant is one function with one small change. Tests, laws, runs in lock-step and seeded bugs
should notice it. Each survivor is printed: write a test that notices it, or end its line with
`# no-mutate: reason` if no program can tell it from the original.

    python -m benchmarks.mutation spec --only spec/core/slots.py --trials 'law slots'
    python -m benchmarks.mutation judges --sample 100 --seed 7 --json FILE

With --journal FILE a campaign continues after an interruption; with --again too, and survivors are
played once more: for when tests were written. The page is made of the last
benchmarks/results/DATE-mutation-TARGET.json of each target. Exit code 1: there is a survivor.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the campaign and print its survivors; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("target", choices=("spec", "host", "judges"))
    parser.add_argument("--only", action="append", default=[], help="modules beginning so")
    parser.add_argument("--sample", type=int, help="this number of mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", action="append", default=[], help="trials beginning so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--journal", type=Path, help="file that keeps each result")
    parser.add_argument("--again", action="store_true", help="play survivors once more")
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args(arguments)

    from benchmarks.mutation.campaign import (  # noqa: PLC0415  after numba is hidden
        Plan,
        get_score,
        run_campaign,
        to_json,
    )
    from benchmarks.mutation.targets import Mutant  # noqa: PLC0415
    from benchmarks.mutation.trials import UnsoundError  # noqa: PLC0415

    def show(mutant: Mutant, num_trials: int) -> None:
        met = f"{num_trials} trials" if num_trials else "never executed"
        where = f"{mutant.source.module}:{mutant.change.lines[0]} {mutant.change.function}"
        print(f"SURVIVED {where} ({met})\n  {mutant.change.show(mutant.source.text)}", flush=True)

    def show_progress(what: str, done: int, total: int) -> None:
        print(f"\r{what} {done}/{total} ", end="", file=sys.stderr, flush=True)

    plan = Plan(
        args.target,
        tuple(args.only),
        args.sample,
        args.seed,
        max(args.jobs, 1),
        tuple(args.trials),
        args.again,
        args.journal,
    )
    print(f"seed {plan.seed}")
    try:
        campaign = run_campaign(plan, show_progress, show)
    except (LookupError, ValueError, UnsoundError) as error:
        print(f"mutation: {error}", file=sys.stderr)
        return USAGE
    for name in campaign.left_out:
        print(f"LEFT OUT {name}: it fails unchanged, or where its lines are recorded")
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    for option in ("--journal", "--json"):  # they change no result
        if option in given:
            del given[given.index(option) : given.index(option) + 2]
    results = to_json(campaign, shlex.join(["python", "-m", "benchmarks.mutation", *given]))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for module, (played, killed) in results["modules"].items():
        print(f"{module:<40} {killed:>4} of {played:<4}")
    survivors, not_made = len(results["survivors"]), results["not_made"]
    summary = f"{survivors} survivors, {not_made} not made, seed {plan.seed}"
    print(f"{get_score(results):.1%} noticed, {summary}")
    return 1 if survivors or not results["modules"] else 0


if __name__ == "__main__":
    sys.modules["numba"] = None  # type: ignore[assignment]  # a mutant is never compiled
    sys.exit(main())
