"""KVEvent: the log of the prefix cache, for routers.

A router sends a request to an engine that has its prefix. It keeps a copy of each engine's
prefix-cache map, built from the log of these events: replayed from the beginning, the log gives the
map (P20).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from blockstep.spec.vocabulary.keys import BlockKey
from blockstep.spec.vocabulary.request import TokenIds

MEDIUM_GPU = "GPU"
"""The place of blocks that a prefix hit can use."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one request were published, each after the one before it.

    A key that is stored twice is in two blocks, and cached until both are removed. The parts of a
    block's identity besides its tokens (adapter, salt, items, embeddings, KV group) are in its key.
    """

    keys: tuple[BlockKey, ...]
    """One key or more, all of one group."""
    parent: BlockKey | None
    """The key of the block before the first, in the same group; None if that begins a prompt."""
    token_ids: TokenIds
    """Token ids of these blocks, concatenated."""
    block_size: int
    """Token slots per block of the group."""
    adapter: str | None = None
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are not cached any more: they were evicted, or never written."""

    keys: tuple[BlockKey, ...]
    """One key for each block."""
    medium: str = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was emptied."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
