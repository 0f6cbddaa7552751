"""Sides: engines whose schedule and commit are timed.

The inputs of a side are prepared before the clock runs, and its decisions are read after it has
stopped. There are two readings: `arrays`, which a model runner consumes, and `materialised`, with
every object that vLLM builds in a step.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from blockstep.conformance.engine import (
    EXACT,
    BadEngineError,
    Equivalence,
    Safety,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.protocol.features import UsageError, find_lacking, get_missing
from blockstep.conformance.protocol.findings import describe_error
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v
from blockstep.spec.vocabulary import Config, Request

PILOT = "host"
"""The engine with which the workload is recorded. It returns arrays, as the engines that it is
compared with do: a plan of the protocol does not say how new and resumed rows mix."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of engines that are timed together.

    Exact engines are timed together, on a workload recorded with one engine of ours, and must make
    the same decisions. Any other engine is timed by itself: at `safety` it records the workload
    itself; at the equivalences in between it must decide as ours does, except for block ids.
    """

    pilot: str = PILOT
    """The engine with which the workload is recorded."""
    weaker: Equivalence | None = None
    """The equivalence of the one engine; None if all are exact."""

    @property
    def equivalence(self) -> str:
        """Name of the equivalence."""
        return EXACT if self.weaker is None else self.weaker.name

    @property
    def sees_blocks(self) -> bool:
        """Whether block ids are part of a decision."""
        return self.weaker is None or self.pilot != PILOT

    def fit_config(self, config: Config) -> Config:
        """Return the nearest config that the engines can take."""
        return config if self.weaker is None else self.weaker.fit_config(config)

    def fit_requests(self, requests: Iterable[Request], config: Config) -> Iterator[Request]:
        """Yield the nearest requests that the engines can take, without those that are declined."""
        if self.weaker is None:
            yield from requests
            return
        for request in requests:
            fitting = self.weaker.fit_request(request, config)
            if fitting is not None:
                yield fitting


ALL_EXACT = Terms()


def get_terms(engines: Sequence[str]) -> Terms:
    """Return the terms of engines that are timed together: all exact, or one alone.

    Raises:
        EngineNotFoundError: an engine cannot be loaded.
    """
    for name in engines:
        weaker = None if name == "vllm" else get_traits(load_engine(name)).equivalence
        if weaker is not None:
            assert len(engines) == 1, "engines that are not exact are timed by themselves"
            is_own = isinstance(weaker, Safety)
            return Terms(name if is_own else PILOT, weaker)
    return ALL_EXACT


def split(engines: Sequence[str]) -> list[tuple[str, ...]]:
    """Return groups of engines to be timed together: the exact ones, then each other one."""
    others = [name for name in engines if get_terms([name]).weaker is not None]
    exact = tuple(name for name in engines if name not in others)
    return [*([exact] if exact else []), *((name,) for name in others)]


def find_obstacle(engine: str, config: Config) -> str | None:
    """Return what an engine lacks for a config; None if nothing."""
    if engine == "vllm":
        return None
    lacking = find_lacking(get_capabilities(load_engine(engine)))
    missing = get_missing(config, lacking)
    return None if missing is None else str(missing)


class PlannedRow(NamedTuple):
    """The decision for one request in one step; a tuple, because millions are built."""

    request_id: v.RequestId
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...]
    num_drafts: int
    is_new: bool
    """Whether the row carries the whole request."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan in one form for all sides; rows are in scheduling order."""

    rows: tuple[PlannedRow, ...]
    preempted: tuple[v.RequestId, ...]
    finished: tuple[v.RequestId, ...]


Delivered: TypeAlias = tuple[tuple[v.RequestId, v.TokenIds, str | None], ...]
"""Outputs of a commit: request id, tokens, finish reason."""
Answer: TypeAlias = Sequence[tuple[v.RequestId, v.TokenIds]]
"""Tokens of requests, by id."""
Times: TypeAlias = tuple[float, ...]
"""Seconds, one for each reading."""


class SideError(RuntimeError):
    """A side cannot be timed: it raised, or returned a wrong type."""


class NotEqualError(SideError):
    """A side decided otherwise than the pilot, so their times cannot be compared."""


def ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call of an engine.

    Raises:
        SideError: the engine raised.
    """
    try:
        return call(*arguments)
    except (v.ConfigError, BadEngineError):
        raise
    except Exception as error:
        raise SideError(f"the engine raised {describe_error(error)}") from error


def time_call(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result of a call and its processor time in seconds.

    Other processes do not count. A scheduler never blocks, so on an idle machine this equals the
    wall time.
    """
    start = time.thread_time()
    result = ask(call, *arguments)
    seconds = time.thread_time() - start
    if isinstance(result, v.Rejected):
        raise NotEqualError(result)  # an earlier decision was another one
    return result, seconds


