"""Commits: a frame's model output, taken by machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from blockstep.impl.array_plans import ArrayOutputs
from blockstep.impl.host import state as c
from blockstep.impl.host.encoder_inputs import EncoderInputs
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.kv_transfers import Transfers
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.results import FITS, check_answer, commit_step, take_rows
from blockstep.impl.host.state import Int32s
from blockstep.impl.rejections import bad_result
from blockstep.spec.vocabulary import FrameId, KVTransfers, Rejected, RequestId

_NO_COUNTS: Final = np.empty(0, np.int32)


EndTurn: TypeAlias = Callable[[int], None]
"""Ends the request with this index, which a commit finishes; its blocks may stay held."""
NoteEnds: TypeAlias = Callable[[Frame, Int32s, int, ArrayOutputs], None]
"""Records the requests that a commit has finished, listed in `scratch`: the frame, [4, rows that
deliver] (row, tokens, cached tokens and verdict), the number of requests, and the outputs."""


@dataclass(eq=False)
class Commits:
    """Takes the model output of frames; a manager is None if the config lacks it."""

    end_turn: EndTurn
    close: Callable[[FrameId], None]
    note_ends: NoteEnds
    requests: Requests
    masks: Masks
    encodings: EncoderInputs | None
    transfers: Transfers | None
    failed: list[RequestId] = field(default_factory=list)
    """Requests that fail by their load in the commit that was taken last; not ended by it."""
    preempted: list[int] = field(default_factory=list)
    """Requests that it preempted, as their loads have failed."""

    def take(
        self,
        frame_id: FrameId,
        frame: Frame,
        token_ids: Int32s,
        counts: Int32s | None,
        report: KVTransfers,
    ) -> ArrayOutputs | Rejected:
        """Commit the oldest frame, or change nothing if the model output does not fit it."""
        if self.masks.matchers:
            lengths = frame.planned[c.PLAN_SAMPLES] if counts is None else counts
            problem = self.masks.find_problem(frame_id, frame, token_ids, lengths)
            if problem is not None:
                return bad_result(frame_id, problem)
        given = (token_ids, _NO_COUNTS if counts is None else counts, counts is not None)
        self.requests.reserve_nodes(len(token_ids), frame.owners.shape[1])
        last_answered = c.NONE
        if self.transfers is not None:
            s = self.requests.state
            last_answered = int(s.scalars[c.LAST_ANSWERED])
            if self.transfers.has_news(frame_id, report):
                code, detail = check_answer(s, frame.planned, frame.ids, *given)
                if code != FITS:
                    return bad_result(frame_id, frame.describe(code, detail, token_ids))
                self._begin(self.transfers, frame_id, report)
            s.scalars[c.LAST_ANSWERED] = frame_id
        code, detail, results, kept, num_rows, num_tokens, num_ended, ending = commit_step(
            self.requests.state, frame.owners, frame.planned, frame.ids, *given
        )
        if code != FITS:
            self.requests.state.scalars[c.LAST_ANSWERED] = last_answered
            return bad_result(frame_id, frame.describe(code, detail, token_ids))
        while ending != c.NONE:
            self.end_turn(ending)
            s = self.requests.state
            ending = take_rows(s, frame.owners, frame.planned, *given, results, kept)
            numbers = s.scalars[[c.NUM_DELIVERING, c.NUM_DELIVERED, c.NUM_ENDED]]
            num_rows, num_tokens, num_ended = numbers.tolist()
        names, kept = frame.names, kept[:num_tokens]
        if num_rows < results.shape[1]:
            results = results[:, :num_rows]
            names = names.take(results[0])
        if self.masks.matchers:
            self.masks.advance(frame_id, frame, results, kept)
        lengths = None if len(kept) == num_rows else results[1]
        outputs = ArrayOutputs(names, kept, lengths, results[2], {})
        self.close(frame_id)
        if num_ended:
            self.note_ends(frame, results, num_ended, outputs)
        return outputs

    def _begin(self, transfers: Transfers, frame_id: FrameId, report: KVTransfers) -> None:
        """Take what comes before the rows of a frame, if there is a store."""
        self.failed, self.preempted = transfers.begin_commit(frame_id, report)
        if self.encodings is not None:
            for slot in self.preempted:
                self.encodings.cache.drop(self.requests.requests[slot])
