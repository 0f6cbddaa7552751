"""Telling: the KV events, which report changes of the prefix map to clients."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.impl.host.lineage import Lineage
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    KVEvent,
)


class EventLog:
    """The changes of the prefix map that have not been returned yet, in order (P20)."""

    def __init__(self, name_size: int) -> None:
        self._name_size = name_size
        """The number of tokens of one key: the smallest block size."""
        self._pending: list[KVEvent] = []

    def stored(
        self, lineage: Lineage, indices: Sequence[int], group: int = 0, per: int = 1
    ) -> None:
        """Log that blocks of a lineage were published.

        Args:
            lineage: the lineage of the blocks.
            indices: their indices in the block table, ascending, with gaps allowed.
            group: their KV-cache group.
            per: the number of smallest blocks in one of its blocks.
        """
        run: list[int] = []
        for index in indices:
            if run and index != run[-1] + 1:
                self._store(lineage, run, group, per)
                run = []
            run.append(index)
        if run:
            self._store(lineage, run, group, per)

    def removed(self, key: BlockKey) -> None:
        """Log that one block with this key was unpublished."""
        self._pending.append(BlockRemoved((key,)))

    def cleared(self) -> None:
        """Log that all blocks were unpublished."""
        self._pending.append(AllBlocksCleared())

    def take(self) -> tuple[KVEvent, ...]:
        """Return all logged events, and forget them."""
        told = tuple(self._pending)
        self._pending.clear()
        return told

    def _store(self, lineage: Lineage, run: Sequence[int], group: int, per: int) -> None:
        size = per * self._name_size
        first = run[0]
        parent = lineage.key_of(first * per - 1, group) if first else None
        self._pending.append(
            BlockStored(
                tuple([lineage.key_of((index + 1) * per - 1, group) for index in run]),
                parent,
                tuple(lineage.tokens[first * size : (run[-1] + 1) * size]),
                size,
                lineage.request.adapter,
            )
        )
