"""Runner: runs plans on the model, and knows nothing of how they were made.

    dispatch(plan): settle the plan before -> update the batch -> forward -> choose tokens
    collect(frame): settle it: tokens to the host, drafts verified, next drafts proposed -> answer

Between dispatch and collect a GPU works while the host goes on: under asynchronous scheduling the
next plan is made meanwhile. A draft is accepted if it is the token that was chosen in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from blockstep.impl.engine.batch import Batch, BatchRow, StepRow, Wanted
from blockstep.impl.engine.connector import Connector
from blockstep.impl.engine.errors import EngineError
from blockstep.impl.engine.grammars import mask_logits
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.observer import Pass, Ran
from blockstep.impl.engine.sampler import NO_TOKEN, get_logprobs, sample
from blockstep.impl.engine.speculation import DraftModelProposer, Proposer
from blockstep.impl.engine.transfer import to_device
from blockstep.spec.vocabulary import (
    NO_TRANSFERS,
    BlockCopy,
    Config,
    FrameId,
    KVTransfers,
    Plan,
    RequestId,
    RowTokens,
    TokenIds,
)

Logprobs = list[dict[int, float]]


@dataclass(slots=True)
class Frame:
    """A plan that was dispatched."""

    frame_id: FrameId
    step: list[StepRow]
    tokens: torch.Tensor | None
    """What was chosen for every position that asked for it, rows in plan order, on the device."""
    logits: torch.Tensor | None
    """Of the same positions, if somebody wants log probabilities."""
    passes: list[Pass] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a plan came to."""

    ran: Ran
    logprobs: Mapping[RequestId, Logprobs]
    """Of each sampled token, of requests that want them."""
    transfers: KVTransfers = NO_TRANSFERS
    """What could not be loaded for it."""


