"""Requests: one unfinished request, what it holds of each KV group, and the frames it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockstep.spec.beside.grammar import Stand
from blockstep.spec.copies import wide_dataclass
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    NULL_BLOCK,
    BlockId,
    BlockKey,
    BlockTables,
    FrameId,
    KVLoad,
    Request,
    RequestId,
    Status,
    TokenId,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a request holds of one KV group."""

    block_table: tuple[BlockId, ...] = ()
    """Null blocks stand for its first ones once no token attends to them any more."""
    num_cached_blocks: int = 0
    """Leading blocks of the table whose key is settled (hit or published)."""


AT_THE_BEGINNING = Stand()
NOTHING_HELD = (Holding(),)
"""Of one KV group before admission, and after preemption."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix found in the cache: valid for every KV group, so of one length."""

    num_tokens: int
    block_tables: BlockTables
    """Per group: null blocks for what is not attended any more, and the blocks to share behind
    them. Empty where there is no hit."""
    junction: int = 0
    """Tokens that some groups alone have cached, if those are more; in no strict run."""
    num_external: int = 0
    """The last of its tokens, which a store loads into blocks that are still to be taken. What is
    not attended behind these has null blocks, too."""

    @property
    def num_local(self) -> int:
        """Those before, which the blocks of others hold."""
        return self.num_tokens - self.num_external


@wide_dataclass(frozen=True, slots=True)
class RequestState:
    """One unfinished request.

    num_known_tokens         |------ prompt ------|-- verified outputs --|
    num_tokens_with_spec     |------ prompt ------|-- verified outputs --|-- drafts --|
    num_computed_tokens      |---- KV exists ---->|

    and with frames in flight, of which each promises a token and its drafts:

    num_known_tokens         |------ prompt ------|-- verified outputs --|
    num_output_placeholders                                              |-- promised --|
    num_computed_tokens      |---- KV exists, or will once they have run ------------->|
    """

    request: Request
    status: Status
    output_token_ids: TokenIds = ()
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    spec_token_ids: TokenIds = ()
    is_prefill_chunk: bool = False
    holdings: tuple[Holding, ...] = NOTHING_HELD
    """Per KV group."""
    block_keys: tuple[BlockKey, ...] = ()
    """Keys of its full blocks of known tokens: they follow from the tokens (see `hashing`)."""
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    grammar_ready: bool = False
    last_stop_token_id: TokenId | None = None
    """Of a session: the stop token that it was told at the end of its last chunk."""
    updates: tuple[Request, ...] = ()
    """Of a session: chunks to come, oldest first; one that is not resumable is the end of them."""
    stand: Stand = AT_THE_BEGINNING
    """Where its outputs stand in its grammar, if it has one (P23)."""
    junction: int = 0
    """That of its hit; in no strict run."""
    is_unsettled: bool = False
    """Whether KV of it may not have come that a store loads: until it is known to be there, nothing
    of it becomes findable (P19)."""

    @property
    def request_id(self) -> RequestId:
        """The id of `request`."""
        return self.request.request_id

    @property
    def num_known_tokens(self) -> int:
        """Prompt and verified outputs (vLLM's `num_tokens`)."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> TokenIds:
        """Prompt and verified outputs."""
        return self.request.prompt_token_ids + self.output_token_ids

    @property
    def block_tables(self) -> BlockTables:
        """Per KV group: the blocks it holds, positions in order."""
        return tuple([holding.block_table for holding in self.holdings])


def without_nulls(block_table: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
    """The blocks that a table holds: null blocks mostly stand in front of them. Source: P1."""
    num_null = block_table.count(NULL_BLOCK)
    held = block_table[num_null:] if num_null else block_table
    if num_null and NULL_BLOCK in held:
        return tuple([block_id for block_id in block_table if block_id != NULL_BLOCK])
    return held


@wide_dataclass(frozen=True, slots=True)
class FrameRow:
    """What a frame in flight asks of one request."""

    request_id: RequestId
    draft_token_ids: TokenIds
    samples: bool
    """Whether the step reaches the last token that will be known, so that the worker samples."""
    is_dropped: bool = False
    """Whether what it sampled is not delivered: a session has stopped before it."""
    num_in_doubt: int = 0
    """Computed tokens of it that may have to be computed again: its drafts."""
    has_mask: bool = False
    """Whether what it samples is held to a grammar."""
    is_masked: bool = False
    """Whether a mask was made with its drafts: what still is a placeholder, nobody can accept."""
    num_scheduled: int = 0
    """Its tokens; in no strict run."""

    @property
    def verifiable_drafts(self) -> TokenIds:
        """Its drafts without those that a mask cut off, which stand last."""
        if not self.is_masked or DRAFT_PLACEHOLDER not in self.draft_token_ids:
            return self.draft_token_ids
        return self.draft_token_ids[: self.draft_token_ids.index(DRAFT_PLACEHOLDER)]


@dataclass(frozen=True, slots=True)
class Frame:
    """A plan on its way: scheduled, not yet committed."""

    frame_id: FrameId
    rows: tuple[FrameRow, ...]
    """In the order of scheduling, which is the order of commit."""
    has_structured_output: bool = False
    """Whether a row samples for a request with structured output; in no strict rule."""
    loads: tuple[KVLoad, ...] = ()
    """What a store loads before its rows read it, in the order of the plan."""


def list_rows_in_flight(frames: Sequence[Frame], request_id: RequestId) -> list[FrameRow]:
    """What frames in flight ask of a request, and will deliver; oldest first. Source: P13, P14."""
    return [
        row
        for frame in frames
        for row in frame.rows
        if row.request_id == request_id and not row.is_dropped
    ]


def count_in_doubt(frames: Sequence[Frame], request_id: RequestId) -> int:
    """Computed tokens of a request that frames in flight may take back. Source: P14."""
    return sum([row.num_in_doubt for row in list_rows_in_flight(frames, request_id)])
