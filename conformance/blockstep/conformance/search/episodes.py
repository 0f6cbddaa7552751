"""Episodes: a swarm drawn from (preset, seed, index), a program drawn as it runs, and a drain.

An episode depends on these three only, so they reproduce a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from blockstep.conformance.draw.actions import SeededDraw, next_action
from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.presets import PRESETS, Swarm
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.draw.view import View
from blockstep.conformance.engine import (
    Capability,
    EngineFactory,
    Equivalence,
    Safety,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.protocol.features import find_lacking, fit
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Action, Drain, Program
from blockstep.conformance.search.options import CheckOptions, find_profile, get_wish, load
from blockstep.spec.vocabulary import Config, Event, Observation

EPISODES_WITHOUT_EVENTS = 200
"""Episodes without any event after which a check ends: the engine accepts none."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Crash or hang of an engine's process, or failure to build the engine."""

    message: str
    config: str = ""
    events: tuple[str, ...] = ()
    """Events that it was given, the last one included."""
    last_words: tuple[str, ...] = ()
    """End of its standard error."""
    event_seconds: float | None = None
    """Time limit of an event, if not the default."""

    @property
    def finding(self) -> Finding:
        """Return the finding of kind FAULT that reports this loss."""
        return Finding(FindingKind.FAULT, "", "engine_returns_from_every_call", self.message)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """Result of one episode. Small: it crosses process boundaries."""

    index: int
    num_events: int
    witnesses: dict[str, int]
    skipped: dict[str, int]
    known: dict[str, int]
    deviations: dict[str, int]
    """Number of findings that a deviation covers, by its name."""
    has_snapshot: bool
    pairs: tuple[str, ...] = ()
    """Cells of `judge.pairs` that it reached."""
    quirks: tuple[str, ...] = ()
    """Goals of `lockstep.quirks` that it reached."""
    program: Program | None = None
    """The program, if it failed; None if the engine's process died."""
    first: Finding | None = None
    beside: tuple[Finding, ...] = ()
    """Other findings at the same event."""
    loss: Loss | None = None
    """Crash or hang of the engine's process, if any; `first` then says so."""


def fit_depth(options: CheckOptions, make_engine: EngineFactory) -> CheckOptions:
    """Return the options with at most as many frames in flight as the engine can have, or
    declares."""
    if options.max_depth == 1:
        return options
    traits = get_traits(make_engine)
    depth, weaker = traits.max_depth or options.max_depth, traits.equivalence or Equivalence()
    asked = (Config(64, max_frames_in_flight=depth, async_scheduling=on) for on in (True, False))
    if depth > 1:
        fitting = [traits.fit_config(weaker.fit_config(config))[0] for config in asked]
        depth = min(depth, max(config.max_frames_in_flight for config in fitting))
    if not {Capability.ASYNC, Capability.PIPELINE} & get_capabilities(make_engine):
        depth = 1
    return replace(options, max_depth=min(depth, options.max_depth))


def fit_config(config: Config, make_engine: EngineFactory) -> tuple[Config, tuple[str, ...]]:
    """Return the nearest config that the engine can be given, and what it lacks: capabilities, or a
    reason of its adapter."""
    traits = get_traits(make_engine)
    weaker = traits.equivalence
    config = config if weaker is None else weaker.fit_config(config)
    fitting, missing = fit(config, find_lacking(get_capabilities(make_engine)))
    fitting, reason = traits.fit_config(fitting)
    return fitting, missing if reason is None else (*missing, reason)


def list_changes(config: Config, fitting: Config) -> list[str]:
    """Return what was changed in a config to fit an engine, as `name=value`."""
    pairs = ((f.name, getattr(config, f.name), getattr(fitting, f.name)) for f in fields(config))
    return [f"{name}={now}" for name, before, now in pairs if before != now]


