"""Score: plays programs on both sides, counts what agrees, and shrinks the first differences.

The programs are drawn as those of a check, from (preset, seed, index); the specification's answers
steer the draw. They contain nothing that the engine lacks or must reject, and no request id twice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import NamedTuple, TypeAlias

from blockstep.conformance.draw.actions import SeededDraw, next_action
from blockstep.conformance.draw.view import View
from blockstep.conformance.engine import EngineFactory, get_traits
from blockstep.conformance.lockstep.score import Aspect, ScoreRun, score_program
from blockstep.conformance.protocol.features import HOSTILE, find_lacking
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Drain, Program
from blockstep.conformance.search.call import Call, call_here
from blockstep.conformance.search.episodes import Loss, draw_options, fit_config
from blockstep.conformance.search.isolation import LostError
from blockstep.conformance.search.options import (
    CheckOptions,
    ExitCode,
    exit_code_of_all,
    find_profile,
    get_wish,
    load,
)
from blockstep.conformance.search.shrink import Shrunk, shrink
from blockstep.conformance.search.verdict_requirements import read_engine_facts, require_wish
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile

EPISODES_PER_BATCH = 8
ORDER = {aspect: number for number, aspect in enumerate(Aspect)}
CONTRACT = "plan/2"
"""Version of the counting rules; it rises when the same engine could get another score."""


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """The counts of one episode. It is small, for it is sent between processes."""

    index: int
    num_events: int
    counts: dict[Aspect, tuple[int, int]]
    """By aspect: how many were compared, and how many agreed."""
    shapes: dict[Aspect, tuple[str, ...]]
    """By aspect: shapes of its differences."""
    skipped: dict[str, int]
    program: Program | None
    """The program, if something differed."""
    first: Finding | None
    """The finding that ended the episode; None if it ended by itself."""


class Kind(NamedTuple):
    """Kind of a difference. One that needs another kind of config is another decision."""

    aspect: Aspect
    shape: str = ""
    has_pipeline: bool = False
    has_cache: bool = False


def find_kind(aspect: Aspect, shape: str, config: v.Config) -> Kind:
    """Return the kind of a difference of this aspect and shape that has this config."""
    return Kind(aspect, shape, config.max_frames_in_flight > 1, config.enable_prefix_caching)


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference of one kind."""

    kind: Kind
    """The kind of the shrunk program."""
    episode: int
    num_actions: int
    """Number of actions of the program before it was shrunk."""
    shrunk: Shrunk | None
    """None if the difference did not occur again, so the engine is not deterministic."""


