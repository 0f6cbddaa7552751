"""SGLang's scheduler, without a model or a GPU, behind the Engine protocol.

Its `Scheduler` with its policy, `PrefillAdder`, `ScheduleBatch`, radix cache, memory pools and the
processing of results runs as it is, and its results are translated without repair. The object is
made without its `__init__`, which would start a model worker and sockets; parts that a scheduler of
one rank without options only passes through are replaced (`_build`). So are packages of kernels and
of images that are not installed (`BlankModuleFinder`).

One turn of its loop plans and launches a batch and processes one: Schedule is the first part of a
turn and Commit the last. In its normal loop they are of the same batch; in its overlapping loop,
its default (`async_scheduling`), Commit is of the batch before.

It decides differently on purpose (prefill first), so it is checked at the equivalence `safety`.
"""

from __future__ import annotations

import importlib.abc
import itertools
import logging
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from blockstep.conformance.engine import (
    Capability,
    EngineFault,
    EngineTraits,
    Safety,
    Setting,
    show_state,
)
from blockstep.spec import vocabulary as v

# Stand-ins.


def _do_nothing(*_args: Any, **_more: Any) -> None:
    """Take anything, and return None."""


def _return_first(_self: Any, *args: Any, **_more: Any) -> Any:
    """Return the first argument: a decorator that does nothing."""
    return args[0] if args else None


class Blank(type):
    """A class of a package that is not there: it has every attribute, and makes empty objects."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Blank(name, (), {"__init__": _do_nothing, "__call__": _return_first})

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


class BlankModule(ModuleType):
    """A module of such classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Blank(name, (), {"__init__": _do_nothing, "__call__": _return_first})


class BlankModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for every module of these packages."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_more: Any) -> ModuleSpec | None:
        """Return the place of a module, if it is of one of the packages."""
        if any(name == one or name.startswith(f"{one}.") for one in self.names):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return BlankModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def _load() -> None:
    """Import SGLang with replacements for what a scheduler does not run."""
    images = import_module("transformers.utils.import_utils")
    images.is_torchvision_available()  # transformers must not see the stand-in
    kernels = ("tvm_ffi", "sgl_kernel", "flashinfer", "deep_gemm", "compressed_tensors")
    missing = [name for name in (*kernels, "torchvision") if find_spec(name) is None]
    finder = BlankModuleFinder([*missing, "sglang.srt.multimodal"])
    sys.meta_path.insert(0, finder)
    try:
        import_module("sglang.srt.managers.scheduler")
    finally:
        sys.meta_path.remove(finder)
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


if "sglang.srt.managers.scheduler" not in sys.modules:
    _load()
schedulers: Any = import_module("sglang.srt.managers.scheduler")
batches: Any = import_module("sglang.srt.managers.schedule_batch")
results: Any = import_module("sglang.srt.managers.scheduler_components.batch_result_processor")
context: Any = import_module("sglang.srt.runtime_context")
pools: Any = import_module("sglang.srt.mem_cache.memory_pool")
allocators: Any = import_module("sglang.srt.mem_cache.allocator.token")
radix: Any = import_module("sglang.srt.mem_cache.radix_cache")
cache_params: Any = import_module("sglang.srt.mem_cache.cache_init_params")
# Its order of eviction must be reproducible.
_clock = itertools.count(1).__next__
radix.time = SimpleNamespace(monotonic=_clock, perf_counter=_clock, time=_clock)
SamplingParams: Any = import_module("sglang.srt.sampling.sampling_params").SamplingParams
ServerArgs: Any = import_module("sglang.srt.server_args").ServerArgs
GenerationBatchResult: Any = import_module("sglang.srt.managers.utils").GenerationBatchResult

_NONE = (
    "chunked_req", "_pending_chunked_abort_req", "dllm_config", "hisparse_coordinator",
    "draft_worker", "decode_offload_manager", "dynamic_chunk_sizer", "prefill_delayer",
    "lora_drainer", "last_batch", "lora_overlap_loader", "min_free_slots_delayer",
    "truncation_align_size", "metrics_collector", "priority_scheduling_preemption_threshold",
    "scheduler_stage_metrics", "mm_receiver", "max_queued_requests",
)  # fmt: skip
_FALSE = (
    "enable_hisparse", "enable_hierarchical_cache", "enable_unified_cache_external_linker",
    "enable_lora", "enable_lmcache", "enable_hicache_storage", "enable_lora_overlap_loading",
    "enable_priority_preemption", "enable_priority_scheduling", "is_hybrid_swa",
    "is_mixed_chunk", "require_mlp_sync", "enable_overlap", "enable_skip_finishing_decode",
    "enable_continuous_input_polling", "enable_overlap_mlx", "enable_unified_memory",
    "schedule_low_priority_values_first", "abort_on_priority_when_disabled",
)  # fmt: skip
_ZERO = (
    "max_prefill_bs", "forward_ct", "processed_tokens_counter", "prefill_decode_interval",
    "_prefill_decode_interval_remaining", "prefill_decode_interval_min_bs",
)  # fmt: skip


