"""Resident: bursts of steps whose plans and tokens stay on the device, each ended by a fence.

    host:    submits, aborts --+                       +--> tokens, finished requests, journal
                               v                       |
    device:  [ commit -> plan -> forward -> tokens ] x steps -> commit

Between two fences the host launches kernels and reads nothing, if no step can have a prompt, lack a
block or admit a request: such steps are padded, and a GPU replays graphs. Otherwise the host reads
after each plan how many rows and tokens it has.

With two frames in flight a plan needs token counts but not token ids, so it is made while the
forward pass of the frame before runs, on a stream of its own:

    main stream       | forward n -> tokens n |                 | forward n+1 -> tokens n+1 | ...
    scheduler stream  | commit n-1 -> plan n+1 -> inputs n+1 |  | commit n -> plan n+2 ...

At a fence the scheduler is an ordinary `DeviceEngine`, which takes events and shows its state.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from blockstep.impl.device import layout
from blockstep.impl.device.dims import count_running
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import launch_kernel, warm_up
from blockstep.impl.engine.bursts import BurstMemory, Summary, summarise
from blockstep.impl.engine.graphs import NUM_WARM_UPS, get_graph_sizes
from blockstep.impl.engine.host_to_device import Incoming
from blockstep.impl.engine.journal import COLUMNS, JournalReader, StepRan
from blockstep.impl.engine.mirror import Mirror
from blockstep.impl.engine.model import Inputs, Model
from blockstep.impl.engine.padded import ADAPTER, POSITION, TOKEN, Answers, Padded
from blockstep.impl.engine.rows import Wanted
from blockstep.impl.engine.slots import SlotParams
from blockstep.kernels import sample_tokens
from blockstep.spec.vocabulary import FrameId, PauseState, RequestId

log = logging.getLogger(__name__)
SIDE_PRIORITY = -1
"""Priority of the scheduler's stream: its one program is scheduled first on a free multiprocessor.
"""


class Key(NamedTuple):
    """Phase and shape that a graph was captured for."""

    phase: str
    """first, step or end; see `Resident._launch_padded`."""
    width: int
    """Rows of the padded step."""
    has_adapters: bool


@dataclass(slots=True)
class Burst:
    """Steps that were launched, and whose results were not read yet."""

    width: int
    num_plans: int
    first_frame_id: FrameId
    names: dict[int, RequestId]
    """The request at each request index."""
    reported: frozenset[RequestId]
    """Finished requests that its first plan lists."""
    before: Summary
    """The state's numbers before it, or bounds for them."""
    incoming: Incoming


