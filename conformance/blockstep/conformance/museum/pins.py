"""Pins: blocks that stay between two turns of a job, each change of the seed's fork broken once.

Of the fork's twelve changes those are here that decide something; what it records of its steps is
held to itself by `recorded.steps`, where each sentence has a record that breaks it.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Pin, Status

PAGE = Page(takes="pins")
PART = "pins_type"
KEPT = "policy: what stays, and for how long"
FIRST = "policy: who goes first, and who has to go"


# Change 4: at most one pin for each job, freed when it goes.


@PAGE.exhibit(
    "the pin of the turn before is replaced, and not freed", "vLLM V1: The Fork, Change 4", "P1"
)
class StalePinLeaks(Defect):
    """Its blocks have a holder that nobody knows."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        request = self.table.requests[slot]
        stale = pins.pins.pop(request.job_id, None) if pins.may_pin(request.job_id) else None
        super()._end_turn(pins, slot)
        if stale is not None and not pins.is_warm(request.job_id):
            pins.pins[request.job_id] = stale


@PAGE.exhibit(
    "the blocks of a pin are freed first block first",
    "prefix caching by example, section 2.2",
    "P16",
    invisible=FIRST,
)
class PinFreedFromItsHead(Defect):
    """What is most likely to be asked for again is evicted first."""

    def _end_pins(self, job_ids: Any) -> None:
        for job_id in job_ids:
            for table in self.pins.end(job_id):
                self.pool.free([block for block in reversed(table) if block])


@PAGE.exhibit(
    "a pin ends in the tick behind its time",
    "vLLM V1: The Fork, Change 4",
    "P17 P16",
    part=PART,
    invisible_if_hidden=KEPT,
)
class PinOutlivesItsTime(Defect):
    """Greater for greater or equal."""

    def list_ended(self) -> Any:
        return [job_id for job_id, pin in self.pins.items() if pin.end < self.now]


@PAGE.exhibit(
    "a pin's time is counted from the beginning",
    "vLLM V1: The Fork, Change 4",
    "P17",
    part=PART,
    invisible=KEPT,
)
class TimeFromTheBeginning(Defect):
    """A duration is taken for a time."""

    def pin(self, job_id: str, block_tables: Any) -> None:
        self.pins[job_id] = Pin(job_id, block_tables, self.estimates[job_id])


# Change 5: expiry before anything is allocated, and the queue's order.


@PAGE.exhibit(
    "pins end behind the step and not before it",
    "vLLM V1: The Fork, Change 5",
    "P15 P16 P10 P8 P7",
    invisible=FIRST,
)
class ExpiryBehindTheStep(Defect):
    """Somebody is preempted, or waits, for blocks that nobody is to have any more."""

    def _begin_with_pins(self, pins: Any) -> None:
        ended = pins.list_ended
        pins.list_ended = list
        super()._begin_with_pins(pins)
        pins.list_ended = ended

    def _schedule(self) -> Any:
        plan = super()._schedule()
        if self.pins is not None and hasattr(plan, "new"):
            self._end_pins(self.pins.list_ended())
        return plan


@PAGE.exhibit(
    "who is warm goes ahead of who was preempted",
    "vLLM V1: The Fork, Change 5",
    "P16",
    invisible=FIRST,
)
class WarmAheadOfThePreempted(Defect):
    """Who has waited longest, and lost what it had computed, waits on."""

    def _rank_by_warmth(self, slot: int) -> Any:
        return 2 - self._is_warm(slot)


@PAGE.exhibit("nobody goes ahead for a pin", "vLLM V1: The Fork, Change 5", "P16", invisible=FIRST)
class NobodyGoesAhead(Defect):
    """The pin may have ended before its turn comes."""

    def _rank_by_warmth(self, _slot: int) -> int:
        return 0


# Change 7: whom a pin protects.


