"""Trial: each exhibit is checked like any engine, and must fall."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blockstep.conformance.museum.exhibit import Exhibit
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.registry import MUSEUM
from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.processes import open_processes

SURVIVED = "SURVIVED"
DIVERGENCE = "divergence"


@dataclass(frozen=True, slots=True)
class Fall:
    """How one exhibit fell with one seed."""

    seed: int
    killed_by: str
    """Property and sentence, or `divergence`, or `SURVIVED`."""
    events: int
    """Until the first finding; the whole budget for a survivor."""
    seconds: float
    shrunk: int | None
    """Actions of the shortest program that shows it; None for a survivor."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One exhibit and its falls, one for each seed."""

    exhibit: Exhibit
    falls: tuple[Fall, ...]

    @property
    def survived(self) -> bool:
        """Whether one seed at least did not find it."""
        return any(fall.killed_by == SURVIVED for fall in self.falls)


@dataclass(frozen=True, slots=True)
class Trial:
    """What to check exhibits with."""

    seeds: tuple[int, ...] = (0, 1, 2)
    max_events: int | None = None
    """For each exhibit and seed."""
    max_seconds: float | None = None
    jobs: int = 1
    """Processes side by side."""


def run_trial(
    exhibits: Sequence[Exhibit],
    trial: Trial,
    on_progress: Callable[[float, str], None] = lambda _done, _text: None,
) -> list[Tried]:
    """Check each exhibit with each seed. With one job nothing leaves this process."""
    tasks = [
        CheckOptions(
            engine=f"{MUSEUM}{entry.name}",
            seed=seed,
            max_events=trial.max_events,
            max_seconds=trial.max_seconds,
        )
        for entry in exhibits
        for seed in trial.seeds
    ]
    falls: list[Fall] = []
    for fall in _falls(tasks, trial.jobs):
        falls.append(fall)
        survived = sum(fall.killed_by == SURVIVED for fall in falls)
        told = f"{len(falls):,} of {len(tasks):,} hunts, {survived or 'none'} survived"
        on_progress(len(falls) / len(tasks), told)
    size = len(trial.seeds)
    return [
        Tried(entry, tuple(falls[index * size : (index + 1) * size]))
        for index, entry in enumerate(exhibits)
    ]


def _falls(tasks: Sequence[CheckOptions], jobs: int) -> Iterator[Fall]:
    """The falls in order of the tasks."""
    if jobs <= 1 or len(tasks) <= 1:
        yield from map(_try, tasks)
        return
    with open_processes(min(jobs, len(tasks))) as pool:
        yield from pool.map(_try, tasks)


def _try(options: CheckOptions) -> Fall:
    """How one exhibit falls with one seed."""
    result = check(options)
    killed_by = SURVIVED if result.first is None else name_of(result.first)
    shrunk = None if result.failure is None else len(result.failure.program.actions)
    return Fall(options.seed, killed_by, result.num_events, result.seconds, shrunk)


def name_of(finding: Finding) -> str:
    """What found it: a property with its sentence, or the comparison with the specification."""
    if finding.kind is FindingKind.DIVERGENCE:
        return DIVERGENCE
    return f"{finding.property_id or finding.kind} {finding.sentence}"


def row_of(tried: Tried) -> dict[str, object]:
    """A row for a table that people read: one cell per number, with the seeds side by side."""
    falls = tried.falls
    return {
        **describe(tried.exhibit),
        "killed by": "; ".join(dict.fromkeys(fall.killed_by for fall in falls)),
        "events": " / ".join(f"{fall.events:,}" for fall in falls),
        "seconds": " / ".join(f"{fall.seconds:.1f}" for fall in falls),
        "shrunk to": " / ".join("-" if fall.shrunk is None else str(fall.shrunk) for fall in falls),
    }


def json_of(tried: Tried) -> dict[str, object]:
    """The same for programs: a list with one object per seed."""
    return {
        **describe(tried.exhibit),
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


def describe(entry: Exhibit) -> dict[str, object]:
    """What every list of the museum says of an exhibit."""
    fix = f"wrong fix of {entry.wrong_fix_of}: " if entry.wrong_fix_of else ""
    return {
        "exhibit": entry.name,
        "what is wrong": f"{fix}{entry.title}",
        "upstream": entry.upstream,
    }


def summary(tried: Sequence[Tried]) -> str:
    """One line for all: how many fell, and what it took."""
    killed = [fall for entry in tried for fall in entry.falls if fall.killed_by != SURVIVED]
    num_falls = sum(len(entry.falls) for entry in tried)
    if not killed:
        return f"0 of {num_falls} hunts killed"
    events = [fall.events for fall in killed]
    return (
        f"{len(killed)} of {num_falls} hunts killed; events to kill: median "
        f"{statistics.median_low(events):,}, most {max(events):,}"
    )


def museum_page(rows: Sequence[dict[str, object]], command: str, seeds: Sequence[int]) -> str:
    """The museum as a page of the documentation."""
    columns = [*rows[0]]
    shown = " / ".join(map(str, seeds))
    lines = [
        "# Museum",
        "",
        "Defects of released engines, planted in ours one at a time. Each must be caught by a",
        "named property or by a difference from the specification; some raise with one seed or",
        "another before either can speak, as an engine does that takes blocks which are not there.",
        "If one survives, the tools are blind to what is known to happen. Numbers without a name",
        "are vLLM's. A wrong fix is a repair of another exhibit that was tried, or would suggest",
        "itself, and does not hold.",
        "",
        f"Made by `{command} --markdown FILE`. Events and seconds run until the first finding,",
        f"seconds with its shrinking; one number for each of the seeds {shown}.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = (str(value).replace("|", "\\|") for value in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
