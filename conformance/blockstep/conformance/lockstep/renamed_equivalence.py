"""Renamed: the equivalence of an engine with other block ids and otherwise equal decisions.

Answers and states are compared with the specification's as at `exact`, once the engine's block ids
are renamed to the spec's (`protocol.renaming`). Then the shared blocks, the numbers of held and
free blocks, and the keys of cached blocks are equal; the order of the free queue may differ. If
another block is evicted because of that order, its key is missing in one state, and the states
differ.

The bijection is computed again for each state. The worker checks that ids keep their meaning from
one step to the next: it plays the engine's own plans with the engine's own ids.

    class Adapter:
        traits = EngineTraits(equivalence=Renamed())
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blockstep.conformance.judge.checks import Asked, check_step
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.scoped_run import ScopedRun
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.renaming import (
    TablePairs,
    rename_snapshot,
    sort_free_queue,
)
from blockstep.spec import vocabulary as v


@dataclass(slots=True, kw_only=True)
class RenamedRun(ScopedRun):
    """One run of one engine, compared up to the ids of its blocks. Not reusable."""

    tables: TablePairs = field(default_factory=TablePairs)

    def _diverge(
        self, event: v.Event, expected: v.Observation, seen: object, after: v.Snapshot | None
    ) -> list[Finding]:
        if isinstance(expected, v.Plan) and isinstance(seen, v.Plan):
            seen = self.tables.take_read(seen)
            # No plan shows a freed window, a failed load, or a session whose blocks were reclaimed.
            requests = self.spec.snapshot().requests
            self.tables.let_go({it.request_id: it.block_tables for it in requests})
            self.loads.take(expected, seen)
            seen = self.tables.take(expected, seen)
        if after is not None:
            after = rename_snapshot(self.spec.snapshot(), after)
        return LockStep._diverge(self, event, expected, seen, after)

    def _check_step(self, step: Step, asked: Asked = Asked.ALL) -> list[Finding]:
        """Check a step as `LockStep` does, without the checks that quote the order of the free
        queue."""
        before, after = sort_free_queue(step.before), sort_free_queue(step.after)
        unordered = replace(step, before=before, after=after)
        return check_step(unordered, self.history, self.worker, is_renamed=True, asked=asked)

    def follow(self, event: v.Event, observation: v.Observation) -> None:
        """Update with one event and its answer: a request without blocks has no table.

        An idle session keeps its blocks.
        """
        LockStep.follow(self, event, observation)
        self.tables.drop([name for name in self.tables.of if name not in self.live])
        match event, observation:
            case v.Reset(reset_running_requests=True), v.ResetDone(success=True):
                self.tables.drop(list(self.tables.of))
            case v.Fork(request_id=parent, child_id=child), v.Ack():
                held = [it for it in self.spec.snapshot().requests if it.request_id == child]
                self.tables.fork(parent, child, held[0].block_tables)
