"""One run of vLLM's scheduler: what the adapter remembers to read it, and its state as a
snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request as VllmRequest
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_block_keys import Digests, RequestRecord
from blockstep.conformance.engines.adapters.vllm_build import (
    RELEASE,
    Hasher,
    build_hasher,
    build_scheduler,
)
from blockstep.conformance.engines.adapters.vllm_grammars import begin_compilation
from blockstep.conformance.engines.adapters.vllm_items import hide_features, read_features
from blockstep.spec import vocabulary as v

if RELEASE.has_store:
    from blockstep.conformance.engines.adapters.vllm_store import (
        read_deferred_frees,
        read_transfers,
    )
if RELEASE.has_encoder:
    from blockstep.conformance.engines.adapters.vllm_encoder import read_encoder

STATUSES = {"WAITING_FOR_FSM": v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR}
"""The names of statuses in older releases."""


class Run:
    """The scheduler of a config, its frames in flight, and the requests submitted to it."""

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.scheduler = build_scheduler(config)
        self.store = self.scheduler.connector if config.kv_connector else None
        """The KV connector that answers as events say; None without one."""
        self.has_second_runner = bool(getattr(self.scheduler, "use_v2_model_runner", False))
        """Whether the release plans for Model Runner V2 (see `vllm_runner`)."""
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        """The managers of the block tables, one for each KV-cache group."""
        self.hasher = build_hasher(config)
        self.digests = Digests(RELEASE, config.block_size)
        self.key_of: dict[bytes, v.BlockKey] = {}
        """The block key of each digest with group that a block has carried."""
        self.known: dict[v.RequestId, RequestRecord] = {}
        """The latest request of each id."""
        self.frames: dict[v.FrameId, SchedulerOutput] = {}
        """The plans in flight, oldest first. vLLM does not number plans: a plan is handed back with
        its answer."""
        self.planned: tuple[v.RequestId, ...] = ()
        """The requests of the last plan."""
        self.ended: set[v.RequestId] = set()
        """The requests that have finished since the last plan."""
        self.next_frame_id: v.FrameId = 0
        self.lora_ids: dict[str, int] = {}
        self.embeds: dict[str, int] = {}
        """The number of embeddings of each entry of the encoder cache."""
        self.stats = v.Stats()
        """The statistics summed over all answers; each answer has the counts since the one before.
        """

    def name_blocks(self, known: RequestRecord) -> Hasher | None:
        """Return vLLM's block hasher, which also records the contents of the digests that it
        computes; None without prefix caching.

        It hashes the release's own features of the items: those that the request came with, and
        those of later chunks where the scheduler has put them. If no encoder is modelled the
        scheduler must not see the features, so they are kept aside between two calls.
        """
        hasher, digests = self.hasher, self.digests
        if hasher is None:
            return None
        is_kept_aside = not self.config.encoder_cache_size

        def hash_blocks(target: VllmRequest) -> list[bytes]:
            known.follow(target.prompt_token_ids, target.max_tokens)
            if is_kept_aside:
                known.features.extend(target.mm_features)
                target.mm_features = known.features
            found = hasher(target)
            items = read_features(target.mm_features)
            if is_kept_aside:
                hide_features(target)
            if found:
                num_before = len(target.block_hashes)
                digests.learn(known, num_before, found, target.all_token_ids, items)
            return found

        return hash_blocks

    def compile_grammar(self, request: VllmRequest) -> None:
        """Do what the front end does with a request's grammar before the scheduler sees the
        request.
        """
        if RELEASE.has_plain_grammar:
            manager = self.scheduler.structured_output_manager
            begin_compilation(manager, request, self.config.reasoning_end_token_id)

    def get_key(self, carried: bytes) -> v.BlockKey:
        """Return the key of a block that carries one digest, or several, with its group."""
        key = self.key_of.get(carried)
        if key is None:
            key = self.digests.read(get_block_hash(carried), get_group_id(carried))
            self.key_of[carried] = key
        return key

    def get_unfinished(self) -> Mapping[v.RequestId, VllmRequest]:
        """Return the unfinished requests.

        The scheduler also knows finished ones whose blocks are held for a store.
        """
        requests: dict[v.RequestId, VllmRequest] = self.scheduler.requests
        if self.store is None:
            return requests
        return {name: one for name, one in requests.items() if not one.is_finished()}

    def get_skipped(self) -> tuple[VllmRequest, ...]:
        """Return the second queue, if there is one: skipped requests, or waiting ones that hold
        blocks.
        """
        if RELEASE.has_holding_queue:
            return tuple(self.scheduler.kv_holding_waiting)
        return tuple(self.scheduler.skipped_waiting) if RELEASE.has_skipped_waiting else ()


def add_counts(
    stats: v.Stats,
    cache: PrefixCacheStats,
    drafts: SpecDecodingStats | None = None,
    external: PrefixCacheStats | None = None,
) -> v.Stats:
    """Return the statistics with what was counted since. Source: `SchedulerStats`."""
    queries, hits = read_counts(cache)
    if external is not None:
        more_queries, more_hits = read_counts(external)
        stats = replace(
            stats,
            external_prefix_cache_queries=stats.external_prefix_cache_queries + more_queries,
            external_prefix_cache_hits=stats.external_prefix_cache_hits + more_hits,
        )
    return replace(
        stats,
        prefix_cache_queries=stats.prefix_cache_queries + queries,
        prefix_cache_hits=stats.prefix_cache_hits + hits,
        drafts_scheduled=stats.drafts_scheduled + (drafts.num_draft_tokens if drafts else 0),
        drafts_accepted=stats.drafts_accepted + (drafts.num_accepted_tokens if drafts else 0),
    )


def read_counts(cache: PrefixCacheStats) -> tuple[int, int]:
    """Return queries and hits of a cache, those of preempted requests included."""
    queries, hits = cache.queries, cache.hits
    if RELEASE.has_preempted_counts:
        queries, hits = queries + cache.preempted_queries, hits + cache.preempted_hits
    return queries, hits


def read_snapshot(run: Run) -> v.Snapshot:
    """Return the whole state of the scheduler."""
    scheduler = run.scheduler
    pool: BlockPool = scheduler.kv_cache_manager.block_pool
    free_queue = tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    if len(free_queue) != pool.get_num_free_blocks():
        raise EngineFault(
            f"{len(free_queue)} blocks are queued, but {pool.get_num_free_blocks()} counted"
        )
    unfinished = run.get_unfinished()
    deferred: tuple[v.DeferredFree, ...] = ()
    if run.store is not None and RELEASE.frees_behind_frames:
        deferred = tuple(read_deferred_frees(scheduler, run.frames))
    return v.Snapshot(
        pause_state=v.PauseState[scheduler.pause_state.name]
        if RELEASE.has_pause
        else v.PauseState.UNPAUSED,
        waiting=tuple(request.request_id for request in scheduler.waiting),
        skipped_waiting=tuple(request.request_id for request in run.get_skipped()),
        running=tuple(request.request_id for request in scheduler.running),
        requests=tuple(_read_request(run, unfinished[name]) for name in sorted(unfinished)),
        # The null block has a count of its own making; nobody holds it.
        ref_counts=tuple(0 if block.is_null else block.ref_cnt for block in pool.blocks),
        free_queue=free_queue,
        block_keys=tuple(
            None if block.block_hash is None else run.get_key(block.block_hash)
            for block in pool.blocks
        ),
        cached=_read_cached(pool, run.get_key),
        frames_in_flight=tuple(run.frames),
        next_frame_id=run.next_frame_id,
        finished_req_ids=tuple(sorted(scheduler.finished_req_ids)),
        prev_scheduled_req_ids=tuple(sorted(scheduler.prev_step_scheduled_req_ids))
        if RELEASE.has_row_outputs and not run.has_second_runner
        else run.planned,
        encoder=read_encoder(scheduler, run.embeds) if run.config.encoder_cache_size else None,
        stats=add_counts(
            run.stats,
            scheduler.kv_cache_manager.prefix_cache_stats,
            external=None if run.store is None else scheduler.connector_prefix_cache_stats,
        ),
        transfers=None
        if run.store is None
        else read_transfers(
            run.store,
            scheduler.requests,
            scheduler.finished_recving_kv_req_ids,
            run.managers,
            deferred,
        ),
        has_work=bool(scheduler.has_requests()) if RELEASE.shows_work else None,
    )


def _read_request(run: Run, request: VllmRequest) -> v.RequestSnapshot:
    name = request.request_id
    known, structured = run.known[name], request.structured_output_request
    return v.RequestSnapshot(
        request_id=name,
        status=STATUSES.get(request.status.name) or v.Status(request.status.name.lower()),
        output_token_ids=tuple(request.output_token_ids),
        num_computed_tokens=request.num_computed_tokens,
        num_output_placeholders=_get_placeholders(run, request),
        spec_token_ids=tuple(request.spec_token_ids),
        is_prefill_chunk=request.is_prefill_chunk
        if RELEASE.has_chunk_flag
        else known.is_prefill_chunk,
        block_tables=tuple(
            tuple(block.block_id for block in manager.req_to_blocks.get(name, ()))
            for manager in run.managers
        ),
        num_cached_blocks=tuple(manager.num_cached_block.get(name, 0) for manager in run.managers),
        num_cached_tokens=known.num_cached_tokens
        if RELEASE.has_prefill_stats
        else request.num_cached_tokens,
        num_preemptions=request.num_preemptions
        if RELEASE.has_row_outputs
        else known.num_preemptions,
        grammar_ready=structured is not None and structured.grammar is not None,
        grammar_state=getattr(structured and structured.grammar, "state", 0),
        reasoning_ended=_has_reasoned(run, known.request, structured),
        prompt_token_ids=tuple(request.prompt_token_ids) if known.request.resumable else (),
        num_streaming_updates=len(request.streaming_queue or ()) if RELEASE.has_sessions else 0,
    )


def _has_reasoned(run: Run, request: v.Request, structured: Any) -> bool:
    """Return whether the grammar of a request no longer waits for the end of reasoning; False if
    none ever does."""
    config = run.config
    if config.reasoning_end_token_id is None or config.enable_in_reasoning:
        return False
    if request.grammar is None:
        return False
    return bool(structured.reasoning_ended)


def _get_placeholders(run: Run, request: VllmRequest) -> int:
    """Return the number of tokens that frames in flight still deliver to a request.

    If a preemption sets the count to zero, vLLM marks those frames stale; they deliver their tokens
    all the same, unless a forced reset dropped them.
    """
    kept = int(request.num_output_placeholders)
    if not RELEASE.has_sound_preemption or request.drop_stale_output:
        return kept
    if request.num_stale_output_tokens == 0:
        return kept
    promised = run.known[request.request_id].promised
    return kept + sum(promised.get(frame_id, 0) for frame_id in run.frames)


def _read_cached(
    pool: BlockPool, get_key: Callable[[bytes], v.BlockKey]
) -> Mapping[v.BlockKey, tuple[v.BlockId, ...]]:
    """Return the cached blocks of each key.

    Source: `BlockHashToBlockMap`: one block, or a map of blocks by id, for each digest.
    """
    found: dict[v.BlockKey, tuple[v.BlockId, ...]] = {}
    for carried, held in pool.cached_block_hash_to_block._cache.items():
        blocks = held.values() if isinstance(held, dict) else (held,)
        found[get_key(carried)] = tuple(block.block_id for block in blocks)
    return found
