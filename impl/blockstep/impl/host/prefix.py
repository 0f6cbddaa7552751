"""The prefix map: which blocks hold a content, and what content a block holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.telling import EventLog
from blockstep.spec.vocabulary import BlockId, BlockKey

Shown: TypeAlias = tuple[tuple[BlockKey | None, ...], Mapping[BlockKey, tuple[BlockId, ...]]]


class PrefixMap:
    """Published blocks by the digest of their content (P3).

    Two blocks may hold the same content, published side by side; a hit takes the one published
    first (seed 003, section 3.1). With a digest that is not cryptographic, a bucket may hold
    blocks of different contents, and each candidate is compared in full.

    Args:
        num_blocks: blocks of the pool, the null block included.
        verify: whether equal digests may stand for different contents.
    """

    def __init__(self, num_blocks: int, verify: bool) -> None:
        self._verify = verify
        self.log: EventLog | None = None
        """Where it is kept what becomes of the map; None where nobody is told."""
        self._buckets: dict[bytes, BlockId | list[BlockId]] = {}
        """By digest: the one block that carries it, or several in order of publication. Nearly
        always it is one, and a list for each would cost more than all else in `publish`."""
        self._lineages: list[Lineage | None] = [None] * num_blocks
        self._digests = [b""] * num_blocks
        self._indices = [0] * num_blocks
        self._groups = [0] * num_blocks
        self._shown: Shown | None = None
        """As of now; None where it has changed since it was shown."""

    def publish(self, block: BlockId, lineage: Lineage, index: int, group: int = 0) -> None:
        """From now on `block` is found as block `index` of `lineage`, in this KV-cache group.

        In a group of larger blocks `index` is that of the last one in it which has a name.
        """
        self._shown = None
        digest = lineage.digest_of(index)
        if group:
            digest = _name_in_group(digest, group)
        self._lineages[block] = lineage
        self._digests[block] = digest
        self._indices[block] = index
        self._groups[block] = group
        if self._buckets.setdefault(digest, block) != block:
            self._publish_beside(block, digest)

    def withdraw(self, block: BlockId) -> None:
        """`block` is not found any more; nothing happens if it was not published."""
        lineage = self._lineages[block]
        if lineage is None:
            return
        self._shown = None
        if self.log is not None:
            self.log.removed(lineage.key_of(self._indices[block], self._groups[block]))
        self._lineages[block] = None
        digest = self._digests[block]
        bucket = self._buckets[digest]
        if isinstance(bucket, int):
            del self._buckets[digest]
            return
        bucket.remove(block)
        if not bucket:
            del self._buckets[digest]

    def clear(self) -> None:
        """No block is found any more (P25)."""
        self._shown = None
        for bucket in self._buckets.values():
            for block in _blocks_in(bucket):
                self._lineages[block] = None
        self._buckets.clear()
        if self.log is not None:
            self.log.cleared()

    def hits(self, lineage: Lineage, limit: int) -> list[BlockId]:
        """Blocks that hold the first blocks of `lineage`, up to the first miss or `limit`."""
        if self._verify:
            found = self._verified_hits(lineage, limit)
        else:
            buckets = list(map(self._buckets.get, lineage.name_blocks()[:limit]))
            if None in buckets:
                del buckets[buckets.index(None) :]
            found = [
                bucket if isinstance(bucket, int) else self._choose(bucket)
                for bucket in buckets
                if bucket is not None
            ]
        if found:
            self._share_keys(lineage, found)
        return found

    def find(self, lineage: Lineage, index: int, group: int) -> BlockId | None:
        """The block that is hit for block `index` of `lineage` in a KV-cache group, if any."""
        digest = lineage.digest_of(index)
        bucket = self._buckets.get(_name_in_group(digest, group) if group else digest)
        if bucket is None:
            return None
        if self._verify:
            blocks = _blocks_in(bucket)
            return next((b for b in blocks if self.holds(b, lineage, index, group)), None)
        return bucket if isinstance(bucket, int) else self._choose(bucket)

    def _choose(self, blocks: list[BlockId]) -> BlockId:
        """Which of several blocks with one content is hit: the one published first."""
        return blocks[0]

    def _verified_hits(self, lineage: Lineage, limit: int) -> list[BlockId]:
        """The same where equal digests may stand for different contents."""
        found: list[BlockId] = []
        for index in range(limit):
            block = self.find(lineage, index, group=0)
            if block is None:
                break
            found.append(block)
        return found

    def holds(self, block: BlockId, lineage: Lineage, index: int, group: int = 0) -> bool:
        """Whether `block` is published with exactly the content of block `index` of `lineage`."""
        other = self._lineages[block]
        return (
            other is not None
            and self._indices[block] == index
            and self._groups[block] == group
            and lineage.agrees_with(other, index)
        )

    def show(self) -> Shown:
        """The keys by block id, and the blocks of each: the same objects until either changes."""
        if self._shown is None:
            keys = self.keys()
            self._shown = tuple(keys), self.cached(keys)
        return self._shown

    def keys(self) -> list[BlockKey | None]:
        """What each block carries, by block id; None where it is not published."""
        indices, groups = self._indices, self._groups
        return [
            None if lineage is None else lineage.key_of(indices[block], groups[block])
            for block, lineage in enumerate(self._lineages)
        ]

    def cached(self, keys: list[BlockKey | None]) -> dict[BlockKey, tuple[BlockId, ...]]:
        """The blocks of each key in order of publication; `keys` as of now."""
        found: dict[BlockKey, tuple[BlockId, ...]] = {}
        for bucket in self._buckets.values():
            for block in _blocks_in(bucket):
                key = keys[block]
                assert key is not None, f"block {block} is in a bucket, so it carries a key"
                found[key] = (*found.get(key, ()), block)
        return found

    def _publish_beside(self, block: BlockId, digest: bytes) -> None:
        """Another block carries the digest already."""
        bucket = self._buckets[digest]
        if isinstance(bucket, int):
            self._buckets[digest] = [bucket, block]
        else:
            bucket.append(block)

    def _share_keys(self, lineage: Lineage, found: list[BlockId]) -> None:
        self.share_keys(lineage, found[-1])

    def share_keys(self, lineage: Lineage, block: BlockId) -> None:
        """Let `lineage` have the very keys that name the content up to the end of `block`."""
        source = self._lineages[block]
        if source is not None:
            lineage.adopt_keys(source, self._indices[block] + 1)


def _name_in_group(digest: bytes, group: int) -> bytes:
    """Longer than any digest alone, so that none of them is it."""
    return digest + group.to_bytes(4, "little")


def _blocks_in(bucket: BlockId | list[BlockId]) -> Sequence[BlockId]:
    return (bucket,) if isinstance(bucket, int) else bucket
