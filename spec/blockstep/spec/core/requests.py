"""Requests: one unfinished request, what it holds of each KV group, and its rows in flight."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.copies import wide_dataclass
from blockstep.spec.core.parts import NO_PARTS, Parts
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    BlockKey,
    BlockTables,
    FrameId,
    Request,
    RequestId,
    Status,
    TokenIds,
)


@wide_dataclass(frozen=True, slots=True)
class Holding:
    """The blocks that a request holds in one KV group."""

    block_table: tuple[BlockId, ...] = ()
    """Null blocks replace the first ones once no later token attends to them."""
    num_cached_blocks: int = 0
    """Leading blocks of the table that were published or hit."""


NOTHING_HELD = (Holding(),)
"""A holding without blocks: before admission, and after preemption."""


@wide_dataclass(frozen=True, slots=True)
class Hit:
    """A prefix hit: valid for every KV group, so of one length."""

    num_tokens: int
    block_tables: BlockTables
    """Per group: null blocks for skipped ones, then the blocks to share. Empty if there is no hit.
    """
    num_pending: int = 0
    """Number of its last tokens whose KV is written from outside into blocks still to be taken."""

    @property
    def num_local(self) -> int:
        """Number of tokens of the local hit, in cached blocks."""
        return self.num_tokens - self.num_pending


NO_HIT = Hit(0, ())


@wide_dataclass(frozen=True, slots=True)
class RequestState:
    """One unfinished request.

    num_known_tokens         |------ prompt ------|-- verified outputs --|
    num_tokens_with_spec     |------ prompt ------|-- verified outputs --|-- drafts --|
    num_computed_tokens      |---- KV exists ---->|

    and with frames in flight, each with a placeholder for a token and for its drafts:

    num_known_tokens         |------ prompt ------|-- verified outputs --|
    num_output_placeholders                                              |- in flight --|
    num_computed_tokens      |---- KV exists, or will once they have run -------------->|
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
    has_unconfirmed_kv: bool = False
    """Whether some of its KV is unconfirmed: until it is confirmed, no block is published (P19)."""
    parts: Parts = NO_PARTS
    """Values of features and releases."""

    @property
    def request_id(self) -> RequestId:
        """The id of `request`."""
        return self.request.request_id

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and verified output tokens. Source: vLLM `num_tokens`."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> TokenIds:
        """Prompt and verified output tokens."""
        return self.request.prompt_token_ids + self.output_token_ids

    @property
    def block_tables(self) -> BlockTables:
        """Per KV group: the blocks it holds, in token order."""
        return tuple([holding.block_table for holding in self.holdings])


def without_nulls(block_table: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
    """Return the blocks of a table without null blocks, which mostly come first. Source: P1."""
    num_null = block_table.count(NULL_BLOCK)
    held = block_table[num_null:] if num_null else block_table
    if num_null and NULL_BLOCK in held:
        return tuple([block_id for block_id in block_table if block_id != NULL_BLOCK])
    return held


@wide_dataclass(frozen=True, slots=True)
class FrameRow:
    """One request's row of a frame in flight."""

    request_id: RequestId
    draft_token_ids: TokenIds
    samples: bool
    """Whether the step computes the last token that will be known, so that the worker samples."""
    is_dropped: bool = False
    """Whether its tokens are not delivered."""
    parts: Parts = NO_PARTS
    """Values of features and releases."""


@wide_dataclass(frozen=True, slots=True)
class Frame:
    """A plan in flight: scheduled, not yet committed."""

    frame_id: FrameId
    rows: tuple[FrameRow, ...]
    """Rows in the order of scheduling, which is the order of commit."""
    parts: Parts = NO_PARTS
    """Values of features and releases."""


def list_rows_in_flight(frames: Sequence[Frame], request_id: RequestId) -> list[FrameRow]:
    """Return the rows in flight of a request that will deliver; oldest first. Source: P13, P14."""
    return [
        row
        for frame in frames
        for row in frame.rows
        if row.request_id == request_id and not row.is_dropped
    ]
