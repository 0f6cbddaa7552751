"""Speculation: proposers of the draft tokens that the next step verifies.

    known tokens  |-------- computed --------| t |       t: the last sampled token, without KV yet
    draft model               |-- catch up --| t | d1 | d2 |            k passes give k drafts
                          step's first          |- lookahead slots -|

A proposer runs after every step. The n-gram proposer searches the token sequence. The draft model
has its own KV under the same block ids: its first pass runs all tokens that the step computed, so
that every block that may be hit later holds its KV, too. What it writes into lookahead slots is
overwritten by the next step. A request without a slot for the next position (just admitted) gets
fewer drafts or none. Source: seed 001 "Speculative Decoding"; `Config.num_lookahead_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from blockstep.impl.engine.host_to_device import to_device
from blockstep.impl.engine.input_batch import Batch, BatchRow, StepRow
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.sampler import Draw, sample

NGRAM_MAX = 4
NGRAM_MIN = 1

OnPass = Callable[[Sequence[BatchRow], Inputs], None]
"""Called for every pass that a proposer runs."""


class Proposer(Protocol):
    """Sets `proposal` of every request that sampled."""

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:
        """Propose drafts, after the samples of `step` were appended to `batch`."""
        ...


class NgramProposer:
    """Drafts are the tokens that followed the last occurrence of the sequence's tail."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:  # noqa: ARG002
        """Search each token sequence; runs no model."""
        for scheduled in step:
            if scheduled.samples:
                tokens = batch.get_tokens(scheduled.row)
                scheduled.row.proposal = find_continuation(tokens, self.num_drafts)


def find_continuation(tokens: np.ndarray, num_drafts: int) -> tuple[int, ...]:
    """Return up to `num_drafts` tokens that followed the longest repeated tail, where it occurred
    last.

    Tails of `NGRAM_MAX` down to `NGRAM_MIN` tokens are tried; () if none occurred before.
    """
    for size in range(min(NGRAM_MAX, len(tokens) - 1), NGRAM_MIN - 1, -1):
        tail = tokens[-size:]
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        found = np.flatnonzero((windows == tail).all(axis=1))
        if len(found):
            start = int(found[-1]) + size
            return tuple(tokens[start : start + num_drafts].tolist())
    return ()


class Span(NamedTuple):
    """Positions of one request that the draft model runs in one pass."""

    row: BatchRow
    first: int
    end: int
    wants_draft: bool
    """Whether it sampled, so that a draft may follow its last token."""


class DraftModelProposer:
    """Drafts are the tokens that a smaller model samples with the same seeds."""

    def __init__(self, model: Model, num_drafts: int) -> None:
        self.model = model
        self.num_drafts = num_drafts

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:
        """Compute the step's tokens with the draft model, then run one pass per further draft."""
        spans = []
        for row, first, samples in ((one.row, one.first, one.samples) for one in step):
            end = min(row.num_computed + samples, batch.get_room(row))
            if first < end:
                spans.append(Span(row, first, end, samples))
        for num_before in range(self.num_drafts):
            if spans:
                spans = self._run(batch, spans, num_before, on_pass)

    def _run(
        self, batch: Batch, spans: Sequence[Span], num_before: int, on_pass: OnPass
    ) -> list[Span]:
        """Run one pass: a draft for every request whose last token ran.

        Return the spans of the next pass.
        """
        rows = [span.row for span in spans]
        inputs = batch.build_inputs(
            rows, [span.first for span in spans], [span.end for span in spans]
        )
        on_pass(rows, inputs)
        hidden = self.model.forward(inputs)
        ready = [
            number
            for number, span in enumerate(spans)
            if span.wants_draft and span.end == span.row.num_known + num_before
        ]
        if not ready:
            return []
        last = inputs.query_start_loc[1:].long() - 1
        asking = last[to_device(np.array(ready, np.int64), last.device)]
        logits = self.model.compute_logits(hidden[asking])
        rows = [rows[number] for number in ready]
        draws = [
            Draw(row.wanted.params, row.wanted.seed, row.num_known - row.num_prompt + num_before)
            for row in rows
        ]
        following = []
        tokens = sample(logits, draws).clamp_(min=0)  # without a valid token any draft will do
        for row, token in zip(rows, tokens.tolist(), strict=True):
            place = row.num_known + num_before
            batch.arrays.token_ids[row.index, place] = token
            row.proposal = (*row.proposal, token)
            if place < batch.get_room(row):
                following.append(Span(row, place, place + 1, wants_draft=True))
        return following
