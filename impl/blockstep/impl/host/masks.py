"""Masks: the tokens that each row of a frame may sample, by the grammar of its request."""

from __future__ import annotations

from collections.abc import Mapping

from blockstep.impl.grammars import Matcher
from blockstep.impl.host.core import Core
from blockstep.impl.refusals import bad_result, grammar_behind, grammar_problem, mask_problem
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Ack,
    FinishReason,
    FrameId,
    GrammarBitmask,
    GrammarOutput,
    GrammarRow,
    OutputRow,
    Outputs,
    Rejected,
    RequestId,
    TokenIds,
)


class Masks(Core):
    """Makes the bitmasks of frames in flight, and checks sampled tokens against grammars (P23)."""

    def _set_grammar_ready(self, request_id: RequestId) -> Ack | Rejected:
        slot = self.table.slot_of.get(request_id)
        request = None if slot is None else self.table.requests[slot]
        problem = grammar_problem(request, request_id)
        if problem is not None:
            return problem
        assert slot is not None, "a request without a problem has a slot"
        self.table.grammar_ready[slot] = True
        return Ack()

    def _fail_grammar(self, request_id: RequestId) -> Outputs | Rejected:
        """Finish a request whose grammar failed, in any status; tokens in flight are discarded."""
        slot = self.table.slot_of.get(request_id)
        request = None if slot is None else self.table.requests[slot]
        problem = grammar_problem(request, request_id, "failed")
        if problem is not None:
            return problem
        assert slot is not None, "a request without a problem has a slot"
        num_cached_tokens = max(self.table.num_cached_tokens[slot], 0)
        self._finish(slot)
        row = OutputRow(request_id, (), FinishReason.ERROR, num_cached_tokens=num_cached_tokens)
        return Outputs((row,))

    def _make_mask(self, event: GrammarBitmask) -> GrammarOutput | Rejected:
        """Return the bitmask of a frame, and its drafts cut at the first that the grammar
        forbids."""
        problem = mask_problem(self.config, event, self.frames)
        if problem is not None:
            return problem
        frame = self.frames[event.frame_id]
        masked = {name: row for name, row in frame.items() if self._is_masked(name, row)}
        behind = [name for name in masked if self._samples_before(event.frame_id, name)]
        if behind:
            return grammar_behind(event.frame_id, behind)
        told = {row.request_id: row.token_ids for row in event.drafts}
        rows: list[GrammarRow] = []
        for name, drafts in masked.items():
            matcher, planned = self.matchers[name], drafts or ()
            if self.async_scheduling:
                verifiable = self.verifiable.setdefault(event.frame_id, {})
                known = told.get(name, verifiable.get(name, ()))[: len(planned)]
                valid = verifiable[name] = self._cut_drafts(matcher, known)
            else:
                valid = self._cut_drafts(matcher, planned)
            padded = (*valid, *(DRAFT_PLACEHOLDER,) * (len(planned) - len(valid)))
            rows.append(GrammarRow(name, matcher.list_masks(padded), padded))
        return GrammarOutput(tuple(rows))

    def _tell_masks(self, frame: Mapping[RequestId, TokenIds | None]) -> tuple[bool, bool]:
        """Return, for a frame that has no placeholders yet, whether its bitmask has rows, and
        whether a grammar is behind one of them because older frames have placeholders."""
        table = self.table
        promised = [
            table.num_output_placeholders[table.slot_of[name]]
            for name, drafts in frame.items()
            if self._is_masked(name, drafts)
        ]
        return bool(promised), any(promised)

    def _is_masked(self, request_id: RequestId, drafts: TokenIds | None) -> bool:
        """Return whether a row of a frame in flight has a bitmask: it samples, and has a
        grammar."""
        return drafts is not None and request_id in self.matchers

    def _samples_before(self, frame_id: FrameId, request_id: RequestId) -> bool:
        """Return whether an older frame samples for a request: its grammar is behind this frame."""
        return any(
            frame.get(request_id) is not None
            for older, frame in self.frames.items()
            if older < frame_id
        )

    def _cut_drafts(self, matcher: Matcher, drafts: TokenIds) -> TokenIds:
        """Return the drafts that may be verified: the leading ones that the grammar accepts."""
        return matcher.cut(drafts)

    def _grammar_result_problem(
        self, frame_id: FrameId, answers: Mapping[RequestId, TokenIds]
    ) -> Rejected | None:
        """Return why a grammar forbids the sampled tokens, or None. Discarded rows are not
        checked."""
        dropped = self.dropped.get(frame_id, {})
        for name, tokens in answers.items():
            matcher = None if name in dropped else self.matchers.get(name)
            if matcher is not None and matcher.follow(tokens) is None:
                rule = f"has {tokens}, of which its grammar forbids one"
                return bad_result(frame_id, f"{name!r} {rule}; sample by the mask")
        return None

    def _advance_grammar(self, request_id: RequestId, delivered: TokenIds) -> None:
        """Advance the request's grammar by the delivered tokens, the last one included."""
        matcher = self.matchers.get(request_id)
        if matcher is not None:
            position = matcher.follow(delivered)
            assert position is not None, "a commit with forbidden tokens is rejected"
            matcher.position = position
