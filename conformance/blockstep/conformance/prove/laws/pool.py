"""Laws about ref counts and the free queue. PYTEST_DONT_REWRITE.

Shapes are concrete and ref counts symbolic. The pool of these laws:

    blocks       0 null | 1 2 3 held (symbolic counts) | 4 5 6 free
    free queue   head -> [ 5 ][ 4 ][ 6 ] <- tail
    keys         2, 3, 4 and 5 are published
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.host_states import BLOCKS, COLUMNS, build_host
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.block_pool import (
    Pool,
    allocate_blocks,
    find_block,
    free_blocks,
    publish_blocks,
    touch_blocks,
    withdraw_all,
    withdraw_blocks,
)
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.core.slots import revoke_slots
from blockstep.spec.vocabulary import BlockId

ROOM = LawModule("pool")

QUEUE: tuple[BlockId, ...] = (5, 4, 6)


def build(first: int, second: int, third: int) -> Pool:
    """Return the pool of these laws, with these ref counts of blocks 1, 2 and 3."""
    return h.build_pool((0, first, second, third, 0, 0, 0), QUEUE, published=(2, 3, 4, 5))


# Mistakes.


@instead(free_blocks)
def freed_block_loses_its_key(right: Right[Pool], block_table: Sequence[BlockId]) -> Pool:
    """No block can be hit after its request has finished."""
    return withdraw_blocks(right(), block_table)


@instead(withdraw_all)
def reset_puts_free_blocks_in_order_of_their_ids(right: Right[Pool], pool: Pool) -> Pool:
    """A reset sorts the free queue by block id."""
    return replace(right(), free_queue=tuple(sorted(pool.free_queue)))


@instead(revoke_slots, theirs="#43569")
def keys_of_unwritten_blocks_stay(pool: Pool, request: RequestState) -> Pool:
    """A victim's blocks are freed and stay published, even those that it did not write."""
    return free_blocks(pool, h.table_of(request))


# References.


@ROOM.law("P1 P16", (1, 2, 3))
def check_touched_block_leaves_the_free_queue(first: int, second: int, third: int) -> None:
    """The others keep their order, and no other ref count changes."""
    assert 1 <= first and 1 <= second and 1 <= third
    pool = touch_blocks(build(first, second, third), (2, 4))
    assert pool.free_queue == (5, 6)
    assert pool.ref_counts == (0, first, second + 1, third, 1, 0, 0)
    assert h.is_conserved(pool)


@ROOM.law("P1 P2 P3 P16", (1, 2, 1), freed_block_loses_its_key)
def check_freed_tail_is_evicted_before_its_prefix_and_after_all_others(
    first: int, second: int, third: int
) -> None:
    """Each ref count falls by one; blocks without a holder join the queue, the last one first.

    They can still be hit: freeing a block changes no key and no map entry.
    """
    assert 1 <= first and 1 <= second and 1 <= third
    before = build(first, second, third)
    pool = free_blocks(before, (1, 2, 3))
    released = tuple(b for b, count in ((3, third), (2, second), (1, first)) if count == 1)
    assert pool.ref_counts == (0, first - 1, second - 1, third - 1, 0, 0, 0)
    assert pool.free_queue == QUEUE + released
    assert h.is_conserved(pool)
    assert pool.block_keys == before.block_keys
    assert pool.cached == before.cached


@ROOM.law("P1 P16", (1, 2, 1))
def check_freeing_undoes_touching_except_for_the_queue_position(
    first: int, second: int, third: int
) -> None:
    """The ref counts are those of before; blocks that were free are evicted later than before."""
    assert 1 <= first and 1 <= second and 1 <= third
    before = build(first, second, third)
    pool = free_blocks(touch_blocks(before, (2, 5, 4)), (2, 5, 4))
    assert pool.ref_counts == before.ref_counts
    assert pool.free_queue == (6, 4, 5)


# Allocation.


@ROOM.law("P1 P3 P16", (2, 1, 2, 3))
def check_blocks_are_taken_from_the_head_of_the_queue(
    num_blocks: int, first: int, second: int, third: int
) -> None:
    """Each taken block has one holder, and held blocks are not affected.

    A taken block, which is about to be overwritten, cannot be hit; held blocks can.
    """
    assert 0 <= num_blocks <= 3 and 1 <= first and 1 <= second and 1 <= third
    pool, taken = allocate_blocks(build(first, second, third), num_blocks)
    assert taken == QUEUE[:num_blocks]
    assert pool.free_queue == QUEUE[num_blocks:]
    assert pool.ref_counts[:4] == (0, first, second, third)
    assert all(pool.ref_counts[block_id] == 1 for block_id in taken)
    assert h.is_conserved(pool)
    for block_id in (2, 3, 4, 5):
        found = find_block(pool, h.key_of(block_id))
        assert found == (None if block_id in taken else block_id)
        assert (pool.block_keys[block_id] is None) == (block_id in taken)


