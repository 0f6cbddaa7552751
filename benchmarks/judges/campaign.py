"""The campaign: which mutants are played, and their results."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.judges.listed import find_listed
from benchmarks.judges.museum import Corpus, make_corpus
from benchmarks.judges.mutants import (
    KINDS,
    Mutant,
    Source,
    find_all,
    get_function,
    mark,
    read_sources,
)
from benchmarks.judges.playing import (
    MODULES,
    WALL_SECONDS,
    Outcome,
    Session,
    Trial,
    choose,
    measure,
    open_session,
    play,
)
from benchmarks.mutation.journal import Journal, make_key
from benchmarks.mutation.runner import run_forked


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a campaign."""

    only: tuple[str, ...] = ()
    """Prefixes of modules or of titles of mutants."""
    fine: int | None = 0
    """Number of finer changes, drawn by the seed; None: all."""
    sample: int | None = None
    """Number of mutants of any class, drawn by the seed."""
    seed: int = 0
    jobs: int = 1
    tests: tuple[str, ...] = MODULES
    """Test modules."""
    museum: bool = True
    corpus: Path | None = None
    """Folder of the programs of seeded bugs."""
    again: bool = False
    """Play survivors of the journal again, since the tests may have changed."""


@dataclass(frozen=True, slots=True)
class Played:
    """One mutant and its result."""

    mutant: Mutant
    change: str
    outcome: Outcome


@dataclass(slots=True)
class Campaign:
    """All results."""

    plan: Plan
    played: list[Played] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    """Number of mutants that exist, by class, played or not."""
    num_tests: int = 0
    num_programs: int = 0
    seconds: float = 0.0


Tell = Callable[[str, int, int], None]
"""Callback that gets (what is done, number done, total number)."""


def find_mutants(sources: Mapping[str, Source], plan: Plan) -> list[Mutant]:
    """Return the mutants of the plan, in a stable order.

    Raises:
        LookupError: no mutant has the prefix.
    """
    found = [*find_listed(sources), *find_all(sources, plan.fine != 0)]
    if plan.only:
        found = [one for one in found if f"{one.module} {one.title}".startswith(plan.only)
                 or one.title.startswith(plan.only)]  # fmt: skip
    if not found:
        kinds = ", ".join(KINDS)
        raise LookupError(
            f"no mutant begins with {' or '.join(plan.only)}: name a kind ({kinds}), a title "
            "(`voice P26`) or a module (`judge/worker`)"
        )
    found = _draw(found, plan.sample, plan.seed)
    fine = [one for one in found if one.kind == "fine"]
    found = [one for one in found if one.kind != "fine"] + _draw(fine, plan.fine, plan.seed)
    return sorted(found, key=lambda one: (KINDS.index(one.kind), one.module, one.lines, one.name))


def _draw(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Return `count` mutants; the draw stays the same for those that still exist after a change."""
    order = sorted(mutants, key=lambda one: make_key(one.title, seed))
    return order[:count]


def run_campaign(
    plan: Plan, tell: Tell, journal: Journal, on_played: Callable[[Played], None]
) -> Campaign:
    """Play all mutants of a plan; `on_played` gets each result as it ends.

    Raises:
        LookupError: there is no mutant.
        UnsoundError: the unmutated judges do not pass their tests.
    """
    sources = read_sources()
    campaign = Campaign(plan)
    mutants = find_mutants(sources, plan)
    everything = (*find_listed(sources), *find_all(sources, fine=True))
    campaign.found = dict(Counter(one.kind for one in everything))
    corpus: Corpus = make_corpus(plan.corpus, plan.seed, tell) if plan.museum else {}

    def take(played: Played) -> None:
        campaign.played.append(played)
        on_played(played)

    def work(session: Session) -> None:
        campaign.num_tests, campaign.num_programs = len(session.items), len(corpus)
        left = []
        for mutant, outcome in _look_up(mutants, sources, plan, journal):
            if outcome is None:
                left.append(mutant)
            else:
                take(_describe(mutant, sources, outcome))
        tell("mutants", len(campaign.played), len(mutants))
        for played in _play_all(session, corpus, sources, left, plan, journal, tell):
            take(played)
            tell("mutants", len(campaign.played), len(mutants))

    open_session(work, plan.tests)
    order = {one.title: number for number, one in enumerate(mutants)}
    campaign.played.sort(key=lambda played: order[played.mutant.title])
    campaign.seconds = journal.seconds
    return campaign


def _look_up(
    mutants: Sequence[Mutant], sources: Mapping[str, Source], plan: Plan, journal: Journal
) -> list[tuple[Mutant, Outcome | None]]:
    """Return each mutant with its result in the journal; None if it has to be played."""
    known = dict(journal.split([_make_key(one, sources[one.module]) for one in mutants])[0])
    outcomes = {index: _read(result) for index, result in known.items()}
    if plan.again:
        outcomes = {index: one for index, one in outcomes.items() if one.killed_by}
    return [(one, outcomes.get(index)) for index, one in enumerate(mutants)]


def _play_all(
    session: Session,
    corpus: Corpus,
    sources: Mapping[str, Source],
    mutants: Sequence[Mutant],
    plan: Plan,
    journal: Journal,
    tell: Tell,
) -> Iterator[Played]:
    """Measure which lines each test runs, then play; do nothing if no mutant is left."""
    if not mutants:
        return
    touched = {one.module for one in mutants}
    changed = {name: source for name, source in sources.items() if name in touched}
    tell("unmutated run", 0, 1)
    trials = measure(session, corpus, changed, plan.jobs)
    tell("unmutated run", 1, 1)
    works = [
        partial(_work, session, corpus, one, sources[one.module], choose(one, trials, corpus))
        for one in mutants
    ]
    journal.split([])  # the time until now belongs to no mutant
    for index, result in run_forked(works, plan.jobs, WALL_SECONDS):
        mutant = mutants[index]
        journal.note(_make_key(mutant, sources[mutant.module]), result)
        yield _describe(mutant, sources, _read(result))


def _work(
    session: Session, corpus: Corpus, mutant: Mutant, source: Source, trials: Sequence[Trial]
) -> dict[str, Any]:
    return asdict(play(session, corpus, mutant, source, trials))


def _make_key(mutant: Mutant, source: Source) -> str:
    """Return the key of a result, which is valid as long as the function around the change is the
    same.
    """
    return make_key(get_function(source, mutant.function), mutant.title)


def _read(result: dict[str, Any] | signal.Signals | None) -> Outcome:
    match result:
        case dict():
            return Outcome(**result)
        case signal.Signals.SIGPROF | signal.Signals.SIGALRM:
            return Outcome("hang", result.name)
        case _:
            return Outcome("crash", "the process ended" if result is None else result.name)


def _describe(mutant: Mutant, sources: Mapping[str, Source], outcome: Outcome) -> Played:
    return Played(mutant, mark(sources[mutant.module].text, mutant), outcome)