CONSERVATIVENESS = 0.1


class Quiet:
    """A part that does nothing: every method returns None."""

    num_retracted_reqs = num_generated_tokens = forward_ct_decode = 0
    enable_metrics = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


class Plain(SimpleNamespace):
    """A config in which every option that is not set is None."""

    def __getattr__(self, name: str) -> None:
        """Return None."""


def _build(config: v.Config) -> Any:
    """Return a scheduler of one rank, for a model with `config.num_usable_blocks` slots."""
    sizes = {
        "page_size": 1,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "max_running_requests": config.max_num_seqs,
    }
    context.publish(
        ServerArgs(
            model_path="dummy",
            device="cpu",
            pp_max_micro_batch_size=config.max_num_seqs,
            schedule_conservativeness=CONSERVATIVENESS,
            disable_overlap_schedule=not config.async_scheduling,
            **sizes,
        ),
        role="scheduler",
    )
    made = object.__new__(schedulers.Scheduler)
    values = dict.fromkeys(_NONE) | dict.fromkeys(_FALSE, False) | dict.fromkeys(_ZERO, 0) | sizes
    for name, value in values.items():
        setattr(made, name, value)
    made.enable_overlap = made.enable_skip_finishing_decode = config.async_scheduling
    made.waiting_queue, made.result_queue, made.device = [], deque(), "cpu"
    made.running_batch = batches.ScheduleBatch(reqs=[], batch_is_full=False)
    made.req_to_token_pool = pools.ReqToTokenPool(
        config.max_num_seqs, config.max_model_len + 1, "cpu", False
    )
    made.token_to_kv_pool_allocator = allocators.TokenToKVPoolAllocator(
        config.num_usable_blocks, torch.float16, "cpu", None, False
    )
    made.tree_cache = radix.RadixCache(
        cache_params.CacheInitParams(
            disable=not config.enable_prefix_caching,
            req_to_token_pool=made.req_to_token_pool,
            token_to_kv_pool_allocator=made.token_to_kv_pool_allocator,
            page_size=1,
        )
    )
    made.spec_algorithm = schedulers.SpeculativeAlgorithm.from_string(None)
    made.disaggregation_mode = schedulers.DisaggregationMode.NULL
    made.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
    made.send_abort_output = _do_nothing
    made.beam_coordinator = SimpleNamespace(
        pending_member_rows=lambda _batch: 0,
        retire_group=lambda _req: None,
        commit_decode=lambda _batch: set(),
    )
    made.dp_attn_adapter = SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
        maybe_convert_decode_to_extend=lambda batch: batch,
    )
    made.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    made.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_: 0)
    runner = SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
    made.tp_worker = made.model_worker = SimpleNamespace(model_runner=runner)
    made.metrics_reporter, made.output_streamer = Quiet(), Quiet()
    made.model_config = Plain(vocab_size=1 << 20)
    made.policy = schedulers.SchedulePolicy("fcfs", made.tree_cache, False, False, False)
    made.new_token_ratio_tracker = schedulers.NewTokenRatioTracker.from_config()
    names = results.SchedulerBatchResultProcessor.__annotations__
    known = {name: getattr(made, name) for name in names if hasattr(made, name)}
    known |= {"is_generation": True, "logprob_result_processor": Quiet()}
    made.batch_result_processor = results.SchedulerBatchResultProcessor(**known)
    return made


