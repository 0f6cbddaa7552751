"""Fences: checks a loop that runs without a host, each time it lets the host look.

Between two fences the state cannot be seen. At a fence the loop reports its plans and commits in
order, with as many frames in flight as the config has. The specification takes the same steps and
must give the same results: the rows of each plan, the outputs of each commit, and the state down
to the block id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.engines.serving import CheckFailedError
from blockstep.conformance.protocol.compare import observation_differences, snapshot_differences
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.spec import vocabulary as v
from blockstep.spec.oracle import Oracle


class ReportedRow(Protocol):
    """A request in a plan."""

    @property
    def request_id(self) -> v.RequestId:
        """Return its id."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that it runs."""
        ...


@runtime_checkable
class ReportedPlan(Protocol):
    """A plan that the loop made and ran."""

    @property
    def frame_id(self) -> v.FrameId:
        """Return its frame id."""
        ...

    @property
    def rows(self) -> Sequence[ReportedRow]:
        """Return its requests, in running order."""
        ...


@runtime_checkable
class ReportedCommit(Protocol):
    """An answer that the loop committed."""

    @property
    def frame_id(self) -> v.FrameId:
        """Return the frame id of the plan that it answers."""
        ...

    @property
    def sampled(self) -> Sequence[v.RowTokens]:
        """Return the answer, one row for each row of the plan."""
        ...

    @property
    def outputs(self) -> v.Outputs:
        """Return the outputs that it delivered."""
        ...


class SyncPointChecker:
    """Checker between a model engine and its scheduler: it checks every event and every fence.

    Raises:
        CheckFailedError: at the first finding.
    """

    def __init__(self, config: v.Config, make_engine: EngineFactory) -> None:
        self.oracle = Oracle(config)
        self.engine = make_engine(config)
        self.num_events = 0
        self.num_fences = 0
        self._orders: dict[v.FrameId, list[v.RequestId]] = {}
        """The requests of each plan in flight, in the order of the specification's plan."""

    def apply(self, event: v.Event) -> v.Observation:
        """Give the event to both; returns the scheduler's answer if it is right."""
        expected, seen = self.oracle.apply(event), self.engine.apply(event)
        self.num_events += 1
        differences = observation_differences(expected, seen)
        if differences:
            self._complain(f"the answer to {type(event).__name__}", differences)
        self._compare_states(f"the state after {type(event).__name__}")
        return seen

    def snapshot(self) -> v.Snapshot:
        """Return the state, which is the same on both sides."""
        return self.oracle.snapshot()

    def ran(self, _ran: object) -> None:
        """Ignore the passes: `ServingChecker` checks them, in runs where every event is seen."""

    def fence(self, steps: Sequence[ReportedPlan | ReportedCommit]) -> None:
        """Make the specification take the same steps, and compare its decisions with those of the
        loop.
        """
        for step in steps:
            self.num_events += 1
            if isinstance(step, ReportedCommit):
                self._commit(step)
            else:
                self._plan(step)
        self.num_fences += 1
        self._compare_states("the state at a fence")

    def describe(self) -> str:
        """Return what was checked, on one line."""
        return f"{self.num_events:,} events, {self.num_fences:,} fences"

    def counts(self) -> dict[str, int]:
        """Return what was checked, as numbers by name."""
        return {"num_events": self.num_events, "num_fences": self.num_fences}

    def _compare_states(self, what: str) -> None:
        state = self.engine.snapshot()
        assert state is not None, "the engine shows its state"
        differences = snapshot_differences(self.oracle.snapshot(), state)
        if differences:
            self._complain(what, differences)

    def _plan(self, reported: ReportedPlan) -> None:
        plan = self.oracle.schedule()
        # Only a loop has its rows in running order; that order is checked in the states.
        expected = sorted((row.request_id, row.num_scheduled_tokens) for row in plan.rows)
        seen = sorted((row.request_id, row.num_tokens) for row in reported.rows)
        if (plan.frame_id, expected) != (reported.frame_id, seen):
            names = f"rows of plan {plan.frame_id}", f"rows of plan {reported.frame_id}"
            differs = Difference("rows", f"{names[0]}: {expected}", f"{names[1]}: {seen}")
            self._complain("the plan of a step between two fences", (differs,))
        self._orders[plan.frame_id] = [row.request_id for row in plan.rows]

    def _commit(self, reported: ReportedCommit) -> None:
        sampled = {row.request_id: row for row in reported.sampled}
        order = self._orders.pop(reported.frame_id, [])
        if sorted(order) != sorted(sampled):
            differs = Difference("rows", str(sorted(order)), str(sorted(sampled)))
            self._complain(f"the requests that answer {reported.frame_id} is for", (differs,))
        rows = tuple(sampled[name] for name in order)
        answer = self.oracle.apply(v.Commit(reported.frame_id, rows))
        if isinstance(answer, v.Rejected):
            differs = Difference("sampled", answer.detail, str(rows))
            self._complain("what a step between two fences sampled", (differs,))
        delivered = observation_differences(_sort(answer), _sort(reported.outputs))
        if delivered:
            self._complain("what a step between two fences delivered", delivered)

    def _complain(self, what: str, differences: tuple[Difference, ...]) -> None:
        finding = Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", what, differences)
        raise CheckFailedError([finding], self.num_events)


def _sort(outputs: v.Observation) -> v.Observation:
    """Return outputs sorted by request: a loop has its rows in running order."""
    assert isinstance(outputs, v.Outputs)
    return v.Outputs(tuple(sorted(outputs.rows, key=lambda row: row.request_id)))
