"""Forks: what a branch shares with its parent, and the copy that whoever writes in it is given.

    parent   [ 4 ][ 7 ][ 9 . ]     c computed tokens, 9 is not full
    branch   [ 4 ][ 7 ][ 9 . ]     as many as both have in common

Full blocks are found by what is in them, and never written again. The one behind them is shared as
well; the first who writes in it exchanges it for a copy, and the last who holds it writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.memory.groups import compute_num_skipped_blocks
from blockstep.spec.pool import Pool, allocate_blocks, free_blocks
from blockstep.spec.requests import Holding
from blockstep.spec.vocabulary import NULL_BLOCK, BlockCopy, BlockTables, KVGroup, TokenIds


def count_common_tokens(mine: TokenIds, theirs: TokenIds) -> int:
    """Leading tokens that two texts have in common. Source: seed 002 "Fork"; P2."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    differing = (at for at, (one, other) in pairs if one != other)
    return next(differing, min(len(mine), len(theirs)))


def compute_num_shared(
    groups: Sequence[KVGroup], holdings: Sequence[Holding], num_tokens: int
) -> int:
    """Of so many computed tokens in common, the most that a branch can go on behind.

    Source: seed 002 "Fork: Creating New Beams", where it is all of them; P2, P5.
    """
    return max(
        num_shared
        for num_shared in range(num_tokens + 1)
        if all(map(is_shareable, groups, holdings, [num_shared] * len(groups)))
    )


def is_shareable(group: KVGroup, holding: Holding, num_shared: int) -> bool:
    """Whether one who has computed so many tokens of a table can go on behind them.

    Not within a block that is found by what is in it: that is not written again. And all that the
    next token attends to must be there still. Source: P2, P4, P5.
    """
    size, table = group.block_size, holding.block_table
    is_within = num_shared % size > 0 and num_shared // size < holding.num_cached_blocks
    attended = table[compute_num_skipped_blocks(group, num_shared) : -(-num_shared // size)]
    return not is_within and NULL_BLOCK not in attended


def get_shared(group: KVGroup, holding: Holding, num_shared: int) -> Holding:
    """What a branch holds of its parent's table. Source: seed 002 "Fork"; P2."""
    size = group.block_size
    num_settled = min(holding.num_cached_blocks, num_shared // size)
    return Holding(holding.block_table[: -(-num_shared // size)], num_settled)


def compute_num_copies(pool: Pool, group: KVGroup, holding: Holding, num_computed: int) -> int:
    """Blocks that one who goes on behind so many tokens has to copy first: one at most.

    Source: seed 002 "The COW Mechanism"; P2, P8.
    """
    index, table = num_computed // group.block_size, holding.block_table
    is_within = num_computed % group.block_size > 0
    return int(is_within and pool.ref_counts[table[index]] > 1)


def get_own(
    pool: Pool, group: KVGroup, holding: Holding, num_computed: int
) -> tuple[Pool, Holding]:
    """The block in which it goes on is its own: if others hold it, too, it takes a new one.

    The caller has checked the capacity. Source: seed 002 "The COW Mechanism"; P1, P2.
    """
    if not compute_num_copies(pool, group, holding, num_computed):
        return pool, holding
    index, table = num_computed // group.block_size, holding.block_table
    pool, taken = allocate_blocks(pool, 1)
    pool = free_blocks(pool, table[index : index + 1])
    own = table[:index] + taken + table[index + 1 :]
    return pool, Holding(own, holding.num_cached_blocks)


def list_copies(before: BlockTables, after: BlockTables) -> tuple[BlockCopy, ...]:
    """What is to be copied where tables have become these. A null block is of what was given back.

    Source: seed 002 "The COW Mechanism"; P26.
    """
    return tuple(
        [
            BlockCopy(source, destination)
            for mine, others in zip(before, after, strict=True)
            for source, destination in zip(mine, others, strict=False)
            if source != destination and NULL_BLOCK not in (source, destination)
        ]
    )
