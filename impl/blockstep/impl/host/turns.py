"""Turns: the blocks that a turn of a job keeps for the next turn, and their effect on a step.

| published blocks: pinned | not full, not verified, lookahead: freed |   table of an ending turn
"""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.impl.pins import Pins
from blockstep.spec.vocabulary import NULL_BLOCK, Status


class Turns(Core):
    """Pins blocks as a turn ends, and ends expired pins as a step begins."""

    def _end_turn(self, pins: Pins, slot: int) -> None:
        """Pin the published blocks of a request that finishes with its job's turn (seed 001,
        "Change 4").

        The pin is one more holder: the request frees all of its blocks as it finishes, or leaves
        them to a transfer. Blocks that cannot be hit are not pinned.
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
        for table in settled:
            self.pool.touch([block for block in table if block != NULL_BLOCK])

    def _begin_with_pins(self, pins: Pins) -> None:
        """End expired pins, and move requests of jobs with a pin ahead in the queue.

        Preempted requests stay before them. Without a pin the queue stays as it is.
        """
        self._end_pins(pins.list_ended())
        if pins.pins:
            self.waiting.sort(self._rank_by_warmth)

    def _rank_by_warmth(self, slot: int) -> int:
        if self.table.statuses[slot] is Status.PREEMPTED:
            return 0
        return 2 - self._is_warm(slot)
