"""Follower: the prefix cache as the log of KV events describes it, which is all that a router
knows.

It counts copies: a key that is stored twice is in two blocks, and gone once both are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from blockstep.spec import vocabulary as v


@dataclass(slots=True)
class Follower:
    """The number of copies of each key, by the log so far."""

    copies: Counter[v.BlockKey] = field(default_factory=Counter)

    def copy(self) -> Follower:
        """Return an independent copy."""
        return Follower(self.copies.copy())

    def follow(self, kv_events: Iterable[v.KVEvent]) -> list[v.BlockKey]:
        """Follow further events; return the keys that they remove and that had no copy.

        Events of another medium than prefix hits read are ignored.
        """
        unknown: list[v.BlockKey] = []
        for event in kv_events:
            if isinstance(event, v.BlockStored):
                if event.medium == v.MEDIUM_GPU:
                    self.copies.update(event.keys)
            elif not isinstance(event, v.BlockRemoved):
                self.copies.clear()
            elif event.medium == v.MEDIUM_GPU:
                unknown += self._remove(event.keys)
        return unknown

    def _remove(self, keys: Iterable[v.BlockKey]) -> Iterator[v.BlockKey]:
        for key in keys:
            left = self.copies[key] - 1
            if left > 0:
                self.copies[key] = left
            else:
                del self.copies[key]
            if left < 0:
                yield key
