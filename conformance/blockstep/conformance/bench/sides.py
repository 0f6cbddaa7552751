"""Sides: one engine each, and how long its schedule and its commit take.

A side is handed what it needs before the clock runs, and is asked what it decided after it has
stopped. There are two readings: `arrays`, what a model runner consumes, and `materialised`, every
object that vLLM builds in a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from blockstep.conformance.engine import Engine
from blockstep.spec.vocabulary import (
    Ack,
    BlockTables,
    CachedRow,
    Commit,
    Drafts,
    NewRow,
    Outputs,
    Plan,
    Request,
    RequestId,
    RowTokens,
    Schedule,
    Submit,
    TokenIds,
)

clock: Final = time.thread_time
"""Processor time of this thread, in seconds: what else the machine does meanwhile is not counted.
A scheduler waits for nothing, so on an idle machine it is the time by the wall."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """What was decided for one request in one step."""

    request_id: RequestId
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...]
    num_drafts: int
    is_new: bool
    """It is sent with everything about it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, in the same words for every side; rows in the order of scheduling."""

    rows: tuple[PlannedRow, ...]
    preempted: tuple[RequestId, ...]
    finished: tuple[RequestId, ...]


Delivered: TypeAlias = tuple[tuple[RequestId, TokenIds, str | None], ...]
"""What a commit delivered: id, tokens, why it ended."""


class Side(Protocol):
    """An engine under the clock. All times are seconds."""

    readings: tuple[str, ...]
    """Names of the times that `schedule` and `commit` give, in their order."""

    def submit(self, request: Request) -> None:
        """Take a request; not timed."""
        ...

    def schedule(self) -> tuple[tuple[float, ...], Decision]:
        """Plan a step, by the clock; then say what was decided."""
        ...

    def commit(self, tokens: Sequence[TokenIds]) -> tuple[tuple[float, ...], Delivered]:
        """Answer the oldest plan, row by row in its order, by the clock; then say what it gave."""
        ...

    def propose(self, drafts: Sequence[tuple[RequestId, TokenIds]]) -> None:
        """Hand drafts in for the next step; not timed."""
        ...


class ProtocolSide:
    """Any engine, timed on the events of the protocol: plans and outputs of the vocabulary."""

    readings: tuple[str, ...] = ("protocol",)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: list[tuple[int, tuple[RequestId, ...]]] = []

    def submit(self, request: Request) -> None:
        """See `Side`."""
        answer = self.engine.apply(Submit(request))
        if not isinstance(answer, Ack):
            raise RuntimeError(f"the scenario is broken: {request.request_id} is refused: {answer}")

    def schedule(self) -> tuple[tuple[float, ...], Decision]:
        """See `Side`."""
        event = Schedule()
        start = clock()
        plan = self.engine.apply(event)
        seconds = clock() - start
        assert isinstance(plan, Plan), plan
        decision = _decision_of(plan)
        if decision.rows:
            self._orders.append((plan.frame_id, tuple(row.request_id for row in decision.rows)))
        return (seconds,), decision

    def commit(self, tokens: Sequence[TokenIds]) -> tuple[tuple[float, ...], Delivered]:
        """See `Side`."""
        frame_id, names = self._orders.pop(0)
        event = Commit(frame_id, tuple(map(RowTokens, names, tokens)))
        start = clock()
        outputs = self.engine.apply(event)
        seconds = clock() - start
        assert isinstance(outputs, Outputs), outputs
        return (seconds,), _delivered_of(outputs)

    def propose(self, drafts: Sequence[tuple[RequestId, TokenIds]]) -> None:
        """See `Side`."""
        self.engine.apply(Drafts(tuple(RowTokens(*row) for row in drafts)))


class ArraySide(ProtocolSide):
    """An engine that plans and takes answers as arrays (`blockstep.impl.host.arrays`)."""

    readings: tuple[str, ...] = ("arrays", "materialised")

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.arrays = engine
        self._plans: list[Any] = []

    def schedule(self) -> tuple[tuple[float, ...], Decision]:
        """See `Side`."""
        start = clock()
        plan = self.arrays.schedule_arrays()
        planned = clock()
        objects = plan.build_objects()
        built = clock()
        del objects
        if len(plan):
            self._plans.append(plan)
        names = plan.request_ids
        blocks: list[list[int]] = [[] for _ in names]
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            blocks[row].append(block)
        fresh = set(plan.new_rows)
        rows = tuple(
            PlannedRow(name, computed, scheduled, tuple(ids), len(drafts), row in fresh)
            for row, (name, computed, scheduled, ids, drafts) in enumerate(
                zip(
                    names,
                    plan.num_computed_tokens.tolist(),
                    plan.num_scheduled_tokens.tolist(),
                    blocks,
                    (plan.draft_token_ids.get(row, ()) for row in range(len(names))),
                    strict=True,
                )
            )
        )
        decision = Decision(rows, plan.preempted_req_ids, plan.finished_req_ids)
        return (planned - start, built - start), decision

    def commit(self, tokens: Sequence[TokenIds]) -> tuple[tuple[float, ...], Delivered]:
        """See `Side`."""
        plan = self._plans.pop(0)
        token_ids, counts = plan.pack_answer(tokens)
        start = clock()
        outputs = self.arrays.commit_arrays(plan.frame_id, token_ids, counts)
        done = clock()
        objects = outputs.build_objects()
        built = clock()
        del objects
        return (done - start, built - start), _delivered_of(outputs.build_outputs())


def make_side(engine: Any) -> Side:
    """The side that suits an engine: what it says of itself, or the protocol."""
    if hasattr(engine, "schedule_arrays"):
        return ArraySide(engine)
    return ProtocolSide(engine)


def _decision_of(plan: Plan) -> Decision:
    """New rows and resumed ones are told apart in a plan; both stand in order of admission."""
    running = [row for row in plan.cached if not row.resumed]
    resumed = [row for row in plan.cached if row.resumed]
    ordered: list[NewRow | CachedRow] = [*running, *plan.new, *resumed]
    rows = [
        PlannedRow(
            row.request_id,
            row.num_computed_tokens,
            row.num_scheduled_tokens,
            tuple(block for group in _blocks_of(row) for block in group),
            len(row.draft_token_ids) if isinstance(row, CachedRow) else 0,
            not isinstance(row, CachedRow),
        )
        for row in ordered
    ]
    return Decision(tuple(rows), plan.preempted_req_ids, plan.finished_req_ids)


def _blocks_of(row: NewRow | CachedRow) -> BlockTables:
    return row.new_block_ids if isinstance(row, CachedRow) else row.block_ids


def _delivered_of(outputs: Outputs) -> Delivered:
    return tuple(
        (row.request_id, row.new_token_ids, row.finish_reason and str(row.finish_reason))
        for row in outputs.rows
    )
