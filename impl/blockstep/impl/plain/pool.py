"""Pool: blocks with holders, the queue of those without, and the map of what can be found."""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, BlockKey, Config, PoolOrder


class Pool:
    """All blocks. A free one keeps its key until it is taken for something else."""

    def __init__(self, config: Config) -> None:
        self.order = config.pool_order
        self.refs = [0] * config.num_blocks
        self.free = list(range(NULL_BLOCK + 1, config.num_blocks))
        self.keys: list[BlockKey | None] = [None] * config.num_blocks
        self.cached: dict[BlockKey, list[BlockId]] = {}

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The blocks of the leading keys that can be found, of each the one published first."""
        found = []
        for key in keys:
            if key not in self.cached:
                break
            found.append(self.cached[key][0])
        return found

    def count_free(self, blocks: Iterable[BlockId]) -> int:
        """How many of them nobody holds: to hold those uses up free blocks."""
        return sum(self.refs[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """One holder more for each."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def take(self, count: int) -> list[BlockId]:
        """New blocks from the head of the queue; what was in them cannot be found any more."""
        blocks, self.free = self.free[:count], self.free[count:]
        for block in blocks:
            self.refs[block] = 1
            self.withdraw(block)
        return blocks

    def release(self, table: Iterable[BlockId]) -> None:
        """One holder less for each block of a table; its tail is to be reused first."""
        freed = []
        for block in reversed(list(table)):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                freed.append(block)
        self.free = freed + self.free if self.order is PoolOrder.LIFO else self.free + freed

    def publish(self, block: BlockId, key: BlockKey) -> None:
        """It can be found by this key from now on."""
        self.keys[block] = key
        self.cached.setdefault(key, []).append(block)

    def withdraw(self, block: BlockId) -> None:
        """It can no longer be found, if it could."""
        key, self.keys[block] = self.keys[block], None
        if key is not None:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]

    def forget(self) -> None:
        """Nothing can be found any more."""
        self.keys = [None] * len(self.keys)
        self.cached.clear()
