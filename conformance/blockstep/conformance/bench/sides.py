"""Sides: one engine each, and how long its schedule and its commit take.

A side is handed what it needs before the clock runs, and is asked what it decided after it has
stopped. There are two readings: `arrays`, what a model runner consumes, and `materialised`, every
object that vLLM builds in a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from blockstep.conformance.engine import Engine
from blockstep.spec import vocabulary as v

clock: Final = time.thread_time
"""Processor time of this thread, in seconds: what else the machine does meanwhile is not counted.
A scheduler waits for nothing, so on an idle machine it is the time by the wall."""


class PlannedRow(NamedTuple):
    """What was decided for one request in one step; millions are built, so it is a tuple."""

    request_id: v.RequestId
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
    preempted: tuple[v.RequestId, ...]
    finished: tuple[v.RequestId, ...]


Delivered: TypeAlias = tuple[tuple[v.RequestId, v.TokenIds, str | None], ...]
"""What a commit delivered: id, tokens, why it ended."""
Answer: TypeAlias = Sequence[tuple[v.RequestId, v.TokenIds]]
"""Tokens of requests, by id."""
Times: TypeAlias = tuple[float, ...]
"""Seconds, one for each reading."""


class OffTrackError(RuntimeError):
    """An engine refused what others took, so it has decided something else before."""


class Side(Protocol):
    """An engine under the clock. All times are seconds.

    What is timed gets what it needs ready made, and leaves what it gives as it is; what that says
    is asked for later.
    """

    readings: tuple[str, ...]
    """Names of the times that `schedule` and `commit` give, in their order."""

    def submit(self, request: v.Request) -> None:
        """Take a request; not timed."""
        ...

    def propose(self, drafts: Answer) -> None:
        """Hand drafts in for the next step; not timed."""
        ...

    def prepare(self, answer: Answer) -> Any:
        """What `commit` takes, of the tokens of each row in the order of scheduling."""
        ...

    def schedule(self) -> tuple[Times, Any]:
        """Plan a step, by the clock."""
        ...

    def commit(self, prepared: Any) -> tuple[Times, Any]:
        """Answer the oldest plan, by the clock."""
        ...

    def read_plan(self, plan: Any) -> Decision:
        """What `schedule` decided."""
        ...

    def read_outputs(self, outputs: Any) -> Delivered:
        """What `commit` delivered."""
        ...


class ProtocolSide:
    """Any engine, timed on the events of the protocol: plans and outputs of the vocabulary."""

    readings: tuple[str, ...] = ("protocol",)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._frame_ids: deque[int] = deque()

    def submit(self, request: v.Request) -> None:
        """See `Side`."""
        answer = self.engine.apply(v.Submit(request))
        if not isinstance(answer, v.Ack):
            raise RuntimeError(f"the scenario is broken: {request.request_id} is refused: {answer}")

    def propose(self, drafts: Answer) -> None:
        """See `Side`."""
        self.engine.apply(v.Drafts(tuple(v.RowTokens(*row) for row in drafts)))

    def prepare(self, answer: Answer) -> Any:
        """See `Side`."""
        return tuple(v.RowTokens(*row) for row in answer)

    def schedule(self) -> tuple[Times, Any]:
        """See `Side`."""
        event = v.Schedule()
        start = clock()
        plan = self.engine.apply(event)
        seconds = clock() - start
        if not isinstance(plan, v.Plan):
            raise OffTrackError(plan)
        if plan.new or plan.cached:
            self._frame_ids.append(plan.frame_id)
        return (seconds,), plan

    def commit(self, prepared: Any) -> tuple[Times, Any]:
        """See `Side`."""
        event = v.Commit(self._frame_ids.popleft(), prepared)
        start = clock()
        outputs = self.engine.apply(event)
        seconds = clock() - start
        if not isinstance(outputs, v.Outputs):
            raise OffTrackError(outputs)
        return (seconds,), outputs

    def read_plan(self, plan: Any) -> Decision:
        """See `Side`."""
        return _decision_of(plan)

    def read_outputs(self, outputs: Any) -> Delivered:
        """See `Side`."""
        return _delivered_of(outputs)


class ArraySide(ProtocolSide):
    """An engine that plans and takes answers as arrays (`blockstep.impl.arrays`)."""

    readings: tuple[str, ...] = ("arrays", "materialised")

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.arrays = engine

    def prepare(self, answer: Answer) -> Any:
        """See `Side`. Counts are needed only if some row carries drafts; they never do harm."""
        counts = [len(tokens) for _, tokens in answer]
        flat = np.array([token for _, tokens in answer for token in tokens], np.int32)
        has_drafts = self.arrays.config.num_speculative_tokens > 0
        return flat, np.array(counts, np.int32) if has_drafts else None

    def schedule(self) -> tuple[Times, Any]:
        """See `Side`."""
        start = clock()
        plan = self.arrays.schedule_arrays()
        planned = clock()
        if isinstance(plan, v.Rejected):
            raise OffTrackError(plan)
        objects = plan.build_objects()
        built = clock()
        del objects
        if len(plan):
            self._frame_ids.append(plan.frame_id)
        return (planned - start, built - start), plan

    def commit(self, prepared: Any) -> tuple[Times, Any]:
        """See `Side`."""
        frame_id = self._frame_ids.popleft()
        start = clock()
        outputs = self.arrays.commit_arrays(frame_id, *prepared)
        done = clock()
        if isinstance(outputs, v.Rejected):
            raise OffTrackError(outputs)
        objects = outputs.build_objects()
        built = clock()
        del objects
        return (done - start, built - start), outputs

    def read_plan(self, plan: Any) -> Decision:
        """See `Side`."""
        numbers = zip(
            plan.request_ids,
            plan.num_computed_tokens.tolist(),
            plan.num_scheduled_tokens.tolist(),
            strict=True,
        )
        rows = tuple(
            PlannedRow(
                name,
                computed,
                scheduled,
                plan.blocks_of.get(row, ()),
                len(plan.draft_token_ids.get(row, ())),
                row in plan.new_rows,
            )
            for row, (name, computed, scheduled) in enumerate(numbers)
        )
        return Decision(rows, plan.preempted_req_ids, plan.finished_req_ids)

    def read_outputs(self, outputs: Any) -> Delivered:
        """See `Side`."""
        return _delivered_of(outputs.build_outputs())


def make_side(engine: Any) -> Side:
    """The side that suits an engine: what it says of itself, or the protocol."""
    if hasattr(engine, "schedule_arrays"):
        return ArraySide(engine)
    return ProtocolSide(engine)


def _decision_of(plan: v.Plan) -> Decision:
    """New rows and resumed ones are told apart in a plan; both stand in order of admission."""
    running = [row for row in plan.cached if not row.resumed]
    resumed = [row for row in plan.cached if row.resumed]
    ordered: list[v.NewRow | v.CachedRow] = [*running, *plan.new, *resumed]
    rows = [
        PlannedRow(
            row.request_id,
            row.num_computed_tokens,
            row.num_scheduled_tokens,
            tuple(block for group in _blocks_of(row) for block in group),
            len(row.draft_token_ids) if isinstance(row, v.CachedRow) else 0,
            not isinstance(row, v.CachedRow),
        )
        for row in ordered
    ]
    return Decision(tuple(rows), plan.preempted_req_ids, plan.finished_req_ids)


def _blocks_of(row: v.NewRow | v.CachedRow) -> v.BlockTables:
    return row.new_block_ids if isinstance(row, v.CachedRow) else row.block_ids


def _delivered_of(outputs: v.Outputs) -> Delivered:
    return tuple(
        (row.request_id, row.new_token_ids, row.finish_reason and str(row.finish_reason))
        for row in outputs.rows
    )
