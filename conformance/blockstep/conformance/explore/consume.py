"""Vectors played on an engine, as far as its equivalence allows a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockstep.conformance.engine import (
    EXACT,
    Capability,
    EngineFactory,
    Equivalence,
    Safety,
    get_capabilities,
    get_equivalence_name,
    get_traits,
)
from blockstep.conformance.explore.transition_checks import differ
from blockstep.conformance.explore.vectors import Vectors, VectorStep
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.findings import Difference, Finding
from blockstep.conformance.protocol.program import Action, Answer, Drain, Propose, describe_event
from blockstep.conformance.search.episodes import fit_config
from blockstep.spec import vocabulary as v


@dataclass(slots=True)
class Consumed:
    """The result of an engine."""

    num_programs: int = 0
    """Programs that were played to their end, or to the first difference."""
    num_events: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of events that the engine was not given, by the capability that it lacks."""
    excused: dict[str, int] = field(default_factory=dict)
    """Number of findings that the engine's adapter declares, by the deviation."""
    program: int = 0
    """The first program that failed, from 1; 0 if none did."""
    step: int = 0
    """The step of the program that failed, from 1."""
    event: str = ""
    differences: tuple[Difference, ...] = ()
    equivalence: str = EXACT
    """The equivalence at which the engine was compared."""
    finding: Finding | None = None
    """The violated property, for an engine that is compared with nothing."""

    @property
    def conforms(self) -> bool:
        """Whether all compared observations and states were right."""
        return not self.differences and self.finding is None

    def skip(self, why: str, count: int = 1) -> None:
        """Count events that the engine was not given."""
        self.skipped[why] = self.skipped.get(why, 0) + count


def consume(vectors: Vectors, make_engine: EngineFactory) -> Consumed:
    """Play all programs on an engine, up to the first difference or finding.

    An event that the engine lacks a capability for ends its program; an event that it cannot reject
    is left out. An engine at `safety` gets the events of the clients and is checked by properties.
    """
    scope = get_traits(make_engine).equivalence
    result = Consumed(equivalence=get_equivalence_name(make_engine))
    needed = get_missing(vectors.config, find_lacking(get_capabilities(make_engine)))
    if needed is not None:
        result.skip(needed, sum(map(len, vectors.programs)))
    elif isinstance(scope, Safety):
        _consume_alone(vectors, make_engine, result)
    elif scope is not None and scope.fit_config(vectors.config) != vectors.config:
        result.skip("configs that the engine cannot have", sum(map(len, vectors.programs)))
    else:
        _consume_compared(vectors, make_engine, scope, result)
    return result


def _consume_compared(
    vectors: Vectors, make_engine: EngineFactory, scope: Equivalence | None, result: Consumed
) -> None:
    """Compare every observation and state, as far as the equivalence says."""
    capabilities = get_capabilities(make_engine)
    features = find_lacking(capabilities)
    for number, steps in enumerate(vectors.programs, 1):
        engine = make_engine(vectors.config)
        for count, step in enumerate(steps, 1):
            lacking: str | None
            if isinstance(step.observation, v.Rejected):
                lacking = None if Capability.REJECTION in capabilities else Capability.REJECTION
            elif _is_foreign(step.event, scope, vectors.config):
                lacking = "requests that the engine cannot take"
            else:
                lacking = get_missing(step.event, features)
            if lacking is not None:
                result.skip(lacking)
                if lacking is Capability.REJECTION:
                    continue
                break
            result.num_events += 1
            result.differences = differ(
                engine, step.event, step.observation, step.snapshot, capabilities, scope
            )
            if result.differences:
                result.program, result.step = number, count
                result.event = describe_event(step.event)
                return
        result.num_programs += 1


def _is_foreign(event: v.Event, scope: Equivalence | None, config: v.Config) -> bool:
    """Whether the engine would take a request only after a change."""
    if scope is None or not isinstance(event, v.Submit):
        return False
    return scope.fit_request(event.request, config) != event.request


def _consume_alone(vectors: Vectors, make_engine: EngineFactory, result: Consumed) -> None:
    """Repeat the clients' events of each program, and check the engine's observations."""
    config, _ = fit_config(vectors.config, make_engine)
    for number, steps in enumerate(vectors.programs, 1):
        run = get_start(make_engine)(config, make_engine)
        for count, action in enumerate((*map(_to_action, steps), Drain()), 1):
            findings = [] if action is None else run.perform(run.fit(action))
            if findings:
                result.num_events += run.num_events
                result.program, result.step, result.finding = number, count, findings[0]
                result.event = "" if run.last is None else describe_event(run.last.event)
                return
        result.num_programs += 1
        result.num_events += run.num_events
        for why, times in run.skipped.items():
            result.skip(why, times)
        for name, times in run.excuses.counts.items():
            result.excused[name] = result.excused.get(name, 0) + times


def _to_action(step: VectorStep) -> Action | None:
    """Return the action of a step; None if it was rejected.

    The worker of the run samples its own tokens and drafts, which differ from those of the file.
    """
    match step.event:
        case _ if isinstance(step.observation, v.Rejected):
            return None
        case v.Commit():
            return Answer()
        case v.Drafts(drafts=drafts):
            return Propose(tuple((len(row.token_ids), 0) for row in drafts) or ((0, 0),))
        case event:
            return event
