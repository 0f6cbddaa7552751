"""Meter: what vLLM's metrics say, as samples that follow from what happened.

A sample is added to a counter, observed by a histogram, or shown by a gauge from now on. All of it
follows from events, answers and states, and from the caller's clock. Names are vLLM's, without the
`vllm:` before them. Source: vLLM 0.19.1 `v1/metrics/loggers.py`, `stats.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from blockstep.impl.serving.waiting import count_waiting, explain_waiting
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Config,
    Event,
    FinishReason,
    GrammarFailed,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    Request,
    RequestId,
    Snapshot,
    Submit,
)


class Kind(StrEnum):
    """What a sample does."""

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
    """What is remembered of an unfinished request; times are seconds of the caller's clock."""

    request: Request
    queued: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_outputs: int = 0


class Meter:
    """Turns each step of one engine into samples. It holds no time and no lock of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lives: dict[RequestId, _Life] = {}

    def observe(
        self, before: Snapshot, event: Event, seen: Observation, after: Snapshot, now: float
    ) -> list[Sample]:
        """The samples of an event that was answered, with the states around it.

        `now`: seconds, by a clock that never goes back.
        """
        samples = [*self._follow(event, seen, now), *_count(before, after)]
        return [*samples, *self._gauge(after)]

    def _follow(self, event: Event, seen: Observation, now: float) -> Iterator[Sample]:
        match event, seen:
            case Submit(request=request), Ack():
                self._lives[request.request_id] = _Life(request, now)
            case _, Plan() as plan:
                for row in plan.rows:
                    life = self._lives.get(row.request_id)
                    if life is not None and life.scheduled is None:
                        life.scheduled = now
            case GrammarFailed(), Outputs(rows=rows):
                for output in rows:
                    yield from self._end(output.request_id, output.finish_reason, now)
            case _, Outputs(rows=rows):
                yield from self._deliver(rows, now)
            case Abort(), Aborted(request_ids=names, ending_req_ids=ending):
                for name in (*names, *ending):
                    yield from self._end(name, FinishReason.ABORT, now)
            case _, Aborted(request_ids=names):  # a session that ends at rest
                for name in names:
                    yield from self._end(name, FinishReason.STOP, now)

    def _deliver(self, rows: tuple[OutputRow, ...], now: float) -> Iterator[Sample]:
        """What a commit brings; an iteration has the tokens of prompts and of outputs."""
        num_prompt = num_new = 0
        for row in rows:
            life = self._lives.get(row.request_id)
            if life is None:
                continue
            if life.first_token is None:
                num_prompt += len(life.request.prompt_token_ids)
                yield from _count_prompt(life.request, row.num_cached_tokens)
                yield Sample(Kind.HISTOGRAM, "time_to_first_token_seconds", now - life.queued)
                life.first_token = now
            elif life.last_token is not None:
                latency = now - life.last_token
                yield Sample(Kind.HISTOGRAM, "inter_token_latency_seconds", latency)
            life.last_token = now
            life.num_outputs += len(row.new_token_ids)
            num_new += len(row.new_token_ids)
            if row.finish_reason is not None and not life.request.resumable:
                yield from self._end(row.request_id, row.finish_reason, now)
        if num_new:
            yield Sample(Kind.COUNTER, "generation_tokens", num_new)
            yield Sample(Kind.HISTOGRAM, "iteration_tokens_total", num_prompt + num_new)

    def _end(self, name: RequestId, reason: FinishReason | None, now: float) -> Iterator[Sample]:
        """What is known of a request once it has ended."""
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
        """What is shown from now on."""
        num_waiting = len(after.waiting) + len(after.skipped_waiting)
        usable = self._config.num_usable_blocks
        yield Sample(Kind.GAUGE, "num_requests_running", len(after.running))
        yield Sample(Kind.GAUGE, "num_requests_waiting", num_waiting)
        yield Sample(Kind.GAUGE, "kv_cache_usage_perc", 1 - len(after.free_queue) / usable)
        if self._config.groups or any(life.request.resumable for life in self._lives.values()):
            return  # the room of groups is not reckoned, and what a session has become not known
        requests = {name: life.request for name, life in self._lives.items()}
        counts = count_waiting(explain_waiting(self._config, after, requests))
        for reason, count in counts.items():
            label = ("reason", str(reason))
            yield Sample(Kind.GAUGE, "num_requests_waiting_by_reason", count, label)


def _count_prompt(request: Request, num_cached: int) -> Iterator[Sample]:
    """The tokens of a prompt, where they came from."""
    num_prompt = len(request.prompt_token_ids)
    yield Sample(Kind.COUNTER, "prompt_tokens", num_prompt)
    yield Sample(Kind.COUNTER, "prompt_tokens_cached", num_cached)
    for source, count in (
        ("local_compute", num_prompt - num_cached),
        ("local_cache_hit", num_cached),
    ):
        yield Sample(Kind.COUNTER, "prompt_tokens_by_source", count, ("source", source))


def _count(before: Snapshot, after: Snapshot) -> Iterator[Sample]:
    """What the engine itself has counted."""
    for metric, field in (
        ("prefix_cache_queries", "prefix_cache_queries"),
        ("prefix_cache_hits", "prefix_cache_hits"),
        ("num_preemptions", "preemptions"),
    ):
        grown = getattr(after.stats, field) - getattr(before.stats, field)
        if grown:
            yield Sample(Kind.COUNTER, metric, grown)
