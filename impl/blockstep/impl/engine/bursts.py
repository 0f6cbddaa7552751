"""Bursts: the parts of a step on the device that are neither the scheduler's nor the model's.

    loop_kernel -> write_rows -> pass -> sample_tokens -> take_tokens
                       |                                      |
                       +---------- lines of the journal ------+----> host, at a fence

On a GPU each of them is one launch (`bursts_triton`); torch's operations here are its reference,
and what runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from blockstep.impl.device import layout
from blockstep.impl.device.dims import Dims
from blockstep.impl.engine.adapters import NO_ADAPTER
from blockstep.impl.engine.journal import COLUMNS, PLAN_COLUMNS, RECORD_COLUMN, TOKEN_COLUMN
from blockstep.impl.engine.padded import (
    ELSEWHERE,
    FED,
    KNOWN,
    SLOT,
    TOKEN,
    Answers,
    Padded,
    count_words,
)
from blockstep.impl.engine.slots import Sampling, SlotParams


class Summary(NamedTuple):
    """Numbers of the scheduler's state."""

    num_rows: int
    """Rows of the last plan."""
    num_tokens: int
    """Scheduled tokens of the last plan."""
    num_waiting: int
    num_in_prefill: int
    """The number of running requests with a prompt that is not yet computed."""
    num_running: int
    num_free: int
    num_free_nodes: int
    num_preempted: int
    """Requests preempted by the last plan."""
    num_left: int
    """Tokens until the last running request reaches its maximum length."""


NUM_NUMBERS = len(Summary._fields)


