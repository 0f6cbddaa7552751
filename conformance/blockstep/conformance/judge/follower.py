"""Follower: the prefix cache as the log of KV events describes it, which is all that a router
knows.

It counts copies: a key that is stored twice is in two blocks, and gone once both are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from blockstep.spec.vocabulary import (
    MEDIUM_GPU,
    BlockKey,
    BlockRemoved,
    BlockStored,
    KVEvent,
)


@dataclass(slots=True)
class Follower:
    """The number of copies of each key, by the log so far."""

    copies: Counter[BlockKey] = field(default_factory=Counter)

    def copy(self) -> Follower:
        """Return an independent copy."""
        return Follower(self.copies.copy())

    def follow(self, kv_events: Iterable[KVEvent]) -> list[BlockKey]:
        """Follow further events; return the keys that they remove and that had no copy.

        Events of another medium than prefix hits read are ignored.
        """
        unknown: list[BlockKey] = []
        for event in kv_events:
            if isinstance(event, BlockStored):
                if event.medium == MEDIUM_GPU:
                    self.copies.update(event.keys)
            elif not isinstance(event, BlockRemoved):
                self.copies.clear()
            elif event.medium == MEDIUM_GPU:
                unknown += self._remove(event.keys)
        return unknown

    def _remove(self, keys: Iterable[BlockKey]) -> Iterator[BlockKey]:
        for key in keys:
            left = self.copies[key] - 1
            if left > 0:
                self.copies[key] = left
            else:
                del self.copies[key]
            if left < 0:
                yield key
