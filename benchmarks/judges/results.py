"""Results of a campaign, as JSON with one line for each class and each survivor.

A class takes the place of a module in `benchmarks.mutation`, so that explanations of survivors work
for both (`benchmarks.mutation.survivors`).
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

from benchmarks._pages import get_commit
from benchmarks.judges.campaign import Campaign, Played
from benchmarks.judges.mutants import KINDS
from benchmarks.mutation.survivors import Verdicts

SCORE_MIN: Final = 0.97
"""The least score over the mutants of all classes that are not explained."""


def to_json(campaign: Campaign, command: str) -> dict[str, Any]:
    """Return the results of a campaign: counts of the killed, and each survivor."""
    plan = campaign.plan
    run = {
        "day": datetime.now(tz=UTC).date().isoformat(),
        "command": command,
        "device": f"{os.cpu_count()}-core {platform.machine()} machine, no GPU; "
        f"{plan.jobs} process{'es' * (plan.jobs > 1)}",
        "versions": {"python": platform.python_version(), "blockstep": version("blockstep")},
        "commit": get_commit(),
        "seed": plan.seed,
        "tests": campaign.num_tests,
        "programs": campaign.num_programs,
        "seconds": round(campaign.seconds),
    }
    return {
        "runs": [run],
        "modules": [row for kind in KINDS if (row := _count(campaign, kind))["mutants"]],
        "noticed": dict(_count_noticed(campaign).most_common()),
        "survivors": [describe(one) for one in campaign.played if is_survivor(one)],
    }


def _count(campaign: Campaign, kind: str) -> dict[str, Any]:
    played = [one for one in campaign.played if one.mutant.kind == kind]
    made = [one for one in played if one.outcome.killed_by != "no change"]
    killed = Counter(one.outcome.killed_by for one in made if one.outcome.killed_by)
    return {
        "module": kind,
        "mutants": len(made),
        "killed": dict(sorted(killed.items())),
        "no_change": len(played) - len(made),
        "found": campaign.found.get(kind, 0),
    }


def _count_noticed(campaign: Campaign) -> Counter[str]:
    """Return how many mutants each test module, or the seeded bugs, noticed first."""
    killed = [one.outcome for one in campaign.played if not is_survivor(one)]
    names = (one.detail.partition("::")[0].rpartition("/")[2] for one in killed)
    short = ("the museum" if name.startswith("museum:") else name for name in names)
    return Counter(name.removesuffix(".py") for name in short if name)


def is_survivor(played: Played) -> bool:
    """Whether no test noticed it."""
    return not played.outcome.killed_by


def describe(played: Played) -> dict[str, Any]:
    """Return a survivor as the results name it."""
    mutant = played.mutant
    named = {
        "module": mutant.kind,
        "function": mutant.name,
        "file": mutant.module,
        "change": played.change,
    }
    return named if played.outcome.num_trials else {**named, "reached": False}


def is_good(verdicts: Verdicts) -> bool:
    """Whether all survivors are explained, no explanation is unused, and the score suffices."""
    is_clear = not (verdicts.unexplained or verdicts.idle or verdicts.overfull)
    return is_clear and get_score(verdicts.results, verdicts) >= SCORE_MIN


def get_weighed_score(results: Mapping[str, Any], verdicts: Verdicts) -> float:
    """Return the score with each class weighted by the number of its mutants, played or not."""
    rows = [row for row in results["modules"] if row["mutants"]]
    total = sum(int(row["found"]) for row in rows)
    noticed = sum(verdicts.score(row["module"]).of_told_apart * int(row["found"]) for row in rows)
    return noticed / total if total else 1.0


def get_score(results: Mapping[str, Any], verdicts: Verdicts) -> float:
    """Return the share of the unexplained mutants that were noticed, in all classes."""
    scores = [verdicts.score(row["module"]) for row in results["modules"]]
    told_apart = sum(one.told_apart for one in scores)
    return sum(one.killed for one in scores) / told_apart if told_apart else 1.0
