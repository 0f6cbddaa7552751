"""Laws about the length of a hit, and the blocks that are allocated.

PYTEST_DONT_REWRITE.

Block sizes are symbolic. In the pool of these laws blocks 1 and 2 are held and the others free;
block 3 is free and published, so it may be hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove.harness import (
    build_config,
    build_pool,
    build_runner,
    is_conserved,
    table_of,
)
from blockstep.conformance.prove.law import Right, Room, instead
from blockstep.conformance.prove.laws.slots import last_partial_block_is_forgotten
from blockstep.spec.memory.prefix import compute_max_hit_blocks
from blockstep.spec.memory.slots import allocate_slots, compute_num_new_blocks, compute_num_taken
from blockstep.spec.pool import Pool, allocate_blocks, count_free
from blockstep.spec.requests import Hit, RequestState
from blockstep.spec.vocabulary import BlockId, Config, Request, Status

ROOM = Room("allocation")
FREE: tuple[BlockId, ...] = (3, 4, 5, 6)
Taken = tuple[Pool, tuple[BlockId, ...]]


def build_small_pool(num_holders: int) -> Pool:
    """Return a pool of seven blocks: block 1 has `num_holders` holders, block 2 has one."""
    return build_pool((0, num_holders, 1, 0, 0, 0, 0), FREE, published=(1, 3))


def build_small_config(block_size: int) -> Config:
    """Return a config without prefix caching: hits are arguments, and keys do not matter here."""
    return build_config(block_size, num_blocks=7)


def admit(
    num_new: int, block_size: int, hit: BlockId, num_holders: int
) -> tuple[Pool, RequestState] | None:
    """Return pool and request after an admission with a hit of one block, or None if it fails."""
    request = RequestState(Request("a", (1,)), Status.WAITING)
    pool, found = build_small_pool(num_holders), Hit(block_size, ((hit,),))
    return allocate_slots(build_small_config(block_size), pool, request, num_new, hit=found)


# Mutants.


@instead(compute_max_hit_blocks, theirs="#30320 (hits of a connector)")
def full_hit_leaves_nothing_to_compute(num_known: int, block_size: int) -> int:
    """All full blocks may be hit, as a KV connector reports them."""
    return num_known // block_size


@instead(compute_max_hit_blocks)
def hit_stops_a_block_early(num_known: int, block_size: int) -> int:
    """The last full block is always computed again, even if a token is left without it."""
    return max(num_known // block_size - 1, 0)


@instead(count_free)
def free_hits_cost_nothing() -> int:
    """It is forgotten that touching a free hit block uses up a free block."""
    return 0


@instead(count_free)
def every_hit_costs_a_block(block_ids: Sequence[BlockId]) -> int:
    """A hit block that another request holds costs a free block, too."""
    return len(block_ids)


@instead(compute_num_taken)
def hits_are_credited_twice(right: Right[int], num_hit: int) -> int:
    """The hit is subtracted from the missing blocks twice: as held, and as a hit."""
    return right(num_hit=2 * num_hit)


@instead(allocate_blocks)
def blocks_come_from_the_tail(right: Right[Taken], pool: Pool) -> Taken:
    """The block that was freed last is evicted first."""
    pool, taken = right(pool=replace(pool, free_queue=pool.free_queue[::-1]))
    return replace(pool, free_queue=pool.free_queue[::-1]), taken


# Laws.


@ROOM.law("P5 P12", (33, 16), full_hit_leaves_nothing_to_compute, hit_stops_a_block_early)
def check_longest_hit_leaves_a_token_and_no_block_more(num_known: int, block_size: int) -> None:
    """A hit that is one block longer would leave no token to sample from."""
    assert 1 <= num_known and 1 <= block_size
    num_blocks = compute_max_hit_blocks(num_known, block_size)
    assert 0 <= num_blocks * block_size < num_known
    assert (num_blocks + 1) * block_size >= num_known


@ROOM.law("P1 P8 P15", (20, 30, 16), last_partial_block_is_forgotten, blocks_come_from_the_tail)
def check_running_request_is_granted_exactly_what_it_needs_from_the_head_of_the_queue(
    num_computed: int, num_new: int, block_size: int
) -> None:
    """The allocation fails only if there are too few free blocks."""
    assert 1 <= block_size and 0 <= num_computed <= 2 * block_size and 1 <= num_new
    assert num_computed + num_new < 8192
    request = build_runner("a", 1, num_computed, (1, 2))
    granted = allocate_slots(build_small_config(block_size), build_small_pool(1), request, num_new)
    num_missing = compute_num_new_blocks(num_computed + num_new, block_size, 2)
    assert (granted is None) == (num_computed + num_new > 6 * block_size)
    if granted is not None:
        pool, after = granted
        assert table_of(after) == (1, 2, *FREE[:num_missing])
        assert pool.free_queue == FREE[num_missing:]
        assert is_conserved(pool)


@ROOM.law("P1 P8", (30, 16), free_hits_cost_nothing, hits_are_credited_twice)
def check_hit_on_a_free_block_uses_up_a_free_block(num_new: int, block_size: int) -> None:
    """The capacity check counts the hit block, and the allocation takes it out of the queue."""
    assert 1 <= block_size and 1 <= num_new and block_size + num_new < 8192
    granted = admit(num_new, block_size, 3, num_holders=1)
    num_missing = compute_num_new_blocks(num_new, block_size, 0)
    assert (granted is None) == (num_new > 3 * block_size)
    if granted is not None:
        pool, after = granted
        assert table_of(after) == (3, *FREE[1 : 1 + num_missing])
        assert pool.free_queue == FREE[1 + num_missing :]
        assert pool.ref_counts[3] == 1


@ROOM.law("P1 P8 P15", (30, 16, 2), every_hit_costs_a_block)
def check_hit_on_a_held_block_is_free_of_charge(
    num_new: int, block_size: int, num_holders: int
) -> None:
    """The number of holders does not matter; it grows by one."""
    assert 1 <= block_size and 1 <= num_new and block_size + num_new < 8192 and 1 <= num_holders
    granted = admit(num_new, block_size, 1, num_holders)
    num_missing = compute_num_new_blocks(num_new, block_size, 0)
    assert (granted is None) == (num_new > 4 * block_size)
    if granted is not None:
        pool, after = granted
        assert table_of(after) == (1, *FREE[:num_missing])
        assert pool.free_queue == FREE[num_missing:]
        assert pool.ref_counts[1] == num_holders + 1
