"""Check: many episodes from one seed, until the budget is spent or something is wrong."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from blockstep.conformance.draw.presets import PRESETS, TINY
from blockstep.conformance.engine import (
    EXACT,
    Capability,
    EngineFactory,
    EngineFault,
    Setting,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE
from blockstep.conformance.protocol.features import BY_NAME, find_lacking, get_missing
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search.call import open_processes
from blockstep.conformance.search.episodes import (
    EPISODES_WITHOUT_EVENTS,
    EpisodeResult,
    Loss,
    run_episode,
)
from blockstep.conformance.search.options import (
    CheckOptions,
    ExitCode,
    exit_code_of,
    find_profile,
    get_wish,
    load,
)
from blockstep.conformance.search.shrink import Shrinker, Shrunk, conclude, get_symptom, shrink
from blockstep.conformance.search.verdict_requirements import (
    CANARIES,
    EngineFacts,
    list_notes,
    list_quirk_goals,
    list_required_pairs,
    missing_goals,
    read_engine_facts,
    require_wish,
    run_canary,
)

EPISODES_PER_BATCH = 8
LONG_EPISODE = 150
"""Longer episodes, in actions, are batches of their own."""
EPISODES_COMPARED = 40
"""Episodes, from the first failing one on, among which a simpler failure is searched."""
EPISODES_COMPARED_MAX = 500
"""The same, if no shorter failure was found before."""
SHORT_PROGRAM = 10
"""Actions of a shrunk program for which no shorter one is searched."""
SHRUNK_MAX = 3
"""Most failures of one preset that are shrunk."""
TINY_EPISODES = 300
NAMED_EPISODES = 100
"""Tiny episodes in which a failure that a property names is looked for."""
FOLLOWING = frozenset({"counters_grow_by_what_happened", "queues_keep_their_order"})
"""Checks of what follows from other decisions: counters, and the order of a waiting queue."""
SECONDS_BETWEEN_WORDS = 0.2
"""Time between two progress messages while a failure is shrunk."""


@dataclass(slots=True)
class CheckResult:
    """Verdict of a check, with the counts that it depends on."""

    options: CheckOptions
    num_episodes: int = 0
    num_events: int = 0
    seconds: float = 0.0
    witnesses: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    """Number of episodes that reached a cell of `judge.pairs`, by name."""
    quirks: Counter[str] = field(default_factory=Counter)
    """Number of episodes that reached a goal of `lockstep.quirks`."""
    skipped: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    """Number of findings that the quirks of the profile explain, by property."""
    deviations: Mapping[str, str] = field(default_factory=dict)
    """Summaries of the deviations that the adapter declares, by name."""
    excused: Counter[str] = field(default_factory=Counter)
    """Number of findings that a deviation covers, by its name."""
    stale: tuple[str, ...] = ()
    """Deviations that their programs no longer show."""
    known_programs: Mapping[str, int | None] = field(default_factory=dict)
    """Number of failures that were suppressed as those of a known program, by its file; None if
    this program does not fail any more."""
    missing: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    """Cells of `judge.pairs` that the run could reach and did not."""
    num_legal_pairs: int = 0
    """Number of cells that it could reach."""
    unseen_sides: tuple[str, ...] = ()
    """Goals about quirks of the profile that the run could reach and did not."""
    num_quirk_sides: int = 0
    """Number of goals about quirks that it could reach."""
    has_snapshot: bool = True
    equivalence: str = "exact"
    """Equivalence between engine and spec, as the factory declares: `exact`, `renamed`, `plan` or
    `safety`."""
    not_asked: tuple[str, ...] = ()
    """Aspects that this equivalence does not compare, in words."""
    notes: tuple[str, ...] = ()
    """Notes of the engine's factory."""
    settings: tuple[Setting, ...] = ()
    """Settings with which the engine differs from its defaults, as its factory declares."""
    canary_killed_after: int | None = None
    """Events until the canary was caught; None if it was not caught, or not run."""
    failed_episode: int | None = None
    failed_event: int = 0
    """Number of events of this episode until the failure."""
    failure: Shrunk | None = None
    """The first failure, or a shorter one like it; without findings if it could not be
    reproduced."""
    first: Finding | None = None
    failing_program: Program | None = None
    shrinking: str = ""
    """Progress of the shrinking of the first failure, for display."""
    loss: Loss | None = None
    """Crash or hang of the engine's process: at first, or when `first` was to be shrunk."""

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the process."""
        if self.first is not None:
            return exit_code_of(self.first)
        is_worthless = self.has_missed_something or not self.canary_killed_after
        if self.num_events == 0 or (not self.options.is_single and is_worthless):
            return ExitCode.HARNESS
        return ExitCode.USAGE if self.has_gone else ExitCode.CONFORMS

    @property
    def has_gone(self) -> bool:
        """Return whether a known program passes: it would hide its defect if that came back."""
        return None in self.known_programs.values()

    @property
    def has_missed_something(self) -> bool:
        """Return whether required coverage goals were not reached, for another reason than known
        failures.

        A known failure ends its episode, so goals that come after it cannot be reached; but not all
        episodes may end so.
        """
        num_passed_over = sum(count or 0 for count in self.known_programs.values())
        return bool(self.missing) and not 0 < num_passed_over < self.num_episodes


class Known(Protocol):
    """Suppressed findings (`known.KnownFindings`)."""

    def pass_over(self, options: CheckOptions, episode: EpisodeResult) -> EpisodeResult:
        """Return a failed episode as passed if a known program accounts for it; else the failure to
        report."""
        ...

    def shows(self, result: CheckResult) -> bool:
        """Return whether the failure that a result shows is that of a known program."""
        ...

    def conclude(self, result: CheckResult) -> None:
        """Record in a result how many failures were suppressed."""
        ...


class Place(Protocol):
    """Place where an engine runs: this process, or one that a crash may end."""

    def read_engine_facts(self, options: CheckOptions) -> EngineFacts:
        """Return the facts about the engine that a check needs."""
        ...

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Run some consecutive episodes, up to the first that fails."""
        ...

    def open_pool(self, jobs: int) -> AbstractContextManager[Executor]:
        """Open a pool of `jobs` processes for batches. Batches not finished at its end are
        dropped."""
        ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """Place of trusted engines: this process, or further processes like it for several jobs."""

    load: Callable[[CheckOptions], EngineFactory] = load
    """Finds the engine of the options."""

    def read_engine_facts(self, options: CheckOptions) -> EngineFacts:
        """Return the facts about the engine that a check needs."""
        return read_engine_facts(options, self.load(options))

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Run some consecutive episodes, up to the first that fails."""
        make_engine = self.load(options)
        results: list[EpisodeResult] = []
        for index in range(start, start + count):
            results.append(run_episode(options, index, make_engine))
            if results[-1].first is not None:
                break
        return results

    def open_pool(self, jobs: int) -> AbstractContextManager[Executor]:
        """Open a pool of `jobs` processes."""
        return open_processes(jobs)


def check(
    options: CheckOptions,
    on_progress: Callable[[CheckResult], None] = lambda _result: None,
    place: InProcess = InProcess(),
    shrinks: bool = True,
    known: Known | None = None,
) -> CheckResult:
    """Check an engine in this process. `Isolation.check` does so in others.

    A failure is shrunk only if `shrinks` is set; otherwise there is no `failure` to show. Failures
    that are `known` are suppressed.

    With a budget in events the result depends only on the options and the engine.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
    """
    started = time.perf_counter()
    result = search(options, place, on_progress, known)
    if result.first is not None and shrinks:

        def shrink_result(result: CheckResult, looks_on: bool) -> CheckResult:
            shrink_first(result, place.load(options), on_progress, looks_on)
            return result

        result = shrink_unknown(result, shrink_result, known)
    result.seconds = time.perf_counter() - started
    return result


def search(
    options: CheckOptions,
    place: Place,
    on_progress: Callable[[CheckResult], None],
    known: Known | None = None,
) -> CheckResult:
    """Play episodes until the budget is spent or an episode fails; the failure is not shrunk yet.

    A failure that is `known` only ends its episode.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
        UsageError: if the engine lacks a feature that the options require.
    """
    started = time.perf_counter()
    get_wish(options)
    facts = place.read_engine_facts(options)
    require_wish(options, facts)
    wanted, options = options, replace(options, max_depth=facts.max_depth)
    result = CheckResult(options, equivalence=facts.equivalence, not_asked=facts.not_asked)
    result.deviations, result.stale = facts.deviations, facts.stale
    result.notes, result.settings = facts.notes, facts.settings
    if options.max_depth == 1 < wanted.max_depth:
        lacking = (BY_NAME[name] for name in facts.lacking if name in SEVERAL_AT_ONCE)
        result.skipped.update(str(feature.capability) for feature in lacking)
    if options.episode is None:
        result.canary_killed_after = run_canary(options, CANARIES[facts.equivalence])
    with closing(_run_batches(options, place, lambda: _spent(options, result, started))) as batches:
        for batch in batches:
            for episode in batch if known is None else _pass_over(options, place, batch, known):
                _add(result, episode)
            result.seconds = time.perf_counter() - started
            on_progress(result)
            if result.first is not None:
                break
    counts = result.witnesses | result.quirks
    result.missing = missing_goals(counts, options, facts)
    if options.episode is None:
        goals = list_quirk_goals(options, facts)
        result.num_quirk_sides = len(goals)
        result.unseen_sides = tuple([goal for goal in goals if not counts[goal]])
        legal = list_required_pairs(options, facts)
        result.num_legal_pairs = len(legal)
        result.apart = tuple([cell for cell in legal if not result.pairs[cell]])
    if known is not None:
        known.conclude(result)
    return result


def _pass_over(
    options: CheckOptions, place: Place, episodes: list[EpisodeResult], known: Known
) -> Iterator[EpisodeResult]:
    """Yield the episodes of a batch, continuing after known failures, which are yielded as
    passed."""
    end = episodes[0].index + _get_batch_size(options)
    while episodes:
        *passed, last = episodes
        yield from passed
        judged = last if last.first is None else known.pass_over(options, last)
        yield judged
        if last.first is None or judged.first is not None:
            return
        start = last.index + 1
        episodes = place.run_batch(options, start, end - start) if start < end else []


def _get_batch_size(options: CheckOptions) -> int:
    is_long = PRESETS[options.preset].num_actions > LONG_EPISODE
    return 1 if is_long or options.episode is not None else EPISODES_PER_BATCH


def _add(result: CheckResult, episode: EpisodeResult) -> None:
    if result.first is not None:
        return
    result.num_episodes += 1
    result.num_events += episode.num_events
    result.witnesses.update(episode.witnesses)
    result.pairs.update(episode.pairs)
    result.quirks.update(episode.quirks)
    result.skipped.update(episode.skipped)
    result.known.update(episode.known)
    result.excused.update(episode.deviations)
    result.has_snapshot &= episode.has_snapshot
    if episode.first is not None:
        result.first, result.failed_episode = episode.first, episode.index
        result.failed_event = episode.num_events
        result.failing_program, result.loss = episode.program, episode.loss


def play_program(
    options: CheckOptions, program: Program, make_engine: EngineFactory
) -> CheckResult:
    """Run one program as it is: it is neither fitted to the engine nor shrunk.

    If the engine lacks what the config requires, nothing is run, and the result counts it.

    Raises:
        ConfigError: the engine cannot be built with the config.
    """
    result = CheckResult(options, failing_program=program)
    missing = get_missing(program.config, find_lacking(get_capabilities(make_engine)))
    if missing is not None:
        result.skipped[missing] = len(program.actions)
        return result
    run, findings = run_program(program, make_engine, find_profile(options.profile))
    result.num_episodes, result.num_events = 1, run.num_events
    result.witnesses, result.known = run.witnesses, Counter(run.known)
    result.excused = run.excuses.counts
    result.deviations = {one.name: one.summary for one in run.excuses.deviations}
    result.skipped, result.equivalence = Counter(run.skipped), run.equivalence or "exact"
    result.has_snapshot = Capability.SNAPSHOT in run.capabilities
    traits = get_traits(make_engine)
    weaker, result.settings = traits.equivalence, traits.settings
    result.notes = list_notes(options, traits)
    result.not_asked = () if weaker is None else weaker.not_asked
    if findings:
        result.first, result.failure = findings[0], conclude(program, run, findings)
    return result


def shrink_unknown(
    result: CheckResult,
    shrink_result: Callable[[CheckResult, bool], CheckResult],
    known: Known | None,
) -> CheckResult:
    """Return a result with its first failure shrunk.

    `shrink_result` looks for a shorter failure like it in other episodes if its second argument is
    set. What it finds there may be a known failure, which is not the one to be shown: then the
    episode that failed is shrunk alone.
    """
    shrunk = shrink_result(replace(result), True)
    if known is not None and known.shows(shrunk):
        shrunk = shrink_result(replace(result), False)
    return shrunk


def shrink_first(
    result: CheckResult,
    make_engine: EngineFactory,
    on_progress: Callable[[CheckResult], None],
    looks_on: bool = True,
) -> None:
    """Shrink the first failure, or show it as it is if it cannot be reproduced.

    `on_progress` is called with the result so far from time to time. With `looks_on`, a shorter
    failure like it is looked for in other episodes, unless one episode was asked for.
    """
    options = result.options
    progress = ThrottledProgress(on_progress, show_unshrunk(result))
    if options.episode is None and looks_on:
        small = _find_shortest(result, make_engine, progress)
        _find_named(result, small, make_engine, progress)
    elif options.episode is None:
        _adopt_shortest(result, options, [_get_own(result)], make_engine, progress)
    else:
        failed = _failures(
            options, range(options.episode, options.episode + 1), make_engine, progress
        )
        _adopt_shortest(result, options, failed, make_engine, progress)
    if result.failure is None:
        see_again(result, make_engine)


def show_unshrunk(result: CheckResult) -> CheckResult:
    """Return the result with its first failure as it was found, unless that is shrunk already."""
    if result.failure is not None:
        return result
    assert result.failing_program is not None
    assert result.first is not None
    equivalence = "" if result.equivalence == EXACT else result.equivalence
    found = (result.first,)
    failure = Shrunk(result.failing_program, found, 0, result.failed_event, equivalence, None)
    return replace(result, failure=failure)


def see_again(result: CheckResult, make_engine: EngineFactory) -> None:
    """Run the program of the first failure once more, and show the result whether it fails or
    not."""
    assert result.failing_program is not None
    program = result.failing_program
    run, findings = run_program(program, make_engine, find_profile(result.options.profile))
    result.failure = conclude(program, run, findings)


class ThrottledProgress:
    """Passes on the result so far, at most once every `SECONDS_BETWEEN_WORDS`."""

    def __init__(self, on_progress: Callable[[CheckResult], None], found: CheckResult) -> None:
        self._on_progress = on_progress
        self._best = found
        """Result with the shortest program that was passed on."""
        self._last = -SECONDS_BETWEEN_WORDS

    def __call__(self, text: str, get_now: Callable[[], CheckResult] | None = None) -> None:
        """Pass on a text and the result so far, unless another one was passed on just now."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_WORDS:
            self._last = now
            shrunk = self._best if get_now is None else get_now()
            assert shrunk.failure is not None
            assert self._best.failure is not None
            if len(shrunk.failure.program.actions) < len(self._best.failure.program.actions):
                self._best = shrunk
            self._on_progress(replace(self._best, shrinking=text))


