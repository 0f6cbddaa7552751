"""The Triton kernels of a step's metadata.

With `DEPENDENT` a kernel may start before the one in front of it has ended; it waits for that one
before it reads or writes anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels.dispatch import list_launch_options, on_device_of_first
from blockstep.kernels.step import StepInputs

SIZE = 256
"""Elements that a program handles at once."""


# These numbers change from step to step; compiling for each value is avoided.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "out_stride"])
def prepare_kernel(
    positions, slot_mapping, query_start_loc, seq_lens, out_tables, block_tables, num_computed,
    num_scheduled, row_indices, num_seqs, num_tokens, table_stride, out_stride,
    BLOCK_SIZE: tl.constexpr, BY_ROW: tl.constexpr, GATHER: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (sequence): write its metadata; one more writes the total and the padding.

    Each sums the scheduled tokens before it by itself: that is a few loads from the L2 cache, while
    an order among programs would cost a second launch.
    """
    sequence = tl.program_id(0)
    before = tl.zeros((SIZE,), tl.int32)
    for start in range(0, sequence, SIZE):
        other = start + tl.arange(0, SIZE)
        before += tl.load(num_scheduled + other, mask=other < sequence, other=0)
    first = tl.sum(before, 0)
    tl.store(query_start_loc + sequence, first)
    if sequence == num_seqs:
        for start in range(first, num_tokens, SIZE):
            token = start + tl.arange(0, SIZE)
            zero = tl.zeros((SIZE,), tl.int64)
            tl.store(positions + token, zero, mask=token < num_tokens)
            tl.store(slot_mapping + token, zero - 1, mask=token < num_tokens)
    else:
        row = sequence.to(tl.int64)
        if BY_ROW:
            row = tl.load(row_indices + sequence)
        computed = tl.load(num_computed + row)
        scheduled = tl.load(num_scheduled + sequence)
        tl.store(seq_lens + sequence, computed + scheduled)
        table = block_tables + row * table_stride
        for start in range(0, scheduled, SIZE):
            step = start + tl.arange(0, SIZE)
            mask = step < scheduled
            position = computed + step
            block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(positions + first + step, position.to(tl.int64), mask=mask)
            tl.store(slot_mapping + first + step, slot, mask=mask)
        if GATHER:
            num_blocks = (computed + scheduled + BLOCK_SIZE - 1) // BLOCK_SIZE
            for start in range(0, num_blocks, SIZE):
                index = start + tl.arange(0, SIZE)
                mask = index < num_blocks
                block = tl.load(table + index, mask=mask, other=0)
                tl.store(out_tables + sequence.to(tl.int64) * out_stride + index, block, mask=mask)