@dataclass(slots=True)
class ScoreResult:
    """The counts of all episodes, and the first differences."""

    options: CheckOptions
    engine_version: str = ""
    num_episodes: int = 0
    num_events: int = 0
    """Events given to the engine."""
    seconds: float = 0.0
    total: Counter[Aspect] = field(default_factory=Counter)
    agreed: Counter[Aspect] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    firsts: dict[Aspect, FirstDifference] = field(default_factory=dict)
    others: list[FirstDifference] = field(default_factory=list)
    """The first differences of other kinds of these aspects."""
    nearest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By profile: steps compared, and steps that agree, in as many events for each."""
    num_stuck: int = 0
    """Episodes that a finding ended."""
    stuck: Finding | None = None
    """The finding that ended `stuck_episode`."""
    stuck_episode: int | None = None
    loss: Loss | None = None
    """The crash or hang that ended the engine, if any."""
    shrinking: Aspect | None = None
    """The aspect whose first difference is being shrunk, after the counting."""

    @property
    def against(self) -> str:
        """The version and the profile that the engine was measured against."""
        try:
            number = metadata.version("blockstep")
        except metadata.PackageNotFoundError:
            number = "of a checkout"
        return f"blockstep {number}, profile {self.options.profile}"

    def share(self, aspect: Aspect) -> float | None:
        """Return the share that agreed, 0 to 1; None if nothing was compared."""
        total = self.total[aspect]
        return self.agreed[aspect] / total if total else None

    def list_firsts(self) -> list[FirstDifference]:
        """Return the first differences of all kinds, by aspect."""
        found = [*self.firsts.values(), *self.others]
        return sorted(found, key=lambda it: ORDER[it.kind.aspect])

    def exit_code(self, least: float = 0.0) -> ExitCode:
        """Return the exit code of the process; every share must be at least `least`."""
        if self.loss is not None:
            return ExitCode.FAILED
        if self.stuck is not None:
            return exit_code_of_all([self.stuck])
        if not self.total[Aspect.STEPS]:
            return ExitCode.HARNESS
        shares = (self.share(aspect) for aspect in Aspect)
        is_less = any(share is not None and share < least for share in shares)
        return ExitCode.FAILED if is_less else ExitCode.CONFORMS


Failing: TypeAlias = dict[Kind, ScoredEpisode]
"""First episode with a difference of each kind."""


def score(
    options: CheckOptions,
    call: Call | None = None,
    on_progress: Callable[[ScoreResult], None] = lambda _result: None,
    profiles: Sequence[str] = (),
) -> ScoreResult:
    """Score an engine until the budget is spent, then shrink the first difference of each kind.

    `call` is where the engine runs; None: in this process. `profiles` are compared to name the
    nearest one.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
        UsageError: if the options want what the engine lacks.
    """
    started = time.perf_counter()
    get_wish(options)
    call = call or call_here(load(options))
    result = ScoreResult(options)
    failing: Failing = {}

    def add(episode: ScoredEpisode) -> None:
        _add(result, episode, failing)
        result.seconds = time.perf_counter() - started
        on_progress(result)

    try:
        facts = call(read_engine_facts, options)
        require_wish(options, facts)
        result.options = options = replace(options, max_depth=facts.max_depth)
        result.engine_version = call(get_version, options)
        for indices in _batches(options, result):
            call(play_scores, options, indices, on_part=add)
        for name in profiles:
            result.nearest[name] = _count_steps(call, replace(options, profile=name))
        in_order = sorted(failing, key=lambda kind: (ORDER[kind.aspect], failing[kind].index))
        for kind in in_order:
            result.shrinking = kind.aspect
            on_progress(result)
            _shrink(result, call, failing, kind)
    except LostError as lost:
        result.loss = lost.loss
    result.seconds = time.perf_counter() - started
    return result


def _shrink(result: ScoreResult, call: Call, failing: Failing, kind: Kind) -> None:
    """Shrink the first difference of a kind, unless a program of its kind is there already."""
    aspect, episode = kind.aspect, failing[kind]
    program, index = episode.program, episode.index
    assert program is not None
    found = [*result.firsts.values(), *result.others]
    # A program that was shrunk for another aspect of the episode may show this one too.
    short = [it.shrunk.program for it in found if it.shrunk and it.episode == index]
    shrunk = call(shrink_difference, result.options, [*short, program], aspect, kind.shape)
    config = program.config if shrunk is None else shrunk.program.config
    first = FirstDifference(
        find_kind(aspect, kind.shape, config), index, len(program.actions), shrunk
    )
    if aspect not in result.firsts:
        result.firsts[aspect] = first
    elif shrunk is not None and first.kind not in [it.kind for it in found]:
        result.others.append(first)


def _count_steps(call: Call, options: CheckOptions) -> tuple[int, int]:
    """Return the steps compared and those that agree in a tenth of the budget."""
    result = ScoreResult(replace(options, max_events=max((options.max_events or 0) // 10, 2000)))
    for indices in _batches(result.options, result):
        call(play_scores, options, indices, on_part=lambda it: _add(result, it, {}))
    return result.total[Aspect.STEPS], result.agreed[Aspect.STEPS]


def _batches(options: CheckOptions, result: ScoreResult) -> Iterator[range]:
    if options.episode is not None:
        yield range(options.episode, options.episode + 1)
        return
    start = 0
    while not _is_spent(options, result):
        yield range(start, start + EPISODES_PER_BATCH)
        start += EPISODES_PER_BATCH


def _is_spent(options: CheckOptions, result: ScoreResult) -> bool:
    if options.max_events is not None and result.num_events >= options.max_events:
        return True
    return options.max_seconds is not None and result.seconds >= options.max_seconds


def _add(result: ScoreResult, episode: ScoredEpisode, failing: Failing) -> None:
    result.num_episodes += 1
    result.num_events += episode.num_events
    result.skipped.update(episode.skipped)
    if episode.first is not None:
        result.num_stuck += 1
        if result.stuck is None:
            result.stuck, result.stuck_episode = episode.first, episode.index
    for aspect, (total, agreed) in episode.counts.items():
        result.total[aspect] += total
        result.agreed[aspect] += agreed
        if agreed < total:
            assert episode.program is not None
            for shape in episode.shapes[aspect]:
                failing.setdefault(find_kind(aspect, shape, episode.program.config), episode)


# Functions that a `Call` gives the engine.


def get_version(_options: CheckOptions, make_engine: EngineFactory) -> str:
    """Return the version of the engine."""
    return str(get_traits(make_engine).version)


def play_scores(
    options: CheckOptions, make_engine: EngineFactory, indices: range
) -> Iterator[ScoredEpisode]:
    """Yield the counts of these episodes."""
    for index in indices:
        run, program, findings = play_scored(options, index, make_engine)
        counts = {aspect: (it.total, it.agreed) for aspect, it in run.tallies().items()}
        has_differed = bool(findings) or any(total > agreed for total, agreed in counts.values())
        yield ScoredEpisode(
            index=index,
            num_events=run.num_events,
            counts=counts,
            shapes={aspect: tuple(it.firsts) for aspect, it in run.tallies().items()},
            skipped={str(name): count for name, count in run.skipped.items()},
            program=program if has_differed else None,
            first=findings[0] if findings else None,
        )


def play_scored(
    options: CheckOptions, index: int, make_engine: EngineFactory
) -> tuple[ScoreRun, Program, list[Finding]]:
    """Draw one program while both sides play it; return run, program and findings."""
    draw = SeededDraw(f"{options.preset}/{options.seed}/{index}")
    swarm = draw_options(options, draw, make_engine)
    config, missing = fit_config(swarm.config, make_engine)
    profile = find_profile(options.profile)
    run = ScoreRun.start(config, make_engine, swarm.token_seed, swarm.vocabulary_size, profile)
    for capability in missing:
        run.skip(capability)
    lacking = {HOSTILE.name, *(feature.name for feature in find_lacking(run.capabilities))}
    fitting = swarm.fit(config)
    view = View(replace(fitting, features=fitting.features - lacking), run.reference)
    actions: list[Action] = []
    findings: list[Finding] = []
    for number in range(swarm.preset.num_actions + 1):
        is_last = number == swarm.preset.num_actions
        drawn = Drain() if is_last else next_action(view, draw)
        view.note(drawn)
        action = run.fit(_under_a_new_name(drawn, run.names))
        if action is not None:
            actions.append(action)
            findings = run.perform(action)
        if findings:
            break
    program = Program(config, tuple(actions), swarm.token_seed, swarm.vocabulary_size)
    return run, program, findings


def _under_a_new_name(action: Action, names: set[v.RequestId]) -> Action:
    """Return the action, with another id for a request whose id was used before: the earlier
    request may have finished on one side only."""
    if not isinstance(action, v.Submit) or action.request.request_id not in names:
        return action
    name = f"{action.request.request_id}.{len(names)}"
    return v.Submit(replace(action.request, request_id=name))


def shrink_difference(
    options: CheckOptions,
    make_engine: EngineFactory,
    programs: Sequence[Program],
    aspect: Aspect,
    shape: str,
) -> Shrunk | None:
    """Return the first of these programs in which the aspect differs in this shape, shrunk; None if
    it differs in none."""
    play = partial(play_for, aspect, shape)
    profile = find_profile(options.profile)
    for program in programs:
        _, findings = play(program, make_engine, profile)
        if findings:
            return shrink(program, make_engine, findings[0], profile, play=play)
    return None


def play_for(
    aspect: Aspect, shape: str, program: Program, make_engine: EngineFactory, profile: Profile
) -> tuple[ScoreRun, list[Finding]]:
    """Play a program on both sides; return the run, and a finding if the aspect differs."""
    run, _ = score_program(program, make_engine, profile)
    return run, run.differing(aspect, shape)
