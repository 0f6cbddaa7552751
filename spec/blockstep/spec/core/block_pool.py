"""Pool: reference counts, the free queue, and the map of published blocks.

    free queue    head -> [ 5 ][ 2 ][ 7 ][ 3 ] <- tail
                  evicted next              freed last

A free block keeps its key until the block is reused (lazy eviction), so the free queue is also the
cache of blocks without holders. Every operation takes a batch, in order.

Deferred frees: blocks that a frame in flight reads or writes may have to wait for its commit.

    plan 0 names block 3 | abort: block 3 released |  ...  | commit 0: block 3 is free
    frame 0 runs         |<----- it may still write block 3 ----->|

Each wait has an owner, which is the frame, and an end, which is its commit (P17). Until then the
blocks keep their ref counts: they are not given to other requests, and cached ones can be hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.core.requests import Frame, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.frozen_map import FrozenMap, freeze
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    AllBlocksCleared,
    BlockId,
    BlockKey,
    BlockRemoved,
    BlockStored,
    BlockTables,
    Config,
    DeferredFree,
    FrameId,
    RequestId,
)

Changes: TypeAlias = tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...]
"""Blocks that were published or lost their keys, in order."""


@wide_dataclass(frozen=True, slots=True)
class Pool:
    """The blocks of all KV groups; fields are indexed by block id."""

    ref_counts: tuple[int, ...]
    """Number of holders of each block; the null block's is always 0."""
    block_keys: tuple[BlockKey | None, ...]
    """Key of each block; None if it is not published."""
    free_queue: tuple[BlockId, ...]
    """Blocks without holders, in the order of reuse."""
    cached: FrozenMap[BlockKey, tuple[BlockId, ...]]
    """Published blocks by key, in order of publication."""
    is_lifo: bool = False
    """Whether the block freed last is reused next."""
    deferred_frees: tuple[DeferredFree, ...] = ()
    """Blocks freed when frames in flight are committed: until then they count as held."""
    journal: Changes | None = None
    """Changes of `cached` since it was read; None if no feature reads it."""


def create_pool(num_blocks: int, *, is_lifo: bool = False) -> Pool:
    """Return a pool of `num_blocks`, including the null block, all free in order of their ids.

    Source: seed 001 "Null Block" (the null block leaves the queue for good).
    """
    return Pool(
        ref_counts=(0,) * num_blocks,
        block_keys=(None,) * num_blocks,
        free_queue=tuple(range(NULL_BLOCK + 1, num_blocks)),
        cached=FrozenMap(),
        is_lifo=is_lifo,
    )


def get_num_free_blocks(pool: Pool) -> int:
    """Return the number of blocks that could be allocated, evicting their content.

    Source: seed 001; P1.
    """
    return len(pool.free_queue)


def count_free(pool: Pool, block_ids: tuple[BlockId, ...]) -> int:
    """Return how many of `block_ids` are in the free queue, so that touching them uses capacity.

    Null blocks do not count. Source: seed 001 "Phase 1", "Phase 2"; upstream #11562; P8.
    """
    return sum([pool.ref_counts[block_id] == 0 for block_id in without_nulls(block_ids)])


