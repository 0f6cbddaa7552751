"""Observation: everything that a scheduler may answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from blockstep.spec.copies import wide_dataclass
from blockstep.spec.vocabulary.forks import BlockCopy
from blockstep.spec.vocabulary.kv_events import KVEvent
from blockstep.spec.vocabulary.request import (
    DRAFT_PLACEHOLDER,
    BlockId,
    BlockTables,
    FinishReason,
    FrameId,
    Request,
    RequestId,
    TokenIds,
)
from blockstep.spec.vocabulary.transfers import KVLoad, KVSave


class RejectCode(StrEnum):
    """Why an event was refused. Stable: traces and engines rely on the values."""

    MALFORMED_EVENT = "malformed_event"
    """Not an event, or a field of a wrong type."""
    BAD_REQUEST = "bad_request"
    """A field of the request is out of its range."""
    DUPLICATE_REQUEST = "duplicate_request"
    """The id belongs to an unfinished request."""
    REQUEST_IN_FLIGHT = "request_in_flight"
    """The id belongs to a finished request that a frame in flight still names, or of which a
    transfer holds blocks."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt and one output token exceed `max_model_len`."""
    NEVER_FITS = "never_fits"
    """At its longest it needs more blocks than the empty pool has (P11)."""
    PIPELINE_FULL = "pipeline_full"
    """`max_frames_in_flight` plans await their commit."""
    UNKNOWN_FRAME = "unknown_frame"
    """No such frame is in flight: never scheduled, or committed already (P18)."""
    FRAME_OUT_OF_ORDER = "frame_out_of_order"
    """An older frame is still in flight: answers are taken in the order of the plans (P13)."""
    BAD_RESULT = "bad_result"
    """The rows do not answer the frame: missing, foreign, of a wrong length, accepting no draft, or
    with a token that a grammar forbids."""
    BAD_DRAFTS = "bad_drafts"
    """Speculation is off or asynchronous, too many drafts for one request, or one named twice. With
    a `GrammarBitmask`: scheduling is not asynchronous, or one is named twice."""
    UNKNOWN_REQUEST = "unknown_request"
    """No unfinished request has this id."""
    NOT_STRUCTURED = "not_structured"
    """The request does not use structured output, so it has no grammar."""
    GRAMMAR_BEHIND = "grammar_behind"
    """A request of which the mask has rows samples in an older frame, too: commit that first."""
    BAD_FORK = "bad_fork"
    """Forks are off, the parent is a session or has not begun, or an output of the branch would
    have ended it or is what its grammar forbids."""
    FORK_IN_FLIGHT = "fork_in_flight"
    """A frame in flight names the parent: commit it first."""
    NOT_RESUMABLE = "not_resumable"
    """The request is no session, or its client has said that no more input comes."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The event was refused and nothing changed. Equality is by code: wording is free."""

    code: RejectCode
    detail: str = field(default="", compare=False)
    """Names the input, the rule and the fix."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The event was taken; there is nothing to report."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request the worker has not seen: everything about it (seed 001, "NewRequestData")."""

    request: Request
    block_ids: BlockTables
    """Its whole block tables."""
    num_computed_tokens: int
    """Tokens whose KV exists already: the prefix hit, or what a branch shares."""
    num_scheduled_tokens: int
    output_token_ids: TokenIds = ()
    """Of a branch: the outputs that it begins with."""

    @property
    def request_id(self) -> RequestId:
        """The id of `request`."""
        return self.request.request_id

    @property
    def draft_token_ids(self) -> TokenIds:
        """A placeholder for each scheduled token past the known ones; there only by a quirk.

        Nobody has proposed for a new request, so it is for none of them to be accepted.
        """
        end = self.num_computed_tokens + self.num_scheduled_tokens
        num_known = len(self.request.prompt_token_ids) + len(self.output_token_ids)
        return (DRAFT_PLACEHOLDER,) * max(end - num_known, 0)


