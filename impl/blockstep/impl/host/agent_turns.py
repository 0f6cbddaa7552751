"""Turns: the blocks that a turn of a job keeps for the next turn, and their effect on a step.

| published blocks: pinned | not full, not verified, lookahead: freed |   table of an ending turn
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from blockstep.impl.host import state as c
from blockstep.impl.host.blocks import free_list, touch_list
from blockstep.impl.host.requests import Requests
from blockstep.impl.pins import Pins
from blockstep.spec.vocabulary import NULL_BLOCK, Clock, PinEstimate


class AgentTurns:
    """Pins blocks as a turn ends, and ends pins; `pins` keeps the jobs and the time."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.pins = Pins()
        self._has_warm = False
        """Whether some request may have `IS_WARM`."""

    def begin_step(self) -> None:
        """End expired pins, and move requests of jobs with a pin ahead in the queue.

        Preempted requests stay before them. Without a pin the queue stays as it is.
        """
        self.end_pins(self.pins.list_ended())
        if self._has_warm or self.pins.pins:
            self._mark_warm()
        if self.pins.pins:
            self._sort_waiting()

    def take(self, event: Clock | PinEstimate) -> None:
        """Take the time, or how long a job's blocks stay pinned."""
        if isinstance(event, Clock):
            self.pins.set_time(event.now)
        else:
            self.pins.take_estimate(event)

    def begin_turn(self, slot: int) -> None:
        """Count a new request for its job, if it has one; machine code stops at its end."""
        job_id = self.requests.requests[slot].job_id
        self.pins.begin_turn(job_id)
        self.requests.state.requests[slot, c.MAY_KEEP] = c.KEEPS_TURN * (job_id is not None)

    def end_turn(self, slot: int) -> None:
        """Pin the published blocks of a request that finishes with its job's turn (seed 001,
        "Change 4").

        The pin is one more holder; blocks that cannot be hit are not pinned.
        """
        s, request = self.requests.state, self.requests.requests[slot]
        job_id = request.job_id
        if job_id is None:
            return
        if request.is_last_step:
            self.end_pins([job_id])
            return
        settled = self.requests.list_tables(slot, c.PUBLISHED)
        is_findable = any(block != NULL_BLOCK for table in settled for block in table)
        if not is_findable or not self.pins.may_pin(job_id):
            return
        self.end_pins([job_id])
        self.pins.pin(job_id, settled)
        for table in settled:
            touch_list(s, np.array(table, np.int32))
        s.scalars[c.NUM_HOLDERS] = len(self.pins.pins)

    def end_pins(self, job_ids: Iterable[str]) -> None:
        """End the pins of these jobs: their blocks become free unless held otherwise, and can still
        be hit."""
        for job_id in job_ids:
            for table in self.pins.end(job_id):
                free_list(self.requests.state, np.array(table, np.int32))
        self.requests.state.scalars[c.NUM_HOLDERS] = len(self.pins.pins)

    def give(self, needy: int) -> None:
        """End the pin that is the first to give its blocks to a request that lacks some."""
        giver = self.pins.find_giver(self.requests.requests[needy].job_id)
        assert giver is not None, "machine code stops only while there is a pin"
        self.end_pins([giver])

    def hold_all(self) -> bool:
        """Return whether all blocks that are held are held by pins only."""
        held = int(self.requests.state.blocks[:, c.REF_COUNT].sum())
        return held == self.pins.count_holds()

    def _mark_warm(self) -> None:
        requests = self.requests
        for slot in requests.slot_of.values():
            is_warm = self.pins.is_warm(requests.requests[slot].job_id)
            requests.state.requests[slot, c.IS_WARM] = is_warm
        self._has_warm = bool(self.pins.pins)

    def _sort_waiting(self) -> None:
        """Sort the waiting queue: preempted requests, those with a pin, the others."""
        s, line = self.requests.state, self.requests.list_queue(c.WAITING)
        first = c.QUEUES + 2 * c.WAITING
        ranks = {
            slot: 0 if status == c.IS_PREEMPTED else 2 - is_warm
            for slot, (status, is_warm) in zip(
                line, s.requests[line][:, [c.STATUS, c.IS_WARM]].tolist(), strict=True
            )
        }
        line.sort(key=ranks.__getitem__)
        if line:
            s.requests[line, c.NEXT] = [*line[1:], c.NONE]
            s.requests[line, c.PREVIOUS] = [c.NONE, *line[:-1]]
            s.scalars[first], s.scalars[first + 1] = line[0], line[-1]
