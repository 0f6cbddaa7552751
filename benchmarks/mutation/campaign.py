"""The campaign: which mutants are played for how long, and their results.

First the unmutated code must pass everything that the mutants will run; otherwise every mutant
would count as killed. The same run records which lines each stage executes: a mutant runs only the
stages that execute its line, since no other can notice it. Every mutant runs short stages first,
and the survivors run the whole budget of `blockstep check`.
"""

from __future__ import annotations

import ast
import importlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from benchmarks.mutation.engines import BESIDE_TIERS, COLLIDING, COMPILED_ARRAYS
from benchmarks.mutation.journal import Journal, make_key
from benchmarks.mutation.mutants import (
    Mutant,
    Source,
    find_mutants,
    get_wing,
    is_change,
    make_mutated_text,
    mark_change,
)
from benchmarks.mutation.runner import Outcome, Stage, forget, play, play_mutant, run_forked

WALL_SECONDS = 1800
"""Wall time limit of one process; loops end much earlier, by processor time."""

TIERS = ("impl/tiers/order.py", "spec/beside/tiers.py")
"""Modules that no scheduler uses, so no other stage plays them."""

BROUGHT = "small adapters masks sessions encoder"
"""Runs in which requests have all features: inputs, adapters, grammars, sessions."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a campaign, and the seed."""

    first: tuple[Stage, ...] = (
        (BESIDE_TIERS, "tiny", 2_000),
        ("host", "small tiers", 6_000),
        ("host", "small groups tiers", 4_000),
        ("host", "small forks", 6_000),
        ("host", "small groups forks", 4_000),
        ("host", "small pins", 4_000),
        ("host", "small groups pins", 4_000),
        ("host", "small transfers", 6_000),
        ("host", "small groups transfers", 4_000),
        ("host", "small events", 2_000),
        ("host", "small groups events", 4_000),
        ("host", "small groups", 4_000),
        ("host", "small groups sessions", 4_000),
        ("host", BROUGHT, 4_000),
        ("host", "tiny", 3_000),
        (COLLIDING, "small", 3_000),
        ("host", "small", 14_000),
        ("compiled", "tiny", 1_000),
        ("compiled", "small", 3_000),
        (COMPILED_ARRAYS, "small", 3_000),
    )
    """Stages of every mutant. Features that are rare in freely drawn runs come first."""
    deep: tuple[Stage, ...] = (
        (BESIDE_TIERS, "tiny", 15_000),
        ("host", "small tiers", 30_000),
        ("host", "small groups tiers", 30_000),
        ("host", "small forks", 30_000),
        ("host", "small groups forks", 30_000),
        ("host", "small pins", 30_000),
        ("host", "small groups pins", 30_000),
        ("host", "small transfers", 30_000),
        ("host", "small groups transfers", 30_000),
        ("host", "small groups events", 15_000),
        ("host", "small groups", 30_000),
        ("host", "small groups sessions", 15_000),
        ("host", BROUGHT, 30_000),
        ("host", "small", 150_000),
        (COLLIDING, "small", 15_000),
        ("compiled", "small", 8_000),
        (COMPILED_ARRAYS, "small", 8_000),
    )
    """Stages of survivors, from the first episode on; for `host` the default of `blockstep check`.
    """
    seed: int = 0
    jobs: int = 1
    sample: int | None = None
    """Number of mutants, drawn by the seed; None: all."""


@dataclass(frozen=True, slots=True)
class Played:
    """One mutant and its result."""

    mutant: Mutant
    change: str
    """The changed line, as `mark_change` returns it."""
    outcome: Outcome
    is_changed: bool = True
    """Whether the mutant is a valid program that differs."""
    is_reached: bool = True
    """Whether a stage executes the changed line."""


@dataclass(slots=True)
class Campaign:
    """All results."""

    plan: Plan
    played: list[Played] = field(default_factory=list)
    excluded: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of places left out, by module and rule."""
    texts: dict[str, str] = field(default_factory=dict)
    """The key of each module's source."""
    seconds: float = 0.0


class UnsoundError(Exception):
    """The unmutated code does not pass, so no mutant can be judged."""


Progress = Callable[[str, int, int], None]
"""Callback that gets (what is done, number done, total number)."""


