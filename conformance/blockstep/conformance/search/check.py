"""Check: many episodes from one seed, until the budget is spent or something is wrong."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from blockstep.conformance.draw.presets import PRESETS, TINY
from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.features import BY_NAME, SEVERAL_AT_ONCE
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search.episodes import EpisodeResult, Loss, run_episode
from blockstep.conformance.search.floor import (
    CANARY,
    SAFETY_CANARY,
    Facts,
    look,
    missing_witnesses,
    release_canary,
    require_wish,
)
from blockstep.conformance.search.options import (
    CheckOptions,
    ExitCode,
    exit_code_of,
    find_profile,
    get_wish,
    load,
)
from blockstep.conformance.search.shrink import Shrunk, conclude, shrink

EPISODES_PER_BATCH = 8
LONG_EPISODE = 150
"""Episodes of more actions than this are batches of their own."""
EPISODES_COMPARED = 40
"""Episodes, from the first failing one on, in which a simpler failure is looked for."""
EPISODES_COMPARED_MAX = 500
"""The same, where nothing else was short."""
SHORT_PROGRAM = 10
"""Actions of a shrunk program for which no shorter one is looked for."""
SHRUNK_MAX = 3
"""Failures of one scope that are shrunk, at most."""
TINY_EPISODES = 300


@dataclass(slots=True)
class CheckResult:
    """The verdict and everything it rests on."""

    options: CheckOptions
    num_episodes: int = 0
    num_events: int = 0
    seconds: float = 0.0
    witnesses: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    """Findings that the quirks of the profile account for, by property."""
    missing: tuple[str, ...] = ()
    has_snapshot: bool = True
    weaker: str | None = None
    """The equivalence that the engine's factory declares; None: the strongest that it shows."""
    notes: tuple[str, ...] = ()
    """What the engine's factory has to say of it, a sentence each."""
    canary_killed_after: int | None = None
    """Events until the canary was caught; None if it survived, or was not asked for."""
    failed_episode: int | None = None
    failure: Shrunk | None = None
    """The first failure, or a shorter one like it; without findings if it did not come back."""
    first: Finding | None = None
    failing_program: Program | None = None
    loss: Loss | None = None
    """What became of an engine that did not live: at first, or when `first` was to be shrunk."""

    @property
    def equivalence(self) -> str:
        """By what the engine was held to the spec: `exact`, `plan` or `safety`."""
        return self.weaker or ("exact" if self.has_snapshot else "plan")

    @property
    def exit_code(self) -> ExitCode:
        """What the process should end with."""
        if self.first is not None:
            return exit_code_of(self.first)
        single = self.options.episode is not None
        if self.num_events == 0 or (not single and (self.missing or not self.canary_killed_after)):
            return ExitCode.HARNESS
        return ExitCode.CONFORMS


class Place(Protocol):
    """Where an engine is run: in this process, or in one that it may take with it."""

    def look(self, options: CheckOptions) -> Facts:
        """What the engine says of itself."""
        ...

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Some episodes in a row, stopping at the first that fails."""
        ...

    def open_pool(self, jobs: int) -> AbstractContextManager[Executor]:
        """Where so many batches are run side by side. What is not done at its end is dropped."""
        ...


class InProcess:
    """The place of engines that are trusted: this process, or others like it for several jobs."""

    def look(self, options: CheckOptions) -> Facts:
        """What the engine says of itself."""
        return look(options, load(options))

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Some episodes in a row, stopping at the first that fails."""
        make_engine = load(options)
        results: list[EpisodeResult] = []
        for index in range(start, start + count):
            results.append(run_episode(options, index, make_engine))
            if results[-1].first is not None:
                break
        return results

    @contextmanager
    def open_pool(self, jobs: int) -> Iterator[Executor]:
        """Processes of their own."""
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def check(
    options: CheckOptions, on_progress: Callable[[CheckResult], None] = lambda _result: None
) -> CheckResult:
    """Check an engine in this process. `Isolation.check` does so in others.

    With a budget in events the result depends on nothing but the options.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
    """
    started = time.perf_counter()
    result = search(options, InProcess(), on_progress)
    if result.first is not None:
        shrink_first(result, load(options))
    result.seconds = time.perf_counter() - started
    return result


def search(
    options: CheckOptions, place: Place, on_progress: Callable[[CheckResult], None]
) -> CheckResult:
    """Play episodes until the budget is spent or something is wrong, which is not shrunk yet.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
        UsageError: if the options want what the engine lacks.
    """
    started = time.perf_counter()
    get_wish(options)
    facts = place.look(options)
    require_wish(options, facts)
    wanted, options = options, replace(options, max_depth=facts.max_depth)
    result = CheckResult(options, weaker=facts.weaker, notes=facts.notes)
    if options.max_depth == 1 < wanted.max_depth:
        lacking = (BY_NAME[name] for name in facts.lacking if name in SEVERAL_AT_ONCE)
        result.skipped.update(str(feature.capability) for feature in lacking)
    if options.episode is None:
        canary = CANARY if facts.weaker is None else SAFETY_CANARY
        result.canary_killed_after = release_canary(options, canary)
    with closing(_run_batches(options, place, lambda: _spent(options, result, started))) as batches:
        for batch in batches:
            for episode in batch:
                _add(result, episode)
            result.seconds = time.perf_counter() - started
            on_progress(result)
            if result.first is not None:
                break
    result.missing = missing_witnesses(result.witnesses, options, facts)
    return result


