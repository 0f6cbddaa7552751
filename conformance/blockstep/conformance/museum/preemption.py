"""Seeded bugs in preemption: the choice of the victim, and what must be undone for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Policy

PAGE = Page()


@PAGE.exhibit("the oldest request is preempted", "vLLM V1: Preemption Policy", "P16")
class OldestPreempted(Defect):
    """The request that arrived first loses the most work."""

    def _select_victim(self) -> int:
        return 0


@PAGE.exhibit(
    "two requests with equal priority and arrival preempt each other for ever",
    "vLLM 0.19.1, found here",
    "P10 P16",
)
class EqualsPreemptEachOther(Defect):
    """Each of them preempts the other one to get blocks for itself."""

    def _select_victim(self) -> int:
        requests, running = self.table.requests, self.running
        keys = [(requests[slot].priority, requests[slot].arrival_time) for slot in running]
        return len(running) - 1 if self.config.policy == "fcfs" else keys.index(max(keys))


@PAGE.exhibit(
    "preempted requests go to the end of the waiting queue",
    "vLLM V1: Preemption Policy",
    "P16",
    invisible="policy: which request is admitted first",
)
class PreemptedToTheTail(Defect):
    """New requests overtake them, and preempt them again."""

    def _requeue_preempted(self, slot: int) -> None:
        self.waiting.append(slot)


@PAGE.exhibit(
    "the tokens of a withdrawn row do not return to the token budget",
    "#23347, #23713",
    "P9 P15",
    invisible="efficiency: a step schedules fewer tokens than it could",
)
class BudgetNotRestored(Defect):
    """The step ends early although there is work."""

    def _unschedule(self, victim: int, step: Any) -> None:
        step.rows.pop(victim, None)


@PAGE.exhibit("the row of a victim stays in the plan", "#23713, #28558", "P9 P26 P2 P16")
class RowOfVictimStays(Defect):
    """The worker runs a request that has no blocks."""

    def _unschedule(self, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None:
            step.budget += row[0]


@PAGE.exhibit(
    "keys of blocks that were never written stay published after a preemption",
    "#43569 (open)",
    "P4 P3",
)
class ZombieKey(Defect):
    """The next request with this prefix reads KV that was never written."""

    def _withdraw_unwritten(self, slot: int) -> None:
        return None


@PAGE.exhibit(
    "a preemption withdraws all keys of the victim",
    "#43569",
    "P3",
    wrong_fix_of="zombie-key",
    invisible="efficiency: later hits are lost",
)
class AllKeysWithdrawn(Defect):
    """Blocks of earlier steps are withdrawn, too, although they are written and may be shared."""

    def _withdraw_unwritten(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            for block in holding.blocks:
                self.prefix.withdraw(block)


@PAGE.exhibit(
    "a preemption withdraws only the key of the victim's last block",
    "#43569",
    "P4 P3",
    wrong_fix_of="zombie-key",
)
class LastKeyWithdrawn(Defect):
    """A chunk can fill several blocks and begin another one."""

    def _withdraw_unwritten(self, slot: int) -> None:
        first = self.table.num_computed[slot] // self.block_size
        for holding in self.table.holdings[slot]:
            for block in holding.blocks[first:][-1:]:
                self.prefix.withdraw(block)


class _KeepsRecord(Defect):
    """Data of a withdrawn row is kept and used for a later row of the request."""

    _column: int

    def _unschedule(self, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None and row[self._column]:
            self.__dict__.setdefault("_records", {})[victim] = row[self._column]
        super()._unschedule(victim, step)

    def _pop_record(self, slot: int) -> Any:
        return self.__dict__.setdefault("_records", {}).pop(slot, ())


@PAGE.exhibit("the new blocks of a withdrawn row are sent with a later row", "#23713", "P26 P2 P3")
class BlocksOfVictimAnnounced(_KeepsRecord):
    """The data of the withdrawn row is added to the request's next row."""

    _column = 1

    def _running_row(self, slot: int, row: Any) -> Any:
        stale = self._pop_record(slot)
        tables = tuple(old + new for old, new in zip_longest(stale, row[1], fillvalue=()))
        return super()._running_row(slot, (row[0], tables, row[2]))


@PAGE.exhibit("the drafts of a withdrawn row are dispatched with a later row", "#28558", "P24 P26")
class DraftsOfVictimDispatched(_KeepsRecord):
    """They are sent with the first chunk after the preemption and verified at another position."""

    _column = 2

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        row = super()._resumed_row(slot, num_scheduled)
        return replace(row, draft_token_ids=self._pop_record(slot))


@PAGE.exhibit(
    "the index into the running list is not corrected after a preemption",
    "#23713",
    "P15 P9",
    invisible="efficiency: a request misses a step",
)
class PlaceNotCorrected(Defect):
    """The list has become shorter, so the next request is left out of this step."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> Any:
        left = super()._make_room(slot, needed, position, step)
        return left if left < 0 else position


@PAGE.exhibit(
    "a waiting request preempts a running one for a running slot",
    "#40004, #45561",
    "P16 P15",
    invisible="policy: upstream itself is undecided",
)
class SeatPreemption(Defect):
    """Upstream is undecided; here requests are preempted for blocks, never for a running slot."""

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


@PAGE.exhibit("a request that lacks a block preempts itself", "inference-sim #373", "P16 P10")
class NeedyPreemptsItself(Defect):
    """It is resumed first, lacks the block again and preempts itself again; the others never do."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> Any:
        self._needy = position
        return super()._make_room(slot, needed, position, step)

    def _select_victim(self) -> Any:
        return self._needy


@PAGE.exhibit("a preempted request keeps its blocks", "inference-sim #963, #1061", "P1 P12")
class PreemptedKeepsBlocks(Defect):
    """The pool fills up: no request runs, no block is free, and nothing can be admitted."""

    def _preempt(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            del holding.blocks[:]
        super()._preempt(slot)
