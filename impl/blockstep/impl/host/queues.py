"""Queues: waiting requests in the order of admission. Their elements are slots of the table."""

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
        """Iterate in the order of admission."""
        ...

    def head(self) -> int:
        """Return the first request; the queue must not be empty."""
        ...

    def pop(self) -> int:
        """Remove the first request and return it."""
        ...

    def append(self, slot: int) -> None:
        """Add a request at the end; under priority, by its rank."""
        ...

    def prepend(self, slots: Iterable[int]) -> None:
        """Add requests at the front, in the order given; under priority, by their ranks."""
        ...

    def remove(self, slot: int) -> bool:
        """Remove a request from any place; return False if it is not in this queue."""
        ...

    def sort(self, rank_of: Callable[[int], int]) -> None:
        """Sort by rank, the lowest first and equals as before; no effect under priority."""
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
    """Sorted by rank, wherever a request is added.

    A sorted list is better than a heap: a snapshot reads it in order, an abort removes from its
    middle, and shifting ten thousand pointers takes a few microseconds.
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
        """See `RequestQueue`. It is sorted by its own rank already."""


def make_queue(policy: Policy, rank_of: Callable[[int], Rank]) -> RequestQueue:
    """Return an empty queue for `policy`."""
    return PriorityQueue(rank_of) if policy is Policy.PRIORITY else FcfsQueue()
