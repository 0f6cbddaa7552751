"""Check: many short runs from one seed, until the budget is spent or something is wrong.

An episode is a swarm drawn from (preset, seed, index), a program drawn as it runs, and a drain at
its end. Everything follows from those three, so a failure is reproduced by naming them.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol, cast

from blockstep.conformance.draw.actions import SeededDraw, View, next_action
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS, TINY, draw_swarm
from blockstep.conformance.engine import Capability, EngineFactory, is_async
from blockstep.conformance.judge.witnesses import WITNESSES, missing_witnesses
from blockstep.conformance.lockstep.driver import LockStep, get_start, run_program
from blockstep.conformance.lockstep.safety import Safety
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Action, Drain, Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.shrink import Shrunk, conclude, shrink
from blockstep.spec.profiles import PROFILES, STRICT, Profile, get_profile
from blockstep.spec.vocabulary import Config, Event, Observation, Policy, Submit

CANARY = "blockstep.conformance.lockstep.canary:CanaryEngine"
SAFETY_CANARY = "blockstep.conformance.lockstep.safety:SafetyCanary"
"""The canary of a run that is not compared with the spec."""
EPISODES_PER_BATCH = 8
LONG_EPISODE = 150
"""Episodes of more actions than this are batches of their own."""
CANARY_EPISODES = 50
SITUATIONS_OF: Mapping[str, tuple[str, ...]] = {
    Capability.REJECTION: ("rejected_", "drafts_dropped"),
    Capability.DRAFTS: ("draft", "rollback_", "stop_inside_accepted_drafts"),
    Capability.PAUSE: ("paused_",),
    Capability.RESET: ("reset_", "commit_for_preempted", "ended_while_preempted"),
    Capability.GRAMMAR: ("grammar_", "admission_after_skip"),
}
"""Names, by their beginnings, of situations that need a capability."""
EPISODES_COMPARED = 40
"""Episodes, from the first failing one on, in which a simpler failure is looked for."""
EPISODES_COMPARED_MAX = 500
"""The same, where nothing else was short."""
SHORT_PROGRAM = 10
"""Actions of a shrunk program for which no shorter one is looked for."""
SHRUNK_MAX = 3
"""Failures of one scope that are shrunk, at most."""
TINY_EPISODES = 300


class ExitCode(IntEnum):
    """What the process says when it ends (architecture section 5)."""

    CONFORMS = 0
    FAILED = 1
    """A divergence, a violated property or a fault of the engine."""
    USAGE = 2
    SPEC = 3
    """The spec failed an assertion of its own."""
    LIVENESS = 4
    HARNESS = 5
    """Nothing ran, a required witness is missing, or the canary survived."""


def exit_code_of(finding: Finding | None) -> ExitCode:
    """What a process ends with when this is what it found."""
    if finding is None:
        return ExitCode.CONFORMS
    codes = {FindingKind.SPEC: ExitCode.SPEC, FindingKind.LIVENESS: ExitCode.LIVENESS}
    return codes.get(finding.kind, ExitCode.FAILED)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What to check, and how long."""

    engine: str = "host"
    preset: str = "small"
    policy: Policy | None = None
    seed: int = 0
    max_events: int | None = None
    max_seconds: float | None = None
    episode: int | None = None
    """Run this one episode only."""
    jobs: int = 1
    max_depth: int = MAX_DEPTH
    """Frames in flight, at most. An engine without `Capability.ASYNC` is given one at a time."""
    profile: str = STRICT.name
    """Release whose known quirks the spec follows; `strict` follows none."""
    path: str | None = None
    """A folder that is looked in first when the engine is imported."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of an engine that did not live, or could not even be built."""

    message: str
    config: str = ""
    events: tuple[str, ...] = ()
    """What it was given, the last one included."""
    last_words: tuple[str, ...] = ()
    """The end of its standard error."""
    event_seconds: float | None = None
    """For how long it might keep an event, if not as long as usual."""

    @property
    def finding(self) -> Finding:
        """A finding of kind FAULT."""
        return Finding(FindingKind.FAULT, "", "engine_answers_every_call", self.message)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What one episode came to. Small: it crosses process borders."""

    index: int
    num_events: int
    witnesses: dict[str, int]
    skipped: dict[str, int]
    known: dict[str, int]
    has_snapshot: bool
    program: Program | None = None
    """The program, if it failed; None if its engine did not live to say so."""
    first: Finding | None = None
    loss: Loss | None = None
    """What became of an engine that did not live; then `first` says so."""


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


def is_reachable(witness: str, skipped: Container[str]) -> bool:
    """Whether a situation can be reached without the capabilities that were skipped."""
    return not any(
        capability in skipped and witness.startswith(starts)
        for capability, starts in SITUATIONS_OF.items()
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine's factory says of a check. Small: it crosses process borders."""

    max_depth: int
    weaker: str | None
    situations: tuple[str, ...]
    """What a check by the weaker equivalence must reach."""
    out_of_reach: frozenset[str]
    """Situations that cannot come up with this engine."""


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


def find_profile(name: str) -> Profile:
    """The profile called `name`. Raises ValueError naming those there are."""
    profile = get_profile(name)
    if profile is None:
        known = ", ".join(profile.name for profile in PROFILES)
        raise ValueError(f"profile {name!r}: must be one of {known}")
    return profile


