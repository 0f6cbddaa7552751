"""Tables: block tables of requests, publishing, and the blocks needed to extend them."""

from __future__ import annotations

from blockstep.spec.vocabulary import BlockCopy, BlockId, Config
from plain_engine.pool import Pool
from plain_engine.text import Text


class Tables:
    """Operations on the block table of a request."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self.size = config.block_size
        self.caches = config.enable_prefix_caching
        self.pool = pool

    def find(self, text: Text) -> list[BlockId]:
        """Return its prefix hit; at least one token is left to compute."""
        if not self.caches or text.request.skip_reading_prefix_cache:
            return []
        return self.pool.find(text.list_keys((text.known - 1) // self.size, self.size))

    def is_shared(self, text: Text) -> bool:
        """Whether it continues within a block that other requests hold, too."""
        at, within = divmod(text.computed, self.size)
        return within > 0 and at < len(text.table) and self.pool.refs[text.table[at]] > 1

    def lacks(self, text: Text, slots: int, hits: list[BlockId]) -> int:
        """Return the free blocks needed to give it this many slots, including free blocks of its
        hit."""
        missing = -(-slots // self.size) - len(text.table) - len(hits)
        return max(missing, 0) + self.pool.count_free(hits) + self.is_shared(text)

    def share(self, text: Text, hits: list[BlockId]) -> None:
        """Begin its block table with a hit."""
        self.pool.hold(hits)
        text.table, text.settled = list(hits), len(hits)

    def copy(self, text: Text) -> list[BlockCopy]:
        """Replace the shared block in which it continues by a copy."""
        if not self.is_shared(text):
            return []
        at = text.computed // self.size
        copy = BlockCopy(text.table[at], *self.pool.take(1))
        self.pool.release([text.table[at]])
        text.table[at] = copy.destination
        return [copy]

    def grow(self, text: Text, slots: int) -> list[BlockId]:
        """Append new blocks, which must be available, for this many slots."""
        new = self.pool.take(max(-(-slots // self.size) - len(text.table), 0))
        text.table += new
        return new

    def publish(self, text: Text, end: int) -> None:
        """Publish blocks that are full of known tokens before `end`."""
        if not self.caches:
            return
        count = min(end, text.known) // self.size
        keys = text.list_keys(count, self.size)
        for at in range(text.settled, count):
            self.pool.publish(text.table[at], keys[at])
        text.settled = max(text.settled, count)

    def branch(self, parent: Text, child: Text) -> None:
        """Begin the child's table with the blocks that it shares with its parent."""
        self.publish(parent, parent.computed)
        pairs = zip(parent.tokens, child.tokens, strict=False)
        common = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        shared = min(parent.known, child.known) if common is None else common
        shared = min(parent.computed, shared, child.known - 1)
        if shared // self.size < parent.settled:
            shared -= shared % self.size
        child.computed, child.table = shared, parent.table[: -(-shared // self.size)]
        child.settled = min(parent.settled, shared // self.size)
        self.pool.hold(child.table)
