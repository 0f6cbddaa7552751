"""Resident: steps whose plans and tokens stay on the device, and a fence after every so many.

    host:    submits, aborts --+                       +--> tokens, ends, journal
                               v                       |
    device:  [ commit -> plan -> forward -> tokens ] x steps -> commit

Between two fences the host launches and looks at nothing: where no step can have a prompt or lack a
block, it does not even know how many rows a plan has, and a GPU replays one graph. Behind a fence
the scheduler is a `DeviceEngine` like any, which takes requests and aborts and shows its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from blockstep.impl.device import layout
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import OPTIONS, Launch
from blockstep.impl.engine.errors import EngineError, RequestError, SettingsError
from blockstep.impl.engine.graphs import NUM_WARM_UPS
from blockstep.impl.engine.loading import Settings, load_engine
from blockstep.impl.engine.model import Inputs
from blockstep.impl.engine.sampler import NO_TOKEN
from blockstep.spec.vocabulary import (
    Abort,
    Config,
    FrameId,
    Rejected,
    Request,
    RequestId,
    Snapshot,
    Submit,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A request in a step."""

    request_id: RequestId
    num_tokens: int
    sampled: TokenIds
    """Empty where it does not sample."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A step: what was planned, run and committed; no rows: there was nothing to do."""

    frame_id: FrameId
    rows: tuple[Row, ...]


Told: TypeAlias = Submit | Abort | Ran
"""What the scheduler was given, and what it did by itself."""


class Journal(NamedTuple):
    """What the steps since the last fence did."""

    rows: torch.Tensor
    """[steps, 4, rows] int32: slot, tokens run, whether it samples, token; no tokens: no row."""
    at: torch.Tensor
    """[1] int64; the step that comes next."""


class Watcher(Protocol):
    """Somebody who looks at a fence."""

    def fence(self, told: Sequence[Told], snapshot: Snapshot) -> None:
        """All since the last fence, in order, and the state now. What it raises ends the run."""
        ...