class Runner:
    """One model, its batch, and who proposes drafts. One object is one run."""

    def __init__(
        self,
        config: Config,
        model: Model,
        proposer: Proposer | None,
        device: str,
        adapters: Sequence[str] = (),
        connector: Connector | None = None,
    ) -> None:
        self.config = config
        self.connector = connector
        self.model = model
        self.proposer = proposer
        self.batch = Batch(config, device, adapters)
        self.chosen: dict[RequestId, Wanted] = {}
        """Of requests that were submitted and have not ended."""
        self._unsettled: Frame | None = None
        self._answers: dict[FrameId, Answer] = {}

    def start_anew(self) -> Runner:
        """A runner on the same model that knows no request."""
        batch, connector = self.batch, self.connector
        if connector is not None:
            connector.start_anew()
        return Runner(
            self.config, self.model, self.proposer, batch.device, batch.adapters, connector
        )

    def dispatch(self, plan: Plan) -> None:
        """Start a plan. It is to be collected if it has rows."""
        with torch.inference_mode():
            self._settle()
            if plan.kv_saves:
                assert self.connector is not None, "nobody is saved without a store"
                self.connector.swap(plan, self.batch)
            if plan.block_copies:
                self._copy_blocks(plan.block_copies)
            failed: Mapping[RequestId, int] = {}
            if self.connector is not None:
                self.connector.save(plan, self.batch)
                failed = self.connector.load(plan)
            step = self.batch.apply(plan, self.chosen, failed)
            if not step:
                return
            rows = [scheduled.row for scheduled in step]
            inputs = self.batch.build_inputs(
                rows, [row.first for row in step], [row.end for row in step]
            )
            frame = Frame(plan.frame_id, step, None, None, [_get_pass(False, rows, inputs)])
            self._choose(frame, self.model.forward(inputs))
            self._unsettled = frame

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """In the caches of all models, which share block ids."""
        self.model.cache.copy(copies)
        if isinstance(self.proposer, DraftModelProposer):
            self.proposer.model.cache.copy(copies)

    def peek(self, frame_id: FrameId) -> Answer:
        """What a dispatched plan came to; waits for it."""
        if self._unsettled is not None and self._unsettled.frame_id == frame_id:
            with torch.inference_mode():
                self._settle()
        return self._answers[frame_id]

    def collect(self, frame_id: FrameId) -> Answer:
        """As `peek`, and forget it: each plan is collected once, and committed then."""
        answer = self.peek(frame_id)
        del self._answers[frame_id]
        self.batch.go_back(frame_id)
        return answer

    def _choose(self, frame: Frame, hidden: torch.Tensor) -> None:
        """Choose a token wherever one is asked for: only there logits are computed."""
        draws = [draw for row in frame.step for draw in row.get_draws()]
        if not draws:
            return
        asking: list[int] = []
        end = 0
        for row in frame.step:
            end += row.end - row.first
            asking += range(end - row.num_logits, end)
        if len(asking) < len(hidden):
            hidden = hidden[to_device(np.array(asking, np.int64), hidden.device)]
        logits = self.model.compute_logits(hidden)
        frame.tokens = sample(self._mask(frame, logits), draws)
        if any(draw.params.logprobs is not None for draw in draws):
            frame.logits = logits

    def _mask(self, frame: Frame, logits: torch.Tensor) -> torch.Tensor:
        """The logits, -inf where a grammar forbids a token; every frame before is settled."""
        rows: list[int] = []
        masks: list[bytes] = []
        start = 0
        for scheduled in frame.step:
            matcher = scheduled.row.wanted.matcher
            if matcher is not None and scheduled.samples:
                for row, mask in enumerate(matcher.get_masks(scheduled.drafts), start):
                    if mask is not None:
                        rows.append(row)
                        masks.append(mask)
            start += scheduled.num_logits
        return mask_logits(logits, rows, masks)

    def _settle(self) -> None:
        """Bring the last plan's tokens home, and propose what may follow."""
        frame, self._unsettled = self._unsettled, None
        if frame is None:
            return
        logprobs = _get_logprobs(frame)
        tokens = [] if frame.tokens is None else frame.tokens.tolist()
        if NO_TOKEN in tokens:
            raise EngineError(
                f"logits are not finite: the model overflows {self.model.weights.norm.dtype}; "
                "give dtype = 'bfloat16' or 'float32'"
            )
        start = 0
        for scheduled in frame.step:
            if scheduled.samples:
                self._accept(scheduled, tokens[start : start + scheduled.num_logits])
            start += scheduled.num_logits
        if self.proposer is not None:

            def on_pass(rows: Sequence[BatchRow], inputs: Inputs) -> None:
                frame.passes.append(_get_pass(True, rows, inputs))

            step = [row for row in frame.step if row.void is None]
            self.proposer.propose(self.batch, step, on_pass)
            if self.config.async_scheduling:
                self._pad_proposals(frame)
        answer = _get_answer(frame, logprobs, self.config.async_scheduling)
        if self.connector is not None:
            answer = replace(answer, transfers=self.connector.take_answer(frame.frame_id))
        self._answers[frame.frame_id] = answer

    def _accept(self, scheduled: StepRow, tokens: list[int]) -> None:
        """Keep the drafts that were right, and the token behind the last of them."""
        num_right = 0
        for draft, token in zip(scheduled.drafts, tokens, strict=False):
            if draft != token:
                break
            num_right += 1
        scheduled.sampled = tuple(tokens[: num_right + 1])
        if scheduled.is_past:
            return
        scheduled.row.num_computed -= len(scheduled.drafts) - num_right
        self.batch.append(scheduled.row, scheduled.sampled)
        matcher = scheduled.row.wanted.matcher
        if matcher is not None and scheduled.void is None:
            matcher.advance(scheduled.sampled)

    def _pad_proposals(self, frame: Frame) -> None:
        """The next plan verifies so many drafts whether or not there are as many: fill up."""
        for scheduled in frame.step:
            if scheduled.samples and not scheduled.is_past:
                row = scheduled.row
                missing = self.config.num_speculative_tokens - len(row.proposal)
                row.proposal += (scheduled.sampled[-1],) * missing


def _get_pass(is_draft: bool, rows: Sequence[BatchRow], inputs: Inputs) -> Pass:
    return Pass(is_draft, tuple(row.request_id for row in rows), inputs)


def _get_logprobs(frame: Frame) -> dict[RequestId, Logprobs]:
    """Log probabilities at every position of the requests that want them."""
    if frame.logits is None or frame.tokens is None:
        return {}
    found: dict[RequestId, Logprobs] = {}
    start = 0
    for scheduled in frame.step:
        end, num_top = start + scheduled.num_logits, scheduled.row.wanted.params.logprobs
        if num_top is not None and start < end:
            found[scheduled.row.request_id] = get_logprobs(
                frame.logits[start:end], frame.tokens[start:end], num_top
            )
        start = end
    return found


def _get_answer(frame: Frame, logprobs: dict[RequestId, Logprobs], is_async: bool) -> Answer:
    sampled = tuple(RowTokens(row.row.request_id, row.sampled) for row in frame.step)
    proposals: dict[RequestId, TokenIds] = {
        row.row.request_id: row.row.proposal
        for row in frame.step
        if row.samples and (row.void is None or is_async)  # the next plan may be made already
    }
    return Answer(Ran(frame.frame_id, tuple(frame.passes), sampled, proposals), logprobs)
