"""Tiers: what is saved of victims, and when, and two thresholds for whoever waits.

The listings of the block manager on swapping, and its two signals of memory pressure, are here:
each does to ours what it does itself. Beside them are mistakes that suggest themselves.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import PauseState

PAGE = Page(takes="tiers")
GROUPS = Page(takes_groups=True, takes="tiers")
SWAP, PREEMPTION, PRESSURE = (
    f"the block manager: {where}, by the rule that it breaks"
    for where in ("Multi-Tier Offloading", "Preemption Strategies", "Memory Pressure Signals")
)
LESS = "efficiency: the store has less, and more is computed again"
CLOSED = "policy: when admissions stop, and begin again"


# How much is saved of a victim.


@PAGE.exhibit("the whole table of a victim is saved", SWAP, "P15 P3")
class WholeTableIsSaved(Defect):
    """The last block is filled in part, or not at all, and a name says that it is full."""

    def _save(self, victim: int, step: Any) -> None:
        super()._save(victim, step)
        _resize_last(self, victim, step, 1)


@PAGE.exhibit(
    "the last full block of a victim is not saved", "by the rule of P15", "P15", invisible=LESS
)
class LastFullBlockIsNotSaved(Defect):
    """A token is left to compute, which here is said of whoever is loaded, not of who is saved."""

    def _save(self, victim: int, step: Any) -> None:
        super()._save(victim, step)
        _resize_last(self, victim, step, -1)


def _resize_last(engine: Any, victim: int, step: Any, num_more: int) -> None:
    """Change the save that a step has told of a victim by so many units, if there are as many."""
    name, sizes = engine.table.requests[victim].request_id, engine.config.block_sizes
    if not step.saves or step.saves[-1].request_id != name:
        return
    save, tables = step.saves.pop(), engine.table.block_tables(victim)
    num_tokens = save.num_tokens + num_more * lcm(*sizes)
    if any(len(table) * size < num_tokens for table, size in zip(tables, sizes, strict=True)):
        num_tokens = save.num_tokens
    if num_tokens > 0:
        cut = zip(tables, sizes, strict=True)
        block_ids = tuple(table[: num_tokens // size] for table, size in cut)
        step.saves.append(replace(save, num_tokens=num_tokens, block_ids=block_ids))


@PAGE.exhibit("what this step was to compute of a victim is saved", "by the rule of P15", "P15 P3")
class WithdrawnRowIsSaved(Defect):
    """Its row has been taken out of the plan: nobody computes it."""

    _num_withdrawn = 0

    def _unschedule(self, victim: int, step: Any) -> None:
        self._num_withdrawn = step.rows[victim][0] if victim in step.rows else 0
        super()._unschedule(victim, step)

    def _save(self, victim: int, step: Any) -> None:
        self.table.num_computed[victim] += self._num_withdrawn
        super()._save(victim, step)
        self.table.num_computed[victim] -= self._num_withdrawn


@PAGE.exhibit("who has just enough is not saved", PREEMPTION, "P15", invisible=LESS)
class JustEnoughIsNotSaved(Defect):
    """Less or equal for less."""

    def _save(self, victim: int, step: Any) -> None:
        num_saves = len(step.saves)
        super()._save(victim, step)
        if len(step.saves) > num_saves and step.saves[-1].num_tokens == self.config.swap_min_tokens:
            step.saves.pop()


# Whose, and when.


@PAGE.exhibit(
    "one victim of a step is saved",
    "the block manager: in the Scheduling Loop, by the rule",
    "P15",
    invisible=LESS,
)
class OneVictimIsSaved(Defect):
    """Whoever needs several to give way forgets those behind the first."""

    def _save(self, victim: int, step: Any) -> None:
        if not step.saves:
            super()._save(victim, step)


@PAGE.exhibit("who gives way to itself is not saved", "by the rule of P15", "P15", invisible=LESS)
class LastVictimIsNotSaved(Defect):
    """The last who runs, and lacks a block, is a victim like any other."""

    def _save(self, victim: int, step: Any) -> None:
        if self.running:
            super()._save(victim, step)


@PAGE.exhibit("a victim's table is read once it is free", SWAP, "P26 P3")
class TableReadOnceFree(Defect):
    """Order of two calls: there is nothing left to save."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        name, saves = self.table.requests[slot].request_id, self._saves
        if saves and saves[-1].request_id == name:
            saves[-1] = replace(saves[-1], block_ids=self.table.block_tables(slot))

    def _save(self, victim: int, step: Any) -> None:
        super()._save(victim, step)
        self._saves = step.saves

    _saves: Any = ()


