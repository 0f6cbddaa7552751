"""Seeded bugs in grammars: bitmasks, drafts and outputs that a grammar does not allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, GrammarOutput

PAGE = Page(takes="masks")


def _unmask(row: Any) -> Any:
    """Return the row of a bitmask with every position after the first placeholder unmasked."""
    drafts = row.draft_token_ids
    if DRAFT_PLACEHOLDER not in drafts:
        return row
    end = drafts.index(DRAFT_PLACEHOLDER) + 1
    return replace(row, allowed=row.allowed[:end] + (None,) * (len(row.allowed) - end))


@PAGE.exhibit(
    "positions after a draft that was cut are not masked", "vLLM 0.19.1 grammar_bitmask", "P24"
)
class UnmaskedBehindAPlaceholder(Defect):
    """Only positions up to the first placeholder are masked."""

    def _make_mask(self, event: Any) -> Any:
        answer = super()._make_mask(event)
        if not isinstance(answer, GrammarOutput):
            return answer
        return GrammarOutput(tuple([_unmask(row) for row in answer.rows]))


@PAGE.exhibit("drafts that the grammar rejects are verified", "vLLM #30916", "P23 P24 P18")
class DraftsNotCut(Defect):
    """The bitmask keeps all drafts that the worker proposed."""

    def _cut_drafts(self, _matcher: Any, drafts: Any) -> Any:
        return drafts


@PAGE.exhibit("a bitmask is computed before older frames are committed", "vLLM #45014", "P23 P18")
class MaskOfAStaleGrammar(Defect):
    """It is computed from a grammar state that lacks the tokens of these frames."""

    def _samples_before(self, _frame_id: int, _request_id: str) -> bool:
        return False


@PAGE.exhibit(
    "a bitmask waits for the oldest frame only",
    "vLLM #45014, #45015",
    "P23 P18",
    wrong_fix_of="mask-of-a-stale-grammar",
)
class MaskWaitsForOneFrame(Defect):
    """The bitmask of a third frame lacks the tokens that the second one samples."""

    def _tell_masks(self, frame: Any) -> Any:
        oldest = {**getattr(self, "_oldest", {}), self.prev_frame_id: next(iter(self.frames), -1)}
        self._oldest = oldest
        return super()._tell_masks(frame)

    def _samples_before(self, frame_id: int, request_id: str) -> Any:
        awaited = self._oldest.get(frame_id, -1) in self.frames
        return awaited and super()._samples_before(frame_id, request_id)


@PAGE.exhibit("drafts of a request with a grammar survive a preemption", "#30916", "P24 P12 P23")
class DraftsOutliveAPreemption(Defect):
    """They were proposed after a shorter token sequence."""

    def _preempt(self, slot: int) -> None:
        drafts, matcher = self._get_drafts(slot)
        super()._preempt(slot)
        if matcher is not None:
            self.table.spec_token_ids[slot] = self._keep(matcher, drafts)

    def _get_drafts(self, slot: int) -> Any:
        matcher = self.matchers.get(self.table.requests[slot].request_id)
        return self.table.spec_token_ids[slot], matcher

    def _keep(self, _matcher: Any, drafts: Any) -> Any:
        return drafts


@PAGE.exhibit(
    "a preempted request keeps the drafts that its grammar accepts",
    "#30916",
    "P24 P12 P23",
    wrong_fix_of="drafts-outlive-a-preemption",
)
class DraftsCutAtAPreemption(DraftsOutliveAPreemption):
    """The grammar accepts them after today's tokens, but they are verified after more tokens."""

    def _keep(self, matcher: Any, drafts: Any) -> Any:
        return matcher.cut(drafts)


@PAGE.exhibit(
    "a preemption resets the grammar state", "rule: outputs survive a preemption", "P23 P12 P18"
)
class GrammarBeginsAnew(Defect):
    """The request keeps its outputs, but the grammar state that they led to is lost."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        matcher = self.matchers.get(self.table.requests[slot].request_id)
        if matcher is not None:
            matcher.position = matcher.position._replace(state=0)


@PAGE.exhibit(
    "tokens after the end of reasoning do not advance the grammar",
    "vLLM 0.19.1 should_advance",
    "P23 P18",
)
class TokensBehindReasoningLost(Defect):
    """One commit can deliver the end of reasoning and, with drafts, the grammar's first tokens."""

    def _advance_grammar(self, request_id: str, delivered: Any) -> None:
        matcher = self.matchers.get(request_id)
        was_held = matcher is None or matcher.position.holds
        super()._advance_grammar(request_id, delivered)
        if not was_held and matcher.position.holds:
            matcher.position = matcher.position._replace(state=0)


@PAGE.exhibit(
    "computing a bitmask advances the grammar by the drafts", "vLLM 0.19.1 rule S4", "P23 P18"
)
class MaskMovesTheGrammar(Defect):
    """The drafts may be rejected; those accepted advance the grammar once more with the outputs."""

    def _make_mask(self, event: Any) -> Any:
        answer = super()._make_mask(event)
        for row in answer.rows if isinstance(answer, GrammarOutput) else ():
            matcher = self.matchers[row.request_id]
            known = [token for token in row.draft_token_ids if token != DRAFT_PLACEHOLDER]
            matcher.position = matcher.follow(known) or matcher.position
        return answer