# Fitting.


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config: pages of one token, its default, no token budget for decodes, and
    sequences that leave two slots of the pool, as its `init_req_max_new_tokens` has it."""
    num_blocks = max(config.num_usable_blocks * config.block_size, 5) + 1
    return v.Config(
        num_blocks=num_blocks,
        block_size=1,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len, num_blocks - 3),
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
        max_frames_in_flight=2 if config.async_scheduling else 1,
    )


def fit_request(request: v.Request, config: v.Config) -> v.Request:
    """Return a request with a prompt, a length within the model's, and stop tokens."""
    room = max(config.max_model_len - len(request.prompt_token_ids), 1)
    return v.Request(
        request.request_id,
        request.prompt_token_ids,
        min(request.max_tokens, room),
        stop_token_ids=request.stop_token_ids,
    )


@dataclass(slots=True, eq=False)
class Life:
    """The adapter's record of one unfinished request."""

    request: v.Request
    req: Any
    outputs: list[int] = field(default_factory=list)
    planned_blocks: tuple[v.BlockId, ...] | None = None
    """Blocks that plans have named; None before the first plan and after a preemption."""
    has_run: bool = False


class Sglang:
    """SGLang's scheduler as a system under test."""

    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request, plans_ahead=True),
        drops_tokens_in_flight=True,
        max_depth=2,
        settings=(
            Setting(
                "eager admission",
                "schedule_conservativeness",
                "1.0",
                str(CONSERVATIVENESS),
                "every config",
                "by default a request is admitted if 70 % of what it may still need is free, so "
                "that programs of a few short requests retract none",
            ),
        ),
    )

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.scheduler = _build(config)
        self.lives: dict[v.RequestId, Life] = {}
        """Unfinished requests."""
        self.life_of: dict[Any, Life] = {}
        """Requests by their `Req`."""
        self.last: set[v.RequestId] = set()
        """Requests with a row in the last plan."""
        self.ended: list[v.RequestId] = []
        """Requests that finished since the last plan."""
        self.in_flight: deque[Any] = self.scheduler.result_queue
        """The batches in flight, each with nothing for its result."""
        self.num_plans = 0

    def capabilities(self) -> frozenset[str]:
        """Return what it implements: it shows its state, and plans ahead."""
        return frozenset({Capability.SNAPSHOT, Capability.ASYNC})

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event. What SGLang raises is a finding."""
        match event:
            case v.Submit(request=request):
                return self._submit(request)
            case v.Schedule() if len(self.in_flight) < self.config.max_frames_in_flight:
                return self._schedule()
            case v.Commit(sampled=sampled) if self.in_flight:
                return self._commit({row.request_id: row.token_ids for row in sampled})
        raise EngineFault(f"not for SGLang now: {event!r}")

    def _submit(self, request: v.Request) -> v.Ack:
        params = SamplingParams(
            max_new_tokens=request.max_tokens, stop_token_ids=list(request.stop_token_ids)
        )
        params.normalize(None)
        req = batches.Req(
            request.request_id, "", array("q", request.prompt_token_ids), params,
            vocab_size=self.scheduler.model_config.vocab_size,
        )  # fmt: skip
        self.lives[request.request_id] = self.life_of[req] = Life(request, req)
        self.scheduler.waiting_queue.append(req)
        return v.Ack()

    def _schedule(self) -> v.Plan:
        """Run the first part of `event_loop_normal` or `event_loop_overlap`: up to the forward
        pass."""
        scheduler = self.scheduler
        made = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = made.running_batch, made.batch_to_run
        scheduler.last_batch = batch
        if batch is not None:
            self.in_flight.append((batch.copy() if scheduler.enable_overlap else batch, None))
        waiting = {id(req) for req in scheduler.waiting_queue}
        preempted = [
            name
            for name, life in sorted(self.lives.items())
            if life.planned_blocks is not None and id(life.req) in waiting
        ]
        for name in preempted:
            self.lives[name].planned_blocks = None
        self.remapped: list[v.RequestId] = []
        reqs = [] if batch is None else batch.reqs
        rows = [self._make_row(batch, req, index) for index, req in enumerate(reqs)]
        ended, self.ended = tuple(sorted(self.ended)), []
        self.last = {row.request_id for row in rows}
        self.num_plans += 1
        return v.Plan(
            frame_id=self.num_plans - 1,
            new=tuple(row for row in rows if isinstance(row, v.NewRow)),
            cached=tuple(row for row in rows if isinstance(row, v.CachedRow)),
            finished_req_ids=ended,
            preempted_req_ids=tuple(preempted),
            remapped_req_ids=tuple(sorted(self.remapped)),
        )

    def _make_row(self, batch: Any, req: Any, index: int) -> v.NewRow | v.CachedRow:
        life, is_decode = self.life_of[req], batch.forward_mode.is_decode()
        end = int(batch.seq_lens_cpu[index])
        first = end - 1 if is_decode else req.prefix_len
        slots = self.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end]
        table, planned = tuple(slots.tolist()), life.planned_blocks
        life.planned_blocks = table
        if not life.has_run:
            life.has_run = True
            return v.NewRow(life.request, (table,), first, end - first)
        is_longer = planned is not None and table[: len(planned)] == planned
        if planned is not None and not is_longer:
            self.remapped.append(life.request.request_id)
        tokens = (
            None
            if life.request.request_id in self.last
            else (*life.request.prompt_token_ids, *life.outputs)
        )
        sent = table[len(planned or ()) :] if is_longer else table
        return v.CachedRow(
            life.request.request_id,
            planned is None,
            (sent,),
            tokens,
            first,
            max(end - len(life.request.prompt_token_ids), len(life.outputs)),
            end - first,
        )

    def _commit(self, sampled: Mapping[v.RequestId, v.TokenIds]) -> v.Outputs:
        """Run the last part of the loop."""
        batch, _ = self.in_flight.popleft()
        # Its sampler returns a token for every row, even in the middle of a prefill.
        tokens = [(*sampled.get(req.rid, ()), 0)[0] for req in batch.reqs]
        result = GenerationBatchResult(next_token_ids=torch.tensor(tokens))
        processor = self.scheduler.batch_result_processor
        if batch.forward_mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            processor.process_batch_result_prefill(batch, result)
        lives = [self.life_of[req] for req in batch.reqs]
        gained = [life for life in lives if len(life.req.output_ids) > len(life.outputs)]
        return v.Outputs(tuple(map(self._deliver, gained)))

    def _deliver(self, life: Life) -> v.OutputRow:
        gained = tuple(life.req.output_ids[len(life.outputs) :])
        life.outputs += gained
        reason = stop = None
        if life.req.finished():
            finish = life.req.finished_reason.to_json()
            reason = v.FinishReason.STOP if finish["type"] == "stop" else v.FinishReason.LENGTH
            stop = finish.get("matched") if finish["type"] == "stop" else None
            del self.lives[life.request.request_id]
            self.ended.append(life.request.request_id)
        return v.OutputRow(life.request.request_id, gained, reason, stop)

    # The state.

    def snapshot(self) -> v.Snapshot:
        """Return its state in canonical form. Slots that only the radix tree holds are free: they
        are evicted when they are needed."""
        shown = [self._show(life) for _, life in sorted(self.lives.items())]
        held = Counter(block for request in shown for block in request.block_tables[0])
        allocator = self.scheduler.token_to_kv_pool_allocator
        free = [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
        keys: list[v.BlockKey | None] = [None] * self.config.num_blocks
        for node, block, key in self._walk_tree():
            keys[block] = key
            if node.lock_ref == 0:
                free.append(block)
        waiting = [req.rid for req in self.scheduler.waiting_queue]
        return show_state(
            shown,
            waiting=waiting,
            running=[request.request_id for request in shown if request.request_id not in waiting],
            ref_counts=tuple(held[block] for block in range(self.config.num_blocks)),
            free_queue=tuple(free),
            block_keys=tuple(keys),
            num_frames_in_flight=len(self.in_flight),
        )

    def _show(self, life: Life) -> v.RequestSnapshot:
        req, length = life.req, len(life.planned_blocks or ())
        waits = v.Status.PREEMPTED if life.has_run else v.Status.WAITING
        table = self.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx or 0, :length]
        return v.RequestSnapshot(
            request_id=life.request.request_id,
            status=waits if life.planned_blocks is None else v.Status.RUNNING,
            output_token_ids=tuple(life.outputs),
            num_computed_tokens=length,
            block_tables=(tuple(table.tolist()),),
        )

    def _walk_tree(self) -> Iterator[tuple[Any, v.BlockId, v.BlockKey]]:
        """Yield every slot of its radix tree, with its node and its key."""
        nodes: list[tuple[Any, v.BlockKey | None]]
        nodes = [(child, None) for child in self.scheduler.tree_cache.root_node.children.values()]
        while nodes:
            node, key = nodes.pop()
            for token, slot in zip(node.key.token_ids, node.value.tolist(), strict=True):
                key = v.BlockKey(key, (token,))
                yield node, slot, key
            nodes += [(child, key) for child in node.children.values()]