def _add(result: CheckResult, episode: EpisodeResult) -> None:
    if result.first is not None:
        return
    result.num_episodes += 1
    result.num_events += episode.num_events
    result.witnesses.update(episode.witnesses)
    result.skipped.update(episode.skipped)
    result.known.update(episode.known)
    result.has_snapshot &= episode.has_snapshot
    if episode.first is not None:
        result.first, result.failed_episode = episode.first, episode.index
        result.failing_program, result.loss = episode.program, episode.loss


def shrink_first(result: CheckResult, make_engine: EngineFactory) -> None:
    """Make the first failure short, or show it as it is if it does not come back."""
    options = result.options
    if options.episode is None:
        _find_shortest(result, make_engine)
    else:
        failed = _failures(options, range(options.episode, options.episode + 1), make_engine)
        _adopt_shortest(result, options, failed, make_engine)
    if result.failure is None:
        see_again(result, make_engine)


def see_again(result: CheckResult, make_engine: EngineFactory) -> None:
    """Show the first failure as it is: run its program once more, whatever comes of it."""
    assert result.failing_program is not None
    program = result.failing_program
    run, findings = run_program(program, make_engine, find_profile(result.options.profile))
    result.failure = conclude(program, run, findings)


def _find_shortest(result: CheckResult, make_engine: EngineFactory) -> None:
    """Shrink the failure, or one like it that is shorter: what is reported should fit on a page.

    What fails where everything is small shrinks to least, and soonest; so failures of the same
    property are looked for at tiny scope first, then among the next episodes. If all stay long,
    any failure at tiny scope will do, or any of many more episodes.
    """
    assert result.first is not None
    assert result.failed_episode is not None
    wanted, options = (result.first.kind, result.first.property_id), result.options
    start, tiny = result.failed_episode, replace(options, preset=TINY.name)
    small = _failures(tiny, range(TINY_EPISODES), make_engine)
    alike = [episode for episode in small if _kind_of(episode) == wanted]
    _adopt_shortest(result, tiny, alike, make_engine)
    if not _is_short(result):
        following = _failures(options, range(start, start + EPISODES_COMPARED), make_engine)
        alike = [episode for episode in following if _kind_of(episode) == wanted]
        _adopt_shortest(result, options, alike, make_engine)
    if not _is_short(result):
        others = [episode for episode in small if _kind_of(episode) != wanted]
        _adopt_shortest(result, tiny, others, make_engine)
    if not _is_short(result):
        later = range(start + EPISODES_COMPARED, start + EPISODES_COMPARED_MAX)
        _adopt_shortest(result, options, _failures(options, later, make_engine), make_engine)


def _failures(
    options: CheckOptions, indices: range, make_engine: EngineFactory
) -> list[EpisodeResult]:
    episodes = (run_episode(options, index, make_engine) for index in indices)
    return [episode for episode in episodes if episode.first is not None]


def _adopt_shortest(
    result: CheckResult,
    options: CheckOptions,
    episodes: Sequence[EpisodeResult],
    make_engine: EngineFactory,
) -> None:
    """Shrink the shortest of these until one stays short; report it, unless there is a shorter."""
    profile = find_profile(options.profile)
    for episode in sorted(episodes, key=_length)[:SHRUNK_MAX]:
        if _is_short(result):
            return
        assert episode.first is not None
        assert episode.program is not None
        failure = shrink(episode.program, make_engine, episode.first, profile)
        best = result.failure
        if best is None or len(failure.program.actions) < len(best.program.actions):
            result.failure, result.first = failure, episode.first
            result.options, result.failed_episode = options, episode.index
            result.failing_program = episode.program


def _is_short(result: CheckResult) -> bool:
    failure = result.failure
    return failure is not None and len(failure.program.actions) <= SHORT_PROGRAM


def _kind_of(episode: EpisodeResult) -> tuple[FindingKind, str]:
    assert episode.first is not None
    return (episode.first.kind, episode.first.property_id)


def _length(episode: EpisodeResult) -> int:
    assert episode.program is not None
    return len(episode.program.actions)


def _spent(options: CheckOptions, result: CheckResult, started: float) -> bool:
    if options.max_events is not None and result.num_events >= options.max_events:
        return True
    elapsed = time.perf_counter() - started
    return options.max_seconds is not None and elapsed >= options.max_seconds


def _run_batches(
    options: CheckOptions, place: Place, is_spent: Callable[[], bool]
) -> Generator[list[EpisodeResult], None, None]:
    """Batches in order of their episodes, computed side by side when `jobs` > 1."""
    if options.episode is not None:
        yield place.run_batch(options, options.episode, 1)
        return
    size = 1 if PRESETS[options.preset].num_actions > LONG_EPISODE else EPISODES_PER_BATCH
    if options.jobs <= 1:
        start = 0
        while not is_spent():
            yield place.run_batch(options, start, size)
            start += size
        return
    with place.open_pool(options.jobs) as pool:
        pending: deque[Future[list[EpisodeResult]]] = deque()
        next_start = 0
        while not is_spent():
            while len(pending) < 2 * options.jobs:
                pending.append(pool.submit(place.run_batch, options, next_start, size))
                next_start += size
            yield pending.popleft().result()