def run_campaign(
    sources: Sequence[Source],
    plan: Plan,
    is_settled: Callable[[Played], bool] = lambda _played: False,
    tell: Progress = lambda _what, _done, _all: None,
    journal: Journal | None = None,
) -> Campaign:
    """Make and play all mutants of some modules; a survivor that is explained is not played again.

    Mutants with a result in the journal are not played at all.

    Raises:
        UnsoundError: the unmutated code fails.
    """
    started, journal = time.perf_counter(), journal or Journal()
    campaign = Campaign(plan)
    mutants: list[Mutant] = []
    for source in sources:
        found, campaign.excluded[source.module] = find_mutants(source)
        campaign.texts[source.module] = make_key(source.text)
        mutants += found
    if plan.sample is not None and plan.sample < len(mutants):
        mutants = sorted(random.Random(plan.seed).sample(mutants, plan.sample), key=_order)  # noqa: S311
    reached = measure_reach(sources, plan, tell)
    by_module = {source.module: source for source in sources}
    runs = [make_run(one, by_module[one.module], reached) for one in mutants]
    campaign.seconds = time.perf_counter() - started
    survivors: list[Run] = []
    for run, played in _play_all(runs, plan.first, plan, journal, tell):
        is_survivor = played.is_changed and played.is_reached and not played.outcome.killed_by
        if is_survivor and plan.deep and not is_settled(played):
            survivors.append(run)
        else:
            campaign.played.append(played)
    survivors.sort(key=lambda run: _order(run.mutant))
    for _, played in _play_all(survivors, plan.deep, plan, journal, tell):
        campaign.played.append(played)
    campaign.played.sort(key=lambda played: _order(played.mutant))
    campaign.seconds += journal.seconds
    return campaign


def _order(mutant: Mutant) -> tuple[str, int, str, int]:
    return mutant.module, mutant.line, mutant.operator, mutant.occurrence


@dataclass(frozen=True, slots=True)
class Run:
    """A mutant, its source and its stages."""

    mutant: Mutant
    source: Source
    seen_by: frozenset[Stage]
    """Stages that execute its line."""


def _play_all(
    runs: Sequence[Run], stages: Sequence[Stage], plan: Plan, journal: Journal, tell: Progress
) -> Iterator[tuple[Run, Played]]:
    what = "mutants" if stages == plan.first else "survivors"
    keys = [_make_key(run, get_stages(run, stages), plan.seed) for run in runs]
    known, left = journal.split(keys)
    tell(what, len(known), len(runs))
    for index, result in known:
        yield runs[index], _read(runs[index], result)
    works = [_make_work(runs[index], get_stages(runs[index], stages), plan.seed) for index in left]
    results = run_forked(works, plan.jobs, WALL_SECONDS)
    for done, (number, result) in enumerate(results, len(known) + 1):
        index = left[number]
        journal.note(keys[index], result)
        yield runs[index], _read(runs[index], result)
        tell(what, done, len(runs))


def _make_key(run: Run, stages: Sequence[Stage], seed: int) -> str:
    mutant = run.mutant
    return make_key(run.source.text, mutant.operator, mutant.occurrence, list(stages), seed)


def get_stages(run: Run, stages: Sequence[Stage]) -> Sequence[Stage]:
    """Return the stages of a mutant: those that execute its line and are used for its package."""
    return [stage for stage in stages if stage in run.seen_by and is_for(stage, run.mutant.module)]


def is_for(stage: Stage, module: str) -> bool:
    """Whether a stage is for a module: a rule is played by `host` only, an engine by itself."""
    if stage[0] == BESIDE_TIERS or module in TIERS:
        return stage[0] == BESIDE_TIERS and module in TIERS
    is_compiled = stage[0] in {"compiled", COMPILED_ARRAYS}
    match get_wing(module):
        case "spec":
            return stage[0] == "host"
        case "impl/host":
            return not is_compiled
        case "impl/compiled":
            return is_compiled
        case _:
            return True


