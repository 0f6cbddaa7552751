"""Seeded bugs from the block manager's listings that fit no other page.

The listings were read and run; the page on discrepancies lists all of their defects, each with the
seeded bug that reproduces it.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


@PAGE.exhibit(
    "a partly filled last block is not allocated if full blocks are computed, too",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P26 P8",
)
class TailBlockLeftOut(Defect):
    """The tail is allocated only if all full blocks of the request were hit."""

    def _blocks_to_admit(self, num_tokens: int, num_hits: int) -> int:
        whole, rest = divmod(min(num_tokens, self.max_model_len), self.block_size)
        has_tail = rest > 0 and whole == num_hits
        return max(int(whole + has_tail) - num_hits, 0)


@PAGE.exhibit(
    "a block is published when it is allocated",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P4 P3",
)
class PublishedAsItIsTaken(Defect):
    """A chunk may end within the block, so the next request hits slots that are not computed."""

    def _publish(self, slot: int, num_computed: int, num_scheduled: int) -> None:
        (holding,) = self.table.holdings[slot]
        end = min(len(holding.blocks) * self.block_size, self.table.num_known[slot])
        super()._publish(slot, num_computed, max(num_scheduled, end - num_computed))


@PAGE.exhibit(
    "every second waiting request is skipped",
    "the block manager: in the Scheduling Loop, breaks its rule",
    "P16 P15",
    invisible="policy: which request is admitted first",
)
class EverySecondIsPassedOver(Defect):
    """The queue is shortened during an iteration over it."""

    _skips_next = False

    def _schedule_waiting(self, step: Any) -> None:
        self._skips_next = False
        super()._schedule_waiting(step)

    def _try_admit(self, slot: int, queue: Any, step: Any) -> bool:
        self._skips_next = super()._try_admit(slot, queue, step)
        return self._skips_next

    def _is_passed_over(self, slot: int, step: Any) -> bool:
        skips, self._skips_next = self._skips_next, False
        return skips or super()._is_passed_over(slot, step)
