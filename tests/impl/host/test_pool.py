"""The pool: the free queue keeps its order, and a taken block forgets its key."""

from __future__ import annotations

import random
from collections import deque

import pytest

from blockstep.impl.host import SHA256
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.spec.vocabulary import Request


def make_pool(num_blocks: int, is_lifo: bool = False) -> BlockPool:
    return BlockPool(num_blocks, PrefixMap(num_blocks, verify=False), is_lifo)


def test_blocks_are_taken_from_the_head_without_the_null_block() -> None:
    pool = make_pool(5)
    assert pool.free_queue() == [1, 2, 3, 4]
    assert pool.take(2) == [1, 2]
    assert pool.free_queue() == [3, 4]
    assert pool.num_free == 2
    assert not pool.is_unused()
    assert list(pool.ref_counts) == [0, 1, 1, 0, 0]


def test_taking_nothing_changes_nothing() -> None:
    pool = make_pool(3)
    assert pool.take(0) == []
    assert pool.free_queue() == [1, 2]


def test_a_table_is_freed_last_block_first() -> None:
    pool = make_pool(5)
    pool.free(pool.take(3))
    assert pool.free_queue() == [4, 3, 2, 1]
    assert pool.is_unused()


def test_of_two_tables_the_one_freed_later_is_taken_first_if_that_is_asked() -> None:
    pool = make_pool(7, is_lifo=True)
    assert pool.free_queue() == [1, 2, 3, 4, 5, 6]
    first, second = pool.take(2), pool.take(3)
    pool.free(first)
    assert pool.free_queue() == [2, 1, 6]
    pool.free(second)
    assert pool.free_queue() == [5, 4, 3, 2, 1, 6]
    assert pool.take(4) == [5, 4, 3, 2]


def test_the_last_block_can_be_taken_and_given_back() -> None:
    pool = make_pool(2)
    assert pool.take(1) == [1]
    assert pool.free_queue() == []
    pool.free([1])
    assert pool.free_queue() == [1]
    assert pool.take(1) == [1]


def test_touch_takes_a_block_from_the_middle_and_counts_holders() -> None:
    pool = make_pool(5)
    pool.touch([2, 4])
    assert pool.free_queue() == [1, 3]
    pool.touch([2])
    pool.free([2])
    assert pool.free_queue() == [1, 3]
    pool.free([2])
    assert pool.free_queue() == [1, 3, 2]


def test_a_freed_block_keeps_its_key_until_it_is_taken() -> None:
    pool = make_pool(3)
    lineage = Lineage(Request("a", (1, 2)), 2, SHA256)
    blocks = pool.take(1)
    pool.prefix.publish(blocks[0], lineage, 0)
    pool.free(blocks)
    assert pool.prefix.hits(lineage, 1) == [1]
    assert pool.take(2) == [2, 1]
    assert pool.prefix.hits(lineage, 1) == []


@pytest.mark.parametrize("is_lifo", [False, True])
@pytest.mark.parametrize(("num_blocks", "most_hits"), [(12, 4), (300, 90)])
def test_the_queue_equals_a_plain_one_under_random_use(
    num_blocks: int, most_hits: int, is_lifo: bool
) -> None:
    draw = random.Random(7)
    pool, queue = make_pool(num_blocks, is_lifo), deque(range(1, num_blocks))
    held: list[list[int]] = []
    for _ in range(3000):
        move = draw.randrange(3)
        if move == 0:
            count = draw.randint(0, len(queue))
            expected = [queue.popleft() for _ in range(count)]
            assert list(pool.take(count)) == expected
            held.append(expected)
        elif move == 1 and held:
            table = held.pop(draw.randrange(len(held)))
            pool.free(table)
            released = [b for b in reversed(table) if not any(b in other for other in held)]
            queue = deque([*released, *queue] if is_lifo else [*queue, *released])
        elif move == 2:
            hits = draw.sample(range(1, num_blocks), draw.randint(0, most_hits))
            assert pool.count_free(hits) == sum(block in queue for block in hits)
            pool.touch(hits)
            held.append(hits)
            queue = deque(b for b in queue if b not in hits)
        assert pool.free_queue() == list(queue)
        assert pool.num_free == len(queue)


def test_many_blocks_that_are_taken_again_forget_their_keys() -> None:
    pool = make_pool(100)
    lineage = Lineage(Request("a", tuple(range(120))), 2, SHA256)
    blocks = [*pool.take(60)]
    for index, block in enumerate(blocks):
        pool.prefix.publish(block, lineage, index)
    pool.free(blocks)
    assert pool.prefix.hits(lineage, 60) == blocks
    pool.take(70)
    assert pool.prefix.hits(lineage, 60) == blocks[:29]
    carried = [block for block, key in enumerate(pool.prefix.keys()) if key is not None]
    assert carried == blocks[:29]
