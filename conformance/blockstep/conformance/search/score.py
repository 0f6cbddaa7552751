"""Score: many programs on both sides, what they did alike, and the first difference of each kind.

The programs are drawn as those of a check, from (preset, seed, index), with the specification as
the one who answers; nothing is in them that the engine lacks or should refuse, and no id twice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any, Protocol

from blockstep.conformance.draw.actions import SeededDraw, View, next_action
from blockstep.conformance.engine import EngineFactory, get_traits
from blockstep.conformance.lockstep.score import Aspect, ScoreRun, score_program
from blockstep.conformance.protocol.features import HOSTILE, find_lacking
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Drain, Program
from blockstep.conformance.search.episodes import Loss, draw_options, fit_config
from blockstep.conformance.search.floor import look, require_wish
from blockstep.conformance.search.isolation import LostError
from blockstep.conformance.search.options import (
    CheckOptions,
    ExitCode,
    find_profile,
    get_wish,
    load,
)
from blockstep.conformance.search.shrink import Shrunk, shrink
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Profile

EPISODES_PER_BATCH = 8
CONTRACT = "plan/1"
"""What is counted and how; it rises when the same engine could get another score."""


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """What one episode came to. Small: it crosses process borders."""

    index: int
    num_events: int
    counts: dict[Aspect, tuple[int, int]]
    """Of each kind: how many there were, and how many agreed."""
    skipped: dict[str, int]
    program: Program | None
    """The program, if anything differed."""
    first: Finding | None
    """Why the engine could not go on, if it could not."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where something differed first."""

    episode: int
    num_actions: int
    """Of the program before it was shrunk."""
    shrunk: Shrunk | None
    """None: it was not seen again, so the engine is not deterministic."""


@dataclass(slots=True)
class ScoreResult:
    """What was counted, and against what."""

    options: CheckOptions
    engine_version: str = ""
    num_episodes: int = 0
    num_events: int = 0
    """That the engine was given."""
    seconds: float = 0.0
    total: Counter[Aspect] = field(default_factory=Counter)
    agreed: Counter[Aspect] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    firsts: dict[Aspect, FirstDifference] = field(default_factory=dict)
    num_stuck: int = 0
    """Episodes in which the engine could not go on."""
    stuck: Finding | None = None
    """Why, in the first of them, `stuck_episode`."""
    stuck_episode: int | None = None
    loss: Loss | None = None
    """What became of an engine that did not live."""
    shrinking: Aspect | None = None
    """Of what the first difference is being made short, once all is counted."""

    @property
    def against(self) -> str:
        """What the engine was measured against."""
        try:
            number = metadata.version("blockstep")
        except metadata.PackageNotFoundError:
            number = "of a checkout"
        return f"blockstep {number}, profile {self.options.profile}"

    def share(self, aspect: Aspect) -> float | None:
        """The part that agreed, 0 to 1; None if there was nothing to agree in."""
        total = self.total[aspect]
        return self.agreed[aspect] / total if total else None

    def exit_code(self, least: float = 0.0) -> ExitCode:
        """What the process should end with, where every share has to be `least` or more."""
        if self.stuck is not None or self.loss is not None:
            return ExitCode.FAILED
        if not self.total[Aspect.STEPS]:
            return ExitCode.HARNESS
        shares = (self.share(aspect) for aspect in Aspect)
        is_less = any(share is not None and share < least for share in shares)
        return ExitCode.FAILED if is_less else ExitCode.CONFORMS


class Call(Protocol):
    """Calls a function with an engine, as `Isolation.call` does."""

    def __call__(
        self,
        function: Callable[..., Any],
        options: CheckOptions,
        *args: Any,
        on_part: Callable[[Any], None] = ...,
    ) -> Any:
        """What the function comes to; what it yields goes to `on_part`."""
        ...


def call_here(
    function: Callable[..., Any],
    options: CheckOptions,
    *args: Any,
    on_part: Callable[[Any], None] = lambda _part: None,
) -> Any:
    """Call a function in this process."""
    value = function(options, load(options), *args)
    if not isinstance(value, Iterator):
        return value
    for part in value:
        on_part(part)
    return None


