"""Seeded bugs in the swap-out of victims and in the two admission thresholds.

The defects in the block manager's listings on swapping and on its two signals of memory pressure
are reproduced here. The others are mistakes that suggest themselves.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page(takes="tiers")
GROUPS = Page(takes_groups=True, takes="tiers")
SWAP, PREEMPTION, PRESSURE = (
    f"the block manager: {where}, breaks its rule"
    for where in ("Multi-Tier Offloading", "Preemption Strategies", "Memory Pressure Signals")
)
LESS = "efficiency: the store has fewer blocks, and more is computed again"
CLOSED = "policy: when admission closes and opens again"


# How many tokens of a victim are swapped out.


@PAGE.exhibit("a victim's whole block table is swapped out", SWAP, "P15 P3")
class WholeTableIsSaved(Defect):
    """The last block is filled in part or not at all, but is stored under the key of a full one."""

    def _save(self, victim: int, step: Any) -> None:
        super()._save(victim, step)
        _resize_last(self, victim, step, 1)


def _resize_last(engine: Any, victim: int, step: Any, num_more: int) -> None:
    """Change the last swap-out of this step by `num_more` units if it is of `victim`.

    It stays as it is if the victim's tables are too short, and is dropped if no token is left.
    """
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


@PAGE.exhibit(
    "tokens of a withdrawn row are swapped out as computed", "by the rule of P15", "P15 P3"
)
class WithdrawnRowIsSaved(Defect):
    """The row was taken out of the plan, so the worker does not compute it."""

    _num_withdrawn = 0

    def _unschedule(self, victim: int, step: Any) -> None:
        self._num_withdrawn = step.rows[victim][0] if victim in step.rows else 0
        super()._unschedule(victim, step)

    def _save(self, victim: int, step: Any) -> None:
        self.table.num_computed[victim] += self._num_withdrawn
        super()._save(victim, step)
        self.table.num_computed[victim] -= self._num_withdrawn


# Which victims are swapped out, and when.


@PAGE.exhibit(
    "only the first victim of a step is swapped out",
    "the block manager: in the Scheduling Loop, breaks its rule",
    "P15",
    invisible=LESS,
)
class OneVictimIsSaved(Defect):
    """If a request needs several victims, the KV of the others is lost."""

    def _save(self, victim: int, step: Any) -> None:
        if not step.saves:
            super()._save(victim, step)


@PAGE.exhibit("a victim's block table is read after it was freed", SWAP, "P26 P3")
class TableReadOnceFree(Defect):
    """Two calls are in the wrong order, so the table is empty."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        name, saves = self.table.requests[slot].request_id, self._saves
        if saves and saves[-1].request_id == name:
            saves[-1] = replace(saves[-1], block_ids=self.table.block_tables(slot))

    def _save(self, victim: int, step: Any) -> None:
        super()._save(victim, step)
        self._saves = step.saves

    _saves: Any = ()


@PAGE.exhibit("a victim's swap-out is sent with the next plan", SWAP, "P26 P15 P3")
class SavedWithThePlanBehind(Defect):
    """The blocks are free by then, and other requests may have written to them."""

    def _schedule(self) -> Any:
        plan = super()._schedule()
        if not hasattr(plan, "kv_saves"):
            return plan
        saves, self._late = self.__dict__.get("_late", ()), plan.kv_saves
        return replace(plan, kv_saves=saves)


@PAGE.exhibit("a swap-out frees blocks that other requests hold", SWAP, "P1 P2 P3")
class SwapFreesWhatOthersHold(Defect):
    """Reference counts are ignored when blocks are swapped out."""

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


@PAGE.exhibit("requests that a reset preempts are swapped out", "by the rule of P25", "P15 P25 P26")
class SavedByAReset(Defect):
    """Their KV is void after the reset, which is what a reset is for."""

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


# Several KV groups.


@GROUPS.exhibit("a swap-out has the blocks of the first KV group only", SWAP, "P26 P3")
class FirstGroupIsSaved(Defect):
    """A victim has a block table in each group."""

    def _save(self, victim: int, step: Any) -> None:
        num_saves = len(step.saves)
        super()._save(victim, step)
        if len(step.saves) > num_saves:
            save = step.saves[-1]
            step.saves[-1] = replace(save, block_ids=save.block_ids[:1])


# When admission is closed.


class _OtherThresholds(Defect):
    """Admission closes and opens by the rule of a subclass."""

    def _is_closed_behind(self, step: Any) -> bool:
        return bool(self.running) and (
            bool(step.preempted_req_ids) or self._is_short(self.pool.num_free)
        )


@PAGE.exhibit("admission opens again at the low threshold", PRESSURE, "P10", invisible=CLOSED)
class OneThreshold(_OtherThresholds):
    """Each admitted request is preempted in the next step."""

    def _is_short(self, num_free: int) -> bool:
        return bool(num_free < self.config.admission_low_blocks)


@PAGE.exhibit(
    "admission closes at the high threshold",
    PRESSURE,
    "P10",
    wrong_fix_of="one-threshold",
    invisible=CLOSED,
)
class HighThresholdAlone(_OtherThresholds):
    """Admission has one threshold again, and running slots stay unused."""

    def _is_short(self, num_free: int) -> bool:
        return bool(num_free < self.config.admission_high_blocks)


@PAGE.exhibit("admission stays closed although nothing runs", PRESSURE, "P10")
class ClosedForNobody(Defect):
    """No running request is left that could free a block."""

    def _is_closed_behind(self, step: Any) -> bool:
        if self.running:
            return bool(super()._is_closed_behind(step))
        return bool(self.is_closed)


@PAGE.exhibit(
    "admission opens when no request has a row",
    PRESSURE,
    "P10",
    wrong_fix_of="closed-for-nobody",
    invisible=CLOSED,
)
class OpenWithoutRows(Defect):
    """Running requests may only wait for a commit, and continue after it."""

    def _is_closed_behind(self, step: Any) -> bool:
        return bool(step.rows) and bool(super()._is_closed_behind(step))


@PAGE.exhibit(
    "the free blocks are counted before running requests get theirs",
    PRESSURE,
    "P10",
    invisible=CLOSED,
)
class CountedAsTheStepBegins(Defect):
    """Running requests have not taken the blocks of this step yet."""

    def _schedule_running(self, step: Any) -> None:
        self._at_first = self.pool.num_free
        super()._schedule_running(step)

    def _is_closed_behind(self, step: Any) -> bool:
        num_free, self.pool.num_free = self.pool.num_free, self._at_first
        is_closed: bool = super()._is_closed_behind(step)
        self.pool.num_free = num_free
        return is_closed
