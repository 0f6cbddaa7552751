"""Seeded bugs in placeholders: output tokens of frames in flight under asynchronous scheduling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


class _DropsTokens(Defect):
    """A commit drops the tokens of a stale row, and the row itself."""

    _to_drop: frozenset[str] = frozenset()
    """Ids of the requests whose next row is stale."""

    def _is_stale(self, request_id: str) -> bool:
        return request_id in self._to_drop

    def _accept(self, slot: int, tokens: Any) -> Any:
        request_id = self.table.requests[slot].request_id
        if not self._is_stale(request_id):
            return super()._accept(slot, tokens)
        self._to_drop -= {request_id}
        return (), super()._accept.__globals__["_GOES_ON"]

    def _commit(self, event: Any) -> Any:
        answer = super()._commit(event)
        if not hasattr(answer, "rows"):
            return answer
        return replace(answer, rows=tuple(row for row in answer.rows if row.new_token_ids))


@PAGE.exhibit(
    "a preempted request is resumed while its sampled tokens are in flight",
    "#41190, #48245",
    "P13 P12 P26 P16 P15",
)
class ReadmittedWithPromises(Defect):
    """The position after the known tokens is sampled twice."""

    def _awaits_tokens(self, slot: int) -> bool:
        return False


@PAGE.exhibit(
    "without async scheduling a preempted request is resumed while its token is in flight",
    "#48245",
    "P13 P26",
)
class ReadmittedInFlightWithoutPlaceholders(Defect):
    """The check reads a placeholder counter that a pipeline of plans does not maintain."""

    def _awaits_tokens(self, slot: int) -> bool:
        return bool(self.table.num_output_placeholders[slot])


@PAGE.exhibit(
    "a preempted request waits for a chunk in flight that samples nothing",
    "#48245 as merged",
    "P15 P16",
    wrong_fix_of="readmitted-with-promises",
    invisible="efficiency: a request is admitted one step later",
)
class HeldUpByAChunk(Defect):
    """It waits for every frame that has a row of the request."""

    def _awaits_tokens(self, slot: int) -> bool:
        request_id = self.table.requests[slot].request_id
        return any(request_id in frame for frame in self.frames.values())


@PAGE.exhibit(
    "a preemption sets the placeholder counter to zero",
    "#38624",
    "P12 P13 P26",
    wrong_fix_of="readmitted-with-promises",
)
class PromisesZeroed(Defect):
    """The frames in flight are not marked as stale, so their commits make the counter negative."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self.table.num_output_placeholders[slot] = 0


@PAGE.exhibit(
    "a preemption drops the tokens of one frame in flight only",
    "#47900",
    "P13 P26",
    wrong_fix_of="readmitted-with-promises",
)
class OneStaleFrameDropped(_DropsTokens):
    """The tokens of the first frame are lost; the other frames are committed as usual."""

    def _preempt(self, slot: int) -> None:
        if self.table.num_output_placeholders[slot]:
            self._to_drop |= {self.table.requests[slot].request_id}
        super()._preempt(slot)


@PAGE.exhibit(
    "tokens without a placeholder are dropped",
    "vllm-gaudi #1794, #1803",
    "P13 P26 P12",
    wrong_fix_of="readmitted-with-promises",
)
class StaleTokensTakenForNoise(_DropsTokens):
    """A preemption clears the placeholders, so all tokens of frames in flight are lost."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self.table.num_output_placeholders[slot] = 0

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        self._is_noise = self.table.num_output_placeholders[slot] == 0
        if not self._is_noise:
            super()._keep_promise(slot, num_drafts)

    def _is_stale(self, request_id: str) -> bool:
        return bool(self.async_scheduling and self._is_noise)


@PAGE.exhibit(
    "after a reset without frames in flight the next token is dropped",
    "#42043, #42117",
    "P13 P12 P10 P26",
)
class ResetEatsAToken(_DropsTokens):
    """The first token after the reset is dropped as stale, and its placeholder stays for ever."""

    def _reset(self, reset_running_requests: bool) -> Any:
        if reset_running_requests and self.async_scheduling and not self.frames:
            requests = self.table.requests
            self._to_drop = frozenset(requests[slot].request_id for slot in self.running)
        return super()._reset(reset_running_requests)

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        if self.table.requests[slot].request_id not in self._to_drop:
            super()._keep_promise(slot, num_drafts)


@PAGE.exhibit("draft placeholders survive a step without a row of the request", "#46899", "P24")
class PlaceholdersAfterAGap(Defect):
    """They are dispatched as drafts, but the worker has none."""

    def _drop_unused_placeholders(self, frame_id: int) -> None:
        return None


@PAGE.exhibit(
    "a stale frame rolls back the computed tokens of a preempted request",
    "#48245",
    "P12 P14",
    invisible_if_hidden="books: the counter is set again when the request is resumed",
)
class StaleFrameRollsBack(Defect):
    """A preempted request has no computed tokens, so the counter becomes negative."""

    def _roll_back(self, slot: int, drafts: Any, tokens: Any) -> None:
        before = self.table.num_computed[slot]
        super()._roll_back(slot, drafts, tokens)
        self.table.num_computed[slot] = before - len(drafts) + len(tokens) - 1


@PAGE.exhibit(
    "a commit publishes a block whose last token is not computed", "#27648, #36052", "P4 P3"
)
class LastTokenPublished(Defect):
    """Known tokens are taken as computed, but the last token's KV is written one step later."""

    def _publish_verified(self, slot: int) -> None:
        known = self.table.num_known
        known[slot] += 1
        super()._publish_verified(slot)
        known[slot] -= 1
