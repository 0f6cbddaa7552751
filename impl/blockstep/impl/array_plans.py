"""Arrays: a plan and its outputs as arrays for a model runner, convertible into objects.

Rows are in order of scheduling: running requests in running order, then admitted ones in order of
admission, new and resumed mixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstep.impl.objects import make_cached_rows, make_output_rows
from blockstep.spec.vocabulary import (
    BlockCopy,
    BlockId,
    BlockTables,
    CachedRow,
    EncoderInputs,
    FinishReason,
    FrameId,
    KVEvent,
    KVLoad,
    KVSave,
    NewRow,
    OutputRow,
    Outputs,
    Plan,
    Request,
    RequestId,
    TokenIds,
)

Int32s: TypeAlias = NDArray[np.int32]
_NO_NEW_BLOCKS: Final[BlockTables] = ((),)
_GOES_ON: Final[tuple[FinishReason | None, int | None]] = (None, None)


class SlotNames:
    """Request ids of rows, looked up when read: a user of arrays mostly needs only request indices.

    Args:
        table: [slots]: request ids; it must not change.
        slots: [rows]
    """

    __slots__ = ("_names", "_slots", "_table")

    def __init__(self, table: NDArray[np.object_], slots: NDArray[np.int64]) -> None:
        self._table, self._slots = table, slots
        self._names: list[RequestId] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> NDArray[np.int64]:
        """[rows]: request indices."""
        return self._slots

    def tolist(self) -> list[RequestId]:
        """Return the request ids; the same list each time."""
        if self._names is None:
            self._names = self._table.take(self._slots).tolist()
        return self._names

    def get(self, row: int) -> RequestId:
        """Return the request id of one row."""
        name: RequestId = self._table[self._slots[row]]
        return name

    def take(self, rows: Int32s) -> SlotNames:
        """Return the ids of the rows with these indices."""
        return SlotNames(self._table, self._slots.take(rows))


class RowDrafts(Mapping[int, TokenIds]):
    """Drafts by row, built when first read; they are at the end of `ids`."""

    __slots__ = ("_counts", "_ids", "_rows")

    def __init__(self, counts: Int32s, ids: Int32s) -> None:
        self._counts, self._ids = counts, ids
        self._rows: dict[int, TokenIds] | None = None

    def _get_rows(self) -> dict[int, TokenIds]:
        if self._rows is None:
            ends = np.cumsum(self._counts)
            ids = self._ids[len(self._ids) - int(ends[-1]) :].tolist() if len(ends) else []
            self._rows = {
                row: tuple(ids[end - count : end])
                for row, (end, count) in enumerate(
                    zip(ends.tolist(), self._counts.tolist(), strict=True)
                )
                if count
            }
        return self._rows

    def __getitem__(self, row: int) -> TokenIds:
        return self._get_rows()[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._get_rows())

    def __len__(self) -> int:
        return len(self._get_rows())


class PlanObjects(msgspec.Struct, gc=False):
    """The objects that vLLM builds for a plan: `SchedulerOutput` with its `CachedRequestData`."""

    num_scheduled_tokens: dict[RequestId, int]
    new: list[NewRow]
    req_ids: list[RequestId]
    resumed_req_ids: set[RequestId]
    new_block_ids: list[BlockTables | None]
    all_token_ids: dict[RequestId, TokenIds]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    scheduled_spec_decode_tokens: dict[RequestId, TokenIds]
    total_num_scheduled_tokens: int
    finished_req_ids: set[RequestId]
    preempted_req_ids: set[RequestId]


class OutputObject(msgspec.Struct, gc=False):
    """The object that vLLM builds for each row of a commit: `EngineCoreOutput`."""

    request_id: RequestId
    new_token_ids: tuple[int, ...]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(eq=False)
class ArrayPlan:
    """A plan in arrays. They are read-only by agreement: the engine keeps some of them."""

    frame_id: FrameId
    slots: NDArray[np.int64]
    """[rows]: request indices below the table's size, constant while a request is unfinished."""
    names: SlotNames
    """[rows]: request ids."""
    num_computed_tokens: Int32s
    """[rows]: before this step, as if all drafts in flight were accepted."""
    num_scheduled_tokens: Int32s
    """[rows]: including drafts."""
    num_output_tokens: Int32s
    """[rows]: known outputs, and placeholders of frames in flight."""
    samples: NDArray[np.bool_] | None
    """[rows]: whether it will sample. None: all of them."""
    block_rows: Int32s
    """[new blocks]: the row of each, ascending. All blocks of admitted rows."""
    block_ids: Int32s
    """[new blocks]"""
    draft_token_ids: Mapping[int, TokenIds]
    """Drafts by row; only rows that have some."""
    all_token_ids: dict[int, TokenIds]
    """All tokens by row, where the worker may lack some: the last plan did not have the request."""
    new_rows: dict[int, Request]
    """Requests by row that the worker has not seen."""
    resumed_rows: list[int]
    finished_req_ids: tuple[RequestId, ...]
    """Finished requests, in the order of their ends."""
    preempted_req_ids: tuple[RequestId, ...]
    num_common_prefix_blocks: tuple[int, ...] = ()
    """Leading blocks that all running requests share, by group."""
    # What few plans have is not set by the constructor, which each step calls.
    block_groups: Int32s | None = field(default=None, init=False)
    """[new blocks]: the KV group of each. None: there is one group."""
    new_block_ids_to_zero: tuple[BlockId, ...] = field(default=(), init=False)
    new_outputs: Mapping[int, TokenIds] | None = field(default=None, init=False)
    """Outputs of branches by row, where the worker has not seen the request."""
    remapped_req_ids: tuple[RequestId, ...] = field(default=(), init=False)
    block_copies: tuple[BlockCopy, ...] = field(default=(), init=False)
    scheduled_encoder_inputs: tuple[EncoderInputs, ...] = field(default=(), init=False)
    external_encoder_inputs: tuple[EncoderInputs, ...] = field(default=(), init=False)
    free_encoder_mm_hashes: tuple[str, ...] = field(default=(), init=False)
    kv_loads: tuple[KVLoad, ...] = field(default=(), init=False)
    kv_saves: tuple[KVSave, ...] = field(default=(), init=False)
    has_structured_output_requests: bool = field(default=False, init=False)
    """Whether the request of a sampling row has a grammar."""
    pending_structured_output_tokens: bool = field(default=False, init=False)
    """Whether older frames sample for such a request."""

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def request_ids(self) -> list[RequestId]:
        """[rows]"""
        return self.names.tolist()

    @cached_property
    def tables_of(self) -> dict[int, BlockTables]:
        """New blocks by row and group; only rows that have some."""
        rows, ids = self.block_rows.tolist(), self.block_ids.tolist()
        found: dict[int, list[int]] = {}
        if self.block_groups is None:
            for row, block in zip(rows, ids, strict=True):
                found.setdefault(row, []).append(block)
            return {row: (tuple(blocks),) for row, blocks in found.items()}
        tables: dict[int, list[list[int]]] = {}
        num_groups = len(self.num_common_prefix_blocks)
        for row, block, group in zip(rows, ids, self.block_groups.tolist(), strict=True):
            tables.setdefault(row, [[] for _ in range(num_groups)])[group].append(block)
        return {row: tuple(map(tuple, of_row)) for row, of_row in tables.items()}

    def build_plan(self) -> Plan:
        """Return the plan in the vocabulary."""
        rows = self._build_rows()
        new = [
            NewRow(
                request,
                rows[row].new_block_ids,
                *self._get_span(row),
                () if self.new_outputs is None else self.new_outputs[row],
            )
            for row, request in self.new_rows.items()
        ]
        for row in self.resumed_rows:
            rows[row] = replace(rows[row], resumed=True)
        if self.new_rows:
            rows = [cached for row, cached in enumerate(rows) if row not in self.new_rows]
        return Plan(
            self.frame_id,
            tuple(new),
            tuple(rows),
            tuple(sorted(self.finished_req_ids)),
            self.preempted_req_ids,
            remapped_req_ids=self.remapped_req_ids,
            block_copies=self.block_copies,
            num_common_prefix_blocks=self.num_common_prefix_blocks,
            new_block_ids_to_zero=self.new_block_ids_to_zero,
            scheduled_encoder_inputs=self.scheduled_encoder_inputs,
            external_encoder_inputs=self.external_encoder_inputs,
            free_encoder_mm_hashes=self.free_encoder_mm_hashes,
            kv_loads=self.kv_loads,
            kv_saves=self.kv_saves,
            has_structured_output_requests=self.has_structured_output_requests,
            pending_structured_output_tokens=self.pending_structured_output_tokens,
        )

    def _build_rows(self) -> list[CachedRow]:
        """Return every row as one that was running before."""
        nothing: BlockTables = ((),) * max(len(self.num_common_prefix_blocks), 1)
        numbers = range(len(self.slots))
        tables, tokens = self.tables_of, self.all_token_ids
        drafts = dict(self.draft_token_ids)
        return make_cached_rows(
            self.request_ids,
            [tables.get(row, nothing) for row in numbers] if tables else repeat(nothing),
            map(tokens.get, numbers) if tokens else repeat(None),
            self.num_computed_tokens.tolist(),
            self.num_output_tokens.tolist(),
            self.num_scheduled_tokens.tolist(),
            [drafts.get(row, ()) for row in numbers] if drafts else repeat(()),
        )

    def _get_span(self, row: int) -> tuple[int, int]:
        return int(self.num_computed_tokens[row]), int(self.num_scheduled_tokens[row])

    def build_objects(self) -> PlanObjects:
        """Return the plan in as many objects as vLLM builds."""
        names, blocks = self.request_ids, self.tables_of
        computed, scheduled = self.num_computed_tokens.tolist(), self.num_scheduled_tokens.tolist()
        outputs, total = self.num_output_tokens.tolist(), sum(scheduled)
        have_one_each = total == len(names)  # then this is faster:
        counts = (
            dict.fromkeys(names, 1) if have_one_each else dict(zip(names, scheduled, strict=True))
        )
        tables: list[BlockTables | None] = [None] * len(names)
        for row, taken in blocks.items():
            tables[row] = taken
        new = [
            NewRow(request, tables[row] or _NO_NEW_BLOCKS, computed[row], scheduled[row])
            for row, request in self.new_rows.items()
        ]
        cached = names
        if new:
            old = [row for row in range(len(names)) if row not in self.new_rows]
            cached = [names[row] for row in old]
            tables = [tables[row] for row in old]
            computed, outputs = [computed[row] for row in old], [outputs[row] for row in old]
        return PlanObjects(
            num_scheduled_tokens=counts,
            new=new,
            req_ids=cached,
            resumed_req_ids={names[row] for row in self.resumed_rows},
            new_block_ids=tables,
            all_token_ids={names[row]: ids for row, ids in self.all_token_ids.items()},
            num_computed_tokens=computed,
            num_output_tokens=outputs,
            scheduled_spec_decode_tokens={
                names[row]: drafts for row, drafts in self.draft_token_ids.items()
            },
            total_num_scheduled_tokens=total,
            finished_req_ids=set(self.finished_req_ids),
            preempted_req_ids=set(self.preempted_req_ids),
        )


