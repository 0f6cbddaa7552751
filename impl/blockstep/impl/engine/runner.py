"""Runner: runs plans on the model; it does not know how they were made.

    dispatch(plan): update the batch -> forward -> sample tokens, which stay on the device
    collect(frame): wait for its tokens -> model output

A GPU works while the host continues. With two frames in flight a step is launched before the host
has read the tokens of the step before it: they are passed on within the device (see `staging`). The
host reads the tokens first if it needs them: to verify and propose drafts, to advance grammars, for
a connector that reads computed KV, and for an observer of every pass. Such frames are kept as
objects. A draft is accepted if it equals the token sampled at its position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from blockstep.impl.array_plans import ArrayPlan
from blockstep.impl.engine.connector import Connector
from blockstep.impl.engine.errors import EngineError
from blockstep.impl.engine.grammars import mask_logits
from blockstep.impl.engine.host_to_device import Incoming, to_device
from blockstep.impl.engine.input_batch import Batch, BatchRow, StepRow
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.observer import Pass, Ran
from blockstep.impl.engine.rows import Wanted
from blockstep.impl.engine.sampler import NO_TOKEN, get_logprobs, sample
from blockstep.impl.engine.speculation import DraftModelProposer, Proposer
from blockstep.impl.engine.staging import ArrayStep, Staged
from blockstep.kernels import sample_tokens
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
    """A plan that was dispatched, kept as objects."""

    frame_id: FrameId
    step: list[StepRow]
    tokens: torch.Tensor | None
    """Sampled tokens of all positions that sample, rows in plan order, on the device."""
    logits: torch.Tensor | None
    """Logits of the same positions, if a request wants log probabilities."""
    passes: list[Pass] = field(default_factory=list)


@dataclass(slots=True)
class ArrayFrame:
    """A plan that was dispatched, kept as arrays: each row that samples has one token."""

    frame_id: FrameId
    request_ids: Sequence[RequestId]
    """Requests of all rows, for a plan of objects; empty for a plan of arrays."""
    index: np.ndarray
    """[num_samples] int64: rows of the batch that sample."""
    births: np.ndarray
    """[num_samples] int64: `Columns.births` of these rows, which identify their requests."""
    places: np.ndarray
    """[num_samples] int64: position of each token."""
    sampling: np.ndarray | None
    """[num_samples] int64: which rows of the plan sample; None: all."""
    incoming: Incoming | None = None
    """The tokens, being copied to the host; None if no row samples."""
    logits: torch.Tensor | None = None
    """[num_samples, vocab_size], if a request wants log probabilities."""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """[num_samples] int64, once the host has read them."""
    logprobs: dict[RequestId, Logprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a plan."""

    ran: Ran
    logprobs: Mapping[RequestId, Logprobs]
    """Log probabilities of each sampled token, for requests that want them."""
    transfers: KVTransfers = NO_TRANSFERS
    """KV that could not be loaded for the plan."""


