"""Listings: mistakes of a source's own code, where no other theme has them.

The block manager's listings were read and run; the page on discrepancies has them all, each with
the exhibit that breaks ours in the same way.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


@PAGE.exhibit(
    "behind a block that is not hit the last, partial one is not taken",
    "the block manager: Prefix Cache Lookup, by the rule that it breaks",
    "P26 P8",
)
class TailBlockLeftOut(Defect):
    """What is left is compared with a block's size before the blocks to compute are taken off."""

    def _blocks_to_admit(self, num_tokens: int, num_hits: int) -> int:
        whole, rest = divmod(min(num_tokens, self.max_model_len), self.block_size)
        has_tail = rest > 0 and whole == num_hits
        return max(int(whole + has_tail) - num_hits, 0)


@PAGE.exhibit(
    "a block is published as it is taken",
    "the block manager: Prefix Cache Lookup, by the rule that it breaks",
    "P4 P3",
)
class PublishedAsItIsTaken(Defect):
    """A chunk may end within it, and the next request hits what is not computed."""

    def _publish(self, slot: int, num_computed: int, num_scheduled: int) -> None:
        (holding,) = self.table.holdings[slot]
        end = min(len(holding.blocks) * self.block_size, self.table.num_known[slot])
        super()._publish(slot, num_computed, max(num_scheduled, end - num_computed))


@PAGE.exhibit(
    "of those who wait every second one is passed over",
    "the block manager: in the Scheduling Loop, by the rule that it breaks",
    "P16 P15",
    invisible="policy: who is admitted first",
)
class EverySecondIsPassedOver(Defect):
    """A list is shortened while it is walked."""

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
