"""Snapshot: the canonical abstract state, the same for every exact engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockstep.spec.copies import wide_dataclass
from blockstep.spec.vocabulary.events import KVOffer, PauseState
from blockstep.spec.vocabulary.keys import BlockKey
from blockstep.spec.vocabulary.pins import Pin, PinEstimate
from blockstep.spec.vocabulary.request import (
    BlockId,
    BlockTables,
    FrameId,
    RequestId,
    Status,
    TokenIds,
)
from blockstep.spec.vocabulary.transfers import DeferredFree, HeldBlocks


@wide_dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the start; each counts what happened, once (P21)."""

    prefix_cache_queries: int = 0
    """Tokens of requests admitted after asking the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of these tokens that a prefix hit served."""
    preemptions: int = 0
    drafts_scheduled: int = 0
    """Draft tokens of committed frames whose request was still unfinished."""
    drafts_accepted: int = 0
    external_prefix_cache_queries: int = 0
    """Tokens after the local hit of requests that got blocks after asking the store; for an
    asynchronous load, counted when it starts."""
    external_prefix_cache_hits: int = 0
    """Number of these tokens that the store was to load."""


@wide_dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One unfinished request."""

    request_id: RequestId
    status: Status
    output_token_ids: TokenIds = ()
    """Verified outputs."""
    num_computed_tokens: int = 0
    """KV exists, or is being written by a frame in flight or a load, for positions [0, this)."""
    num_output_placeholders: int = 0
    """Placeholders of frames in flight: one for each row that samples, and one for each of its
    drafts. 0 without asynchronous scheduling."""
    spec_token_ids: TokenIds = ()
    """Drafts for the next step, not yet scheduled; placeholders under asynchronous scheduling."""
    is_prefill_chunk: bool = False
    """Whether the last plan that scheduled it left known tokens uncomputed. A preemption does not
    change it."""
    block_tables: BlockTables = ((),)
    num_cached_blocks: tuple[int, ...] = (0,)
    """Per group: leading blocks of its table that were published or hit."""
    num_cached_tokens: int = -1
    """Tokens of the prefix hit at its first admission, and of the load after it; -1 before that."""
    num_preemptions: int = 0
    grammar_ready: bool = False
    grammar_state: int = 0
    """State of its `grammar` after its outputs; 0 without one."""
    reasoning_ended: bool = False
    """Whether `reasoning_end_token_id` is in the prompt or the outputs of a request with a
    `grammar`. False if the config has no such token, or has `enable_in_reasoning`."""
    prompt_token_ids: TokenIds = ()
    """The present prompt of a session. Empty for others, whose prompt does not change."""
    num_streaming_updates: int = 0
    """Inputs of a session that wait for its next stop, including the end of its input."""


@wide_dataclass(frozen=True, slots=True)
class EncoderEntry:
    """The encoder output of one item, computed already or by a frame in flight."""

    identifier: str
    num_embeds: int
    holders: tuple[RequestId, ...] = ()
    """Requests that still need it, sorted: a request is listed once for each occurrence of the
    item."""


@wide_dataclass(frozen=True, slots=True)
class EncoderSnapshot:
    """The encoder cache; sizes are in embeddings."""

    entries: tuple[EncoderEntry, ...] = ()
    """Sorted by identifier."""
    freeable: tuple[str, ...] = ()
    """Identifiers of entries without a holder, in the order of eviction."""
    num_free: int = 0
    """Embeddings that no entry takes."""
    num_freeable: int = 0
    """`num_free`, and the embeddings of entries without a holder."""
    freed: tuple[str, ...] = ()
    """Identifiers that the worker drops with the next plan."""


@wide_dataclass(frozen=True, slots=True)
class TransfersSnapshot:
    """Transfers between pool and store."""

    offers: tuple[KVOffer, ...] = ()
    """The store's answers about unfinished requests, by request id, without those equal to
    `KVOffer(request_id)`: nothing to load, and nothing to read."""
    received: tuple[RequestId, ...] = ()
    """Waiting requests whose asynchronous load has ended, sorted."""
    unsettled: tuple[RequestId, ...] = ()
    """Running requests whose load is part of a frame in flight, sorted."""
    held: tuple[HeldBlocks, ...] = ()
    """Sorted by request id."""
    deferred_frees: tuple[DeferredFree, ...] = ()
    """Blocks in the order in which they were released. Empty with `max_frames_in_flight` 1."""


@dataclass(frozen=True, slots=True)
class PinsSnapshot:
    """The pins of jobs, and the time."""

    now: int = 0
    """Ticks: the latest time that a `Clock` brought."""
    pins: tuple[Pin, ...] = ()
    """The pins in the order in which turns ended; at most one per job."""
    estimates: tuple[PinEstimate, ...] = ()
    """Estimates above 0 of jobs that have a pin or an unfinished turn, sorted by job."""


@wide_dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything two exact engines must agree on, in canonical form."""

    pause_state: PauseState
    waiting: tuple[RequestId, ...]
    """Requests in the order in which they would be admitted; so is `skipped_waiting`."""
    skipped_waiting: tuple[RequestId, ...]
    running: tuple[RequestId, ...]
    """Requests in running order: FCFS preempts from its end."""
    requests: tuple[RequestSnapshot, ...]
    """Sorted by request id."""
    ref_counts: tuple[int, ...]
    """Indexed by block id; the null block's is always 0."""
    free_queue: tuple[BlockId, ...]
    """Head first: the head is allocated, and so evicted, next."""
    block_keys: tuple[BlockKey | None, ...]
    """The key of each block, indexed by block id; None if it is not cached."""
    cached: Mapping[BlockKey, tuple[BlockId, ...]]
    """The prefix-cache map: the blocks of a key in order of publication; a hit takes the first."""
    frames_in_flight: tuple[FrameId, ...]
    next_frame_id: FrameId
    finished_req_ids: tuple[RequestId, ...]
    """Requests that finished since the last plan, sorted."""
    prev_scheduled_req_ids: tuple[RequestId, ...]
    """Requests in the last plan (and not force-reset since), sorted."""
    stats: Stats
    encoder: EncoderSnapshot | None = None
    """None if no encoder is modelled."""
    transfers: TransfersSnapshot | None = None
    """None without a connector."""
    pins: PinsSnapshot | None = None
    """None unless the policy is `Policy.CONTINUUM`."""
    admission_closed: bool = False
    """Whether admission waits for `admission_high_blocks` free blocks."""
    has_work: bool | None = None
    """Whether the loop that drives the engine must continue planning; False: it may sleep until the
    next event. None if the engine does not say (vLLM's `has_requests`).

    There is work while a request may be scheduled, a finished request must be reported to the
    worker, or the end of a transfer is awaited. An idle session is no work, nor is a request held
    by a pause. The loop waits for the model outputs of plans in flight in any case."""

    def request(self, request_id: RequestId) -> RequestSnapshot | None:
        """Return the unfinished request of this id, or None."""
        return next((r for r in self.requests if r.request_id == request_id), None)