@dataclass(eq=False)
class ArrayOutputs:
    """The outputs of a commit: rows in the order of scheduling, only those with new tokens."""

    names: SlotNames
    """[rows]: request ids."""
    token_ids: Int32s
    """[tokens]: row after row."""
    counts: Int32s | None
    """[rows]: tokens of each. None: one each."""
    num_cached_tokens: Int32s
    """[rows]: prompt tokens from the prefix cache at its first admission."""
    ended: dict[int, tuple[FinishReason, int | None]]
    """Finish reason by row, and the stop token if there is one."""
    kv_events: tuple[KVEvent, ...] = ()
    failed: tuple[OutputRow, ...] = ()
    """Requests that end because their loads have failed."""

    def __len__(self) -> int:
        return len(self.names)

    def build_row(self, row: int) -> OutputRow:
        """Return one row in the vocabulary; `counts` must be None."""
        reason, stop_token_id = self.ended.get(row, _GOES_ON)
        (name,) = self.names.take(np.array([row], np.int32)).tolist()
        tokens = (int(self.token_ids[row]),)
        return OutputRow(name, tokens, reason, stop_token_id, int(self.num_cached_tokens[row]))

    def build_outputs(self, tokens: list[TokenIds] | None = None) -> Outputs:
        """Return the outputs in the vocabulary; `tokens` of the rows if they are known as
        objects."""
        cached, names = self.num_cached_tokens.tolist(), self.names.tolist()
        tokens = self._get_tokens() if tokens is None else tokens
        rows = make_output_rows(names, tokens, cached)
        for row, (reason, stop_token_id) in self.ended.items():
            rows[row] = OutputRow(names[row], tokens[row], reason, stop_token_id, cached[row])
        return Outputs((*rows, *self.failed), self.kv_events)

    def build_objects(self) -> list[OutputObject]:
        """Return the outputs in as many objects as vLLM builds."""
        rows = list(
            map(
                OutputObject,
                self.names.tolist(),
                self._get_tokens(),
                self.num_cached_tokens.tolist(),
            )
        )
        for row, (reason, stop_token_id) in self.ended.items():
            rows[row].finish_reason, rows[row].stop_token_id = reason, stop_token_id
        return rows

    def _get_tokens(self) -> list[TokenIds]:
        flat = self.token_ids.tolist()
        if self.counts is None:
            return list(zip(flat))
        ends = np.cumsum(self.counts).tolist()
        starts = [0, *ends[:-1]] if ends else []
        return [tuple(flat[start:end]) for start, end in zip(starts, ends, strict=True)]
