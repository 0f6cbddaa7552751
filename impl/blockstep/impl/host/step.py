"""Step: what one Schedule has decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockstep.spec.vocabulary import BlockId, RequestId, TokenIds

RunningRow: TypeAlias = tuple[int, tuple[BlockId, ...], TokenIds]
"""Tokens scheduled, blocks appended, drafts among the tokens. A tuple, as there is one per row."""
AdmittedRow: TypeAlias = tuple[int, int, bool]
"""Slot, tokens scheduled, whether it is resumed."""


@dataclass(slots=True, eq=False)
class Batch:
    """Running rows that were scheduled together, in running order."""

    slots: NDArray[np.int64]
    """[rows]"""
    num_scheduled: NDArray[np.int32]
    """[rows]; at least 1 each."""
    num_computed: NDArray[np.int32]
    """[rows]; before the step."""
    num_known: NDArray[np.int32]
    """[rows]"""
    block_rows: NDArray[np.int64]
    """[new blocks]; the row that each is appended to, in order."""
    block_ids: NDArray[np.int32]
    """[new blocks]"""
    drafts: dict[int, TokenIds]
    """By row; only where there are some."""

    def remove(self, slot: int) -> int:
        """Drop the row of `slot`; its scheduled tokens, 0 if it has none here."""
        found = (self.slots == slot).nonzero()[0]
        if not len(found):
            return 0
        row = int(found[0])
        tokens = int(self.num_scheduled[row])
        kept = self.block_rows != row
        rows = self.block_rows[kept]
        self.block_ids = self.block_ids[kept]
        self.block_rows = rows - (rows > row)
        self.drafts = {at - (at > row): d for at, d in self.drafts.items() if at != row}
        self.slots = np.delete(self.slots, row)
        self.num_scheduled = np.delete(self.num_scheduled, row)
        self.num_computed = np.delete(self.num_computed, row)
        self.num_known = np.delete(self.num_known, row)
        return tokens


@dataclass(slots=True)
class Step:
    """The plan in the making. Running rows lie in `rows` or in `batches`, never in both."""

    budget: int
    """Tokens that may still be scheduled."""
    rows: dict[int, RunningRow] = field(default_factory=dict)
    """Running requests by slot, in order of scheduling; preemption takes some out again."""
    batches: list[Batch] = field(default_factory=list)
    """The same, many at a time."""
    admitted: list[AdmittedRow] = field(default_factory=list)
    """In order of admission; nothing takes one out again."""
    preempted_req_ids: list[RequestId] = field(default_factory=list)

    def remove_from_batches(self, slot: int) -> int:
        """Drop the row of `slot`; its scheduled tokens, 0 if it has none."""
        return next(filter(None, (batch.remove(slot) for batch in self.batches)), 0)
