"""Mirror: a consumer's copy of an engine's prefix cache, and whether the copy can be relied on.

After a lost batch the copy may name blocks that were evicted. So the mirror fails closed: it
reports no block until it has read the missing batches or a snapshot. If the numbers of batches
fall, the engine has restarted with an empty cache. A restart after which exactly as many batches
are lost as there were before cannot be detected (upstream #57789).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from blockstep.impl.serving.wire import (
    BlockHash,
    Cleared,
    Removed,
    Stored,
    WireEvent,
    get_group,
    read_batch,
)
from blockstep.spec.vocabulary import MEDIUM_GPU


class Mirror:
    """Reads batches in the order of their numbers. It starts empty.

    Args:
        medium: the medium whose blocks are followed.
        group: the KV-cache group whose blocks are followed, if events name it (`Form.MAPS`); None
            for all groups. vLLM gives a block the same hash in each group, so use one mirror for
            each group there.
    """

    def __init__(self, medium: str = MEDIUM_GPU, group: int | None = None) -> None:
        self._medium = medium
        self._group = group
        self._copies: Counter[BlockHash] = Counter()
        self._last_seen = -1
        """Number of the last batch received, read or not."""
        self.next_seq = 0
        """Number of the next batch to read."""
        self.is_whole = True
        """Whether all batches so far were read."""

    def take(self, seq: int, payload: bytes) -> bool:
        """Read a batch that was received; return whether the mirror is complete.

        A batch that `heal` has read already is ignored.

        Raises:
            msgspec.MsgspecError: the payload is not a batch. The mirror is incomplete then.
        """
        if seq <= self._last_seen:
            self._copies.clear()
            self.next_seq, self.is_whole = 0, True
        self._last_seen = seq
        if seq > self.next_seq:
            self.is_whole = False
        if seq == self.next_seq and self.is_whole:
            self._read(payload)
            self.next_seq += 1
        return self.is_whole

    def heal(self, batches: Iterable[tuple[int, bytes]]) -> bool:
        """Read batches that were sent again; return whether the mirror is complete.

        It is not if the first of `batches` is later than the next one to read.
        """
        for seq, payload in batches:
            if seq > self.next_seq:
                self.is_whole = False
                return False
            if seq == self.next_seq:
                self._read(payload)
                self.next_seq += 1
        self.is_whole = True
        return True

    def restore(self, next_seq: int, payload: bytes) -> None:
        """Replace the content by a snapshot; `next_seq` is the number of the batch after it."""
        self._copies.clear()
        self._read(payload)
        self.next_seq = next_seq
        self.is_whole = True

    def count(self, name: BlockHash) -> int:
        """Return the number of cached copies of a block; 0 while the mirror is incomplete."""
        return self._copies[name] if self.is_whole else 0

    def count_prefix(self, names: Iterable[BlockHash]) -> int:
        """Return the number of leading blocks of a prompt that are cached."""
        found = 0
        for name in names:
            if not self.count(name):
                break
            found += 1
        return found

    def list_findable(self) -> dict[BlockHash, int]:
        """Return the number of copies of each block; empty while the mirror is incomplete."""
        return dict(self._copies) if self.is_whole else {}

    def _read(self, payload: bytes) -> None:
        try:
            events = read_batch(payload).events
        except msgspec.MsgspecError:
            self.is_whole = False
            raise
        for event in events:
            self._follow(event)

    def _follow(self, event: WireEvent) -> None:
        match event:
            case Stored(block_hashes=names) if self._is_followed(event):
                self._copies.update(names)
            case Removed(block_hashes=names) if self._is_followed(event):
                self._copies.subtract(names)
                for name in names:
                    if self._copies[name] <= 0:
                        del self._copies[name]
            case Cleared():
                self._copies.clear()
            case _:
                pass  # a block of another medium or group

    def _is_followed(self, event: Stored | Removed) -> bool:
        group = get_group(event)
        is_of_group = None in (self._group, group) or group == self._group
        return is_of_group and event.medium in (self._medium, None)
