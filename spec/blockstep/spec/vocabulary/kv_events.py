"""KVEvent: what an engine tells those who want to know which blocks it could share.

A router sends a request where its prefix is. It keeps a copy of each engine's prefix-cache map, and
the log of these events is how: whoever replays it from the beginning has the map (P20).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from blockstep.spec.vocabulary.keys import BlockKey
from blockstep.spec.vocabulary.request import TokenIds

MEDIUM_GPU = "GPU"
"""Where a block is that a prefix hit can take."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one request became findable, each behind the one before it.

    A key that is stored twice is in two blocks, and findable until both are removed. What names a
    block beside its tokens (adapter, salt, items, embeddings, KV-cache group) is in its key.
    """

    keys: tuple[BlockKey, ...]
    """At least one, all of one group."""
    parent: BlockKey | None
    """The key of the block before the first, in the same group; None where that begins a prompt."""
    token_ids: TokenIds
    """Of those blocks, one behind the other."""
    block_size: int
    """Token slots per block of the group."""
    adapter: str | None = None
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are not findable any more: somebody else needed them, or they were never written."""

    keys: tuple[BlockKey, ...]
    """One for each block."""
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is findable any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
