"""DataPlaneWorker: the model worker, its KV kept in real memory by the kernels under test.

    plan -> rows of a persistent batch -> prepare_step -> merge_drafts      -> tokens compared
                                                      `-> reshape_and_cache -> every slot is read
                                                      `-> paged_attention   -> every row is redone

The worker above it says what each slot must hold, from nothing but the plans. Besides, blocks are
copied, swapped out and swapped in, from step to step, in a corner of the memory that no plan names:
schedulers that share blocks on write, or offload them, will do so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blockstep.conformance.judge.dataplane import memory
from blockstep.conformance.judge.worker import NextToken, Worker
from blockstep.conformance.judge.worker.names import NEVER_WRITTEN, Name
from blockstep.conformance.judge.worker.view import FrameRow, RequestView
from blockstep.conformance.protocol.findings import Difference
from blockstep.spec.vocabulary import BlockId, Config, RequestId

NUM_HEADS = 2 * memory.NUM_KV_HEADS
SCALE = 0.01
"""Of the scores of attention: keys are digits, and no slot should outweigh all the others."""
TOLERANCE = 1e-3
"""Of the outputs of attention, which are means of digits: less than one slot's share in one."""
BLANK = -7
"""Stands where `merge_drafts` has to put a token."""
NUM_SPARE_BLOCKS = 6
"""Blocks after those of the config, for copies and swaps."""
NUM_MOVED = 4
"""Blocks copied, and blocks swapped, in one step."""

Doubles: TypeAlias = npt.NDArray[np.float64]


class Kernels(Protocol):
    """The kernels under test, as `blockstep.kernels` describes them. A module will do."""

    prepare_step: Any
    merge_drafts: Any
    reshape_and_cache: Any
    paged_attention: Any
    copy_blocks: Any
    gather_blocks: Any
    scatter_blocks: Any