def touch_blocks(pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
    """Add a holder to each block; free ones leave the free queue, also from its middle.

    Source: seed 001 "Touch"; P1.
    """
    if not block_ids:
        return pool
    ref_counts = list(pool.ref_counts)
    # no-mutate clause: a held block is not in the queue
    revived = {block_id: None for block_id in block_ids if ref_counts[block_id] == 0}
    for block_id in block_ids:
        assert block_id != NULL_BLOCK, "the null block is never hit"
        ref_counts[block_id] += 1
    free_queue = pool.free_queue
    if revived:
        free_queue = tuple(block_id for block_id in free_queue if block_id not in revived)
    return replace(pool, ref_counts=tuple(ref_counts), free_queue=free_queue)


def allocate_blocks(pool: Pool, num_blocks: int) -> tuple[Pool, tuple[BlockId, ...]]:
    """Take `num_blocks` from the head of the free queue; they lose their keys.

    The caller has checked that there are enough, and never asks for a negative number. Source: seed
    001 "Allocation: get_new_blocks()"; seed 000 "Lazy Hash Eviction"; P1, P3.
    """
    assert num_blocks >= 0, "an amount of blocks is never negative"
    assert num_blocks <= get_num_free_blocks(pool), "the caller has checked the capacity"
    if num_blocks == 0:
        return pool, ()
    taken = pool.free_queue[:num_blocks]
    pool = withdraw_blocks(pool, taken)
    ref_counts = list(pool.ref_counts)
    for block_id in taken:
        assert ref_counts[block_id] == 0, "a queued block has no holder"
        ref_counts[block_id] = 1
    free_queue = pool.free_queue[num_blocks:]
    return replace(pool, ref_counts=tuple(ref_counts), free_queue=free_queue), taken


def free_blocks(pool: Pool, block_table: Sequence[BlockId]) -> Pool:
    """Remove one holder from each block of a table, its tail first.

    Blocks without holders join the end of the free queue in that order, with their keys: the tail
    of a prompt is the least likely to be hit again, so it is evicted first. In a LIFO pool they
    join its head instead, the tail first of them all. Source: seed 001 "Deallocation:
    free_blocks()"; seed 002 "The Free Pool"; seed 003 section 2.2; P1, P16.
    """
    if not block_table:
        return pool
    ref_counts = list(pool.ref_counts)
    released = []
    for block_id in reversed(block_table):
        assert ref_counts[block_id] > 0, "a held block has a holder"
        ref_counts[block_id] -= 1
        if ref_counts[block_id] == 0:
            released.append(block_id)
    free_queue = (*pool.free_queue, *released)
    if pool.is_lifo:
        free_queue = (*released, *pool.free_queue)
    return replace(pool, ref_counts=tuple(ref_counts), free_queue=free_queue)


def publish_blocks(
    pool: Pool,
    block_ids: Sequence[BlockId],
    keys: Sequence[BlockKey],
    changes: Changes = (),
) -> Pool:
    """Publish each block under its key; `changes` are the journal's entries for it, if it is kept.

    Block tables only ever grow at their end, so a block is not exchanged for an equal one that
    published already: one key may have several blocks. Source: seed 003 sections 2.3 and 3.1; P3.
    """
    if not block_ids:
        return with_changes(pool, changes)
    block_keys = list(pool.block_keys)
    cached = pool.cached.to_dict()
    for block_id, key in zip(block_ids, keys, strict=True):
        assert block_keys[block_id] is None, "a block is published once"
        block_keys[block_id] = key
        cached[key] = (*cached.get(key, ()), block_id)
    pool = replace(pool, block_keys=tuple(block_keys), cached=freeze(cached))
    return with_changes(pool, changes)


def withdraw_blocks(pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
    """Remove the keys of these blocks; equal blocks stay cached. One entry for each block.

    Source: seed 001 "Eviction during Allocation"; for work that will not run, P4, upstream #43569;
    vLLM 0.19.1 `_maybe_evict_cached_block`; P20.
    """
    keys = [pool.block_keys[block_id] for block_id in block_ids]
    if not any(keys):
        return pool
    block_keys = list(pool.block_keys)
    cached = pool.cached.to_dict()
    for block_id, key in zip(block_ids, keys, strict=True):
        if key is None:
            continue
        block_keys[block_id] = None
        remaining = tuple(other for other in cached[key] if other != block_id)
        if remaining:
            cached[key] = remaining
        else:
            del cached[key]
    pool = replace(pool, block_keys=tuple(block_keys), cached=freeze(cached))
    # no-mutate clause: without the shortcut nothing is added
    if pool.journal is None:
        return pool
    return with_changes(pool, tuple([BlockRemoved((key,)) for key in keys if key is not None]))


def withdraw_all(pool: Pool) -> Pool:
    """Remove the keys of all blocks. The order of the free queue does not change.

    Source: seed 001 "Reset Prefix Cache"; P20, P25.
    """
    pool = replace(pool, block_keys=(None,) * len(pool.block_keys), cached=FrozenMap())
    return with_changes(pool, (AllBlocksCleared(),))


def with_changes(pool: Pool, changes: Changes) -> Pool:
    """Return the pool with entries in its journal, if it keeps one.

    Source: vLLM 0.19.1 `BlockPool.kv_event_queue`; P20.
    """
    # no-mutate clause: without the shortcut nothing is added
    if pool.journal is None or not changes:
        return pool
    return replace(pool, journal=(*pool.journal, *changes))


def find_block(pool: Pool, key: BlockKey) -> BlockId | None:
    """Return the block that a hit on `key` takes: the first published one that is left, or None.

    Source: vLLM 0.19.1, `BlockHashToBlockMap.get_one_block`, when run; P16.
    """
    block_ids = pool.cached.get(key)
    return None if block_ids is None else block_ids[0]


# Deferred frees.


def get_fence(config: Config, frames: Sequence[Frame], request_id: RequestId) -> FrameId | None:
    """Return the frame in flight whose commit the blocks of a request wait for: none.

    Steps are executed in the order of their plans, so a row of a later plan may have such a block
    at once. Source: vLLM 0.19.1 `_free_blocks`; P17.
    """
    del config, frames, request_id  # no-mutate: it has no effect
    return None


def give_up_blocks(
    pool: Pool, block_tables: BlockTables, rules: Rules, fence: FrameId | None = None
) -> Pool:
    """Return the pool after a request releases these tables: after frame `fence`, if given.

    At once they are freed group by group; after a frame all groups together, the last block first.
    Source: vLLM 0.33.0 `_free_request_blocks`, `pop_blocks_for_free`; P1, P17.
    """
    tables = [without_nulls(table) for table in block_tables]
    if fence is None:
        for table in tables:
            pool = rules[free_blocks](pool, table)
        return pool
    if not any(tables):
        return pool
    deferred = DeferredFree(fence, sum(tables, ()))
    return replace(pool, deferred_frees=(*pool.deferred_frees, deferred))


def free_deferred_blocks(pool: Pool, frame_id: FrameId, rules: Rules) -> Pool:
    """Return the pool after a frame was committed: blocks that waited for it are freed, in order.

    Source: vLLM 0.33.0 `_drain_deferred_frees`; P1, P16, P17.
    """
    due = [deferred for deferred in pool.deferred_frees if deferred.frame_id == frame_id]
    if not due:
        return pool
    left = tuple([other for other in pool.deferred_frees if other.frame_id != frame_id])
    pool = replace(pool, deferred_frees=left)
    for deferred in due:
        pool = rules[free_blocks](pool, deferred.block_ids)
    return pool
