"""Observation: everything that a scheduler may return."""

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
    """Why an event was rejected. Stable: traces and engines rely on the values."""

    MALFORMED_EVENT = "malformed_event"
    """Not an event, or a field of a wrong type."""
    BAD_REQUEST = "bad_request"
    """A field of the request is out of its range."""
    DUPLICATE_REQUEST = "duplicate_request"
    """The id belongs to an unfinished request."""
    REQUEST_IN_FLIGHT = "request_in_flight"
    """The id belongs to a finished request that still has a row in a frame in flight, or whose
    blocks a transfer holds."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt and one output token exceed `max_model_len`."""
    NEVER_FITS = "never_fits"
    """The request at its longest needs more blocks than the empty pool has (P11)."""
    PIPELINE_FULL = "pipeline_full"
    """`max_frames_in_flight` plans await their commit."""
    UNKNOWN_FRAME = "unknown_frame"
    """No such frame is in flight: never scheduled, or committed already (P18)."""
    FRAME_OUT_OF_ORDER = "frame_out_of_order"
    """An older frame is still in flight: frames are committed in the order of the plans (P13)."""
    BAD_RESULT = "bad_result"
    """The rows do not fit the frame: missing, unknown, of a wrong length, accepting tokens that are
    not drafts, or with a token that a grammar forbids."""
    BAD_DRAFTS = "bad_drafts"
    """Speculation is off or asynchronous, a request has too many drafts, or is named twice. For a
    `GrammarBitmask`: scheduling is not asynchronous, or a request is named twice."""
    UNKNOWN_REQUEST = "unknown_request"
    """No unfinished request has this id."""
    NOT_STRUCTURED = "not_structured"
    """The request does not use structured output, so it has no grammar."""
    GRAMMAR_BEHIND = "grammar_behind"
    """A request with rows in the mask samples in an older frame, too: commit that first."""
    BAD_FORK = "bad_fork"
    """Forks are off, the parent is a session or has not started, or an output of the branch would
    have ended it or is forbidden by its grammar."""
    FORK_IN_FLIGHT = "fork_in_flight"
    """The parent has a row in a frame in flight: commit it first."""
    NOT_RESUMABLE = "not_resumable"
    """The request is not a session, or its client has ended the input."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The event was rejected and nothing changed. Equality is by code: the wording is free."""

    code: RejectCode
    detail: str = field(default="", compare=False)
    """Names the input, the rule and the fix."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The event was accepted; there is nothing to report."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request the worker has not seen: all its data (seed 001, "NewRequestData")."""

    request: Request
    block_ids: BlockTables
    """The request's whole block tables."""
    num_computed_tokens: int
    """Tokens whose KV exists already: the prefix hit, or what a branch shares."""
    num_scheduled_tokens: int
    output_token_ids: TokenIds = ()
    """The outputs that a branch starts with."""

    @property
    def request_id(self) -> RequestId:
        """The id of `request`."""
        return self.request.request_id

    @property
    def draft_token_ids(self) -> TokenIds:
        """One placeholder per scheduled token beyond the known tokens; empty in strict runs.

        Strict runs schedule no such token. No proposer has seen the request, so the worker must
        reject them all.
        """
        end = self.num_computed_tokens + self.num_scheduled_tokens
        num_known = len(self.request.prompt_token_ids) + len(self.output_token_ids)
        return (DRAFT_PLACEHOLDER,) * max(end - num_known, 0)


