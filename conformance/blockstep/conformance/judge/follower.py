"""Follower: what somebody believes of an engine's prefix cache who reads its log and nothing else.

A router is such a one. It counts copies: a key that is stored twice is in two blocks, and gone once
both are removed.
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
    """The copies of each key, as the log so far tells them."""

    copies: Counter[BlockKey] = field(default_factory=Counter)

    def copy(self) -> Follower:
        """The same, to go another way from here."""
        return Follower(self.copies.copy())

    def follow(self, kv_events: Iterable[KVEvent]) -> list[BlockKey]:
        """Take in what is told next; returns the keys that are removed where there are none.

        What is told of another medium than a prefix hit reads is passed over.
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
