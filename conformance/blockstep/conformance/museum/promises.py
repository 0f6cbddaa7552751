"""Promises: outputs that frames in flight owe, when steps are planned ahead of their answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Methods, Page

PAGE = Page()


def _commit_without_empty_rows(clean: Any) -> Any:
    """A `_commit` that says nothing of requests to which nothing was delivered."""

    def _commit(self: Any, event: Any) -> Any:
        answer = clean._commit(self, event)
        if not hasattr(answer, "rows"):
            return answer
        return replace(answer, rows=tuple(row for row in answer.rows if row.new_token_ids))

    return _commit


def _nothing(clean: Any) -> Any:
    """What `_accept` says when it takes no token."""
    return (), clean._accept.__globals__["_GOES_ON"]


@PAGE.exhibit(
    "the preempted return while frames still owe them tokens",
    "#41190, #48245",
    "P13",
    "P12",
    "P26",
    "P16",
    "P15",
)
def readmitted_with_promises(clean: Any) -> Methods:
    """The position after the known tokens is sampled twice."""

    def _awaits_tokens(self: Any, slot: int) -> bool:
        return False

    return {"_awaits_tokens": _awaits_tokens}


@PAGE.exhibit(
    "without placeholders the preempted return before their token is there", "#48245", "P13", "P26"
)
def readmitted_in_flight_without_placeholders(clean: Any) -> Methods:
    """What holds them up is looked for in a counter that a pipeline of plans does not keep."""

    def _awaits_tokens(self: Any, slot: int) -> bool:
        return bool(self.table.num_output_placeholders[slot])

    return {"_awaits_tokens": _awaits_tokens}


@PAGE.exhibit(
    "a chunk in flight that samples nothing holds the preempted up",
    "#48245 as merged",
    "P15",
    "P16",
    wrong_fix_of="readmitted-with-promises",
)
def held_up_by_a_chunk(clean: Any) -> Methods:
    """Every frame that names the request is waited for."""

    def _awaits_tokens(self: Any, slot: int) -> bool:
        request_id = self.table.requests[slot].request_id
        return any(request_id in frame for frame in self.frames.values())

    return {"_awaits_tokens": _awaits_tokens}


@PAGE.exhibit(
    "preemption forgets what frames in flight owe",
    "#38624",
    "P12",
    "P13",
    "P26",
    wrong_fix_of="readmitted-with-promises",
)
def promises_zeroed(clean: Any) -> Methods:
    """Nothing marks the frames as stale, so they are counted down from zero."""

    def _preempt(self: Any, slot: int) -> None:
        clean._preempt(self, slot)
        self.table.num_output_placeholders[slot] = 0

    return {"_preempt": _preempt}


@PAGE.exhibit(
    "one stale frame is dropped at a preemption",
    "#47900",
    "P13",
    "P26",
    wrong_fix_of="readmitted-with-promises",
)
def one_stale_frame_dropped(clean: Any) -> Methods:
    """Its tokens are lost; the other frames in flight go on as if nothing had happened."""

    def _preempt(self: Any, slot: int) -> None:
        if self.table.num_output_placeholders[slot]:
            self.__dict__.setdefault("_to_drop", set()).add(self.table.requests[slot].request_id)
        clean._preempt(self, slot)

    def _accept(self: Any, slot: int, tokens: Any) -> Any:
        request_id = self.table.requests[slot].request_id
        to_drop: set[str] = getattr(self, "_to_drop", set())
        if request_id not in to_drop:
            return clean._accept(self, slot, tokens)
        to_drop.remove(request_id)
        return _nothing(clean)

    return {
        "_preempt": _preempt,
        "_accept": _accept,
        "_commit": _commit_without_empty_rows(clean),
    }


@PAGE.exhibit(
    "tokens of which none is awaited are taken for noise",
    "vllm-gaudi #1794, #1803",
    "P13",
    "P26",
    "P12",
    wrong_fix_of="readmitted-with-promises",
)
def stale_tokens_taken_for_noise(clean: Any) -> Methods:
    """After a preemption none is awaited, so all that frames in flight sampled is lost."""

    def _preempt(self: Any, slot: int) -> None:
        clean._preempt(self, slot)
        self.table.num_output_placeholders[slot] = 0

    def _keep_promise(self: Any, slot: int, num_drafts: int) -> None:
        self._is_noise = self.table.num_output_placeholders[slot] == 0
        if not self._is_noise:
            clean._keep_promise(self, slot, num_drafts)

    def _accept(self: Any, slot: int, tokens: Any) -> Any:
        is_noise = self.async_scheduling and self._is_noise
        return _nothing(clean) if is_noise else clean._accept(self, slot, tokens)

    return {
        "_preempt": _preempt,
        "_keep_promise": _keep_promise,
        "_accept": _accept,
        "_commit": _commit_without_empty_rows(clean),
    }


@PAGE.exhibit(
    "a reset with nothing in flight eats a token", "#42043, #42117", "P13", "P12", "P10", "P26"
)
def reset_eats_a_token(clean: Any) -> Methods:
    """The first token after it is dropped as stale, and stays owed for ever."""

    def _reset(self: Any, reset_running_requests: bool) -> Any:
        if reset_running_requests and self.async_scheduling and not self.frames:
            requests = self.table.requests
            self._stale = {requests[slot].request_id for slot in self.running}
        return clean._reset(self, reset_running_requests)

    def _keep_promise(self: Any, slot: int, num_drafts: int) -> None:
        if self.table.requests[slot].request_id not in getattr(self, "_stale", ()):
            clean._keep_promise(self, slot, num_drafts)

    def _accept(self: Any, slot: int, tokens: Any) -> Any:
        request_id = self.table.requests[slot].request_id
        stale: set[str] = getattr(self, "_stale", set())
        if request_id not in stale:
            return clean._accept(self, slot, tokens)
        stale.remove(request_id)
        return _nothing(clean)

    return {
        "_reset": _reset,
        "_keep_promise": _keep_promise,
        "_accept": _accept,
        "_commit": _commit_without_empty_rows(clean),
    }


@PAGE.exhibit("draft placeholders outlive a step without a row", "#46899", "P24")
def placeholders_after_a_gap(clean: Any) -> Methods:
    """They are dispatched as drafts, and the worker has none."""

    def _drop_unused_placeholders(self: Any, frame_id: int) -> None:
        return None

    return {"_drop_unused_placeholders": _drop_unused_placeholders}


@PAGE.exhibit(
    "a step is planned past the last token", "seed 001 Async scheduling skip-ahead", "P13", "P15"
)
def no_skip_ahead(clean: Any) -> Methods:
    """The token that ends the request is in flight, and one more is asked for."""

    def _is_past_max_tokens(self: Any, slot: int) -> bool:
        return False

    return {"_is_past_max_tokens": _is_past_max_tokens}


@PAGE.exhibit("rejected drafts stay promised", "seed 001 Rejection Clawback", "P12", "P14", "P26")
def rejected_stay_promised(clean: Any) -> Methods:
    """The count grows with each rejection, and the next step starts too far ahead."""

    def _commit(self: Any, event: Any) -> Any:
        answers = {row.request_id: row.token_ids for row in event.sampled}
        self._num_sampled = {name: len(tokens) for name, tokens in answers.items()}
        return clean._commit(self, event)

    def _keep_promise(self: Any, slot: int, num_drafts: int) -> None:
        accepted = self._num_sampled[self.table.requests[slot].request_id] - 1
        clean._keep_promise(self, slot, min(accepted, num_drafts))

    return {"_commit": _commit, "_keep_promise": _keep_promise}


@PAGE.exhibit("a stale frame rolls the preempted back", "#48245", "P12", "P14")
def stale_frame_rolls_back(clean: Any) -> Methods:
    """Nothing of it is computed any more, and its count falls below zero."""

    def _roll_back(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
        before = self.table.num_computed[slot]
        clean._roll_back(self, slot, drafts, tokens)
        self.table.num_computed[slot] = before - len(drafts) + len(tokens) - 1

    return {"_roll_back": _roll_back}


@PAGE.exhibit(
    "a later frame is answered first",
    "rule: the oldest frame is answered first",
    "P13",
    "P18",
    "P26",
)
def answered_out_of_order(clean: Any) -> Methods:
    """Its tokens are stored before those that they follow."""

    def _is_oldest(self: Any, frame_id: int) -> bool:
        return True

    return {"_is_oldest": _is_oldest}


@PAGE.exhibit("a commit publishes the token that has not run", "#27648, #36052", "P4", "P3")
def last_token_published(clean: Any) -> Methods:
    """What is known is taken for what is written; the last token's KV comes a step later."""

    def _publish_verified(self: Any, slot: int) -> None:
        known = self.table.num_known
        known[slot] += 1
        clean._publish_verified(self, slot)
        known[slot] -= 1

    return {"_publish_verified": _publish_verified}
