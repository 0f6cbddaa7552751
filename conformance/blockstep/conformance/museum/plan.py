"""Seeded bugs in plans and outputs: what the worker gets, and when a request finishes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


@PAGE.exhibit("a request gets one token more than max_tokens", "vLLM V1: Request Completion", "P13")
class LengthOffByOne(Defect):
    """The length cap is checked one token too late."""

    def _accept(self, slot: int, tokens: Any) -> Any:
        self.table.max_known[slot] += 1
        accepted = super()._accept(slot, tokens)
        if slot < len(self.table.max_known):
            self.table.max_known[slot] -= 1
        return accepted


@PAGE.exhibit("min_tokens suspends the length caps", "vLLM 0.19.1 check_stop", "P13 P10")
class MinTokensMasksLength(Defect):
    """A request at the model length can neither stop nor get another token."""

    def _stop_verdict(self, slot: int, token: int) -> Any:
        if not self._has_min_tokens(slot):
            return super()._accept.__globals__["_GOES_ON"]
        return super()._stop_verdict(slot, token)


@PAGE.exhibit("a resumed request is sent as a new one", "#31583", "P26")
class ResumedAsNew(Defect):
    """The worker loses the outputs that the request has so far."""

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        return self._new_row(slot, num_scheduled)

    def _issue_plan(self, step: Any) -> Any:
        step.admitted = [(slot, count, False) for slot, count, _ in step.admitted]
        return super()._issue_plan(step)


@PAGE.exhibit(
    "tokens are not sent again after a step without a row of the request", "#26385", "P26"
)
class GapNotResent(Defect):
    """The worker continues with the last tokens that it got."""

    def _was_in_previous_plan(self, slot: int) -> bool:
        return True


@PAGE.exhibit("a resumed request is sent without its tokens", "#26385", "P26 P13")
class ResumedWithoutTokens(Defect):
    """The worker keeps what it had at the preemption, or has nothing."""

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        return replace(super()._resumed_row(slot, num_scheduled), all_token_ids=None)


@PAGE.exhibit(
    "a resumed request is sent with its computed tokens only",
    "#28787, #27756",
    "P26 P13",
    wrong_fix_of="resumed-without-tokens",
)
class TokensCutToComputed(Defect):
    """A resumed request has few computed tokens, so its outputs are cut off."""

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        row = super()._resumed_row(slot, num_scheduled)
        reached = row.num_computed_tokens + row.num_scheduled_tokens
        return replace(row, all_token_ids=row.all_token_ids[:reached])


@PAGE.exhibit("the worker gets one computed token too many", "#52617", "P26 P12 P3 P4")
class ToldOneTokenMore(Defect):
    """The scheduler drops the last token of a hit, but the worker still counts it."""

    def _new_row(self, slot: int, num_scheduled: int) -> Any:
        row = super()._new_row(slot, num_scheduled)
        computed = row.num_computed_tokens
        if not computed or num_scheduled == 1:
            return row
        return replace(
            row, num_computed_tokens=computed + 1, num_scheduled_tokens=num_scheduled - 1
        )


@PAGE.exhibit(
    "without prefix caching a chunk makes no progress", "SGLang #36855, #37024", "P12 P10 P8 P26"
)
class UncachedChunkRepeats(Defect):
    """The update of the computed tokens is skipped together with the publishing."""

    def _advance(self, slot: int, num_scheduled: int, frame_id: int) -> Any:
        samples = super()._advance(slot, num_scheduled, frame_id)
        if not samples and not self.config.enable_prefix_caching:
            self.table.num_computed[slot] -= num_scheduled
        return samples