def _make_work(run: Run, stages: Sequence[Stage], seed: int) -> Callable[[], dict[str, Any]]:
    """Return the function that the process of one mutant runs."""

    def work() -> dict[str, Any]:
        text, source = run.source.text, run.source
        mutated = make_mutated_text(text, run.mutant.operator, run.mutant.occurrence)
        if not is_change(text, mutated):
            return {"changed": False}
        outcome = play_mutant(source.import_name, str(source.file), mutated, stages, seed)
        change = mark_change(text, mutated)
        return {"changed": True, "outcome": asdict(outcome), "change": change}

    return work


def _read(run: Run, result: dict[str, Any] | signal.Signals | None) -> Played:
    """Return the result of a process, or of the signal that ended it."""
    mutant = run.mutant
    match result:
        case {"changed": False}:
            return Played(mutant, "", Outcome(""), is_changed=False)
        case dict():
            outcome = Outcome(**result["outcome"])
            return Played(mutant, result["change"], outcome, True, bool(run.seen_by))
        case signal.SIGPROF | signal.SIGALRM:
            outcome = Outcome("timeout")
        case signal.Signals():
            outcome = Outcome("crash", result.name)
        case _:
            outcome = Outcome("crash", "the process ended")
    text = run.source.text
    mutated = make_mutated_text(text, mutant.operator, mutant.occurrence)
    return Played(mutant, mark_change(text, mutated), outcome, True, bool(run.seen_by))


# Executed lines.


def measure_reach(
    sources: Sequence[Source], plan: Plan, tell: Progress
) -> dict[Stage, Mapping[str, frozenset[int]]]:
    """Return the lines of each module that the unmutated code executes, by stage, with the import.

    Raises:
        UnsoundError: the unmutated code fails.
    """
    stages = [
        stage
        for stage in dict.fromkeys((*plan.first, *plan.deep))
        if any(is_for(stage, source.module) for source in sources)
    ]
    works = [partial(_trace, sources, stage, plan.seed) for stage in stages]
    reached: dict[Stage, Mapping[str, frozenset[int]]] = {}
    tell("unmutated run", 0, len(stages))
    for index, result in run_forked(works, plan.jobs, WALL_SECONDS):
        stage = stages[index]
        if not isinstance(result, dict):
            raise UnsoundError(f"the unmutated run of {stage} ended early: {result}")
        outcome = Outcome(**result["outcome"])
        if outcome.killed_by:
            raise UnsoundError(
                f"the unmutated code fails in {stage} after {outcome.num_events} events: "
                f"{outcome.killed_by} {outcome.detail}; run `blockstep check` first"
            )
        reached[stage] = {module: frozenset(lines) for module, lines in result["lines"].items()}
        tell("unmutated run", len(reached), len(stages))
    return reached


def _trace(sources: Sequence[Source], stage: Stage, seed: int) -> dict[str, Any]:
    coverage: Any = importlib.import_module("coverage")
    for source in sources:
        forget(source.import_name)
    files = [str(source.file) for source in sources]
    tracer = coverage.Coverage(data_file=None, config_file=False, include=files)
    tracer.start()
    check: Any = importlib.import_module("blockstep.conformance.search.check")
    outcome = play(check, [stage], seed)
    tracer.stop()
    data = tracer.get_data()
    return {
        "outcome": asdict(outcome),
        "lines": {source.module: data.lines(str(source.file)) or [] for source in sources},
    }


def make_run(
    mutant: Mutant, source: Source, reached: Mapping[Stage, Mapping[str, frozenset[int]]]
) -> Run:
    """Return a mutant with the stages that execute its line."""
    lines = get_statement_lines(source.text, mutant.line)
    seen_by = frozenset(
        stage
        for stage, modules in reached.items()
        if not lines or not modules[mutant.module].isdisjoint(lines)
    )
    return Run(mutant, source, seen_by)


def get_statement_lines(text: str, line: int) -> range:
    """Return the lines of the statement at `line`, without its body if it has one."""
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            decorators = [one.lineno for one in getattr(node, "decorator_list", [])]
            span = range(min([node.lineno, *decorators]), max(last, node.lineno) + 1)
            if line in span:
                spans.append(span)
    return min(spans, key=len, default=range(0))


def preload() -> None:
    """Import what every child needs, so that no child has to."""
    for name in ("blockstep.conformance.search.check", "blockstep.impl.host", "coverage"):
        importlib.import_module(name)
    assert "blockstep.spec.vocabulary" in sys.modules
