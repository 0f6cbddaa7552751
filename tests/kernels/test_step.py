"""Metadata of a step: each field against a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockstep.kernels import (
    NO_TOKEN,
    commit_step,
    keep_tokens,
    merge_drafts,
    prepare_step,
    stage_step,
)

STEPS = {
    "nothing": ([], []),
    "nothing scheduled": ([4, 0], [0, 0]),
    "one token": ([0], [1]),
    "decodes": ([3, 15, 16, 17], [1, 1, 1, 1]),
    "mixed": ([0, 15, 16, 5, 9], [20, 1, 0, 4, 1]),
    "a long chunk": ([7], [300]),
}


def ints(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize(("computed", "scheduled"), STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("block_size", [4, 5])
@pytest.mark.parametrize("rows", [False, True], ids=["in order", "by row"])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_metadata_of_a_step_equals_that_of_a_loop(
    backend: str, device: str, computed: list[int], scheduled: list[int], block_size: int,
    rows: bool, padding: int,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(2)
    num_rows = len(computed) + 3 * rows
    tables = torch.randint(0, 1000, (num_rows, 80), generator=draw, dtype=torch.int32)
    order = torch.randperm(num_rows, generator=draw)[: len(computed)] if rows else None
    persistent = torch.full((num_rows,), 99, dtype=torch.int32)
    persistent[slice(None) if order is None else order] = ints(computed, "cpu")
    total = sum(scheduled)
    gathered = torch.full((len(computed), 80), -5, dtype=torch.int32, device=device)
    made = prepare_step(
        tables.to(device), persistent.to(device), ints(scheduled, device), block_size,
        row_indices=None if order is None else order.to(device), num_tokens=total + padding,
        out_block_tables=gathered,
    )  # fmt: skip

    positions, slots, starts = [], [], [0]
    expected = torch.full((len(computed), 80), -5, dtype=torch.int32)
    of_step = tables if order is None else tables[order]
    for s, (first, count) in enumerate(zip(computed, scheduled, strict=True)):
        for position in range(first, first + count):
            positions.append(position)
            block = int(of_step[s, position // block_size])
            slots.append(block * block_size + position % block_size)
        starts.append(starts[-1] + count)
        used = -(-(first + count) // block_size)
        expected[s, :used] = of_step[s, :used]
    assert made.positions.tolist() == positions + [0] * padding
    assert made.slot_mapping.tolist() == slots + [-1] * padding
    assert made.query_start_loc.tolist() == starts
    assert made.seq_lens.tolist() == [c + n for c, n in zip(computed, scheduled, strict=True)]
    assert torch.equal(gathered.cpu(), expected)
    dtypes = [tensor.dtype for tensor in made]
    assert dtypes == [torch.int64, torch.int64, torch.int32, torch.int32]


DRAFTS = {
    "nothing": ([], [], []),
    "decode": ([1], [7], [[]]),
    "prompt in chunks": ([5], [-1], [[]]),
    "drafts": ([3], [7], [[11, 12]]),
    "resumed with drafts": ([6], [7], [[11, 12]]),
    "mixed": ([1, 4, 3, 5, 2], [7, -1, 8, 9, 3], [[], [], [11, 12], [13], [14]]),
}


@pytest.mark.parametrize(("lens", "last", "drafts"), DRAFTS.values(), ids=DRAFTS.keys())
def test_drafts_follow_the_last_token(
    backend: str, device: str, lens: list[int], last: list[int], drafts: list[list[int]]
) -> None:
    expected = list(range(100, 100 + sum(lens) + 2))
    rows: list[int] = []
    end = 0
    for count, token, own in zip(lens, last, drafts, strict=True):
        end += count
        start = end - 1 - len(own)
        rows += range(start, end)
        if token >= 0:
            expected[start:end] = [token, *own]
    input_ids = torch.arange(100, 100 + sum(lens) + 2, device=device)
    starts = ints([0, *lens], device).cumsum(0).int()
    flat = ints([token for own in drafts for token in own], device, torch.int64)
    ends = ints([0, *map(len, drafts)], device).cumsum(0).int()
    merged = merge_drafts(input_ids, starts, ints(last, device, torch.int64), flat, ends)
    assert input_ids.tolist() == expected
    assert merged.tolist() == rows


@pytest.mark.parametrize("by_row", [False, True])
def test_rejected_drafts_are_not_computed(backend: str, device: str, by_row: bool) -> None:
    """The rows are a decode, a chunk, and drafts of which two of three, none, and all are kept."""
    computed = ints([10, 20, 30, 40, 50], device)
    last = ints([1, 2, 3, 4, 5], device, torch.int64)
    scheduled = [1, 8, 4, 3, 2]
    tokens = [
        [61, -1, -1, -1],
        [62, -1, -1, -1],
        [63, 64, 65, -1],
        [66, -1, -1, -1],
        [67, 68, -1, -1],
    ]
    sampled = [1, 0, 3, 1, 2]
    cu_num_drafts = [0, 0, 0, 3, 5, 6]
    order = [0, 1, 2, 3, 4]
    if by_row:
        computed = torch.cat([computed.flip(0), ints([-7], device)])
        last = torch.cat([last.flip(0), ints([-8], device, torch.int64)])
        order = [4, 3, 2, 1, 0]
    commit_step(
        computed, last, ints(scheduled, device), torch.tensor(tokens, device=device),
        ints(sampled, device), ints(cu_num_drafts, device),
        row_indices=ints(order, device, torch.int64) if by_row else None,
    )  # fmt: skip
    assert [computed.tolist()[row] for row in order] == [11, 28, 33, 41, 52]
    assert [last.tolist()[row] for row in order] == [61, 2, 65, 66, 68]
    assert computed.tolist()[5:] == ([-7] if by_row else [])


def test_a_commit_without_rows(backend: str, device: str) -> None:
    empty = ints([], device)
    tokens = torch.zeros(0, 1, dtype=torch.int64, device=device)
    commit_step(empty, empty.long(), empty, tokens, empty, ints([0], device))


WRONG_STEPS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "past the row": (
        {"num_scheduled_tokens": ints([2, 9], "cpu")}, ValueError,
        "num_scheduled_tokens: must hold tokens whose row has blocks: ends in 0 <= x < 17, but",
    ),
    "negative": ({"num_scheduled_tokens": ints([-1, 1], "cpu")}, ValueError, "but holds -1"),
    "room": ({"num_tokens": 2}, ValueError, "num_tokens: must be at least 3"),
    "row": ({"row_indices": torch.tensor([0, 2])}, ValueError, "row_indices: must hold rows"),
    "block size": ({"block_size": 0}, ValueError, "block_size: must be at least 1"),
    "dtype": ({"num_computed_tokens": torch.zeros(2)}, TypeError, "must be int32, but is float32"),
    "length": ({"num_computed_tokens": ints([1], "cpu")}, ValueError, "must be 2 as in block_tab"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS.keys()
)
def test_a_wrong_step_is_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {
        "block_tables": torch.zeros(2, 4, dtype=torch.int32), "block_size": 4,
        "num_computed_tokens": ints([3, 9], "cpu"), "num_scheduled_tokens": ints([2, 1], "cpu"),
        **change,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        prepare_step(**call)


def test_wrong_drafts_are_rejected() -> None:
    ids, starts = torch.zeros(4, dtype=torch.int64), ints([0, 2, 4], "cpu")
    last, drafts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="sequence 1 has fewer"):
        merge_drafts(ids, starts, last, drafts, ints([0, 0, 2], "cpu"))
    with pytest.raises(ValueError, match="last_token_ids: is -1 for a sequence with drafts"):
        merge_drafts(ids, starts, last - 1, drafts, ints([0, 1, 2], "cpu"))
    with pytest.raises(ValueError, match="cu_num_drafts: must ascend from 0 to 2, the drafts"):
        merge_drafts(ids, starts, last, drafts, ints([0, 1, 1], "cpu"))
    with pytest.raises(ValueError, match="num_sampled: is more than drafts"):
        commit_step(
            starts[:2], last, starts[:2], torch.zeros(2, 3, dtype=torch.int64),
            ints([3, 1], "cpu"), ints([0, 1, 2], "cpu"),
        )  # fmt: skip


STAGED: dict[str, tuple[list[int], list[tuple[int, int]], list[int]]] = {
    "a row": ([2], [], []),
    "padding": ([3, 0, 0], [], []),
    "new blocks": ([4, 1, 2], [(0, 5), (2, 299), (2, 0)], []),
    "more new blocks than lanes": ([3, 1], [(1, at) for at in range(299)] + [(0, 7)], []),
    "fed": ([4, 1, 2, 0], [], [0, -1, 2, -1]),
    "fed in the middle of chunks": ([4, 1], [(0, 3)], [6, 2]),
}
"""Rows of the batch; the sequence and index of each new block; where tokens are fed."""


@pytest.mark.parametrize(("rows", "new", "fed"), STAGED.values(), ids=STAGED.keys())
@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_staged_step_equals_that_of_a_loop(
    backend: str, device: str, rows: list[int], new: list[tuple[int, int]], fed: list[int],
    num_groups: int,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    tables = torch.randint(0, 99, (num_groups, 5, 300), generator=draw, dtype=torch.int32)
    blocks = torch.randint(100, 999, (num_groups, len(new)), generator=draw, dtype=torch.int32)
    last, tokens = torch.randint(50, 99, (5,), generator=draw), torch.arange(8)
    there, kept = tables.to(device), tokens.to(device)
    memory = torch.full((num_groups, 6, 310), -5, dtype=torch.int32, device=device)
    more: dict[str, Any] = {}
    if new:
        places = torch.tensor(new).T.contiguous().to(device)
        more = {"new_blocks": blocks.to(device), "new_places": places}
    if fed:
        at = ints(fed, device, torch.int64)
        more |= {"token_ids": kept, "fed_at": at, "last_token_ids": last.to(device)}
    stage_step(memory[:, : len(rows), :299], there, ints(rows, device, torch.int64), **more)

    for group in range(num_groups):
        for (sequence, index), block in zip(new, blocks[group].tolist(), strict=True):
            tables[group, rows[sequence], index] = block
    for sequence, index in enumerate(fed):
        if index >= 0:
            tokens[index] = last[rows[sequence]]
    assert torch.equal(there.cpu(), tables)
    assert torch.equal(memory[:, : len(rows), :299].cpu(), tables[:, rows, :299])
    assert bool((memory[:, len(rows) :] == -5).all())
    assert bool((memory[:, :, 299:] == -5).all())
    assert torch.equal(kept.cpu(), tokens)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_sampled_tokens_are_kept_by_row(backend: str, device: str, count: int) -> None:
    last = torch.full((301,), 7, device=device)
    rows, tokens = torch.arange(count).flip(0) + 1, torch.arange(count) + 1000
    tokens[:1] = NO_TOKEN
    keep_tokens(last, rows.to(device), tokens.to(device))
    expected = torch.full((301,), 7)
    expected[rows] = tokens.clamp(min=0)
    assert torch.equal(last.cpu(), expected)


ROWS = torch.tensor([1, 0])
WRONG_STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "row": ({"row_indices": ROWS + 1}, "row_indices: must hold rows of block_tables in 0 <= x < 2"),
    "columns": (
        {"block_tables": torch.zeros(1, 2, 2, dtype=torch.int32)}, "must have at most 2 columns",
    ),
    "blocks alone": ({"new_blocks": ints([], "cpu")[None]}, "new_places: is missing; give all of"),
    "fed alone": ({"fed_at": ROWS, "token_ids": ROWS}, "last_token_ids: is missing"),
    "fed where no token is": (
        {"fed_at": ROWS + 1, "token_ids": ROWS, "last_token_ids": ROWS},
        "fed_at: must hold indices of token_ids in -1 <= x < 2",
    ),
    "place": (
        {"new_blocks": ints([5], "cpu")[None], "new_places": torch.tensor([[2], [0]])},
        r"new_places\[0\]: must hold sequences of the step in 0 <= x < 2",
    ),
    "index": (
        {"new_blocks": ints([5], "cpu")[None], "new_places": torch.tensor([[1], [4]])},
        r"new_places\[1\]: must hold indices of blocks in 0 <= x < 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG_STAGES.values(), ids=WRONG_STAGES.keys())
def test_a_wrong_stage_is_rejected(change: dict[str, Any], message: str) -> None:
    tables = torch.zeros(1, 2, 4, dtype=torch.int32)
    call = {
        "out_block_tables": tables[:, :, :3].clone(), "block_tables": tables, "row_indices": ROWS,
        **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        stage_step(**call)


def test_tokens_of_a_row_outside_the_batch_are_not_kept() -> None:
    with pytest.raises(ValueError, match="row_indices: must hold rows of last_token_ids"):
        keep_tokens(torch.zeros(1, dtype=torch.int64), ROWS, ROWS)
