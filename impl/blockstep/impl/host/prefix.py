"""The prefix map: the cached blocks of a content, and the content of each cached block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.telling import EventLog
from blockstep.spec.vocabulary import BlockId, BlockKey

Shown: TypeAlias = tuple[tuple[BlockKey | None, ...], Mapping[BlockKey, tuple[BlockId, ...]]]


class PrefixMap:
    """The published blocks by the digest of their content (P3).

    Two blocks may be published with the same content; a hit takes the one published first (seed
    003, section 3.1). With a digest that is not cryptographic, a bucket may hold blocks of
    different contents, and each candidate is compared in full.

    Args:
        num_blocks: blocks of the pool, the null block included.
        verify: whether different contents may have equal digests.
    """

    def __init__(self, num_blocks: int, verify: bool) -> None:
        self._verify = verify
        self.log: EventLog | None = None
        """The log of the map's changes; None if the config has no KV events."""
        self._buckets: dict[bytes, BlockId | list[BlockId]] = {}
        """For each digest, the one block that has it, or several in order of publication. Nearly
        always it is one, and a list for each would cost more than everything else in `publish`."""
        self._lineages: list[Lineage | None] = [None] * num_blocks
        self._digests = [b""] * num_blocks
        self._indices = [0] * num_blocks
        self._groups = [0] * num_blocks
        self._shown: Shown | None = None
        """The last result of `show`; None if the map has changed since."""

    def publish(self, block: BlockId, lineage: Lineage, index: int, group: int = 0) -> None:
        """Publish `block` with the content of block `index` of `lineage`, in this KV-cache group.

        In a group of larger blocks, `index` is the last block of the smallest size in it.
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
        """Unpublish `block`; nothing happens if it was not published."""
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
        """Unpublish all blocks (P25)."""
        self._shown = None
        for bucket in self._buckets.values():
            for block in _blocks_in(bucket):
                self._lineages[block] = None
        self._buckets.clear()
        if self.log is not None:
            self.log.cleared()

    def hits(self, lineage: Lineage, limit: int) -> list[BlockId]:
        """Return cached blocks with the first contents of `lineage`, up to the first miss or
        `limit`."""
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
        """Return the block that is hit for block `index` of `lineage` in a KV-cache group, or
        None."""
        digest = lineage.digest_of(index)
        bucket = self._buckets.get(_name_in_group(digest, group) if group else digest)
        if bucket is None:
            return None
        if self._verify:
            blocks = _blocks_in(bucket)
            return next((b for b in blocks if self.holds(b, lineage, index, group)), None)
        return bucket if isinstance(bucket, int) else self._choose(bucket)

    def _choose(self, blocks: list[BlockId]) -> BlockId:
        """Return which of several blocks with one content is hit: the one published first."""
        return blocks[0]

    def _verified_hits(self, lineage: Lineage, limit: int) -> list[BlockId]:
        """Return the hits where different contents may have equal digests."""
        found: list[BlockId] = []
        for index in range(limit):
            block = self.find(lineage, index, group=0)
            if block is None:
                break
            found.append(block)
        return found

    def holds(self, block: BlockId, lineage: Lineage, index: int, group: int = 0) -> bool:
        """Return whether `block` is published with exactly the content of block `index` of
        `lineage`."""
        other = self._lineages[block]
        return (
            other is not None
            and self._indices[block] == index
            and self._groups[block] == group
            and lineage.agrees_with(other, index)
        )

    def show(self) -> Shown:
        """Return the keys by block id, and the blocks of each key: the same objects until one
        changes."""
        if self._shown is None:
            keys = self.keys()
            self._shown = tuple(keys), self.cached(keys)
        return self._shown

    def keys(self) -> list[BlockKey | None]:
        """Return the key of each block, by block id; None if the block is not published."""
        indices, groups = self._indices, self._groups
        return [
            None if lineage is None else lineage.key_of(indices[block], groups[block])
            for block, lineage in enumerate(self._lineages)
        ]

    def cached(self, keys: list[BlockKey | None]) -> dict[BlockKey, tuple[BlockId, ...]]:
        """Return the blocks of each key in order of publication; `keys` must be current."""
        found: dict[BlockKey, tuple[BlockId, ...]] = {}
        for bucket in self._buckets.values():
            for block in _blocks_in(bucket):
                key = keys[block]
                assert key is not None, f"block {block} is in a bucket, so it carries a key"
                found[key] = (*found.get(key, ()), block)
        return found

    def _publish_beside(self, block: BlockId, digest: bytes) -> None:
        """Publish a block whose digest another block has already."""
        bucket = self._buckets[digest]
        if isinstance(bucket, int):
            self._buckets[digest] = [bucket, block]
        else:
            bucket.append(block)

    def _share_keys(self, lineage: Lineage, found: list[BlockId]) -> None:
        self.share_keys(lineage, found[-1])

    def share_keys(self, lineage: Lineage, block: BlockId) -> None:
        """Let `lineage` share the key objects of the content up to the end of `block`."""
        source = self._lineages[block]
        if source is not None:
            lineage.adopt_keys(source, self._indices[block] + 1)


def _name_in_group(digest: bytes, group: int) -> bytes:
    """Return a digest for the content in a group; longer than any plain digest, so never equal to
    one."""
    return digest + group.to_bytes(4, "little")


def _blocks_in(bucket: BlockId | list[BlockId]) -> Sequence[BlockId]:
    return (bucket,) if isinstance(bucket, int) else bucket
