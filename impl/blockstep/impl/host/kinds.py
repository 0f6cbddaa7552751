"""Kinds: which tokens each kind of attention still reads, and what a group then holds at most."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Final

from blockstep.spec.vocabulary import Config, GroupKind, KVGroup


class Group:
    """A KV-cache group under full attention, and what all kinds have in common.

    Args:
        number: its place among the groups of the config.
        group: what the config says of it.
        config: of the run.
    """

    __slots__ = ("block_size", "is_whole", "links", "number", "reach", "size")

    def __init__(self, number: int, group: KVGroup, config: Config) -> None:
        self.number = number
        self.block_size = group.block_size
        self.links = group.block_size // config.block_size
        """Blocks of the chain of names in one of its blocks: the last of them names it."""
        self.reach = _count_reach(config)
        self.size = group.sliding_window or group.attention_chunk_size
        """Tokens of the window or of a chunk."""
        self.is_whole = group.kind is GroupKind.FULL
        """Whether every token is read for ever."""

    def first_read(self, num_computed: int) -> int:
        """The first token that the token behind so many computed ones, or a later one, reads."""
        return 0 * num_computed

    def first_block(self, num_computed: int) -> int:
        """The first block with such a token: those before it are left."""
        return self.first_read(num_computed) // self.block_size

    def count_blocks(self, num_slots: int) -> int:
        """Blocks with so many slots."""
        return -(-num_slots // self.block_size)

    def count_held(self, num_slots: int) -> int:
        """Blocks that it holds at once, at most, until it has so many slots (P11)."""
        return self.count_blocks(num_slots)

    def _count_held_of(self, num_read: int, step: int, num_slots: int) -> int:
        """Of so many tokens read, and a step's reach; they begin at any multiple of `step`."""
        before = self.block_size - gcd(step, self.block_size)
        return self.count_blocks(min(before + num_read + self.reach, num_slots))


class WindowGroup(Group):
    """Sliding window: a token reads itself and those before it, `size` in all."""

    __slots__ = ()

    def first_read(self, num_computed: int) -> int:
        """See `Group`."""
        return max(num_computed - self.size + 1, 0)

    def count_held(self, num_slots: int) -> int:
        """See `Group`."""
        return self._count_held_of(self.size - 1, 1, num_slots)


class ChunkGroup(Group):
    """Chunked-local: a token reads itself and those before it in its chunk of `size` tokens."""

    __slots__ = ()

    def first_read(self, num_computed: int) -> int:
        """See `Group`."""
        return num_computed - num_computed % self.size

    def count_held(self, num_slots: int) -> int:
        """See `Group`."""
        return self._count_held_of(self.size - 1, self.size, num_slots)


KINDS: Final[Mapping[GroupKind, type[Group]]] = {
    GroupKind.FULL: Group,
    GroupKind.SLIDING_WINDOW: WindowGroup,
    GroupKind.CHUNKED_LOCAL: ChunkGroup,
}


def make_groups(config: Config) -> tuple[Group, ...]:
    """The groups of a config, in their order; one under full attention if it names none."""
    return tuple([KINDS[g.kind](n, g, config) for n, g in enumerate(config.kv_groups)])


def _count_reach(config: Config) -> int:
    """Slots behind the first token that may have to be computed again, at most: what a step
    schedules, the lookahead, and the drafts of the frames before it.

    A row of drafts has a known token before them, so that a small threshold keeps some back."""
    row = config.max_num_batched_tokens
    if config.long_prefill_token_threshold:
        row = min(row, config.long_prefill_token_threshold)
    ahead = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    in_doubt = ahead * min(config.num_speculative_tokens, row - 1)
    return row + config.num_lookahead_tokens + in_doubt
