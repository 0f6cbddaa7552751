"""Laws about the length of a hit, and the blocks that are allocated.

PYTEST_DONT_REWRITE.

Block sizes are symbolic. In the pool of these laws blocks 1 and 2 are held and the others free;
block 3 is free and published, so it may be hit.
"""

from __future__ import annotations

from blockstep.conformance.prove.harness import (
    build_config,
    build_pool,
    build_runner,
    is_conserved,
    table_of,
)
from blockstep.conformance.prove.law import LawModule, instead
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.prefix_cache import compute_max_hit_blocks
from blockstep.spec.core.requests import Hit, RequestState
from blockstep.spec.core.slots import allocate_slots, compute_num_new_blocks
from blockstep.spec.vocabulary import BlockId, Config, Request, Status

ROOM = LawModule("allocation")
FREE: tuple[BlockId, ...] = (3, 4, 5, 6)


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


# Mistakes.


@instead(compute_max_hit_blocks, theirs="#30320 (hits of a connector)")
def full_hit_leaves_nothing_to_compute(num_known: int, block_size: int) -> int:
    """All full blocks may be hit, as a KV connector reports them."""
    return num_known // block_size


# Laws.


@ROOM.law("P5 P12", (33, 16), full_hit_leaves_nothing_to_compute)
def check_longest_hit_leaves_one_token_to_compute(num_known: int, block_size: int) -> None:
    """A hit that is one block longer would leave no token to sample from."""
    assert 1 <= num_known and 1 <= block_size
    num_blocks = compute_max_hit_blocks(num_known, block_size)
    assert 0 <= num_blocks * block_size < num_known
    assert (num_blocks + 1) * block_size >= num_known


@ROOM.law("P1 P8 P15", (20, 30, 16))
def check_running_request_takes_exactly_the_blocks_it_needs(
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


@ROOM.law("P1 P8", (30, 16))
def check_hit_on_a_free_block_takes_it_from_the_queue(num_new: int, block_size: int) -> None:
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


@ROOM.law("P1 P8 P15", (30, 16, 2))
def check_hit_on_a_held_block_takes_no_free_block(
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
