"""The block pool: who holds a block, and which free block is taken next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.host.prefix import PrefixMap
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId

_MANY: Final = 24
"""Blocks from which on numpy is quicker than a loop."""


class BlockPool:
    """Reference counts and the free queue of `num_blocks` blocks, the null block included (P1).

    The free queue is a stretch of an array. A block that is touched leaves a gap in it, which
    whoever takes passes over; the null block is never free, so it stands for a gap.

        queue  [ .. taken .. | 7 0 3 9 0 0 4 | .. room .. ]     place[9] = head + 3
                             head            tail

    When the room is used up, the stretch moves to the front without its gaps: the array is twice
    as long as there are blocks, so that costs O(1) per block freed. A freed block keeps its key
    until it is taken again (lazy eviction; seed 003, section 2.2). Few blocks are handled one at a
    time in array("i"), many at once through numpy, in the same memory.
    """

    def __init__(self, num_blocks: int, prefix: PrefixMap) -> None:
        self.prefix = prefix
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self._queue = array("i", (*range(1, num_blocks), *bytes(num_blocks + 1)))
        self._place = array("i", (0, *range(num_blocks - 1)))
        """Where a free block stands in the queue."""
        self._head = 0
        self._tail = num_blocks - 1

    def take(self, count: int) -> Sequence[BlockId]:
        """Pop `count` blocks from the head, in order; each is held once and carries no key.

        The caller has made sure that `count <= num_free`.
        """
        if count >= _MANY:
            taken_many: list[BlockId] = self.take_many(count).tolist()
            return taken_many
        taken: list[BlockId] = []
        queue, head = self._queue, self._head
        for _ in range(count):
            block = queue[head]
            while block == NULL_BLOCK:
                head += 1
                block = queue[head]
            head += 1
            self.ref_counts[block] = 1
            self._evict(block)
            taken.append(block)
        self._head = head
        self.num_free -= count
        return taken

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """Hold each block once more; one that nobody held leaves the middle of the free queue."""
        if len(blocks) >= _MANY:
            self._touch_many(blocks)
            return
        refs = self.ref_counts
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
            refs[block] += 1

    def free(self, table: Sequence[BlockId]) -> None:
        """Let go of a block table, last block first, so that its prefix is evicted last."""
        if len(table) >= _MANY:
            self._free_many(table)
            return
        refs = self.ref_counts
        for block in reversed(table):
            refs[block] -= 1
            if refs[block] == 0:
                self._append(block)

    def is_free(self, block: BlockId) -> bool:
        """Whether nobody holds `block`."""
        return self.ref_counts[block] == 0

    def count_free(self, blocks: Sequence[BlockId]) -> int:
        """How many of `blocks` nobody holds."""
        if len(blocks) >= _MANY:
            return len(blocks) - int(np.count_nonzero(_view(self.ref_counts)[np.array(blocks)]))
        return sum(map(self.is_free, blocks))

    def is_unused(self) -> bool:
        """Whether nobody holds any block."""
        return self.num_free == self.num_blocks - 1

    def free_queue(self) -> list[BlockId]:
        """The free blocks, head first."""
        return [block for block in self._queue[self._head : self._tail] if block != NULL_BLOCK]

    def _evict(self, block: BlockId) -> None:
        self.prefix.withdraw(block)

    def _unlink(self, block: BlockId) -> None:
        self._queue[self._place[block]] = NULL_BLOCK
        self.num_free -= 1

    def _append(self, block: BlockId) -> None:
        if self._tail == len(self._queue):
            self._close_gaps()
        self._queue[self._tail] = block
        self._place[block] = self._tail
        self._tail += 1
        self.num_free += 1

    def _close_gaps(self) -> None:
        """Move the stretch to the front of the array; at least half of it is room then."""
        queue = _view(self._queue)
        blocks = queue[self._head : self._tail]
        blocks = blocks[blocks != NULL_BLOCK]
        queue[: len(blocks)] = blocks
        _view(self._place)[blocks] = np.arange(len(blocks), dtype=np.int32)
        self._head, self._tail = 0, len(blocks)

    # many at once

    def take_many(self, count: int) -> NDArray[np.int32]:
        """`take` as an array."""
        head, end = self._head, self._head + count
        taken = _view(self._queue)[head:end]
        while np.count_nonzero(taken) < count:  # gaps: look at twice as much
            end = min(head + 2 * (end - head), self._tail)
            taken = _view(self._queue)[head:end]
        if end - head > count:
            places = taken.nonzero()[0][:count]
            taken, end = taken[places], head + int(places[-1]) + 1
        else:
            taken = taken.copy()  # the queue is written over
        _view(self.ref_counts)[taken] = 1
        self._head = end
        self.num_free -= count
        self.prefix.withdraw_each(taken)
        return taken

    def _touch_many(self, blocks: Sequence[BlockId]) -> None:
        """`blocks` are different from each other, as the blocks of a hit are."""
        touched, refs = np.array(blocks), _view(self.ref_counts)
        free = touched[refs[touched] == 0]
        _view(self._queue)[_view(self._place)[free]] = NULL_BLOCK
        self.num_free -= len(free)
        refs[touched] += 1

    def _free_many(self, table: Sequence[BlockId]) -> None:
        """The blocks of a table are different from each other."""
        blocks, refs = np.array(table)[::-1], _view(self.ref_counts)
        refs[blocks] -= 1
        freed = blocks[refs[blocks] == 0]
        if self._tail + len(freed) > len(self._queue):
            self._close_gaps()
        start, end = self._tail, self._tail + len(freed)
        _view(self._queue)[start:end] = freed
        _view(self._place)[freed] = np.arange(start, end, dtype=np.int32)
        self._tail = end
        self.num_free += len(freed)


def _view(column: array[int]) -> NDArray[np.int32]:
    return np.frombuffer(column, np.int32)
