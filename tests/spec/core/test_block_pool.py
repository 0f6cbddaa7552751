"""The block pool: order of the free queue, reference counts, publication, and misuse."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstep.spec.core.block_pool import (
    Pool,
    allocate_blocks,
    count_free,
    create_pool,
    find_block,
    free_blocks,
    free_deferred_blocks,
    give_up_blocks,
    publish_blocks,
    touch_blocks,
    withdraw_all,
    withdraw_blocks,
)
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.vocabulary import BlockKey, DeferredFree

K1, K2 = BlockKey(None, (1, 2)), BlockKey(None, (3, 4))


def test_free_blocks_of_a_hit_are_counted_and_null_ones_are_not() -> None:
    pool = touch_blocks(create_pool(5), (2, 3))
    assert count_free(pool, (0, 1, 2, 4)) == 2


def test_fenced_blocks_wait_even_if_one_group_frees_none() -> None:
    pool = give_up_blocks(touch_blocks(create_pool(4), (1, 2)), ((1, 2), ()), STRICT_RULES, fence=7)
    assert pool.deferred_frees == (DeferredFree(7, (1, 2)),)
    assert pool.free_queue == (3,)


def test_only_blocks_that_wait_for_the_committed_frame_become_free() -> None:
    pool = touch_blocks(create_pool(4), (1, 2, 3))
    for fence, block in ((7, 1), (8, 2), (7, 3)):
        pool = give_up_blocks(pool, ((block,),), STRICT_RULES, fence=fence)
    pool = free_deferred_blocks(pool, 7, STRICT_RULES)
    assert pool.deferred_frees == (DeferredFree(8, (2,)),)
    assert pool.free_queue == (1, 3)


@pytest.mark.parametrize("num_blocks", [-1, 3])
def test_a_number_of_blocks_outside_of_the_pool_is_an_assertion(num_blocks: int) -> None:
    with pytest.raises(AssertionError, match=r"amount of blocks|checked the capacity"):
        allocate_blocks(create_pool(3), num_blocks)


def test_equal_blocks_are_hit_in_order_of_publication() -> None:
    pool, taken = allocate_blocks(create_pool(4), 3)
    pool = publish_blocks(publish_blocks(pool, (2,), (K1,)), (1, 3), (K1, K2))
    assert pool.cached[K1] == (2, 1)
    assert find_block(withdraw_blocks(pool, (2,)), K1) == 1
    assert withdraw_blocks(pool, taken) == replace(withdraw_all(pool), ref_counts=pool.ref_counts)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: allocate_blocks(pool, 4),
        lambda pool: free_blocks(pool, (1,)),
        lambda pool: touch_blocks(pool, (0,)),
        lambda pool: publish_blocks(publish_blocks(pool, (1,), (K1,)), (1,), (K1,)),
    ],
    ids=["too many", "not held", "null block", "twice"],
)
def test_misuse_of_the_pool_is_an_assertion(misuse: object) -> None:
    assert callable(misuse)
    with pytest.raises(AssertionError):
        misuse(create_pool(4))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30))
def test_any_operations_keep_reference_counts_and_free_queue_consistent(
    steps: list[tuple[int, int]],
) -> None:
    pool: Pool = create_pool(6)
    tables: list[tuple[int, ...]] = []
    for kind, number in steps:
        if kind == 0 and number <= len(pool.free_queue):
            pool, taken = allocate_blocks(pool, number)
            tables.append(taken)
        elif kind == 1 and tables:
            pool = free_blocks(pool, tables.pop(number % len(tables)))
        elif kind == 2 and tables:
            shared = tables[number % len(tables)]
            pool = touch_blocks(pool, shared)
            tables.append(shared)
        elif kind == 3 and tables:
            blocks = tables[number % len(tables)]
            new = [block for block in blocks if pool.block_keys[block] is None]
            pool = publish_blocks(pool, new, [BlockKey(None, (block,)) for block in new])
        held = [sum(table.count(block) for table in tables) for block in range(6)]
        assert pool.ref_counts == tuple(held)
        assert sorted(pool.free_queue) == [b for b in range(1, 6) if held[b] == 0]
