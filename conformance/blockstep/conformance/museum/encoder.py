"""Encoder: items that are dropped, held, freed or kept when they should not be."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Status

PAGE = Page(takes="encoder")


@PAGE.exhibit(
    "an item that is evicted and made in one step is dropped", "#52482", "P22", part="encoder_type"
)
class EvictedAndMadeIsDropped(Defect):
    """Once it is on the list of what a worker has to drop, nothing takes it off again."""

    def announce(self) -> Any:
        freed = tuple(dict.fromkeys(self.freed))
        super().announce()
        return freed


@PAGE.exhibit(
    "what a worker has to drop is told a step later",
    "#52482",
    "P22 P9",
    wrong_fix_of="evicted-and-made-is-dropped",
    part="encoder_type",
)
class DropsToldLate(Defect):
    """What this step makes is safe from it, and what the next one makes is not."""

    def announce(self) -> Any:
        told, self._late = getattr(self, "_late", ()), super().announce()
        return told


@PAGE.exhibit("who waits keeps the items that it has found", "#31857", "P22 P10")
class WaiterKeepsWhatItFound(Defect):
    """It takes hold of them before it is known whether there are blocks for it."""

    def _choose_if_any(self, slot: int, num_computed: int, num_scheduled: int, step: Any) -> Any:
        chosen = super()._choose_if_any(slot, num_computed, num_scheduled, step)
        if chosen is not None and self.table.statuses[slot] is not Status.RUNNING:
            request, encoder = self.table.requests[slot], self.encoder
            for index in chosen.found:
                entry = encoder.entries.get(encoder.name_of(request, index))
                if entry is not None:  # else it is one that comes with this row
                    encoder.freeable.pop(entry.identifier, None)
                    entry.holders.add((request.request_id, index))
        return chosen


@PAGE.exhibit(
    "who waits lets its items go where blocks are lacking, and not where the gate refuses",
    "#31857",
    "P22 P10",
    wrong_fix_of="waiter-keeps-what-it-found",
)
class WaiterAtTheGateKeepsThem(WaiterKeepsWhatItFound):
    """One way out of an admission was mended, and there is another."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> Any:
        is_admitted = super()._try_admit(slot, queue, step)
        if not is_admitted and not self.config.scheduler_reserve_full_isl:
            self.encoder.drop(self.table.requests[slot])
        return is_admitted


@PAGE.exhibit(
    "an item is freed again with each step that it is behind",
    "#55733",
    "P22 P9",
    part="encoder_type",
)
class FreedWithEachStep(Defect):
    """The room of what was let go grows, step by step, beyond what there is."""

    def _let_go(self, request: Any, index: int) -> None:
        entry = self.entries.get(self.name_of(request, index))
        is_held = entry is not None and (request.request_id, index) in entry.holders
        super()._let_go(request, index)
        if not is_held:
            self.num_free += request.items[index].num_embeds


@PAGE.exhibit("the items of a victim's row are made all the same", "#23713", "P26 P22")
class ItemsOfVictimAreMade(Defect):
    """The row leaves the plan, and what was to be encoded for it stays."""

    def _undo_encoding(self, encoder: Any, victim: int, step: Any) -> None:
        chosen = step.encodings.get(victim)
        super()._undo_encoding(encoder, victim, step)
        if chosen is not None:
            step.encodings[victim] = chosen


@PAGE.exhibit("an item that was to be made for a victim counts as made", "#23713, rule", "P22")
class ItemsOfVictimStay(Defect):
    """Whoever reads it next takes it for there."""

    def _undo_encoding(self, encoder: Any, victim: int, step: Any) -> None:
        encoder.drop(self.table.requests[victim])
        chosen = step.encodings.pop(victim, None)
        if chosen is not None:
            step.encoder_budget += chosen.num_embeds