def load(options: CheckOptions) -> EngineFactory:
    """The engine of the options, looked for in their folder first.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
    """
    if options.path is not None and options.path not in sys.path:
        sys.path.insert(0, options.path)
    return load_engine(options.engine)


def get_equivalence(make_engine: EngineFactory) -> Safety | None:
    """The weaker equivalence that a factory declares; None for an engine to be compared."""
    return cast("Safety | None", getattr(make_engine, "equivalence", None))


def fit_depth(options: CheckOptions, make_engine: EngineFactory) -> CheckOptions:
    """The options with no more frames in flight than the engine can have, or says it should."""
    if options.max_depth == 1:
        return options
    depth = getattr(make_engine, "max_depth", MAX_DEPTH) if is_async(make_engine) else 1
    return options if options.max_depth <= depth else replace(options, max_depth=depth)


def play_episode(
    options: CheckOptions, index: int, make_engine: EngineFactory, keep_exchanges: bool = False
) -> tuple[LockStep, Program, list[Finding]]:
    """Play one episode to its end, or to its first findings."""
    preset = PRESETS[options.preset]
    draw = SeededDraw(f"{options.preset}/{options.seed}/{index}")
    swarm = draw_swarm(preset, draw, options.policy, options.max_depth)
    weaker = get_equivalence(make_engine)
    if weaker is not None:
        swarm = replace(swarm, config=weaker.fit_config(swarm.config))
    run = get_start(make_engine)(
        swarm.config,
        make_engine,
        swarm.token_seed,
        swarm.vocabulary_size,
        keep_exchanges,
        find_profile(options.profile),
    )
    view = View(swarm)
    actions: list[Action] = []
    findings: list[Finding] = []
    for number in range(preset.num_actions + 1):
        view.live, view.ended, view.texts = run.live, run.ended, run.texts
        view.frames_in_flight = [plan.frame_id for plan in run.plans]
        action = Drain() if number == preset.num_actions else run.fit(next_action(view, draw))
        view.num_submitted += isinstance(action, Submit)
        actions.append(action)
        findings = run.perform(action)
        if findings:
            break
    program = Program(swarm.config, tuple(actions), swarm.token_seed, swarm.vocabulary_size)
    return run, program, findings


def run_episode(options: CheckOptions, index: int, make_engine: EngineFactory) -> EpisodeResult:
    """Play one episode and keep what a report needs of it."""
    run, program, findings = play_episode(options, index, make_engine)
    return EpisodeResult(
        index=index,
        num_events=run.num_events,
        witnesses=dict(run.witnesses.counts),
        skipped=run.skipped,
        known=run.known,
        has_snapshot=Capability.SNAPSHOT in run.capabilities,
        program=program if findings else None,
        first=findings[0] if findings else None,
    )


def record_episode(
    options: CheckOptions, make_engine: EngineFactory | None = None
) -> tuple[Config, list[tuple[Event, Observation]]]:
    """The config and the exchanges of one episode: what the engine answered to each event."""
    make_engine = make_engine or load(options)
    options = fit_depth(options, make_engine)
    run, _, _ = play_episode(options, options.episode or 0, make_engine, keep_exchanges=True)
    return run.config, [
        (exchange.event, exchange.seen) for exchange in run.exchanges if exchange.seen is not None
    ]


def run_batch(options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
    """Some episodes in a row, stopping at the first that fails."""
    make_engine = load(options)
    results: list[EpisodeResult] = []
    for index in range(start, start + count):
        results.append(run_episode(options, index, make_engine))
        if results[-1].first is not None:
            break
    return results


def look(options: CheckOptions, make_engine: EngineFactory) -> Facts:
    """What the engine says of itself. Builds one, to ask it."""
    weaker = get_equivalence(make_engine)
    beyond: Container[str] = getattr(make_engine, "out_of_reach", ())
    return Facts(
        max_depth=fit_depth(options, make_engine).max_depth,
        weaker=None if weaker is None else str(weaker.name),
        situations=() if weaker is None else weaker.situations,
        out_of_reach=frozenset(name for name in WITNESSES if name in beyond),
    )


class InProcess:
    """The place of engines that are trusted: this process, or others like it for several jobs."""

    def look(self, options: CheckOptions) -> Facts:
        """What the engine says of itself."""
        return look(options, load(options))

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Some episodes in a row."""
        return run_batch(options, start, count)

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
    """
    started = time.perf_counter()
    facts = place.look(options)
    wanted, options = options, replace(options, max_depth=facts.max_depth)
    result = CheckResult(options, weaker=facts.weaker)
    if options.max_depth == 1 < wanted.max_depth:
        result.skipped[Capability.ASYNC] += 1
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
    if facts.weaker is None:
        missing = missing_witnesses(
            result.witnesses, options.preset, options.policy, options.max_depth
        )
        result.missing = tuple(
            name
            for name in missing
            if name not in facts.out_of_reach and is_reachable(name, result.skipped)
        )
    else:
        result.missing = tuple(name for name in facts.situations if not result.witnesses[name])
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


def release_canary(options: CheckOptions, engine: str = CANARY) -> int | None:
    """Events until the canary is caught; None if it survives."""
    num_events = 0
    canary = replace(options, engine=engine, preset="tiny", profile=STRICT.name)
    make_engine = load_engine(engine)
    for index in range(CANARY_EPISODES):
        episode = run_episode(canary, index, make_engine)
        num_events += episode.num_events
        if episode.first is not None:
            return num_events
    return None
