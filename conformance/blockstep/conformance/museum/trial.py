"""Trials of seeded bugs: each is checked like any engine and must be found, unless it is invisible.

The engine is the specification with a wrong rule, so it can be compared with it. It can also be
checked against the properties alone, as a foreign engine would be, with its state shown or hidden.
A defect of policy or speed (`SeededBug.invisible`) must not be found then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockstep.conformance.engine import EXACT, EngineFactory, EngineTraits, Safety
from blockstep.conformance.museum import build
from blockstep.conformance.museum.bug import SeededBug
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.registry import MUSEUM
from blockstep.conformance.search.call import open_processes
from blockstep.conformance.search.check import InProcess, check
from blockstep.conformance.search.engine_wrappers import hide_state
from blockstep.conformance.search.options import CheckOptions, load

SURVIVED = "SURVIVED"
DIVERGENCE = "divergence"


@dataclass(frozen=True, slots=True)
class BugRunMode:
    """The equivalence at which seeded bugs are checked, and whether their state is shown."""

    equivalence: str = EXACT
    """`exact` or `safety`."""
    is_hidden: bool = False
    """Whether the state is hidden; at `safety` only."""

    @property
    def name(self) -> str:
        """The name of its column in a table."""
        return f"{self.equivalence}, state hidden" if self.is_hidden else self.equivalence

    def why_invisible(self, entry: SeededBug) -> str:
        """Return why a seeded bug must not be found; "" if it must be found."""
        if self.equivalence == EXACT:
            return ""
        return entry.invisible or (entry.invisible_if_hidden if self.is_hidden else "")


STANDINGS = (BugRunMode(), BugRunMode(Safety.name), BugRunMode(Safety.name, is_hidden=True))


@dataclass(frozen=True, slots=True)
class Fall:
    """The result of one seeded bug with one seed."""

    seed: int
    killed_by: str
    """Property and check, or `divergence`, or `SURVIVED`."""
    events: int
    """Events until the first finding; the whole budget for a survivor."""
    seconds: float
    shrunk: int | None
    """Number of actions of the shrunk program; None if nothing was found or shrunk."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A seeded bug and its results, one per seed."""

    exhibit: SeededBug
    falls: tuple[Fall, ...]
    standing: BugRunMode = STANDINGS[0]

    @property
    def survived(self) -> bool:
        """Whether at least one seed did not find it."""
        return any(fall.killed_by == SURVIVED for fall in self.falls)

    @property
    def invisible(self) -> str:
        """Why it must not be found; "" if it must be found."""
        return self.standing.why_invisible(self.exhibit)

    @property
    def is_passed_over(self) -> bool:
        """Whether it is invisible and no seed found it."""
        return bool(self.invisible) and all(fall.killed_by == SURVIVED for fall in self.falls)

    @property
    def problem(self) -> str:
        """The reason why the results are not as expected, in words; "" if they are."""
        found = [fall.killed_by for fall in self.falls if fall.killed_by != SURVIVED]
        if self.invisible:
            return f"found though listed as invisible ({found[0]})" if found else ""
        return "survived" if self.survived else ""


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of a trial."""

    seeds: tuple[int, ...] = (0, 1, 2)
    max_events: int | None = None
    """Limit for each seeded bug and seed."""
    max_seconds: float | None = None
    jobs: int = 1
    """Number of parallel processes."""
    standing: BugRunMode = STANDINGS[0]
    shrinks: bool = True
    """Whether a finding's program is shrunk."""


def run_trial(
    exhibits: Sequence[SeededBug],
    trial: Trial,
    on_progress: Callable[[float, str], None] = lambda _done, _text: None,
) -> list[Tried]:
    """Check each seeded bug with each seed, in this process if `jobs` is 1."""
    tasks = [
        Task(
            CheckOptions(
                engine=f"{MUSEUM}{entry.name}",
                seed=seed,
                max_events=trial.max_events,
                max_seconds=trial.max_seconds,
                hide_state=trial.standing.is_hidden,
                with_features=(entry.takes,) if entry.takes else (),
            ),
            trial.standing.equivalence,
            trial.shrinks,
        )
        for entry in exhibits
        for seed in trial.seeds
    ]
    falls: list[Fall] = []
    for fall in _falls(tasks, trial.jobs):
        falls.append(fall)
        survived = sum(fall.killed_by == SURVIVED for fall in falls)
        line = f"{len(falls):,} of {len(tasks):,} hunts, {survived or 'none'} survived"
        on_progress(len(falls) / len(tasks), line)
    size = len(trial.seeds)
    return [
        Tried(entry, tuple(falls[index * size : (index + 1) * size]), trial.standing)
        for index, entry in enumerate(exhibits)
    ]


@dataclass(frozen=True, slots=True)
class Task:
    """One run: a seeded bug with one seed; sent to another process."""

    options: CheckOptions
    equivalence: str
    shrinks: bool


def _falls(tasks: Sequence[Task], jobs: int) -> Iterator[Fall]:
    """Yield the results in the order of the tasks."""
    if jobs <= 1 or len(tasks) <= 1:
        yield from map(_try, tasks)
        return
    with open_processes(min(jobs, len(tasks))) as pool:
        yield from pool.map(_try, tasks)