@triton.jit
def merge_kernel(
    input_ids, logits_rows, query_start_loc, last_token_ids, draft_token_ids, cu_num_drafts,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Program (sequence): write its last token and its drafts, and the rows whose logits are
    needed."""
    sequence = tl.program_id(0)
    first = tl.load(cu_num_drafts + sequence)
    count = tl.load(cu_num_drafts + sequence + 1) - first + 1
    row = tl.load(query_start_loc + sequence + 1) - count
    last = tl.load(last_token_ids + sequence)
    for start in range(0, count, SIZE):
        step = start + tl.arange(0, SIZE)
        mask = step < count
        tl.store(logits_rows + first + sequence + step, (row + step).to(tl.int64), mask=mask)
        draft = tl.load(draft_token_ids + first + step - 1, mask=mask & (step > 0), other=0)
        token = tl.where(step == 0, last, draft)
        tl.store(input_ids + row + step, token, mask=mask & (last >= 0))


@triton.jit(do_not_specialize=["num_seqs", "token_stride"])
def commit_kernel(
    num_computed, last_token_ids, num_scheduled, token_ids, num_sampled, cu_num_drafts, row_indices,
    num_seqs, token_stride, BY_ROW: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (part): update `SIZE` sequences, each its own row."""
    sequence = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = sequence < num_seqs
    row = sequence.to(tl.int64)
    if BY_ROW:
        row = tl.load(row_indices + sequence, mask=mask, other=0)
    sampled = tl.load(num_sampled + sequence, mask=mask, other=0)
    drafts = tl.load(cu_num_drafts + sequence + 1, mask=mask, other=0)
    drafts -= tl.load(cu_num_drafts + sequence, mask=mask, other=0)
    rejected = tl.where(sampled > 0, drafts + 1 - sampled, 0)
    scheduled = tl.load(num_scheduled + sequence, mask=mask, other=0)
    computed = tl.load(num_computed + row, mask=mask, other=0)
    tl.store(num_computed + row, computed + scheduled - rejected, mask=mask)
    has_token = mask & (sampled > 0)
    at = sequence.to(tl.int64) * token_stride + sampled - 1
    token = tl.load(token_ids + at, mask=has_token, other=0)
    tl.store(last_token_ids + row, token, mask=has_token)


# Step by step these are other columns of one buffer, aligned or not.
@triton.jit(
    do_not_specialize=["num_rows", "num_columns", "num_new", "out_group", "out_stride"],
    do_not_specialize_on_alignment=["row_indices", "new_blocks", "new_places", "fed_at"],
)
def stage_kernel(
    out_tables, block_tables, row_indices, new_blocks, new_places, token_ids, fed_at,
    last_token_ids, num_rows, max_blocks, num_columns, num_new, out_group, out_stride,
    HAS_NEW: tl.constexpr, IS_FED: tl.constexpr, SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, group): write its new blocks into its row, and gather the row.

    Each finds its own among all new blocks: they are few. The first group feeds the token.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.load(row_indices + sequence)
    table = block_tables + (group.to(tl.int64) * num_rows + row) * max_blocks
    if HAS_NEW:
        for start in range(0, num_new, SIZE):
            new = start + tl.arange(0, SIZE)
            mask = new < num_new
            of = tl.load(new_places + new, mask=mask, other=-1)
            mask = mask & (of == sequence)
            index = tl.load(new_places + num_new + new, mask=mask, other=0)
            block = tl.load(new_blocks + group * num_new + new, mask=mask, other=0)
            tl.store(table + index, block, mask=mask)
        tl.debug_barrier()
    out = out_tables + group.to(tl.int64) * out_group + sequence.to(tl.int64) * out_stride
    for start in range(0, num_columns, SIZE):
        index = start + tl.arange(0, SIZE)
        mask = index < num_columns
        tl.store(out + index, tl.load(table + index, mask=mask, other=0), mask=mask)
    if IS_FED:
        at = tl.load(fed_at + sequence)
        if (at >= 0) & (group == 0):
            tl.store(token_ids + at, tl.load(last_token_ids + row))


@triton.jit(
    do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["row_indices", "token_ids"]
)
def keep_kernel(
    last_token_ids, row_indices, token_ids, num_seqs, SIZE: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Program (part): keep `SIZE` tokens."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = sequence < num_seqs
    row = tl.load(row_indices + sequence, mask=mask, other=0)
    token = tl.load(token_ids + sequence, mask=mask, other=0)
    tl.store(last_token_ids + row, tl.maximum(token, 0), mask=mask)


@on_device_of_first
def launch_prepare_step(
    block_tables: Tensor,
    num_computed_tokens: Tensor,
    num_scheduled_tokens: Tensor,
    block_size: int,
    row_indices: Tensor | None,
    num_tokens: int,
    out_block_tables: Tensor | None,
) -> StepInputs:
    """Make one launch with a program per sequence of the step."""
    num_seqs, device = len(num_scheduled_tokens), block_tables.device
    made = StepInputs(
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int64, device=device),
        torch.empty(num_seqs + 1, dtype=torch.int32, device=device),
        torch.empty(num_seqs, dtype=torch.int32, device=device),
    )
    gathered = block_tables if out_block_tables is None else out_block_tables
    prepare_kernel[(num_seqs + 1,)](
        *made, gathered, block_tables, num_computed_tokens, num_scheduled_tokens,
        num_scheduled_tokens if row_indices is None else row_indices,
        num_seqs, num_tokens, block_tables.stride(0), gathered.stride(0),
        BLOCK_SIZE=block_size, BY_ROW=row_indices is not None, GATHER=out_block_tables is not None,
        SIZE=SIZE, num_warps=2,
    )  # fmt: skip
    return made


@on_device_of_first
def launch_merge_drafts(
    input_ids: Tensor,
    query_start_loc: Tensor,
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    cu_num_drafts: Tensor,
) -> Tensor:
    """Launch one program per sequence."""
    num_seqs = len(last_token_ids)
    rows = torch.empty(len(draft_token_ids) + num_seqs, dtype=torch.int64, device=input_ids.device)
    if num_seqs:
        merge_kernel[(num_seqs,)](
            input_ids, rows, query_start_loc, last_token_ids, draft_token_ids, cu_num_drafts,
            SIZE=32, num_warps=1,
        )  # fmt: skip
    return rows


@on_device_of_first
def launch_commit_step(
    num_computed_tokens: Tensor,
    last_token_ids: Tensor,
    num_scheduled_tokens: Tensor,
    token_ids: Tensor,
    num_sampled: Tensor,
    cu_num_drafts: Tensor,
    row_indices: Tensor | None,
) -> None:
    """Launch one program per `SIZE` sequences."""
    num_seqs = len(num_scheduled_tokens)
    commit_kernel[(triton.cdiv(num_seqs, SIZE),)](
        num_computed_tokens, last_token_ids, num_scheduled_tokens, token_ids, num_sampled,
        cu_num_drafts, num_scheduled_tokens if row_indices is None else row_indices,
        num_seqs, token_ids.stride(0), BY_ROW=row_indices is not None, SIZE=SIZE, num_warps=4,
    )  # fmt: skip


@on_device_of_first
def launch_stage_step(
    out_block_tables: Tensor,
    block_tables: Tensor,
    row_indices: Tensor,
    new_blocks: Tensor | None,
    new_places: Tensor | None,
    token_ids: Tensor | None,
    fed_at: Tensor | None,
    last_token_ids: Tensor | None,
) -> None:
    """Launch one program per sequence and KV group."""
    num_groups, num_seqs, num_columns = out_block_tables.shape
    _, num_rows, max_blocks = block_tables.shape
    if not block_tables.is_contiguous():
        raise ValueError("block_tables: must be contiguous; pass the whole tables of the batch")
    has_new, is_fed = new_blocks is not None, token_ids is not None
    stage_kernel[(num_seqs, num_groups)](
        out_block_tables, block_tables, row_indices,
        row_indices if new_blocks is None else new_blocks.contiguous(),
        row_indices if new_places is None else new_places.contiguous(),
        row_indices if token_ids is None else token_ids,
        row_indices if fed_at is None else fed_at,
        row_indices if last_token_ids is None else last_token_ids,
        num_rows, max_blocks, num_columns, 0 if new_blocks is None else new_blocks.shape[1],
        out_block_tables.stride(0), out_block_tables.stride(1),
        HAS_NEW=has_new, IS_FED=is_fed, SIZE=SIZE, num_warps=2,
        **list_launch_options(out_block_tables.device),
    )  # fmt: skip


@on_device_of_first
def launch_keep_tokens(last_token_ids: Tensor, row_indices: Tensor, token_ids: Tensor) -> None:
    """Launch one program per `SIZE` sequences."""
    num_seqs = len(row_indices)
    keep_kernel[(triton.cdiv(num_seqs, SIZE),)](
        last_token_ids, row_indices, token_ids, num_seqs, SIZE=SIZE, num_warps=4,
        **list_launch_options(last_token_ids.device),
    )  # fmt: skip
