"""Pool: ref counts of blocks, the free queue, and the prefix-cache map."""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, BlockKey, Config, PoolOrder


class Pool:
    """All blocks. A free one keeps its key until it is reused."""

    def __init__(self, config: Config) -> None:
        self.order = config.pool_order
        self.refs = [0] * config.num_blocks
        self.free = list(range(NULL_BLOCK + 1, config.num_blocks))
        self.keys: list[BlockKey | None] = [None] * config.num_blocks
        self.cached: dict[BlockKey, list[BlockId]] = {}

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Return the blocks of the leading keys that are cached; the one published first for
        each."""
        found = []
        for key in keys:
            if key not in self.cached:
                break
            found.append(self.cached[key][0])
        return found

    def count_free(self, blocks: Iterable[BlockId]) -> int:
        """Return how many of the blocks are free: holding those uses up free blocks."""
        return sum(self.refs[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def take(self, count: int) -> list[BlockId]:
        """Take blocks from the head of the free queue, and evict them from the prefix cache."""
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            self.refs[block] = 1
            self.withdraw(block)
        return blocks

    def release(self, table: Iterable[BlockId]) -> None:
        """Remove a holder from each block of a table; its last block is reused first."""
        freed = []
        for block in reversed(list(table)):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                freed.append(block)
        self.free = freed + self.free if self.order is PoolOrder.LIFO else self.free + freed

    def publish(self, block: BlockId, key: BlockKey) -> None:
        """Publish a block under a key."""
        self.keys[block] = key
        self.cached.setdefault(key, []).append(block)

    def withdraw(self, block: BlockId) -> None:
        """Remove a block from the prefix cache, if it is cached."""
        key, self.keys[block] = self.keys[block], None
        if key is not None:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.keys = [None] * len(self.keys)
        self.cached.clear()
