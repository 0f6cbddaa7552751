"""Sides: one engine each, and how long its schedule and its commit take.

A side is handed what it needs before the clock runs, and is asked what it decided after it has
stopped. There are two readings: `arrays`, what a model runner consumes, and `materialised`, every
object that vLLM builds in a step.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from blockstep.conformance.engine import BadEngineError
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.findings import tell_error
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v


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


class SideError(RuntimeError):
    """What a side did cannot be timed."""


class NotEqualError(SideError):
    """A side decided something else than the pilot, so their times cannot be compared."""


def ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call of an engine gives.

    Raises:
        SideError: it raised.
    """
    try:
        return call(*arguments)
    except (v.ConfigError, BadEngineError):
        raise
    except Exception as error:
        raise SideError(f"the engine raised {tell_error(error)}") from error


def time_call(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a call gives, and seconds of processor time: what else the machine does is not counted.

    A scheduler waits for nothing, so on an idle machine it is the time by the wall.
    """
    start = time.thread_time()
    result = ask(call, *arguments)
    seconds = time.thread_time() - start
    if isinstance(result, v.Rejected):
        raise NotEqualError(result)  # it has decided something else before
    return result, seconds


class Side:
    """An engine under the clock; here any, on the events of the protocol. All times are seconds.

    What is timed gets what it needs ready made, and leaves what it gives as it is; what that says
    is asked for later.
    """

    readings: tuple[str, ...] = ("protocol",)
    """Names of what `get_times` gives, in its order."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.ask: Callable[..., tuple[Any, float]] = time_call
        """What makes the calls of a step."""
        self.frames: deque[Any] = deque()
        """Plans in flight, oldest first."""
        self.sees_blocks = True
        """Whether the ids of blocks are part of what was decided."""
        self._digest = hashlib.sha256()

    def submit(self, request: v.Request) -> bool:
        """Give it a request, and say whether it was taken; not timed."""
        return isinstance(ask(self.engine.apply, v.Submit(request)), v.Ack)

    def propose(self, drafts: Answer) -> None:
        """Hand drafts in for the next step; not timed."""
        ask(self.engine.apply, v.Drafts(tuple(v.RowTokens(*row) for row in drafts)))

    def prepare(self, answer: Answer) -> Any:
        """What `commit` takes, of the tokens of each row in the order of scheduling."""
        return tuple(v.RowTokens(*row) for row in answer)

    def schedule(self) -> tuple[Any, float]:
        """Plan a step: the plan, and its seconds."""
        return self.ask(self.engine.apply, v.Schedule())

    def commit(self, prepared: Any) -> tuple[Any, float]:
        """Answer the oldest plan: the outputs, and their seconds."""
        return self.ask(self.engine.apply, v.Commit(self.frames.popleft().frame_id, prepared))

    def get_times(self, _result: Any, seconds: float) -> Times:
        """Those of a step in each reading, if it took so many seconds to get its result."""
        return (seconds,)

    def read_plan(self, plan: Any) -> Decision:
        """What `schedule` decided. New rows and resumed ones are told apart in a plan."""
        if not isinstance(plan, v.Plan):
            raise SideError(f"a Schedule was answered with {type(plan).__name__}")
        running = (row for row in plan.cached if not row.resumed)
        resumed = (row for row in plan.cached if row.resumed)
        given: tuple[v.NewRow | v.CachedRow, ...] = (*running, *plan.new, *resumed)
        rows = tuple(map(_read_row, given))
        return Decision(rows, plan.preempted_req_ids, plan.finished_req_ids)

    def read_outputs(self, outputs: Any) -> Delivered:
        """What `commit` delivered."""
        if not isinstance(outputs, v.Outputs):
            raise SideError(f"a Commit was answered with {type(outputs).__name__}")
        return read_rows(outputs.rows)

    def note(self, decision: Decision, delivered: Delivered) -> str:
        """The digest of all that was decided and delivered, with this step.

        By id: a plan of the protocol does not say how new and resumed rows mix.
        """
        rows = sorted(decision.rows, key=lambda row: row.request_id)
        if not self.sees_blocks:
            rows = [row._replace(new_block_ids=()) for row in rows]
        told = sorted(delivered, key=lambda row: row[0])
        self._digest.update(repr((rows, decision.preempted, decision.finished, told)).encode())
        return self._digest.hexdigest()


def read_rows(rows: Iterable[Any]) -> Delivered:
    """What rows of outputs say, ours or those of vLLM."""
    told = [(row, None if row.finish_reason is None else str(row.finish_reason)) for row in rows]
    return tuple((row.request_id, tuple(row.new_token_ids), reason) for row, reason in told)


def _read_row(row: v.NewRow | v.CachedRow) -> PlannedRow:
    if isinstance(row, v.NewRow):
        groups, num_drafts, is_new = row.block_ids, 0, True
    else:
        groups, num_drafts, is_new = row.new_block_ids, len(row.draft_token_ids), False
    blocks = tuple(block for group in groups for block in group)
    computed, scheduled = row.num_computed_tokens, row.num_scheduled_tokens
    return PlannedRow(row.request_id, computed, scheduled, blocks, num_drafts, is_new)


class ArraySide(Side):
    """An engine that plans and takes answers as arrays (`blockstep.impl.arrays`)."""

    readings: tuple[str, ...] = ("arrays", "materialised")

    def prepare(self, answer: Answer) -> Any:
        """See `Side`. Counts are needed only if some row carries drafts; they never do harm."""
        flat = np.array([token for _, tokens in answer for token in tokens], np.int32)
        counts = np.array([len(tokens) for _, tokens in answer], np.int32)
        return flat, counts if self.engine.config.num_speculative_tokens else None

    def schedule(self) -> tuple[Any, float]:
        """See `Side`."""
        return self.ask(self.engine.schedule_arrays)

    def commit(self, prepared: Any) -> tuple[Any, float]:
        """See `Side`."""
        return self.ask(self.engine.commit_arrays, self.frames.popleft().frame_id, *prepared)

    def get_times(self, result: Any, seconds: float) -> Times:
        """See `Side`."""
        return (seconds, seconds + time_call(result.build_objects)[1])

    def read_plan(self, plan: Any) -> Decision:
        """See `Side`."""
        computed, scheduled = plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist()
        blocks, drafts = plan.blocks_of, plan.draft_token_ids
        rows = []
        for row, name in enumerate(plan.request_ids):
            numbers = computed[row], scheduled[row], blocks.get(row, ()), len(drafts.get(row, ()))
            rows.append(PlannedRow(name, *numbers, row in plan.new_rows))
        return Decision(tuple(rows), plan.preempted_req_ids, plan.finished_req_ids)

    def read_outputs(self, outputs: Any) -> Delivered:
        """See `Side`."""
        return super().read_outputs(outputs.build_outputs())


def open_side(name: str, config: v.Config) -> Side:
    """The side of an engine by name: vLLM's own scheduler for `vllm`, else by what it can do.

    Raises:
        SideError: it raised while it was built.
        UsageError: the engine runs here as nobody should run it; `slow_because` says why.
        EngineNotFoundError: it cannot be loaded.
    """
    if name == "vllm":
        return cast("Side", load_engine("blockstep.conformance.bench.vllm_side:VllmSide")(config))
    make_engine = load_engine(name)
    if slow_because := getattr(make_engine, "slow_because", ""):
        raise UsageError(f"engine {name!r} is not measured: {slow_because}")
    engine = ask(make_engine, config)
    return ArraySide(engine) if hasattr(engine, "schedule_arrays") else Side(engine)
