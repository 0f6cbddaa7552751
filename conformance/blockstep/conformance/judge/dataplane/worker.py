"""DataPlaneWorker: the model worker, whose KV the kernels under test keep in real memory.

    plan -> rows of a persistent batch -> prepare_step -> merge_drafts      -> tokens compared
                                                      `-> reshape_and_cache -> all slots compared
                                                      `-> paged_attention   -> all rows redone

Its base class knows what each slot must hold, from the plans alone. KV groups share the memory,
each with tables and slots of its own. The null block holds NaN, and is in the tables in place of
skipped blocks, so that each read of it and each write to it shows. Blocks are also copied, swapped
out and swapped in, from step to step, in a corner of the memory that no plan names, as schedulers
do that share blocks on write or offload them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blockstep.conformance.judge.attention_ranges import count_unattended, first_attended
from blockstep.conformance.judge.dataplane import memory
from blockstep.conformance.judge.worker import NextToken, Worker
from blockstep.conformance.judge.worker.prefix_names import Name
from blockstep.conformance.judge.worker.request_view import FrameRow
from blockstep.conformance.protocol.findings import Difference
from blockstep.spec import vocabulary as v

GQA = 2
"""Query heads of each KV head."""
SCALE = 0.01
"""Scale of the attention scores: keys are digits, and no slot should outweigh all others."""
TOLERANCE = 1e-3
"""Tolerance for outputs of attention, which are means of digits: less than one slot's share."""
BLANK = -7
"""Placeholder where `merge_drafts` has to put a token."""
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
    """A worker on real memory, for one run.

    Args:
        config: the constants of the run.
        next_token: the true next token of a sequence.
        kernels: the kernels that write, move and read the memory.
        device: the device of the memory, as torch names it.
    """

    def __init__(
        self, config: v.Config, next_token: NextToken, kernels: Kernels, device: str = "cpu"
    ) -> None:
        super().__init__(config, next_token)
        self.kernels = kernels
        self.device = device
        self.num_heads = memory.count_heads(self.block_sizes)
        """KV heads, per group."""
        num_blocks = config.num_blocks + NUM_SPARE_BLOCKS
        width = self.block_sizes[0] * self.num_heads[0] * memory.HEAD_SIZE
        self.expected = np.zeros((2, num_blocks, width), dtype=np.float32)
        """Keys and values that each block must hold."""
        self.expected[:, v.NULL_BLOCK] = np.nan
        self.memory = self._tensor(self.expected.copy())
        """Keys and values that each block holds."""
        widths = [max(config.num_blocks, -(-config.max_model_len // n)) for n in self.block_sizes]
        self.block_tables = [
            torch.zeros((1, width), dtype=torch.int32, device=device) for width in widths
        ]
        """Persistent tables per group: a request keeps its row, and plans append to it."""
        self._places: dict[v.RequestId, int] = {}
        self._tables: list[list[list[v.BlockId]]] = [[[]] for _ in self.groups]
        """The content of each row of `block_tables`."""
        self._spare_owners = [0] * NUM_SPARE_BLOCKS
        """The groups by which the blocks after those of the config are laid out."""
        self._random = random.Random(0)  # noqa: S311

    def reset(self, forced: bool) -> None:
        """Note a reset: KV written so far must not be read again (P25)."""
        super().reset(forced)
        for block in range(1, self.config.num_blocks):
            group = max(self._owners[block], 0)
            spelled = memory.spell(self.kv[block], self.num_heads[group])
            for half, values in zip(self.expected, spelled, strict=True):
                half[block, : values.size] = values.reshape(-1)
        self.memory.copy_(self._tensor(self.expected))

    def _write(self, rows: list[FrameRow]) -> None:
        super()._write(rows)
        if not rows or self._findings:
            return  # the plan itself is wrong
        places = [self._place(row) for row in rows]
        steps = [self._prepare(rows, places, group) for group in range(len(self.groups))]
        self._compare_tokens(rows, steps[0][1].query_start_loc)
        for group, (_, step) in enumerate(steps):
            self._write_group(rows, group, step.slot_mapping)
        self._copy_blocks()
        self._swap_blocks()
        self._compare()
        for group, (tables, step) in enumerate(steps):
            self._attend(rows, group, tables, step)

    def _caches(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache in the layout of a group."""
        shape = (self.block_sizes[group], self.num_heads[group], memory.HEAD_SIZE)
        keys, values = self.memory.unflatten(2, shape)
        return keys, values

    def _write_group(self, rows: Sequence[FrameRow], group: int, slots: torch.Tensor) -> None:
        """Write every token into its slot of one group, by the kernel and into the expected
        memory."""
        size, num_heads = self.block_sizes[group], self.num_heads[group]
        names = [name for row in rows for name in row.view.chain[row.first : row.end]]
        spelled = memory.spell(names, num_heads)
        self.kernels.reshape_and_cache(*map(self._tensor, spelled), *self._caches(group), slots)
        places = [
            row.view.tables[group][at // size] * size + at % size
            for row in rows
            for at in range(row.first, row.end)
        ]
        for half, values in zip(self.expected, spelled, strict=True):
            half.reshape(-1, num_heads, memory.HEAD_SIZE)[places] = values

    # Loads.

    def _fill_slots(
        self, load: v.KVLoad, names: Sequence[Name], invalid: Collection[v.BlockId]
    ) -> None:
        """Write a load through a buffer, by the kernels and into the expected memory."""
        super()._fill_slots(load, names, invalid)
        begin, end = load.num_computed_tokens, load.num_computed_tokens + load.num_external_tokens
        for group in self.attended:
            size = self.block_sizes[group]
            loaded = [
                (block, max(begin - first, 0), min(end - first, size))
                for first, block in zip(range(0, end, size), load.block_ids[group], strict=False)
                if first + size > begin and block != v.NULL_BLOCK and self._owners[block] == group
            ]
            if loaded:
                self._load_blocks(group, loaded)

    def _load_blocks(self, group: int, loaded: Sequence[tuple[v.BlockId, int, int]]) -> None:
        """Write slots [first, stop) of each of these blocks of a group, and move whole blocks."""
        ids = torch.tensor([block for block, _, _ in loaded])
        spelled = [memory.spell(self.kv[block], self.num_heads[group]) for block, _, _ in loaded]
        for kind, (half, cache) in enumerate(zip(self.expected, self._caches(group), strict=True)):
            staging = torch.empty((len(loaded), *cache.shape[1:]), device=self.device)
            self.kernels.gather_blocks(cache, ids, staging)
            for place, (block, first, stop) in enumerate(loaded):
                values = spelled[place][kind][first:stop]
                staging[place, first:stop] = self._tensor(values)
                half[block].reshape(cache.shape[1:])[first:stop] = values
            self.kernels.scatter_blocks(staging, ids, cache)

    # The batch.

    def _prepare(
        self, rows: Sequence[FrameRow], places: Sequence[int], group: int
    ) -> tuple[torch.Tensor, Any]:
        """Return the tables of the rows in one group, and the step prepared from the persistent
        batch."""
        held = self.block_tables[group]
        tables = torch.zeros((len(rows), held.shape[1]), dtype=torch.int32, device=self.device)
        computed = torch.zeros(len(held), dtype=torch.int32)
        computed[list(places)] = torch.tensor([row.first for row in rows], dtype=torch.int32)
        scheduled = torch.tensor([row.end - row.first for row in rows], dtype=torch.int32)
        step = self.kernels.prepare_step(
            held,
            computed.to(self.device),
            scheduled.to(self.device),
            self.block_sizes[group],
            row_indices=torch.tensor(places, device=self.device),
            out_block_tables=tables,
        )
        return tables, step

    def _place(self, row: FrameRow) -> int:
        """Return a request's row in the persistent batch, after writing its block tables there."""
        view, name = row.view, row.view.request.request_id
        for gone in self._places.keys() - self.views.keys():
            del self._places[gone]
        if name not in self._places:
            taken = set(self._places.values())
            place = next(index for index in range(len(taken) + 1) if index not in taken)
            if place == len(self._tables[0]):
                for tables in self._tables:
                    tables.append([])
                self.block_tables = [torch.cat((held, held[:1])) for held in self.block_tables]
            self._places[name] = place
        place = self._places[name]
        for number, group in enumerate(self.groups):
            left = min(count_unattended(group, row.first), len(view.tables[number]))
            table = [v.NULL_BLOCK] * left + view.tables[number][left:]
            pairs = zip(self._tables[number][place], table, strict=False)
            first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if first < len(table):
                new = torch.tensor(table[first:], dtype=torch.int32)
                self.block_tables[number][place, first : len(table)] = new.to(self.device)
            self._tables[number][place] = table
        return place

    # Copies.

    def copy(self, copies: Iterable[v.BlockCopy]) -> None:
        """Copy a plan's blocks by the kernels, pair by pair, and in the expected memory.

        Pairs are passed as independent only if no block occurs twice: a block may be free again,
        and be the copy of another one.
        """
        copies = tuple(copies)
        super().copy(copies)
        pairs = [(one.source, one.destination) for one in copies]
        if self._findings or not pairs:
            return  # the plan itself is wrong
        sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
        self.kernels.copy_blocks(
            list(self._caches(0)),
            torch.tensor(pairs, dtype=torch.int64, device=self.device),
            independent=len(targets) == len(pairs) and not sources & targets,
        )
        for source, target in pairs:
            self.expected[:, target] = self.expected[:, source]

    def _copy_blocks(self) -> None:
        """Copy some blocks to spare ones, which the next pairs may copy in turn."""
        draw, first = self._random, self.config.num_blocks
        num_blocks = first + NUM_SPARE_BLOCKS
        pairs = [
            (draw.randrange(num_blocks), first + draw.randrange(NUM_SPARE_BLOCKS))
            for _ in range(NUM_MOVED)
        ]
        pairs += [(pairs[-1][1], first + draw.randrange(NUM_SPARE_BLOCKS))]
        pairs = [pair for pair in pairs if pair[0] != pair[1]]
        self.kernels.copy_blocks(
            list(self._caches(0)),
            torch.tensor(pairs, dtype=torch.int64, device=self.device).view(-1, 2),
        )
        for source, destination in pairs:
            self.expected[:, destination] = self.expected[:, source]
            self._spare_owners[destination - first] = self._owner(source)

    def _swap_blocks(self) -> None:
        """Move some blocks out into a buffer, and in again elsewhere."""
        draw, first = self._random, self.config.num_blocks
        sources = [draw.randrange(first + NUM_SPARE_BLOCKS) for _ in range(NUM_MOVED)]
        targets = draw.sample(range(first, first + NUM_SPARE_BLOCKS), NUM_MOVED)
        for cache in self._caches(0):
            staging = torch.empty((NUM_MOVED, *cache.shape[1:]), device=self.device)
            self.kernels.gather_blocks(cache, torch.tensor(sources), staging)
            self.kernels.scatter_blocks(staging, torch.tensor(targets), cache)
        owners = [self._owner(source) for source in sources]
        self.expected[:, targets] = self.expected[:, sources]
        for target, owner in zip(targets, owners, strict=True):
            self._spare_owners[target - first] = owner

    def _owner(self, block: v.BlockId) -> int:
        """The group in whose layout a block was written."""
        owners = [*self._owners, *self._spare_owners]
        return max(owners[block], 0)

    # Comparison.

    def _compare_tokens(self, rows: Sequence[FrameRow], query_start_loc: torch.Tensor) -> None:
        """Check that the last known token and the drafts of each row get to the positions that they
        run."""
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
        """Check that every slot holds what was written or moved there, and nothing else changed."""
        seen = self.memory.cpu().numpy()
        if np.array_equal(seen, self.expected, equal_nan=True):
            return
        same = (seen == self.expected) | (np.isnan(seen) & np.isnan(self.expected))
        wrong = [
            (block, offset)
            for block in np.flatnonzero(~same.all(axis=(0, 2))).tolist()
            for offset in np.flatnonzero(~self._slots(same, block).all(axis=(0, 2, 3))).tolist()
        ]
        block, offset = wrong[0]
        is_spare = block >= self.config.num_blocks
        what = f"slots that hold something else after the kernels ran: {len(wrong)}"
        note = "a spare block, written by copies and swaps only" * is_spare
        self._complain(
            "P3",
            "copied_block_arrives_unchanged" if is_spare else "slot_holds_what_the_plan_writes",
            what,
            Difference(
                f"kv[{block}][{offset}]",
                self._name(self.expected, block, offset),
                self._name(seen, block, offset),
                note or "the null block, which is never written" * (block == v.NULL_BLOCK),
            ),
        )

    def _slots(self, halves: Any, block: v.BlockId) -> Any:
        """Keys and values of one block, slot by slot, as its owner lays it out."""
        group = self._owner(block)
        shape = (2, self.block_sizes[group], self.num_heads[group], memory.HEAD_SIZE)
        return halves[:, block].reshape(shape)

    def _name(self, halves: npt.NDArray[np.float32], block: v.BlockId, offset: int) -> str:
        keys, values = self._slots(halves, block)
        return self.names.show(memory.read(keys, values)[offset])

    def _attend(
        self, rows: Sequence[FrameRow], group: int, tables: torch.Tensor, step: Any
    ) -> None:
        """Attention over the memory must be attention over what the block tables name."""
        if self._findings:
            return
        num_tokens = sum(row.end - row.first for row in rows)
        draw = np.random.default_rng(num_tokens)
        shape = (num_tokens, GQA * self.num_heads[group], memory.HEAD_SIZE)
        query = draw.standard_normal(shape).astype(np.float32)
        seen = self.kernels.paged_attention(
            self._tensor(query),
            *self._caches(group),
            tables,
            step.query_start_loc,
            step.seq_lens,
            scale=SCALE,
            **_get_reach(self.groups[group]),
        )
        outputs: Doubles = seen.cpu().numpy().astype(np.float64)
        start = 0
        for row in rows:
            stop = start + row.end - row.first
            expected = self._attended(row, group, query[start:stop].astype(np.float64))
            error = np.abs(outputs[start:stop] - expected)
            if not np.all(error <= TOLERANCE):
                self._complain_attention(row, error)
                return
            start = stop

    def _attended(self, row: FrameRow, group: int, query: Doubles) -> Doubles:
        """Attention of a row in float64, over the slots that its block table names."""
        size, table = self.block_sizes[group], row.view.tables[group]
        positions = np.arange(row.first, row.end)
        firsts = np.array([first_attended(self.groups[group], at) for at in positions.tolist()])
        keys_at = np.arange(firsts[0], row.end)
        names = [self.kv[table[at // size]][at % size] for at in keys_at.tolist()]
        spelled = memory.spell(names, self.num_heads[group])
        keys, values = (part.astype(np.float64).repeat(GQA, axis=1) for part in spelled)
        scores = np.einsum("qhd,khd->hqk", query, keys) * SCALE
        is_seen = (keys_at <= positions[:, None]) & (keys_at >= firsts[:, None])
        scores[:, ~is_seen] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        attended: Doubles = np.einsum("hqk,khd->qhd", weights, values)
        return attended

    def _complain_attention(self, row: FrameRow, error: Doubles) -> None:
        error = np.nan_to_num(error, nan=np.inf)
        token, head, _ = (int(at) for at in np.unravel_index(error.argmax(), error.shape))
        what = f"{row.view.request.request_id!r}: position {row.first + token}, head {head}"
        difference = Difference("attention", f"within {TOLERANCE:g}", f"off by {error.max():.2g}")
        self._complain(
            "P3",
            "attention_reads_the_slots_of_the_block_table",
            what,
            difference,
            subjects=row.view.request.request_id,
        )

    def _whole(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _tensor(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _get_reach(group: v.KVGroup) -> dict[str, int]:
    """The arguments by which `paged_attention` limits how far back a token attends."""
    match group.kind:
        case v.GroupKind.SLIDING_WINDOW:
            return {"sliding_window": group.sliding_window}
        case v.GroupKind.CHUNKED_LOCAL:
            return {"attention_chunk_size": group.attention_chunk_size}
        case _:
            return {}
