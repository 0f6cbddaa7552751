"""Batch: the worker's state of all requests, kept between steps and changed by plans alone.

    token_ids     [row, position]   prompt and outputs, then drafts of the step
    block_tables  [group, row, index]      blocks of the request, a table per KV group
    columns       [row]                    numbers of each request

    known tokens  |------------- num_known -------------|
                  | read from the device |- num_pending-|   sampled by frames in flight
    KV exists     |------- num_computed -------|

A request has one row from its first plan until the plan that lists it as finished. Row 0 belongs to
no request: padding reads its table, which is all null blocks. A plan brings differences only;
nothing is rebuilt. Under asynchronous scheduling the worker is ahead of the plans by the tokens
that frames in flight sampled, and behind them by the drafts that those rejected. So `num_computed`
is the worker's own for running requests, and the plan's for one that starts or resumes. Source:
seed 001 "CachedRequestData", "NewRequestData"; P26.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blockstep.impl.array_plans import ArrayPlan
from blockstep.impl.engine.adapters import NO_ADAPTER
from blockstep.impl.engine.model import Inputs
from blockstep.impl.engine.rows import Columns, RowArrays, Wanted
from blockstep.impl.engine.sampler import Draw
from blockstep.impl.engine.staging import ArrayStep, Staging
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    BlockId,
    BlockTables,
    CachedRow,
    Config,
    FrameId,
    NewRow,
    Plan,
    Request,
    RequestId,
    RequestSnapshot,
    TokenIds,
)

NUM_ROWS_FIRST = 16


class BatchRow:
    """A request in the batch; of a session, the answer to one of its inputs.

    Its numbers are in the columns of the batch. When the batch forgets the request, the row keeps a
    copy of the last ones.
    """

    __slots__ = (
        "_at", "_columns", "adapter", "index", "num_prompt", "proposal", "request_id", "void",
        "wanted",
    )  # fmt: skip

    def __init__(
        self,
        request_id: RequestId,
        index: int,
        columns: Columns,
        wanted: Wanted,
        adapter: int,
        num_prompt: int,
    ) -> None:
        self.request_id = request_id
        self.index = self._at = index
        """Row of the arrays."""
        self._columns = columns
        self.wanted = wanted
        self.adapter = adapter
        """The number of its LoRA adapter, or `NO_ADAPTER`."""
        self.num_prompt = num_prompt
        self.proposal: TokenIds = ()
        """Drafts for its next row, if drafts stay with the worker (asynchronous scheduling)."""
        self.void: Void | None = None
        """Counters before a failed load, to which the batch rolls the request back."""

    def detach(self) -> None:
        """Copy the request's numbers out of the arrays, because their row goes to another
        request."""
        self._columns, self._at = self._columns.take(self._at), 0

    @property
    def num_known(self) -> int:
        """Tokens of prompt and outputs."""
        return int(self._columns.num_known[self._at])

    @num_known.setter
    def num_known(self, value: int) -> None:
        self._columns.num_known[self._at] = value

    @property
    def num_computed(self) -> int:
        """Tokens whose KV exists once the device has run all steps given to it."""
        return int(self._columns.num_computed[self._at])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._columns.num_computed[self._at] = value

    @property
    def num_blocks(self) -> int:
        """Length of each of its block tables: all groups have one block size, so all are equally
        long."""
        return int(self._columns.num_blocks[self._at])

    @num_blocks.setter
    def num_blocks(self, value: int) -> None:
        self._columns.num_blocks[self._at] = value


@dataclass(frozen=True, slots=True)
class Void:
    """The counters of a request before it ran on KV that failed to load.

    It keeps running until the scheduler learns of the failure; tokens sampled meanwhile do not
    count.
    """

    frame_id: FrameId
    """The plan whose model output reports the failed load."""
    num_known: int
    num_computed: int


@dataclass(slots=True)
class StepRow:
    """A request's row of a plan."""

    row: BatchRow
    first: int
    """Position of the first token that runs."""
    end: int
    """One past the last."""
    drafts: TokenIds
    """Draft tokens at the end of the tokens that run; all unverified."""
    samples: bool
    """Whether the step computes the last known token, so that a token is sampled."""
    sampled: TokenIds = ()
    void: Void | None = None
    """Set if the row reads KV that failed to load, so that its tokens are invalid."""

    @property
    def is_past(self) -> bool:
        """Whether the request was rolled back after this row ran on KV that failed to load."""
        return self.void is not None and self.row.void is not self.void

    @property
    def num_logits(self) -> int:
        """Number of positions whose next token is sampled."""
        return 1 + len(self.drafts) if self.samples else 0

    def get_draws(self) -> list[Draw]:
        """Return what to sample: one token after the known ones, and one after each draft."""
        row, wanted = self.row, self.row.wanted
        first = row.num_known - row.num_prompt
        return [Draw(wanted.params, wanted.seed, first + more) for more in range(self.num_logits)]