@PAGE.exhibit("what a victim had is saved with the plan behind", SWAP, "P26 P15 P3")
class SavedWithThePlanBehind(Defect):
    """Its blocks are free, and others may have written them."""

    def _schedule(self) -> Any:
        plan = super()._schedule()
        if not hasattr(plan, "kv_saves"):
            return plan
        saves, self._late = self.__dict__.get("_late", ()), plan.kv_saves
        return replace(plan, kv_saves=saves)


@PAGE.exhibit("a victim's blocks are free, whoever else holds them", SWAP, "P1 P2 P3")
class SwapFreesWhatOthersHold(Defect):
    """References are not counted as blocks go to the store."""

    _saved: Any = None

    def _save(self, victim: int, step: Any) -> None:
        num_saves = len(step.saves)
        super()._save(victim, step)
        self._saved = victim if len(step.saves) > num_saves else None

    def _free_blocks(self, slot: int) -> None:
        if self._saved == slot:
            for holding in self.table.holdings[slot]:
                for block in holding.blocks:
                    self.pool.ref_counts[block] = min(self.pool.ref_counts[block], 1)
            self._saved = None
        super()._free_blocks(slot)


@PAGE.exhibit("who is preempted by a reset is saved", "by the rule of P25", "P15 P25 P26")
class SavedByAReset(Defect):
    """What was computed is void: that is what the reset is for."""

    def _reset(self, reset_running_requests: bool) -> Any:
        if reset_running_requests and self.config.swap_min_tokens:
            told = type("Told", (), {"saves": []})()
            for slot in reversed(self.running):
                super()._save(slot, told)
            self._told = tuple(told.saves)
        return super()._reset(reset_running_requests)

    def _schedule(self) -> Any:
        plan = super()._schedule()
        if not hasattr(plan, "kv_saves"):
            return plan
        told, self._told = self.__dict__.get("_told", ()), ()
        return replace(plan, kv_saves=(*told, *plan.kv_saves)) if told else plan


# Several groups.


@GROUPS.exhibit("the first group alone is saved", SWAP, "P26 P3")
class FirstGroupIsSaved(Defect):
    """A victim has a table for each."""

    def _save(self, victim: int, step: Any) -> None:
        num_saves = len(step.saves)
        super()._save(victim, step)
        if len(step.saves) > num_saves:
            save = step.saves[-1]
            step.saves[-1] = replace(save, block_ids=save.block_ids[:1])


