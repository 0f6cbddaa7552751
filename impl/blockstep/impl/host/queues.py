"""Queues: who waits, in the order of being taken. Their elements are slots of the table."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

from blockstep.spec.vocabulary import Policy, RequestId

Rank: TypeAlias = tuple[int, int, RequestId]
"""Priority, arrival time, request id: unique among unfinished requests."""


class RequestQueue(Protocol):
    """Waiting requests, by slot (seed 001, "Queue Selection")."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """In the order of being taken."""
        ...

    def head(self) -> int:
        """The one to be taken next; the queue is not empty."""
        ...

    def pop(self) -> int:
        """Take the head."""
        ...

    def append(self, slot: int) -> None:
        """It comes last, as far as the policy leaves a choice."""
        ...

    def prepend(self, slots: Iterable[int]) -> None:
        """They come first in the order given, as far as the policy leaves a choice."""
        ...

    def remove(self, slot: int) -> bool:
        """Take it out from anywhere; False if it is not here."""
        ...

    def sort(self, rank_of: Callable[[int], int]) -> None:
        """The lowest come first, equals as before, as far as the policy leaves a choice."""
        ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._slots: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def head(self) -> int:
        """See `RequestQueue`."""
        return self._slots[0]

    def pop(self) -> int:
        """See `RequestQueue`."""
        return self._slots.popleft()

    def append(self, slot: int) -> None:
        """See `RequestQueue`."""
        self._slots.append(slot)

    def prepend(self, slots: Iterable[int]) -> None:
        """See `RequestQueue`."""
        self._slots.extendleft(reversed(tuple(slots)))

    def remove(self, slot: int) -> bool:
        """See `RequestQueue`. O(length)."""
        if slot not in self._slots:
            return False
        self._slots.remove(slot)
        return True

    def sort(self, rank_of: Callable[[int], int]) -> None:
        """See `RequestQueue`. O(length)."""
        self._slots = deque(sorted(self._slots, key=rank_of))


class PriorityQueue:
    """Sorted by rank; where a request is inserted makes no difference.

    A sorted list beats a heap: a snapshot reads it in order, an abort removes from its middle,
    and shifting ten thousand pointers takes a few microseconds.
    """

    def __init__(self, rank_of: Callable[[int], Rank]) -> None:
        self._rank_of = rank_of
        self._entries: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter([slot for _, slot in self._entries])

    def head(self) -> int:
        """See `RequestQueue`."""
        return self._entries[0][1]

    def pop(self) -> int:
        """See `RequestQueue`."""
        return self._entries.pop(0)[1]

    def append(self, slot: int) -> None:
        """See `RequestQueue`."""
        insort(self._entries, (self._rank_of(slot), slot))

    def prepend(self, slots: Iterable[int]) -> None:
        """See `RequestQueue`."""
        for slot in slots:
            self.append(slot)

    def remove(self, slot: int) -> bool:
        """See `RequestQueue`. O(log length) to find it."""
        entry = (self._rank_of(slot), slot)
        at = bisect_left(self._entries, entry)
        if at == len(self._entries) or self._entries[at] != entry:
            return False
        del self._entries[at]
        return True

    def sort(self, rank_of: Callable[[int], int]) -> None:
        """See `RequestQueue`: its own rank leaves no choice."""


def make_queue(policy: Policy, rank_of: Callable[[int], Rank]) -> RequestQueue:
    """An empty queue that follows `policy`."""
    return PriorityQueue(rank_of) if policy is Policy.PRIORITY else FcfsQueue()