class Resident:
    """Runs bursts of requests that need only tokens from a step.

    Args:
        engine: the scheduler of the requests in `model`'s cache, without drafts.
        model: the model, on any device.
        steps: most steps from one fence to the next.
        adapters: names of the model's LoRA adapters, in order.
        runs_ahead: whether a burst may be launched before the one before it is read, if that cannot
            change the burst.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        model: Model,
        steps: int,
        adapters: Sequence[str] = (),
        *,
        runs_ahead: bool = False,
    ) -> None:
        self.engine, self.model, self.steps = engine, model, steps
        self.config, self.runs_ahead = engine.config, runs_ahead
        self.device = model.weights.embedding.device
        self.num_frames = self.config.max_frames_in_flight
        self.num_bursts = 0
        self.num_reads = 0
        """Number of times the host waited for a value from the device between two fences."""
        self.mirror = Mirror(engine.inbox, self.device)
        engine.inbox.copy = self
        self._adapters = adapters
        self._sizes = get_graph_sizes(self.config.max_num_seqs)
        if self.device.type != "cpu":
            warm_up(engine.inbox.dims, _log_progress)
        self._side = None
        if self.num_frames > 1 and self.device.type != "cpu":
            self._side = torch.cuda.Stream(priority=SIDE_PRIORITY)
        self._summary: Summary | None = None
        """Numbers at the last fence; None if they are not known."""
        self._ahead: Burst | None = None
        """A burst that was launched before the one before it was read."""
        self._unread: list[StepRan] = []
        """Steps of bursts that were read early because the host needed the state."""
        self.was_ahead = False
        """Whether the last burst was launched before the one before it was read."""
        self._graphs: dict[Key, Any] = {}
        """Per phase: the number of runs before its capture, or its graph."""
        self._pool: object = None
        self._num_makes = -1
        """`Mirror.num_makes` of the state that the buffers were made for."""

    # The engine's interface.

    @property
    def is_free(self) -> bool:
        """Whether the engine's next steps may be a burst, if no frame is in flight."""
        has_drafts = self.config.num_speculative_tokens > 0
        return not has_drafts and self.engine.pause_state is PauseState.UNPAUSED

    @property
    def width(self) -> int:
        """Rows of the padded steps of a burst launched now; 0 if its steps cannot be padded."""
        return 0 if self._summary is None else self._get_width(self._summary)

    @property
    def num_preempted(self) -> int:
        """Number of requests that the last plan preempted."""
        return 0 if self._summary is None else self._summary.num_preempted

    def run(self, chosen: Mapping[RequestId, Wanted]) -> list[StepRan]:
        """Run a burst of at least one step and its fence; return its plans and commits.

        `chosen`: how to sample the outputs of each request.

        Raises:
            EngineError: logits are not finite, because the model overflows.
        """
        burst, self._ahead = self._ahead, None
        self.was_ahead = burst is not None or bool(self._unread)
        if self._unread:
            return self.take_unread()
        if burst is None:
            burst = self._start(chosen)
        if self.runs_ahead:
            self._ahead = self._start_ahead(burst)
        return self._read(burst)

    def take_unread(self) -> list[StepRan]:
        """Return steps that were launched and not returned yet; launch no further burst."""
        burst, self._ahead = self._ahead, None
        steps, self._unread = self._unread, []
        return steps if burst is None else [*steps, *self._read(burst)]

    def pull(self) -> None:
        """Bring the host's arrays up to date; see `device.inbox.Copy`."""
        self._unread = self.take_unread()
        self.mirror.read_all()

    def capture_all(self) -> None:
        """Capture the graphs of all widths, on a state without requests; do nothing on a CPU.

        Other graphs are captured when they are first needed. Progress is logged (INFO).
        """
        if self.device.type == "cpu":
            return
        self._prepare({})
        d, phases = self.engine.inbox.dims, self._get_phases()
        widths = [width for width in self._sizes if width <= min(d.rows, d.batch)]
        kinds = (False, True) if self.model.adapters else (False,)
        # A capture collects garbage first, which is slow if many objects are alive.
        gc.collect()
        gc.freeze()
        with torch.inference_mode():
            for number, width in enumerate(reversed(widths), 1):
                for (phase, run), has_adapters in product(phases.items(), kinds):
                    key = Key(phase, width, has_adapters)
                    self.mirror.send_row("control", np.zeros(layout.CONTROL_COLUMNS, np.int32))
                    for _ in range(NUM_WARM_UPS):
                        run(key)
                    self._graphs[key] = self._capture(key, run)
                log.info("captured a burst %d of %d: %d rows", number, len(widths), width)
        gc.unfreeze()
        self.engine.inbox.is_ahead = True  # the state is sent again

    def _get_phases(self) -> Mapping[str, Callable[[Key], None]]:
        """Return the phases of a burst of padded steps, by name."""
        first = {} if self.num_frames == 1 else {"first": self._run_first}
        return {**first, "step": self._run_step, "end": self._run_end}

    # Planning of bursts.

    def _start(self, chosen: Mapping[RequestId, Wanted]) -> Burst:
        """Launch a burst, when the results of all earlier ones were read."""
        before = self._prepare(chosen)
        width = self._get_width(before)
        num_plans = min(before.num_left, self.steps) if width else self.steps
        return self._launch_burst(width, num_plans, before, self.engine.next_frame_id)

    def _start_ahead(self, burst: Burst) -> Burst | None:
        """Launch the burst that follows `burst`, if nothing that `burst` does can change it.

        Returns None otherwise. New requests, aborts and other events of the host wait for a later
        burst.
        """
        inbox, before = self.engine.inbox, burst.before
        if not burst.width or inbox.has_commands or inbox.added or inbox.is_ahead:
            return None
        least = before._replace(
            num_left=before.num_left - burst.num_plans,
            num_free=before.num_free - before.num_running * self._get_blocks_per_row(),
            num_free_nodes=before.num_free_nodes - self._get_nodes(),
        )
        if least.num_left < 1 or least.num_free_nodes < self._get_nodes():
            return None
        if self._get_width(least) != burst.width:
            return None
        first = burst.first_frame_id + burst.num_plans
        return self._launch_burst(burst.width, min(least.num_left, self.steps), least, first)

    def _get_width(self, now: Summary) -> int:
        """Return the rows of padded steps; 0 if a step may have a prompt, admit a request or lack a
        block.

        Running requests only continue or finish within a burst, so there are never more rows.
        """
        d = self.engine.inbox.dims
        if not 0 < now.num_running <= self._sizes[-1]:
            return 0
        width = self._sizes[bisect_left(self._sizes, now.num_running)]
        is_decode = (
            now.num_waiting == now.num_in_prefill == 0
            and width <= min(d.rows, d.batch)
            and now.num_free >= now.num_running * self._get_blocks_per_row()
        )
        return width if is_decode else 0

    def _get_blocks_per_row(self) -> int:
        """Return the most blocks that a request takes in a burst of decodes."""
        return (self.steps // self.config.block_size + 1) * len(self.config.kv_groups)

    def _get_nodes(self) -> int:
        """Return the most nodes of the prefix tree that a burst uses, including those of new
        requests."""
        most = self.steps * count_running(self.config) // self.config.block_size
        return most + len(self.engine.inbox.slot_of)

    def _prepare(self, chosen: Mapping[RequestId, Wanted]) -> Summary:
        """Update the device: its state, commands, sampling parameters, and room for nodes."""
        inbox, mirror = self.engine.inbox, self.mirror
        if self._summary is not None and mirror.is_current:
            self._reserve_on_device(self._summary)
        if not mirror.is_current:
            inbox.reserve_nodes(self.steps * count_running(self.config), len(inbox.slot_of))
            mirror.send_all()
            arrays = layout.State(*map(torch.from_numpy, inbox.state))
            self._summary = Summary(*summarise(arrays, self.config.max_model_len).tolist())
        if self._num_makes != mirror.num_makes:
            self._make_buffers()
        added = {slot: inbox.requests[slot] for slot in inbox.added if slot in inbox.requests}
        inbox.added.clear()
        num_bytes = self._params.put(added, chosen)
        if not mirror.is_shared:
            mirror.num_bytes_sent += num_bytes
        assert self._summary is not None, "read above if it was None"
        return self._summary

    def _reserve_on_device(self, now: Summary) -> None:
        """Run all commands on the device, and make room there for the nodes of a burst."""
        inbox, needed = self.engine.inbox, self._get_nodes()
        self.mirror.send_written()
        if inbox.has_commands:
            self._launch("settle_kernel")
            inbox.taken()
            now = self._summary = self._look()
        if now.num_free_nodes < needed:
            self._launch("sweep_kernel")
            now = self._summary = self._look()
        if now.num_free_nodes < needed:
            _ = inbox.state  # reads the state, so that the host reallocates tensors
            inbox.is_ahead = True

    def _look(self) -> Summary:
        """Return the numbers of the state on the device; waits for the device."""
        self.num_reads += 1
        if not self.mirror.is_shared:
            self.mirror.num_bytes_read += 4 * len(Summary._fields)
        return Summary(*self._memory.look().tolist())

    def _make_buffers(self) -> None:
        """Allocate all buffers of the graphs besides the state; graphs of older tensors are
        dropped."""
        d, device, widest = self.engine.inbox.dims, self.device, self._sizes[-1]
        self._num_makes = self.mirror.num_makes
        self._graphs.clear()
        self._pool = None
        self._params = SlotParams(d.slots, self._adapters, device)
        self.engine.inbox.added[:] = self.engine.inbox.requests
        self._memory = BurstMemory.make(
            self.mirror.state, d, self.config.max_model_len, self._params, self.steps, widest
        )
        self._starts = torch.arange(widest + 1, dtype=torch.int32, device=device)

    # Launching and reading a burst.

    def _launch_burst(
        self, width: int, num_plans: int, before: Summary, first_frame_id: FrameId
    ) -> Burst:
        """Launch up to `num_plans` steps, and the commits after them."""
        inbox = self.engine.inbox
        names = {slot: request.request_id for slot, request in inbox.requests.items()}
        reported = frozenset(self.engine.finished_req_ids)
        numbers = np.zeros(layout.CONTROL_COLUMNS, np.int32)
        numbers[layout.FRAME_ID] = numbers[layout.FIRST_ID] = first_frame_id
        numbers[layout.PREVIOUS_ID] = first_frame_id - 1
        numbers[layout.BUDGET] = self.config.max_num_batched_tokens
        numbers[layout.ADMITS] = 1
        self.mirror.send_row("control", numbers)
        memory, num_lines = self._memory, num_plans + self.num_frames
        has_adapters = bool(self.model.adapters) and self._params.has_adapters([*names])
        with torch.inference_mode():
            if width:
                self._launch_padded(width, num_plans, has_adapters)
                out = memory.get_out(num_lines, width)
            else:
                num_plans, widest = self._launch_rows(num_plans, has_adapters)
                lines = memory.get_lines(inbox.dims.rows)[: num_plans + self.num_frames]
                out = torch.cat((memory.summary, lines[:, :, :widest].flatten()))
        inbox.is_behind = True
        inbox.spare_nodes = before.num_free_nodes - self._get_nodes()
        self.num_bursts += 1
        return Burst(width, num_plans, first_frame_id, names, reported, before, Incoming(out))

    def _read(self, burst: Burst) -> list[StepRan]:
        """Wait for a burst; remove finished requests from the engine; return plans and commits."""
        out = burst.incoming.wait()
        if not self.mirror.is_shared:
            self.mirror.num_bytes_read += out.nbytes
        split = len(Summary._fields)
        self._summary = Summary(*out[:split].tolist())
        lines = out[split:].reshape(burst.num_plans + self.num_frames, COLUMNS, -1)
        reader = JournalReader(lines, burst.names, self.num_frames)
        steps = reader.read(burst.num_plans, burst.first_frame_id)
        self.engine.take_steps(
            burst.num_plans, burst.reported, reader.ended, reader.unreported, reader.last_names
        )
        return steps

    # Steps whose shape the host reads.

    def _launch_rows(self, num_plans: int, has_adapters: bool) -> tuple[int, int]:
        """Launch steps of any kind, until one has no rows or the next can be padded.

        Returns the number of steps, and of rows of the widest.
        """
        done, widest, goes = 0, 0, True
        memory, most = self._memory, self.engine.inbox.dims.rows
        lines = memory.get_lines(most)
        lines.zero_()
        while goes and done < num_plans:
            self._launch("loop_kernel")
            now = self._look()
            live = memory.lanes[: now.num_rows] >= 0
            plan, answers = memory.note_plan(live, lines)
            if now.num_rows:
                self._pass_rows(plan, answers, now.num_tokens, has_adapters)
            goes = now.num_rows > 0 and not self._get_width(now)
            done, widest = done + 1, max(widest, now.num_rows)
        self._drain(most)
        return done, widest

    def _pass_rows(
        self, plan: torch.Tensor, answers: Answers, num_tokens: int, has_adapters: bool
    ) -> None:
        """Run the forward pass of the plan `[ROW_COLUMNS, num_rows]` just made, and sample its
        tokens."""
        state, config = self.mirror.state, self.config
        slots, num_rows = answers.slots, len(answers.slots)
        lengths = plan[layout.ROW_TOKENS].long()
        slot_of = slots.repeat_interleave(lengths, output_size=num_tokens)
        positions = state.positions[:num_tokens]
        starts = state.query_start_loc[: num_rows + 1]
        num_blocks = -(-config.max_model_len // config.block_size)
        inputs = Inputs(
            token_ids=self._get_tokens(slot_of, positions),
            positions=positions,
            slot_mapping=state.slot_mapping[:, :num_tokens],
            block_tables=state.tables[:, slots, :num_blocks].contiguous(),
            query_start_loc=starts,
            seq_lens=state.seq_lens[:num_rows],
            max_query_len=num_tokens - num_rows + 1,
            adapters=self._params.get_adapters(slot_of) if has_adapters else None,
        )
        hidden = self.model.forward(inputs)[starts[1:].long() - 1]
        lines = self._memory.get_lines(self.engine.inbox.dims.rows)
        self._memory.take_tokens(self._sample(hidden, answers), answers, lines)

    def _get_tokens(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return tokens at positions: known ones, or the one that the previous pass sampled."""
        state = self.mirror.state
        known = state.tokens[slots, positions].long()
        if self.num_frames == 1:
            return known
        return torch.where(positions < state.known[slots], known, self._memory.sampled[slots])

    # Padded steps: no value of the device is read here.

    def _launch_padded(self, width: int, num_plans: int, has_adapters: bool) -> None:
        """Launch steps of one token per row; on a GPU each phase is a graph.

        With one frame in flight: `num_plans` times step, then end. With two: first, `num_plans - 1`
        times step, then end.
        """
        phases = self._get_phases()
        repeats = {"step": num_plans - (self.num_frames > 1)}
        for phase, run in phases.items():
            for _ in range(repeats.get(phase, 1)):
                self._perform(Key(phase, width, has_adapters), run)

    def _perform(self, key: Key, run: Callable[[Key], None]) -> None:
        """Run a phase; on a GPU replay its graph, which is captured after some runs.

        The first runs compile the kernels, which must not happen during a capture.
        """
        known = self._graphs.setdefault(key, 0)
        if self.device.type == "cpu":
            run(key)
        elif isinstance(known, int) and known < NUM_WARM_UPS:
            run(key)
            self._graphs[key] += 1
        else:
            if isinstance(known, int):
                self._graphs[key] = known = self._capture(key, run)
            known.replay()

    def _capture(self, key: Key, run: Callable[[Key], None]) -> torch.cuda.CUDAGraph:
        """Capture a phase. All graphs share one memory pool, since no two of them run at once."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run(key)
        self._pool = graph.pool()
        return graph

    def _run_first(self, key: Key) -> None:
        """Plan the first of several frames."""
        now, _ = self._memory.get_rows(key.width)
        self._plan(now)

    def _run_step(self, key: Key) -> None:
        """Plan a frame, and run one: the same, or the one planned before it."""
        now, following = self._memory.get_rows(key.width)
        if self.num_frames == 1:
            self._plan(now)
            self._take(self._pass(now, key), now, None)
            return
        with self._beside():
            self._plan(following)
        tokens = self._pass(now, key)
        self._join()
        self._take(tokens, now, following)

    def _run_end(self, key: Key) -> None:
        """Run the frame that was planned last, unless it has run; commit all frames in flight."""
        if self.num_frames > 1:
            now, _ = self._memory.get_rows(key.width)
            self._take(self._pass(now, key), now, None)
        self._drain(key.width)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch the body on the scheduler's stream, after everything launched so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        """Let later launches wait for the scheduler's stream."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _plan(self, rows: Padded) -> None:
        """Commit, plan, and write the inputs of this plan's pass into `rows`."""
        self._launch("loop_kernel")
        self._memory.write_rows(rows)

    def _pass(self, rows: Padded, key: Key) -> torch.Tensor:
        """Run the forward pass of a plan; return the token that each row samples, [width] int64."""
        numbers = rows.numbers
        inputs = Inputs(
            token_ids=numbers[TOKEN],
            positions=numbers[POSITION],
            slot_mapping=rows.get_slot_mapping(),
            block_tables=rows.tables,
            query_start_loc=self._starts[: key.width + 1],
            seq_lens=rows.ints[0],
            max_query_len=1,
            adapters=numbers[ADAPTER] if key.has_adapters else None,
        )
        # Not the model's own decode graph: this is captured as part of a larger one.
        return self._sample(Model.forward(self.model, inputs), rows.get_answers())

    def _take(self, tokens: torch.Tensor, rows: Padded, following: Padded | None) -> None:
        """Write the tokens of a pass.

        `following`: the rows of the next plan, which was made during the pass; they become `rows`.
        """
        is_alone = following is None or self._side is None
        self._memory.take_rows_tokens(tokens, rows, following, is_alone=is_alone)

    # Parts of every step.

    def _sample(self, hidden: torch.Tensor, answers: Answers) -> torch.Tensor:
        """Return a token for each row of `hidden` [n, hidden_size], [n] int64."""
        logits = self.model.compute_logits(hidden)
        return sample_tokens(logits, **answers.sampling._asdict(), indices=answers.indices)

    def _drain(self, width: int) -> None:
        """Commit all frames in flight, and summarise the state; the burst has `width` rows."""
        for number in range(self.num_frames):
            self._launch("settle_kernel")
            is_last = number == self.num_frames - 1
            self._memory.note_end(width, number, is_last=is_last)

    def _launch(self, kernel: str) -> None:
        """Launch a kernel of the scheduler on the device's state."""
        inbox = self.engine.inbox
        if self.device.type == "cpu":
            inbox.launch_on(kernel, self.mirror.arrays)
            return
        launch_kernel(kernel, self.mirror.state, inbox.dims)


def _log_progress(kernel: str, done: int, count: int) -> None:
    log.info(
        "compiled %d of %d kernels of the scheduler %s",
        done,
        count,
        kernel and f"({kernel} is next)",
    )
