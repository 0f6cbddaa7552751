"""Seeded bugs in the encoder cache: items that are freed, held or kept wrongly."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import Status

PAGE = Page(takes="encoder")


@PAGE.exhibit(
    "an item that is evicted and encoded again in one step is freed by the worker",
    "#52482",
    "P22",
    part="encoder_type",
)
class EvictedAndMadeIsDropped(Defect):
    """An item stays in the plan's list of freed items although the same plan encodes it."""

    def announce(self) -> Any:
        freed = tuple(dict.fromkeys(self.freed))
        super().announce()
        return freed


@PAGE.exhibit(
    "the plan lists freed items one step too late",
    "#52482",
    "P22 P9",
    wrong_fix_of="evicted-and-made-is-dropped",
    part="encoder_type",
)
class DropsToldLate(Defect):
    """The items of this step are safe, but the next plan frees an item that it encodes."""

    def announce(self) -> Any:
        told, self._late = getattr(self, "_late", ()), super().announce()
        return told


@PAGE.exhibit(
    "a waiting request keeps references to the cached items that it found", "#31857", "P22 P10"
)
class WaiterKeepsWhatItFound(Defect):
    """It takes references before it is known whether there are blocks for it."""

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
    "a request with too few blocks drops its items, but not one that fails the whole-prompt check",
    "#31857",
    "P22 P10",
    wrong_fix_of="waiter-keeps-what-it-found",
)
class WaiterAtTheGateKeepsThem(WaiterKeepsWhatItFound):
    """The repair handles one way to fail an admission and forgets the other."""

    def _try_admit(self, slot: int, queue: Any, step: Any) -> Any:
        is_admitted = super()._try_admit(slot, queue, step)
        if not is_admitted and not self.config.scheduler_reserve_full_isl:
            self.encoder.drop(self.table.requests[slot])
        return is_admitted


@PAGE.exhibit(
    "an item is freed again in every step after its last token",
    "#55733",
    "P22 P9",
    part="encoder_type",
)
class FreedWithEachStep(Defect):
    """The counter of free encoder-cache slots grows beyond the size of the cache."""

    def _let_go(self, request: Any, index: int) -> None:
        entry = self.entries.get(self.name_of(request, index))
        is_held = entry is not None and (request.request_id, index) in entry.holders
        super()._let_go(request, index)
        if not is_held:
            self.num_free += request.items[index].num_embeds


@PAGE.exhibit("items of a withdrawn row are still encoded", "#23713", "P26 P22")
class ItemsOfVictimAreMade(Defect):
    """A victim's row leaves the plan, but its encoder inputs stay in the plan."""

    def _undo_encoding(self, encoder: Any, victim: int, step: Any) -> None:
        chosen = step.encodings.get(victim)
        super()._undo_encoding(encoder, victim, step)
        if chosen is not None:
            step.encodings[victim] = chosen


@PAGE.exhibit("items of a withdrawn row count as encoded", "#23713, rule", "P22")
class ItemsOfVictimStay(Defect):
    """The next request that reads such an item takes it as present in the encoder cache."""

    def _undo_encoding(self, encoder: Any, victim: int, step: Any) -> None:
        encoder.drop(self.table.requests[victim])
        chosen = step.encodings.pop(victim, None)
        if chosen is not None:
            step.encoder_budget += chosen.num_embeds