@wide_dataclass(frozen=True, slots=True)
class CachedRow:
    """A request the worker knows: the difference only (seed 001, "CachedRequestData")."""

    request_id: RequestId
    resumed: bool
    """True: it returns from preemption, and `new_block_ids` replaces its block tables."""
    new_block_ids: BlockTables
    """Blocks to append, or all of them when resumed."""
    all_token_ids: TokenIds | None
    """Prompt and output, sent when it was not in the previous plan; None otherwise."""
    num_computed_tokens: int
    """Tokens whose KV exists before this step, as if all drafts in flight were accepted."""
    num_output_tokens: int
    """Outputs known, and those promised by frames in flight."""
    num_scheduled_tokens: int
    """Tokens to run, drafts included."""
    draft_token_ids: TokenIds = ()
    """The last of the scheduled tokens, to be verified; under asynchronous scheduling each is
    `DRAFT_PLACEHOLDER`, for the worker to replace by what it proposed after the plan before."""


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Items of one request that its row needs encoded."""

    request_id: RequestId
    item_indices: tuple[int, ...]
    """Into `Request.items`, ascending."""


@wide_dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. A plan with rows is a frame in flight until its Commit."""

    frame_id: FrameId
    new: tuple[NewRow, ...] = ()
    """In order of admission."""
    cached: tuple[CachedRow, ...] = ()
    """Running ones in running order, then resumed ones in order of admission."""
    finished_req_ids: tuple[RequestId, ...] = ()
    """Ended since the last plan, sorted; the worker drops them before anything else."""
    preempted_req_ids: tuple[RequestId, ...] = ()
    """Preempted while this step was planned, sorted."""
    remapped_req_ids: tuple[RequestId, ...] = ()
    """Running requests of whose row `new_block_ids` is the whole block table, sorted.

    Blocks of theirs were exchanged for others that hold the same (a duplicate was freed, say). A
    worker replaces the table, as it does for one that resumes, and computes nothing again. Here a
    block that is held stays where it is, but for one that is copied."""
    block_copies: tuple[BlockCopy, ...] = ()
    """Shared blocks that a row of this step writes in, and the copies that it writes in instead: to
    be copied one by one before anything else is done to a block. In the order of scheduling, and of
    the groups for each row."""
    num_common_prefix_blocks: tuple[int, ...] = field(default=(), compare=False)
    """Per group: leading blocks that stand in the table of every running request, whatever else
    holds them, so that a worker may attend to them once for all rows (P26). 0 for a group that is
    not under full attention, without prefix caching, and where nobody runs.

    A hint: an engine may leave it out, and two plans are equal without it."""
    new_block_ids_to_zero: tuple[BlockId, ...] = ()
    """Blocks to be zeroed before the step: what it takes newly for attention from a pool that
    serves recurrent groups too, by group. A state left in one may read as NaN, and a kernel reads
    whole blocks. Empty where no group is recurrent."""
    scheduled_encoder_inputs: tuple[EncoderInputs, ...] = ()
    """What the worker encodes before the step, in the order of the rows."""
    external_encoder_inputs: tuple[EncoderInputs, ...] = ()
    """What it loads from a connector instead, likewise."""
    free_encoder_mm_hashes: tuple[str, ...] = ()
    """Identifiers of items that the worker drops before anything else, in the order of eviction."""

    kv_loads: tuple[KVLoad, ...] = ()
    """What the worker has the store load, in the order in which requests were looked at. Who has an
    asynchronous one has no row."""
    kv_saves: tuple[KVSave, ...] = ()
    """What the worker has the store keep of requests that are preempted, in the order in which they
    were: before anything else is done to a block, copies and loads included. Who was not yet
    computed far enough for `swap_min_tokens` is not there, nor whose KV is to be loaded still."""

    has_structured_output_requests: bool = False
    """Whether the frame's mask has rows: whether a row samples whose request has a `grammar`."""
    pending_structured_output_tokens: bool = False
    """Whether one of those has placeholders in older frames, which must be answered before a mask
    can be made of this one (`GRAMMAR_BEHIND`)."""

    @property
    def rows(self) -> tuple[NewRow | CachedRow, ...]:
        """All rows: new ones, then cached ones."""
        return (*self.new, *self.cached)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step, over all rows."""
        return sum(row.num_scheduled_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """What one request gained in one step."""

    request_id: RequestId
    new_token_ids: TokenIds
    """Delivered to the client; nothing after the token that stopped it."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended it, when one of `stop_token_ids` did."""
    num_cached_tokens: int = 0
    """Tokens that it had not to compute at its first admission: found, or loaded."""
    num_external_tokens: int | None = field(default=None, compare=False)
    """Those of `num_cached_tokens` that a store loaded; None if the engine does not tell them.

    A hint: an engine may leave it out, and two rows are equal without it. It is held to the loads
    that plans told (P21)."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step delivered: one row per request with new tokens, in the order of scheduling.

    That order is: running requests in running order, then admitted ones in order of admission,
    new and resumed mixed. It is also the order in which a commit ends requests and frees blocks.
    """

    rows: tuple[OutputRow, ...] = ()
    kv_events: tuple[KVEvent, ...] = ()
    """Of a commit: what has become of blocks since the last answer that told it, in the order in
    which it happened. Also what plans did that are in flight still: their blocks are findable."""


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """What one request may sample in one frame."""

    request_id: RequestId
    allowed: tuple[TokenIds | None, ...]
    """Of each of its drafts, then of the token behind them: the tokens that may stand there,
    sorted; None where all may."""
    draft_token_ids: TokenIds = ()
    """Its drafts, as many as planned: those that its grammar accepts, then placeholders."""


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """The mask of a frame: a row for each request with a `grammar` that samples in it.

    In the order of scheduling. Empty where there is none.
    """

    rows: tuple[GrammarRow, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftsTaken:
    """The requests whose drafts were attached, in the order given; the others' were dropped."""

    request_ids: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """The requests that were ended by this abort, in the order given."""

    request_ids: tuple[RequestId, ...] = ()
    ending_req_ids: tuple[RequestId, ...] = ()
    """Those for whom it takes effect with the next plan, in the order given. Until then they live
    as if nobody had given up: commits deliver to them, and may end them. The next plan has no row
    of them; its `finished_req_ids` names those that a worker knows, which drops them there. Always
    empty here: an abort ends at once."""


@dataclass(frozen=True, slots=True)
class ResetDone:
    """Whether the prefix cache was emptied; False means nothing changed."""

    success: bool
    kv_events: tuple[KVEvent, ...] = ()
    """Of one that succeeds: as in `Outputs`. Nobody is to wait for the next commit to learn that
    what an engine had is gone: weights may have changed, and it may be idle from now on."""


Observation: TypeAlias = (
    Plan | Outputs | DraftsTaken | Aborted | GrammarOutput | ResetDone | Ack | Rejected
)