class Resident:
    """A model that serves greedy requests by a loop without a host.

    Args:
        folder: the checkpoint.
        settings: without drafts, asynchronous scheduling, adapters or a store.
        steps: steps from one fence to the next.
        watch: builds who looks at each fence.
        launch: how kernels are run on a CPU; by default their source is run by numpy.

    Raises:
        CheckpointError: the folder holds no model that can be run.
        SettingsError: settings that contradict each other, or ask for what it lacks.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        steps: int = 16,
        watch: Callable[[Config], Watcher] | None = None,
        launch: Launch | None = None,
    ) -> None:
        if settings.num_speculative_tokens or settings.max_frames_in_flight > 1:
            raise SettingsError("a resident loop has one frame in flight and no drafts")
        if settings.lora_modules or steps < 1:
            raise SettingsError("a resident loop has no adapters, and 1 step at least")
        loaded = load_engine(folder, settings)
        self.config, self.steps = loaded.config, steps
        self.model = loaded.runner.model
        self.engine = DeviceEngine(self.config, launch)
        self.device = self.model.weights.embedding.device
        self.num_reads = 0
        """Times that the host waited for a number of the device between two fences."""
        self._watcher = None if watch is None else watch(self.config)
        self._told: list[Told] = []
        self._ended: dict[RequestId, TokenIds] = {}
        shape, device = (steps, 4, self.engine.inbox.dims.rows), self.device
        self._journal = Journal(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self._state: layout.State | None = None
        self._graph: Any = None

    def submit(self, request: Request) -> None:
        """Hand in a request, which has its tokens chosen greedily. Raises `RequestError`."""
        answer = self.engine.apply(Submit(request))
        if isinstance(answer, Rejected):
            raise RequestError(f"{request.request_id!r}: {answer.detail}")
        self._told.append(Submit(request))

    def abort(self, *request_ids: RequestId) -> None:
        """Give requests up; what they have gained is kept."""
        for name in request_ids:
            if name in self.engine.inbox.slot_of:
                self._ended[name] = self._get_outputs(name)
        self.engine.apply(Abort(request_ids))
        self._told.append(Abort(request_ids))

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another burst would do something."""
        return bool(self.engine.inbox.slot_of)

    def pop_outputs(self, request_id: RequestId) -> TokenIds:
        """The tokens of a request that has ended."""
        return self._ended.pop(request_id)

    def run(self) -> None:
        """So many steps, and the fence behind them."""
        inbox, engine = self.engine.inbox, self.engine
        inbox.reserve_nodes(self.steps * inbox.dims.rows, len(inbox.slot_of))
        is_decode = self._is_decode()
        self._begin()
        state, journal = self._upload(), self._journal
        journal.rows.zero_()
        journal.at.zero_()
        step = self._decode if is_decode else self._run_rows
        with torch.inference_mode():
            for _ in range(self.steps):
                step(state, journal)
            if int(state.in_flight[0]):
                self._launch("commit_kernel", state)
        self._download(state)
        self._take(journal)
        if self._watcher is not None:
            told, self._told = self._told, []
            self._watcher.fence(told, engine.snapshot())
        self._told.clear()

    # What a burst is.

    def _is_decode(self) -> bool:
        """Whether no step of the burst can have a prompt, a request that waits, or lack a block."""
        s, size = self.engine.inbox.state, self.config.block_size
        running = s.run[: int(s.num_running[0])]
        return (
            bool((s.key == layout.FAR).all())
            and 0 < len(running) <= self._width
            and bool((s.computed[running] == s.known[running] - 1).all())
            and int(s.num_free[0]) >= len(running) * (self.steps // size + 1)
        )

    @property
    def _width(self) -> int:
        """Rows of a padded step."""
        dims = self.engine.inbox.dims
        return min(dims.rows, dims.batch)

    def _begin(self) -> None:
        """The numbers that the host writes once for the whole burst."""
        s, engine = self.engine.inbox.state, self.engine
        s.control[layout.FRAME_ID] = engine.next_frame_id
        s.control[layout.PREVIOUS_ID] = engine._previous_id
        s.control[layout.BUDGET] = self.config.max_num_batched_tokens
        s.control[layout.ADMITS] = 1
        s.control[layout.PLACE] = s.control[layout.COMMIT_PLACE] = 0
        s.in_flight[0] = s.num_rows[0] = 0

    # A step. Nothing in `_decode` reads a number of the device.

    def _decode(self, state: Any, journal: Journal) -> None:
        """A step of at most a token for each row, padded; on a GPU a replay."""
        if self.device.type == "cpu":
            self._launch("loop_kernel", state)
            self._note(state, journal, self._choose_padded(state))
            return
        if self._graph is None:
            self._graph = self._capture(state, journal)
        self._graph.replay()

    def _capture(self, state: Any, journal: Journal) -> Any:
        """Record a step. Warming up runs no row, so that it writes nothing."""
        for _ in range(NUM_WARM_UPS):
            self._choose_padded(state)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch("loop_kernel", state)
            self._note(state, journal, self._choose_padded(state))
        return graph

    def _choose_padded(self, state: Any) -> torch.Tensor:
        """The next token of each row, [width]; a row too many reads the null block."""
        width = self._width
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
        return self._choose(self.model.forward(inputs))

    def _run_rows(self, state: Any, journal: Journal) -> None:
        """Any step: the host asks how many rows and tokens it has."""
        self._launch("loop_kernel", state)
        rows = int(state.num_rows[0])
        self.num_reads += 1
        if rows == 0:
            journal.at.add_(1)
            return
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

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        best, tokens = self.model.compute_logits(hidden).max(dim=-1)
        return tokens.masked_fill_(~best.isfinite(), NO_TOKEN)

    def _note(self, state: Any, journal: Journal, tokens: torch.Tensor) -> None:
        """The answer that the next launch commits, and the line of the journal."""
        count = len(tokens)
        live = torch.arange(count, device=self.device) < state.num_rows
        plan = state.plans[0, :, :count]
        samples = torch.where(live, plan[layout.ROW_SAMPLES], 0)
        state.answer_counts[:count].copy_(samples)
        state.answer_tokens[:count, 0].copy_(tokens)
        lengths = torch.where(live, plan[layout.ROW_TOKENS], 0)
        told = torch.stack((plan[layout.ROW_SLOT], lengths, samples, tokens.int()))
        journal.rows[:, :, :count].index_copy_(0, journal.at, told[None])
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
            self._graph = None
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

    def _take(self, journal: Journal) -> None:
        """Tell of the steps by the names of their rows, and let go who has ended."""
        engine, inbox = self.engine, self.engine.inbox
        lines = journal.rows.tolist()
        last: tuple[Row, ...] = ()
        for line in lines:
            rows = zip(*line, strict=True)
            last = tuple(
                Row(inbox.requests[slot].request_id, length, (token,) * samples)
                for slot, length, samples, token in rows
                if length
            )
            if any(NO_TOKEN in row.sampled for row in last):
                raise EngineError("logits are not finite: the model overflows its dtype")
            self._told.append(Ran(engine.next_frame_id, last))
            engine._previous_id = engine.next_frame_id
            engine.next_frame_id += 1
        engine.finished_req_ids.clear()
        names = tuple(row.request_id for row in last)
        engine.previous_names = names
        for name, slot in tuple(inbox.slot_of.items()):
            if inbox.state.birth[slot] == 0:
                self._ended[name] = self._get_outputs(name)
                inbox.remove(slot)
                if name in names:
                    engine.finished_req_ids.add(name)

    def _get_outputs(self, name: RequestId) -> TokenIds:
        inbox = self.engine.inbox
        slot = inbox.slot_of[name]
        first, end = len(inbox.requests[slot].prompt_token_ids), int(inbox.state.known[slot])
        return tuple(inbox.state.tokens[slot, first:end].tolist())
