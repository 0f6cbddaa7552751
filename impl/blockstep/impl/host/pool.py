"""The block pool: the reference counts of the blocks, and the queue of free ones."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.impl.host.prefix import PrefixMap
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId


class BlockPool:
    """Reference counts and the free queue of `num_blocks` blocks, the null block included (P1).

    The free queue is a part of an array. A block that is touched leaves a gap in it, which `take`
    skips; the null block is never free, so it marks a gap.

        queue  [ .. taken .. | 7 0 3 9 0 0 4 | .. room .. ]     place[9] = head + 3
                             head            tail

    When the room is used up, the queue moves to the front without its gaps: the array is twice as
    long as there are blocks, so that costs O(1) per block freed. A freed block keeps its key until
    it is taken again (lazy eviction; seed 003, section 2.2).

    Args:
        num_blocks: the number of blocks, the null block included.
        prefix: the prefix map, in which a taken block is unpublished.
        is_lifo: whether freed blocks go before the head (seed 002, "The Free Pool"). Then the queue
            begins at the end of the array, and moves to the end.
    """

    def __init__(self, num_blocks: int, prefix: PrefixMap, is_lifo: bool = False) -> None:
        self.prefix = prefix
        self.is_lifo = is_lifo
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self.num_moves = 0
        """The number of times that shareable blocks were held or freed."""
        self._queue = [*range(1, num_blocks), *bytes(num_blocks + 1)]
        self._place = [0, *range(num_blocks - 1)]
        """The index of each free block in the queue."""
        self._head = 0
        self._tail = num_blocks - 1
        if is_lifo:
            self._close_gaps()

    def take(self, count: int) -> list[BlockId]:
        """Take `count` blocks from the head, in order; each is held once and has no key.

        The caller has checked that `count <= num_free`.
        """
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
        """Hold each block once more; a free block leaves the middle of the free queue."""
        refs = self.ref_counts
        self.num_moves += 1
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
            refs[block] += 1

    def free(self, table: Sequence[BlockId]) -> None:
        """Free the blocks of a table once, the last block first, so that its prefix is evicted
        last."""
        refs = self.ref_counts
        self.num_moves += 1
        put = self._prepend if self.is_lifo else self._append
        for block in table if self.is_lifo else reversed(table):
            refs[block] -= 1
            if refs[block] == 0:
                put(block)

    def is_free(self, block: BlockId) -> bool:
        """Return whether no request holds `block`."""
        return self.ref_counts[block] == 0

    def count_free(self, blocks: Sequence[BlockId]) -> int:
        """Return how many of `blocks` are free."""
        return sum(map(self.is_free, blocks))

    def is_unused(self) -> bool:
        """Return whether all blocks are free."""
        return self.num_free == self.num_blocks - 1

    def free_queue(self) -> list[BlockId]:
        """Return the free blocks, head first."""
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

    def _prepend(self, block: BlockId) -> None:
        if self._head == 0:
            self._close_gaps()
        self._head -= 1
        self._queue[self._head] = block
        self._place[block] = self._head
        self.num_free += 1

    def _close_gaps(self) -> None:
        """Move the queue to one end of the array; at least half of the array is room then."""
        blocks = self.free_queue()
        begin = len(self._queue) - len(blocks) if self.is_lifo else 0
        for place, block in enumerate(blocks, begin):
            self._queue[place] = block
            self._place[block] = place
        self._head, self._tail = begin, begin + len(blocks)