def _find_shortest(
    result: CheckResult, make_engine: EngineFactory, progress: ThrottledProgress
) -> list[EpisodeResult]:
    """Shrink the failure, or one like it that is shorter, so that the report fits on a page.

    A failing program that is short as it was drawn is shrunk at once. Programs of the tiny preset
    shrink to the shortest ones, and soonest. So failures of the same check are looked for there
    first, then among the next episodes. If all stay long, any failure of a tiny episode is taken,
    or any of many more episodes.

    Returns the failures of tiny episodes; [] if none were played.
    """
    assert result.first is not None
    assert result.failed_episode is not None
    wanted, options = get_symptom(result.first), result.options
    start, tiny = result.failed_episode, replace(options, preset=TINY.name)
    own = _get_own(result)
    if _length(own) <= SHORT_PROGRAM:
        _adopt_shortest(result, options, [own], make_engine, progress)
        if result.failure is not None:
            return []
    small = _failures(tiny, range(TINY_EPISODES), make_engine, progress)
    alike = [episode for episode in small if _symptom_of(episode) == wanted]
    _adopt_shortest(result, tiny, alike, make_engine, progress)
    if not _is_short(result):
        following = _failures(
            options, range(start, start + EPISODES_COMPARED), make_engine, progress
        )
        alike = [episode for episode in following if _symptom_of(episode) == wanted]
        _adopt_shortest(result, options, alike, make_engine, progress)
    if not _is_short(result):
        others = [episode for episode in small if _symptom_of(episode) != wanted]
        _adopt_shortest(result, tiny, others, make_engine, progress)
    if not _is_short(result):
        later = range(start + EPISODES_COMPARED, start + EPISODES_COMPARED_MAX)
        failed = _failures(options, later, make_engine, progress)
        _adopt_shortest(result, options, failed, make_engine, progress)
    return small