@GROUPS.exhibit(
    "full blocks of the first group are counted",
    "by the rule of P15",
    "P15",
    invisible="policy: how much of a victim is saved, and all of it was computed",
)
class FirstGroupCounts(Defect):
    """Another one's block is as long as several of them, and is filled in part."""

    def _save(self, victim: int, step: Any) -> None:
        table, config = self.table, self.config
        settled = min(table.num_computed[victim], table.num_known[victim])
        size = config.block_sizes[0]
        num_saves = len(step.saves)
        super()._save(victim, step)
        if len(step.saves) > num_saves:
            save, num_tokens = step.saves[-1], settled // size * size
            tables = zip(table.block_tables(victim), config.block_sizes, strict=True)
            block_ids = tuple(blocks[: -(-num_tokens // size)] for blocks, size in tables)
            step.saves[-1] = replace(save, num_tokens=num_tokens, block_ids=block_ids)


# When nobody is admitted.


class _OtherThresholds(Defect):
    """Admission closes and opens by a rule of its own."""

    def _is_closed_behind(self, step: Any) -> bool:
        return bool(self.running) and (
            bool(step.preempted_req_ids) or self._is_short(self.pool.num_free)
        )


@PAGE.exhibit("admission opens where it closes", PRESSURE, "P10", invisible=CLOSED)
class OneThreshold(_OtherThresholds):
    """Who is admitted is preempted next, and so on."""

    def _is_short(self, num_free: int) -> bool:
        return bool(num_free < self.config.admission_low_blocks)


@PAGE.exhibit(
    "admission closes where it opens",
    PRESSURE,
    "P10",
    wrong_fix_of="one-threshold",
    invisible=CLOSED,
)
class HighThresholdAlone(_OtherThresholds):
    """Also one threshold, and seats stay free beside it."""

    def _is_short(self, num_free: int) -> bool:
        return bool(num_free < self.config.admission_high_blocks)


@PAGE.exhibit("the thresholds are taken for each other", PRESSURE, "P10", invisible=CLOSED)
class ThresholdsTheOtherWayRound(_OtherThresholds):
    """It opens sooner than it closes: every other step."""

    def _is_short(self, num_free: int) -> bool:
        low, high = self.config.admission_low_blocks, self.config.admission_high_blocks
        return bool(num_free < (low if self.is_closed else high))


@PAGE.exhibit("as many as the low threshold close admission", PRESSURE, "P10", invisible=CLOSED)
class LowByOne(_OtherThresholds):
    """Less or equal for less."""

    def _is_short(self, num_free: int) -> bool:
        low, high = self.config.admission_low_blocks, self.config.admission_high_blocks
        return bool(num_free < high if self.is_closed else num_free <= low)


@PAGE.exhibit("more than the high threshold open admission", PRESSURE, "P10", invisible=CLOSED)
class HighByOne(_OtherThresholds):
    """Less or equal for less; a pool that is all free may never be enough."""

    def _is_short(self, num_free: int) -> bool:
        low, high = self.config.admission_low_blocks, self.config.admission_high_blocks
        return bool(num_free <= high if self.is_closed else num_free < low)


@PAGE.exhibit("admission never closes", PRESSURE, "P10", invisible=CLOSED)
class NeverCloses(Defect):
    """But for the step that preempts, which admits nobody in any case."""

    def _is_closed_behind(self, _step: Any) -> bool:
        return False


@PAGE.exhibit(
    "a preemption does not close admission",
    PRESSURE,
    "P10",
    wrong_fix_of="one-threshold",
    invisible=CLOSED,
)
class OpenBehindAPreemption(Defect):
    """The victim comes back with the blocks that it gave, and somebody has to go again."""

    def _is_closed_behind(self, step: Any) -> bool:
        told = type("Quiet", (), {"preempted_req_ids": ()})()
        return bool(super()._is_closed_behind(told))


@PAGE.exhibit("admission stays closed though nobody runs", PRESSURE, "P10")
class ClosedForNobody(Defect):
    """Nobody is left who could free a block."""

    def _is_closed_behind(self, step: Any) -> bool:
        if self.running:
            return bool(super()._is_closed_behind(step))
        return bool(self.is_closed)


@PAGE.exhibit(
    "admission opens when nobody has a row",
    PRESSURE,
    "P10",
    wrong_fix_of="closed-for-nobody",
    invisible=CLOSED,
)
class OpenWithoutRows(Defect):
    """Those who run may wait for an answer, and go on behind it."""

    def _is_closed_behind(self, step: Any) -> bool:
        return bool(step.rows) and bool(super()._is_closed_behind(step))


@PAGE.exhibit("closed admission lets in who waits", PRESSURE, "P10", invisible=CLOSED)
class AdmittedWhileClosed(Defect):
    """It is told, and nobody is held to it."""

    _is_told = False

    def _schedule_waiting(self, step: Any) -> None:
        super()._schedule_waiting(step)
        self.is_closed = self._is_told

    def _is_closed_behind(self, step: Any) -> bool:
        is_closed: bool = super()._is_closed_behind(step)
        self._is_told = is_closed
        is_open = self.pause_state is PauseState.UNPAUSED and not step.preempted_req_ids
        return is_closed and not is_open


@PAGE.exhibit("free blocks are counted as a step begins", PRESSURE, "P10", invisible=CLOSED)
class CountedAsTheStepBegins(Defect):
    """Those who run have not had theirs yet."""

    def _schedule_running(self, step: Any) -> None:
        self._at_first = self.pool.num_free
        super()._schedule_running(step)

    def _is_closed_behind(self, step: Any) -> bool:
        num_free, self.pool.num_free = self.pool.num_free, self._at_first
        is_closed: bool = super()._is_closed_behind(step)
        self.pool.num_free = num_free
        return is_closed


@PAGE.exhibit("a pause keeps admission as it is", PRESSURE, "P10", invisible=CLOSED)
class PauseKeepsItClosed(Defect):
    """Who runs ends meanwhile, and nobody looks at what is free."""

    def _is_closed_behind(self, step: Any) -> bool:
        if self.pause_state is PauseState.UNPAUSED:
            return bool(super()._is_closed_behind(step))
        return bool(self.is_closed)
