"""Groups: the block tables of a request whose model has several kinds of attention.

There is one table per KV-cache group, and one pool for all. Blocks that no later token reads are
freed; their entries in the table become null blocks.

    window of 5, blocks of 2       tokens   | . . | . . | x x | x x | x
    9 tokens computed              table      0     0     7     3     9
                                                          ^ first_read(9) = 5, in block 2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from blockstep.impl.host.kinds import ChunkGroup, CrossGroup, Extent, Free, Group, WindowGroup
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.states import AlignedGroup, StateGroup
from blockstep.impl.host.table import Holding
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockCopy,
    BlockId,
    BlockTables,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
)

_KINDS: Final[Mapping[GroupKind, type[Group]]] = {
    GroupKind.FULL: Group,
    GroupKind.SLIDING_WINDOW: WindowGroup,
    GroupKind.CHUNKED_LOCAL: ChunkGroup,
    GroupKind.RECURRENT: StateGroup,
    GroupKind.CROSS_ATTENTION: CrossGroup,
}


@dataclass(frozen=True, slots=True)
class GroupHits:
    """The longest prefix that is a hit in every group."""

    num_tokens: int
    tables: BlockTables
    """The blocks of these tokens in each group; null blocks where no later token reads them."""

    def shared(self) -> list[BlockId]:
        """Return the blocks of all groups that the hit holds."""
        return [block for table in self.tables for block in table if block != NULL_BLOCK]


class GroupMemory:
    """The block tables of all groups, where a config has groups, a store or forks.

    Methods of one group are in `kinds`; this class combines them (P5, P8).
    """

    def __init__(self, config: Config, pool: BlockPool, prefix: PrefixMap) -> None:
        self.pool = pool
        self.prefix = prefix
        self.groups = make_groups(config)
        self.unit = lcm(*(group.block_size for group in self.groups))
        """The length of each hit is a multiple of this number of tokens: whole blocks of every
        group."""
        self.new_states: set[BlockId] = set()
        """State blocks published in this step. The rows of a step run side by side, so no row of
        this step can hit one (P4)."""
        self._aligned_sizes = [group.block_size for group in self.groups if group.is_aligned]
        """The block sizes of groups whose states are kept at the ends of chunks."""
        self.is_whole = all(group.is_whole for group in self.groups)
        """Whether in all groups later tokens read every token."""
        self.num_dropped = max(group.num_dropped * group.block_size for group in self.groups)
        """The most tokens that some group must recompute after a hit."""
        zeroes = any(group.is_state for group in self.groups)
        self._zeroed = [g.number for g in self.groups if zeroes and not g.is_state]
        """The groups whose new blocks are zeroed: a kernel reads whole blocks, and the bits of a
        state left in one may read as NaN."""
        self.no_hits = GroupHits(0, ((),) * len(self.groups))
        self.has_forks = config.enable_forks

    def begin_step(self) -> None:
        """Begin a step: states published in earlier steps can be hit from now on."""
        self.new_states.clear()

    def align(self, num_computed: int, num_scheduled: int, num_prompt: int, num_known: int) -> int:
        """Return the length of a row, shortened so that its chunk ends at a block of states if
        possible."""
        if not self._aligned_sizes or num_computed >= max(num_prompt, num_known - 1):
            return num_scheduled
        last = self._floor(num_known - self.num_dropped)
        end = num_computed + num_scheduled
        for size in self._aligned_sizes:
            begun = num_computed % size
            if begun:
                end = min(end, num_computed - begun + size)
        if end < last and self._floor(end) > num_computed:
            end = self._floor(end)
        elif num_computed < last < end:
            end = last
        return end - num_computed

    def list_to_zero(self, taken: Sequence[BlockTables]) -> tuple[BlockId, ...]:
        """Return the blocks to zero among those that the rows of a step have taken, group by
        group."""
        return tuple(
            [block for number in self._zeroed for tables in taken for block in tables[number]]
        )

    def leave(
        self,
        holdings: Sequence[Holding],
        num_computed: int,
        in_doubt: int,
        free: Free | None = None,
    ) -> None:
        """Free the blocks that no token after the computed ones reads, last block first.

        The last `in_doubt` of the computed tokens may be computed again, and so keep the blocks
        that they read. `free` frees the blocks of each group; by default the pool does.
        """
        for group, holding in zip(self.groups, holdings, strict=True):
            group.leave(holding, num_computed, in_doubt, free or self.pool.free)

    def count_missing(self, holdings: Iterable[Holding], extent: Extent) -> int:
        """Return the number of blocks of all groups that the tables need for `extent` (P8)."""
        return sum(
            group.count_missing(holding, extent)
            for group, holding in zip(self.groups, holdings, strict=True)
        )

    def take(self, holdings: Sequence[Holding], extent: Extent) -> BlockTables:
        """Append the blocks needed for `extent` to the tables; return them by group."""
        return tuple(
            [
                group.extend(holding, extent, self.pool)
                for group, holding in zip(self.groups, holdings, strict=True)
            ]
        )

    # Branches.

    def count_copies(self, holdings: Sequence[Holding], num_computed: int) -> int:
        """Return the number of shared blocks that the next token is written to, to be copied
        (P8)."""
        if not self.has_forks:
            return 0
        shared = map(self._find_shared, self.groups, holdings, [num_computed] * len(self.groups))
        return sum(index is not None for index in shared)

    def take_own(
        self, holdings: Sequence[Holding], num_computed: int, extent: Extent
    ) -> tuple[tuple[BlockCopy, ...], BlockTables]:
        """Copy the shared blocks that are written to, and append blocks as `take` does (seed 002,
        "COW").

        Returns the copies, and the appended blocks by group. The source of a copy does not become
        free, as others hold it.
        """
        copies: list[BlockCopy] = []
        taken: list[tuple[BlockId, ...]] = []
        for group, holding in zip(self.groups, holdings, strict=True):
            index = self._find_shared(group, holding, num_computed)
            if index is not None:
                source, (own,) = holding.blocks[index], self.pool.take(1)
                self.pool.free((source,))
                holding.blocks[index] = own
                copies.append(BlockCopy(source, own))
            taken.append(group.extend(holding, extent, self.pool))
        return tuple(copies), tuple(taken)

    def _find_shared(self, group: Group, holding: Holding, num_computed: int) -> int | None:
        """Return the index of the block that the next token is written to if it is shared, else
        None.

        A full block is not written to any more, so it may stay shared.
        """
        index, num_begun = divmod(num_computed, group.block_size)
        if not num_begun:
            return None
        return index if self.pool.ref_counts[holding.blocks[index]] > 1 else None

    def find_branch_point(self, holdings: Sequence[Holding], most: int) -> int:
        """Return the largest number of tokens, at most `most`, that a branch can start from with
        blocks of these tables."""
        length, lower = most, -1
        while length != lower:
            lower = length
            for group, holding in zip(self.groups, holdings, strict=True):
                length = min(length, group.find_branch_point(holding, length))
        return length

    def branch(
        self, holdings: Sequence[Holding], children: Sequence[Holding], num_tokens: int
    ) -> None:
        """Let the tables of a branch hold the blocks of the first `num_tokens` tokens, too."""
        for group, holding, child in zip(self.groups, holdings, children, strict=True):
            child.blocks += holding.blocks[: group.count_blocks(num_tokens)]
            child.num_cached = min(holding.num_cached, num_tokens // group.block_size)
            child.num_left = min(holding.num_left, len(child.blocks))
            self.pool.touch(child.blocks[child.num_left :])

    def publish(
        self, holdings: Sequence[Holding], lineage: Lineage, num_computed: int, num_written: int
    ) -> None:
        """Publish every block that is full of the first `num_written` tokens.

        Blocks computed in earlier steps may be unpublished still, if their tokens were placeholders
        then.
        """
        for group, holding in zip(self.groups, holdings, strict=True):
            full = num_written // group.block_size
            fresh = range(max(holding.num_cached, holding.num_left), full)
            there = [index for index in fresh if holding.blocks[index] != NULL_BLOCK]
            for index in there:
                last_link = (index + 1) * group.links - 1
                self.prefix.publish(holding.blocks[index], lineage, last_link, group.number)
            if self.prefix.log is not None:
                self.prefix.log.stored(lineage, there, group.number, group.links)
            if group.is_state:
                begin = max(holding.num_cached, num_computed // group.block_size)
                self.new_states.update(holding.blocks[begin:full])
            holding.num_cached = max(holding.num_cached, full)

    def withdraw(self, holdings: Sequence[Holding], num_computed: int) -> None:
        """Unpublish every block that is not full of computed tokens."""
        for group, holding in zip(self.groups, holdings, strict=True):
            for block in holding.blocks[num_computed // group.block_size :]:
                self.prefix.withdraw(block)

    def can_go_back(
        self, holdings: Sequence[Holding], num_computed: int, has_run_ahead: bool
    ) -> bool:
        """Return whether all that is read after `num_computed` tokens is still held and unchanged.

        Steps may have run ahead: then windows have moved on, and a state is that of later tokens.
        With spare blocks, only the worker that verified the last drafts knows which block has the
        state.
        """
        return all(
            holding.num_left <= group.first_block(num_computed)
            and not (group.is_state and (has_run_ahead or group.num_spare))
            for group, holding in zip(self.groups, holdings, strict=True)
        )

    def count_leaving(self, holdings: Sequence[Holding], num_computed: int) -> int:
        """Return the number of blocks that become free when those are freed that no later token
        reads."""
        leaving = [
            block
            for group, holding in zip(self.groups, holdings, strict=True)
            for block in holding.blocks[holding.num_left : group.first_block(num_computed)]
        ]
        return sum(block != NULL_BLOCK and self.pool.ref_counts[block] == 1 for block in leaving)

    def free(self, holdings: Sequence[Holding]) -> None:
        """Free all blocks, group by group, each from its last block to its first."""
        for holding in holdings:
            self.pool.free([b for b in holding.blocks[holding.num_left :] if b != NULL_BLOCK])
            holding.clear()

    def clear(self, holdings: Sequence[Holding]) -> list[BlockId]:
        """Empty the tables without freeing the blocks; return them, group by group."""
        blocks = [b for held in holdings for b in held.blocks[held.num_left :] if b != NULL_BLOCK]
        for holding in holdings:
            holding.clear()
        return blocks

    # Admission.

    def find_hits(self, lineage: Lineage, num_known: int) -> GroupHits:
        """Return the longest prefix that is a hit in all groups, with a token left to compute (P5).

        The length is lowered to the next possible one until every group has all blocks that it
        needs.
        """
        longest = min(self._bound(group, lineage, num_known) for group in self.groups)
        length = self._floor(longest)
        while length > 0:
            longest = min(self._shorten(group, lineage, length) for group in self.groups)
            if longest == length:
                return self._collect(lineage, length)
            length = self._floor(longest)
        return self.no_hits

    def _floor(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.unit

    def _bound(self, group: Group, lineage: Lineage, num_known: int) -> int:
        """Return an upper bound of the hits of one group; for full attention any shorter hit is
        valid."""
        num_blocks = (num_known - 1) // group.block_size
        if group.is_whole:
            found = (i for i in range(num_blocks) if self._find(group, lineage, i) is None)
            num_blocks = next(found, num_blocks)
        return (num_blocks - group.num_dropped) * group.block_size

    def _shorten(self, group: Group, lineage: Lineage, length: int) -> int:
        """Return `length` if it is a valid hit of the group, else an upper bound of the shorter
        ones.

        All longer hits that include the missing block need it, too.
        """
        if not group.is_whole:
            end = length // group.block_size + group.num_dropped
            for index in range(end - 1, group.first_block(length) - 1, -1):
                if self._find(group, lineage, index) is None:
                    return (index - group.num_dropped) * group.block_size
        return length

    def _find(self, group: Group, lineage: Lineage, index: int) -> BlockId | None:
        """Return a cached block with the content of block `index` of this group, or None."""
        block = self.prefix.find(lineage, (index + 1) * group.links - 1, group.number)
        return None if block in self.new_states else block

    def _collect(self, lineage: Lineage, length: int) -> GroupHits:
        tables = []
        for group in self.groups:
            first = group.first_block(length)
            table = [NULL_BLOCK] * first
            for index in range(first, length // group.block_size):
                block = self._find(group, lineage, index)
                assert block is not None, "a valid hit has every block that is read behind it"
                table.append(block)
            if table[first:]:
                self.prefix.share_keys(lineage, table[-1])
            tables.append(tuple(table))
        return GroupHits(length, tuple(tables))

    def cut_hits(self, hits: GroupHits, start: int) -> GroupHits:
        """Return the blocks of the hits that are still read after tokens up to `start` are
        loaded."""
        tables = []
        for group, shared in zip(self.groups, hits.tables, strict=True):
            first = group.first_block(start)
            tables.append((NULL_BLOCK,) * first + shared[first:])
        return GroupHits(hits.num_tokens, tuple(tables))

    def count_to_admit(self, hits: GroupHits, extent: Extent, num_beside: int) -> int:
        """Return the number of new blocks to admit a request with these hits (P8)."""
        tables = (Holding(list(shared), num_beside=num_beside) for shared in hits.tables)
        return self.count_missing(tables, extent)

    def count_for_gate(self, hits: GroupHits, num_known: int) -> int:
        """Return the most free blocks that the whole request needs at once, the hits included (P11,
        P15).

        A hit that others hold too saves no block once the window has moved past it: they keep it,
        and the following blocks come from the free ones.
        """
        needed = 0
        for group, shared in zip(self.groups, hits.tables, strict=True):
            if group.is_beside:
                continue  # counted by `count_across`
            later = group.count_blocks(num_known) - len(shared)
            free = sum(block != NULL_BLOCK and self.pool.is_free(block) for block in shared)
            needed += min(later + free, group.count_held(num_known))
        return needed

    def count_to_end(self, holdings: Sequence[Holding], num_computed: int, num_known: int) -> int:
        """Return the most free blocks that all known tokens of a request with blocks need at once
        (P11, P15).

        In each group that is at most the blocks that its table lacks and a copy, and at most the
        blocks that it holds at once without those that it alone holds and keeps.
        """
        needed = 0
        for group, holding in zip(self.groups, holdings, strict=True):
            if group.is_beside:
                continue  # all its blocks are held already
            kept = holding.blocks[group.first_block(num_computed) :]
            own = sum(b != NULL_BLOCK and self.pool.ref_counts[b] == 1 for b in kept)
            later = group.count_blocks(num_known) - len(holding.blocks)
            if self.has_forks:
                later += self._find_shared(group, holding, num_computed) is not None
            needed += max(min(later, group.count_held(num_known) - own), 0)
        return needed

    def adopt(self, holdings: Sequence[Holding], hits: GroupHits) -> None:
        """Hold the hits of all groups, before any group takes a new block."""
        self.pool.touch(hits.shared())
        for group, holding, table in zip(self.groups, holdings, hits.tables, strict=True):
            holding.blocks += table
            holding.num_cached = hits.num_tokens // group.block_size
            holding.num_left = table.count(NULL_BLOCK)

    def count_most(self, num_slots: int) -> int:
        """Return the most blocks that a request's text holds at once until it has `num_slots`
        slots."""
        return sum(group.count_held(num_slots) for group in self.groups if not group.is_beside)

    def count_across(self, num_beside: int) -> int:
        """Return the number of blocks for the items of a request in an encoder-decoder model."""
        return sum(group.count_blocks(num_beside) for group in self.groups if group.is_beside)


def make_groups(config: Config) -> tuple[Group, ...]:
    """Return the groups of a config, in their order."""
    return tuple(
        [_find_kind(group)(number, group, config) for number, group in enumerate(config.kv_groups)]
    )


def _find_kind(group: KVGroup) -> type[Group]:
    return AlignedGroup if group.mamba_cache_mode is MambaCacheMode.ALIGN else _KINDS[group.kind]