def _get_own(result: CheckResult) -> EpisodeResult:
    """Return the episode that failed, as far as it is shrunk."""
    assert result.failed_episode is not None
    program, first = result.failing_program, result.first
    return EpisodeResult(
        result.failed_episode, 0, {}, {}, {}, {}, True, program=program, first=first
    )


def _find_named(
    result: CheckResult,
    small: list[EpisodeResult],
    make_engine: EngineFactory,
    progress: ThrottledProgress,
) -> None:
    """Replace a failure that says little (`is_consequence`) by a short one that a property names.

    A divergence says which field differs, a property says what is wrong, and one wrong decision
    often shows as both. The property is the one that fails first in most tiny episodes: the
    cause fails in every episode with the wrong decision, a consequence only in some. An exception
    of the engine is kept if more episodes fail by exceptions.

    `small` are failures of tiny episodes; [] if none were played.
    """
    assert result.first is not None
    first = result.first
    if result.failure is None or not (is_consequence(first) or is_exception(first)):
        return
    tiny = replace(result.options, preset=TINY.name)
    failed = small or _failures(tiny, range(NAMED_EPISODES), make_engine, progress)
    clear = [one for one in failed if one.first is not None and not is_consequence(one.first)]
    for symptom, _ in Counter(map(_symptom_of, clear)).most_common():
        if symptom == get_symptom(first):
            return
        if symptom[0] is not FindingKind.PROPERTY:
            continue
        named = replace(result, failure=None)
        alike = [episode for episode in failed if _symptom_of(episode) == symptom]
        _adopt_shortest(named, tiny, alike, make_engine, progress)
        if _is_short(named):
            _adopt(result, named)
        return


