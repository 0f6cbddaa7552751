"""Commits: a frame's model output, taken by machine code."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from blockstep.impl.arrays import ArrayOutputs
from blockstep.impl.compiled.encodings import Encodings
from blockstep.impl.compiled.frames import Frame
from blockstep.impl.compiled.masks import Masks
from blockstep.impl.compiled.requests import Requests
from blockstep.impl.compiled.results import (
    FITS,
    LACKS_MARKS,
    check_answer,
    commit_step,
    take_rows,
)
from blockstep.impl.compiled.state import (
    LAST_ANSWERED,
    NONE,
    NUM_DELIVERED,
    NUM_DELIVERING,
    NUM_ENDED,
    TOLD_SAMPLES,
    Int32s,
)
from blockstep.impl.compiled.transfers import Transfers
from blockstep.impl.refusals import bad_result
from blockstep.spec.vocabulary import FrameId, KVTransfers, Rejected, RequestId

_NO_COUNTS: Final = np.empty(0, np.int32)
_NO_MARKS: Final = np.empty(0, np.uint8)


class Ending(Protocol):
    """Ends requests, for a commit."""

    def end_turn(self, slot: int) -> None:
        """End a request that a commit finishes, whose blocks may stay held."""
        ...

    def note_ends(self, frame: Frame, told: Int32s, num_ended: int, outputs: ArrayOutputs) -> None:
        """Record the requests that a commit has finished; they are listed in `scratch`.

        `told`: [4, rows that deliver]: row, tokens, cached tokens and verdict.
        """
        ...


class Commits:
    """Takes the model output of frames; a manager is None if the config lacks it."""

    def __init__(
        self,
        ending: Ending,
        requests: Requests,
        masks: Masks,
        encodings: Encodings | None,
        transfers: Transfers | None,
    ) -> None:
        self.ending = ending
        self.requests = requests
        self.masks = masks
        self.encodings = encodings
        self.transfers = transfers
        self.failed: list[RequestId] = []
        """Requests that fail by their load in the commit that was taken last; not ended by it."""
        self.preempted: list[int] = []
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
            lengths = frame.planned[TOLD_SAMPLES] if counts is None else counts
            problem = self.masks.find_problem(frame_id, frame, token_ids, lengths)
            if problem is not None:
                return bad_result(frame_id, problem)
        given = (token_ids, _NO_COUNTS if counts is None else counts, counts is not None)
        self.requests.reserve_nodes(len(token_ids), frame.who.shape[1])
        last_answered = NONE
        if self.transfers is not None:
            s = self.requests.state
            last_answered = int(s.scalars[LAST_ANSWERED])
            if self.transfers.has_news(frame_id, report):
                code, detail = check_answer(s, frame.planned, frame.ids, *given)
                if code != FITS:
                    return bad_result(frame_id, frame.describe(code, detail, token_ids))
                self._begin(self.transfers, frame_id, report)
            s.scalars[LAST_ANSWERED] = frame_id
        marks, is_marked = _NO_MARKS, False
        while True:
            code, detail, told, kept, num_rows, num_tokens, num_ended, ending = commit_step(
                self.requests.state, frame.who, frame.planned, frame.ids, *given, marks, is_marked
            )
            if code != LACKS_MARKS:
                break
            marks = self.requests.mark(frame.who, frame.planned[TOLD_SAMPLES], token_ids, counts)
            is_marked = True
        if code != FITS:
            self.requests.state.scalars[LAST_ANSWERED] = last_answered
            return bad_result(frame_id, frame.describe(code, detail, token_ids))
        while ending != NONE:
            self.ending.end_turn(ending)
            s = self.requests.state
            ending = take_rows(s, frame.who, frame.planned, *given, marks, told, kept)
            numbers = s.scalars[[NUM_DELIVERING, NUM_DELIVERED, NUM_ENDED]]
            num_rows, num_tokens, num_ended = numbers.tolist()
        names, kept = frame.names, kept[:num_tokens]
        if num_rows < told.shape[1]:
            told = told[:, :num_rows]
            names = names.take(told[0])
        if self.masks.matchers:
            self.masks.advance(frame_id, frame, told, kept)
        lengths = None if len(kept) == num_rows else told[1]
        outputs = ArrayOutputs(names, kept, lengths, told[2], {})
        if num_ended:
            self.ending.note_ends(frame, told, num_ended, outputs)
        return outputs

    def _begin(self, transfers: Transfers, frame_id: FrameId, report: KVTransfers) -> None:
        """Take what comes before the rows of a frame, if there is a store."""
        self.failed, self.preempted = transfers.begin_commit(frame_id, report)
        if self.encodings is not None:
            for slot in self.preempted:
                self.encodings.cache.drop(self.requests.requests[slot])