def _try(task: Task) -> Fall:
    """Run a task and return its result."""
    place = InProcess(load if task.equivalence == EXACT else load_as_foreign)
    result = check(task.options, place=place, shrinks=task.shrinks)
    killed_by = SURVIVED if result.first is None else name_of(result.first)
    shrunk = None if result.failure is None else len(result.failure.program.actions)
    return Fall(task.options.seed, killed_by, result.num_events, result.seconds, shrunk)


def load_as_foreign(options: CheckOptions) -> EngineFactory:
    """Return a seeded bug's engine as a foreign one: checked against the properties, compared with
    nothing.
    """
    traits = EngineTraits(equivalence=Safety())
    make_engine = build(options.engine.removeprefix(MUSEUM), traits)
    return hide_state(make_engine) if options.hide_state else make_engine


def name_of(finding: Finding) -> str:
    """Return what found it: property and check, or `divergence`."""
    if finding.kind is FindingKind.DIVERGENCE:
        return DIVERGENCE
    return f"{finding.property_id or finding.kind} {finding.sentence}"


def row_of(tried: Tried) -> dict[str, object]:
    """Return a row for a table that people read: one cell per number, with the results of all
    seeds.
    """
    falls = tried.falls
    killed_by = "; ".join(dict.fromkeys(fall.killed_by for fall in falls))
    return {
        **describe(tried.exhibit),
        "killed by": f"invisible: {tried.invisible}" if tried.is_passed_over else killed_by,
        "events": " / ".join(f"{fall.events:,}" for fall in falls),
        "seconds": " / ".join(f"{fall.seconds:.1f}" for fall in falls),
        "shrunk to": " / ".join("-" if fall.shrunk is None else str(fall.shrunk) for fall in falls),
    }


def json_of(tried: Tried) -> dict[str, object]:
    """Return the results for programs: a list with one object per seed."""
    return {
        **describe(tried.exhibit),
        "equivalence": tried.standing.equivalence,
        "state": "hidden" if tried.standing.is_hidden else "shown",
        "invisible": tried.invisible,
        "survived": tried.survived,
        "seeds": [
            {
                "seed": fall.seed,
                "killed by": fall.killed_by,
                "events": fall.events,
                "seconds": round(fall.seconds, 1),
                "shrunk to": fall.shrunk,
            }
            for fall in tried.falls
        ],
    }


def describe(entry: SeededBug) -> dict[str, object]:
    """Return the columns that every list of seeded bugs has."""
    fix = f"wrong fix of {entry.wrong_fix_of}: " if entry.wrong_fix_of else ""
    return {
        "exhibit": entry.name,
        "what is wrong": f"{fix}{entry.title}",
        "upstream": entry.upstream,
    }


def summary(tried: Sequence[Tried]) -> str:
    """Return one line for all: how many were found, and after how many events."""
    passed_over = sum(entry.is_passed_over for entry in tried)
    falls = [fall for entry in tried if not entry.is_passed_over for fall in entry.falls]
    events = [fall.events for fall in falls if fall.killed_by != SURVIVED]
    text = f"{len(events)} of {len(falls)} hunts killed"
    if events:
        text += f"; events to kill: median {statistics.median_low(events):,}, most {max(events):,}"
    if passed_over:
        text += f"; {passed_over} seeded bugs are invisible and were not found"
    standing = tried[0].standing
    return text if standing == STANDINGS[0] else f"{standing.name}: {text}"


def museum_page(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of seeded bugs, with a column for each standing among `rows`.

    `rows` are those of `json_of`, of one run or of several.
    """
    columns: dict[str, dict[str, str]] = {}
    about: dict[str, tuple[str, str]] = {}
    for row in rows:
        name = row["exhibit"]
        about.setdefault(name, (row["what is wrong"], row["upstream"]))
        columns.setdefault(name_standing(row), {})[name] = format_fall(row)
    return tabulate(about, columns)


def tabulate(about: Mapping[str, tuple[str, str]], columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table of seeded bugs: what is wrong and upstream, then a cell of each column."""
    lines = [
        "| " + " | ".join(["exhibit", "what is wrong", "upstream", *columns]) + " |",
        "|" + "---|" * (3 + len(columns)),
    ]
    for name, texts in about.items():
        cells = [name, *texts, *(column.get(name, "") for column in columns.values())]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def name_standing(row: Mapping[str, Any]) -> str:
    """Return the column of a row: exact, safety, or safety with the state hidden."""
    return BugRunMode(row["equivalence"], row["state"] == "hidden").name


def format_fall(row: Mapping[str, Any]) -> str:
    """Return the cell of a seeded bug: what found it, and after how many events with each seed."""
    killers = dict.fromkeys(fall["killed by"] for fall in row["seeds"])
    events = " / ".join(f"{fall['events']:,}" for fall in row["seeds"])
    if row["invisible"] and [*killers] == [SURVIVED]:
        return f"invisible ({row['invisible']}): not in {events}"
    return f"{'; '.join(killers)}: {events}"
