"""The continuous batching of transformers, behind the Engine protocol.

The adapter builds its real batch processor, scheduler, cache and input tensors on the CPU. There
is no model: what a forward pass would sample, the driver says. It decides differently on purpose
(decodes first, no limit on running requests), so it is checked at the equivalence `safety`.

`Synchronous` takes one step after another, as on a CPU. `Asynchronous` prepares a step while the
one before is in flight, as on a GPU: the two sets of input tensors are the library's own, without
its CUDA streams.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, LlamaConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api as api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits, Safety, show_state
from blockstep.conformance.engines.adapters.transformers_script import write_script
from blockstep.spec import vocabulary as v

PAGE_SIZE_MIN = 4
"""The smallest block of transformers."""
FIRST_SECTOR = 2
"""Sectors before this one are never allocated; a sector is one block here."""

# It says for each new engine that psutil is missing, and logs what it also raises.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config that transformers can be built with."""
    fitting = v.Config(
        num_blocks=config.num_blocks,
        block_size=max(config.block_size, PAGE_SIZE_MIN),
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    if config.async_scheduling:
        return replace(fitting, async_scheduling=True, max_frames_in_flight=2)
    return fitting


def fit_request(request: v.Request, config: v.Config) -> v.Request:
    """Return a request with a prompt, a length within the model's, and one end token or none."""
    room = max(config.max_model_len - len(request.prompt_token_ids), 1)
    return v.Request(
        request.request_id,
        request.prompt_token_ids,
        min(request.max_tokens, room),
        eos_token_id=request.eos_token_id,
    )


class Processor(api.ContinuousBatchProcessor):  # type: ignore[misc]
    """The library's processor without its destructor, which runs a garbage collection."""

    def __del__(self) -> None:
        """Do nothing."""


class TwoBatches:
    """Two sets of input tensors, used in turns, as in the library's asynchronous mode."""

    compute_stream = None

    def __init__(self, first: ContinuousBatchingIOs, second: ContinuousBatchingIOs) -> None:
        self.free = [second, first]
        self.in_flight: list[ContinuousBatchingIOs] = []

    def prepare_batch_tensors(self, *args: Any, **kwargs: Any) -> None:
        """Fill the tensors of a set that is not in flight."""
        self.free[-1].prepare_batch_tensors(*args, **kwargs)
        self.in_flight.append(self.free.pop())

    def prepare_batch_update(self) -> Any:
        """Return requests and tokens of the oldest batch in flight."""
        done = self.in_flight.pop(0)
        self.free.append(done)
        return done.prepare_batch_update()


@dataclass
class Life:
    """The adapter's record of one unfinished request."""

    request: v.Request
    outputs: list[int] = field(default_factory=list)
    planned_blocks: list[int] = field(default_factory=list)
    """Blocks that plans have named, in the library's numbers."""
    has_run: bool = False
    is_preempted: bool = False
    state: Any = None
    """The library's state of its last row; a preempted request gets another one."""
    promised: Counter[v.FrameId] = field(default_factory=Counter)
    """Number of tokens that plans in flight will sample, by plan."""

    @property
    def runs(self) -> bool:
        """Whether a plan has given it a row since it was submitted or preempted."""
        return self.has_run and not self.is_preempted

    @property
    def tokens(self) -> v.TokenIds:
        """Prompt and outputs, as far as they are known."""
        return (*self.request.prompt_token_ids, *self.outputs)


class Synchronous:
    """Continuous batching that updates each batch before it prepares the next one."""

    is_async: ClassVar[bool] = False
    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request, has_slots=False),
        version=version("transformers"),
        write_script=write_script,
    )

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.processor = self._build()
        self.scheduler = self.processor.scheduler
        (self.allocator,) = self.processor.cache.cache_allocators.values()
        self.lives: dict[v.RequestId, Life] = {}
        self.last: set[v.RequestId] = set()
        """Requests with a row in the last plan."""
        self.ended: list[v.RequestId] = []
        """Requests that finished since the last plan."""
        self.ending: list[v.RequestId] = []
        """Canceled requests that finish with the next plan."""
        self.frames: dict[v.FrameId, ContinuousBatchingIOs | None] = {}
        """The input tensors of each plan in flight; None if it has no rows."""
        self.num_plans = 0

    def _build(self) -> Any:
        config, device = self.config, torch.device("cpu")
        model = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32,
            hidden_size=32, attn_implementation="flash_attention_2",
        )  # fmt: skip
        # 128 bytes per token, so that a sector, the unit of their pool, is one block
        options = ContinuousBatchingConfig(
            page_size=config.block_size,
            num_blocks=config.num_usable_blocks,
            max_batch_tokens=config.max_num_batched_tokens,
            max_requests_per_batch=config.max_num_seqs,
            max_memory_percent=0.9,
            max_blocks_per_request=0,
            allow_block_sharing=config.enable_prefix_caching,
            use_async_batching=False,
            use_cuda_graph=(False, False),
            seed=0,
        )
        helper = DistributedHelper(None, None)
        cache = PagedAttentionCache(model, options, device, helper)
        self.inputs: queue.Queue[Any] = queue.Queue()
        self.cancels: queue.Queue[str] = queue.Queue()
        self.router = api.OutputRouter()
        processor = Processor(
            cache=cache,
            config=model,
            generation_config=GenerationConfig(),
            continuous_batching_config=options,
            logit_processor=ContinuousBatchingLogitsProcessorList(LogitsProcessorList()),
            input_queue=self.inputs,
            cancel_queue=self.cancels,
            output_router=self.router,
            background_thread_status=api.BackgroundThreadStatus(),
            model_device=device,
            model_dtype=torch.float16,
            scheduler=FIFOScheduler(cache, None, options.max_requests_per_batch),
            distributed_helper=helper,
        )
        if self.is_async:
            names = ("cache", "config", "model_dtype", "logit_processor")
            second = ContinuousBatchingIOs(
                continuous_batching_config=options,
                device=device,
                **{name: getattr(processor, name) for name in names},
            )
            processor.use_async_batching = True
            processor.inputs_and_outputs = TwoBatches(processor.inputs_and_outputs, second)
        return processor

    def capabilities(self) -> frozenset[str]:
        """Return what it implements."""
        return frozenset({Capability.SNAPSHOT, Capability.ABORT, Capability.WORK})

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event. What transformers raises is a finding."""
        match event:
            case v.Submit(request=request):
                return self._submit(request)
            case v.Schedule():
                return self._schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled):
                return self._commit(frame_id, {row.request_id: row.token_ids for row in sampled})
            case v.Abort(request_ids=request_ids):
                return self._abort(request_ids)
        raise EngineFault(f"not for transformers: {event!r}")

    def _submit(self, request: v.Request) -> v.Ack:
        self.lives[request.request_id] = Life(request)
        self.inputs.put(
            RequestState(
                request_id=request.request_id,
                initial_tokens=list(request.prompt_token_ids),
                max_new_tokens=request.max_tokens,
                eos_token_id=request.eos_token_id,
                streaming=True,
            )
        )
        return v.Ack()

    def _abort(self, request_ids: Sequence[v.RequestId]) -> v.Aborted:
        """Put known requests into the queue of cancels, which the next step reads."""
        known = [name for name in dict.fromkeys(request_ids) if name in self.lives]
        for name in known:
            if name not in self.ending:
                self.ending.append(name)
                self.cancels.put(name)
        return v.Aborted((), tuple(known))

    def _schedule(self) -> v.Plan:
        has_rows = self.processor.prepare_next_batch()
        for name in self.ending:
            if name in self.lives:
                del self.lives[name]
                self.ended.append(name)
        self.ending = []
        preempted = [name for name in sorted(self.lives) if self._is_preempted(name)]
        for name in preempted:
            life = self.lives[name]
            life.is_preempted, life.planned_blocks = True, []
            life.promised.clear()
        new, cached, remapped = [], [], []
        tensors = self._get_tensors() if has_rows else None
        for row in () if tensors is None else tensors.requests_in_batch:
            made, is_remapped = self._make_row(row)
            name = row.state.request_id
            remapped += [name] if is_remapped else []
            if isinstance(made, v.NewRow):
                new.append(made)
            else:
                cached.append(made)
        plan = v.Plan(
            frame_id=self.num_plans,
            new=tuple(new),
            cached=tuple(cached),
            finished_req_ids=tuple(sorted(self.ended)),
            preempted_req_ids=tuple(preempted),
            remapped_req_ids=tuple(remapped),
        )
        self.frames[self.num_plans] = tensors
        self.num_plans, self.ended = self.num_plans + 1, []
        self.last = {row.request_id for row in plan.rows}
        return plan

    def _get_tensors(self) -> ContinuousBatchingIOs:
        tensors = self.processor.inputs_and_outputs
        return tensors.in_flight[-1] if isinstance(tensors, TwoBatches) else tensors

    def _is_preempted(self, name: v.RequestId) -> bool:
        """Whether a request that ran lost its blocks and is queued again."""
        life = self.lives[name]
        return life.runs and name in self.scheduler.waiting_requests

    def _make_row(self, row: Any) -> tuple[v.NewRow | v.CachedRow, bool]:
        """Return the row of a plan, and whether blocks named by an earlier one are replaced."""
        state, count = row.state, row.query_length
        name, start = state.request_id, state.position_offset - row.query_length
        life, table = self.lives[name], list(self.allocator.block_table[state.request_id])
        is_remapped = table[: len(life.planned_blocks)] != life.planned_blocks
        sent = table if is_remapped else table[len(life.planned_blocks) :]
        num_outputs = len(life.outputs) + life.promised.total()
        life.planned_blocks, life.state = table, state
        if row.has_new_token:
            life.promised[self.num_plans] += 1
        blocks = (_ours(sent),)
        if not life.has_run:
            life.has_run = True
            return v.NewRow(life.request, blocks, start, count), False
        resumed, life.is_preempted = life.is_preempted, False
        tokens = None if name in self.last else life.tokens
        return (
            v.CachedRow(name, resumed, blocks, tokens, start, num_outputs, count),
            is_remapped and not resumed,
        )

    def _commit(self, frame_id: v.FrameId, sampled: Mapping[v.RequestId, v.TokenIds]) -> v.Outputs:
        tensors = self.frames.pop(frame_id)
        if tensors is None:
            return v.Outputs(())
        rows = [row for row in tensors.requests_in_batch if row.has_new_token]
        for index, row in enumerate(rows):
            (token,) = sampled.get(row.state.request_id) or (0,)  # 0 if it has finished
            tensors.output_ids[0, index] = token
        self.processor.update_batch()
        for life in self.lives.values():
            life.promised.pop(frame_id, None)
        outputs = []
        while not self.router.output_queue.empty():
            output = self.router.output_queue.get()
            if output.request_id in self.lives:  # a canceled request has no client
                outputs.append(self._deliver(output))
        return v.Outputs(tuple(outputs))

    def _deliver(self, output: Any) -> v.OutputRow:
        """Return what a client reads from one output."""
        if output.error is not None:
            raise EngineFault(f"{output.request_id} failed: {output.error}")
        life = self.lives[output.request_id]
        gained = tuple(output.generated_tokens[len(life.outputs) :])
        life.outputs += gained
        reason = None
        if output.is_finished():
            is_stop = gained[-1:] == (life.request.eos_token_id,)
            reason = v.FinishReason.STOP if is_stop else v.FinishReason.LENGTH
            del self.lives[output.request_id]
            self.ended.append(output.request_id)
        return v.OutputRow(output.request_id, gained, reason)

    def snapshot(self) -> v.Snapshot:
        """Return its state in canonical form."""
        pool, ledger = self.processor.cache.pool, self.allocator.ledger
        held = Counter(block for table in self.allocator.block_table.values() for block in table)
        counts = [0] * self.config.num_blocks
        for block in held:
            counts[block + 1 - FIRST_SECTOR] = ledger.shared_ref_counts.get(block, 1)
        free = [*pool.free_sectors]
        for leaves in pool._free_blocks[self.allocator.index].trees.values():
            free += leaves
        free += ledger.cached_blocks
        active = self.scheduler.active_requests
        # a prefix hit makes a request active, even if it gets no row then
        running = [name for name in active if name in self.lives and self.lives[name].runs]
        queued = [*self.scheduler.waiting_requests_order]
        queued += [name for name in active if name not in running]
        queued += [state.request_id for state in self.inputs.queue]
        requests = [self._show(name, name in running) for name in sorted(self.lives)]
        return show_state(
            requests,
            waiting=queued,
            running=running,
            ref_counts=tuple(counts),
            free_queue=_ours(free),
            block_keys=(None,) * self.config.num_blocks,
            num_frames_in_flight=len(self.frames),
            has_work=bool(self.inputs.queue) or self.processor.has_pending_requests(),
        )

    def _show(self, name: v.RequestId, runs: bool) -> v.RequestSnapshot:
        life = self.lives[name]
        state = self.scheduler.active_requests.get(name)
        table = self.allocator.block_table.get(name, ())  # a prefix hit, if it waits
        waits = v.Status.PREEMPTED if life.has_run and not table else v.Status.WAITING
        return v.RequestSnapshot(
            request_id=name,
            status=v.Status.RUNNING if runs else waits,
            output_token_ids=tuple(life.outputs),
            num_computed_tokens=0 if state is None else state.position_offset,
            block_tables=(_ours(table),),
        )


class Asynchronous(Synchronous):
    """Continuous batching that prepares a batch while the one before is in flight."""

    is_async = True
    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request, has_slots=False, plans_ahead=True),
        version=version("transformers"),
        drops_tokens_in_flight=True,
        max_depth=2,
        write_script=write_script,
    )

    def capabilities(self) -> frozenset[str]:
        """Return what it implements."""
        return super().capabilities() | {Capability.ASYNC}


def _ours(blocks: Sequence[int]) -> tuple[v.BlockId, ...]:
    """Return block ids that count from 1, since 0 is the null block."""
    return tuple(block + 1 - FIRST_SECTOR for block in blocks)
