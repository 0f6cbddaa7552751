"""Telling: what becomes findable and what is no longer, for those who follow it from outside."""

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
    """What has happened to the prefix map and is not told yet, in order (P20)."""

    def __init__(self, name_size: int) -> None:
        self._name_size = name_size
        """Tokens that one name stands for: the smallest block size."""
        self._pending: list[KVEvent] = []

    def stored(
        self, lineage: Lineage, indices: Sequence[int], group: int = 0, per: int = 1
    ) -> None:
        """Blocks of a lineage are findable from now on.

        Args:
            lineage: whose they are.
            indices: their places in the block table, ascending; some may be left out.
            group: their KV-cache group.
            per: names to a block of it.
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
        """One block that carried this key is not found any more."""
        self._pending.append(BlockRemoved((key,)))

    def cleared(self) -> None:
        """No block is."""
        self._pending.append(AllBlocksCleared())

    def take(self) -> tuple[KVEvent, ...]:
        """All of it, which is told with this."""
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
