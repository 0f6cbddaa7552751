"""Commits: a frame's model output, taken by machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

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


class Committed(NamedTuple):
    """What a commit has done in machine code."""

    outputs: ArrayOutputs
    told: Int32s
    """[4, rows that deliver]: row, tokens, cached tokens and verdict."""
    num_ended: int
    """Rows that finish; they are listed in `scratch`."""
    failed: list[RequestId]
    """Requests that fail by their load; they have not ended yet."""
    preempted: list[int]
    """Requests that were preempted, as their loads have failed."""


class Commits:
    """Takes the model output of frames; a manager is None if the config lacks it."""

    def __init__(
        self,
        requests: Requests,
        masks: Masks,
        encodings: Encodings | None,
        transfers: Transfers | None,
    ) -> None:
        self.requests = requests
        self.masks = masks
        self.encodings = encodings
        self.transfers = transfers

    def take(
        self,
        frame_id: FrameId,
        frame: Frame,
        token_ids: Int32s,
        counts: Int32s | None,
        report: KVTransfers,
        end_turn: Callable[[int], None],
    ) -> Committed | Rejected:
        """Commit the oldest frame, or change nothing if the model output does not fit it.

        `end_turn`: ends a request whose blocks may stay held.
        """
        if self.masks.matchers:
            lengths = frame.planned[TOLD_SAMPLES] if counts is None else counts
            problem = self.masks.find_problem(frame_id, frame, token_ids, lengths)
            if problem is not None:
                return bad_result(frame_id, problem)
        given = (token_ids, _NO_COUNTS if counts is None else counts, counts is not None)
        self.requests.reserve_nodes(len(token_ids), frame.who.shape[1])
        failed, preempted = list[RequestId](), list[int]()
        if self.transfers is not None:
            s = self.requests.state
            code, detail = check_answer(s, frame.planned, frame.ids, *given)
            if code != FITS:
                return bad_result(frame_id, frame.describe(code, detail, token_ids))
            failed, preempted = self._begin(self.transfers, frame_id, report)
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
            return bad_result(frame_id, frame.describe(code, detail, token_ids))
        while ending != NONE:
            end_turn(ending)
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
        return Committed(outputs, told, num_ended, failed, preempted)

    def _begin(
        self, transfers: Transfers, frame_id: FrameId, report: KVTransfers
    ) -> tuple[list[RequestId], list[int]]:
        """Take what comes before the rows of a frame, if there is a store."""
        failed, preempted = transfers.begin_commit(frame_id, report)
        if self.encodings is not None:
            for slot in preempted:
                self.encodings.cache.drop(self.requests.requests[slot])
        return failed, preempted
