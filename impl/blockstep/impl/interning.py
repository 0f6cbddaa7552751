"""Names: numbers for ids and other Python values, for engines in arrays."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstep.spec.vocabulary import Request, RequestId, Status, TokenIds

Extras: TypeAlias = tuple[str | None, str | None, tuple[tuple[str, int], ...], TokenIds]
"""Adapter, cache salt, overlapping items and embeddings of a block (P6)."""
NOTHING: Final[Extras] = (None, None, (), ())
STATUSES: Final = (
    Status.WAITING,
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    Status.RUNNING,
    Status.PREEMPTED,
    Status.WAITING_FOR_STREAMING_REQ,
    Status.WAITING_FOR_REMOTE_KVS,
    Status.WAITING_FOR_REMOTE_KVS,
)
"""Status by the number that engines in arrays use for it."""
K = TypeVar("K", RequestId, tuple[int, int, RequestId])
_STEP: Final = 1 << 24
_LAST: Final = 1 << 62


class ExtrasTable:
    """Numbers for the parts of a block key besides tokens; 0 is nothing at all.

    The compiled functions count the uses of each number; unused numbers are given out again.
    """

    def __init__(self) -> None:
        self.values: list[Extras] = [NOTHING]
        self._numbers: dict[Extras, int] = {NOTHING: 0}
        self._unused: list[int] = []

    def number_of(self, extras: Extras) -> int:
        """Return the number of `extras`; it may be one beyond those that were counted so far."""
        found = self._numbers.get(extras)
        if found is None:
            if self._unused:
                found = self._unused.pop()
                self.values[found] = extras
            else:
                found = len(self.values)
                self.values.append(extras)
            self._numbers[extras] = found
        return found

    def count_unused(self, capacity: int) -> int:
        """Return how many numbers below `capacity` are available."""
        return capacity - len(self.values) + len(self._unused)

    def sweep(self, uses: NDArray[np.int64]) -> None:
        """Free the unused numbers."""
        for number in (uses[: len(self.values)] == 0).nonzero()[0].tolist():
            if number and self._numbers.get(self.values[number]) == number:
                del self._numbers[self.values[number]]
                self._unused.append(number)


def list_extras(request: Request, block_size: int, count: int) -> list[Extras]:
    """Return the extras of the first `count` blocks of a request: the salt is in the first
    alone."""
    found: list[Extras] = []
    items = request.items
    first = 0
    for index in range(count):
        start, end = index * block_size, (index + 1) * block_size
        while first < len(items) and items[first].offset + items[first].length <= start:
            first += 1
        last = first
        while last < len(items) and items[last].offset < end:
            last += 1
        overlapping = tuple((item.identifier, item.offset - start) for item in items[first:last])
        salt = None if index else request.cache_salt
        found.append((request.adapter, salt, overlapping, request.prompt_embeds[start:end]))
    return found


class Labels(Generic[K]):
    """Numbers that compare like the ids of unfinished requests, or other keys of order (P16).

    A new id gets a number between those of its neighbours; if there is none left, all get new ones,
    far apart.
    """

    def __init__(self) -> None:
        self._ids: list[K] = []
        self._labels: list[int] = []

    def add(self, request_id: K) -> list[tuple[K, int]]:
        """Add an id; return the ids with new labels: its own, or all."""
        ids, labels = self._ids, self._labels
        at = bisect_left(ids, request_id)
        low = labels[at - 1] if at else 0
        high = labels[at] if at < len(ids) else _LAST
        label = low + min((high - low) // 2, _STEP)
        ids.insert(at, request_id)
        labels.insert(at, label)
        if label > low:
            return [(request_id, label)]
        self._labels = [_STEP * place for place in range(1, len(ids) + 1)]
        return list(zip(ids, self._labels, strict=True))

    def remove(self, request_id: K) -> None:
        """Remove the id of a finished request."""
        at = bisect_left(self._ids, request_id)
        del self._ids[at], self._labels[at]
