"""Mirror: what a consumer knows of an engine's prefix cache, and whether it may rely on it.

A batch that is lost makes it worth nothing: what it believes to be there may be gone. So it fails
closed: from then on it holds nothing, until it is healed by the batches that it lacks, or by a
snapshot. Numbers that fall say that the engine began anew, with an empty cache; one that does, and
loses as many batches as there were before, is not told from one that goes on (upstream #57789).
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
    """Reads batches in the order of their numbers. It holds nothing before its first one.

    Args:
        medium: whose blocks it follows.
        group: the KV-cache group whose blocks it follows, where events tell (`Form.MAPS`); None:
            those of all. vLLM gives a block the same hash in each group, so there one mirror a
            group is needed.
    """

    def __init__(self, medium: str = MEDIUM_GPU, group: int | None = None) -> None:
        self._medium = medium
        self._group = group
        self._copies: Counter[BlockHash] = Counter()
        self._last_seen = -1
        """The number of the batch that came in last, read or not."""
        self.next_seq = 0
        """Of the batch that it waits for."""
        self.is_whole = True
        """Whether it has read all that there was; an engine begins with nothing."""

    def take(self, seq: int, payload: bytes) -> bool:
        """Read a batch as it comes in; returns whether it is whole now.

        One that it was healed with in the meantime is passed over.

        Raises:
            msgspec.MsgspecError: the batch is none. Then it is not whole.
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
        """Read batches that were asked for again; returns whether it is whole now.

        It is not where the first of them is a later one than that which it waits for.
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
        """Begin with a snapshot, and go on behind it."""
        self._copies.clear()
        self._read(payload)
        self.next_seq = next_seq
        self.is_whole = True

    def count(self, name: BlockHash) -> int:
        """Copies of a block that can be found; 0 while it is not whole."""
        return self._copies[name] if self.is_whole else 0

    def count_prefix(self, names: Iterable[BlockHash]) -> int:
        """Leading blocks of a prompt that can be found."""
        found = 0
        for name in names:
            if not self.count(name):
                break
            found += 1
        return found

    def list_findable(self) -> dict[BlockHash, int]:
        """Copies of each block; nothing while it is not whole."""
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
                pass  # of another medium or group

    def _is_followed(self, event: Stored | Removed) -> bool:
        group = get_group(event)
        is_of_group = None in (self._group, group) or group == self._group
        return is_of_group and event.medium in (self._medium, None)