def is_consequence(finding: Finding) -> bool:
    """Whether a finding is a consequence that does not name its cause: a difference, an assertion
    of the engine about its own state, a counter, which follows from what is counted, or the order
    of a waiting queue, which follows from the requests that were skipped."""
    is_assertion = any(it.seen == AssertionError.__name__ for it in finding.differences)
    return (
        finding.kind is FindingKind.DIVERGENCE
        or (finding.kind is FindingKind.FAULT and is_assertion)
        or finding.sentence in FOLLOWING
    )


def is_exception(finding: Finding) -> bool:
    """Whether the engine raised by itself; an `EngineFault` is a finding of its adapter."""
    own = EngineFault.__name__
    return finding.kind is FindingKind.FAULT and all(it.seen != own for it in finding.differences)


def _failures(
    options: CheckOptions, indices: range, make_engine: EngineFactory, progress: ThrottledProgress
) -> list[EpisodeResult]:
    failed = []
    for number, index in enumerate(indices):
        progress(
            f"{number} of {len(indices)} {options.preset} episodes looked at for a shorter one"
        )
        episode = run_episode(options, index, make_engine)
        if episode.first is not None:
            failed.append(episode)
    return failed


def _adopt_shortest(
    result: CheckResult,
    options: CheckOptions,
    episodes: Sequence[EpisodeResult],
    make_engine: EngineFactory,
    progress: ThrottledProgress,
) -> None:
    """Shrink the shortest of these until one is short; keep it if it is shorter than the
    result's."""
    profile = find_profile(options.profile)
    for episode in sorted(episodes, key=_length)[:SHRUNK_MAX]:
        if _is_short(result):
            return
        assert episode.first is not None
        assert episode.program is not None
        of_episode = partial(
            replace,
            result,
            first=episode.first,
            options=options,
            failed_episode=episode.index,
            failing_program=episode.program,
        )

        def on_run(shrinker: Shrinker, of_episode: partial[CheckResult] = of_episode) -> None:
            num_left = len(shrinker.best.actions)
            text = f"{shrinker.num_runs} programs tried, {num_left} actions left"
            progress(text, lambda: of_episode(failure=shrinker.conclude()))

        failure = shrink(episode.program, make_engine, episode.first, profile, on_run)
        best = result.failure
        if best is None or len(failure.program.actions) < len(best.program.actions):
            _adopt(result, of_episode(failure=failure))


