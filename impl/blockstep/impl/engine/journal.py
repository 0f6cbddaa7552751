"""Journal: the log of the steps of a burst, written on the device and read by the host at a fence.

    line of a launch   | slot | tokens | samples | sampled token | delivered | verdict | cached |
                         ------- the plan ------   -- its pass --   -- the commit before it ----

A burst launches the scheduler once for each plan, and once more for each frame that is still in
flight after the last plan. A launch may commit the oldest frame, and may make a plan. A forward
pass writes the tokens that it sampled into the line of its plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from blockstep.impl.device import layout
from blockstep.impl.device.frames import build_output_row
from blockstep.impl.engine.errors import EngineError
from blockstep.impl.engine.sampler import NO_TOKEN
from blockstep.spec.vocabulary import FrameId, Outputs, RequestId, RowTokens

PLAN_COLUMNS = 3
"""Request index, number of tokens, and whether the row samples."""
TOKEN_COLUMN = PLAN_COLUMNS
RECORD_COLUMN = PLAN_COLUMNS + 1
"""The first column of the record of a commit."""
COLUMNS = RECORD_COLUMN + layout.NUM_RECORD_COLUMNS


class RowRan(NamedTuple):
    """A request's row in a plan."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlanRan:
    """A plan that was made and run in a burst; an empty one had nothing to run."""

    frame_id: FrameId
    rows: tuple[RowRan, ...]


@dataclass(frozen=True, slots=True)
class CommitRan:
    """A commit of a burst."""

    frame_id: FrameId
    sampled: tuple[RowTokens, ...]
    """The model output: one row for each row of the plan, without tokens if the row does not
    sample."""
    outputs: Outputs
    """The outputs that the commit delivered."""


StepRan: TypeAlias = PlanRan | CommitRan


@dataclass(slots=True)
class Frame:
    """A plan that is not committed yet, while the journal is read."""

    frame_id: FrameId
    slots: list[int]
    names: list[RequestId]
    samples: list[int]
    tokens: list[int]


class JournalReader:
    """Reads the lines of one burst.

    Args:
        lines: `[num_launches, COLUMNS, num_rows]` int32; the last launches only commit.
        names: the request at each index, at the beginning of the burst.
        num_frames: maximum of frames in flight.
    """

    def __init__(self, lines: np.ndarray, names: Mapping[int, RequestId], num_frames: int) -> None:
        self.names, self._lines, self._num_frames = names, lines, num_frames
        self.ended: list[tuple[int, RequestId]] = []
        """Index and id of each request that finished."""
        self.unreported: set[RequestId] = set()
        """Requests that finished after the last plan, so that no plan has listed them."""
        self.last_names: tuple[RequestId, ...] = ()
        """Requests of the last plan."""
        self._flight: deque[Frame] = deque()

    def read(self, num_plans: int, first_frame_id: FrameId) -> list[StepRan]:
        """Return plans and commits, in order.

        Raises:
            EngineError: a row has sampled no token because the logits are not finite.
        """
        steps: list[StepRan] = []
        is_empty = False
        for number in range(num_plans):
            # In the order of the kernel: see `commit_oldest`.
            if self._flight and (is_empty or len(self._flight) == self._num_frames):
                steps.append(self._commit(number))
            plan = self._plan(number, first_frame_id + number)
            steps.append(plan)
            is_empty = not plan.rows
        self.unreported.clear()
        while self._flight:
            steps.append(self._commit(num_plans))
            num_plans += 1
        return steps

    def _plan(self, number: int, frame_id: FrameId) -> PlanRan:
        line = self._lines[number]
        count = int(np.count_nonzero(line[1]))
        slots, lengths, samples, tokens = line[: TOKEN_COLUMN + 1, :count].tolist()
        names = [self.names[slot] for slot in slots]
        if NO_TOKEN in tokens and any(
            sampled and token == NO_TOKEN for sampled, token in zip(samples, tokens, strict=True)
        ):
            raise EngineError("logits are not finite: the model overflows its dtype")
        if count:
            self._flight.append(Frame(frame_id, slots, names, samples, tokens))
        self.last_names = tuple(names)
        return PlanRan(frame_id, tuple(map(RowRan, names, lengths)))

    def _commit(self, number: int) -> CommitRan:
        frame = self._flight.popleft()
        record = self._lines[number, RECORD_COLUMN:, : len(frame.slots)].tolist()
        sampled, rows = [], []
        for slot, name, samples, token, delivered, verdict, cached in zip(
            frame.slots, frame.names, frame.samples, frame.tokens, *record, strict=True
        ):
            tokens = (token,) if samples else ()
            sampled.append(RowTokens(name, tokens))
            if delivered != layout.NONE:
                rows.append(build_output_row(name, tokens, delivered, verdict, cached))
                if verdict != layout.GOES_ON:
                    self.ended.append((slot, name))
                    self.unreported.add(name)
        return CommitRan(frame.frame_id, tuple(sampled), Outputs(tuple(rows)))
