"""Meter: vLLM's metrics as samples, computed from each step of an engine.

A sample increases a counter, is observed by a histogram, or is shown by a gauge from then on.
Samples follow from events, observations and states, and from the caller's clock. Names are vLLM's
without the prefix `vllm:`. `kv_cache_pinned_perc` (the share of the pool that only pins hold) and
the reasons why requests wait are ours. Source: vLLM 0.19.1 `v1/metrics/loggers.py`, `stats.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from blockstep.impl.chunks import append_chunk
from blockstep.impl.serving.waiting import count_waiting, explain_waiting
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    Abort,
    Aborted,
    Ack,
    Commit,
    Config,
    Event,
    FinishReason,
    Fork,
    GrammarFailed,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    Request,
    RequestId,
    Snapshot,
    Status,
    StreamingUpdate,
    Submit,
    TransfersReported,
)


class Kind(StrEnum):
    """Kind of metric that a sample belongs to."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric."""

    kind: Kind
    name: str
    value: float
    label: tuple[str, str] | None = None
    """Name and value of a label."""


@dataclass(slots=True)
class _Life:
    """Data of an unfinished request; times are seconds of the caller's clock."""

    request: Request
    queued: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_outputs: int = 0
    is_branch: bool = False
    """Whether the request is a fork; its prompt was counted with the parent."""
    num_local: int | None = None
    """Tokens of the local hit, if a store loaded more after it; else None."""
    chunks: deque[Request] = field(default_factory=deque)
    """Inputs of a session that wait for its next stop."""


