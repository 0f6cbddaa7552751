"""Results of a campaign, as JSON with one line for each module and each survivor."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from benchmarks._pages import get_commit
from benchmarks.mutation.campaign import Campaign, Played
from benchmarks.mutation.journal import make_key
from benchmarks.mutation.mutants import find_sources

_FINDINGS = frozenset({"property", "divergence", "liveness", "fault", "spec"})


def to_json(campaign: Campaign, command: str) -> dict[str, Any]:
    """Return the results of a campaign: counts of the killed, and each survivor."""
    plan, commit = campaign.plan, get_commit()
    modules = []
    for module, excluded in sorted(campaign.excluded.items()):
        played = [one for one in campaign.played if one.mutant.module == module]
        mutants = [one for one in played if one.is_changed]
        killed = Counter(one.outcome.killed_by for one in mutants if one.outcome.killed_by)
        modules.append(
            {
                "module": module,
                "text": campaign.texts[module],
                "commit": commit,
                "mutants": len(mutants),
                "killed": dict(sorted(killed.items())),
                "no_change": len(played) - len(mutants),
                "excluded": dict(sorted(excluded.items())),
            }
        )
    run = {
        "day": datetime.now(tz=UTC).date().isoformat(),
        "command": command,
        "device": f"{os.cpu_count()}-core {platform.machine()} machine, no GPU; "
        f"{plan.jobs} process{'es' * (plan.jobs > 1)}",
        "versions": {
            "python": platform.python_version(),
            "blockstep": version("blockstep"),
            "cosmic-ray": version("cosmic-ray"),
        },
        "seed": plan.seed,
        "sample": plan.sample,
        "first": [list(stage) for stage in plan.first],
        "deep": [list(stage) for stage in plan.deep],
        "seconds": round(campaign.seconds),
        "modules": [one["module"] for one in modules],
    }
    return {
        "runs": [run],
        "modules": modules,
        "properties": count_voices(campaign),
        "survivors": [describe(one) for one in campaign.played if is_survivor(one)],
    }


def dump(results: Mapping[str, Any]) -> str:
    """Return the results as JSON, each entry of a list on a line of its own."""
    parts = []
    for name, value in results.items():
        if isinstance(value, list):
            rows = ",\n".join("  " + json.dumps(one) for one in value)
            parts.append(f' "{name}": [\n{rows}\n ]' if rows else f' "{name}": []')
        else:
            parts.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def put_into(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a whole campaign, with some modules replaced by results of a later
    run.
    """
    names = {module["module"] for module in part["modules"]}
    kept = [
        {**run, "modules": [one for one in run["modules"] if one not in names]}
        for run in whole["runs"]
    ]
    voices = Counter(whole["properties"]) + Counter(part["properties"])
    rows = {
        key: [one for one in whole[key] if one["module"] not in names] + part[key]
        for key in ("modules", "survivors")
    }
    return {
        "runs": [*(run for run in kept if run["modules"]), *part["runs"]],
        "modules": sorted(rows["modules"], key=lambda module: str(module["module"])),
        "properties": dict(voices.most_common()),
        "survivors": rows["survivors"],
    }


def find_changed(modules: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the modules that have changed, or are gone, since they were played."""
    now = {source.module: make_key(source.text) for source in find_sources()}
    return {one["module"] for one in modules if one["text"] != now.get(one["module"])}


def find_unplayed(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the modules that could be played and have no results."""
    played = {module["module"] for module in modules}
    return [source.module for source in find_sources() if source.module not in played]


def say_command(module: str, arguments: Sequence[str]) -> str:
    """Return the command without its output files, which change no result."""
    files = {"--journal", "--json", "--corpus"}
    said = [
        word
        for before, word in pairwise(["", *arguments])
        if word not in files and before not in files
    ]
    return " ".join([f"python -m {module}", *said])


def count_voices(campaign: Campaign) -> dict[str, int]:
    """Return how many mutants each property, or another kind of finding, noticed first."""
    voices = Counter(
        one.outcome.detail for one in campaign.played if one.outcome.killed_by in _FINDINGS
    )
    return dict(voices.most_common())


def is_survivor(played: Played) -> bool:
    """Whether it is a different program and nothing noticed it."""
    return played.is_changed and not played.outcome.killed_by


def describe(played: Played) -> dict[str, Any]:
    """Return a survivor as the results name it."""
    mutant = played.mutant
    named = {
        "module": mutant.module,
        "function": mutant.function,
        "line": mutant.line,
        "change": played.change,
    }
    return named if played.is_reached else {**named, "reached": False}