class Runner:
    """One model, its batch, and its proposer of drafts; one object serves one run."""

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
        """Sampling parameters of unfinished requests."""
        self.is_observed = False
        """Whether an observer sees every pass."""
        self._held: set[RequestId] = set()
        """Unfinished requests that have a grammar."""
        self._unsettled: deque[Frame | ArrayFrame] = deque()
        """Frames whose tokens the host has not read, oldest first."""
        self._answers: dict[FrameId, Answer] = {}
        self._settled: dict[FrameId, ArrayFrame] = {}

    def start_anew(self) -> Runner:
        """Return a runner on the same model without any requests."""
        batch, connector = self.batch, self.connector
        if connector is not None:
            connector.start_anew()
        runner = Runner(
            self.config, self.model, self.proposer, batch.device, batch.adapters, connector
        )
        runner.is_observed = self.is_observed
        return runner

    def begin(self, request_id: RequestId, wanted: Wanted) -> None:
        """Register a request that was submitted, or that continues with further input."""
        self.chosen[request_id] = wanted
        if wanted.matcher is not None:
            self._held.add(request_id)
        else:
            self._held.discard(request_id)

    def end(self, request_id: RequestId) -> None:
        """Forget a finished request."""
        self.chosen.pop(request_id, None)
        self._held.discard(request_id)

    @property
    def needs_objects(self) -> bool:
        """Whether frames are kept as objects, and read before the next one is launched."""
        return bool(
            self._held or self.is_observed or self.proposer is not None
            or self.connector is not None
        )  # fmt: skip

    def dispatch(self, plan: Plan) -> None:
        """Start a plan; if it has rows, it must be collected later."""
        with torch.inference_mode():
            if not self._prepare(self.needs_objects):
                self._dispatch_objects(plan)
                return
            if plan.block_copies:
                self._copy_blocks(plan.block_copies)
            rows = self.batch.apply(plan, self.chosen)
            if not rows:
                return
            spans = np.array([(one.row.index, one.first, one.end) for one in rows], np.int64)
            index, starts, ends = np.ascontiguousarray(spans.T)
            samples = np.fromiter((one.samples for one in rows), np.bool_, len(rows))
            sampling = None if samples.all() else samples.nonzero()[0]
            step = ArrayStep(index, starts, ends - starts, sampling)
            self._launch(plan.frame_id, step, [one.row.request_id for one in rows])

    def dispatch_arrays(self, plan: ArrayPlan) -> None:
        """Start a plan of arrays; see `dispatch`. Not to be called if `needs_objects`."""
        with torch.inference_mode():
            self._prepare(False)
            step = self.batch.apply_arrays(plan, self.chosen)
            if len(plan):
                self._launch(plan.frame_id, step, ())

    def _prepare(self, needs_objects: bool) -> bool:
        """Read frames in flight if the next step needs their tokens on the host.

        Returns whether the next step is kept as arrays.
        """
        if needs_objects or any(
            isinstance(frame, Frame) or frame.logits is not None for frame in self._unsettled
        ):
            self._settle()
        return not needs_objects

    def _dispatch_objects(self, plan: Plan) -> None:
        """Start a plan that is kept as objects; the tokens of all earlier frames were read."""
        if plan.kv_saves:
            assert self.connector is not None, "a plan saves KV only if there is a store"
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
        self._unsettled.append(frame)

    def _launch(self, frame_id: FrameId, step: ArrayStep, request_ids: Sequence[RequestId]) -> None:
        """Start a step; when this returns, its tokens are being copied to the host."""
        batch, columns = self.batch, self.batch.arrays.columns
        if self._unsettled and batch.staging.lacks_tokens(step):
            self._settle()
        staged = batch.staging.build(step, self.model)
        index = step.sampling_index
        places = columns.num_known[index]
        frame = ArrayFrame(
            frame_id, request_ids, index, columns.births[index], places, step.sampling
        )
        if staged.graph is not None:
            hidden = staged.graph.replay()[: len(step.index)]
        else:
            hidden = self.model.forward(staged.inputs)
        if len(index):
            if staged.asking is not None:
                hidden = hidden[staged.asking]
            self._choose_one_each(frame, hidden, staged)
        columns.num_known[index] = places + 1
        columns.num_pending[index] += 1
        self._unsettled.append(frame)

    def _choose_one_each(self, frame: ArrayFrame, hidden: torch.Tensor, staged: Staged) -> None:
        """Sample a token for each row that samples, from its hidden state."""
        logits = self.model.compute_logits(hidden)
        tokens = sample_tokens(logits, **staged.draws)
        if self.config.max_frames_in_flight > 1:
            self.batch.staging.keep_tokens(staged.rows, tokens)
        frame.incoming = Incoming(tokens)
        if self.batch.arrays.columns.has_logprobs[frame.index].any():
            frame.logits = logits

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in the caches of all models, which share block ids."""
        self.model.cache.copy(copies)
        if isinstance(self.proposer, DraftModelProposer):
            self.proposer.model.cache.copy(copies)

    def peek(self, frame_id: FrameId) -> Answer:
        """Return the result of a dispatched plan; waits for it."""
        self._settle(frame_id)
        if frame_id in self._settled:
            self._answers[frame_id] = _build_answer(self._settled.pop(frame_id))
        return self._answers[frame_id]

    def collect(self, frame_id: FrameId) -> Answer:
        """Return a plan's result as `peek`, and forget it: each plan is collected once, then
        committed."""
        answer = self.peek(frame_id)
        del self._answers[frame_id]
        if self.connector is not None:
            self.batch.go_back(frame_id)
        return answer

    def collect_arrays(self, frame_id: FrameId) -> tuple[np.ndarray, Mapping[RequestId, Logprobs]]:
        """Return the tokens of a plan of arrays, [num_samples] int64, and log probabilities; waits.

        Log probabilities are those of the requests that want them.
        """
        self._settle(frame_id)
        frame = self._settled.pop(frame_id)
        return frame.tokens, frame.logprobs

    def _choose(self, frame: Frame, hidden: torch.Tensor) -> None:
        """Sample a token at each position that needs one; logits are computed only there."""
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
        """Return the logits with -inf where a grammar forbids a token; earlier frames were read."""
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

    def _settle(self, last: FrameId | None = None) -> None:
        """Read the tokens of frames in flight, the oldest first, up to `last`; None: all."""
        with torch.inference_mode():
            while self._unsettled and (last is None or self._unsettled[0].frame_id <= last):
                frame = self._unsettled.popleft()
                if isinstance(frame, Frame):
                    self._settle_objects(frame)
                else:
                    self._settle_arrays(frame)

    def _settle_arrays(self, frame: ArrayFrame) -> None:
        """Read the tokens of a frame, and keep those of requests that have not left their rows."""
        batch, columns, index = self.batch, self.batch.arrays.columns, frame.index
        if frame.incoming is not None:
            tokens = frame.tokens = frame.incoming.wait()
            self._expect_tokens(tokens)
            is_here = columns.births[index] == frame.births
            places = frame.places
            if not is_here.all():
                index, places, tokens = index[is_here], places[is_here], tokens[is_here]
            batch.arrays.token_ids[index, places] = tokens
            columns.num_pending[index] -= 1
        if frame.logits is not None:
            frame.logprobs = self._list_logprobs(frame, frame.logits)
        self._settled[frame.frame_id] = frame

    def _list_logprobs(self, frame: ArrayFrame, logits: torch.Tensor) -> dict[RequestId, Logprobs]:
        """Return log probabilities of the tokens of requests that want them."""
        found: dict[RequestId, Logprobs] = {}
        births = self.batch.arrays.columns.births[frame.index]
        for at, row in enumerate(frame.index.tolist()):
            request = self.batch.row_at[row]
            if request is not None and births[at] == frame.births[at]:
                num_top = request.wanted.params.logprobs
                if num_top is not None:
                    tokens = torch.from_numpy(frame.tokens[at : at + 1])
                    tokens = tokens.to(logits.device)
                    found[request.request_id] = get_logprobs(logits[at : at + 1], tokens, num_top)
        return found

    def _expect_tokens(self, tokens: np.ndarray) -> None:
        if (tokens == NO_TOKEN).any():
            raise EngineError(
                f"logits are not finite: the model overflows {self.model.weights.norm.dtype}; "
                "give dtype = 'bfloat16' or 'float32'"
            )

    def _settle_objects(self, frame: Frame) -> None:
        """Read the tokens of a frame, verify its drafts, and propose the next ones."""
        logprobs = _get_logprobs(frame)
        tokens: list[int] = []
        if frame.tokens is not None:
            read = Incoming(frame.tokens).wait()
            self._expect_tokens(read)
            tokens = read.tolist()
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
        """Keep the accepted drafts and the token after them."""
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
        """Pad proposals to `num_speculative_tokens`: the next plan has scheduled that many
        drafts."""
        for scheduled in frame.step:
            if scheduled.samples and not scheduled.is_past:
                row = scheduled.row
                missing = self.config.num_speculative_tokens - len(row.proposal)
                row.proposal += (scheduled.sampled[-1],) * missing


def _get_pass(is_draft: bool, rows: Sequence[BatchRow], inputs: Inputs) -> Pass:
    return Pass(is_draft, tuple(row.request_id for row in rows), inputs)


def _get_logprobs(frame: Frame) -> dict[RequestId, Logprobs]:
    """Return log probabilities at every position of the requests that want them."""
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


def _build_answer(frame: ArrayFrame) -> Answer:
    """Return the result of a plan of objects that ran as arrays, without an observer."""
    tokens: list[TokenIds] = [()] * len(frame.request_ids)
    rows = range(len(tokens)) if frame.sampling is None else frame.sampling.tolist()
    for row, token in zip(rows, frame.tokens.tolist(), strict=True):
        tokens[row] = (token,)
    sampled = tuple(map(RowTokens, frame.request_ids, tokens))
    return Answer(Ran(frame.frame_id, (), sampled, {}), frame.logprobs)


def _get_answer(frame: Frame, logprobs: dict[RequestId, Logprobs], is_async: bool) -> Answer:
    sampled = tuple(RowTokens(row.row.request_id, row.sampled) for row in frame.step)
    proposals: dict[RequestId, TokenIds] = {
        row.row.request_id: row.row.proposal
        for row in frame.step
        if row.samples and (row.void is None or is_async)  # the next plan may exist already
    }
    return Answer(Ran(frame.frame_id, tuple(frame.passes), sampled, proposals), logprobs)
