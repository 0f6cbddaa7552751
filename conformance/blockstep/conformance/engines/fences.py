"""Fences: a loop without a host, held to the specification each time it lets the host look.

Between two fences nobody sees a state. At a fence the loop tells what it was given and what each of
its steps planned, ran and sampled; the specification goes the same way, and must stand where the
loop stands: the same rows of each plan, and the same state to the block id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blockstep.conformance.engines.serving import CheckFailedError
from blockstep.conformance.protocol.compare import snapshot_differences
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.spec import vocabulary as v
from blockstep.spec.oracle import Oracle


class RowTold(Protocol):
    """A request in a step."""

    @property
    def request_id(self) -> v.RequestId:
        """Its name."""
        ...

    @property
    def num_tokens(self) -> int:
        """What it ran."""
        ...

    @property
    def sampled(self) -> v.TokenIds:
        """What was committed."""
        ...


class StepTold(Protocol):
    """A step: planned, run and committed by the loop itself."""

    @property
    def frame_id(self) -> v.FrameId:
        """Its plan."""
        ...

    @property
    def rows(self) -> Sequence[RowTold]:
        """In the order of the plan."""
        ...


class FenceChecker:
    """Looks at every fence of one run.

    Raises:
        CheckFailedError: from `fence`, at the first thing that is wrong.
    """

    def __init__(self, config: v.Config) -> None:
        self.oracle = Oracle(config)
        self.num_events = 0
        self.num_fences = 0

    def fence(self, told: Sequence[v.Submit | v.Abort | StepTold], snapshot: v.Snapshot) -> None:
        """Go the same way, and compare where it led."""
        for one in told:
            if isinstance(one, v.Submit | v.Abort):
                self.num_events += 1
                self.oracle.apply(one)
            else:
                self._step(one)
        self.num_fences += 1
        differences = snapshot_differences(self.oracle.snapshot(), snapshot)
        if differences:
            self._complain("the state at a fence", differences)

    def _step(self, step: StepTold) -> None:
        plan = self.oracle.schedule()
        self.num_events += 1
        # A loop has its rows in running order, which a plan has not; states tell of that order.
        expected = sorted((row.request_id, row.num_scheduled_tokens) for row in plan.rows)
        seen = sorted((row.request_id, row.num_tokens) for row in step.rows)
        if (plan.frame_id, expected) != (step.frame_id, seen):
            names = f"rows of plan {plan.frame_id}", f"rows of plan {step.frame_id}"
            told = Difference("rows", f"{names[0]}: {expected}", f"{names[1]}: {seen}")
            self._complain("the plan of a step between two fences", (told,))
        if not step.rows:
            return
        sampled = {row.request_id: row.sampled for row in step.rows}
        rows = tuple(v.RowTokens(row.request_id, sampled[row.request_id]) for row in plan.rows)
        self.num_events += 1
        answer = self.oracle.apply(v.Commit(plan.frame_id, rows))
        if isinstance(answer, v.Rejected):
            told = Difference("sampled", answer.detail, str(rows))
            self._complain("what a step between two fences sampled", (told,))

    def _complain(self, what: str, differences: tuple[Difference, ...]) -> None:
        finding = Finding(FindingKind.DIVERGENCE, "", "engine_equals_spec", what, differences)
        raise CheckFailedError([finding], self.num_events)
