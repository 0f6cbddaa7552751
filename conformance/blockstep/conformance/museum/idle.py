"""Idle: an engine that is right, and tells its loop to sleep too early, or never."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import PauseState, Status

PAGE = Page()
STORE = Page(takes="transfers")
SESSIONS = Page(takes="sessions")
LOOP = "vLLM 0.19.1 has_requests"
SHOWN = "books: only the state says whether the loop may sleep"


# The loop sleeps, and nothing wakes it up.


@PAGE.exhibit("the loop sleeps while requests wait", LOOP, "P10", invisible_if_hidden=SHOWN)
class WaitingAreNoWork(Defect):
    """Only running requests count: whoever was preempted last is never scheduled again."""

    def has_work(self) -> Any:
        return bool(self.finished_req_ids or self.running)


@PAGE.exhibit(
    "the loop sleeps before workers were told who has ended",
    "vLLM 0.19.1 has_finished_requests",
    "P10 P26",
    invisible_if_hidden=SHOWN,
)
class EndedAreNoWork(Defect):
    """A worker keeps what it has of them until the next request comes."""

    def has_work(self) -> Any:
        return self.pause_state is not PauseState.PAUSED_ALL and bool(self.table.slot_of)


@STORE.exhibit(
    "the loop sleeps while a store reads blocks of an ended request",
    "#46283, #46289",
    "P10 P17",
    invisible_if_hidden=SHOWN,
)
class HoldsAreNoWork(Defect):
    """Workers are not asked any more, so the end of the read is never reported."""

    def has_work(self) -> Any:
        statuses, slots = self.table.statuses, self.table.slot_of.values()
        parked = any(statuses[slot] is Status.WAITING_FOR_REMOTE_KVS for slot in slots)
        return super().has_work() if parked or self._has_runnable() else bool(self.finished_req_ids)


# The loop never sleeps.


@PAGE.exhibit("the loop goes on while all is paused", LOOP, "P10", invisible_if_hidden=SHOWN)
class PausedAreWork(Defect):
    """Each plan is empty, as fast as plans can be made."""

    def has_work(self) -> Any:
        return bool(self.finished_req_ids or self.table.slot_of)


@SESSIONS.exhibit(
    "the loop goes on while all sessions rest",
    "vLLM 0.19.1 num_waiting_for_streaming_input",
    "P10",
    invisible_if_hidden=SHOWN,
)
class RestingAreWork(Defect):
    """A client that thinks for a minute costs a core for a minute."""

    def has_work(self) -> Any:
        is_open = self.pause_state is PauseState.UNPAUSED
        return super().has_work() or (is_open and bool(self.table.slot_of))
