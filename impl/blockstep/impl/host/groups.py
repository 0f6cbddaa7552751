"""Groups: the blocks of a request where its model has several kinds of attention.

One table per KV-cache group, all of blocks of one pool. The blocks in front that nobody reads any
more are left: their places in the table are null, and they return to the pool.

    window of 5, blocks of 2       tokens   | . . | . . | x x | x x | x
    9 tokens computed              table      0     0     7     3     9
                                                          ^ first_read(9) = 5, in block 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from blockstep.impl.host.kinds import Group, make_groups
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.table import Holding
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, BlockTables, Config


@dataclass(frozen=True, slots=True)
class GroupHits:
    """A prefix that every group can go on behind."""

    num_tokens: int
    tables: BlockTables
    """Of each group the blocks of these tokens; null where none of them is read any more."""

    def shared(self) -> list[BlockId]:
        """The blocks that are held with it."""
        return [block for table in self.tables for block in table if block != NULL_BLOCK]


class GroupMemory:
    """What the engine does with the tables of one request, where a config has `groups`.

    What speaks of one group is a method of it (`kinds`); here is what joins them (P5, P8).
    """

    def __init__(self, config: Config, pool: BlockPool, prefix: PrefixMap) -> None:
        self.pool = pool
        self.prefix = prefix
        self.groups = make_groups(config)
        self.unit = lcm(*(group.block_size for group in self.groups))
        """Tokens: each hit is a multiple of them, and so whole blocks of every group."""
        self.drops_last = int(config.drops_last_hit_block)
        """Blocks that each group must have behind a hit, to be given back."""
        self.max_model_len = config.max_model_len
        self.no_hits = GroupHits(0, ((),) * len(self.groups))

    def leave(self, holdings: Sequence[Holding], num_computed: int) -> None:
        """Give up the blocks that no token behind the computed ones reads, last block first."""
        for group, holding in zip(self.groups, holdings, strict=True):
            blocks, begin = holding.blocks, holding.num_left
            end = min(group.first_block(num_computed), len(blocks))
            if end > begin:
                self.pool.free(blocks[begin:end])
                blocks[begin:end] = [NULL_BLOCK] * (end - begin)
                holding.num_left = end

    def count_missing(self, holdings: Sequence[Holding], num_slots: int) -> int:
        """Blocks of all groups that the tables lack for so many slots (P8)."""
        return sum(self._list_missing(holdings, num_slots))

    def take(self, holdings: Sequence[Holding], num_slots: int) -> BlockTables:
        """Append what the tables lack, group by group; the blocks taken."""
        tables = []
        for holding, missing in zip(holdings, self._list_missing(holdings, num_slots), strict=True):
            taken = self.pool.take(missing)
            holding.blocks += taken
            tables.append(tuple(taken))
        return tuple(tables)

    def _list_missing(self, holdings: Sequence[Holding], num_slots: int) -> list[int]:
        return [
            max(group.count_blocks(num_slots) - len(holding.blocks), 0)
            for group, holding in zip(self.groups, holdings, strict=True)
        ]

    def publish(self, holdings: Sequence[Holding], lineage: Lineage, num_written: int) -> None:
        """Make findable every block that is full of the first `num_written` tokens."""
        for group, holding in zip(self.groups, holdings, strict=True):
            full = num_written // group.block_size
            for index in range(max(holding.num_cached, holding.num_left), full):
                last_link = (index + 1) * group.links - 1
                self.prefix.publish(holding.blocks[index], lineage, last_link, group.number)
            holding.num_cached = max(holding.num_cached, full)

    def withdraw(self, holdings: Sequence[Holding], num_computed: int) -> None:
        """Unpublish every block that is not full of computed tokens."""
        for group, holding in zip(self.groups, holdings, strict=True):
            for block in holding.blocks[num_computed // group.block_size :]:
                self.prefix.withdraw(block)

    def free(self, holdings: Sequence[Holding]) -> None:
        """Let go of everything, group by group, each from its last block to its first."""
        for holding in holdings:
            self.pool.free(holding.blocks[holding.num_left :])
            del holding.blocks[:]
            holding.num_cached = holding.num_left = 0

    # Admission.

    def find_hits(self, lineage: Lineage, num_known: int) -> GroupHits:
        """The longest prefix that is valid for all groups, with a token left to run (P5).

        A length falls to the next that could be valid until no group has anything against it.
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
        """No longer length can be valid for the group; if it reads every token, any shorter is."""
        num_blocks = (num_known - 1) // group.block_size
        if group.is_whole:
            found = (i for i in range(num_blocks) if self._find(group, lineage, i) is None)
            num_blocks = next(found, num_blocks)
        return (num_blocks - self.drops_last) * group.block_size

    def _shorten(self, group: Group, lineage: Lineage, length: int) -> int:
        """`length` if it is valid for the group, else a bound of the shorter ones that could be.

        A block that is missed is read behind all of these that have it.
        """
        if not group.is_whole:
            end = length // group.block_size + self.drops_last
            for index in range(end - 1, group.first_block(length) - 1, -1):
                if self._find(group, lineage, index) is None:
                    return (index - self.drops_last) * group.block_size
        return length

    def _find(self, group: Group, lineage: Lineage, index: int) -> BlockId | None:
        """The block with the content of block `index` of this group."""
        return self.prefix.find(lineage, (index + 1) * group.links - 1, group.number)

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

    def count_to_admit(self, hits: GroupHits, num_tokens: int) -> int:
        """New blocks beside the hits to hold `num_tokens`; there is no lookahead yet (P8)."""
        num_slots = min(num_tokens, self.max_model_len)
        return sum(
            group.count_blocks(num_slots) - len(shared)
            for group, shared in zip(self.groups, hits.tables, strict=True)
        )

    def count_for_gate(self, hits: GroupHits, num_known: int) -> int:
        """Free blocks that the whole of it needs at once, at most, the hits included (P11, P15).

        A hit that others hold too saves nothing behind the window: they keep it, and what follows
        comes from the free ones.
        """
        num_slots = min(num_known, self.max_model_len)
        needed = 0
        for group, shared in zip(self.groups, hits.tables, strict=True):
            later = group.count_blocks(num_slots) - len(shared)
            free = sum(block != NULL_BLOCK and self.pool.is_free(block) for block in shared)
            needed += min(later + free, group.count_held(num_slots))
        return needed

    def adopt(self, holdings: Sequence[Holding], hits: GroupHits) -> None:
        """Hold the hits of all groups, before any group takes a block."""
        self.pool.touch(hits.shared())
        for holding, table in zip(holdings, hits.tables, strict=True):
            holding.blocks += table
            holding.num_cached = len(table)
            holding.num_left = table.count(NULL_BLOCK)

    def count_most(self, num_slots: int) -> int:
        """Blocks that a request holds at once, at most, until it has so many slots."""
        return sum(group.count_held(num_slots) for group in self.groups)
