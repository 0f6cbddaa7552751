"""Hunt jobs: work of a hunt that is done in the engine's process (see `call`).

Arguments and results are plain values, since they cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from blockstep.conformance.engine import (
    Declining,
    EngineFactory,
    build,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search.dedup import (
    FailureSignature,
    Symptoms,
    describe_failure,
    find_symptoms,
    mark_plainly,
    play_with,
    relax,
)
from blockstep.conformance.search.engine_wrappers import unwrapped
from blockstep.conformance.search.episodes import EpisodeResult, fit_config, run_episode
from blockstep.conformance.search.isolation.jobs import plain
from blockstep.conformance.search.options import CheckOptions, find_profile
from blockstep.conformance.search.shrink import Shrunk, shrink
from blockstep.conformance.search.suppressions import (
    KnownCause,
    SuppressedEngine,
    SuppressingFactory,
    find_causes,
    find_refuted,
    follow,
)
from blockstep.conformance.search.verdict_requirements import EngineFacts, read_engine_facts
from blockstep.conformance.search.watchpoints import WATCHPOINTS, watch_engine
from blockstep.spec.profiles import Quirk
from blockstep.spec.vocabulary import Config


@dataclass(frozen=True, slots=True)
class HuntContext:
    """Facts about an engine that a hunt needs."""

    facts: EngineFacts
    capabilities: frozenset[str]
    version: str
    """Version of the engine, "" if unknown."""
    workarounds: Mapping[str, str]
    is_spared: bool
    """Whether a check avoids defects: the adapter works around some, or declines events."""


UNKNOWN = HuntContext(
    EngineFacts(1, (), "", (), (), frozenset()), frozenset(), "", {}, is_spared=False
)
"""Facts of an engine that was lost before it could be asked."""


@dataclass(frozen=True, slots=True)
class FailureAnalysis:
    """Analysis of a failure."""

    shrunk: Shrunk
    first: Finding
    """Finding of the shrunk program that is most like the original one."""
    causes: tuple[KnownCause, ...]
    symptoms: Symptoms | None
    """None if known causes explain the failure."""
    raised_at: str
    """Function, file and line in which the engine raised; "" if it did not."""
    refuted: tuple[KnownCause, ...] = ()
    """Quirks followed until now that the engine does not have."""


def read_hunt_context(options: CheckOptions, make_engine: EngineFactory) -> HuntContext:
    """Return the facts about the engine. Builds one."""
    config, _ = fit_config(Config(num_blocks=8, max_model_len=64), make_engine)
    engine = build(make_engine, config)
    traits = get_traits(make_engine)
    return HuntContext(
        facts=read_engine_facts(options, make_engine),
        capabilities=frozenset(map(str, engine.capabilities())),
        version=str(traits.version),
        workarounds={str(name): str(text) for name, text in traits.workarounds.items()},
        is_spared=bool(traits.workarounds) or isinstance(unwrapped(engine), Declining),
    )


def play_episode_job(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause],
    indices: Sequence[int],
    max_events: int,
) -> Iterator[EpisodeResult]:
    """Yield these episodes, up to the first that fails or until `max_events`."""
    factory = SuppressingFactory(make_engine, forgiven)
    options = replace(options, profile=follow(forgiven).name)
    num_events = 0
    for index in indices:
        episode = run_episode(options, index, factory)
        yield replace(episode, skipped=plain(episode.skipped))
        num_events += episode.num_events
        if episode.first is not None or num_events >= max_events:
            return


def analyse_failure(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause] | None,
    quirks: Sequence[Quirk],
    episode: EpisodeResult,
    settled: frozenset[str] = frozenset(),
) -> FailureAnalysis:
    """Return the failure of an episode, shrunk, with the known causes that explain it, if any.

    `forgiven` is None in a check: the engine is then as its adapter makes it, under the profile of
    the options, and no cause is looked for. `settled` as in `find_symptoms`.
    """
    assert episode.program is not None
    assert episode.first is not None
    factory = SuppressingFactory(make_engine, forgiven)
    profile = find_profile(options.profile) if forgiven is None else follow(forgiven)
    shrunk = shrink(episode.program, factory, episode.first, profile)
    original = episode.first
    alike = (it for it in shrunk.findings if it.sentence == original.sentence)
    first = next(alike, (*shrunk.findings, original)[0])
    if original.kind is FindingKind.DIVERGENCE:  # a property says more
        first = (*shrunk.findings, original)[0]
    run, _ = run_program(shrunk.program, factory, profile)
    where = run.engine.raised_at if isinstance(run.engine, SuppressedEngine) else ""
    if forgiven is not None:
        causes = find_causes(shrunk.program, make_engine, forgiven, quirks)
        if causes:
            return FailureAnalysis(shrunk, first, causes, None, where)
        refuted = find_refuted(shrunk.program, make_engine, forgiven)
        if refuted:
            return FailureAnalysis(shrunk, first, (), None, where, refuted)
    symptoms = find_symptoms(shrunk.program, factory, profile, first, settled)
    return FailureAnalysis(shrunk, first, (), symptoms, where)


def dig_program(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause] | None,
    quirks: Sequence[Quirk],
    program: Program,
) -> FailureAnalysis | str | None:
    """Return the analysis of one failing program; None if it does not fail.

    A returned text says why the program was not played: the engine lacks what its config requires.
    """
    missing = get_missing(program.config, find_lacking(get_capabilities(make_engine)))
    if missing is not None:
        return f"the engine lacks {missing}"
    factory = SuppressingFactory(make_engine, forgiven)
    profile = find_profile(options.profile) if forgiven is None else follow(forgiven)
    run, findings = run_program(program, factory, profile)
    if not findings:
        return None
    failed = EpisodeResult(
        0, run.num_events, {}, {}, {}, {}, True, program=program, first=findings[0]
    )
    return analyse_failure(options, make_engine, forgiven, quirks, failed)


def relax_failure(
    options: CheckOptions, make_engine: EngineFactory, episode: EpisodeResult
) -> tuple[EpisodeResult, frozenset[str]]:
    """Return a failed episode without the means that its failure can do without, and the client
    actions that it needs.

    If the failure occurs without an abort, it is not the defect of aborts that the episode may also
    meet.
    """
    assert episode.program is not None
    assert episode.first is not None
    play = play_with(SuppressingFactory(make_engine, None), find_profile(options.profile))
    wanted = describe_failure(episode.first)

    def find_own(program: Program) -> tuple[Finding, FailureSignature] | None:
        played = play(program)
        pairs = () if played is None else zip(played.findings, played.marks, strict=True)
        return next((pair for pair in pairs if pair[1].message.startswith(wanted)), None)

    found = find_own(episode.program)
    if found is None:  # it does not come back
        return episode, frozenset()
    program = relax(episode.program, found[1].message, play)
    first, mark = find_own(program) or found
    return replace(episode, program=program, first=first), mark.acts


def show(
    _options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause],
    program: Program,
) -> list[tuple[Finding, FailureSignature]]:
    """Return the findings of a program, each with its mark, reduced to the features that it
    needs."""
    play = play_with(SuppressingFactory(make_engine, forgiven), follow(forgiven))
    played = play(program)
    if played is None:
        return []
    marks = (mark_plainly(program, mark, play) for mark in played.marks)
    return [*zip(played.findings, marks, strict=True)]


def find_watchpoint(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[KnownCause],
    name: str,
    indices: Sequence[int],
) -> tuple[int, EpisodeResult | None, Shrunk | None]:
    """Return the events played, the first of these episodes that reaches a watchpoint, and its
    program."""
    watchpoint = next(watchpoint for watchpoint in WATCHPOINTS if watchpoint.name == name)
    factory = watch_engine(SuppressingFactory(make_engine, forgiven), watchpoint)
    profile = follow(forgiven)
    options = replace(options, profile=profile.name)
    num_events = 0
    for index in indices:
        episode = run_episode(options, index, factory)
        num_events += episode.num_events
        if episode.first is not None and name in episode.first.message:
            assert episode.program is not None
            return num_events, episode, shrink(episode.program, factory, episode.first, profile)
    return num_events, None, None
