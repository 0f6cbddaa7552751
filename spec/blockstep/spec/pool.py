"""Pool: reference counts, the free queue, and the map of published blocks.

    free queue    head -> [ 5 ][ 2 ][ 7 ][ 3 ] <- tail
                  evicted next              freed last

A free block keeps its key until somebody else needs the block (lazy eviction), so the free queue
is also the cache of what nobody holds at the moment. Every operation takes a batch, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.maps import FrozenMap
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    AllBlocksCleared,
    BlockId,
    BlockKey,
    BlockRemoved,
    BlockStored,
    DeferredFree,
    KVEvent,
)


@wide_dataclass(frozen=True, slots=True)
class Pool:
    """The blocks of all KV-cache groups; fields are indexed by block id."""

    ref_counts: tuple[int, ...]
    """Holders of each block; the null block's is always 0."""
    block_keys: tuple[BlockKey | None, ...]
    """What each block carries; None when it is not published."""
    free_queue: tuple[BlockId, ...]
    """Blocks nobody holds, next to be evicted first."""
    cached: FrozenMap[BlockKey, tuple[BlockId, ...]]
    """Published blocks by key, in order of publication."""
    is_lifo: bool = False
    """Whether what was freed last is taken next."""
    deferred_frees: tuple[DeferredFree, ...] = ()
    """What is freed with the answers to frames in flight: until then it counts as held."""
    kv_events: tuple[KVEvent, ...] | None = None
    """What has become of `cached` since it was told last; None where nobody is told."""


def create_pool(num_blocks: int, *, tells: bool = False, is_lifo: bool = False) -> Pool:
    """A pool of `num_blocks`, the null block included, all free in order of their ids.

    `tells`: what becomes of the map is kept until it is told.

    Source: seed 001 "Null Block" (the null block leaves the queue for good).
    """
    return Pool(
        ref_counts=(0,) * num_blocks,
        block_keys=(None,) * num_blocks,
        free_queue=tuple(range(NULL_BLOCK + 1, num_blocks)),
        cached=FrozenMap(),
        is_lifo=is_lifo,
        kv_events=() if tells else None,
    )


def get_num_free_blocks(pool: Pool) -> int:
    """Blocks that could be allocated, evicting what they carry. Source: seed 001; P1."""
    return len(pool.free_queue)


def count_free(pool: Pool, block_ids: Sequence[BlockId]) -> int:
    """How many of `block_ids` sit in the free queue, so that touching them uses up capacity.

    Source: seed 001 "Phase 1"; upstream #11562; P8.
    """
    return sum(pool.ref_counts[block_id] == 0 for block_id in block_ids)


def touch_blocks(pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
    """One more holder for each block; what was free leaves the free queue, from its middle too.

    Source: seed 001 "Touch"; P1.
    """
    if not block_ids:
        return pool
    ref_counts = list(pool.ref_counts)
    revived = {block_id: None for block_id in block_ids if ref_counts[block_id] == 0}
    for block_id in block_ids:
        assert block_id != NULL_BLOCK, "the null block is never hit"
        ref_counts[block_id] += 1
    free_queue = pool.free_queue
    if revived:
        free_queue = tuple(block_id for block_id in free_queue if block_id not in revived)
    return replace(pool, ref_counts=tuple(ref_counts), free_queue=free_queue)


def allocate_blocks(pool: Pool, num_blocks: int) -> tuple[Pool, tuple[BlockId, ...]]:
    """Take `num_blocks` from the head of the free queue; they lose whatever key they carry.

    The caller has checked that there are so many, and never asks for less than none. Source:
    seed 001 "Allocation: get_new_blocks()"; seed 000 "Lazy Hash Eviction"; P1, P3.
    """
    assert num_blocks >= 0, "an amount of blocks is never negative"
    assert num_blocks <= get_num_free_blocks(pool), "the capacity check came first"
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
    """Give up one hold on each block of a table, its tail first.

    Blocks that nobody holds any more join the end of the free queue in that order, keys and all:
    the tail of a prompt is the least likely to be asked for again, so it is evicted first. In a
    stack they join its head instead, the tail first of them all.
    Source: seed 001 "Deallocation: free_blocks()"; seed 002 "The Free Pool"; seed 003 section 2.2;
    P1, P16.
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
    stored: Sequence[BlockStored] = (),
) -> Pool:
    """Make each block findable under its key; `stored` is how it is told, if it is.

    Block tables only ever grow at their end, so a block is not swapped for an equal one that is
    published already: one key may have several blocks. Source: seed 003 sections 2.3 and 3.1; P3.
    """
    if not block_ids:
        return get_telling(pool, stored)  # by a quirk only
    block_keys = list(pool.block_keys)
    cached = pool.cached.to_dict()
    for block_id, key in zip(block_ids, keys, strict=True):
        assert block_keys[block_id] is None, "a block is published once"
        block_keys[block_id] = key
        cached[key] = (*cached.get(key, ()), block_id)
    pool = replace(pool, block_keys=tuple(block_keys), cached=FrozenMap(cached))
    return get_telling(pool, stored)


def withdraw_blocks(pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
    """Take the keys off these blocks; equal blocks stay findable. It is told block by block.

    Source: seed 001 "Eviction during Allocation"; for work that will not run, P4, upstream #43569;
    vLLM 0.19.1 `_maybe_evict_cached_block`; P20.
    """
    if all(pool.block_keys[block_id] is None for block_id in block_ids):
        return pool
    block_keys = list(pool.block_keys)
    cached = pool.cached.to_dict()
    removed: list[KVEvent] = []
    for block_id in block_ids:
        key = block_keys[block_id]
        if key is None:
            continue
        block_keys[block_id] = None
        removed.append(BlockRemoved((key,)))
        remaining = tuple(other for other in cached[key] if other != block_id)
        if remaining:
            cached[key] = remaining
        else:
            del cached[key]
    pool = replace(pool, block_keys=tuple(block_keys), cached=FrozenMap(cached))
    return get_telling(pool, removed)


def withdraw_all(pool: Pool) -> Pool:
    """Take the keys off all blocks. The order of the free queue does not change.

    Source: seed 001 "Reset Prefix Cache"; P20, P25.
    """
    pool = replace(pool, block_keys=(None,) * len(pool.block_keys), cached=FrozenMap())
    return get_telling(pool, (AllBlocksCleared(),))


def get_telling(pool: Pool, kv_events: Sequence[KVEvent]) -> Pool:
    """The pool with more to tell, where somebody is told.

    Source: vLLM 0.19.1 `BlockPool.kv_event_queue`; P20.
    """
    if pool.kv_events is None or not kv_events:
        return pool
    return replace(pool, kv_events=(*pool.kv_events, *kv_events))


def take_events(pool: Pool) -> tuple[Pool, tuple[KVEvent, ...]]:
    """What is to be told, and the pool behind it. Source: vLLM 0.19.1 `take_events`; P20."""
    return (replace(pool, kv_events=()), pool.kv_events) if pool.kv_events else (pool, ())


def find_block(pool: Pool, key: BlockKey) -> BlockId | None:
    """The block that a hit on `key` takes: the first published one that is left, or None.

    Source: vLLM 0.19.1, `BlockHashToBlockMap.get_one_block`, when run; P16.
    """
    block_ids = pool.cached.get(key)
    return None if block_ids is None else block_ids[0]