class Batch:
    """All requests that the worker knows; `adapters`: names of the model's LoRA adapters, in
    order."""

    def __init__(self, config: Config, device: str, adapters: Sequence[str] = ()) -> None:
        self.config = config
        self.device = device
        self.adapters = tuple(adapters)
        self.rows: dict[RequestId, BatchRow] = {}
        self.arrays = RowArrays(config, NUM_ROWS_FIRST)
        self.row_at: list[BatchRow | None] = [None] * NUM_ROWS_FIRST
        """[rows]"""
        self.staging = Staging(self.arrays, device)
        self._free = list(range(NUM_ROWS_FIRST - 1, 0, -1))
        self._index_of_slot: np.ndarray = np.zeros(NUM_ROWS_FIRST, np.int64)
        """[request indices]: the row of the request with this index in the scheduler; 0 if unknown.
        """
        self._failed: Mapping[RequestId, int] = {}
        """Number of valid tokens of each request whose load failed in the plan that is being
        applied."""
        self._frame_id: FrameId = 0

    def apply(
        self,
        plan: Plan,
        chosen: Mapping[RequestId, Wanted],
        failed: Mapping[RequestId, int] | None = None,
    ) -> list[StepRow]:
        """Apply the differences of a plan; return its rows in plan order.

        `chosen`: how to sample the outputs of new requests. `failed`: the number of valid tokens of
        each request whose KV could not be loaded.
        """
        self._leave(plan.finished_req_ids, plan.preempted_req_ids)
        self._failed = failed or {}
        self._frame_id = plan.frame_id
        for request_id in plan.remapped_req_ids:
            self.rows[request_id].num_blocks = 0  # its row brings whole tables
        step = [self._start_new(new, chosen[new.request_id]) for new in plan.new]
        step += [self._start_cached(cached) for cached in plan.cached]
        if self.config.num_speculative_tokens:
            for row in self.rows.values():
                row.proposal = ()
        return step

    def apply_arrays(self, plan: ArrayPlan, chosen: Mapping[RequestId, Wanted]) -> ArrayStep:
        """Apply the differences of a plan in arrays, which has no drafts; see `apply`.

        No object is made for a row whose request neither starts nor finishes.
        """
        self._leave(plan.finished_req_ids, plan.preempted_req_ids)
        index = self._get_index(plan, chosen)
        columns = self.arrays.columns
        if plan.resumed_rows:
            columns.num_blocks[index[plan.resumed_rows]] = 0
        if len(plan.block_ids):
            self._append_block_arrays(index, plan)
        starts = plan.num_computed_tokens.astype(np.int64)
        counts = plan.num_scheduled_tokens.astype(np.int64)
        columns.num_computed[index] = starts + counts
        sampling = None if plan.samples is None else plan.samples.nonzero()[0]
        return ArrayStep(index, starts, counts, sampling)

    def _get_index(self, plan: ArrayPlan, chosen: Mapping[RequestId, Wanted]) -> np.ndarray:
        """Return the batch row of each request of a plan, [rows] int64; add new requests."""
        slots = plan.slots
        num_slots = int(slots.max(initial=0)) + 1
        if num_slots > len(self._index_of_slot):
            more = np.zeros(2 * num_slots, np.int64)
            more[: len(self._index_of_slot)] = self._index_of_slot
            self._index_of_slot = more
        for at, request in plan.new_rows.items():
            row = self._add(request, chosen[request.request_id], ())
            self._learn_slot(int(slots[at]), row.index)
        index = self._index_of_slot[slots]
        if not index.all():  # these started in a plan of objects
            for at in (index == 0).nonzero()[0].tolist():
                index[at] = self.rows[plan.request_ids[at]].index
                self._learn_slot(int(slots[at]), int(index[at]))
        return index

    def _learn_slot(self, slot: int, index: int) -> None:
        self._index_of_slot[slot] = index
        self.arrays.columns.slot[index] = slot

    def note_delivered(self, slots: np.ndarray, num_cached_tokens: np.ndarray) -> np.ndarray:
        """Count a delivered token for the requests at these indices; their outputs read it later.

        Returns the requests' rows.
        """
        index: np.ndarray = self._index_of_slot[slots]
        self.arrays.columns.num_late[index] += 1
        self.arrays.columns.num_cached[index] = num_cached_tokens
        return index

    def take_late(self, request_id: RequestId, num_taken: int) -> tuple[TokenIds, int]:
        """Return the delivered output tokens that its output lacks, and its number of cached
        tokens.

        The output has the first `num_taken` tokens already. Returns ((), 0) if nothing is late.
        """
        row = self.rows.get(request_id)
        num_late = 0 if row is None else int(self.arrays.columns.num_late[row.index])
        if row is None or not num_late:
            return (), 0
        self.arrays.columns.num_late[row.index] = 0
        first = row.num_prompt + num_taken
        tokens = self.arrays.token_ids[row.index, first : first + num_late].tolist()
        return tuple(tokens), int(self.arrays.columns.num_cached[row.index])

    def restore(self, begun: Iterable[tuple[Request, RequestSnapshot, Wanted]]) -> None:
        """Rebuild the batch after steps that ran elsewhere; `begun`: all started requests, as they
        are."""
        for name in tuple(self.rows):
            self._forget(name)
        for request, now, wanted in begun:
            row = self._add(request, wanted, now.output_token_ids)
            row.num_computed = now.num_computed_tokens
            self._append_blocks(row, now.block_tables)

    def go_back(self, frame_id: FrameId) -> None:
        """Roll back the requests whose loads failed with this plan, as the scheduler does now."""
        for row in self.rows.values():
            if row.void is not None and row.void.frame_id == frame_id:
                self._go_back(row)

    def get_computed(self, request_id: RequestId) -> tuple[TokenIds, tuple[BlockId, ...]]:
        """Return token ids and block ids of the request's full blocks in the first KV group.

        Only known and computed tokens count. Both tuples are empty if the request is unknown.
        """
        row = self.rows.get(request_id)
        if row is None:
            return (), ()
        self._go_back(row)
        size = self.config.block_size
        num_full = min(min(row.num_computed, row.num_known) // size, row.num_blocks)
        tokens = self.get_tokens(row)[: num_full * size].tolist()
        return tuple(tokens), tuple(self.arrays.block_tables[0, row.index, :num_full].tolist())

    def append(self, row: BatchRow, tokens: Sequence[int]) -> None:
        """Append tokens to the known ones."""
        end = row.num_known + len(tokens)
        self.arrays.token_ids[row.index, row.num_known : end] = tokens
        row.num_known = end

    def get_tokens(self, row: BatchRow) -> np.ndarray:
        """Return its known tokens, a view [num_known] int32."""
        tokens: np.ndarray = self.arrays.token_ids[row.index, : row.num_known]
        return tokens

    def get_room(self, row: BatchRow) -> int:
        """Return the number of its positions that have a slot in a block."""
        return min(row.num_blocks * self.config.block_size, self.config.max_model_len)

    def build_inputs(
        self, rows: Sequence[BatchRow], first: Sequence[int], end: Sequence[int]
    ) -> Inputs:
        """Build the inputs of a pass over positions [`first`, `end`) of each row, on the device."""
        index = np.fromiter((row.index for row in rows), np.int64, len(rows))
        starts = np.array(first, np.int64)
        step = ArrayStep(index, starts, np.array(end, np.int64) - starts, None)
        return self.staging.build(step).inputs

    def _start_new(self, new: NewRow, wanted: Wanted) -> StepRow:
        row = self._add(new.request, wanted, new.output_token_ids)
        row.num_computed = new.num_computed_tokens
        self._append_blocks(row, new.block_ids)
        return self._start(row, new.num_scheduled_tokens, ())

    def _add(self, request: Request, wanted: Wanted, outputs: TokenIds) -> BatchRow:
        name, prompt = request.request_id, request.prompt_token_ids
        self._forget(name)  # a session that continues gets a new row, with all that it keeps
        adapter = NO_ADAPTER if request.adapter is None else self.adapters.index(request.adapter)
        index = self._take_index()
        self.arrays.columns.start(index, len(prompt), adapter, wanted)
        row = BatchRow(name, index, self.arrays.columns, wanted, adapter, len(prompt))
        self.rows[name] = self.row_at[index] = row
        self.append(row, (*prompt, *outputs))
        return row

    def _leave(self, ended: Iterable[RequestId], preempted: Iterable[RequestId]) -> None:
        """Forget finished requests, and reset the counters of preempted ones, whose KV is gone."""
        for request_id in ended:
            self._forget(request_id)
        for request_id in preempted:
            row = self.rows.get(request_id)
            if row is not None:  # None: a request that only had a load was preempted
                self._go_back(row)
                row.num_computed = row.num_blocks = 0

    def _go_back(self, row: BatchRow) -> None:
        if row.void is not None:
            row.num_known, row.num_computed = row.void.num_known, row.void.num_computed
            row.void, row.proposal = None, ()

    def _forget(self, request_id: RequestId) -> None:
        row = self.rows.pop(request_id, None)
        if row is not None:
            slot = self.arrays.columns.slot[row.index]
            if slot >= 0:
                self._index_of_slot[slot] = 0
            row.detach()
            self._free.append(row.index)

    def _start_cached(self, cached: CachedRow) -> StepRow:
        row = self.rows[cached.request_id]
        if cached.resumed:
            row.num_blocks = 0
            row.num_computed = cached.num_computed_tokens
        self._append_blocks(row, cached.new_block_ids)
        drafts = cached.draft_token_ids
        if DRAFT_PLACEHOLDER in drafts:
            drafts = row.proposal[: len(drafts)]
        return self._start(row, cached.num_scheduled_tokens, drafts)

    def _start(self, row: BatchRow, num_scheduled: int, drafts: TokenIds) -> StepRow:
        first, end = row.num_computed, row.num_computed + num_scheduled
        if drafts:
            self.arrays.token_ids[row.index, row.num_known : row.num_known + len(drafts)] = drafts
        row.num_computed = end
        if row.request_id in self._failed:
            valid = self._failed[row.request_id]
            row.void = Void(self._frame_id, row.num_known, valid)
        return StepRow(row, first, end, drafts, samples=end >= row.num_known, void=row.void)

    def _append_blocks(self, row: BatchRow, tables: BlockTables) -> None:
        if not tables[0]:
            return
        first = row.num_blocks
        end = first + len(tables[0])
        for group, blocks in enumerate(tables):
            self.arrays.block_tables[group, row.index, first:end] = blocks
        row.num_blocks = end
        self.staging.note_blocks(np.full(end - first, row.index), np.arange(first, end))

    def _append_block_arrays(self, index: np.ndarray, plan: ArrayPlan) -> None:
        """Append the new blocks of a plan; each row gets as many in every group."""
        chosen = (slice(None),)
        if plan.block_groups is not None:
            groups = range(len(plan.num_common_prefix_blocks))
            chosen = tuple([plan.block_groups == group for group in groups])
        block_rows = plan.block_rows[chosen[0]]
        num_before = np.arange(len(block_rows)) - block_rows.searchsorted(block_rows)
        rows = index[block_rows]
        places = self.arrays.columns.num_blocks[rows] + num_before
        for group, of_group in enumerate(chosen):
            self.arrays.block_tables[group, rows, places] = plan.block_ids[of_group]
        self.arrays.columns.num_blocks[rows] = places + 1  # of several blocks the last write wins
        self.staging.note_blocks(rows, places)

    def _take_index(self) -> int:
        """Return a free row; the arrays double when there is none."""
        if not self._free:
            num_rows = len(self.arrays.token_ids)
            self.arrays.grow()
            self.row_at += [None] * num_rows
            self._free.extend(range(2 * num_rows - 1, num_rows - 1, -1))
        return self._free.pop()
