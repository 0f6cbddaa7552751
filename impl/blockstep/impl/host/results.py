"""Results: sampled tokens are checked, appended and delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from blockstep.impl.host.arrivals import Arrivals
from blockstep.impl.host.masks import Masks
from blockstep.impl.host.promises import Promises
from blockstep.impl.host.turns import Turns
from blockstep.impl.refusals import answer_problem, frame_out_of_order, unknown_frame
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Commit,
    FinishReason,
    FrameId,
    OutputRow,
    Outputs,
    Rejected,
    RequestId,
    Status,
    TokenIds,
)

Verdict: TypeAlias = tuple[FinishReason | None, int | None]
"""The finish reason, and the stop token if one was sampled."""
_NOT_CUT: Final[Mapping[RequestId, TokenIds]] = {}
_GOES_ON: Final[Verdict] = (None, None)


class Results(Promises, Masks, Arrivals, Turns):
    """Takes Commit: all rows are checked before anything changes."""

    def _commit(self, event: Commit) -> Outputs | Rejected:
        frame_id = event.frame_id
        frame = self._find_frame(frame_id)
        if isinstance(frame, Rejected):
            return frame
        answers = {row.request_id: row.token_ids for row in event.sampled}
        cut = self.verifiable.get(frame_id, _NOT_CUT) if self.verifiable else _NOT_CUT
        verified = {**frame, **cut} if cut else frame
        if self.dropped:
            verified = {**verified, **self.dropped.get(frame_id, _NOT_CUT)}
        problem = self._result_problem(frame_id, len(event.sampled), verified, answers)
        if problem is None and self.matchers:
            problem = self._grammar_result_problem(frame_id, answers)
        if problem is not None:
            return problem
        if self.transfers is None:
            rows = self._deliver_rows(frame, answers, cut)
        else:
            self._free_deferred(self.transfers, frame_id)
            failed = self._take_invalid(self.transfers, event.transfers, frame_id)
            rows = self._deliver_rows(frame, answers, cut) + self._end_failed(failed)
            self._take_finished(self.transfers, event.transfers)
        self._close_frame(frame_id)
        return Outputs(tuple(rows), self._tell())

    def _find_frame(self, frame_id: FrameId) -> Mapping[RequestId, TokenIds | None] | Rejected:
        """Return the frame if it is the next to be committed."""
        frame = self.frames.get(frame_id)
        if frame is None:
            return unknown_frame(frame_id, self.frames)
        if not self._is_oldest(frame_id):
            return frame_out_of_order(frame_id, self.frames)
        return frame

    def _deliver_rows(
        self,
        frame: Mapping[RequestId, TokenIds | None],
        answers: Mapping[RequestId, TokenIds],
        cut: Mapping[RequestId, TokenIds] = _NOT_CUT,
    ) -> list[OutputRow]:
        """Append and deliver the tokens, row by row; `cut`: the verified drafts, if not all
        were."""
        slot_of, promising = self.table.slot_of, self.async_scheduling
        rows: list[OutputRow] = []
        for request_id, drafts in frame.items():
            slot, tokens = slot_of.get(request_id), answers[request_id]
            if slot is None or drafts is None:
                continue  # aborted since, not sampling, or after the stop of a session
            if promising:
                self._keep_promise(slot, len(drafts or ()))
            if drafts:
                self._roll_back(slot, drafts, tokens)
                if request_id in cut:
                    self.drafts_scheduled -= len(drafts) - len(cut[request_id])
            rows.append(self._deliver(slot, tokens))
        return rows

    def _is_oldest(self, frame_id: FrameId) -> bool:
        """Return whether no frame in flight is older: its tokens are delivered next (P13)."""
        return next(iter(self.frames)) == frame_id

    def _result_problem(
        self,
        frame_id: FrameId,
        num_answers: int,
        frame: Mapping[RequestId, TokenIds | None],
        answers: dict[RequestId, TokenIds],
    ) -> Rejected | None:
        """Return why the sampled rows do not fit the frame, or None."""
        return answer_problem(frame_id, num_answers, frame, answers, self._are_among)

    def _are_among(self, drafts: TokenIds, accepted: TokenIds) -> bool:
        """Return whether `accepted` can be the accepted drafts of a row: the first ones.

        Under asynchronous scheduling drafts are placeholders, and any token fits one.
        """
        return accepted == drafts[: len(accepted)] or DRAFT_PLACEHOLDER in drafts

    def _roll_back(self, slot: int, drafts: TokenIds, tokens: TokenIds) -> None:
        """Uncompute the rejected drafts (P14).

        computed before | known | accepted | rejected |
                                           ^ computed now
        """
        accepted = len(tokens) - 1
        # It may have been preempted meanwhile; then nothing is computed anyway.
        if self.table.statuses[slot] is Status.RUNNING:
            self.table.num_computed[slot] -= len(drafts) - accepted
        self.drafts_scheduled += len(drafts)
        self.drafts_accepted += accepted

    def _deliver(self, slot: int, tokens: TokenIds) -> OutputRow:
        """Append the tokens up to the one that finishes the request, and finish it there (P13)."""
        request_id = self.table.requests[slot].request_id
        num_cached_tokens = self.table.num_cached_tokens[slot]  # not -1: it has been admitted
        delivered, (reason, stop_token_id) = self._accept(slot, tokens)
        if self.matchers:
            self._advance_grammar(request_id, delivered)
        if self.async_scheduling:
            self._publish_verified(slot)
        if reason is not None and not (self.sessions and self._rest(slot)):
            if self.pins is not None:
                self._end_turn(self.pins, slot)
            self._finish(slot)
        return OutputRow(request_id, delivered, reason, stop_token_id, num_cached_tokens)

    def _accept(self, slot: int, tokens: TokenIds) -> tuple[TokenIds, Verdict]:
        """Append tokens one by one; those after the one that finishes the request are discarded."""
        lineage, num_known = self.table.lineages[slot], self.table.num_known
        for count, token in enumerate(tokens, 1):
            lineage.append(token)
            num_known[slot] += 1
            verdict = self._stop_verdict(slot, token)
            if verdict is not _GOES_ON:
                return tokens[:count], verdict
        return tokens, _GOES_ON

    def _stop_verdict(self, slot: int, token: int) -> Verdict:
        """Return whether the token just appended finishes its request.

        Before `min_tokens` only the length limits do (ours; 0.19.1 masks the stop tokens as well).
        """
        table = self.table
        may_stop = table.is_watched[slot] and self._has_min_tokens(slot)
        if may_stop:
            request = table.requests[slot]
            if token == request.eos_token_id:
                return (FinishReason.STOP, None)
            if token in request.stop_token_ids:
                return (FinishReason.STOP, token)
        if table.num_known[slot] >= table.max_known[slot]:
            return (FinishReason.LENGTH, None)
        if may_stop and self._repeats(slot):
            return (FinishReason.REPETITION, None)
        return _GOES_ON

    def _has_min_tokens(self, slot: int) -> bool:
        return self.table.num_outputs(slot) >= self.table.requests[slot].min_tokens

    def _repeats(self, slot: int) -> bool:
        """Return whether the outputs end with `min_count` copies of one pattern."""
        detection = self.table.requests[slot].repetition_detection
        if detection is None:
            return False
        tokens, num_outputs = self.table.lineages[slot].tokens, self.table.num_outputs(slot)
        longest = min(detection.max_pattern_size, num_outputs // detection.min_count)
        for size in range(detection.min_pattern_size, longest + 1):
            # Copies of a pattern: each token equals the one a pattern's length before it.
            if tokens[-1] != tokens[-1 - size]:
                continue
            tail = tokens[-size * detection.min_count :]
            if tail[size:] == tail[:-size]:
                return True
        return False
