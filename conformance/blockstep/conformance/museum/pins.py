"""Seeded bugs in pins: each deciding change of the seed's fork is broken once.

What the fork records of its steps is checked by `recorded.steps`, whose tests have a wrong record
for each check.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Pin, Status

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


@PAGE.exhibit(
    "the blocks of a pin are freed from the head of the table",
    "prefix caching by example, section 2.2",
    "P16",
    invisible=FIRST,
)
class PinFreedFromItsHead(Defect):
    """The block that is most likely to be hit again is evicted first."""

    def _end_pins(self, job_ids: Any) -> None:
        for job_id in job_ids:
            for table in self.pins.end(job_id):
                self.pool.free([block for block in reversed(table) if block])


@PAGE.exhibit(
    "a pin ends one tick too late",
    "vLLM V1: The Fork, Change 4",
    "P17 P16",
    part=PART,
    invisible_if_hidden=KEPT,
)
class PinOutlivesItsTime(Defect):
    """The comparison is strict (`<`) where the end itself counts (`<=`)."""

    def list_ended(self) -> Any:
        return [job_id for job_id, pin in self.pins.items() if pin.end < self.now]


@PAGE.exhibit(
    "a pin expires at tick `ttl`, not `ttl` ticks from now",
    "vLLM V1: The Fork, Change 4",
    "P17",
    part=PART,
    invisible=KEPT,
)
class TimeFromTheBeginning(Defect):
    """A duration is used as a point in time."""

    def pin(self, job_id: str, block_tables: Any) -> None:
        self.pins[job_id] = Pin(job_id, block_tables, self.estimates[job_id])


# Change 5: pins expire before the step allocates, and turns of pinned jobs are admitted first.


@PAGE.exhibit(
    "expired pins end after the step instead of before it",
    "vLLM V1: The Fork, Change 5",
    "P15 P16 P10 P8 P7",
    invisible=FIRST,
)
class ExpiryBehindTheStep(Defect):
    """Requests are preempted or wait for blocks of pins that have already expired."""

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
    "requests of pinned jobs are admitted before preempted requests",
    "vLLM V1: The Fork, Change 5",
    "P16",
    invisible=FIRST,
)
class WarmAheadOfThePreempted(Defect):
    """A preempted request, which waited longest and lost its KV, waits even longer."""

    def _rank_by_warmth(self, slot: int) -> Any:
        return 2 - self._is_warm(slot)


@PAGE.exhibit(
    "requests of pinned jobs are not admitted first",
    "vLLM V1: The Fork, Change 5",
    "P16",
    invisible=FIRST,
)
class NobodyGoesAhead(Defect):
    """The pin may expire before its request is admitted."""

    def _rank_by_warmth(self, _slot: int) -> int:
        return 0


# Change 7: which requests a pin protects.


@PAGE.exhibit(
    "requests of pinned jobs are preempted first",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
class WarmArePreemptedFirst(Defect):
    """Their pins are then of no use."""

    def _select_victim(self) -> int:
        warm = [at for at, slot in enumerate(self.running) if self._is_warm(slot)]
        return warm[-1] if warm else len(self.running) - 1


@PAGE.exhibit(
    "the last running request is preempted even if its job has a pin",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
class LastIsPreempted(Defect):
    """The victim is the same as under FCFS."""

    def _select_victim(self) -> int:
        return len(self.running) - 1


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
    "a request without a job id is pinned",
    "vLLM V1: The Fork, Change 12",
    "P17 P16",
    invisible_if_hidden=KEPT,
)
class TurnOfNoJobIsPinned(Defect):
    """No next turn can use its blocks."""

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
    "the plan does not list a finished request that was pinned",
    "vLLM V1: The Fork, Change 12",
    "P26",
)
class PinnedTurnIsNotTold(Defect):
    """The worker keeps its row, and may later get another request with this id."""

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
    "an aborted turn is pinned", "vLLM V1: The Fork, Change 12", "P17 P16", invisible=KEPT
)
class AbortedTurnIsPinned(Defect):
    """The client of an aborted turn does not send a next one."""

    def _finish(self, slot: int) -> None:
        if self.pins is not None:
            self._end_turn(self.pins, slot)
        super()._finish(slot)


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


@PAGE.exhibit(
    "the last turn of a job is pinned",
    "vLLM V1: The Fork, Change 12",
    "P17 P16",
    invisible=KEPT,
)
class LastTurnIsPinned(Defect):
    """No next turn will use its blocks."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        request = self.table.requests[slot]
        self.table.requests[slot] = type(request)(
            request.request_id, request.prompt_token_ids, job_id=request.job_id
        )
        super()._end_turn(pins, slot)
        self.table.requests[slot] = request


@PAGE.exhibit(
    "the last turn of a job does not end the job's pin",
    "vLLM V1: The Fork, Change 12",
    "P17 P16",
    invisible=KEPT,
)
class PinOutlivesItsJob(Defect):
    """The pin holds blocks until it expires, although no turn follows."""

    def _end_turn(self, pins: Any, slot: int) -> None:
        if not self.table.requests[slot].is_last_step:
            super()._end_turn(pins, slot)


@PAGE.exhibit(
    "a turn whose estimate gives no time is pinned for a default time",
    "vLLM V1: The Fork, Changes 4 and 12",
    "P17 P16",
    part=PART,
    invisible=KEPT,
)
class PinnedByDefault(Defect):
    """The fork's signature has a default of ten seconds, while an estimate gives at most two."""

    def may_pin(self, job_id: str) -> bool:
        return bool(self.estimates.setdefault(job_id, 10))

    def end_turn(self, job_id: Any) -> None:
        super().end_turn(job_id)
        if self.estimates.get(job_id) == 10:
            del self.estimates[job_id]


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
    "a prefix-cache reset fails while there are pins",
    "vLLM V1: The Fork, Feature A",
    "P25",
    invisible=KEPT,
)
class ResetRefusedForPins(Defect):
    """The weights change while an agent's tool runs, and the old KV stays cached."""

    def _is_unused(self) -> bool:
        return bool(self.pool.is_unused())


@PAGE.exhibit(
    "a prefix-cache reset keeps the pins",
    "vLLM V1: The Fork, Feature A",
    "P25 P17 P16",
    invisible=KEPT,
)
class ResetLeavesPins(Defect):
    """They hold blocks that are no longer cached."""

    _keeps = False

    def _reset(self, reset_running_requests: bool) -> bool:
        self._keeps = True
        is_done: bool = super()._reset(reset_running_requests)
        self._keeps = False
        return is_done

    def _end_pins(self, job_ids: Any) -> None:
        super()._end_pins(() if self._keeps else job_ids)


@PAGE.exhibit(
    "a later estimate does not change the end of an existing pin",
    "vLLM V1: The Fork, Change 12",
    "P17",
    part=PART,
    invisible=KEPT,
)
class PinKeepsItsTime(Defect):
    """The pin keeps its time although the tool is known by now and takes longer."""

    def take_estimate(self, estimate: Any) -> None:
        before = self.pins.get(estimate.job_id)
        super().take_estimate(estimate)
        if before is not None:
            self.pins[estimate.job_id] = before


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
    "time may go backwards",
    "rule: time comes with events and does not go backwards",
    "P18",
    part=PART,
    invisible_if_hidden=KEPT,
)
class TimeGoesBack(Defect):
    """A pin that had expired is valid again."""

    def tell_time(self, now: int) -> None:
        self.now = now


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