@wide_dataclass(frozen=True, slots=True)
class CachedRow:
    """A request the worker knows: the difference only (seed 001, "CachedRequestData")."""

    request_id: RequestId
    resumed: bool
    """True: the request resumes after a preemption, and `new_block_ids` replaces its block tables.
    """
    new_block_ids: BlockTables
    """Blocks to append, or all of them when resumed."""
    all_token_ids: TokenIds | None
    """Prompt and output, sent when the request was not in the previous plan; None otherwise."""
    num_computed_tokens: int
    """Tokens whose KV exists before this step, as if all drafts in flight were accepted."""
    num_output_tokens: int
    """Known outputs, and placeholders of frames in flight."""
    num_scheduled_tokens: int
    """Tokens to run, including drafts."""
    draft_token_ids: TokenIds = ()
    """The last of the scheduled tokens, to be verified. Under asynchronous scheduling each is
    `DRAFT_PLACEHOLDER`; the worker replaces it by what it proposed after the previous plan."""


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Items of one request that its row needs encoded."""

    request_id: RequestId
    item_indices: tuple[int, ...]
    """Indices into `Request.items`, ascending."""


@wide_dataclass(frozen=True, slots=True)
class Plan:
    """One step's work. A plan with rows is a frame in flight until its Commit."""

    frame_id: FrameId
    new: tuple[NewRow, ...] = ()
    """Rows in order of admission."""
    cached: tuple[CachedRow, ...] = ()
    """Running requests in running order, then resumed ones in order of admission."""
    finished_req_ids: tuple[RequestId, ...] = ()
    """Requests that finished since the last plan, sorted; the worker drops them before anything
    else."""
    preempted_req_ids: tuple[RequestId, ...] = ()
    """Requests preempted while this step was planned, sorted."""
    remapped_req_ids: tuple[RequestId, ...] = ()
    """Running requests in whose row `new_block_ids` is the whole block table, sorted.

    Some of their blocks were exchanged for others with the same content (a duplicate was freed,
    say). A worker replaces the table, as for a resumed request, and computes nothing again. In the
    spec, only a block that is copied is exchanged."""
    block_copies: tuple[BlockCopy, ...] = ()
    """Shared blocks that a row of this step writes to, and the copies that it writes to instead.
    They are copied one by one before any other access to a block. In the order of scheduling, and
    of the groups for each row."""
    num_common_prefix_blocks: tuple[int, ...] = field(default=(), compare=False)
    """Per group: leading blocks that are in the table of every running request, whatever else holds
    them, so that a worker may attend to them once for all rows (P26). 0 for a group that is not
    under full attention, without prefix caching, and if no request runs.

    A hint: an engine may leave it out, and two plans are equal without it."""
    new_block_ids_to_zero: tuple[BlockId, ...] = ()
    """Blocks to be zeroed before the step: what it takes newly for attention from a pool that
    serves recurrent groups too, by group. A state left in one may read as NaN, and a kernel reads
    whole blocks. Empty where no group is recurrent. Blocks of an asynchronous load are none of
    them: the store fills them, with zeros behind the tokens, at a time of its own (upstream
    #48481)."""
    scheduled_encoder_inputs: tuple[EncoderInputs, ...] = ()
    """Items that the worker encodes before the step, in the order of the rows."""
    external_encoder_inputs: tuple[EncoderInputs, ...] = ()
    """Items that it loads from a connector instead, in the order of the rows."""
    free_encoder_mm_hashes: tuple[str, ...] = ()
    """Identifiers of items that the worker drops before anything else, in the order of eviction."""

    kv_loads: tuple[KVLoad, ...] = ()
    """Loads from the store, in the order in which requests were tried. A request with an
    asynchronous load has no row."""
    kv_saves: tuple[KVSave, ...] = ()
    """KV of preempted requests that the worker has the store save, in the order of preemption. It
    is read before any other access to a block, including copies and loads. Requests with fewer
    computed tokens than `swap_min_tokens` are left out, and those whose KV is still to be loaded.
    """

    has_structured_output_requests: bool = False
    """Whether the frame's mask has rows: whether a row samples whose request has a `grammar`."""
    pending_structured_output_tokens: bool = False
    """Whether one of those has placeholders in older frames, which must be committed before a mask
    for this one can be made (`GRAMMAR_BEHIND`)."""

    @property
    def rows(self) -> tuple[NewRow | CachedRow, ...]:
        """All rows: new ones, then cached ones."""
        return (*self.new, *self.cached)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step, over all rows."""
        return sum(row.num_scheduled_tokens for row in self.rows)


@wide_dataclass(frozen=True, slots=True)
class OutputRow:
    """Tokens delivered to one request in one step, and its finish reason."""

    request_id: RequestId
    new_token_ids: TokenIds
    """Delivered to the client; nothing after the token that stopped it."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended it, if one of `stop_token_ids` did."""
    num_cached_tokens: int = 0
    """Tokens that were not computed at its first admission: prefix hit, or loaded."""
    num_external_tokens: int | None = field(default=None, compare=False)
    """Number of `num_cached_tokens` that a store loaded; None if the engine does not report it.

    A hint: an engine may leave it out, and two rows are equal without it. It is checked against the
    loads in plans (P21)."""


@wide_dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a step: one row per request with new tokens, in the order of scheduling.

    That order is: running requests in running order, then admitted ones in order of admission, new
    and resumed mixed. It is also the order in which a commit finishes requests and frees blocks.
    """

    rows: tuple[OutputRow, ...] = ()
    kv_events: tuple[KVEvent, ...] = ()
    """KV events of a commit: changes of the prefix cache since the last observation with KV events,
    in the order in which they happened. This includes changes by plans that are still in flight:
    their blocks are cached."""


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """The tokens that one request may sample in one frame."""

    request_id: RequestId
    allowed: tuple[TokenIds | None, ...]
    """Allowed tokens, sorted, for each of its drafts, then for the token after them; None if all
    are allowed."""
    draft_token_ids: TokenIds = ()
    """The request's drafts, as many as planned: those that its grammar accepts, then placeholders.
    """


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """The mask of a frame: a row for each request with a `grammar` that samples in it.

    In the order of scheduling. Empty if there is none.
    """

    rows: tuple[GrammarRow, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftsTaken:
    """The requests whose drafts were stored, in the order given; those of others were dropped."""

    request_ids: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """The requests that this abort ended, in the order given."""

    request_ids: tuple[RequestId, ...] = ()
    ending_req_ids: tuple[RequestId, ...] = ()
    """Requests for which the abort takes effect with the next plan, in the order given. Until then
    they continue: commits deliver to them, and may finish them. The next plan has no rows for them;
    its `finished_req_ids` lists those that the worker knows, which drops them then. Always empty in
    the spec: there an abort takes effect at once."""


@dataclass(frozen=True, slots=True)
class ResetDone:
    """Whether the prefix cache was emptied; False means nothing changed."""

    success: bool
    kv_events: tuple[KVEvent, ...] = ()
    """KV events of a successful reset, as in `Outputs`. They do not wait for the next commit:
    weights may have changed, and the engine may be idle from now on."""


Observation: TypeAlias = (
    Plan | Outputs | DraftsTaken | Aborted | GrammarOutput | ResetDone | Ack | Rejected
)
