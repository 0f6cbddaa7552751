"""Kinds: the tokens that each kind of attention still reads, and the blocks that a group takes and
frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple, TypeAlias

from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.table import Holding
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
)

Free: TypeAlias = Callable[[Sequence[BlockId]], None]
"""A function that frees blocks, given in the order of their table."""


class Extent(NamedTuple):
    """The tokens and slots that the tables of a request must hold."""

    num_tokens: int
    """The computed tokens after the step."""
    num_slots: int
    """The same with the lookahead."""
    num_loaded: int = 0
    """Tokens up to which a store loads, hits included; 0 if it loads nothing."""


class Group:
    """A KV-cache group with full attention, and what all kinds have in common.

    Args:
        number: its index among the groups of the config.
        group: its entry in the config.
        config: the config of the run.
    """

    def __init__(self, number: int, group: KVGroup, config: Config) -> None:
        self.number = number
        self.block_size = group.block_size
        self.links = group.block_size // config.block_size
        """Blocks of the smallest size in one of its blocks; the last one's key is the block's key.
        """
        self.size = group.sliding_window or group.attention_chunk_size
        """Tokens of the window or of a chunk."""
        self.num_spare = group.num_speculative_blocks
        """Blocks for states after drafts."""
        self.is_whole = group.kind is GroupKind.FULL
        """Whether later tokens read every token."""
        self.is_state = group.kind is GroupKind.RECURRENT
        """Whether blocks hold states, each computed from the one before it."""
        self.is_beside = group.kind is GroupKind.CROSS_ATTENTION
        """Whether it holds the cross-attention KV of items, and no KV of the text."""
        self.is_aligned = group.mamba_cache_mode is MambaCacheMode.ALIGN
        """Whether states are kept at the ends of chunks only."""
        # A draft head reads hidden states beside KV, and a state holds no KV of a single token.
        self.num_dropped = int(config.drops_last_hit_block and not self.is_state)
        """Blocks at the end of a hit that are recomputed."""
        self.max_doubt = _count_in_doubt(config)
        """The most drafts in flight of one request."""
        self.reach = _count_row(config) + config.num_lookahead_tokens
        """The most slots of one request that a step writes and reserves."""

    def count_read(self, num_computed: int) -> int:
        """Return how many of the last computed tokens some later token reads."""
        return num_computed

    def first_block(self, num_computed: int) -> int:
        """Return the index of the first block with a token that is read; those before it are
        freed."""
        return (num_computed - self.count_read(num_computed)) // self.block_size

    def count_doubt(self, in_doubt: int) -> int:
        """Return how many computed tokens may be computed again, if `in_doubt` of them are
        drafts."""
        return in_doubt

    def count_blocks(self, num_slots: int) -> int:
        """Return the length of its table with `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def count_missing(self, holding: Holding, extent: Extent) -> int:
        """Return the number of blocks that a table needs for `extent` (P8)."""
        return max(self.count_blocks(extent.num_slots) - len(holding.blocks), 0)

    def extend(self, holding: Holding, extent: Extent, pool: BlockPool) -> tuple[BlockId, ...]:
        """Append the blocks that a table needs for `extent`; return them."""
        taken = pool.take(self.count_missing(holding, extent))
        holding.blocks += taken
        return tuple(taken)

    def leave(self, holding: Holding, num_computed: int, in_doubt: int, free: Free) -> None:
        """Free the leading blocks that no later token reads, last block first."""
        blocks, begin = holding.blocks, holding.num_left
        end = self.first_block(num_computed - self.count_doubt(in_doubt))
        if end > begin:
            free([block for block in blocks[begin:end] if block != NULL_BLOCK])
            blocks[begin:end] = [NULL_BLOCK] * (end - begin)
            holding.num_left = end

    def find_branch_point(self, holding: Holding, num_tokens: int) -> int:
        """Return `num_tokens` if a branch can start there, else an upper bound of the smaller
        numbers.

        The blocks that the branch reads must be held, and the block that it writes next must not be
        published: a published block is not written again.
        """
        index = num_tokens // self.block_size
        if num_tokens % self.block_size and index < holding.num_cached:
            return index * self.block_size
        end = self.count_blocks(num_tokens)
        is_held = self.first_block(num_tokens) >= min(holding.num_left, end)
        return num_tokens if is_held else num_tokens - 1

    def count_held(self, num_slots: int) -> int:
        """Return the most blocks that a request with `num_slots` slots ever held at once (P11)."""
        return self.count_blocks(num_slots)

    def count_held_of(self, num_read: int, step: int, num_slots: int) -> int:
        """Return the same if `num_read` computed tokens are read, and the first of them may only be
        at a multiple of `step`."""
        before = self.block_size - gcd(step, self.block_size)
        in_doubt = self.count_doubt(self.max_doubt)
        return self.count_blocks(min(before + num_read + in_doubt + self.reach, num_slots))


class WindowGroup(Group):
    """Sliding window: a token reads itself and those before it, `size` in all."""

    def count_read(self, num_computed: int) -> int:
        """See `Group`."""
        return min(num_computed, self.size - 1)

    def count_held(self, num_slots: int) -> int:
        """See `Group`."""
        return self.count_held_of(self.size - 1, 1, num_slots)


class ChunkGroup(Group):
    """Chunked-local: a token reads itself and those before it in its chunk of `size` tokens."""

    def count_read(self, num_computed: int) -> int:
        """See `Group`."""
        return num_computed % self.size

    def count_held(self, num_slots: int) -> int:
        """See `Group`."""
        return self.count_held_of(self.size - 1, self.size, num_slots)


class CrossGroup(Group):
    """Cross-attention: a token reads the KV of the items, which is held from admission on."""

    def count_missing(self, holding: Holding, _extent: Extent) -> int:
        """See `Group`. It does not grow with the text."""
        return max(self.count_blocks(holding.num_beside) - len(holding.blocks), 0)


def _count_row(config: Config) -> int:
    """Return the most tokens of one request in a step."""
    threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens
    return min(config.max_num_batched_tokens, threshold)


def _count_in_doubt(config: Config) -> int:
    """Return the most drafts of a request in the frames before a step.

    A row of drafts has a known token before them, so a small threshold leaves out some drafts.
    """
    ahead = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    return ahead * min(config.num_speculative_tokens, _count_row(config) - 1)
