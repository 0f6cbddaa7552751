"""Brought: adapters that are too many, and sessions that are not what they have become.

Each page is given one feature that requests bring, besides all that the others have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Status

ADAPTERS = Page(takes="adapters")
SESSIONS = Page(takes="sessions")


@ADAPTERS.exhibit("adapters count while they have a row", "vLLM 0.19.1 schedule", "P9 P16")
class AdaptersOfRowsOnly(Defect):
    """Who runs and has no row in this step has lost its seat, and needs one in the next."""

    def _count_seats(self, step: Any) -> Any:
        seats, requests = super()._count_seats(step), self.table.requests
        seats.used = {requests[slot].adapter for slot in step.rows} - {None}
        return seats


@ADAPTERS.exhibit(
    "the base model takes the seat of an adapter",
    "SGLang #23141, by the rule that it breaks",
    "P15 P16",
    invisible="policy: who is passed over",
)
class BaseModelTakesASeat(Defect):
    """Requests without an adapter are passed over where others have all the seats."""

    def _is_passed_over(self, slot: int, step: Any) -> Any:
        seats, adapter = step.seats, self.table.requests[slot].adapter
        is_full = seats is not None and len(seats.used) >= seats.max_loras
        return super()._is_passed_over(slot, step) or (is_full and adapter is None)


@ADAPTERS.exhibit("the cap is looked at once all are admitted", "SGLang #23141", "P9 P16")
class AdaptersCountedAfterwards(Defect):
    """Those admitted in one step all see the seats that were free before it."""

    def _is_passed_over(self, slot: int, step: Any) -> Any:
        seats = step.seats
        if seats is None or not step.admitted:
            return super()._is_passed_over(slot, step)
        step.seats = None
        try:
            return super()._is_passed_over(slot, step)
        finally:
            step.seats = seats


@SESSIONS.exhibit("sessions keep their blocks, whoever lacks them", "#49439", "P10")
class SessionsNeverGiveWay(Defect):
    """Two that wait for their turn may each lack what the other holds."""

    def _take_back_one(self, _needy: int, _passed_over: Any = ()) -> bool:
        return False


@SESSIONS.exhibit(
    "only sessions that rest give their blocks up",
    "#49439",
    "P10",
    wrong_fix_of="sessions-never-give-way",
)
class SessionsWithInputNeverGiveWay(Defect):
    """Two that have input again may each lack what the other holds."""

    def _take_back_one(self, needy: int, passed_over: Any = ()) -> bool:
        rests = Status.WAITING_FOR_STREAMING_REQ
        idle = [slot for slot in self._list_idle(passed_over) if slot != needy]
        resting = [slot for slot in idle if self.table.statuses[slot] is rests]
        if resting:
            self._take_back(resting[0])
        return bool(resting)


@SESSIONS.exhibit(
    "the blocks of a chunk are named with the last item alone", "#36708, rule", "P6 P3"
)
class LastItemNamesAChunk(Defect):
    """The search for items goes on at the last one, as it does for blocks of outputs."""

    def _go_on(self, slot: int, update: Any) -> None:
        super()._go_on(slot, update)
        lineage = self.table.lineages[slot]
        lineage.request = replace(lineage.request, items=lineage.request.items[-1:])
        lineage._ends = lineage._ends[-1:]
