"""Brought: adapters that are too many, and grammars that do not hold what they should.

Each page is given one feature that requests bring, besides all that the others have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, GrammarOutput


def _unmask(row: Any) -> Any:
    """A row of a mask that allows all behind the first placeholder."""
    drafts = row.draft_token_ids
    if DRAFT_PLACEHOLDER not in drafts:
        return row
    end = drafts.index(DRAFT_PLACEHOLDER) + 1
    return replace(row, allowed=row.allowed[:end] + (None,) * (len(row.allowed) - end))


ADAPTERS = Page(takes="adapters")
GRAMMARS = Page(takes="masks")
SESSIONS = Page(takes="sessions")


@ADAPTERS.exhibit("adapters count while they have a row", "vLLM 0.19.1 schedule", "P9 P16")
class AdaptersOfRowsOnly(Defect):
    """Who runs and has no row in this step has lost its seat, and needs one in the next."""

    def _count_seats(self, step: Any) -> Any:
        seats, requests = super()._count_seats(step), self.table.requests
        seats.used = {requests[slot].adapter for slot in step.rows} - {None}
        return seats


@ADAPTERS.exhibit(
    "the base model takes the seat of an adapter",
    "SGLang #23141, by the rule that it breaks",
    "P15 P16",
    invisible="policy: who is passed over",
)
class BaseModelTakesASeat(Defect):
    """Requests without an adapter are passed over where others have all the seats."""

    def _is_passed_over(self, slot: int, step: Any) -> Any:
        seats, adapter = step.seats, self.table.requests[slot].adapter
        is_full = seats is not None and len(seats.used) >= seats.max_loras
        return super()._is_passed_over(slot, step) or (is_full and adapter is None)


@ADAPTERS.exhibit("the cap is looked at once all are admitted", "SGLang #23141", "P9 P16")
class AdaptersCountedAfterwards(Defect):
    """Those admitted in one step all see the seats that were free before it."""

    def _is_passed_over(self, slot: int, step: Any) -> Any:
        seats = step.seats
        if seats is None or not step.admitted:
            return super()._is_passed_over(slot, step)
        step.seats = None
        try:
            return super()._is_passed_over(slot, step)
        finally:
            step.seats = seats


@GRAMMARS.exhibit(
    "behind a draft that was cut all is allowed", "vLLM 0.19.1 grammar_bitmask", "P24"
)
class UnmaskedBehindAPlaceholder(Defect):
    """Only the rows up to the first placeholder are masked."""

    def _make_mask(self, event: Any) -> Any:
        answer = super()._make_mask(event)
        if not isinstance(answer, GrammarOutput):
            return answer
        return GrammarOutput(tuple([_unmask(row) for row in answer.rows]))


@GRAMMARS.exhibit("drafts are verified whatever a grammar says", "vLLM #30916", "P23 P24 P18")
class DraftsNotCut(Defect):
    """A mask leaves all drafts that the worker told."""

    def _cut_drafts(self, _matcher: Any, drafts: Any) -> Any:
        return drafts


@GRAMMARS.exhibit("a mask does not wait for older frames", "vLLM #45014", "P23 P18")
class MaskOfAStaleGrammar(Defect):
    """It is of the text before what those frames have sampled."""

    def _samples_before(self, _frame_id: int, _request_id: str) -> bool:
        return False


@SESSIONS.exhibit("sessions keep their blocks, whoever lacks them", "#49439", "P10")
class SessionsNeverGiveWay(Defect):
    """Two that wait for their turn may each lack what the other holds."""

    def _take_back_one(self, _needy: int, _passed_over: Any = ()) -> bool:
        return False