def score(
    options: CheckOptions,
    call: Call = call_here,
    on_progress: Callable[[ScoreResult], None] = lambda _result: None,
) -> ScoreResult:
    """Score an engine until the budget is spent, then make the first differences short.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
        UsageError: if the options want what the engine lacks.
    """
    started = time.perf_counter()
    get_wish(options)
    result = ScoreResult(options)
    failing: dict[Aspect, ScoredEpisode] = {}

    def add(episode: ScoredEpisode) -> None:
        _add(result, episode, failing)
        result.seconds = time.perf_counter() - started
        on_progress(result)

    try:
        facts = call(look, options)
        require_wish(options, facts)
        result.options = options = replace(options, max_depth=facts.max_depth)
        result.engine_version = call(get_version, options)
        for indices in _batches(options, result):
            call(play_scores, options, indices, on_part=add)
        for aspect in (aspect for aspect in Aspect if aspect in failing):
            result.shrinking = aspect
            on_progress(result)
            program, index = failing[aspect].program, failing[aspect].index
            assert program is not None
            firsts = result.firsts.values()
            # What is short already and of the same episode may show this, too.
            short = [it.shrunk.program for it in firsts if it.shrunk and it.episode == index]
            shrunk = call(shrink_difference, options, [*short, program], aspect)
            result.firsts[aspect] = FirstDifference(index, len(program.actions), shrunk)
    except LostError as lost:
        result.loss = lost.loss
    result.seconds = time.perf_counter() - started
    return result


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


def _add(result: ScoreResult, episode: ScoredEpisode, failing: dict[Aspect, ScoredEpisode]) -> None:
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
            failing.setdefault(aspect, episode)


# What is called with the engine, in a process of its own where it is not trusted.


def get_version(_options: CheckOptions, make_engine: EngineFactory) -> str:
    """Which version of it an engine is."""
    return str(get_traits(make_engine).version)


def play_scores(
    options: CheckOptions, make_engine: EngineFactory, indices: range
) -> Iterator[ScoredEpisode]:
    """Score these episodes."""
    for index in indices:
        run, program, findings = play_scored(options, index, make_engine)
        counts = {aspect: (it.total, it.agreed) for aspect, it in run.tallies().items()}
        has_differed = bool(findings) or any(total > agreed for total, agreed in counts.values())
        yield ScoredEpisode(
            index=index,
            num_events=run.num_events,
            counts=counts,
            skipped={str(name): count for name, count in run.skipped.items()},
            program=program if has_differed else None,
            first=findings[0] if findings else None,
        )


def play_scored(
    options: CheckOptions, index: int, make_engine: EngineFactory
) -> tuple[ScoreRun, Program, list[Finding]]:
    """Draw one program while both sides play it."""
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
    """The action; a request with the id of an earlier one, which may have ended on one side only,
    gets another."""
    if not isinstance(action, v.Submit) or action.request.request_id not in names:
        return action
    name = f"{action.request.request_id}.{len(names)}"
    return v.Submit(replace(action.request, request_id=name))


def shrink_difference(
    options: CheckOptions, make_engine: EngineFactory, programs: Sequence[Program], aspect: Aspect
) -> Shrunk | None:
    """The smallest program found in which something of this kind differs, as in one of these.

    None if it does in none of them, now that they are played again.
    """
    play = partial(play_for, aspect)
    profile = find_profile(options.profile)
    for program in programs:
        _, findings = play(program, make_engine, profile)
        if findings:
            return shrink(program, make_engine, findings[0], profile, play=play)
    return None


def play_for(
    aspect: Aspect, program: Program, make_engine: EngineFactory, profile: Profile
) -> tuple[ScoreRun, list[Finding]]:
    """Play a program on both sides; a finding if they differ in something of this kind."""
    run, _ = score_program(program, make_engine, profile)
    return run, run.differing(aspect)
