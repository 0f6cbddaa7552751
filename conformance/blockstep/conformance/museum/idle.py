"""Seeded bugs in `has_work`: the engine loop sleeps too early or never."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import PauseState, Status

PAGE = Page()
STORE = Page(takes="transfers")
SESSIONS = Page(takes="sessions")
LOOP = "vLLM 0.19.1 has_requests"
SHOWN = "books: only the state shows whether the loop may sleep"


# The loop sleeps, and no event wakes it up.


@PAGE.exhibit("the engine loop sleeps while requests wait", LOOP, "P10", invisible_if_hidden=SHOWN)
class WaitingAreNoWork(Defect):
    """Only running requests count as work, so the last preempted one is never scheduled again."""

    def has_work(self) -> Any:
        return bool(self.finished_req_ids or self.running)


@PAGE.exhibit(
    "the engine loop sleeps before the worker got the ids of finished requests",
    "vLLM 0.19.1 has_finished_requests",
    "P10 P26",
    invisible_if_hidden=SHOWN,
)
class EndedAreNoWork(Defect):
    """The worker keeps its data of finished requests until another request arrives."""

    def has_work(self) -> Any:
        return self.pause_state is not PauseState.PAUSED_ALL and bool(self.table.slot_of)


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


@SESSIONS.exhibit(
    "the engine loop keeps running while all sessions are idle",
    "vLLM 0.19.1 num_waiting_for_streaming_input",
    "P10",
    invisible_if_hidden=SHOWN,
)
class RestingAreWork(Defect):
    """A client that thinks for a minute costs a CPU core for a minute."""

    def has_work(self) -> Any:
        is_open = self.pause_state is PauseState.UNPAUSED
        return super().has_work() or (is_open and bool(self.table.slot_of))
