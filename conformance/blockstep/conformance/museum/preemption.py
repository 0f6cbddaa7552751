"""Preemption: who goes, and what of it must be undone."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from blockstep.conformance.museum.exhibit import Methods, Page
from blockstep.spec.vocabulary import Policy

PAGE = Page()


@PAGE.exhibit("the oldest request is preempted", "seed 001 Preemption Policy", "P16")
def oldest_preempted(clean: Any) -> Methods:
    """Whoever has waited longest loses most."""

    def _select_victim(self: Any) -> int:
        return 0

    return {"_select_victim": _select_victim}


@PAGE.exhibit("equals preempt each other for ever", "vLLM 0.19.1, found here", "P10", "P16")
def equals_preempt_each_other(clean: Any) -> Methods:
    """Of two requests of one priority and arrival, each makes room for itself with the other."""

    def _select_victim(self: Any) -> int:
        requests, running = self.table.requests, self.running
        keys = [(requests[slot].priority, requests[slot].arrival_time) for slot in running]
        return len(running) - 1 if self.config.policy == "fcfs" else keys.index(max(keys))

    return {"_select_victim": _select_victim}


@PAGE.exhibit("the preempted go to the end of the queue", "seed 001 Preemption Policy", "P16")
def preempted_to_the_tail(clean: Any) -> Methods:
    """Newcomers overtake them, and preempt them again."""

    def _requeue_preempted(self: Any, slot: int) -> None:
        self.waiting.append(slot)

    return {"_requeue_preempted": _requeue_preempted}


@PAGE.exhibit("a victim's tokens do not return to the budget", "#23347, #23713", "P9", "P15")
def budget_not_restored(clean: Any) -> Methods:
    """The step ends early although there is work."""

    def _unschedule(self: Any, victim: int, step: Any) -> None:
        step.rows.pop(victim, None)

    return {"_unschedule": _unschedule}


@PAGE.exhibit("a victim's row stays in the plan", "#23713, #28558", "P9", "P26", "P2", "P16")
def row_of_victim_stays(clean: Any) -> Methods:
    """The worker runs a request that has no blocks."""

    def _unschedule(self: Any, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None:
            step.budget += row[0]

    return {"_unschedule": _unschedule}


@PAGE.exhibit("keys of work that never ran stay published", "#43569 (open)", "P4", "P3")
def zombie_key(clean: Any) -> Methods:
    """The next request with this prefix reads KV that nobody wrote."""

    def _withdraw_unwritten(self: Any, slot: int) -> None:
        return None

    return {"_withdraw_unwritten": _withdraw_unwritten}


@PAGE.exhibit(
    "everything the victim published is withdrawn", "#43569", "P3", wrong_fix_of="zombie-key"
)
def all_keys_withdrawn(clean: Any) -> Methods:
    """Blocks of earlier steps go as well: they were written, and others may hold them."""

    def _withdraw_unwritten(self: Any, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            for block in holding.blocks:
                self.prefix.withdraw(block)

    return {"_withdraw_unwritten": _withdraw_unwritten}


@PAGE.exhibit(
    "only the last block of the victim's table is withdrawn",
    "#43569",
    "P4",
    "P3",
    wrong_fix_of="zombie-key",
)
def last_key_withdrawn(clean: Any) -> Methods:
    """A chunk can fill several blocks, and begin one more."""

    def _withdraw_unwritten(self: Any, slot: int) -> None:
        first = self.table.num_computed[slot] // self.block_size
        for holding in self.table.holdings[slot]:
            for block in holding.blocks[first:][-1:]:
                self.prefix.withdraw(block)

    return {"_withdraw_unwritten": _withdraw_unwritten}


@PAGE.exhibit("the new blocks of a victim's row are announced later", "#23713", "P26", "P2", "P3")
def blocks_of_victim_announced(clean: Any) -> Methods:
    """The record of the dropped row stays, and is added to the next row of the request."""

    def _unschedule(self: Any, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None and row[1]:
            self.__dict__.setdefault("_records", {})[victim] = row[1]
        clean._unschedule(self, victim, step)

    def _running_row(self: Any, slot: int, row: Any) -> Any:
        stale = self.__dict__.setdefault("_records", {}).pop(slot, ())
        tables = tuple(old + new for old, new in zip_longest(stale, row[1], fillvalue=()))
        return clean._running_row(self, slot, (row[0], tables, row[2]))

    return {"_unschedule": _unschedule, "_running_row": _running_row}


@PAGE.exhibit("the drafts of a victim's row are dispatched later", "#28558", "P24", "P26")
def drafts_of_victim_dispatched(clean: Any) -> Methods:
    """They are sent with the request's first chunk, to be verified at another position."""

    def _unschedule(self: Any, victim: int, step: Any) -> None:
        row = step.rows.get(victim)
        if row is not None and row[2]:
            self.__dict__.setdefault("_records", {})[victim] = row[2]
        clean._unschedule(self, victim, step)

    def _resumed_row(self: Any, slot: int, num_scheduled: int) -> Any:
        row = clean._resumed_row(self, slot, num_scheduled)
        stale = self.__dict__.setdefault("_records", {}).pop(slot, ())
        return replace(row, draft_token_ids=stale)

    return {"_unschedule": _unschedule, "_resumed_row": _resumed_row}


@PAGE.exhibit("the place in line is not corrected for a victim ahead", "#23713", "P15", "P9")
def place_not_corrected(clean: Any) -> Methods:
    """The list has become shorter, and somebody is passed over in this step."""

    def _make_room(self: Any, slot: int, needed: int, position: int, step: Any) -> int:
        left: int = clean._make_room(self, slot, needed, position, step)
        return left if left < 0 else position

    return {"_make_room": _make_room}


@PAGE.exhibit("who waits preempts for a seat", "#40004, #45561", "P16", "P15")
def seat_preemption(clean: Any) -> Methods:
    """Upstream is undecided; here running requests give way for blocks, and never for a seat."""

    def _schedule_waiting(self: Any, step: Any) -> None:
        queue, running = self._select_queue(), self.running
        ordered = self.config.policy is Policy.PRIORITY and step.budget > 0
        if ordered and queue is not None and len(running) >= self.config.max_num_seqs:
            at, rank_of = self._select_victim(), self.table.rank_of
            if rank_of(queue.head()) < rank_of(running[at]):
                victim = running.pop(at)
                self._unschedule(victim, step)
                self._preempt(victim)
                step.preempted_req_ids.append(self.table.requests[victim].request_id)
        clean._schedule_waiting(self, step)

    return {"_schedule_waiting": _schedule_waiting}


@PAGE.exhibit("who needs a block preempts itself", "inference-sim #373", "P16", "P10")
def needy_preempts_itself(clean: Any) -> Methods:
    """It is resumed first, needs the block again, and goes again; the others never give way."""

    def _make_room(self: Any, slot: int, needed: int, position: int, step: Any) -> int:
        self._needy = position
        left: int = clean._make_room(self, slot, needed, position, step)
        return left

    def _select_victim(self: Any) -> int:
        needy: int = self._needy
        return needy

    return {"_make_room": _make_room, "_select_victim": _select_victim}


@PAGE.exhibit("a preempted request keeps its blocks", "inference-sim #963, #1061", "P1", "P12")
def preempted_keeps_blocks(clean: Any) -> Methods:
    """In the end nobody runs, no block is free, and the queue stands still."""

    def _preempt(self: Any, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            del holding.blocks[:]
        clean._preempt(self, slot)

    return {"_preempt": _preempt}