def start_run(
    swarm: Swarm, make_engine: EngineFactory, options: CheckOptions, keep_exchanges: bool = False
) -> tuple[LockStep, View]:
    """Return a run with the swarm's config as the engine can be given it, and the client's view."""
    config, missing = fit_config(swarm.config, make_engine)
    run = get_start(make_engine)(
        config,
        make_engine,
        swarm.token_seed,
        swarm.vocabulary_size,
        keep_exchanges,
        find_profile(options.profile),
    )
    for capability in missing:
        run.skip(capability)
    for feature in swarm.left_out:
        assert feature.capability is not None
        run.skip(feature.capability)
    seeks_aborts = run.equivalence == Safety.name and Capability.ABORT in run.capabilities
    return run, View(swarm.fit(config), run, seeks_aborts=seeks_aborts)


def draw_options(
    options: CheckOptions, draw: Draw, make_engine: EngineFactory, is_judged_alone: bool = False
) -> Swarm:
    """Draw a swarm for the options."""
    return draw_swarm(
        PRESETS[options.preset],
        draw,
        options.policy,
        options.max_depth,
        get_wish(options),
        is_judged_alone,
        lambda feature: feature.capability in get_capabilities(make_engine),
    )


def play_episode(
    options: CheckOptions, index: int, make_engine: EngineFactory, keep_exchanges: bool = False
) -> tuple[LockStep, Program, list[Finding]]:
    """Play one episode to its end, or to its first findings."""
    draw = SeededDraw(f"{options.preset}/{options.seed}/{index}")
    is_judged_alone = isinstance(get_traits(make_engine).equivalence, Safety)
    swarm = draw_options(options, draw, make_engine, is_judged_alone)
    run, view = start_run(swarm, make_engine, options, keep_exchanges)
    actions: list[Action] = []
    findings: list[Finding] = []
    for number in range(swarm.preset.num_actions + 1):
        is_last = number == swarm.preset.num_actions
        action = Drain() if is_last else run.fit(next_action(view, draw))
        view.note(action)
        actions.append(action)
        findings = run.perform(action)
        if findings:
            break
    program = Program(run.config, tuple(actions), swarm.token_seed, swarm.vocabulary_size)
    return run, program, findings


def run_episode(options: CheckOptions, index: int, make_engine: EngineFactory) -> EpisodeResult:
    """Play one episode and return what a report needs."""
    return summarize_episode(index, *play_episode(options, index, make_engine), options.sentence)


def summarize_episode(
    index: int,
    run: LockStep,
    program: Program,
    findings: Sequence[Finding],
    sentence: str | None = None,
) -> EpisodeResult:
    """Return what a report needs of a run; `sentence` as in `CheckOptions`."""
    first = get_wanted(findings, sentence)
    return EpisodeResult(
        index=index,
        num_events=run.num_events,
        witnesses=dict(run.witnesses),
        skipped=run.skipped,
        known=run.known,
        deviations=dict(run.excuses.counts),
        has_snapshot=Capability.SNAPSHOT in run.capabilities,
        pairs=tuple(sorted(run.pairs.reached)),
        quirks=tuple(run.list_quirk_goals()),
        program=program if findings else None,
        first=first,
        beside=tuple(finding for finding in findings if finding is not first),
    )


def get_wanted(findings: Sequence[Finding], sentence: str | None) -> Finding | None:
    """Return the first finding, or the first of this check if there is one."""
    alike = (finding for finding in findings if finding.sentence == sentence)
    return next(iter((*alike, *findings)), None)


def record_episode(
    options: CheckOptions, make_engine: EngineFactory | None = None
) -> tuple[LockStep, list[tuple[Event, Observation]]]:
    """Return the run of one episode, and each event with the engine's answer."""
    make_engine = make_engine or load(options)
    options = fit_depth(options, make_engine)
    run, _, _ = play_episode(options, options.episode or 0, make_engine, keep_exchanges=True)
    return run, [
        (exchange.event, exchange.seen) for exchange in run.exchanges if exchange.seen is not None
    ]
