"""Kinds: which tokens each kind of attention still reads, and what a group takes and leaves."""

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
"""Takes blocks that are given up, in the order of their table."""


class Extent(NamedTuple):
    """How far the tables of a request must reach."""

    num_tokens: int
    """Computed behind the step."""
    num_slots: int
    """The same with the lookahead."""


class Group:
    """A KV-cache group under full attention, and what all kinds have in common.

    Args:
        number: its place among the groups of the config.
        group: what the config says of it.
        config: of the run.
    """

    def __init__(self, number: int, group: KVGroup, config: Config) -> None:
        self.number = number
        self.block_size = group.block_size
        self.links = group.block_size // config.block_size
        """Blocks of the chain of names in one of its blocks: the last of them names it."""
        self.size = group.sliding_window or group.attention_chunk_size
        """Tokens of the window or of a chunk."""
        self.num_spare = group.num_speculative_blocks
        """Blocks for states behind drafts."""
        self.is_whole = group.kind is GroupKind.FULL
        """Whether every token is read for ever."""
        self.is_state = group.kind is GroupKind.RECURRENT
        """Whether blocks hold states, each made of the one before it."""
        self.is_beside = group.kind is GroupKind.CROSS_ATTENTION
        """Whether it holds what stands beside the text."""
        self.is_aligned = group.mamba_cache_mode is MambaCacheMode.ALIGN
        """Whether there are states at the ends of chunks only."""
        # A head reads hidden states beside KV, and a state stands for no token of its own.
        self.num_dropped = int(config.drops_last_hit_block and not self.is_state)
        """Blocks that it must have behind a hit, to be given back."""
        self.max_doubt = _count_in_doubt(config)
        """Drafts in flight of one request, at most."""
        self.reach = _count_row(config) + config.num_lookahead_tokens
        """Slots of one request that a step writes and reserves, at most."""

    def count_read(self, num_computed: int) -> int:
        """How many of the computed tokens, counted from the last, some later token reads."""
        return num_computed

    def first_block(self, num_computed: int) -> int:
        """The first block with a token that is read: those before it are left."""
        return (num_computed - self.count_read(num_computed)) // self.block_size

    def count_doubt(self, in_doubt: int) -> int:
        """Computed tokens that may have to be computed again, of which so many are drafts."""
        return in_doubt

    def count_blocks(self, num_slots: int) -> int:
        """Places of its table with so many slots."""
        return -(-num_slots // self.block_size)

    def count_missing(self, holding: Holding, extent: Extent) -> int:
        """Blocks that a table lacks (P8)."""
        return max(self.count_blocks(extent.num_slots) - len(holding.blocks), 0)

    def extend(self, holding: Holding, extent: Extent, pool: BlockPool) -> tuple[BlockId, ...]:
        """Give a table what it lacks; what is appended to it."""
        taken = pool.take(self.count_missing(holding, extent))
        holding.blocks += taken
        return tuple(taken)

    def leave(self, holding: Holding, num_computed: int, in_doubt: int, free: Free) -> None:
        """Give up the blocks in front that no token reads any more, last block first."""
        blocks, begin = holding.blocks, holding.num_left
        end = self.first_block(num_computed - self.count_doubt(in_doubt))
        if end > begin:
            free([block for block in blocks[begin:end] if block != NULL_BLOCK])
            blocks[begin:end] = [NULL_BLOCK] * (end - begin)
            holding.num_left = end

    def find_branch_point(self, holding: Holding, num_tokens: int) -> int:
        """`num_tokens` if another can go on behind them with blocks of these, else a bound of the
        shorter ones that could be.

        What is read there must be held, and the block that is written in next must not be settled:
        it can be found, so nobody writes in it again.
        """
        index = num_tokens // self.block_size
        if num_tokens % self.block_size and index < holding.num_cached:
            return index * self.block_size
        end = self.count_blocks(num_tokens)
        is_held = self.first_block(num_tokens) >= min(holding.num_left, end)
        return num_tokens if is_held else num_tokens - 1

    def count_held(self, num_slots: int) -> int:
        """Blocks that it holds at once, at most, until it has so many slots (P11)."""
        return self.count_blocks(num_slots)

    def count_held_of(self, num_read: int, step: int, num_slots: int) -> int:
        """The same where so many computed tokens are read, from a multiple of `step` on."""
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
    """Cross-attention: a token reads what the encoder made of the items, held from admission on."""

    def count_missing(self, holding: Holding, _extent: Extent) -> int:
        """See `Group`. Nothing is added to it."""
        return max(self.count_blocks(holding.num_beside) - len(holding.blocks), 0)


def _count_row(config: Config) -> int:
    """Tokens of one request in a step, at most."""
    threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens
    return min(config.max_num_batched_tokens, threshold)


def _count_in_doubt(config: Config) -> int:
    """Drafts of a request in the frames before a step, at most.

    A row of drafts has a known token before them, so that a small threshold keeps some back.
    """
    ahead = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    return ahead * min(config.num_speculative_tokens, _count_row(config) - 1)
