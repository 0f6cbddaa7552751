"""Validation of a recorded run against the spec, after it happened.

A run of an engine with a weaker equivalence than `exact` is checked only for what that asks: a
stand-in engine repeats the recorded observations, in a run at that equivalence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    EXACT,
    Capability,
    Deviation,
    EngineTraits,
    Equivalence,
    Renamed,
    Safety,
    SamePlans,
)
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.judge.worker.blockless_worker import CountingWorker
from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.protocol.compare import observation_differences
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.protocol.program import describe_event
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.step_records import (
    Snapshot,
    StepJudge,
    is_step_file,
    read_steps,
)
from blockstep.conformance.recorded.traces import Trace, TraceStep, read_trace
from blockstep.spec import vocabulary as v


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of a validation: how far a trace agrees with the spec."""

    num_steps: int
    """Steps of the trace."""
    num_agreed: int
    """Steps before the first that is wrong; all of them if none is."""
    equivalence: str = EXACT
    """The equivalence that the trace names."""
    event: str = ""
    """The first event after which something is wrong."""
    finding: Finding | None = None
    """The finding after that event."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Events that could not be checked, by type."""
    excused: Counter[str] = field(default_factory=Counter)
    """Number of findings that the engine's adapter declares, by the deviation."""
    has_events: bool = True
    """Whether it has events; a file with records of steps has none."""

    @property
    def conforms(self) -> bool:
        """Return whether nothing is wrong."""
        return self.finding is None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Return the fields in which the recorded observation is wrong."""
        return () if self.finding is None else self.finding.differences


def validate(path: Path) -> Validation:
    """Give each recorded event to the spec and compare its observation with the recorded one.

    In a file with a scheduler's own records (`steps`), each record is compared with those before
    it.

    Raises:
        TraceError: the file is not a trace.
    """
    if is_step_file(path):
        return _validate_steps(path)
    trace = read_trace(path)
    left_out: Counter[str] = Counter()
    excused: Counter[str] = Counter()
    if trace.equivalence == EXACT and not trace.excuses:
        judge = _judge_exactly(trace)
    else:
        judge = _judge_run(trace, left_out, excused)
    num_steps, equivalence = len(trace.steps), trace.equivalence
    for number, step in enumerate(trace.steps):
        finding = judge(step)
        if finding is not None:
            event = describe_event(step.event)
            return Validation(num_steps, number, equivalence, event, finding, left_out, excused)
    return Validation(num_steps, num_steps, equivalence, left_out=left_out, excused=excused)


def _validate_steps(path: Path) -> Validation:
    """Check the records of steps, up to the first that is inconsistent."""
    judge, wrong, num_steps = StepJudge(), None, 0
    for number, record in read_steps(path):
        num_steps += isinstance(record, Snapshot)
        finding = judge.take(record) if wrong is None else None
        if finding is not None:
            event = f"{type(record).__name__.lower()} of step {record.step}, line {number}"
            wrong = (max(num_steps - 1, 0), Safety.name, event, finding)
    if wrong is None:
        return Validation(num_steps, num_steps, Safety.name, has_events=False)
    return Validation(max(num_steps, 1), *wrong, has_events=False)


def _judge_exactly(trace: Trace) -> Callable[[TraceStep], Finding | None]:
    """Return a function that compares a step with the spec."""
    spec, with_hints = SpecEngine(trace.config), _has_hints(trace)

    def judge(step: TraceStep) -> Finding | None:
        expected = spec.apply(step.event)
        differences = observation_differences(expected, step.observation, with_hints)
        if not differences:
            return None
        message = f"spec and trace differ in {len(differences)} fields"
        return Finding(
            FindingKind.DIVERGENCE, "", "engine_equals_spec", message, tuple(differences)
        )

    return judge


def _has_hints(trace: Trace) -> bool:
    """Return whether plans of the trace have hints, which an engine may leave out."""
    answers = (step.observation for step in trace.steps)
    return any(isinstance(seen, v.Plan) and seen.num_common_prefix_blocks for seen in answers)


class _TraceEngine:
    """Repeats the observations of the trace.

    It claims all capabilities, since every event was given.
    """

    def __init__(self, with_hints: bool) -> None:
        self.answer: v.Observation = v.Ack()
        lacking = {Capability.SNAPSHOT} | (set() if with_hints else {Capability.COMMON_PREFIX})
        self._capabilities = ALL_CAPABILITIES - lacking

    def apply(self, _event: v.Event) -> v.Observation:
        return self.answer

    def snapshot(self) -> None:
        """Return None: a trace has no states."""

    def capabilities(self) -> frozenset[str]:
        return self._capabilities


class _RecordedWorker(Worker):
    """A worker that samples the recorded tokens, also for plans before their commit."""

    def __init__(self, trace: Trace, *args: Any) -> None:
        super().__init__(*args)
        self._recorded = {
            (step.event.frame_id, row.request_id): row.token_ids
            for step in trace.steps
            if isinstance(step.event, v.Commit) and isinstance(step.observation, v.Outputs)
            for row in step.event.sampled
        }

    def _get_recorded(self, request_id: v.RequestId) -> v.TokenIds | None:
        assert self.last_plan is not None, "a row is one of a plan"
        return self._recorded.get((self.last_plan.frame_id, request_id))

    def _sample(self, row: FrameRow) -> v.TokenIds:
        recorded = self._get_recorded(row.view.request.request_id)
        return super()._sample(row) if recorded is None else recorded

    def _fill_in(self, row: v.NewRow | v.CachedRow, view: RequestView) -> v.TokenIds:
        """Return the drafts of a row; accepted ones that were placeholders are known from the
        commit.
        """
        drafts = super()._fill_in(row, view)
        if v.DRAFT_PLACEHOLDER not in row.draft_token_ids:
            return drafts
        accepted = (self._get_recorded(row.request_id) or ())[:-1]
        return (*accepted, *drafts[len(accepted) :])


class _RecordedCountingWorker(_RecordedWorker, CountingWorker):
    """The same, for plans without block ids."""


def _judge_run(
    trace: Trace, left_out: Counter[str], excused: Counter[str]
) -> Callable[[TraceStep], Finding | None]:
    """Return a function that checks a step at the trace's equivalence, except declared
    deviations.
    """
    engine, scope = _TraceEngine(_has_hints(trace)), _get_equivalence(trace)
    shows_blocks = not isinstance(scope, SamePlans) or scope.shows_blocks
    worker = partial(_RecordedWorker if shows_blocks else _RecordedCountingWorker, trace)

    def make(_config: v.Config) -> _TraceEngine:
        return engine

    deviations = tuple(
        Deviation(excuse.name, excuse.summary, None, excuse.sentences, excuse.fields)
        for excuse in trace.excuses
    )
    traits = EngineTraits(equivalence=scope, make_worker=worker, deviations=deviations)
    make.traits = traits  # type: ignore[attr-defined]
    run: LockStep = get_start(make)(trace.config, make)
    run.excuses.counts = excused

    def judge(step: TraceStep) -> Finding | None:
        engine.answer, num_before = step.observation, run.num_events
        findings = run.apply(step.event)
        if run.num_events == num_before:
            left_out[type(step.event).__name__] += 1
        return findings[0] if findings else None

    return judge


def _get_equivalence(trace: Trace) -> Equivalence | None:
    """Return the equivalence of the trace; plans without a block table show no blocks."""
    if trace.equivalence == EXACT:
        return None
    if trace.equivalence == SamePlans.name:
        plans = [step.observation for step in trace.steps if isinstance(step.observation, v.Plan)]
        return SamePlans(shows_blocks=any(row.block_ids for plan in plans for row in plan.new))
    return {kind.name: kind for kind in (Renamed, Safety)}[trace.equivalence]()