class Meter:
    """Turns each step of one engine into samples. It has no clock and no lock."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lives: dict[RequestId, _Life] = {}

    def observe(
        self, before: Snapshot, event: Event, seen: Observation, after: Snapshot, now: float
    ) -> list[Sample]:
        """Return the samples of an event, its observation, and the states before and after.

        `now` is in seconds, of a monotonic clock.
        """
        samples = [*self._follow(event, seen, after, now), *_count(before, after)]
        self._remember(before, event, seen, after)
        return [*samples, *self._gauge(after)]

    def explain(self, after: Snapshot) -> list[Sample]:
        """Return the number of waiting requests for each reason, in the state observed last.

        It looks up every waiting request: call it when metrics are read, not at every event.
        """
        requests = {name: life.request for name, life in self._lives.items()}
        counts = count_waiting(explain_waiting(self._config, after, requests))
        return [
            Sample(Kind.GAUGE, "num_requests_waiting_by_reason", count, ("reason", str(reason)))
            for reason, count in counts.items()
        ]

    def _remember(self, before: Snapshot, event: Event, seen: Observation, after: Snapshot) -> None:
        """Record data of requests that later states do not show."""
        match event, seen:
            case StreamingUpdate(request=chunk), Ack() if chunk.request_id in self._lives:
                self._lives[chunk.request_id].chunks.append(chunk)
            case ((Commit(transfers=transfers) | TransfersReported(transfers)), Outputs()) if (
                transfers.invalid_block_ids
            ):
                for request in after.requests:
                    life = self._lives.get(request.request_id)
                    if life is not None and not request.num_computed_tokens:
                        life.num_local = None
            case _, Plan(kv_loads=loads):
                for load in loads:
                    life = self._lives.get(load.request_id)
                    if life is not None and life.first_token is None:
                        life.num_local = load.num_computed_tokens
        for name in [name for name, life in self._lives.items() if life.chunks]:
            self._go_on(name, before, seen, after)

    def _go_on(self, name: RequestId, before: Snapshot, seen: Observation, after: Snapshot) -> None:
        """Append the next input of a session, after all of its tokens except the last."""
        was, now, life = before.request(name), after.request(name), self._lives[name]
        if was is None or now is None or now.status is Status.WAITING_FOR_STREAMING_REQ:
            return
        rows = seen.rows if isinstance(seen, Outputs) else ()
        own = [row for row in rows if row.request_id == name]
        is_resting = was.status is Status.WAITING_FOR_STREAMING_REQ
        if is_resting or any(row.finish_reason is not None for row in own):
            new = [token for row in own for token in row.new_token_ids]
            kept = (*life.request.prompt_token_ids, *was.output_token_ids, *new)[:-1]
            life.request = append_chunk(life.request, kept, life.chunks.popleft())

    def _follow(
        self, event: Event, seen: Observation, after: Snapshot, now: float
    ) -> Iterator[Sample]:
        match event, seen:
            case Submit(request=request), Ack():
                self._lives[request.request_id] = _Life(request, now)
            case Fork(request_id=parent, child_id=name), Ack() if parent in self._lives:
                request = replace(self._lives[parent].request, request_id=name)
                self._lives[name] = _Life(request, now, is_branch=True)
            case _, Plan() as plan:
                for row in plan.rows:
                    life = self._lives.get(row.request_id)
                    if life is not None and life.scheduled is None:
                        life.scheduled = now
            case GrammarFailed(), Outputs(rows=rows):
                for output in rows:
                    yield from self._end(output.request_id, output.finish_reason, now)
            case _, Outputs(rows=rows):
                yield from self._deliver(rows, after, now)
            case Abort(), Aborted(request_ids=names, ending_req_ids=ending):
                for name in (*names, *ending):
                    yield from self._end(name, FinishReason.ABORT, now)
            case _, Aborted(request_ids=names):  # an idle session ends
                for name in names:
                    yield from self._end(name, FinishReason.STOP, now)

    def _deliver(
        self, rows: tuple[OutputRow, ...], after: Snapshot, now: float
    ) -> Iterator[Sample]:
        """Yield the samples of a commit; an iteration counts tokens of prompts and of outputs."""
        num_prompt = num_new = 0
        for row in rows:
            life = self._lives.get(row.request_id)
            if life is None:
                continue
            if row.new_token_ids:
                if life.first_token is None and not life.is_branch:
                    num_prompt += len(life.request.prompt_token_ids)
                yield from _take_tokens(life, row, now)
                num_new += len(row.new_token_ids)
            has_ended = row.finish_reason is not None and after.request(row.request_id) is None
            if has_ended:  # a session that stops becomes idle
                yield from self._end(row.request_id, row.finish_reason, now)
        if num_new:
            yield Sample(Kind.COUNTER, "generation_tokens", num_new)
            yield Sample(Kind.HISTOGRAM, "iteration_tokens_total", num_prompt + num_new)

    def _end(self, name: RequestId, reason: FinishReason | None, now: float) -> Iterator[Sample]:
        """Yield the samples of a finished request."""
        life = self._lives.pop(name, None)
        if life is None or reason is None:
            return
        yield Sample(Kind.COUNTER, "request_success", 1, ("finished_reason", str(reason)))
        begun, first, last = life.scheduled, life.first_token, life.last_token
        times = {"e2e_request_latency_seconds": now - life.queued}
        if begun is not None:
            times["request_queue_time_seconds"] = begun - life.queued
        if begun is not None and first is not None and last is not None:
            times["request_prefill_time_seconds"] = first - begun
            times["request_decode_time_seconds"] = last - first
            times["request_inference_time_seconds"] = last - begun
            between = (last - first) / (life.num_outputs - 1) if life.num_outputs > 1 else 0.0
            times["request_time_per_output_token_seconds"] = between
        sizes = {
            "request_prompt_tokens": len(life.request.prompt_token_ids),
            "request_generation_tokens": life.num_outputs,
            "request_params_max_tokens": life.request.max_tokens,
        }
        for metric, value in {**times, **sizes}.items():
            yield Sample(Kind.HISTOGRAM, metric, value)

    def _gauge(self, after: Snapshot) -> Iterator[Sample]:
        """Yield the gauges of a state."""
        num_waiting = len(after.waiting) + len(after.skipped_waiting)
        usable = self._config.num_usable_blocks
        yield Sample(Kind.GAUGE, "num_requests_running", len(after.running))
        yield Sample(Kind.GAUGE, "num_requests_waiting", num_waiting)
        yield Sample(Kind.GAUGE, "kv_cache_usage_perc", 1 - len(after.free_queue) / usable)
        if after.pins is not None:
            yield Sample(Kind.GAUGE, "kv_cache_pinned_perc", _count_pinned(after) / usable)


def _count_pinned(after: Snapshot) -> int:
    """Return the number of blocks that only pins hold."""
    pins = () if after.pins is None else after.pins.pins
    holds = Counter(block for pin in pins for table in pin.block_tables for block in table)
    return sum(
        after.ref_counts[block] == count for block, count in holds.items() if block != NULL_BLOCK
    )


def _take_tokens(life: _Life, row: OutputRow, now: float) -> Iterator[Sample]:
    """Yield the samples of a row with new tokens."""
    if life.first_token is None:
        if not life.is_branch:
            yield from _count_prompt(life, row.num_cached_tokens)
        yield Sample(Kind.HISTOGRAM, "time_to_first_token_seconds", now - life.queued)
        life.first_token = now
    elif life.last_token is not None:
        yield Sample(Kind.HISTOGRAM, "inter_token_latency_seconds", now - life.last_token)
    life.last_token = now
    life.num_outputs += len(row.new_token_ids)


def _count_prompt(life: _Life, num_cached: int) -> Iterator[Sample]:
    """Yield the tokens of a prompt by their source."""
    num_prompt = len(life.request.prompt_token_ids)
    num_local = num_cached if life.num_local is None else min(life.num_local, num_cached)
    yield Sample(Kind.COUNTER, "prompt_tokens", num_prompt)
    yield Sample(Kind.COUNTER, "prompt_tokens_cached", num_cached)
    for source, count in (
        ("local_compute", num_prompt - num_cached),
        ("local_cache_hit", num_local),
        ("external_kv_transfer", num_cached - num_local),
    ):
        yield Sample(Kind.COUNTER, "prompt_tokens_by_source", count, ("source", source))


def _count(before: Snapshot, after: Snapshot) -> Iterator[Sample]:
    """Yield the growth of the engine's own counters."""
    for metric, counter in (
        ("prefix_cache_queries", "prefix_cache_queries"),
        ("prefix_cache_hits", "prefix_cache_hits"),
        ("external_prefix_cache_queries", "external_prefix_cache_queries"),
        ("external_prefix_cache_hits", "external_prefix_cache_hits"),
        ("num_preemptions", "preemptions"),
    ):
        grown = getattr(after.stats, counter) - getattr(before.stats, counter)
        if grown:
            yield Sample(Kind.COUNTER, metric, grown)
