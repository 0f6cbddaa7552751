"""Grammars: masks, drafts and texts that a grammar has not led to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, GrammarOutput

PAGE = Page(takes="masks")


def _unmask(row: Any) -> Any:
    """A row of a mask that allows all behind the first placeholder."""
    drafts = row.draft_token_ids
    if DRAFT_PLACEHOLDER not in drafts:
        return row
    end = drafts.index(DRAFT_PLACEHOLDER) + 1
    return replace(row, allowed=row.allowed[:end] + (None,) * (len(row.allowed) - end))


@PAGE.exhibit("behind a draft that was cut all is allowed", "vLLM 0.19.1 grammar_bitmask", "P24")
class UnmaskedBehindAPlaceholder(Defect):
    """Only the rows up to the first placeholder are masked."""

    def _make_mask(self, event: Any) -> Any:
        answer = super()._make_mask(event)
        if not isinstance(answer, GrammarOutput):
            return answer
        return GrammarOutput(tuple([_unmask(row) for row in answer.rows]))


@PAGE.exhibit("drafts are verified whatever a grammar says", "vLLM #30916", "P23 P24 P18")
class DraftsNotCut(Defect):
    """A mask leaves all drafts that the worker told."""

    def _cut_drafts(self, _matcher: Any, drafts: Any) -> Any:
        return drafts


@PAGE.exhibit("a mask does not wait for older frames", "vLLM #45014", "P23 P18")
class MaskOfAStaleGrammar(Defect):
    """It is of the text before what those frames have sampled."""

    def _samples_before(self, _frame_id: int, _request_id: str) -> bool:
        return False


@PAGE.exhibit(
    "a mask waits for the oldest frame only",
    "vLLM #45014, #45015",
    "P23 P18",
    wrong_fix_of="mask-of-a-stale-grammar",
)
class MaskWaitsForOneFrame(Defect):
    """With three frames in flight it is of the text before what the second of them samples."""

    def _tell_masks(self, frame: Any) -> Any:
        oldest = {**getattr(self, "_oldest", {}), self.prev_frame_id: next(iter(self.frames), -1)}
        self._oldest = oldest
        return super()._tell_masks(frame)

    def _samples_before(self, frame_id: int, request_id: str) -> Any:
        awaited = self._oldest.get(frame_id, -1) in self.frames
        return awaited and super()._samples_before(frame_id, request_id)


@PAGE.exhibit(
    "the drafts of a preempted request stay, and its grammar goes on", "#30916", "P24 P12 P23"
)
class DraftsOutliveAPreemption(Defect):
    """They were proposed behind a text that has grown since."""

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
    "the drafts of a preempted request are cut to what its grammar accepts",
    "#30916",
    "P24 P12 P23",
    wrong_fix_of="drafts-outlive-a-preemption",
)
class DraftsCutAtAPreemption(DraftsOutliveAPreemption):
    """A grammar accepts them where it stands, and that is not where they come to stand."""

    def _keep(self, matcher: Any, drafts: Any) -> Any:
        return matcher.cut(drafts)


@PAGE.exhibit(
    "a grammar begins anew with a preemption", "rule: outputs outlive a preemption", "P23 P12 P18"
)
class GrammarBeginsAnew(Defect):
    """The outputs stay, and what they led to is forgotten."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        matcher = self.matchers.get(self.table.requests[slot].request_id)
        if matcher is not None:
            matcher.position = matcher.position._replace(state=0)


@PAGE.exhibit(
    "what stands behind the end of reasoning is not told to a grammar",
    "vLLM 0.19.1 should_advance",
    "P23 P18",
)
class TokensBehindReasoningLost(Defect):
    """With drafts one commit brings the end, and the first tokens that the grammar holds."""

    def _advance_grammar(self, request_id: str, delivered: Any) -> None:
        matcher = self.matchers.get(request_id)
        was_held = matcher is None or matcher.position.holds
        super()._advance_grammar(request_id, delivered)
        if not was_held and matcher.position.holds:
            matcher.position = matcher.position._replace(state=0)


@PAGE.exhibit("a mask leaves the grammar where its drafts led", "vLLM 0.19.1 rule S4", "P23 P18")
class MaskMovesTheGrammar(Defect):
    """The drafts may be rejected, and are told to it again with the outputs."""

    def _make_mask(self, event: Any) -> Any:
        answer = super()._make_mask(event)
        for row in answer.rows if isinstance(answer, GrammarOutput) else ():
            matcher = self.matchers[row.request_id]
            known = [token for token in row.draft_token_ids if token != DRAFT_PLACEHOLDER]
            matcher.position = matcher.follow(known) or matcher.position
        return answer