def _adopt(result: CheckResult, other: CheckResult) -> None:
    """Set the failure of a result to that of another one."""
    result.failure, result.first = other.failure, other.first
    result.options, result.failed_episode = other.options, other.failed_episode
    result.failing_program = other.failing_program


def _is_short(result: CheckResult) -> bool:
    failure = result.failure
    return failure is not None and len(failure.program.actions) <= SHORT_PROGRAM


def _symptom_of(episode: EpisodeResult) -> tuple[FindingKind, str, str]:
    assert episode.first is not None
    return get_symptom(episode.first)


def _length(episode: EpisodeResult) -> int:
    assert episode.program is not None
    return len(episode.program.actions)


def _spent(options: CheckOptions, result: CheckResult, started: float) -> bool:
    if options.max_events is not None and result.num_events >= options.max_events:
        return True
    if result.num_episodes >= EPISODES_WITHOUT_EVENTS and not result.num_events:
        return True
    elapsed = time.perf_counter() - started
    return options.max_seconds is not None and elapsed >= options.max_seconds


def _run_batches(
    options: CheckOptions, place: Place, is_spent: Callable[[], bool]
) -> Generator[list[EpisodeResult], None, None]:
    """Yield batches in the order of their episodes, computed in parallel if `jobs` > 1."""
    size = _get_batch_size(options)
    if options.episode is not None:
        yield place.run_batch(options, options.episode, size)
        return
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
