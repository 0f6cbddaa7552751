"""The scheduler and block pool of a checkout of LLMServingSim, behind the Engine protocol.

LLMServingSim calls its scheduler a port of vLLM 0.19.0, so it is held to the same plans. Its
modules are imported as they are. What models time, memory and power is replaced when it is
imported: the scheduler then needs nothing that is not in Python's library but numpy.

The simulator knows the outputs of its requests from the start. Here they are given to a request
when they are sampled, and its block hashes are computed again.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits, SamePlans
from blockstep.spec import vocabulary as v

REPLACED = ("controller", "graph_generator", "logger", "pim_model", "trace_generator")
"""Modules of `serving.core` that the scheduler imports and does not need."""


def _import(name: str) -> Any:
    """Import a module of the simulator, with replacements for what it does not need."""
    made = {f"serving.core.{part}": ModuleType(part) for part in REPLACED}
    made["serving.core.logger"].__dict__.update(
        get_logger=lambda *_args, **_keywords: logging.getLogger("llmservingsim"),
        print_markup=print,
        print_rule=print,
    )
    if "pandas" not in sys.modules:
        made["pandas"] = ModuleType("pandas")
    sys.modules.update(made)
    try:
        return import_module(name)
    finally:
        for module in made:
            del sys.modules[module]


scheduler_module = _import("serving.core.scheduler")
pool_module = import_module("serving.core.block_pool")
manager_module = import_module("serving.core.kv_cache_manager")


class Memory:
    """The part of the simulator's memory model that its scheduler uses: the pool of one NPU."""

    def __init__(self, config: v.Config) -> None:
        size = config.block_size
        pool = pool_module.BlockPool(
            pool_module.Device.NPU, config.num_usable_blocks, size, 1, config.enable_prefix_caching
        )
        self.kv = manager_module.TieredKVCacheManager(
            size, pool, enable_caching=config.enable_prefix_caching
        )

    def record_prefix_stats(self, request: Any) -> None:
        """Do nothing: its counters are not compared."""


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config: first come first served, one KV group, and no drafts.

    Several batches are in flight as in a pipeline; its scheduler is not asynchronous.
    """
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
        max_frames_in_flight=config.max_frames_in_flight,
    )


def fit_request(request: v.Request, config: v.Config) -> v.Request:
    """Return a request that ends by its length: the simulator has no stop tokens."""
    room = max(config.max_model_len - len(request.prompt_token_ids), 1)
    length = min(request.max_tokens, room)
    return v.Request(request.request_id, request.prompt_token_ids, length)


class LLMServingSim:
    """The simulator's scheduler as a system under test."""

    traits = EngineTraits(equivalence=SamePlans(fit_config, fit_request, shows_blocks=True))

    def __init__(self, config: v.Config) -> None:
        module: Any = scheduler_module
        module.get_config = lambda _model: {"max_position_embeddings": v.MAX_INT}
        module.MemoryModel = lambda *_args, **_keywords: Memory(config)
        self.scheduler = module.Scheduler(
            model="", node_id=0, instance_id=0, max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, num_npus=1, tp_size=1,
            pp_size=config.max_frames_in_flight, npu_mem=None, cpu_mem=None, start_npu=0,
            pd_type=None, fp=16, block_size=config.block_size, req_num=0,
            enable_prefix_caching=config.enable_prefix_caching, enable_prefix_sharing=False,
            prefix_pool=None, prefix_storage=None,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            reserve_full_isl=config.scheduler_reserve_full_isl,
        )  # fmt: skip
        self.requests: dict[v.RequestId, SimpleNamespace] = {}
        self.frames: dict[v.FrameId, Any] = {}
        self.ended: list[v.RequestId] = []
        self.last: set[v.RequestId] = set()
        """Requests with a row in the last plan."""
        self.num_plans = 0
        self.num_requests = 0

    def capabilities(self) -> frozenset[str]:
        """Return what it implements."""
        return frozenset({Capability.PIPELINE})

    def snapshot(self) -> None:
        """Return None: at this equivalence no state is compared."""

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event."""
        match event:
            case v.Submit(request=request):
                return self._submit(request)
            case v.Schedule():
                return self._schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled):
                return self._commit(frame_id, {row.request_id: row.token_ids for row in sampled})
        raise EngineFault(f"not for LLMServingSim: {event!r}")

    def _submit(self, request: v.Request) -> v.Ack:
        number, self.num_requests = self.num_requests, self.num_requests + 1
        prompt = [*request.prompt_token_ids]
        length = len(prompt) + request.max_tokens
        self.scheduler.add_request([number, "", len(prompt), length, 0, 0, prompt, []])
        known = SimpleNamespace(request=request, planned_blocks=None, num_preemptions=0, outputs=[])
        known.theirs = next(it for it in self.scheduler.waiting if it.id == number)
        known.theirs.name = request.request_id
        self.requests[request.request_id] = known
        return v.Ack()

    def _schedule(self) -> v.Plan:
        batch = self.scheduler.schedule(0, 0)
        preempted = []
        for name, known in self.requests.items():
            if known.theirs.num_preemptions > known.num_preemptions:
                known.num_preemptions, known.planned_blocks = known.theirs.num_preemptions, []
                preempted.append(name)
        starts = () if batch is None else zip(batch.requests, batch.k_list, strict=True)
        rows = [self._make_row(it, start, batch) for it, start in starts]
        frame_id, self.num_plans = self.num_plans, self.num_plans + 1
        self.frames[frame_id] = batch
        ended, self.ended = self.ended, []
        self.last = {row.request_id for row in rows}
        return v.Plan(
            frame_id,
            new=tuple(row for row in rows if isinstance(row, v.NewRow)),
            cached=tuple(row for row in rows if isinstance(row, v.CachedRow)),
            finished_req_ids=tuple(sorted(ended)),
            preempted_req_ids=tuple(sorted(preempted)),
        )

    def _make_row(self, theirs: Any, start: int, batch: Any) -> v.NewRow | v.CachedRow:
        known, count = self.requests[theirs.name], batch.scheduled_tokens[theirs.id]
        table = [block.block_id + 1 for block in self.scheduler.kv.req_to_blocks[theirs.id]]
        planned, known.planned_blocks = known.planned_blocks, table
        if planned is None:
            return v.NewRow(known.request, (tuple(table),), start, count)
        tokens = (*known.request.prompt_token_ids, *known.outputs)
        return v.CachedRow(
            theirs.name,
            not planned,
            (tuple(table[len(planned) :]),),
            None if theirs.name in self.last else tokens,
            start,
            len(known.outputs),
            count,
        )

    def _commit(self, frame_id: v.FrameId, sampled: dict[v.RequestId, v.TokenIds]) -> v.Outputs:
        batch = self.frames.pop(frame_id)
        if batch is None:
            return v.Outputs(())
        before = [request.num_tokens_reached for request in batch.requests]
        was_over = [request.status.name == "FINISHED" for request in batch.requests]
        self.scheduler.add_done(batch.batch_id + 1, 0, 0)
        rows = []
        for theirs, count, is_over in zip(batch.requests, before, was_over, strict=True):
            known, is_done = self.requests.get(theirs.name), theirs.status.name == "FINISHED"
            gained = theirs.num_tokens_reached - count
            if is_over or known is None or not (gained or is_done):
                continue
            tokens = (*sampled.get(theirs.name, ()), 0)[:gained]  # it tells a token in any case
            known.outputs += tokens
            theirs.output_hash_ids, theirs.block_hashes = [*known.outputs], None
            rows.append(
                v.OutputRow(theirs.name, tokens, v.FinishReason.LENGTH if is_done else None)
            )
            if is_done:
                del self.requests[theirs.name]
                self.ended.append(theirs.name)
        return v.Outputs(tuple(rows))