class DataPlaneWorker(Worker):
    """A worker on real memory. One object is one run.

    Args:
        config: the constants of the run.
        next_token: which token truly follows a text.
        kernels: what writes, moves and reads the memory.
        device: where the memory is, as torch names it.
    """

    def __init__(
        self, config: Config, next_token: NextToken, kernels: Kernels, device: str = "cpu"
    ) -> None:
        super().__init__(config, next_token)
        self.kernels = kernels
        self.device = device
        num_blocks = config.num_blocks + NUM_SPARE_BLOCKS
        shape = (num_blocks, config.block_size, memory.NUM_KV_HEADS, memory.HEAD_SIZE)
        self.key_cache = torch.zeros(shape, device=device)
        self.value_cache = torch.zeros(shape, device=device)
        self.block_tables = torch.zeros((1, config.num_blocks), dtype=torch.int32, device=device)
        """Persistent: the row of a request is its place, and plans append to it."""
        self.spare: list[list[Name]] = [
            [NEVER_WRITTEN] * config.block_size for _ in range(NUM_SPARE_BLOCKS)
        ]
        """What the blocks after those of the config must hold."""
        self._places: dict[RequestId, int] = {}
        self._tables: list[list[BlockId]] = [[]]
        """What stands in each row of `block_tables`."""
        self._random = random.Random(0)  # noqa: S311

    def reset(self, forced: bool) -> None:
        """The cache was emptied: nothing written so far may be read again (P25)."""
        super().reset(forced)
        caches = (self.key_cache, self.value_cache)
        for cache, values in zip(caches, memory.spell(self._expected()), strict=True):
            cache.copy_(self._tensor(values).view_as(cache))

    def _write(self, rows: list[FrameRow]) -> None:
        super()._write(rows)
        if not rows or self._findings:
            return  # what is wrong with the plan is said already
        tables = torch.zeros(
            (len(rows), self.config.num_blocks), dtype=torch.int32, device=self.device
        )
        step = self._prepare(rows, tables)
        self._compare_tokens(rows, step.query_start_loc)
        names = [name for row in rows for name in row.view.chain[row.first : row.end]]
        written = map(self._tensor, memory.spell(names))
        caches = self.key_cache, self.value_cache
        self.kernels.reshape_and_cache(*written, *caches, step.slot_mapping)
        self._copy_blocks()
        self._swap_blocks()
        self._compare()
        self._attend(rows, tables, step)

    # The batch.

    def _prepare(self, rows: list[FrameRow], tables: torch.Tensor) -> Any:
        """Bring the persistent rows up to date, and prepare the step from them."""
        places = [self._place(row.view) for row in rows]
        computed = torch.zeros(len(self._tables), dtype=torch.int32)
        computed[places] = torch.tensor([row.first for row in rows], dtype=torch.int32)
        scheduled = torch.tensor([row.end - row.first for row in rows], dtype=torch.int32)
        return self.kernels.prepare_step(
            self.block_tables,
            computed.to(self.device),
            scheduled.to(self.device),
            self.config.block_size,
            row_indices=torch.tensor(places, device=self.device),
            out_block_tables=tables,
        )

    def _place(self, view: RequestView) -> int:
        """The row of a request in the persistent batch, with its block table in it."""
        name = view.request.request_id
        for gone in self._places.keys() - self.views.keys():
            del self._places[gone]
        if name not in self._places:
            taken = set(self._places.values())
            place = next(index for index in range(len(taken) + 1) if index not in taken)
            if place == len(self._tables):
                self._tables.append([])
                self.block_tables = torch.cat((self.block_tables, self.block_tables[:1]))
            self._places[name] = place
        place = self._places[name]
        table, pairs = view.table, zip(self._tables[place], view.table, strict=False)
        first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if first < len(table):
            new = torch.tensor(table[first:], dtype=torch.int32)
            self.block_tables[place, first : len(table)] = new.to(self.device)
        self._tables[place] = list(table)
        return place

    # Copies.

    def _copy_blocks(self) -> None:
        """Copy some blocks to spare ones, which the next pairs may copy on."""
        draw, first = self._random, self.config.num_blocks
        held = [*self.kv, *self.spare]
        pairs = [
            (draw.randrange(len(held)), first + draw.randrange(NUM_SPARE_BLOCKS))
            for _ in range(NUM_MOVED)
        ]
        pairs += [(pairs[-1][1], first + draw.randrange(NUM_SPARE_BLOCKS))]
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        self.kernels.copy_blocks(
            [self.key_cache, self.value_cache],
            torch.tensor(pairs, dtype=torch.int64, device=self.device).view(-1, 2),
        )
        for source, destination in pairs:
            held[destination] = held[source]
        self.spare = [list(names) for names in held[first:]]

    def _swap_blocks(self) -> None:
        """Move some blocks out into a buffer, and in again elsewhere."""
        draw, first = self._random, self.config.num_blocks
        held = [*self.kv, *self.spare]
        sources = [draw.randrange(len(held)) for _ in range(NUM_MOVED)]
        targets = draw.sample(range(first, first + NUM_SPARE_BLOCKS), NUM_MOVED)
        for cache in (self.key_cache, self.value_cache):
            staging = torch.empty((NUM_MOVED, *cache.shape[1:]), device=self.device)
            self.kernels.gather_blocks(cache, torch.tensor(sources), staging)
            self.kernels.scatter_blocks(staging, torch.tensor(targets), cache)
        for source, target in zip(sources, targets, strict=True):
            self.spare[target - first] = list(held[source])

    # Comparison.

    def _compare_tokens(self, rows: Sequence[FrameRow], query_start_loc: torch.Tensor) -> None:
        """The last known token and the drafts of each row must get to where they run."""
        expected: list[int] = []
        given: list[int] = []
        counts = [1 + len(row.drafts) if row.samples else 0 for row in rows]
        for row, count in zip(rows, counts, strict=True):
            tokens = [*row.view.tokens[: row.num_known], *row.drafts][row.first : row.end]
            expected += tokens
            given += tokens[: len(tokens) - count] + [BLANK] * count
        last = [row.view.tokens[row.num_known - 1] if row.samples else -1 for row in rows]
        drafts = [row.drafts if row.samples else () for row in rows]
        input_ids = self._whole(given)
        self.kernels.merge_drafts(
            input_ids,
            query_start_loc,
            self._whole(last),
            self._whole([token for own in drafts for token in own]),
            self._whole([0, *map(len, drafts)]).cumsum(0).int(),
        )
        seen = input_ids.tolist()
        if seen != expected:
            at = next(index for index, token in enumerate(expected) if token != seen[index])
            what = f"token {at} of {len(expected)} in the step is another one"
            difference = Difference(f"input_ids[{at}]", str(expected[at]), str(seen[at]))
            self._complain("P24", "step_runs_the_tokens_of_the_plan", what, difference)

    def _compare(self) -> None:
        """Every slot must hold what was to be written or moved there, and nothing else changed."""
        size = self.config.block_size
        keys, values = (
            cache.flatten(0, 1).cpu().numpy() for cache in (self.key_cache, self.value_cache)
        )
        expected, seen = self._expected(), memory.read(keys, values)
        if seen == expected:
            return
        slot = next(index for index, name in enumerate(expected) if name != seen[index])
        num_wrong = sum(left != right for left, right in zip(expected, seen, strict=True))
        block, offset = divmod(slot, size)
        is_spare = block >= self.config.num_blocks
        what = f"slots that hold something else after the kernels ran: {num_wrong}"
        self._complain(
            "P3",
            "moved_block_is_the_one_meant" if is_spare else "slot_holds_what_the_plan_writes",
            what,
            Difference(
                f"kv[{block}][{offset}]",
                self.names.show(expected[slot]),
                self.names.show(seen[slot]),
                "a spare block, written by copies and swaps only" if is_spare else "",
            ),
        )

    def _expected(self) -> list[Name]:
        return [name for block in (*self.kv, *self.spare) for name in block]

    def _attend(self, rows: Sequence[FrameRow], tables: torch.Tensor, step: Any) -> None:
        """Attention over the memory must be attention over what the block tables name."""
        if self._findings:
            return
        num_tokens = sum(row.end - row.first for row in rows)
        draw = np.random.default_rng(num_tokens)
        query = draw.standard_normal((num_tokens, NUM_HEADS, memory.HEAD_SIZE)).astype(np.float32)
        seen = self.kernels.paged_attention(
            self._tensor(query),
            self.key_cache,
            self.value_cache,
            tables,
            step.query_start_loc,
            step.seq_lens,
            scale=SCALE,
        )
        outputs: Doubles = seen.cpu().numpy().astype(np.float64)
        start = 0
        for row in rows:
            stop = start + row.end - row.first
            expected = self._attended(row, query[start:stop].astype(np.float64))
            error = np.abs(outputs[start:stop] - expected)
            if not np.all(error <= TOLERANCE):
                self._complain_attention(row, error)
                return
            start = stop

    def _attended(self, row: FrameRow, query: Doubles) -> Doubles:
        """Attention of a row in float64, over the slots that its block table names."""
        size, table = self.config.block_size, row.view.table
        names = [self.kv[table[at // size]][at % size] for at in range(row.end)]
        keys, values = (part.astype(np.float64) for part in memory.spell(names))
        group = NUM_HEADS // memory.NUM_KV_HEADS
        keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, keys) * SCALE
        positions = np.arange(row.first, row.end)
        scores[:, np.arange(row.end)[None, :] > positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        attended: Doubles = np.einsum("hqk,khd->qhd", weights, values)
        return attended

    def _complain_attention(self, row: FrameRow, error: Doubles) -> None:
        token, head, _ = (int(at) for at in np.unravel_index(np.nanargmax(error), error.shape))
        what = f"{row.view.request.request_id!r}: position {row.first + token}, head {head}"
        difference = Difference(
            "attention", f"within {TOLERANCE:g}", f"off by {np.nanmax(error):.2g}"
        )
        self._complain("P3", "attention_reads_the_slots_of_the_block_table", what, difference)

    def _whole(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _tensor(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
