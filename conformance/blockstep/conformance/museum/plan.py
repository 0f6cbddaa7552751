"""The plan and the outputs: what the worker is told, and when a request ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


@PAGE.exhibit("a request gets one token too many", "vLLM V1: Request Completion", "P13")
class LengthOffByOne(Defect):
    """The cap is checked with a token's delay."""

    def _accept(self, slot: int, tokens: Any) -> Any:
        self.table.max_known[slot] += 1
        accepted = super()._accept(slot, tokens)
        if slot < len(self.table.max_known):
            self.table.max_known[slot] -= 1
        return accepted


@PAGE.exhibit("min_tokens holds off the length caps", "vLLM 0.19.1 check_stop", "P13 P10")
class MinTokensMasksLength(Defect):
    """At the model length the request can neither stop nor go on."""

    def _stop_verdict(self, slot: int, token: int) -> Any:
        if not self._has_min_tokens(slot):
            return super()._accept.__globals__["_GOES_ON"]
        return super()._stop_verdict(slot, token)


@PAGE.exhibit("a resumed request is announced as new", "#31583", "P26")
class ResumedAsNew(Defect):
    """The worker forgets what it has said so far."""

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        return self._new_row(slot, num_scheduled)

    def _issue_plan(self, step: Any) -> Any:
        step.admitted = [(slot, count, False) for slot, count, _ in step.admitted]
        return super()._issue_plan(step)


@PAGE.exhibit("tokens are not sent again after a step without the request", "#26385", "P26")
class GapNotResent(Defect):
    """The worker goes on with the tokens it last heard of."""

    def _was_in_previous_plan(self, slot: int) -> bool:
        return True


@PAGE.exhibit("a resumed request is sent without its tokens", "#26385", "P26 P13")
class ResumedWithoutTokens(Defect):
    """The worker keeps what it had when the request was preempted, or nothing."""

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        return replace(super()._resumed_row(slot, num_scheduled), all_token_ids=None)


@PAGE.exhibit(
    "tokens sent again end with the computed ones",
    "#28787, #27756",
    "P26 P13",
    wrong_fix_of="resumed-without-tokens",
)
class TokensCutToComputed(Defect):
    """A resumed request has computed little, and its outputs are behind that."""

    def _resumed_row(self, slot: int, num_scheduled: int) -> Any:
        row = super()._resumed_row(slot, num_scheduled)
        reached = row.num_computed_tokens + row.num_scheduled_tokens
        return replace(row, all_token_ids=row.all_token_ids[:reached])


@PAGE.exhibit("the worker is told one computed token too many", "#52617", "P26 P12 P3 P4")
class ToldOneTokenMore(Defect):
    """The scheduler gives up the last token of a hit, and the worker still counts it."""

    def _new_row(self, slot: int, num_scheduled: int) -> Any:
        row = super()._new_row(slot, num_scheduled)
        computed = row.num_computed_tokens
        if not computed or num_scheduled == 1:
            return row
        return replace(
            row, num_computed_tokens=computed + 1, num_scheduled_tokens=num_scheduled - 1
        )


@PAGE.exhibit(
    "without caching a chunk makes no progress", "SGLang #36855, #37024", "P12 P10 P8 P26"
)
class UncachedChunkRepeats(Defect):
    """What records the progress is skipped together with the publishing."""

    def _advance(self, slot: int, num_scheduled: int, frame_id: int) -> Any:
        samples = super()._advance(slot, num_scheduled, frame_id)
        if not samples and not self.config.enable_prefix_caching:
            self.table.num_computed[slot] -= num_scheduled
        return samples
