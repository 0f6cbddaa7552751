"""The block pool: who holds a block, and which free block is taken next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blockstep.impl.host.prefix import PrefixMap
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId


class BlockPool:
    """Reference counts and the free queue of `num_blocks` blocks, the null block included (P1).

    The free queue is an intrusive, doubly linked ring through two int32 arrays; each operation
    costs O(1) per block. The null block is never free, so its links are the sentinel of the ring:

        next[0] = head -> ... -> tail -> 0        prev[0] = tail

    A freed block keeps its key until it is taken again (lazy eviction; seed 003, section 2.2).
    array("i") instead of numpy: the work is one scalar at a time, which it does in half the time,
    and it lends its buffer to numpy without a copy.
    """

    def __init__(self, num_blocks: int, prefix: PrefixMap) -> None:
        self.prefix = prefix
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self._next = array("i", (*range(1, num_blocks), NULL_BLOCK))
        self._prev = array("i", (num_blocks - 1, *range(num_blocks - 1)))

    def take(self, count: int) -> list[BlockId]:
        """Pop `count` blocks from the head, in order; each is held once and carries no key.

        The caller has made sure that `count <= num_free`.
        """
        taken: list[BlockId] = []
        links, block = self._next, NULL_BLOCK
        for _ in range(count):
            block = links[block]
            self.ref_counts[block] = 1
            self._evict(block)
            taken.append(block)
        head = links[block]
        links[NULL_BLOCK] = head
        self._prev[head] = NULL_BLOCK
        self.num_free -= count
        return taken

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """Hold each block once more; one that nobody held leaves the middle of the free queue."""
        refs = self.ref_counts
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
            refs[block] += 1

    def free(self, table: Sequence[BlockId]) -> None:
        """Let go of a block table, last block first, so that its prefix is evicted last."""
        refs = self.ref_counts
        for block in reversed(table):
            refs[block] -= 1
            if refs[block] == 0:
                self._append(block)

    def is_free(self, block: BlockId) -> bool:
        """Whether nobody holds `block`."""
        return self.ref_counts[block] == 0

    def is_unused(self) -> bool:
        """Whether nobody holds any block."""
        return self.num_free == self.num_blocks - 1

    def free_queue(self) -> list[BlockId]:
        """The free blocks, head first."""
        queue: list[BlockId] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            queue.append(block)
            block = self._next[block]
        return queue

    def _evict(self, block: BlockId) -> None:
        self.prefix.withdraw(block)

    def _unlink(self, block: BlockId) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _append(self, block: BlockId) -> None:
        tail = self._prev[NULL_BLOCK]
        self._next[tail] = block
        self._prev[block] = tail
        self._next[block] = NULL_BLOCK
        self._prev[NULL_BLOCK] = block
        self.num_free += 1
