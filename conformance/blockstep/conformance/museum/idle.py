"""Seeded bugs in `has_work`: the engine loop sleeps too early or never."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Status

PAGE = Page()
STORE = Page(takes="transfers")
LOOP = "vLLM 0.19.1 has_requests"
SHOWN = "books: only the state shows whether the loop may sleep"


# The loop sleeps, and no event wakes it up.


@PAGE.exhibit("the engine loop sleeps while requests wait", LOOP, "P10", invisible_if_hidden=SHOWN)
class WaitingAreNoWork(Defect):
    """Only running requests count as work, so the last preempted one is never scheduled again."""

    def has_work(self) -> Any:
        return bool(self.finished_req_ids or self.running)


@STORE.exhibit(
    "the engine loop sleeps while a store reads blocks of a finished request",
    "#46283, #46289",
    "P10 P17",
    invisible_if_hidden=SHOWN,
)
class HoldsAreNoWork(Defect):
    """The worker is no longer polled, so the end of the transfer is never reported."""

    def has_work(self) -> Any:
        statuses, slots = self.table.statuses, self.table.slot_of.values()
        parked = any(statuses[slot] is Status.WAITING_FOR_REMOTE_KVS for slot in slots)
        return super().has_work() if parked or self._has_runnable() else bool(self.finished_req_ids)


# The loop never sleeps.


@PAGE.exhibit(
    "the engine loop keeps running while everything is paused",
    LOOP,
    "P10",
    invisible_if_hidden=SHOWN,
)
class PausedAreWork(Defect):
    """It makes empty plans as fast as it can."""

    def has_work(self) -> Any:
        return bool(self.finished_req_ids or self.table.slot_of)
