"""Turns: what one of a job leaves for the next, and what that changes in a step.

| settled blocks: pinned | not full, not verified, lookahead: freed |   table of a turn that ends
"""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.impl.host.pins import Pins
from blockstep.spec.vocabulary import NULL_BLOCK, Status


class Turns(Core):
    """Keeps blocks as a turn ends, and lets go of them as a step begins."""

    def _end_turn(self, pins: Pins, slot: int) -> None:
        """A request ends by what it has sampled: pin what its job will find (seed 001, "Change 4").

        What cannot be found is of no use to anybody: it is freed with the request.
        """
        request, holdings = self.table.requests[slot], self.table.holdings[slot]
        job_id = request.job_id
        if job_id is None:
            return
        if request.is_last_step:
            self._end_pins([job_id])
            return
        settled = tuple([tuple(holding.blocks[: holding.num_cached]) for holding in holdings])
        is_findable = any(block != NULL_BLOCK for table in settled for block in table)
        if not is_findable or not pins.may_pin(job_id):
            return
        self._end_pins([job_id])
        pins.pin(job_id, settled)
        for holding in holdings:
            del holding.blocks[: holding.num_cached]
            holding.num_left = 0  # what is null behind it is passed over in any case

    def _begin_with_pins(self, pins: Pins) -> None:
        """A step begins: what has had its time goes, and who is warm goes ahead.

        Who was preempted stays before them all. Without a pin everybody stands as before.
        """
        self._end_pins(pins.list_ended())
        if pins.pins:
            self.waiting.sort(self._rank_by_warmth)

    def _rank_by_warmth(self, slot: int) -> int:
        if self.table.statuses[slot] is Status.PREEMPTED:
            return 0
        return 2 - self._is_warm(slot)
