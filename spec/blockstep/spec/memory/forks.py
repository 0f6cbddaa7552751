"""Forks: the blocks that a branch shares with its parent, and copy on write.

    parent   [ 4 ][ 7 ][ 9 . ]     c computed tokens, 9 is not full
    branch   [ 4 ][ 7 ][ 9 . ]     the tokens that both have in common

Full blocks are published, and never written again. The block after them is shared as well; the
first request that writes to it replaces it by a copy, and the last holder writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.memory.groups import compute_num_skipped_blocks
from blockstep.spec.pool import Pool, allocate_blocks, free_blocks
from blockstep.spec.requests import Holding
from blockstep.spec.vocabulary import NULL_BLOCK, BlockCopy, BlockTables, KVGroup, TokenIds


def count_common_tokens(mine: TokenIds, theirs: TokenIds) -> int:
    """Return the number of leading tokens that two sequences share. Source: seed 002 "Fork"; P2."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    differing = (at for at, (one, other) in pairs if one != other)
    return next(differing, min(len(mine), len(theirs)))


def compute_num_shared(
    groups: Sequence[KVGroup], holdings: Sequence[Holding], num_tokens: int
) -> int:
    """Return the most of `num_tokens` common computed tokens that a branch can continue after.

    Source: seed 002 "Fork: Creating New Beams", where it is all of them; P2, P5.
    """
    return max(
        num_shared
        for num_shared in range(num_tokens + 1)
        if all(map(is_shareable, groups, holdings, [num_shared] * len(groups)))
    )


def is_shareable(group: KVGroup, holding: Holding, num_shared: int) -> bool:
    """Whether a branch with `num_shared` computed tokens of a table can continue after them.

    Not within a published block: that is not written again. And all blocks that the next token
    attends to must be there. Source: P2, P4, P5.
    """
    size, table = group.block_size, holding.block_table
    is_within = num_shared % size > 0 and num_shared // size < holding.num_cached_blocks
    attended = table[compute_num_skipped_blocks(group, num_shared) : -(-num_shared // size)]
    return not is_within and NULL_BLOCK not in attended


def get_shared(group: KVGroup, holding: Holding, num_shared: int) -> Holding:
    """Return what a branch holds of its parent's table. Source: seed 002 "Fork"; P2."""
    size = group.block_size
    num_settled = min(holding.num_cached_blocks, num_shared // size)
    return Holding(holding.block_table[: -(-num_shared // size)], num_settled)


def compute_num_copies(pool: Pool, group: KVGroup, holding: Holding, num_computed: int) -> int:
    """Return the blocks that must be copied to continue after `num_computed` tokens: one at most.

    Source: seed 002 "The COW Mechanism"; P2, P8.
    """
    index, table = num_computed // group.block_size, holding.block_table
    is_within = num_computed % group.block_size > 0
    return int(is_within and pool.ref_counts[table[index]] > 1)


def get_own(
    pool: Pool, group: KVGroup, holding: Holding, num_computed: int
) -> tuple[Pool, Holding]:
    """Replace the block in which a request continues by a new one if others hold it, too.

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
    """Return the copies to make, from tables before and after; skipped blocks are not copied.

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