@PAGE.exhibit(
    "who is of a job with a pin is preempted first",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
class WarmArePreemptedFirst(Defect):
    """What stays for it is of no use then."""

    def _select_victim(self) -> int:
        warm = [at for at, slot in enumerate(self.running) if self._is_warm(slot)]
        return warm[-1] if warm else len(self.running) - 1


@PAGE.exhibit(
    "the last one is preempted, whatever is kept for it",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
class LastIsPreempted(Defect):
    """As under FCFS."""

    def _select_victim(self) -> int:
        return len(self.running) - 1


@PAGE.exhibit(
    "a victim that is not the last keeps its row of this step",
    "vLLM V1: The Fork, Changes 7 and 9",
    "P26 P2 P3 P9",
)
class RowOfColdVictimStays(Defect):
    """More rows are planned than requests run, which the fork then warns of, and plans."""

    def _unschedule(self, victim: int, step: Any) -> None:
        if self.pins is None:
            super()._unschedule(victim, step)


# Change 11: what is told as a turn arrives.


@PAGE.exhibit(
    "an estimate is lost that is told before its turn ends",
    "vLLM V1: The Fork, Change 11",
    "P18 P17",
    part=PART,
    invisible_if_hidden=KEPT,
)
class EstimateAtArrivalIsLost(Defect):
    """Whoever knows the tool as the turn comes has told it too early."""

    def take_estimate(self, estimate: Any) -> None:
        if estimate.job_id in self.pins:
            super().take_estimate(estimate)


# Change 12: what is pinned, and when.


@PAGE.exhibit(
    "a turn of no job is pinned",
    "vLLM V1: The Fork, Change 12",
    "P17 P16",
    invisible_if_hidden=KEPT,
)
class TurnOfNoJobIsPinned(Defect):
    """There is no next one that could come for it."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        request = self.table.requests[slot]
        if request.job_id is not None:
            super()._end_turn(pins, slot)
            return
        name = f"no job of {request.request_id}"
        self.table.requests[slot] = type(request)(name, request.prompt_token_ids, job_id=name)
        pins.estimates[name] = 2
        super()._end_turn(pins, slot)
        self.table.requests[slot] = request
        if name not in pins.pins:
            del pins.estimates[name]


@PAGE.exhibit(
    "the worker is not told of the end of a turn that is pinned",
    "vLLM V1: The Fork, Change 12",
    "P26",
)
class PinnedTurnIsNotTold(Defect):
    """It keeps a row for a request that is gone, and meets its name again."""

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
    "a turn that was aborted is pinned", "vLLM V1: The Fork, Change 12", "P17 P16", invisible=KEPT
)
class AbortedTurnIsPinned(Defect):
    """Its client does not come back for it."""

    def _finish(self, slot: int) -> None:
        if self.pins is not None:
            self._end_turn(self.pins, slot)
        super()._finish(slot)


@PAGE.exhibit(
    "all blocks of a turn stay, also those that nobody can find",
    "vLLM V1: The Fork, Change 4",
    "P17 P16",
    invisible=KEPT,
)
class WholeTableIsPinned(Defect):
    """They hold what no next turn can use."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        holdings = self.table.holdings[slot]
        for holding in holdings:
            holding.num_cached = len(holding.blocks)
        super()._end_turn(pins, slot)


@PAGE.exhibit(
    "behind the last turn blocks stay, too",
    "vLLM V1: The Fork, Change 12",
    "P17 P16",
    invisible=KEPT,
)
class LastTurnIsPinned(Defect):
    """Nobody comes for them."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        request = self.table.requests[slot]
        self.table.requests[slot] = type(request)(
            request.request_id, request.prompt_token_ids, job_id=request.job_id
        )
        super()._end_turn(pins, slot)
        self.table.requests[slot] = request


@PAGE.exhibit(
    "the last turn leaves the pin of its job where it is",
    "vLLM V1: The Fork, Change 12",
    "P17 P16",
    invisible=KEPT,
)
class PinOutlivesItsJob(Defect):
    """It holds blocks until its time is over, for nobody."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        if not self.table.requests[slot].is_last_step:
            super()._end_turn(pins, slot)


@PAGE.exhibit(
    "a turn for which the estimate gives nothing is pinned by a default",
    "vLLM V1: The Fork, Changes 4 and 12",
    "P17 P16",
    part=PART,
    invisible=KEPT,
)
class PinnedByDefault(Defect):
    """Ten seconds stand in the signature, and an estimate never gives more than two."""

    def may_pin(self, job_id: str) -> bool:
        return bool(self.estimates.setdefault(job_id, 10))

    def end_turn(self, job_id: Any) -> None:
        super().end_turn(job_id)
        if self.estimates.get(job_id) == 10:
            del self.estimates[job_id]


# What the seed leaves open.


@PAGE.exhibit("pins never give way", "vLLM V1: The Fork, Feature A", "P10")
class PinsNeverGiveWay(Defect):
    """A pool full of them serves nobody until time goes on."""

    def _take_back_one(self, needy: int, passed_over: Any = ()) -> bool:
        idle = [slot for slot in self._list_idle(passed_over) if slot != needy]
        if idle:
            self._take_back(idle[0])
        return bool(idle)


@PAGE.exhibit(
    "pins give way before anybody is preempted",
    "vLLM V1: The Fork, Feature A",
    "P10 P16",
    wrong_fix_of="pins-never-give-way",
    invisible=FIRST,
)
class PinsGiveWayAtOnce(Defect):
    """Nothing is kept as soon as blocks are short, which is when it would pay."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> Any:
        while needed > self.pool.num_free and self.pins is not None and self.pins.pins:
            self._end_pins([self.pins.find_giver(self.table.requests[slot].job_id)])
        return super()._make_room(slot, needed, position, step)


@PAGE.exhibit(
    "all pins give way at once",
    "vLLM V1: The Fork, Feature A",
    "P10 P17",
    wrong_fix_of="pins-never-give-way",
    invisible="efficiency: more is computed again than need be",
)
class AllPinsGiveWay(Defect):
    """Where one would have been enough."""

    def _take_back_one(self, needy: int, passed_over: Any = ()) -> bool:
        had_pins = bool(self.pins and self.pins.pins)
        if had_pins:
            self._end_pins([*self.pins.pins])
        return had_pins or super()._take_back_one(needy, passed_over)


@PAGE.exhibit("a reset is refused for pins", "vLLM V1: The Fork, Feature A", "P25", invisible=KEPT)
class ResetRefusedForPins(Defect):
    """Weights change while an agent's tool runs, and what was computed stays findable."""

    def _is_unused(self) -> bool:
        return bool(self.pool.is_unused())


@PAGE.exhibit(
    "a reset leaves pins as they are", "vLLM V1: The Fork, Feature A", "P25 P17 P16", invisible=KEPT
)
class ResetLeavesPins(Defect):
    """They hold blocks in which nothing can be found."""

    _keeps = False

    def _reset(self, reset_running_requests: bool) -> bool:
        self._keeps = True
        is_done: bool = super()._reset(reset_running_requests)
        self._keeps = False
        return is_done

    def _end_pins(self, job_ids: Any) -> None:
        super()._end_pins(() if self._keeps else job_ids)


@PAGE.exhibit(
    "a pin keeps the time that it was given",
    "vLLM V1: The Fork, Change 12",
    "P17",
    part=PART,
    invisible=KEPT,
)
class PinKeepsItsTime(Defect):
    """Though the tool is known by now, and takes longer."""

    def take_estimate(self, estimate: Any) -> None:
        before = self.pins.get(estimate.job_id)
        super().take_estimate(estimate)
        if before is not None:
            self.pins[estimate.job_id] = before


@PAGE.exhibit(
    "what was estimated is never forgotten",
    "vLLM V1: The Fork, Change 3",
    "P18",
    part=PART,
    invisible_if_hidden=KEPT,
)
class EstimatesPileUp(Defect):
    """Jobs come and go; what is known of them grows."""

    def _forget_if_gone(self, _job_id: str) -> None:
        return None


@PAGE.exhibit(
    "a clock that goes back is believed",
    "rule: time is told, and does not go back",
    "P18",
    part=PART,
    invisible_if_hidden=KEPT,
)
class TimeGoesBack(Defect):
    """What was over is not over any more."""

    def tell_time(self, now: int) -> None:
        self.now = now


@PAGE.exhibit(
    "a request that was preempted is warm for good",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
class PreemptedTurnsStayWarm(Defect):
    """It counts as of a job with a pin when somebody has to go."""

    def _is_warm(self, slot: int) -> bool:
        is_back = (
            self.table.num_preemptions[slot] > 0 and self.table.statuses[slot] is Status.RUNNING
        )
        return super()._is_warm(slot) or is_back
