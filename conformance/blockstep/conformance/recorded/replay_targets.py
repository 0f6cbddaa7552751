"""The targets of a replay's events: an engine alone, or an engine compared with the spec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias, cast

from blockstep.conformance.engine import (
    BadEngineError,
    EngineFactory,
    Safety,
    SamePlans,
    build,
    get_traits,
)
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.exchange import fault_of
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.recorded.replay_counts import ReplayReport
from blockstep.spec import vocabulary as v
from blockstep.spec.transition import transition

DECLINED = v.Rejected(v.RejectCode.BAD_REQUEST, "the engine's adapter declines it")


class FindingRaised(Exception):
    """Ends the replay with a finding."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(finding.message)


class EngineOnly:
    """An engine without the spec."""

    num_compared = 0
    excused: Mapping[str, int] = MappingProxyType({})

    def __init__(self, make_engine: EngineFactory, config: v.Config) -> None:
        self._engine, self._config = build(make_engine, config), config
        self._scope = get_traits(make_engine).equivalence

    def apply(self, event: v.Event) -> v.Observation:
        """Return the engine's observation. Raises `FindingRaised`, as all these methods do."""
        if self._scope is not None and isinstance(event, v.Submit):
            fitting = self._scope.fit_request(event.request, self._config)
            if fitting is None:
                return DECLINED
            event = v.Submit(fitting)
        try:
            return self._engine.apply(event)
        except Exception as error:
            raise FindingRaised(fault_of(error)) from error

    def finish(self) -> None:
        """Do nothing: there is nothing to compare."""


class EngineAndSpec:
    """An engine in lock-step with the spec, or checked by the properties alone."""

    def __init__(self, run: LockStep) -> None:
        self._run = run

    @property
    def num_compared(self) -> int:
        """Number of states that were compared."""
        return self._run.num_compared

    @property
    def excused(self) -> Mapping[str, int]:
        """Number of findings that the engine's adapter declares."""
        return self._run.excuses.counts

    def apply(self, event: v.Event) -> v.Observation:
        """Return the engine's observation, or the spec's rejection of an event that the engine is
        not given.
        """
        run = self._run
        if isinstance(event, v.Submit):
            event = cast("v.Submit", run.fit(event))
        _expect_nothing(run.apply(event))
        if run.last is None or run.last.event is not event:  # it was rejected or declined
            refusal = transition(run.spec.state, event)
            if isinstance(refusal, v.Rejected):
                return refusal
            return DECLINED
        assert run.last.seen is not None
        return run.last.seen

    def finish(self) -> None:
        """Compare the last states, if the last event was not compared."""
        run = self._run
        if run.compare_every and run.num_events % run.compare_every:
            _expect_nothing(run.compare_states())


Side: TypeAlias = EngineOnly | EngineAndSpec


def _expect_nothing(findings: list[Finding]) -> None:
    if findings:
        raise FindingRaised(findings[0])


def open_side(
    make_engine: EngineFactory,
    config: v.Config,
    report: ReplayReport,
    with_spec: bool,
    snapshot_every: int,
) -> Side:
    """Return the target of the events, and set in the report what is compared.

    Raises:
        ConfigError: the engine cannot be built with this config.
        FoundError: it raised while it was built.
    """
    scope = get_traits(make_engine).equivalence
    try:
        if not with_spec:
            return EngineOnly(make_engine, config)
        cadence = None if isinstance(scope, Safety) else snapshot_every
        report.equivalence = "observations" if scope is None else scope.name
        report.snapshot_every = 0 if isinstance(scope, SamePlans) else cadence or 0
        return EngineAndSpec(get_start(make_engine)(config, make_engine, compare_every=cadence))
    except (v.ConfigError, BadEngineError):
        raise
    except Exception as error:
        raise FindingRaised(fault_of(error)) from error
