"""Queues: who is taken next."""

from __future__ import annotations

import random

import pytest

from blockstep.impl.host.queues import FcfsQueue, PriorityQueue, Rank, RequestQueue, make_queue
from blockstep.spec.vocabulary import Policy

RANKS: dict[int, Rank] = {0: (1, 5, "a"), 1: (0, 9, "b"), 2: (1, 5, "B"), 3: (1, 4, "z")}


def test_first_come_first_served() -> None:
    queue = FcfsQueue()
    for slot in (1, 2, 3):
        queue.append(slot)
    queue.prepend((7, 8))
    assert list(queue) == [7, 8, 1, 2, 3]
    assert queue.head() == 7
    assert queue.pop() == 7
    assert queue.remove(2)
    assert not queue.remove(2)
    assert list(queue) == [8, 1, 3]
    assert len(queue) == 3


def test_priority_sorts_by_priority_arrival_and_id() -> None:
    queue = PriorityQueue(RANKS.__getitem__)
    for slot in (0, 1):
        queue.append(slot)
    queue.prepend((2, 3))
    assert list(queue) == [1, 3, 2, 0]
    assert queue.head() == 1
    assert queue.pop() == 1
    assert queue.remove(2)
    assert not queue.remove(2)
    assert not queue.remove(1)
    assert list(queue) == [3, 0]
    assert len(queue) == 2


@pytest.mark.parametrize("policy", list(Policy))
def test_popping_follows_iteration(policy: Policy) -> None:
    draw = random.Random(3)
    ranks = [(draw.randrange(3), draw.randrange(3), str(slot)) for slot in range(50)]
    queue: RequestQueue = make_queue(policy, ranks.__getitem__)
    for slot in range(50):
        queue.append(slot)
    order = list(queue)
    by_rank = sorted(range(50), key=ranks.__getitem__)
    assert order == (by_rank if policy is Policy.PRIORITY else list(range(50)))
    assert [queue.pop() for _ in order] == order
    assert not queue
