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
    """Tokens of those that a prefix hit served."""
    preemptions: int = 0
    drafts_scheduled: int = 0
    """Draft tokens of committed frames whose request was still unfinished."""
    drafts_accepted: int = 0
    external_prefix_cache_queries: int = 0
    """Tokens behind the local hit of requests that were given blocks after asking the store; who is
    parked is counted then."""
    external_prefix_cache_hits: int = 0
    """Tokens of those that the store was to load."""


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
    """Output tokens promised by frames in flight: of each row that samples one, and one for each
    of its drafts. 0 without asynchronous scheduling."""
    spec_token_ids: TokenIds = ()
    """Drafts attached, not yet scheduled; placeholders under asynchronous scheduling."""
    is_prefill_chunk: bool = False
    """Whether the last plan that scheduled it left known tokens uncomputed. Who is preempted
    keeps it."""
    block_tables: BlockTables = ((),)
    num_cached_blocks: tuple[int, ...] = (0,)
    """Per group: leading blocks of its table whose hash is settled (hit or published)."""
    num_cached_tokens: int = -1
    """Tokens of the prefix hit at its first admission, and of what was loaded behind it; -1 before
    that."""
    num_preemptions: int = 0
    grammar_ready: bool = False
    grammar_state: int = 0
    """Where its outputs led its `grammar`: a state of it; 0 without one."""
    reasoning_ended: bool = False
    """Of a request with a `grammar`: whether `reasoning_end_token_id` stands in its prompt or in
    its outputs. False where the config has none, or `enable_in_reasoning`."""
    prompt_token_ids: TokenIds = ()
    """Of a session: what its prompt has become. Empty for others, whose prompt stays."""
    num_streaming_updates: int = 0
    """Chunks of a session that wait for its next stop, the end of its input counted as one."""


@dataclass(frozen=True, slots=True)
class EncoderEntry:
    """What the encoder made of one item, or makes with a frame in flight."""

    identifier: str
    num_embeds: int
    holders: tuple[RequestId, ...] = ()
    """Who still needs it, sorted: a request stands there once for each place of the item in it."""


@dataclass(frozen=True, slots=True)
class EncoderSnapshot:
    """The encoder's cache, in embeddings."""

    entries: tuple[EncoderEntry, ...] = ()
    """Sorted by identifier."""
    freeable: tuple[str, ...] = ()
    """Identifiers of those without a holder, next to be evicted first."""
    num_free: int = 0
    """Not taken by any entry."""
    num_freeable: int = 0
    """Those, and what entries without a holder take."""
    freed: tuple[str, ...] = ()
    """Identifiers that the next plan has the worker drop."""


@dataclass(frozen=True, slots=True)
class TransfersSnapshot:
    """What is under way between pool and store."""

    offers: tuple[KVOffer, ...] = ()
    """By request id: what the store answers about unfinished requests, but for those of which it
    says no more than `KVOffer(request_id)`: that it has nothing and wants nothing."""
    received: tuple[RequestId, ...] = ()
    """Parked requests whose load has come to its end, sorted."""
    unsettled: tuple[RequestId, ...] = ()
    """Running ones whose load is part of a frame in flight, sorted."""
    held: tuple[HeldBlocks, ...] = ()
    """By request id."""
    deferred_frees: tuple[DeferredFree, ...] = ()
    """In the order in which they were given up. Empty with `max_frames_in_flight` 1."""


@dataclass(frozen=True, slots=True)
class PinsSnapshot:
    """What stays between turns of jobs, and the time."""

    now: int = 0
    """Ticks: the latest time that was told."""
    pins: tuple[Pin, ...] = ()
    """In the order in which turns ended; of each job one at most."""
    estimates: tuple[PinEstimate, ...] = ()
    """By job, of those that have a pin or an unfinished turn: what keeps blocks at all."""


@wide_dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything two exact engines must agree on, in canonical form."""

    pause_state: PauseState
    waiting: tuple[RequestId, ...]
    """In the order in which they would be taken; likewise `skipped_waiting`."""
    skipped_waiting: tuple[RequestId, ...]
    running: tuple[RequestId, ...]
    """In running order: FCFS preempts from its end."""
    requests: tuple[RequestSnapshot, ...]
    """Sorted by request id."""
    ref_counts: tuple[int, ...]
    """Indexed by block id; the null block's is always 0."""
    free_queue: tuple[BlockId, ...]
    """Head first: the head is allocated, and so evicted, next."""
    block_keys: tuple[BlockKey | None, ...]
    """What each block carries, indexed by block id; None where it is not published."""
    cached: Mapping[BlockKey, tuple[BlockId, ...]]
    """The prefix-cache map: the blocks of a key in order of publication; a hit takes the first."""
    frames_in_flight: tuple[FrameId, ...]
    next_frame_id: FrameId
    finished_req_ids: tuple[RequestId, ...]
    """Ended since the last plan, sorted."""
    prev_scheduled_req_ids: tuple[RequestId, ...]
    """In the last plan (and not force-reset since), sorted."""
    stats: Stats
    encoder: EncoderSnapshot | None = None
    """None where no encoder is modelled."""
    transfers: TransfersSnapshot | None = None
    """None without a connector."""
    pins: PinsSnapshot | None = None
    """None unless the policy is `Policy.CONTINUUM`."""
    admission_closed: bool = False
    """Whether admission waits for `admission_high_blocks` free blocks."""
    has_work: bool | None = None
    """Whether the loop that drives the engine must go on planning; False: it may sleep until the
    next event. None if the engine does not say (vLLM's `has_requests`).

    There is work while a request may be scheduled, a worker is to be told that one has ended, or
    the end of a transfer is awaited. A session that rests is none, nor is who is held by a pause.
    Answers to plans in flight are awaited by the loop in any case."""

    def request(self, request_id: RequestId) -> RequestSnapshot | None:
        """The unfinished request of this id, or None."""
        return next((r for r in self.requests if r.request_id == request_id), None)
