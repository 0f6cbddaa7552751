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
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search.distinct import (
    Mark,
    Symptoms,
    find_symptoms,
    mark_of,
    mark_plainly,
    play_with,
)
from blockstep.conformance.search.episodes import EpisodeResult, fit_config, run_episode
from blockstep.conformance.search.floor import Facts, look
from blockstep.conformance.search.forgiving import (
    Cause,
    ForgivenEngine,
    Forgiving,
    find_causes,
    find_refuted,
    follow,
)
from blockstep.conformance.search.isolation.jobs import plain
from blockstep.conformance.search.lookouts import LOOKOUTS, look_out
from blockstep.conformance.search.options import CheckOptions, find_profile
from blockstep.conformance.search.shrink import Shrunk, shrink
from blockstep.conformance.search.wrapped import unwrapped
from blockstep.spec.profiles import Quirk
from blockstep.spec.vocabulary import Config


@dataclass(frozen=True, slots=True)
class Ground:
    """Facts about an engine that a hunt needs."""

    facts: Facts
    capabilities: frozenset[str]
    version: str
    """Version of the engine, "" if unknown."""
    workarounds: Mapping[str, str]
    is_spared: bool
    """Whether a check avoids defects: the adapter works around some, or declines events."""


UNKNOWN = Ground(Facts(1, (), "", (), (), frozenset()), frozenset(), "", {}, is_spared=False)
"""Ground of an engine that could not be asked."""


@dataclass(frozen=True, slots=True)
class Dug:
    """Analysis of a failure."""

    shrunk: Shrunk
    first: Finding
    """Finding of the shrunk program that is most like the original one."""
    causes: tuple[Cause, ...]
    symptoms: Symptoms | None
    """None if known causes explain the failure."""
    raised_at: str
    """Function, file and line in which the engine raised; "" if it did not."""
    refuted: tuple[Cause, ...] = ()
    """Quirks followed until now that the engine does not have."""


def ask(options: CheckOptions, make_engine: EngineFactory) -> Ground:
    """Return the facts about the engine. Builds one."""
    config, _ = fit_config(Config(num_blocks=8, max_model_len=64), make_engine)
    engine = build(make_engine, config)
    traits = get_traits(make_engine)
    return Ground(
        facts=look(options, make_engine),
        capabilities=frozenset(map(str, engine.capabilities())),
        version=str(traits.version),
        workarounds={str(name): str(text) for name, text in traits.workarounds.items()},
        is_spared=bool(traits.workarounds) or isinstance(unwrapped(engine), Declining),
    )


def play(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[Cause],
    indices: Sequence[int],
    max_events: int,
) -> Iterator[EpisodeResult]:
    """Yield these episodes, up to the first that fails or until `max_events`."""
    factory = Forgiving(make_engine, forgiven)
    options = replace(options, profile=follow(forgiven).name)
    num_events = 0
    for index in indices:
        episode = run_episode(options, index, factory)
        yield replace(episode, skipped=plain(episode.skipped))
        num_events += episode.num_events
        if episode.first is not None or num_events >= max_events:
            return


def dig(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[Cause] | None,
    quirks: Sequence[Quirk],
    episode: EpisodeResult,
) -> Dug:
    """Return the failure of an episode, shrunk, with the known causes that explain it, if any.

    `forgiven` is None in a check: the engine is then as its adapter makes it, under the profile of
    the options, and no cause is looked for.
    """
    assert episode.program is not None
    assert episode.first is not None
    factory = Forgiving(make_engine, forgiven)
    profile = find_profile(options.profile) if forgiven is None else follow(forgiven)
    shrunk = shrink(episode.program, factory, episode.first, profile)
    said = episode.first
    alike = (it for it in shrunk.findings if it.sentence == said.sentence)
    first = next(alike, (*shrunk.findings, said)[0])
    if said.kind is FindingKind.DIVERGENCE:  # a property says more
        first = (*shrunk.findings, said)[0]
    run, _ = run_program(shrunk.program, factory, profile)
    where = run.engine.raised_at if isinstance(run.engine, ForgivenEngine) else ""
    if forgiven is not None:
        causes = find_causes(shrunk.program, make_engine, forgiven, quirks)
        if causes:
            return Dug(shrunk, first, causes, None, where)
        refuted = find_refuted(shrunk.program, make_engine, forgiven)
        if refuted:
            return Dug(shrunk, first, (), None, where, refuted)
    symptoms = find_symptoms(shrunk.program, factory, profile, first)
    return Dug(shrunk, first, (), symptoms, where)


def dig_program(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[Cause] | None,
    quirks: Sequence[Quirk],
    program: Program,
) -> Dug | str | None:
    """Return the analysis of one failing program; None if it does not fail.

    A returned text says why the program was not played: the engine lacks what its config requires.
    """
    missing = get_missing(program.config, find_lacking(get_capabilities(make_engine)))
    if missing is not None:
        return f"the engine lacks {missing}"
    factory = Forgiving(make_engine, forgiven)
    profile = find_profile(options.profile) if forgiven is None else follow(forgiven)
    run, findings = run_program(program, factory, profile)
    if not findings:
        return None
    failed = EpisodeResult(
        0, run.num_events, {}, {}, {}, {}, True, program=program, first=findings[0]
    )
    return dig(options, make_engine, forgiven, quirks, failed)


def show(
    _options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[Cause],
    program: Program,
) -> list[tuple[Finding, Mark]]:
    """Return the findings of a program, each with its mark, reduced to the features that it
    needs."""
    factory, profile = Forgiving(make_engine, forgiven), follow(forgiven)
    run, findings = run_program(program, factory, profile)
    play = play_with(factory, profile)
    return [
        (finding, mark_plainly(program, mark_of(program, run, finding), play))
        for finding in findings
    ]


def look_for(
    options: CheckOptions,
    make_engine: EngineFactory,
    forgiven: frozenset[Cause],
    name: str,
    indices: Sequence[int],
) -> tuple[int, EpisodeResult | None, Shrunk | None]:
    """Return the events played, the first of these episodes that reaches a watchpoint, and its
    program."""
    lookout = next(lookout for lookout in LOOKOUTS if lookout.name == name)
    factory = look_out(Forgiving(make_engine, forgiven), lookout)
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
