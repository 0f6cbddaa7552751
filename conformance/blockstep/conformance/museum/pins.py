"""Seeded bugs in pins: each deciding change of the seed's fork is broken once.

What the fork records of its steps is checked by `recorded.steps`, whose tests have a wrong record
for each check.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Status

PAGE = Page(takes="pins")
PART = "pins_type"
KEPT = "policy: which blocks stay pinned, and for how long"
FIRST = "policy: which request is admitted or preempted first"


# Change 4: a job has at most one pin, which is freed when it ends.


@PAGE.exhibit(
    "the pin of the previous turn is replaced, but not freed", "vLLM V1: The Fork, Change 4", "P1"
)
class StalePinLeaks(Defect):
    """The blocks of the old pin keep a reference that nothing will ever drop."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        request = self.table.requests[slot]
        stale = pins.pins.pop(request.job_id, None) if pins.may_pin(request.job_id) else None
        super()._end_turn(pins, slot)
        if stale is not None and not pins.is_warm(request.job_id):
            pins.pins[request.job_id] = stale


# Change 5: pins expire before the step allocates, and turns of pinned jobs are admitted first.


@PAGE.exhibit(
    "requests of pinned jobs are admitted before preempted requests",
    "vLLM V1: The Fork, Change 5",
    "P16",
    invisible=FIRST,
)
class WarmAheadOfThePreempted(Defect):
    """A preempted request, which waited longest and lost its KV, waits even longer."""

    def _rank_by_warmth(self, slot: int) -> Any:
        return 2 - self._is_warm(slot)


# Change 7: which requests a pin protects.


@PAGE.exhibit(
    "a victim that is not the last running request keeps its row",
    "vLLM V1: The Fork, Changes 7 and 9",
    "P26 P2 P3 P9",
)
class RowOfColdVictimStays(Defect):
    """The plan has more rows than running requests; the fork only warns about this."""

    def _unschedule(self, victim: int, step: Any) -> None:
        if self.pins is None:
            super()._unschedule(victim, step)


# Change 11: estimates that arrive with a turn.


@PAGE.exhibit(
    "an estimate is lost if it arrives before the turn ends",
    "vLLM V1: The Fork, Change 11",
    "P18 P17",
    part=PART,
    invisible_if_hidden=KEPT,
)
class EstimateAtArrivalIsLost(Defect):
    """A client that sends the estimate together with the turn is ignored."""

    def take_estimate(self, estimate: Any) -> None:
        if estimate.job_id in self.pins:
            super().take_estimate(estimate)


# Change 12: which turns are pinned.


@PAGE.exhibit(
    "the plan does not list a finished request that was pinned",
    "vLLM V1: The Fork, Change 12",
    "P26",
)
class PinnedTurnIsNotTold(Defect):
    """The worker keeps the row of the finished request, and a later request may have its id."""

    _is_pinned = False

    def _end_turn(self, pins: Any, slot: int) -> None:
        job_id = self.table.requests[slot].job_id
        before = pins.pins.get(job_id)
        super()._end_turn(pins, slot)
        self._is_pinned = pins.pins.get(job_id) not in (None, before)

    def _finish(self, slot: int) -> None:
        request_id = self.table.requests[slot].request_id
        super()._finish(slot)
        if self._is_pinned:
            self.finished_req_ids.discard(request_id)
            self._is_pinned = False


@PAGE.exhibit(
    "all blocks of a turn are pinned, even those that are not cached",
    "vLLM V1: The Fork, Change 4",
    "P17 P16",
    invisible=KEPT,
)
class WholeTableIsPinned(Defect):
    """No next turn can hit them."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        holdings = self.table.holdings[slot]
        for holding in holdings:
            holding.num_cached = len(holding.blocks)
        super()._end_turn(pins, slot)


# What the seed leaves open.


@PAGE.exhibit("pins are never reclaimed", "vLLM V1: The Fork, Feature A", "P10")
class PinsNeverGiveWay(Defect):
    """A pool full of pins serves no request until the pins expire."""

    def _take_back_one(self, needy: int, passed_over: Any = ()) -> bool:
        idle = [slot for slot in self._list_idle(passed_over) if slot != needy]
        if idle:
            self._take_back(idle[0])
        return bool(idle)


@PAGE.exhibit(
    "pins are reclaimed before any preemption is tried",
    "vLLM V1: The Fork, Feature A",
    "P10 P16",
    wrong_fix_of="pins-never-give-way",
    invisible=FIRST,
)
class PinsGiveWayAtOnce(Defect):
    """All pins are gone as soon as blocks are short, which is when they would help."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> Any:
        while needed > self.pool.num_free and self.pins is not None and self.pins.pins:
            self._end_pins([self.pins.find_giver(self.table.requests[slot].job_id)])
        return super()._make_room(slot, needed, position, step)


@PAGE.exhibit(
    "all pins are reclaimed at once",
    "vLLM V1: The Fork, Feature A",
    "P10 P17",
    wrong_fix_of="pins-never-give-way",
    invisible="efficiency: more blocks than needed are computed again",
)
class AllPinsGiveWay(Defect):
    """One reclaimed pin may have been enough."""

    def _take_back_one(self, needy: int, passed_over: Any = ()) -> bool:
        had_pins = bool(self.pins and self.pins.pins)
        if had_pins:
            self._end_pins([*self.pins.pins])
        return had_pins or super()._take_back_one(needy, passed_over)


@PAGE.exhibit(
    "estimates of finished jobs are never dropped",
    "vLLM V1: The Fork, Change 3",
    "P18",
    part=PART,
    invisible_if_hidden=KEPT,
)
class EstimatesPileUp(Defect):
    """Jobs finish, but the table of estimates only grows."""

    def _forget_if_gone(self, _job_id: str) -> None:
        return None


@PAGE.exhibit(
    "a request that was preempted once counts as pinned for good",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
class PreemptedTurnsStayWarm(Defect):
    """It is protected from preemption as if its job had a pin."""

    def _is_warm(self, slot: int) -> bool:
        is_back = (
            self.table.num_preemptions[slot] > 0 and self.table.statuses[slot] is Status.RUNNING
        )
        return super()._is_warm(slot) or is_back
