"""Steps: state, prefix hits and decisions of each scheduler step, as lines of JSON.

::

    {"type":"step_snapshot","step":0,"running":[],"waiting":["A"],"free_blocks":8,...}
    {"type":"prefix_cache_event","step":0,"req_id":"A","local_hit_tokens":0,...}
    {"type":"step_decision","step":0,"scheduled_new_req_ids":["A"],...}

Field names are those of the fork that seed 001 describes ("Feature B"). There a scheduler writes
the records while it plans; here they are computed from a plan and the states before and after, for
any engine. So a hit is recorded for each admitted request, and not for requests that were looked up
and did not fit. `blockstep validate` reads such a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

import msgspec

from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    Config,
    Event,
    Fork,
    KVLoad,
    NewRow,
    Observation,
    Plan,
    Rejected,
    Request,
    RequestId,
    Snapshot,
    StreamingUpdate,
    Submit,
)


class StepSnapshot(msgspec.Struct, frozen=True, tag="step_snapshot"):
    """State before a plan, after expired pins were dropped."""

    step: int
    running: list[RequestId]
    waiting: list[RequestId]
    """Waiting requests in queue order, before requests of pinned jobs are moved ahead."""
    free_blocks: int
    total_blocks: int
    """Blocks including the null block, as in `Config.num_blocks`."""
    gpu_cached_blocks: int
    """Number of keys in the prefix-cache map."""
    num_pinned: int
    pinned_blocks: int
    """Number of different blocks in pins."""
    pinned_job_ids: list[str]
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    cpu_free_blocks: int | None = None
    """None: no tier below the pool is known."""
    cpu_total_blocks: int | None = None
    cpu_cached_blocks: int | None = None


class PrefixCacheEvent(msgspec.Struct, frozen=True, tag="prefix_cache_event"):
    """Local and external hit of a request that was admitted or has started an asynchronous load."""

    step: int
    req_id: RequestId
    job_id: str | None
    local_hit_tokens: int
    external_hit_tokens: int
    total_prompt_tokens: int
    num_tokens: int
    """Tokens of prompt and output."""
    connector_name: str | None = None
    load_kv_async: bool = False


class StepDecision(msgspec.Struct, frozen=True, tag="step_decision"):
    """The plan of a step."""

    step: int
    scheduled_new_req_ids: list[RequestId]
    scheduled_resumed_req_ids: list[RequestId]
    scheduled_running_req_ids: list[RequestId]
    preempted_req_ids: list[RequestId]
    num_scheduled_tokens: dict[RequestId, int]
    total_scheduled_tokens: int


StepRecord: TypeAlias = StepSnapshot | PrefixCacheEvent | StepDecision
_ENCODER = msgspec.json.Encoder()


def write_record(record: StepRecord) -> bytes:
    """Return the record as a line of JSON, with its line end."""
    return _ENCODER.encode(record) + b"\n"


@dataclass(slots=True)
class StepTrace:
    """Follows the events of one engine, and returns the records of each plan."""

    config: Config
    connector_name: str | None = None
    """Name of the KV connector."""
    _requests: dict[RequestId, Request] = field(default_factory=dict)
    _step: int = 0

    def observe(
        self, before: Snapshot, event: Event, seen: Observation, after: Snapshot
    ) -> list[StepRecord]:
        """Return the records of an event, given its observation and the states before and after.

        A plan has a snapshot, hits and a decision; other observations have no records.
        """
        if isinstance(seen, Rejected):
            return []
        if isinstance(event, Submit | StreamingUpdate):
            self._requests.setdefault(event.request.request_id, event.request)
        if isinstance(event, Fork):
            parent = self._requests[event.request_id]
            self._requests[event.child_id] = replace(parent, request_id=event.child_id)
        records: list[StepRecord] = []
        if isinstance(seen, Plan):
            hits = self._find_hits(before, seen)
            records = [self._see(before), *hits, self._make_decision(seen)]
            self._step += 1
        if len(self._requests) != len(after.requests):
            left = {request.request_id for request in after.requests}
            self._requests = {name: it for name, it in self._requests.items() if name in left}
        return records

    def _see(self, before: Snapshot) -> StepSnapshot:
        pins = () if before.pins is None else before.pins.pins
        now = 0 if before.pins is None else before.pins.now
        kept = [pin for pin in pins if pin.end > now]
        counts, num_free = list(before.ref_counts), len(before.free_queue)
        for pin in pins:
            for block in chain(*pin.block_tables) if pin.end <= now else ():
                counts[block] -= 1
                num_free += block != NULL_BLOCK and not counts[block]
        held = set(chain(*chain(*(pin.block_tables for pin in kept))))
        return StepSnapshot(
            step=self._step,
            running=list(before.running),
            waiting=[*before.skipped_waiting, *before.waiting],
            free_blocks=num_free,
            total_blocks=self.config.num_blocks,
            gpu_cached_blocks=len(before.cached),
            num_pinned=len(kept),
            pinned_blocks=len(held - {NULL_BLOCK}),
            pinned_job_ids=[pin.job_id for pin in kept],
            max_num_running_reqs=self.config.max_num_seqs,
            max_num_scheduled_tokens=self.config.max_num_batched_tokens,
        )

    def _find_hits(self, before: Snapshot, plan: Plan) -> Iterator[PrefixCacheEvent]:
        """Yield the hits of admitted requests; a session that continues on its own KV has none."""
        old = {request.request_id: request for request in before.requests}
        loads = {load.request_id: load for load in plan.kv_loads}
        for row in plan.rows:
            is_admitted = isinstance(row, NewRow) or row.resumed
            load = loads.pop(row.request_id, None)
            if is_admitted and (load or not old[row.request_id].num_computed_tokens):
                yield self._hit(before, row.request_id, row.num_computed_tokens, load)
        for name, load in loads.items():
            yield self._hit(before, name, load.num_computed_tokens + load.num_external_tokens, load)

    def _hit(
        self, before: Snapshot, name: RequestId, num_computed: int, load: KVLoad | None
    ) -> PrefixCacheEvent:
        request, old = self._requests[name], before.request(name)
        num_prompt, num_outputs = len(request.prompt_token_ids), 0
        if old is not None:
            num_prompt = len(old.prompt_token_ids) or num_prompt
            num_outputs = len(old.output_token_ids)
        num_external = 0 if load is None else load.num_external_tokens
        return PrefixCacheEvent(
            step=self._step,
            req_id=name,
            job_id=request.job_id,
            local_hit_tokens=num_computed - num_external,
            external_hit_tokens=num_external,
            total_prompt_tokens=num_prompt,
            num_tokens=num_prompt + num_outputs,
            connector_name=self.connector_name if self.config.kv_connector else None,
            load_kv_async=load is not None and load.is_async,
        )

    def _make_decision(self, plan: Plan) -> StepDecision:
        return StepDecision(
            step=self._step,
            scheduled_new_req_ids=[row.request_id for row in plan.new],
            scheduled_resumed_req_ids=[row.request_id for row in plan.cached if row.resumed],
            scheduled_running_req_ids=[row.request_id for row in plan.cached if not row.resumed],
            preempted_req_ids=list(plan.preempted_req_ids),
            num_scheduled_tokens={row.request_id: row.num_scheduled_tokens for row in plan.rows},
            total_scheduled_tokens=plan.total_num_scheduled_tokens,
        )
