"""Seeded bugs in the limit on LoRA adapters and in sessions.

Each list is checked with one additional feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Status

ADAPTERS = Page(takes="adapters")
SESSIONS = Page(takes="sessions")


@ADAPTERS.exhibit(
    "LoRA adapters count only while their request has a row in the plan",
    "vLLM 0.19.1 schedule",
    "P9 P16",
)
class AdaptersOfRowsOnly(Defect):
    """A running request without a row in a step loses its LoRA slot, and needs one in the next."""

    def _count_seats(self, step: Any) -> Any:
        seats, requests = super()._count_seats(step), self.table.requests
        seats.used = {requests[slot].adapter for slot in step.rows} - {None}
        return seats


@ADAPTERS.exhibit(
    "a request without a LoRA adapter needs a free LoRA slot",
    "SGLang #23141, breaks its rule",
    "P15 P16",
    invisible="policy: which request is skipped",
)
class BaseModelTakesASeat(Defect):
    """Requests of the base model are skipped while `max_loras` adapters are running."""

    def _is_passed_over(self, slot: int, step: Any) -> Any:
        seats, adapter = step.seats, self.table.requests[slot].adapter
        is_full = seats is not None and len(seats.used) >= seats.max_loras
        return super()._is_passed_over(slot, step) or (is_full and adapter is None)


@ADAPTERS.exhibit(
    "max_loras is checked against the adapters at the begin of the step", "SGLang #23141", "P9 P16"
)
class AdaptersCountedAfterwards(Defect):
    """All requests admitted in one step see the LoRA slots that were free before it."""

    def _is_passed_over(self, slot: int, step: Any) -> Any:
        seats = step.seats
        if seats is None or not step.admitted:
            return super()._is_passed_over(slot, step)
        step.seats = None
        try:
            return super()._is_passed_over(slot, step)
        finally:
            step.seats = seats


@SESSIONS.exhibit(
    "idle sessions never free their blocks when another request lacks them", "#49439", "P10"
)
class SessionsNeverGiveWay(Defect):
    """Two sessions that wait for input may each hold the blocks that the other one needs."""

    def _take_back_one(self, _needy: int, _passed_over: Any = ()) -> bool:
        return False


@SESSIONS.exhibit(
    "only sessions without input free their blocks when another request lacks them",
    "#49439",
    "P10",
    wrong_fix_of="sessions-never-give-way",
)
class SessionsWithInputNeverGiveWay(Defect):
    """Two sessions that have new input may each hold the blocks that the other one needs."""

    def _take_back_one(self, needy: int, passed_over: Any = ()) -> bool:
        rests = Status.WAITING_FOR_STREAMING_REQ
        idle = [slot for slot in self._list_idle(passed_over) if slot != needy]
        resting = [slot for slot in idle if self.table.statuses[slot] is rests]
        if resting:
            self._take_back(resting[0])
        return bool(resting)


@SESSIONS.exhibit(
    "block keys of a session's later inputs contain only its last item", "#36708, rule", "P6 P3"
)
class LastItemNamesAChunk(Defect):
    """The search for a block's items starts at the last item, as it may for blocks of outputs."""

    def _go_on(self, slot: int, update: Any) -> None:
        super()._go_on(slot, update)
        lineage = self.table.lineages[slot]
        lineage.request = replace(lineage.request, items=lineage.request.items[-1:])
        lineage._ends = lineage._ends[-1:]
