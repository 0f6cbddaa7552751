"""Promises: outputs that frames in flight owe, when steps are planned ahead of their answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


class _DropsTokens(Defect):
    """Takes no token of a row that is stale, and says nothing of its request."""

    _to_drop: frozenset[str] = frozenset()
    """Requests of which one row more is stale."""

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
    "the preempted return while frames still owe them tokens",
    "#41190, #48245",
    "P13 P12 P26 P16 P15",
)
class ReadmittedWithPromises(Defect):
    """The position after the known tokens is sampled twice."""

    def _awaits_tokens(self, slot: int) -> bool:
        return False


@PAGE.exhibit(
    "without placeholders the preempted return before their token is there", "#48245", "P13 P26"
)
class ReadmittedInFlightWithoutPlaceholders(Defect):
    """What holds them up is looked for in a counter that a pipeline of plans does not keep."""

    def _awaits_tokens(self, slot: int) -> bool:
        return bool(self.table.num_output_placeholders[slot])


@PAGE.exhibit(
    "a chunk in flight that samples nothing holds the preempted up",
    "#48245 as merged",
    "P15 P16",
    wrong_fix_of="readmitted-with-promises",
    invisible="efficiency: somebody is admitted a step later",
)
class HeldUpByAChunk(Defect):
    """Every frame that names the request is waited for."""

    def _awaits_tokens(self, slot: int) -> bool:
        request_id = self.table.requests[slot].request_id
        return any(request_id in frame for frame in self.frames.values())


@PAGE.exhibit(
    "preemption forgets what frames in flight owe",
    "#38624",
    "P12 P13 P26",
    wrong_fix_of="readmitted-with-promises",
)
class PromisesZeroed(Defect):
    """Nothing marks the frames as stale, so they are counted down from zero."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self.table.num_output_placeholders[slot] = 0


@PAGE.exhibit(
    "one stale frame is dropped at a preemption",
    "#47900",
    "P13 P26",
    wrong_fix_of="readmitted-with-promises",
)
class OneStaleFrameDropped(_DropsTokens):
    """Its tokens are lost; the other frames in flight go on as if nothing had happened."""

    def _preempt(self, slot: int) -> None:
        if self.table.num_output_placeholders[slot]:
            self._to_drop |= {self.table.requests[slot].request_id}
        super()._preempt(slot)


@PAGE.exhibit(
    "tokens of which none is awaited are taken for noise",
    "vllm-gaudi #1794, #1803",
    "P13 P26 P12",
    wrong_fix_of="readmitted-with-promises",
)
class StaleTokensTakenForNoise(_DropsTokens):
    """After a preemption none is awaited, so all that frames in flight sampled is lost."""

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self.table.num_output_placeholders[slot] = 0

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        self._is_noise = self.table.num_output_placeholders[slot] == 0
        if not self._is_noise:
            super()._keep_promise(slot, num_drafts)

    def _is_stale(self, request_id: str) -> bool:
        return bool(self.async_scheduling and self._is_noise)


@PAGE.exhibit("a reset with nothing in flight eats a token", "#42043, #42117", "P13 P12 P10 P26")
class ResetEatsAToken(_DropsTokens):
    """The first token after it is dropped as stale, and stays owed for ever."""

    def _reset(self, reset_running_requests: bool) -> Any:
        if reset_running_requests and self.async_scheduling and not self.frames:
            requests = self.table.requests
            self._to_drop = frozenset(requests[slot].request_id for slot in self.running)
        return super()._reset(reset_running_requests)

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        if self.table.requests[slot].request_id not in self._to_drop:
            super()._keep_promise(slot, num_drafts)


@PAGE.exhibit("draft placeholders outlive a step without a row", "#46899", "P24")
class PlaceholdersAfterAGap(Defect):
    """They are dispatched as drafts, and the worker has none."""

    def _drop_unused_placeholders(self, frame_id: int) -> None:
        return None


@PAGE.exhibit(
    "a step is planned past the last token",
    "vLLM V1: Async scheduling skip-ahead",
    "P13 P15",
    invisible="efficiency: a row runs whose token is thrown away",
)
class NoSkipAhead(Defect):
    """The token that ends the request is in flight, and one more is asked for."""

    def _is_past_max_tokens(self, slot: int) -> bool:
        return False


@PAGE.exhibit("rejected drafts stay promised", "vLLM V1: Rejection Clawback", "P12 P14 P26")
class RejectedStayPromised(Defect):
    """The count grows with each rejection, and the next step starts too far ahead."""

    def _commit(self, event: Any) -> Any:
        answers = {row.request_id: row.token_ids for row in event.sampled}
        self._num_sampled = {name: len(tokens) for name, tokens in answers.items()}
        return super()._commit(event)

    def _keep_promise(self, slot: int, num_drafts: int) -> None:
        accepted = self._num_sampled[self.table.requests[slot].request_id] - 1
        super()._keep_promise(slot, min(accepted, num_drafts))


@PAGE.exhibit(
    "a stale frame rolls the preempted back",
    "#48245",
    "P12 P14",
    invisible_if_hidden="books: the count is set anew when its request is admitted again",
)
class StaleFrameRollsBack(Defect):
    """Nothing of it is computed any more, and its count falls below zero."""

    def _roll_back(self, slot: int, drafts: Any, tokens: Any) -> None:
        before = self.table.num_computed[slot]
        super()._roll_back(slot, drafts, tokens)
        self.table.num_computed[slot] = before - len(drafts) + len(tokens) - 1


@PAGE.exhibit(
    "a later frame is answered first", "rule: the oldest frame is answered first", "P13 P18 P26"
)
class AnsweredOutOfOrder(Defect):
    """Its tokens are stored before those that they follow."""

    def _is_oldest(self, frame_id: int) -> bool:
        return True


@PAGE.exhibit("a commit publishes the token that has not run", "#27648, #36052", "P4 P3")
class LastTokenPublished(Defect):
    """What is known is taken for what is written; the last token's KV comes a step later."""

    def _publish_verified(self, slot: int) -> None:
        known = self.table.num_known
        known[slot] += 1
        super()._publish_verified(slot)
        known[slot] -= 1