class TimedEngine:
    """A timed engine; this class takes any engine of the protocol. All times are seconds.

    Timed calls get prepared inputs and return results as they are; results are read later.
    """

    readings: tuple[str, ...] = ("protocol",)
    """Names of the times that `get_times` returns, in its order."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.ask: Callable[..., tuple[Any, float]] = time_call
        """Makes the calls of a step; the profiler wraps it."""
        self.frames: deque[Any] = deque()
        """Plans in flight, oldest first."""
        self.sees_blocks = True
        """Whether block ids are part of a decision."""
        self._digest = hashlib.sha256()

    def submit(self, request: v.Request) -> bool:
        """Submit a request; return whether it was accepted. Not timed."""
        return isinstance(ask(self.engine.apply, v.Submit(request)), v.Ack)

    def propose(self, drafts: Answer) -> None:
        """Propose drafts for the next step. Not timed."""
        ask(self.engine.apply, v.Drafts(tuple(v.RowTokens(*row) for row in drafts)))

    def prepare(self, answer: Answer) -> Any:
        """Return the argument of `commit` for the tokens of each row, in scheduling order."""
        return tuple(v.RowTokens(*row) for row in answer)

    def schedule(self) -> tuple[Any, float]:
        """Plan a step; return the plan and its time."""
        return self.ask(self.engine.apply, v.Schedule())

    def commit(self, prepared: Any) -> tuple[Any, float]:
        """Commit the oldest plan; return the outputs and their time."""
        return self.ask(self.engine.apply, v.Commit(self.frames.popleft().frame_id, prepared))

    def get_times(self, _result: Any, seconds: float) -> Times:
        """Return the time of a step in each reading; `seconds` is the time of its call."""
        return (seconds,)

    def read_plan(self, plan: Any) -> Decision:
        """Return the decision in a plan: running rows, new rows, resumed rows."""
        if not isinstance(plan, v.Plan):
            raise SideError(f"a Schedule was answered with {type(plan).__name__}")
        running = (row for row in plan.cached if not row.resumed)
        resumed = (row for row in plan.cached if row.resumed)
        given: tuple[v.NewRow | v.CachedRow, ...] = (*running, *plan.new, *resumed)
        rows = tuple(map(_read_row, given))
        return Decision(rows, plan.preempted_req_ids, plan.finished_req_ids)

    def read_outputs(self, outputs: Any) -> Delivered:
        """Return the rows that `commit` delivered."""
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
        outputs = sorted(delivered, key=lambda row: row[0])
        self._digest.update(repr((rows, decision.preempted, decision.finished, outputs)).encode())
        return self._digest.hexdigest()


def read_rows(rows: Iterable[Any]) -> Delivered:
    """Return ids, tokens and finish reasons of output rows, ours or vLLM's."""
    pairs = [(row, None if row.finish_reason is None else str(row.finish_reason)) for row in rows]
    return tuple((row.request_id, tuple(row.new_token_ids), reason) for row, reason in pairs)


def _read_row(row: v.NewRow | v.CachedRow) -> PlannedRow:
    if isinstance(row, v.NewRow):
        groups, num_drafts, is_new = row.block_ids, 0, True
    else:
        groups, num_drafts, is_new = row.new_block_ids, len(row.draft_token_ids), False
    blocks = tuple(block for group in groups for block in group)
    computed, scheduled = row.num_computed_tokens, row.num_scheduled_tokens
    return PlannedRow(row.request_id, computed, scheduled, blocks, num_drafts, is_new)


class ArraySide(TimedEngine):
    """An engine that plans and takes answers as arrays (`blockstep.impl.array_plans`)."""

    readings: tuple[str, ...] = ("arrays", "materialised")

    def prepare(self, answer: Answer) -> Any:
        """See `TimedEngine`. Counts are passed only if the config has drafts."""
        flat = np.array([token for _, tokens in answer for token in tokens], np.int32)
        counts = np.array([len(tokens) for _, tokens in answer], np.int32)
        return flat, counts if self.engine.config.num_speculative_tokens else None

    def schedule(self) -> tuple[Any, float]:
        """See `TimedEngine`."""
        return self.ask(self.engine.schedule_arrays)

    def commit(self, prepared: Any) -> tuple[Any, float]:
        """See `TimedEngine`."""
        return self.ask(self.engine.commit_arrays, self.frames.popleft().frame_id, *prepared)

    def get_times(self, result: Any, seconds: float) -> Times:
        """See `TimedEngine`."""
        return (seconds, seconds + time_call(result.build_objects)[1])

    def read_plan(self, plan: Any) -> Decision:
        """See `TimedEngine`."""
        computed, scheduled = plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist()
        tables, drafts = plan.tables_of, plan.draft_token_ids
        rows = []
        for row, name in enumerate(plan.request_ids):
            blocks = tuple([block for table in tables.get(row, ()) for block in table])
            numbers = computed[row], scheduled[row], blocks, len(drafts.get(row, ()))
            rows.append(PlannedRow(name, *numbers, row in plan.new_rows))
        finished = tuple(sorted(plan.finished_req_ids))
        return Decision(tuple(rows), plan.preempted_req_ids, finished)

    def read_outputs(self, outputs: Any) -> Delivered:
        """See `TimedEngine`."""
        return super().read_outputs(outputs.build_outputs())


def open_side(name: str, config: v.Config, through_apply: bool = False) -> TimedEngine:
    """Return the side of an engine: vLLM's own scheduler for `vllm`, else arrays if it has them.

    With `through_apply`, an engine with arrays is called through `apply` all the same.

    Raises:
        SideError: the engine raised while it was built.
        UsageError: the engine would be timed in a slow mode; `slow_because` says why.
        EngineNotFoundError: the engine cannot be loaded.
    """
    if name == "vllm":
        return cast(
            "TimedEngine", load_engine("blockstep.conformance.bench.vllm_side:VllmSide")(config)
        )
    make_engine = load_engine(name)
    if slow_because := getattr(make_engine, "slow_because", ""):
        raise UsageError(f"engine {name!r} is not measured: {slow_because}")
    engine = ask(make_engine, config)
    has_arrays = hasattr(engine, "schedule_arrays") and not through_apply
    return ArraySide(engine) if has_arrays else TimedEngine(engine)