# Publishing.


@ROOM.law("P3 P16", (1, 2, 3))
def check_hit_takes_the_block_that_was_published_first(first: int, second: int, third: int) -> None:
    """Another block is published with an equal key, and is hit after the first one is evicted."""
    assert 1 <= first and 1 <= second and 1 <= third
    pool = publish_blocks(build(first, second, third), (1,), (h.key_of(5),))
    assert find_block(pool, h.key_of(5)) == 5
    pool, _ = allocate_blocks(pool, 1)
    assert find_block(pool, h.key_of(5)) == 1
    assert pool.ref_counts == (0, first, second, third, 0, 1, 0)


@ROOM.law("P3 P4", (1, 2, 3))
def check_withdrawing_a_block_leaves_equal_blocks_cached(
    first: int, second: int, third: int
) -> None:
    """Ref counts and free queue stay as they are."""
    assert 1 <= first and 1 <= second and 1 <= third
    before = publish_blocks(build(first, second, third), (1,), (h.key_of(2),))
    pool = withdraw_blocks(before, (2, 6))
    assert find_block(pool, h.key_of(2)) == 1
    assert pool.block_keys[2] is None
    assert (pool.ref_counts, pool.free_queue) == (before.ref_counts, before.free_queue)


@ROOM.law("P25", (1, 2, 3), reset_puts_free_blocks_in_order_of_their_ids)
def check_reset_empties_the_cache_and_keeps_the_queue(first: int, second: int, third: int) -> None:
    """Ref counts do not change either."""
    assert 0 <= first and 0 <= second and 0 <= third
    before = build(first, second, third)
    pool = withdraw_all(before)
    assert all(find_block(pool, h.key_of(block_id)) is None for block_id in range(7))
    assert pool.free_queue == before.free_queue
    assert pool.ref_counts == before.ref_counts


@ROOM.law("P3 P4", (20, 16, 1), keys_of_unwritten_blocks_stay)
def check_preemption_withdraws_exactly_the_keys_of_unwritten_blocks(
    num_computed: int, block_size: int, second: int
) -> None:
    """Blocks 2 and 3 are published by this step; a block keeps its key if it was full before."""
    assert 1 <= block_size and 0 <= num_computed < 2 * block_size and 1 <= second
    request = h.build_runner("a", 1, num_computed, (2, 3), num_settled=2)
    pool = revoke_slots(build(1, second, 1), request, (block_size,), STRICT_RULES)
    assert find_block(pool, h.key_of(2)) == (2 if num_computed >= block_size else None)
    assert find_block(pool, h.key_of(3)) is None
    assert pool.free_queue == (*QUEUE, 3, *((2,) if second == 1 else ()))


# The engine.


@ROOM.law("P1 P16", (1, 2, 1, 2))
def check_ring_of_the_engine_is_the_free_queue(
    first: int, second: int, third: int, num_taken: int
) -> None:
    """After a table is freed, a block touched and some taken, order and counts are equal."""
    assert 1 <= first and 1 <= second and 1 <= third and 0 <= num_taken <= 2
    host = build_host(h.build_config())
    BLOCKS.touch_list(host, (1, 2, 3))
    pool = h.build_pool((0, first, second, third, 0, 0), (4, 5), published=())
    for block, count in ((1, first), (2, second), (3, third)):
        host.blocks[block, COLUMNS.REF_COUNT] = count
    BLOCKS.free_list(host, (1, 2, 3))
    pool = free_blocks(pool, (1, 2, 3))
    BLOCKS.touch_list(host, (5, 2))
    pool = touch_blocks(pool, (5, 2))
    num_taken = min(num_taken, len(pool.free_queue))
    taken = [BLOCKS.take_block(host) for _ in range(num_taken)]
    pool, due = allocate_blocks(pool, num_taken)
    assert tuple(taken) == due
    ring, block = [], host.blocks[0, COLUMNS.NEXT_FREE]
    while block != 0:
        ring.append(block)
        block = host.blocks[block, COLUMNS.NEXT_FREE]
    assert tuple(ring) == pool.free_queue
    assert host.scalars[COLUMNS.NUM_FREE] == len(pool.free_queue)
    counts = [host.blocks[block, COLUMNS.REF_COUNT] for block in range(6)]
    assert tuple(counts) == pool.ref_counts
