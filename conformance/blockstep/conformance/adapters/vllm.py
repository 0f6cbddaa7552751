"""VllmEngine: the unmodified scheduler of vLLM 0.19.1 behind the Engine protocol.

One KV-cache group of full attention, and no worker: what a worker would answer comes in as events.
Where several frames may be in flight it is vLLM's `AsyncScheduler`; drafts then stay with the
worker, and plans carry placeholders for them. Nothing is patched, and answers are translated
without repair. Three things are done to what goes in:

* adapters are renamed, so that they cannot be taken for salts (`VllmEngine.separate_names`);
* several ids are aborted one at a time, because `finish_requests` goes through a set of strings,
  in an order that differs from process to process;
* items reach the block hasher and not the scheduler (see `vllm_build`).

It gives no typed rejections, so it must be handed only events that are legal in its state, and
its counters are not shown: those of the prefix cache count attempts at admission that failed.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockstep.conformance.adapters.vllm_build import (
    AnyGrammar,
    build_hasher,
    build_request,
    build_scheduler,
)
from blockstep.conformance.adapters.vllm_names import compute_block_key, require_release
from blockstep.conformance.engine import Capability, EngineFault
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    BlockId,
    BlockKey,
    CachedRow,
    Commit,
    Config,
    Drafts,
    DraftsTaken,
    Event,
    FinishReason,
    FrameId,
    GrammarReady,
    NewRow,
    Observation,
    OutputRow,
    Outputs,
    PauseState,
    Plan,
    Request,
    RequestId,
    RequestSnapshot,
    Reset,
    ResetDone,
    RowTokens,
    Schedule,
    SetPause,
    Snapshot,
    Stats,
    Status,
    Submit,
)

try:
    from vllm.v1.core.kv_cache_utils import get_block_hash
    from vllm.v1.core.sched.interface import PauseState as VllmPauseState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request as VllmRequest
    from vllm.v1.request import RequestStatus
except ImportError as error:
    require_release(error)
    raise

FORCED_RESET = "forced reset under asynchronous scheduling (#42043)"
RESUMED_TOO_EARLY = "resumed before its tokens (#47900)"
PAST_THE_END = "min_tokens at the model length"

OUT_OF_REACH = {
    "draft_placeholders_dropped",  # it keeps them: quirk `placeholders_outlive_a_gap`
    "admitted_past_a_stale_one",  # `RESUMED_TOO_EARLY`
    "passed_over_for_its_tokens",  # `RESUMED_TOO_EARLY`
    "reset_forced_with_two_frames_in_flight",  # `FORCED_RESET`
}


class VllmEngine:
    """vLLM's scheduler, synchronous or not, as a system under test."""

    separate_names: bool = True
    """Whether LoRA names get a prefix: the only renaming of what goes in.

    0.19.1 puts a LoRA name and a salt into one flat list of extra keys, so that equal texts give
    equal digests (P6). That is known, and would hide whatever comes after it. A subclass that says
    False shows it.
    """

    max_depth: int = 2
    """Plans in flight that a check may have: as many as vLLM has without pipeline parallelism."""

    out_of_reach: frozenset[str] = frozenset(OUT_OF_REACH)
    """Situations that a check does not require, because they cannot come up."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.scheduler = build_scheduler(config)
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        (self.manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.hasher = build_hasher(config)
        self.submitted: dict[RequestId, Request] = {}
        """What was submitted, by id; the latest of an id."""
        self.keys: dict[RequestId, list[BlockKey]] = {}
        """Keys of the full blocks, by id of the request."""
        self.key_of: dict[bytes, BlockKey] = {}
        """What each digest stands for."""
        self.collisions: list[tuple[BlockKey, BlockKey]] = []
        """Different contents of one digest: vLLM takes them for the same."""
        self.frames: dict[FrameId, SchedulerOutput] = {}
        """In flight, oldest first. vLLM numbers nothing: a plan comes back with its answer."""
        self.next_frame_id: FrameId = 0
        self.lora_ids: dict[str, int] = {}

    def capabilities(self) -> frozenset[str]:
        """Everything but typed rejections and comparable counters."""
        return frozenset(Capability) - {Capability.REJECTION, Capability.STATISTICS}

    def apply(self, event: Event) -> Observation:
        """Take one event that is legal now."""
        match event:
            case Submit(request=request):
                return self._submit(request)
            case Schedule():
                return self._schedule()
            case Commit(frame_id=frame_id, sampled=sampled):
                return self._commit(frame_id, sampled)
            case Drafts(drafts=drafts):
                return self._drafts(drafts)
            case Abort(request_ids=request_ids):
                return self._abort(request_ids)
            case GrammarReady(request_id=request_id):
                # What the thread that compiles it does when it is done.
                request = self.scheduler.requests[request_id]
                request.structured_output_request.grammar = AnyGrammar()
                return Ack()
            case SetPause(pause_state=pause_state):
                self.scheduler.set_pause_state(VllmPauseState[pause_state.name])
                return Ack()
            case Reset(reset_running_requests=flag):
                return ResetDone(self.scheduler.reset_prefix_cache(reset_running_requests=flag))
        raise EngineFault(f"no such event: {event!r}")

    def declines(self, event: Event) -> str | None:
        """The defect that would make the scheduler raise, or lose count, some steps later."""
        match event:
            case Reset(reset_running_requests=True):
                # One frame of each is thrown away, in flight or not.
                if self.config.async_scheduling:
                    return FORCED_RESET
                return PAST_THE_END if any(map(self._is_full, self.scheduler.running)) else None
            case Schedule():
                waiting = [*self.scheduler.waiting, *self.scheduler.skipped_waiting]
                # vLLM's own loop answers the oldest plan first, so that this one is not made.
                if any(request.num_output_placeholders for request in waiting):
                    return RESUMED_TOO_EARLY
                return PAST_THE_END if any(map(self._is_full, waiting)) else None
        return None

    def _is_full(self, request: VllmRequest) -> bool:
        """Whether it is as long as the model allows and lives; only `min_tokens` does that.

        Computed anew, it is planned with -1 tokens next, and the commit of that plan raises.
        """
        return bool(request.num_tokens >= self.config.max_model_len)

    # events

    def _submit(self, request: Request) -> Ack:
        """Source: `add_request`."""
        built = build_request(request, self.hasher, self.lora_ids, self.separate_names)
        self.submitted[request.request_id] = request
        self.keys[request.request_id] = []
        self._learn_keys(built)
        self.scheduler.add_request(built)
        return Ack()

    def _schedule(self) -> Plan:
        """Source: `schedule`."""
        output: SchedulerOutput = self.scheduler.schedule()
        frame_id, self.next_frame_id = self.next_frame_id, self.next_frame_id + 1
        if output.num_scheduled_tokens:
            self.frames[frame_id] = output
        return Plan(
            frame_id=frame_id,
            new=self._new_rows(output),
            cached=self._cached_rows(output),
            finished_req_ids=tuple(sorted(output.finished_req_ids)),
            preempted_req_ids=tuple(sorted(output.preempted_req_ids or ())),
        )

    def _new_rows(self, output: SchedulerOutput) -> tuple[NewRow, ...]:
        """Source: `NewRequestData`."""
        rows = []
        for new in output.scheduled_new_reqs:
            if output.scheduled_spec_decode_tokens.get(new.req_id):
                raise EngineFault(f"new request {new.req_id!r} is planned with drafts")
            rows.append(
                NewRow(
                    request=self.submitted[new.req_id],
                    block_ids=tuple(map(tuple, new.block_ids)),
                    num_computed_tokens=new.num_computed_tokens,
                    num_scheduled_tokens=output.num_scheduled_tokens[new.req_id],
                )
            )
        return tuple(rows)

    def _cached_rows(self, output: SchedulerOutput) -> tuple[CachedRow, ...]:
        """Source: `CachedRequestData`, with parallel lists where we have rows."""
        rows = []
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[index]
            token_ids = cached.all_token_ids.get(name)
            rows.append(
                CachedRow(
                    request_id=name,
                    resumed=name in cached.resumed_req_ids,
                    new_block_ids=((),) if block_ids is None else tuple(map(tuple, block_ids)),
                    all_token_ids=None if token_ids is None else tuple(token_ids),
                    num_computed_tokens=cached.num_computed_tokens[index],
                    num_output_tokens=cached.num_output_tokens[index],
                    num_scheduled_tokens=output.num_scheduled_tokens[name],
                    draft_token_ids=tuple(output.scheduled_spec_decode_tokens.get(name, ())),
                )
            )
        return tuple(rows)

    def _commit(self, frame_id: FrameId, sampled: tuple[RowTokens, ...]) -> Outputs:
        """Source: `update_from_output`."""
        names = [row.request_id for row in sampled]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[list(row.token_ids) for row in sampled],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        # Looked up before: a request that ends is forgotten, but its blocks stay named.
        touched = [self.scheduler.requests.get(name) for name in names]
        answer: dict[int, EngineCoreOutputs] = self.scheduler.update_from_output(
            self.frames.pop(frame_id), result
        )
        for request in touched:
            if request is not None:
                self._learn_keys(request)
        return Outputs(tuple(row for core in answer.values() for row in get_output_rows(core)))

    def _drafts(self, drafts: tuple[RowTokens, ...]) -> DraftsTaken:
        """Source: `update_draft_token_ids`, which answers nothing: attached is what it kept.

        Synchronous only: the specification refuses drafts when the worker keeps them.
        """
        handed = {row.request_id: list(row.token_ids) for row in drafts}
        self.scheduler.update_draft_token_ids(DraftTokenIds([*handed], [*handed.values()]))
        requests = self.scheduler.requests
        return DraftsTaken(
            tuple(
                name
                for name, token_ids in handed.items()
                if name in requests and requests[name].spec_token_ids is token_ids
            )
        )

    def _abort(self, request_ids: tuple[RequestId, ...]) -> Aborted:
        """Source: `finish_requests`, one id at a time (see the top of this module)."""
        ended: list[RequestId] = []
        for name in request_ids:
            done = self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            ended.extend(request_id for request_id, _ in done)
        return Aborted(tuple(ended))

    # names of blocks

    def _learn_keys(self, request: VllmRequest) -> None:
        """Remember what the new digests of this request's full blocks stand for."""
        submitted, keys = self.submitted[request.request_id], self.keys[request.request_id]
        for index in range(len(keys), len(request.block_hashes)):
            start = index * self.config.block_size
            key = compute_block_key(
                submitted,
                keys[-1] if keys else None,
                tuple(request.all_token_ids[start : start + self.config.block_size]),
                start,
                is_after_output=request.num_output_tokens > 0,
            )
            keys.append(key)
            known = self.key_of.setdefault(request.block_hashes[index], key)
            if known != key:
                self.collisions.append((known, key))

    # state

    def snapshot(self) -> Snapshot:
        """Its state in canonical form, read from its own fields."""
        scheduler, pool = self.scheduler, self.block_pool
        free_queue = tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
        if len(free_queue) != pool.get_num_free_blocks():
            raise EngineFault(
                f"{len(free_queue)} blocks are queued, but {pool.get_num_free_blocks()} counted"
            )
        return Snapshot(
            pause_state=PauseState[scheduler.pause_state.name],
            waiting=tuple(request.request_id for request in scheduler.waiting),
            skipped_waiting=tuple(request.request_id for request in scheduler.skipped_waiting),
            running=tuple(request.request_id for request in scheduler.running),
            requests=tuple(
                self._request(scheduler.requests[name]) for name in sorted(scheduler.requests)
            ),
            # The null block has a count of its own making; nobody holds it.
            ref_counts=tuple(0 if block.is_null else block.ref_cnt for block in pool.blocks),
            free_queue=free_queue,
            block_keys=tuple(
                None if block.block_hash is None else self.key_of[get_block_hash(block.block_hash)]
                for block in pool.blocks
            ),
            cached=self._cached(),
            frames_in_flight=tuple(self.frames),
            next_frame_id=self.next_frame_id,
            finished_req_ids=tuple(sorted(scheduler.finished_req_ids)),
            prev_scheduled_req_ids=tuple(sorted(scheduler.prev_step_scheduled_req_ids)),
            stats=Stats(),
        )

    def _request(self, request: VllmRequest) -> RequestSnapshot:
        name = request.request_id
        structured = request.structured_output_request
        return RequestSnapshot(
            request_id=name,
            status=Status(request.status.name.lower()),
            output_token_ids=tuple(request.output_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            num_output_placeholders=request.num_output_placeholders,
            spec_token_ids=tuple(request.spec_token_ids),
            is_prefill_chunk=request.is_prefill_chunk,
            block_tables=(
                tuple(block.block_id for block in self.manager.req_to_blocks.get(name, ())),
            ),
            num_cached_blocks=(self.manager.num_cached_block.get(name, 0),),
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            grammar_ready=structured is not None and structured.grammar is not None,
        )

    def _cached(self) -> Mapping[BlockKey, tuple[BlockId, ...]]:
        """Source: `BlockHashToBlockMap`: one block, or a map of blocks by id, for each digest."""
        found: dict[BlockKey, tuple[BlockId, ...]] = {}
        for digest, held in self.block_pool.cached_block_hash_to_block._cache.items():
            blocks = held.values() if isinstance(held, dict) else (held,)
            found[self.key_of[get_block_hash(digest)]] = tuple(block.block_id for block in blocks)
        return found


def get_output_rows(core: EngineCoreOutputs) -> list[OutputRow]:
    """What one client gained in a step. Source: `EngineCoreOutput`."""
    return [
        OutputRow(
            request_id=row.request_id,
            new_token_ids=tuple(row.new_token_ids),
            finish_reason=None
            if row.finish_reason is None
            else FinishReason(str(row.finish_reason)),
            stop_token_id=row.stop_reason if isinstance(row.stop_reason, int) else None,
            num_cached_tokens=row.num_cached_tokens,
        )
        for row in core.outputs
    ]
