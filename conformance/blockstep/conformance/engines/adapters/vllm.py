"""VllmEngine: the unmodified scheduler of a vLLM release behind the Engine protocol.

One KV-cache group of full attention, and no worker: what a worker would answer comes in as events.
Where several frames may be in flight it is vLLM's `AsyncScheduler`; drafts then stay with the
worker, and plans carry placeholders for them. Nothing is patched, and answers are translated
without repair. What releases have and lack is in `vllm_releases`. Three things are done to what
goes in:

* adapters are renamed, so that they cannot be taken for salts (`VllmEngine.separate_names`);
* several ids are aborted one at a time, because `finish_requests` goes through a set of strings,
  in an order that differs from process to process;
* items reach the block hasher and not the scheduler (see `vllm_build`).

It gives no typed rejections, so it must be handed only events that are legal in its state. It has
no counter of preemptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits
from blockstep.conformance.engines.adapters.vllm_build import (
    RELEASE,
    AnyGrammar,
    build_hasher,
    build_request,
    build_scheduler,
)
from blockstep.conformance.engines.adapters.vllm_names import compute_block_key
from blockstep.conformance.engines.adapters.vllm_releases import require_release
from blockstep.conformance.judge.witnesses import WITNESSES
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
    Policy,
    RejectCode,
    Request,
    RequestId,
    RequestSnapshot,
    Reset,
    ResetDone,
    RowTokens,
    Schedule,
    SetPause,
    Snapshot,
    SpecMethod,
    Stats,
    Status,
    Submit,
)

try:
    from vllm.v1.core.kv_cache_utils import get_block_hash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import PrefixCacheStats
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request as VllmRequest
    from vllm.v1.request import RequestStatus
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    if RELEASE.has_pause:
        from vllm.v1.core.sched.interface import PauseState as VllmPauseState
except ImportError as error:
    require_release(error)
    raise

FORCED_RESET = "forced reset under asynchronous scheduling (#42043)"
RESUMED_TOO_EARLY = "resumed before its tokens (#47900)"
PAST_THE_END = "min_tokens at the model length"
NO_FORCED_RESET = "the release has no forced reset"
NO_REPETITION_DETECTION = "the release has no repetition detection"
NO_CACHE_OPT_OUT = "the release has no skip_reading_prefix_cache"
NO_GRAMMAR = "a grammar: the release wants its bitmask when it plans"
NO_PRIORITY = "PRIORITY: the release compares requests, and keeps a victim's row (#23347, #28558)"
NO_DRAFT_MODELS = "a config with a draft model: the release has none"
NO_DRAFTS = "a config with drafts: not followed in this release"
PADDED_PAST_THE_THRESHOLD = "padding above the long-prefill threshold (#54028)"
PADDED_TO_THE_END = "a plan behind padding to the model length (#53962)"

WORKAROUNDS = {
    "separate_names": "an adapter and a salt of one name give a block the same digest (P6)",
    "spare_unservable": "a request that never fits is taken, and blocks the queue (#52520)",
    "spare_reuse": "an id is free again while a frame in flight names it; its answer goes to the "
    "new request",
    "abort_singly": "aborting several at once frees their blocks in the order of a set",
    "spare_counters": "counters of the prefix cache count attempts at admission that fail (#43736)",
    "spare_late_drafts": "late drafts are kept, by a request that waits or has a frame in flight "
    "(P24)",
}


STATUSES = {"WAITING_FOR_FSM": Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR}
"""Names that a status had in older releases."""


def list_out_of_reach() -> frozenset[str]:
    """Situations that cannot come up with this release, or that it is spared."""
    found = {"draft_placeholders_dropped"}  # quirk `placeholders_outlive_a_gap`
    if not RELEASE.has_sound_preemption:
        found |= {"admitted_past_a_stale_one", "passed_over_for_its_tokens"}
    if RELEASE.has_sound_async_reset:  # it drops them: quirk `reset_drops_tokens`
        found |= {"commit_for_preempted", "ended_while_preempted"}
    else:
        found.add("reset_forced_with_two_frames_in_flight")
    if not RELEASE.has_sound_priority:
        found |= {name for name in WITNESSES if name.startswith("priority")}
        found.add("admission_overtakes")
    if not RELEASE.has_forced_reset:
        found |= {name for name in WITNESSES if name.startswith("reset_forced")}
        found |= {"commit_for_preempted", "ended_while_preempted"}
    if not RELEASE.has_skipped_waiting:  # seen by the queue in which they wait
        found |= {"admission_after_skip", "grammar_skipped"}
        found |= {"admitted_past_a_stale_one", "passed_over_for_its_tokens"}
    if not RELEASE.has_drafts:  # nor does anybody outgrow the pool alone
        found |= {"head_drop", "block_for_lookahead_only", "all_preempted_in_flight"}
        # Only drafts make one that runs want more tokens than in the step before.
        found.add("running_left_out_by_budget")
    if not (RELEASE.has_pause or RELEASE.has_plain_grammar or RELEASE.has_async):
        found.add("empty_plan_with_work")  # there is nothing that anybody could wait for
    if not RELEASE.has_repetition_detection:
        found.add("stop_repetition")
    if not RELEASE.has_cache_opt_out:
        found.add("reading_skipped")
    if not RELEASE.masks_stops:
        found.add("min_tokens_held_back_a_stop")
    return frozenset(found)


def add_counts(
    stats: Stats, cache: PrefixCacheStats, drafts: SpecDecodingStats | None = None
) -> Stats:
    """Statistics and what was counted since. Source: `SchedulerStats`."""
    queries, hits = cache.queries, cache.hits
    if RELEASE.has_preempted_counts:
        queries, hits = queries + cache.preempted_queries, hits + cache.preempted_hits
    return replace(
        stats,
        prefix_cache_queries=stats.prefix_cache_queries + queries,
        prefix_cache_hits=stats.prefix_cache_hits + hits,
        drafts_scheduled=stats.drafts_scheduled + (drafts.num_draft_tokens if drafts else 0),
        drafts_accepted=stats.drafts_accepted + (drafts.num_accepted_tokens if drafts else 0),
    )


class VllmEngine:
    """vLLM's scheduler, synchronous or not, as a system under test."""

    separate_names: bool = not RELEASE.has_tagged_names
    """Whether LoRA names get a prefix: the only renaming of what goes in.

    Many a release puts a LoRA name and a salt into one flat list of extra keys, so that equal
    texts give equal digests (P6). That is known, and would hide whatever comes after it. A subclass
    that says False shows it.
    """

    spare_unservable: bool = True
    """Whether requests are kept away that never fit.

    vLLM takes them, and they wait for ever, with everybody behind them (#52520).
    """

    spare_reuse: bool = True
    """Whether the id of an aborted request is kept away while a frame in flight names it."""

    abort_singly: bool = True
    """Whether several ids are aborted one at a time, in the order given."""

    spare_counters: bool = not RELEASE.has_sound_counters
    """Whether its counters, of the prefix cache and of drafts, are left out."""

    spare_late_drafts: bool = True
    """Whether drafts are kept away that their request cannot take now.

    A request that waits or is in flight keeps them, and is later planned with them at a position
    for which nobody proposed them.
    """

    traits = EngineTraits(
        max_depth=2,  # as many plans in flight as vLLM has without pipeline parallelism
        out_of_reach=list_out_of_reach(),
        workarounds=MappingProxyType(WORKAROUNDS),
        version=RELEASE.version,
    )

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
        self.promised: dict[RequestId, dict[FrameId, int]] = {}
        """Tokens, drafts included, that plans promised."""
        self.chunks: dict[RequestId, bool] = {}
        """Whether the last step of a request left known tokens to compute."""
        self.cached_tokens: dict[RequestId, int] = {}
        """Tokens of the hit that the first output tells, where a request does not keep them."""
        self.planned: tuple[RequestId, ...] = ()
        """Who was in the last plan."""
        self.num_preemptions: dict[RequestId, int] = {}
        """Times that a request was preempted, where it does not say."""
        self.next_frame_id: FrameId = 0
        self.lora_ids: dict[str, int] = {}
        self.stats = Stats()
        """What the answers told; each tells what was counted since the last one."""

    @property
    def judges(self) -> frozenset[RejectCode]:
        """What it should see to itself, unless it is spared: no front end can know it."""
        spared = {
            RejectCode.NEVER_FITS: self.spare_unservable,
            RejectCode.REQUEST_IN_FLIGHT: self.spare_reuse,
        }
        return frozenset(code for code, is_spared in spared.items() if not is_spared)

    def capabilities(self) -> frozenset[str]:
        """All but typed rejections, a counter of preemptions, and what the release has not.

        See `WORKAROUNDS`, too.
        """
        lacks = {Capability.REJECTION, Capability.STATISTICS}
        lacks |= {Capability.PIPELINE, Capability.EMBEDS}
        if self.spare_counters:
            lacks.add(Capability.CACHE_STATISTICS)
        if self.spare_late_drafts:
            lacks.add(Capability.LATE_DRAFTS)
        if not RELEASE.has_pause:
            lacks.add(Capability.PAUSE)
        if not RELEASE.has_plain_grammar:
            lacks.add(Capability.GRAMMAR)
        if not RELEASE.has_drafts:
            lacks.add(Capability.DRAFTS)
        if not RELEASE.has_async:
            lacks.add(Capability.ASYNC)
        return frozenset(Capability) - lacks

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
                keywords = {"reset_running_requests": flag} if RELEASE.has_forced_reset else {}
                return ResetDone(self.scheduler.reset_prefix_cache(**keywords))
        raise EngineFault(f"no such event: {event!r}")

    def declines(self, event: Event) -> str | None:
        """What the release lacks, or the defect that would make it raise some steps later."""
        match event:
            case Submit(request=request):
                return self._get_lack(request)
            case Reset(reset_running_requests=True):
                if not RELEASE.has_forced_reset:
                    return NO_FORCED_RESET
                # One frame of each is thrown away, in flight or not.
                if self.config.async_scheduling and not RELEASE.has_sound_async_reset:
                    return FORCED_RESET
                return PAST_THE_END if any(map(self._is_full, self.scheduler.running)) else None
            case Schedule():
                waiting = [*self.scheduler.waiting, *self._get_skipped()]
                # vLLM's own loop answers the oldest plan first, so that this one is not made.
                if not RELEASE.has_sound_preemption and any(
                    request.num_output_placeholders for request in waiting
                ):
                    return RESUMED_TOO_EARLY
                if any(map(self._is_full, waiting)):
                    return PAST_THE_END
                return self._get_padding_problem(waiting)
        return None

    def _get_padding_problem(self, waiting: Iterable[VllmRequest]) -> str | None:
        """Why a plan may raise, or not be what the worker needs, for the padding of drafts.

        Either some of a row's tokens would be cut off, and none of its drafts; or a row that was
        padded as far as the model length has not been answered, and is planned with -1 tokens.
        """
        if not RELEASE.pads_drafts or self.config.num_speculative_tokens == 0:
            return None
        num_tokens, size = 1 + self.config.num_speculative_tokens, self.config.block_size
        if 0 < self.config.long_prefill_token_threshold < num_tokens and any(
            # A hit is whole blocks; which blocks of this very step it may find is not known.
            request.num_tokens % size == 1 % size
            and (self.config.enable_prefix_caching or request.num_tokens == 1)
            for request in waiting
        ):
            return PADDED_PAST_THE_THRESHOLD
        end = self.config.max_model_len
        if any(request.num_computed_tokens >= end for request in self.scheduler.running):
            return PADDED_TO_THE_END
        return None

    def _get_lack(self, request: Request) -> str | None:
        """What this request, or the config, asks for and the release has not."""
        if self.config.policy is Policy.PRIORITY and not RELEASE.has_sound_priority:
            return NO_PRIORITY
        if self.config.spec_method is not SpecMethod.NONE and not RELEASE.has_drafts:
            return NO_DRAFTS
        if self.config.spec_method is SpecMethod.DRAFT_MODEL and not RELEASE.has_draft_models:
            return NO_DRAFT_MODELS
        if request.repetition_detection is not None and not RELEASE.has_repetition_detection:
            return NO_REPETITION_DETECTION
        if request.structured_output and not RELEASE.has_plain_grammar:
            return NO_GRAMMAR
        if request.skip_reading_prefix_cache and not RELEASE.has_cache_opt_out:
            return NO_CACHE_OPT_OUT
        return None

    def _get_skipped(self) -> Iterable[VllmRequest]:
        """The queue of what was passed over, where there is one."""
        return self.scheduler.skipped_waiting if RELEASE.has_skipped_waiting else ()

    def _is_full(self, request: VllmRequest) -> bool:
        """Whether it is as long as the model allows and lives; only `min_tokens` does that.

        Computed anew, it is planned with -1 tokens next, and the commit of that plan raises.
        """
        return bool(request.num_tokens >= self.config.max_model_len)

    # events

    def _submit(self, request: Request) -> Ack:
        """Source: `add_request`."""
        built = build_request(request, self.hasher, self.lora_ids, self.separate_names)
        name = request.request_id
        self.submitted[name], self.keys[name] = request, []
        self.promised[name], self.chunks[name], self.num_preemptions[name] = {}, False, 0
        self.cached_tokens.pop(name, None)
        self._learn_keys(built)
        self.scheduler.add_request(built)
        return Ack()

    def _schedule(self) -> Plan:
        """Source: `schedule`."""
        requests = self.scheduler.requests
        before = {name: requests[name].num_output_placeholders for name in requests}
        running = [request.request_id for request in self.scheduler.running]
        output: SchedulerOutput = self.scheduler.schedule()
        frame_id, self.next_frame_id = self.next_frame_id, self.next_frame_id + 1
        if output.num_scheduled_tokens:
            self.frames[frame_id] = output
        if RELEASE.has_told_preemptions:
            preempted = set(output.preempted_req_ids or ())
        else:
            preempted = {name for name in running if requests[name].status.name == "PREEMPTED"}
        for name in preempted:
            self.num_preemptions[name] += 1
        cached_rows = self._cached_rows(output)
        self.planned = tuple(sorted(output.num_scheduled_tokens))
        for name in output.num_scheduled_tokens:
            request = requests[name]
            num_promised = request.num_output_placeholders - before[name]
            self.promised.setdefault(name, {})[frame_id] = num_promised
            self.chunks[name] = request.num_computed_tokens < request.num_tokens + before[name]
            if RELEASE.has_prefill_stats and request.prefill_stats is not None:
                self.cached_tokens[name] = request.prefill_stats.num_cached_tokens
        return Plan(
            frame_id=frame_id,
            new=self._new_rows(output),
            cached=cached_rows,
            finished_req_ids=tuple(sorted(output.finished_req_ids)),
            preempted_req_ids=tuple(sorted(preempted)),
        )

    def _new_rows(self, output: SchedulerOutput) -> tuple[NewRow, ...]:
        """Source: `NewRequestData`."""
        rows = []
        for new in output.scheduled_new_reqs:
            row = NewRow(
                request=self.submitted[new.req_id],
                block_ids=tuple(map(tuple, new.block_ids)),
                num_computed_tokens=new.num_computed_tokens,
                num_scheduled_tokens=output.num_scheduled_tokens[new.req_id],
            )
            drafts = tuple(output.scheduled_spec_decode_tokens.get(new.req_id, ()))
            if drafts != row.draft_token_ids:
                raise EngineFault(
                    f"new request {new.req_id!r} is planned with {row.num_scheduled_tokens} tokens "
                    f"from position {row.num_computed_tokens}, the last of them drafts: {drafts}"
                )
            rows.append(row)
        return tuple(rows)

    def _cached_rows(self, output: SchedulerOutput) -> tuple[CachedRow, ...]:
        """Source: `CachedRequestData`, with parallel lists where we have rows."""
        rows = []
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[index]
            resumed, token_ids, num_outputs = self._get_late_outputs(output, index)
            rows.append(
                CachedRow(
                    request_id=name,
                    resumed=resumed,
                    new_block_ids=((),) if block_ids is None else tuple(map(tuple, block_ids)),
                    all_token_ids=None if token_ids is None else tuple(token_ids),
                    num_computed_tokens=cached.num_computed_tokens[index],
                    num_output_tokens=num_outputs,
                    num_scheduled_tokens=output.num_scheduled_tokens[name],
                    draft_token_ids=tuple(output.scheduled_spec_decode_tokens.get(name, ())),
                )
            )
        return tuple(rows)

    def _get_late_outputs(
        self, output: SchedulerOutput, index: int
    ) -> tuple[bool, list[int] | None, int]:
        """Whether a row is resumed, its tokens if the worker may lack some, and its outputs.

        Where a plan does not tell the last two, the worker keeps what it saw; they follow from the
        request and from the last plan.
        """
        cached = output.scheduled_cached_reqs
        name = cached.req_ids[index]
        if RELEASE.has_told_preemptions:
            resumed = name in cached.resumed_req_ids
            return resumed, cached.all_token_ids.get(name), cached.num_output_tokens[index]
        request = self.scheduler.requests[name]
        token_ids = None if name in self.planned else list(request.all_token_ids)
        return cached.resumed_from_preemption[index], token_ids, request.num_output_tokens

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
        for core in answer.values():
            told = core.scheduler_stats
            if told is not None:
                self.stats = add_counts(
                    self.stats, told.prefix_cache_stats, told.spec_decoding_stats
                )
        return Outputs(tuple(row for core in answer.values() for row in self._get_rows(core)))

    def _get_rows(self, core: EngineCoreOutputs) -> list[OutputRow]:
        """What one client gained in a step. Source: `EngineCoreOutput`."""
        return [
            OutputRow(
                request_id=row.request_id,
                new_token_ids=tuple(row.new_token_ids),
                finish_reason=None
                if row.finish_reason is None
                else FinishReason(str(row.finish_reason)),
                stop_token_id=row.stop_reason if isinstance(row.stop_reason, int) else None,
                num_cached_tokens=self._get_told_cached(row),
            )
            for row in core.outputs
        ]

    def _get_told_cached(self, row: EngineCoreOutput) -> int:
        """Cached tokens of a row: what it says, or what the first row of its request said."""
        if not RELEASE.has_prefill_stats:
            return int(row.num_cached_tokens)
        if row.prefill_stats is not None:
            self.cached_tokens[row.request_id] = row.prefill_stats.num_cached_tokens
        return self.cached_tokens[row.request_id]

    def _drafts(self, drafts: tuple[RowTokens, ...]) -> DraftsTaken:
        """Source: `update_draft_token_ids`, which answers nothing: attached is what it kept.

        Synchronous only: the specification refuses drafts when the worker keeps them.
        """
        handed = {row.request_id: list(row.token_ids) for row in drafts}
        requests = self.scheduler.requests
        before = {name: requests[name].spec_token_ids for name in handed if name in requests}
        self.scheduler.update_draft_token_ids(DraftTokenIds([*handed], [*handed.values()]))
        # A list of its own, or, where a grammar looked at it, maybe a copy; but another one.
        return DraftsTaken(
            tuple(
                name
                for name, token_ids in handed.items()
                if name in before
                and requests[name].spec_token_ids is not before[name]
                and requests[name].spec_token_ids == token_ids
            )
        )

    def _abort(self, request_ids: tuple[RequestId, ...]) -> Aborted:
        """Source: `finish_requests`, one id at a time unless told otherwise (`abort_singly`).

        What it returns differs from release to release; who ended is who is no longer there.
        """
        ended: list[RequestId] = []
        requests = self.scheduler.requests
        batches = [(name,) for name in request_ids] if self.abort_singly else [request_ids]
        for batch in batches:
            there = [name for name in dict.fromkeys(batch) if name in requests]
            self.scheduler.finish_requests(batch, RequestStatus.FINISHED_ABORTED)
            ended += [name for name in there if name not in requests]
        return Aborted(tuple(ended))

    # names of blocks

    def _learn_keys(self, request: VllmRequest) -> None:
        """Remember what the new digests of this request's full blocks stand for."""
        submitted, keys = self.submitted[request.request_id], self.keys[request.request_id]
        for index in range(len(keys), len(request.block_hashes)):
            start = index * self.config.block_size
            key = compute_block_key(
                RELEASE,
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
            pause_state=PauseState[scheduler.pause_state.name]
            if RELEASE.has_pause
            else PauseState.UNPAUSED,
            waiting=tuple(request.request_id for request in scheduler.waiting),
            skipped_waiting=tuple(request.request_id for request in self._get_skipped()),
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
            prev_scheduled_req_ids=tuple(sorted(scheduler.prev_step_scheduled_req_ids))
            if RELEASE.has_told_preemptions
            else self.planned,
            stats=add_counts(self.stats, scheduler.kv_cache_manager.prefix_cache_stats),
        )

    def _request(self, request: VllmRequest) -> RequestSnapshot:
        name = request.request_id
        structured = request.structured_output_request
        return RequestSnapshot(
            request_id=name,
            status=STATUSES.get(request.status.name) or Status(request.status.name.lower()),
            output_token_ids=tuple(request.output_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            num_output_placeholders=self._get_placeholders(request),
            spec_token_ids=tuple(request.spec_token_ids),
            is_prefill_chunk=request.is_prefill_chunk
            if RELEASE.has_chunk_flag
            else self.chunks[name],
            block_tables=(
                tuple(block.block_id for block in self.manager.req_to_blocks.get(name, ())),
            ),
            num_cached_blocks=(self.manager.num_cached_block.get(name, 0),),
            num_cached_tokens=self._get_cached_tokens(request),
            num_preemptions=request.num_preemptions
            if RELEASE.has_told_preemptions
            else self.num_preemptions[name],
            grammar_ready=structured is not None and structured.grammar is not None,
        )

    def _get_placeholders(self, request: VllmRequest) -> int:
        """Tokens that frames in flight still deliver.

        Where a preemption clears the count, vLLM marks those frames stale; they deliver all the
        same, unless a forced reset had them dropped.
        """
        kept = int(request.num_output_placeholders)
        if not RELEASE.has_sound_preemption or request.drop_stale_output:
            return kept
        if request.num_stale_output_tokens == 0:
            return kept
        promised = self.promised[request.request_id]
        return kept + sum(promised.get(frame_id, 0) for frame_id in self.frames)

    def _get_cached_tokens(self, request: VllmRequest) -> int:
        """Tokens of the hit that counts; -1 before it was admitted."""
        if not RELEASE.has_prefill_stats:
            return int(request.num_cached_tokens)
        return self.cached_tokens.get(request.request_id, -1)

    def _cached(self) -> Mapping[BlockKey, tuple[BlockId, ...]]:
        """Source: `BlockHashToBlockMap`: one block, or a map of blocks by id, for each digest."""
        found: dict[BlockKey, tuple[BlockId, ...]] = {}
        for digest, held in self.block_pool.cached_block_hash_to_block._cache.items():
            blocks = held.values() if isinstance(held, dict) else (held,)
            found[self.key_of[get_block_hash(digest)]] = tuple(block.block_id for block in blocks)
        return found
