"""The campaign: draws the mutants of a target, plays them and counts the results."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._pages import get_commit
from benchmarks.mutation.processes import Journal, Result, make_key, run_forked
from benchmarks.mutation.targets import (
    TARGETS,
    Mutant,
    find_mutants,
    list_marks,
    read_sources,
)
from benchmarks.mutation.trials import (
    WALL_SECONDS,
    Runs,
    choose,
    measure,
    open_session,
    play_mutant,
)

from blockstep.conformance.prove.changes import KINDS

NOT_MADE = "not made"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a campaign."""

    target: str
    only: tuple[str, ...] = ()
    """Prefixes of modules."""
    sample: int | None = None
    """Number of mutants, drawn by the seed; None: all."""
    seed: int = 0
    jobs: int = 1
    trials: tuple[str, ...] = ()
    """Prefixes of trials: `test tests/spec/core`, `law pool`, `play host`; none: all."""
    again: bool = False
    """Whether survivors in the journal are played again, since the tests may have changed."""
    journal: Path | None = None


@dataclass(slots=True)
class Campaign:
    """All results."""

    plan: Plan
    mutants: list[Mutant]
    """The drawn mutants."""
    num_found: int
    """Number of mutants that could be drawn."""
    marks: list[tuple[str, int, str]]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results by the title of the mutant."""
    num_trials: int = 0
    left_out: list[str] = field(default_factory=list)
    """Trials that fail unchanged."""
    seconds: float = 0.0


def run_campaign(
    plan: Plan,
    show_progress: Callable[[str, int, int], None] = lambda *_: None,
    on_survivor: Callable[[Mutant, int], None] = lambda *_: None,
) -> Campaign:
    """Draw the mutants of a plan and play them; `on_survivor` gets each that nothing noticed, and
    how many trials executed it.

    Raises:
        LookupError: no module has the prefix.
        ValueError: a mark has no reason.
        UnsoundError: no unchanged trial passes.
    """
    target = TARGETS[plan.target]
    sources = read_sources(target, plan.only)
    found = find_mutants(sources)
    mutants = draw(found, plan.sample, plan.seed)
    campaign = Campaign(plan, mutants, len(found), list_marks(sources))
    journal, started = Journal(plan.journal), time.perf_counter()
    keys = {one.title: make_key(one.source.text, one.title, plan.trials) for one in mutants}

    def take(mutant: Mutant, result: dict[str, Any]) -> None:
        campaign.results[mutant.title] = result
        if not result["killed_by"]:
            on_survivor(mutant, result["num_trials"])
        show_progress("mutants", len(campaign.results), len(mutants))

    def work(runs: Runs) -> None:
        for mutant in mutants:
            known = journal.known.get(keys[mutant.title])
            if known is not None and (known["killed_by"] or not plan.again):
                take(mutant, known)
        left = [one for one in mutants if one.title not in campaign.results]
        if not left:
            return
        show_progress("unchanged run", 0, 1)
        touched = {one.source.module for one in left}
        trials, campaign.left_out = measure(
            runs, [one for one in sources if one.module in touched], plan.jobs
        )
        show_progress("unchanged run", 1, 1)
        campaign.num_trials = len(trials)
        works = [partial(play_mutant, one, choose(one, trials), runs) for one in left]
        for index, answer in run_forked(works, plan.jobs, WALL_SECONDS):
            result = _read(answer)
            journal.note(keys[left[index].title], result)
            take(left[index], result)

    open_session(target, plan.trials, work)
    campaign.seconds = time.perf_counter() - started
    return campaign


def draw(mutants: Sequence[Mutant], number: int | None, seed: int) -> list[Mutant]:
    """Return `number` mutants; a change of the code hardly changes which others are drawn."""
    drawn = sorted(mutants, key=lambda one: make_key(one.title, seed))[:number]
    return sorted(drawn, key=lambda one: (one.source.module, one.change.start, one.change.number))


def _read(answer: Result) -> dict[str, Any]:
    match answer:
        case dict():
            return answer
        case signal.Signals.SIGPROF | signal.Signals.SIGALRM:
            return {"killed_by": "hang", "num_trials": 1}
        case _:
            return {"killed_by": "crash", "num_trials": 1}


# Results.


def to_json(campaign: Campaign, command: str) -> dict[str, Any]:
    """Return the results: counts by module and by kind of change, and each survivor."""
    plan = campaign.plan
    made = [
        (one, campaign.results[one.title])
        for one in campaign.mutants
        if campaign.results[one.title]["killed_by"] != NOT_MADE
    ]
    killed = Counter(_name_killer(result["killed_by"]) for _, result in made if result["killed_by"])
    return {
        "target": plan.target,
        "day": datetime.now(tz=UTC).date().isoformat(),
        "command": command,
        "commit": get_commit(),
        "device": f"{os.cpu_count()}-core {platform.machine()} machine, no GPU",
        "python": platform.python_version(),
        "seed": plan.seed,
        "found": campaign.num_found,
        "drawn": len(campaign.mutants),
        "not_made": len(campaign.mutants) - len(made),
        "trials": campaign.num_trials,
        "seconds": round(campaign.seconds),
        "killed_by": dict(killed.most_common()),
        "modules": _count(made, lambda one: one.source.module),
        "kinds": _count(made, lambda one: one.change.kind),
        "survivors": [
            {
                "module": one.source.module,
                "line": one.change.lines[0],
                "function": one.change.function,
                "change": one.change.show(one.source.text),
                "trials": result["num_trials"],
            }
            for one, result in made
            if not result["killed_by"]
        ],
        "marks": [list(mark) for mark in campaign.marks],
    }


def _name_killer(name: str) -> str:
    """Return the file of a test, or the kind of another trial."""
    kind, _, rest = name.partition(" ")
    return rest.partition("::")[0].rpartition("/")[2] if kind == "test" else kind


def _count(
    made: Sequence[tuple[Mutant, Mapping[str, Any]]], name_of: Callable[[Mutant], str]
) -> dict[str, list[int]]:
    """Return [played, killed] by name."""
    counts: dict[str, list[int]] = {}
    for mutant, result in made:
        count = counts.setdefault(name_of(mutant), [0, 0])
        count[0] += 1
        count[1] += bool(result["killed_by"])
    order = {kind: number for number, kind in enumerate(KINDS)}
    return dict(sorted(counts.items(), key=lambda item: (order.get(item[0], 0), item[0])))


def get_score(results: Mapping[str, Any]) -> float:
    """Return the share of the played mutants that were noticed."""
    played = sum(count[0] for count in results["modules"].values())
    return 1.0 - len(results["survivors"]) / played if played else 0.0
