"""Preemption: who goes, and what of it must be undone."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Policy

PAGE = Page()


@PAGE.exhibit("the oldest request is preempted", "vLLM V1: Preemption Policy", "P16")
class OldestPreempted(Defect):
    """Whoever has waited longest loses most."""

    def _select_victim(self) -> int:
        return 0


@PAGE.exhibit("equals preempt each other for ever", "vLLM 0.19.1, found here", "P10 P16")
class EqualsPreemptEachOther(Defect):
    """Of two requests of one priority and arrival, each makes room for itself with the other."""

    def _select_victim(self) -> int:
        requests, running = self.table.requests, self.running
        keys = [(requests[slot].priority, requests[slot].arrival_time) for slot in running]
        return len(running) - 1 if self.config.policy == "fcfs" else keys.index(max(keys))


@PAGE.exhibit(
    "the preempted go to the end of the queue",
    "vLLM V1: Preemption Policy",
    "P16",
    invisible="policy: who is admitted first",
)
class PreemptedToTheTail(Defect):
    """Newcomers overtake them, and preempt them again."""

    def _requeue_preempted(self, slot: int) -> None:
        self.waiting.append(slot)


@PAGE.exhibit(
    "a victim's tokens do not return to the budget",
    "#23347, #23713",
    "P9 P15",
    invisible="efficiency: a step runs fewer tokens than it might",
)
class BudgetNotRestored(Defect):
    """The step ends early although there is work."""

    def _unschedule(self, victim: int, step: Any) -> None:
        step.rows.pop(victim, None)


@PAGE.exhibit("a victim's row stays in the plan", "#23713, #28558", "P9 P26 P2 P16")
class RowOfVictimStays(Defect):
    """The worker runs a request that has no blocks."""

    def _unschedule(self, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None:
            step.budget += row[0]


@PAGE.exhibit("keys of work that never ran stay published", "#43569 (open)", "P4 P3")
class ZombieKey(Defect):
    """The next request with this prefix reads KV that nobody wrote."""

    def _withdraw_unwritten(self, slot: int) -> None:
        return None


@PAGE.exhibit(
    "everything the victim published is withdrawn",
    "#43569",
    "P3",
    wrong_fix_of="zombie-key",
    invisible="efficiency: later hits are lost",
)
class AllKeysWithdrawn(Defect):
    """Blocks of earlier steps go as well: they were written, and others may hold them."""

    def _withdraw_unwritten(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            for block in holding.blocks:
                self.prefix.withdraw(block)


@PAGE.exhibit(
    "only the last block of the victim's table is withdrawn",
    "#43569",
    "P4 P3",
    wrong_fix_of="zombie-key",
)
class LastKeyWithdrawn(Defect):
    """A chunk can fill several blocks, and begin one more."""

    def _withdraw_unwritten(self, slot: int) -> None:
        first = self.table.num_computed[slot] // self.block_size
        for holding in self.table.holdings[slot]:
            for block in holding.blocks[first:][-1:]:
                self.prefix.withdraw(block)


class _KeepsRecord(Defect):
    """What the record of a dropped row holds is kept for a later row of the request."""

    _column: int

    def _unschedule(self, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None and row[self._column]:
            self.__dict__.setdefault("_records", {})[victim] = row[self._column]
        super()._unschedule(victim, step)

    def _pop_record(self, slot: int) -> Any:
        return self.__dict__.setdefault("_records", {}).pop(slot, ())


@PAGE.exhibit("the new blocks of a victim's row are announced later", "#23713", "P26 P2 P3")
class BlocksOfVictimAnnounced(_KeepsRecord):
    """The record of the dropped row stays, and is added to the next row of the request."""

    _column = 1

    def _running_row(self, slot: int, row: Any) -> Any:
        stale = self._pop_record(slot)
        tables = tuple(old + new for old, new in zip_longest(stale, row[1], fillvalue=()))
        return super()._running_row(slot, (row[0], tables, row[2]))


@PAGE.exhibit("the drafts of a victim's row are dispatched later", "#28558", "P24 P26")
class DraftsOfVictimDispatched(_KeepsRecord):
    """They are sent with the request's first chunk, to be verified at another position."""

    _column = 2

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        row = super()._resumed_row(slot, num_scheduled)
        return replace(row, draft_token_ids=self._pop_record(slot))


@PAGE.exhibit(
    "the place in line is not corrected for a victim ahead",
    "#23713",
    "P15 P9",
    invisible="efficiency: somebody misses a step",
)
class PlaceNotCorrected(Defect):
    """The list has become shorter, and somebody is passed over in this step."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> Any:
        left = super()._make_room(slot, needed, position, step)
        return left if left < 0 else position


@PAGE.exhibit(
    "who waits preempts for a seat",
    "#40004, #45561",
    "P16 P15",
    invisible="policy: upstream itself is undecided",
)
class SeatPreemption(Defect):
    """Upstream is undecided; here running requests give way for blocks, and never for a seat."""

    def _schedule_waiting(self, step: Any) -> None:
        queue, running = self._select_queue(), self.running
        ordered = self.config.policy is Policy.PRIORITY and step.budget > 0
        if ordered and queue is not None and len(running) >= self.config.max_num_seqs:
            at, rank_of = self._select_victim(), self.table.rank_of
            if rank_of(queue.head()) < rank_of(running[at]):
                victim = running.pop(at)
                self._unschedule(victim, step)
                self._preempt(victim)
                step.preempted_req_ids.append(self.table.requests[victim].request_id)
        super()._schedule_waiting(step)


@PAGE.exhibit("who needs a block preempts itself", "inference-sim #373", "P16 P10")
class NeedyPreemptsItself(Defect):
    """It is resumed first, needs the block again, and goes again; the others never give way."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> Any:
        self._needy = position
        return super()._make_room(slot, needed, position, step)

    def _select_victim(self) -> Any:
        return self._needy


@PAGE.exhibit("a preempted request keeps its blocks", "inference-sim #963, #1061", "P1 P12")
class PreemptedKeepsBlocks(Defect):
    """In the end nobody runs, no block is free, and the queue stands still."""

    def _preempt(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            del holding.blocks[:]
        super()._preempt(slot)
