"""Speculation: who proposes the tokens that the next step verifies.

    known tokens  |-------- computed --------| t |       t: the token sampled last, KV not there yet
    draft model               |-- catch up --| t | d1 | d2 |            k passes give k drafts
                           step's first          |- lookahead slots -|

A proposer runs after every step. The n-gram proposer looks at the text. The draft model has its own
KV under the same block ids: in its first pass it runs all that the step computed, so that whatever
block may be hit later holds its KV, too; what it writes into lookahead slots is overwritten by the
next step. A request without a slot for the next position (just admitted) gets no or fewer drafts.
Source: seed 001 "Speculative Decoding"; `Config.num_lookahead_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from blockstep.impl.engine.batch import Batch, BatchRow, StepRow
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.sampler import Draw, sample

NGRAM_MAX = 4
NGRAM_MIN = 1

OnPass = Callable[[Sequence[BatchRow], Inputs], None]
"""Told of every pass that a proposer runs."""


class Proposer(Protocol):
    """Sets `proposal` of every request that sampled."""

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:
        """To be called when the samples of `step` are known tokens of `batch`."""
        ...


class NgramProposer:
    """Drafts are what followed the last tokens of the text when they last stood there."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:  # noqa: ARG002
        """Look each text up; runs no model."""
        for scheduled in step:
            if scheduled.samples:
                tokens = batch.get_tokens(scheduled.row)
                scheduled.row.proposal = find_continuation(tokens, self.num_drafts)


def find_continuation(tokens: np.ndarray, num_drafts: int) -> tuple[int, ...]:
    """Up to `num_drafts` tokens that followed the longest repeated tail, at its last occurrence.

    Tails of `NGRAM_MAX` down to `NGRAM_MIN` tokens are tried; () if none stood there before.
    """
    for size in range(min(NGRAM_MAX, len(tokens) - 1), NGRAM_MIN - 1, -1):
        tail = tokens[-size:]
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        found = np.flatnonzero((windows == tail).all(axis=1))
        if len(found):
            start = int(found[-1]) + size
            return tuple(tokens[start : start + num_drafts].tolist())
    return ()


class DraftModelProposer:
    """Drafts are what a smaller model would have sampled, with the same seeds."""

    def __init__(self, model: Model, num_drafts: int) -> None:
        self.model = model
        self.num_drafts = num_drafts

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:
        """Catch up with the step, then run one pass per further draft."""
        spans = [
            (scheduled.row, scheduled.first, min(end, batch.get_room(scheduled.row)))
            for scheduled in step
            for end in [scheduled.row.num_computed + scheduled.samples]
        ]
        spans = [span for span in spans if span[1] < span[2]]
        sampling = {scheduled.row.index for scheduled in step if scheduled.samples}
        for num_before in range(self.num_drafts):
            if not spans:
                return
            rows = [row for row, _, _ in spans]
            inputs = batch.build_inputs(
                rows, [first for _, first, _ in spans], [end for *_, end in spans]
            )
            on_pass(rows, inputs)
            hidden = self.model.forward(inputs)
            ready = [
                (number, row)
                for number, (row, _, end) in enumerate(spans)
                if row.index in sampling and end == row.num_known + num_before
            ]
            if not ready:
                return
            last = inputs.query_start_loc[1:].long() - 1
            logits = self.model.compute_logits(hidden[last[torch.tensor([n for n, _ in ready])]])
            draws = [
                Draw(row.params, row.seed, row.num_known - row.num_prompt + num_before)
                for _, row in ready
            ]
            for (_, row), token in zip(ready, sample(logits, draws).tolist(), strict=True):
                batch.token_ids[row.index, row.num_known + num_before] = token
                row.proposal = (*row.proposal, token)
            spans = [
                (row, end, end + 1)
                for _, row in ready
                for end in [row.num_known + num_before]
                if end < batch.get_room(row)
            ]
