"""Resident: steps whose plans and tokens stay on the device, and a fence behind them.

    host:    submits, aborts --+                       +--> tokens, ends, journal
                               v                       |
    device:  [ commit -> plan -> forward -> tokens ] x steps -> commit

Between two fences the host launches and looks at nothing: where no step can have a prompt or lack a
block, it does not even know how many rows a plan has, and a GPU replays one graph. Otherwise it
asks after each plan how many rows and tokens that has. Behind a fence the scheduler is a
`DeviceEngine` like any, which takes events and shows its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from blockstep.impl.device import layout
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.frames import tell_row
from blockstep.impl.device.launch import OPTIONS
from blockstep.impl.engine.errors import EngineError
from blockstep.impl.engine.graphs import NUM_WARM_UPS
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.sampler import NO_TOKEN
from blockstep.spec.vocabulary import FrameId, Outputs, PauseState, RequestId, TokenIds

LANES_ON_GPU = 256
"""As many as a program has threads."""
TOLD = 4
"""Lines of a step in the journal: slot, tokens run, whether it samples, token."""


@dataclass(frozen=True, slots=True)
class RowRan:
    """A request in a step."""

    request_id: RequestId
    num_tokens: int
    sampled: TokenIds
    """Empty where it does not sample."""


@dataclass(frozen=True, slots=True)
class StepRan:
    """A step: what was planned, run and committed; no rows: there was nothing to do."""

    frame_id: FrameId
    rows: tuple[RowRan, ...]
    outputs: Outputs


class Journal(NamedTuple):
    """What the steps since the last fence did."""

    rows: torch.Tensor
    """[steps, TOLD + TOLD_COLUMNS, rows] int32; the last are the record of the commit before."""
    at: torch.Tensor
    """[1] int64; the step that comes next."""


class Resident:
    """Runs greedy requests of one frame in flight, without drafts or adapters.

    Args:
        engine: the scheduler; its requests are those of `model`'s cache.
        model: on whichever device.
        steps: most steps from one fence to the next.
    """

    def __init__(self, engine: DeviceEngine, model: Model, steps: int) -> None:
        self.engine, self.model, self.steps = engine, model, steps
        self.config = engine.config
        self.device = model.weights.embedding.device
        self.num_bursts = 0
        self.num_reads = 0
        """Times that the host waited for a number of the device between two fences."""
        shape, device = (steps, TOLD + layout.TOLD_COLUMNS, engine.inbox.dims.rows), self.device
        self._journal = Journal(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self._state: layout.State | None = None
        self._graphs: dict[int, Any] = {}
        """By rows: how many steps have warmed up for one, or the graph."""

    def run(self) -> list[StepRan]:
        """Some steps, and the fence behind them: a step without rows is the last.

        Raises:
            EngineError: the model overflows.
        """
        inbox = self.engine.inbox
        inbox.reserve_nodes(self.steps * inbox.dims.rows, len(inbox.slot_of))
        width = self._get_width()
        count = self._count_left() if width else self.steps
        self._begin()
        state, journal = self._upload(), self._journal
        journal.rows.zero_()
        journal.at.zero_()
        done, goes = 0, True
        with torch.inference_mode():
            while goes and done < count:
                if width:
                    self._decode(state, journal, width)
                else:
                    goes = self._run_rows(state, journal)
                done += 1
            if int(state.in_flight[0]):
                self._launch("commit_kernel", state)
        self._download(state)
        self.num_bursts += 1
        return self._take(journal, done)

    @property
    def is_free(self) -> bool:
        """Whether the engine's next steps may be made without a host."""
        engine, config = self.engine, self.config
        has_one_frame = config.max_frames_in_flight == 1 and not config.num_speculative_tokens
        return has_one_frame and not engine.frames and engine.pause_state is PauseState.UNPAUSED

    @property
    def num_preempted(self) -> int:
        """By the last step."""
        return int(self.engine.inbox.state.num_preempted[0])

    # What a burst is.

    def _get_width(self) -> int:
        """Rows of padded steps; 0: a step may have a prompt, a request that waits or lack a block.

        Whoever runs goes on or ends, so rows are never more.
        """
        s, d, size = self.engine.inbox.state, self.engine.inbox.dims, self.config.block_size
        running = s.run[: int(s.num_running[0])]
        width = 1 << max(len(running) - 1, 0).bit_length()
        is_decode = (
            bool((s.key == layout.FAR).all())
            and len(running) > 0
            and width <= min(d.rows, d.batch)
            and bool((s.computed[running] == s.known[running] - 1).all())
            and int(s.num_free[0]) >= len(running) * (self.steps // size + 1)
        )
        return width if is_decode else 0

    def _count_left(self) -> int:
        """Steps until the last of those that run has ended by its length; `steps` at most."""
        s = self.engine.inbox.state
        running = s.run[: int(s.num_running[0])]
        ends = s.end_by_max_tokens[running].clip(max=self.config.max_model_len)
        return min(int((ends - s.known[running]).max()), self.steps)

    def _begin(self) -> None:
        """The numbers that the host writes once for the whole burst."""
        s, engine = self.engine.inbox.state, self.engine
        s.control[layout.FRAME_ID] = engine.next_frame_id
        s.control[layout.PREVIOUS_ID] = engine.previous_id
        s.control[layout.BUDGET] = self.config.max_num_batched_tokens
        s.control[layout.ADMITS] = 1
        s.control[layout.PLACE] = s.control[layout.COMMIT_PLACE] = 0
        s.in_flight[0] = s.num_rows[0] = 0

    # A step. Nothing in `_decode` reads a number of the device.

    def _decode(self, state: Any, journal: Journal, width: int) -> None:
        """A step of at most a token for each row, padded; on a GPU a replay.

        The first of them run as they are: they compile what a graph holds, which must not happen
        while it is recorded.
        """
        warm = self._graphs.get(width, 0)
        if self.device.type != "cpu" and warm == NUM_WARM_UPS:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run_padded(state, journal, width)
            warm = self._graphs[width] = graph
        if isinstance(warm, int):
            self._run_padded(state, journal, width)
            self._graphs[width] = warm + 1
        else:
            warm.replay()

    def _run_padded(self, state: Any, journal: Journal, width: int) -> None:
        """A row too many reads the null block, and writes nothing."""
        self._launch("loop_kernel", state)
        live = torch.arange(width, device=self.device) < state.num_rows
        slots = torch.where(live, state.plans[0, layout.ROW_SLOT, :width], 0).long()
        positions = torch.where(live, state.positions[:width], 0)
        inputs = Inputs(
            token_ids=torch.where(live, state.tokens[slots, positions], 0).long(),
            positions=positions,
            slot_mapping=torch.where(live, state.slot_mapping[:width], -1)[None],
            block_tables=torch.where(live[:, None], state.tables[slots], 0)[None].contiguous(),
            query_start_loc=torch.arange(width + 1, dtype=torch.int32, device=self.device),
            seq_lens=torch.where(live, state.seq_lens[:width], 1),
            max_query_len=1,
            max_seq_len=self.config.max_model_len,
        )
        # Not a model's own graph of a decode: this is recorded as a whole.
        self._note(state, journal, self._choose(Model.forward(self.model, inputs)))

    def _run_rows(self, state: Any, journal: Journal) -> bool:
        """Any step: the host asks how many rows and tokens it has. Whether it had any."""
        self._launch("loop_kernel", state)
        rows = int(state.num_rows[0])
        self.num_reads += 1
        if rows == 0:
            self._note(state, journal, state.answer_tokens[:0, 0])
            return False
        starts = state.query_start_loc[: rows + 1]
        total = int(starts[rows])
        slots = state.plans[0, layout.ROW_SLOT, :rows].long()
        positions = state.positions[:total]
        of_token = slots.repeat_interleave(starts.diff().long())
        inputs = Inputs(
            token_ids=state.tokens[of_token, positions].long(),
            positions=positions,
            slot_mapping=state.slot_mapping[None, :total],
            block_tables=state.tables[slots][None],
            query_start_loc=starts,
            seq_lens=state.seq_lens[:rows],
            max_query_len=total,
            max_seq_len=self.config.max_model_len,
        )
        hidden = self.model.forward(inputs)
        self._note(state, journal, self._choose(hidden[starts[1:].long() - 1]))
        return True

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        best, tokens = self.model.compute_logits(hidden).max(dim=-1)
        return tokens.masked_fill_(~best.isfinite(), NO_TOKEN)

    def _note(self, state: Any, journal: Journal, tokens: torch.Tensor) -> None:
        """The answer that the next launch commits, and the lines of the journal."""
        count = len(tokens)
        live = torch.arange(count, device=self.device) < state.num_rows
        plan = state.plans[0, :, :count]
        samples = torch.where(live, plan[layout.ROW_SAMPLES], 0)
        state.answer_counts[:count].copy_(samples)
        state.answer_tokens[:count, 0].copy_(tokens)
        lengths = torch.where(live, plan[layout.ROW_TOKENS], 0)
        told = torch.stack((plan[layout.ROW_SLOT], lengths, samples, tokens.int()))
        journal.rows[:, :TOLD, :count].index_copy_(0, journal.at, told[None])
        journal.rows[:, TOLD:].index_copy_(0, journal.at, state.record[None])
        journal.at.add_(1)

    # Between host and device.

    def _launch(self, kernel: str, state: Any) -> None:
        inbox = self.engine.inbox
        if self.device.type == "cpu":
            inbox.launch(kernel)
            return
        kernels: Any = import_module("blockstep.impl.device.step")
        getattr(kernels, kernel)[(1,)](state, inbox.dims, **OPTIONS)
        inbox.taken()

    def _upload(self) -> Any:
        """The state as tensors: the same memory on a CPU; copies that a graph may keep on a GPU."""
        own = [torch.from_numpy(array) for array in self.engine.inbox.state]
        if self.device.type == "cpu":
            return layout.State(*own)
        kept = self._state
        if kept is None or any(a.shape != b.shape for a, b in zip(kept, own, strict=True)):
            kept = self._state = layout.State(*(array.to(self.device) for array in own))
            self._graphs.clear()
        else:
            for to, array in zip(kept, own, strict=True):
                to.copy_(array)
        return kept

    def _download(self, state: Any) -> None:
        """The fence: the host's arrays are what the device has."""
        if self.device.type == "cpu":
            return
        for array, tensor in zip(self.engine.inbox.state, state, strict=True):
            torch.from_numpy(array).copy_(tensor)

    def _take(self, journal: Journal, count: int) -> list[StepRan]:
        """The steps in the words of the vocabulary; the engine lets go who has ended."""
        engine, lines = self.engine, journal.rows[:count].tolist()
        records = [line[TOLD:] for line in lines[1:]] + [engine.inbox.state.record.tolist()]
        steps: list[StepRan] = []
        for frame_id, (line, record) in enumerate(
            zip(lines, records, strict=True), engine.next_frame_id
        ):
            rows, outputs = [], []
            for (slot, length, samples, token), told in zip(
                zip(*line[:TOLD], strict=True), zip(*record, strict=True), strict=True
            ):
                if length:
                    name = engine.inbox.requests[slot].request_id
                    rows.append(RowRan(name, length, (token,) * samples))
                    outputs += [tell_row(name, (token,), *told)] if samples else []
            if any(NO_TOKEN in row.sampled for row in rows):
                raise EngineError("logits are not finite: the model overflows its dtype")
            steps.append(StepRan(frame_id, tuple(rows), Outputs(tuple(outputs))))
        engine.take_steps(count, tuple(row.request_id for row in steps[-1].rows))
        return steps