@dataclass(eq=False, slots=True)
class BurstMemory:
    """The tensors of all bursts, besides the model's and the scheduler's."""

    state: Any
    """The scheduler's tensors; see `layout.State`."""
    dims: Dims
    max_model_len: int
    params: SlotParams
    sampled: torch.Tensor
    """[slots + 1] int64: the token that each request sampled last, by request index. The last entry
    is for rows that do not sample."""
    out: torch.Tensor
    """[numbers] int32: a `Summary`, then the lines of the journal; see `get_lines`."""
    rows: torch.Tensor
    """[2, words] int32: rows of the running step, and of the step that is planned at that time."""
    lanes: torch.Tensor
    """[0, 1, 2, ...] int64, as many as a step can have rows."""

    @classmethod
    def make(
        cls, state: Any, dims: Dims, max_model_len: int, params: SlotParams, steps: int, widest: int
    ) -> BurstMemory:
        """Return memory for bursts of `steps` plans; the widest padded step has `widest` rows."""
        device, d = state.known.device, dims
        words = -(-widest * count_words(d.groups, d.table) // 4) * 4  # both begin at 16 bytes
        num_lines = (steps + d.frames) * COLUMNS * d.rows
        return cls(
            state,
            dims,
            max_model_len,
            params,
            torch.zeros(d.slots + 1, dtype=torch.int64, device=device),
            torch.zeros(NUM_NUMBERS + num_lines, dtype=torch.int32, device=device),
            torch.zeros((2, words), dtype=torch.int32, device=device),
            torch.arange(max(widest, d.rows), device=device),
        )

    @property
    def summary(self) -> torch.Tensor:
        """[9] int32: the numbers that `note_end` or `look` wrote last."""
        return self.out[:NUM_NUMBERS]

    def get_rows(self, width: int) -> tuple[Padded, Padded]:
        """Return the rows of the running step, and of the step that is planned."""
        now, following = self.rows
        d = self.dims
        return (
            Padded.view(now, width, d.groups, d.table),
            Padded.view(following, width, d.groups, d.table),
        )

    def get_lines(self, width: int) -> torch.Tensor:
        """Return the journal of a burst of `width` rows, [lines, COLUMNS, width]."""
        size = COLUMNS * width
        num_lines = (len(self.out) - NUM_NUMBERS) // (COLUMNS * self.dims.rows)
        return self.out[NUM_NUMBERS : NUM_NUMBERS + num_lines * size].view(-1, COLUMNS, width)

    def get_out(self, num_lines: int, width: int) -> torch.Tensor:
        """Return the summary and the first lines of a burst of `width` rows, [numbers] int32."""
        return self.out[: NUM_NUMBERS + num_lines * COLUMNS * width]

    def write_rows(self, rows: Padded) -> None:
        """Write the inputs of the plan just made into `rows`, and the journal's line of the launch.

        The line has the plan, and the record of the commit before it.
        """
        width = rows.ints.shape[1]
        if kernels := _find_kernels(self.out):
            kernels.launch_write_rows(self.out, self, rows)
            return
        state = self.state
        live = self.lanes[:width] < state.num_rows
        _, answers = self.note_plan(live, self.get_lines(width))
        slots, positions = answers.slots, torch.where(live, state.positions[:width], 0)
        fed = torch.where(positions < state.known[slots], KNOWN, self._find_fed(answers))
        fed = torch.where(live, fed, KNOWN)
        tokens = torch.where(live & (fed == KNOWN), state.tokens[slots, positions].long(), 0)
        sampling = answers.sampling
        rows.fill(
            tokens,
            fed,
            positions,
            torch.where(live, state.slot_mapping[:, :width], -1),
            torch.where(live, self.params.get_adapters(slots), NO_ADAPTER),
            answers._replace(sampling=Sampling(*(torch.where(live, x, 0) for x in sampling))),
            torch.where(live[:, None], state.tables[:, slots], 0),
            torch.where(live, state.seq_lens[:width], 1),
        )

    def _find_fed(self, answers: Answers) -> torch.Tensor:
        """Return the row of each request in the plan before this one, [width] int64.

        `ELSEWHERE` if it has none that samples.
        """
        state, d, width = self.state, self.dims, len(answers.slots)
        lanes = self.lanes[:width]
        before = (answers.rows[:1] // d.rows - 1) % d.frames
        plan = state.plans.index_select(0, before)[0, :, :width]
        samples = (plan[layout.ROW_SAMPLES] > 0) & (lanes < state.plan_rows[before])
        is_same = samples & (plan[layout.ROW_SLOT] == answers.slots[:, None])
        return torch.where(is_same, lanes, ELSEWHERE).amax(1)

    def note_plan(self, live: torch.Tensor, lines: torch.Tensor) -> tuple[torch.Tensor, Answers]:
        """Write a launch's line of the journal, and the number of tokens in each row's model
        output.

        `live` [n]: which lanes are rows of the plan. Returns the columns of the plan `[ROW_COLUMNS,
        n]`, and where its tokens are written.
        """
        state, width, d = self.state, len(live), self.dims
        control = state.control.long()
        at = control[layout.FRAME_ID, None] - 1 - control[layout.FIRST_ID]
        # For an empty plan, a place that is not in use: no other model output may be overwritten.
        place = (control[layout.PLACE, None] - (state.num_rows > 0).long()) % d.frames
        plan: torch.Tensor = state.plans.index_select(0, place)[0, :, :width]
        plan = torch.where(live, plan, 0)
        slots, samples = plan[layout.ROW_SLOT], plan[layout.ROW_SAMPLES]
        columns = torch.stack((slots, plan[layout.ROW_TOKENS], samples))
        lines[:, :PLAN_COLUMNS, :width].index_copy_(0, at, columns[None])
        self._note_record(lines, at)
        rows = place * d.rows + self.lanes[:width]
        state.answer_counts.view(-1).index_copy_(0, rows, samples)
        slots, unused = slots.long(), len(self.sampled) - 1
        feeds = torch.where(samples > 0, slots, unused)
        indices, sampling = plan[layout.ROW_OUTPUTS].long(), self.params.get_sampling(slots)
        return plan, Answers(slots, indices, rows, feeds, at, sampling)

    def take_tokens(self, tokens: torch.Tensor, answers: Answers, lines: torch.Tensor) -> None:
        """Write sampled tokens [n] for the commit, for the next pass, and into the journal."""
        token_ids, state = tokens.int(), self.state
        first = state.answer_tokens.view(-1, state.answer_tokens.shape[2])[:, 0]
        first.index_copy_(0, answers.rows, token_ids)
        self.sampled.index_copy_(0, answers.feeds, tokens)
        lines[:, TOKEN_COLUMN, : len(token_ids)].index_copy_(0, answers.line, token_ids[None])

    def take_rows_tokens(
        self, tokens: torch.Tensor, now: Padded, following: Padded | None, *, is_alone: bool
    ) -> None:
        """Take the tokens of padded rows; then make the following plan's rows those of the next
        pass.

        `following`: the next plan's rows; None if there is none yet. `is_alone`: whether the launch
        waits for one stream only.
        """
        if kernels := _find_kernels(self.out):
            kernels.launch_take_tokens(tokens, self, now, following, is_alone)
            return
        self.take_tokens(tokens, now.get_answers(), self.get_lines(len(tokens)))
        if following is not None:
            now.copy_from(following)
            numbers = now.numbers
            last = self.sampled[numbers[SLOT]].clamp(min=0)
            numbers[TOKEN] = torch.where(numbers[FED] == KNOWN, numbers[TOKEN], last)

    def note_end(self, width: int, number: int, *, is_last: bool) -> None:
        """Write the record of the commit number `number` after the last plan of a burst of `width`
        rows; after the last commit also the summary."""
        lines = self.get_lines(width)
        if kernels := _find_kernels(self.out):
            kernels.launch_note_end(self.out, self, lines, number, is_last)
            return
        control = self.state.control.long()
        self._note_record(lines, control[layout.FRAME_ID, None] - control[layout.FIRST_ID] + number)
        if is_last:
            self.look()

    def look(self) -> torch.Tensor:
        """Return the numbers of a `Summary` of the state, [9] int32 on the device."""
        if kernels := _find_kernels(self.out):
            kernels.launch_note_end(self.out, self, None, 0, True)
        else:
            self.summary.copy_(summarise(self.state, self.max_model_len))
        return self.summary

    def _note_record(self, lines: torch.Tensor, at: torch.Tensor) -> None:
        record = self.state.record[None, :, : lines.shape[2]]
        lines[:, RECORD_COLUMN:].index_copy_(0, at, record)


def _find_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """Return the module of the kernels if this tensor needs them, else None."""
    return import_module("blockstep.impl.engine.bursts_triton") if tensor.is_cuda else None


def summarise(state: Any, max_model_len: int) -> torch.Tensor:
    """Return the numbers of `Summary`, [9] int32."""
    live = torch.arange(len(state.run), device=state.run.device) < state.num_running
    slots = torch.where(live, state.run, 0).long()
    left = state.end_by_max_tokens[slots].clamp(max=max_model_len) - state.known[slots]
    return torch.cat(
        (
            state.num_rows,
            state.query_start_loc.index_select(0, state.num_rows),
            (state.key != layout.FAR).sum(0, keepdim=True),
            (live & (state.is_prefill[slots] > 0)).sum(0, keepdim=True),
            state.num_running,
            state.num_free,
            state.num_free_nodes,
            state.num_preempted,
            torch.where(live, left, 0).amax(0, keepdim=True),
        )
    ).int()
