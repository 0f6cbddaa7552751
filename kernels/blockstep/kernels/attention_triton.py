"""The Triton kernels of paged attention: one tile of queries against its keys, tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels.attention import Rules
from blockstep.kernels.dispatch import on_device_of_first

LOG2_E = 1.4426950408889634
NUM_KEYS_PER_SPLIT_MIN = 256
"""A split shorter than this costs more to merge than it saves."""
NUM_SPLITS_MAX = 64
NUM_SPLITS_AT_ONCE = 16
"""What a program of the merge loads together: 16 registers of each thread for 128 dimensions."""


@triton.jit
def find_sequence(query_start_loc, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """The sequence that tile of queries belongs to; sequence `s` begins at `start // BLOCK_Q + s`.

    So each sequence has room for all its tiles, and at most one tile too many, which ends at once.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def find_keys(
    position, last, window, split, num_splits, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The keys of a program whose first query is at `position`: all up to `last`, or its share."""
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
    if CHUNKS:
        first = position - position % window
    if SPLIT:
        num_tiles = (last - first + TILE - 1) // TILE
        share = (num_tiles + num_splits - 1) // num_splits * TILE
        first = first + split * share
        last = tl.minimum(last, first + share)
    return first, last


@triton.jit
def load_tile(
    key_cache, value_cache, table, key_at, in_range, head, dim, in_head,
    key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Keys `[size, tile]` and values `[tile, size]`, slot by slot; 0 where there is none.

    Masked, not multiplied away: a slot that was never written may hold NaN.
    """
    block = tl.load(table + key_at // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
    slot = key_at % BLOCK_SIZE
    if FAR:  # else 32 bits do, and save registers
        slot = slot.to(tl.int64)
    from_key = block * key_block + slot * key_slot + head * key_head
    from_value = block * value_block + slot * value_slot + head * value_head
    k = tl.load(
        key_cache + from_key[None, :] + dim[:, None],
        mask=in_range[None, :] & in_head[:, None], other=0.0,
    )  # fmt: skip
    v = tl.load(
        value_cache + from_value[:, None] + dim[None, :],
        mask=in_range[:, None] & in_head[None, :], other=0.0,
    )  # fmt: skip
    return k, v


@triton.jit
def compute_scores(
    q, k, key_at, position, in_range, scale, window, soft_cap, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr, SOFT_CAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores times log2(e), -inf where a query does not see a key."""
    scores = tl.dot(q, k.to(COMPUTE), input_precision=PRECISION) * scale
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); float32 has no number between tanh(15) and 1.
        ratio = tl.clamp(scores / soft_cap, -15.0, 15.0, tl.PropagateNan.ALL)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))
    visible = in_range[None, :] & (key_at[None, :] <= position[:, None])
    if WINDOW:
        visible = visible & (key_at[None, :] > position[:, None] - window)
    if CHUNKS:
        visible = visible & (key_at[None, :] >= (position - position % window)[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def add_tile(
    top, total, weighted, scores, v, COMPUTE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The running maximum, sum of exponentials and weighted values, with one more tile."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    weighted = weighted * shrink[:, None]
    weighted += tl.dot(weights.to(COMPUTE), v.to(COMPUTE), input_precision=PRECISION)
    return higher, total, weighted


# A number that changes from step to step is no reason to compile anew.
@triton.jit(do_not_specialize=["num_seqs", "num_splits", "table_stride"])
def attention_kernel(
    out, partial, partial_log, query, key_cache, value_cache, block_tables, query_start_loc,
    seq_lens, num_seqs, num_splits, scale, window, soft_cap, v_scale,
    query_token, query_head, out_token, out_head, key_block, key_slot, key_head,
    value_block, value_slot, value_head, table_stride,
    GROUP: tl.constexpr, PART: tl.constexpr, HEAD_SIZE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
    SOFT_CAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, part of a group of heads, split): `BLOCK_Q` tokens by `PART` heads.

        keys of the tile   first ... | split 0 | split 1 | ... | last query's own
        within a split     TILE keys at a time, gathered slot by slot through the block table

    `scale` holds log2(e) and the scale of the keys; softmax is computed in base 2. With `CHUNKS`
    `window` is the size of a chunk.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    parts: tl.constexpr = (GROUP + PART - 1) // PART
    head = (tl.program_id(1) // parts).to(tl.int64)
    sequence, local = tile, 0
    if not ONE_TILE:
        sequence = find_sequence(query_start_loc, num_seqs, tile, BLOCK_Q)
        local = (tile - tl.load(query_start_loc + sequence) // BLOCK_Q - sequence) * BLOCK_Q
    start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - start
    if local < query_len:
        context = tl.load(seq_lens + sequence) - query_len
        m, dim = tl.arange(0, BLOCK_M), tl.arange(0, SIZE)
        step = local + m // PART
        in_group = tl.program_id(1) % parts * PART + m % PART
        is_row = (m < BLOCK_Q * PART) & (step < query_len) & (in_group < GROUP)
        in_head = dim < HEAD_SIZE
        mask = is_row[:, None] & in_head[None, :]
        token = (start + step).to(tl.int64)
        of_query = head * GROUP + in_group
        at = token[:, None] * query_token + of_query[:, None] * query_head + dim[None, :]
        q = tl.load(query + at, mask=mask, other=0.0).to(COMPUTE)
        end = context + tl.minimum(local + BLOCK_Q, query_len)
        first, last = find_keys(
            context + local, end, window, split, num_splits, TILE, WINDOW, CHUNKS, SPLIT
        )  # fmt: skip
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        weighted = tl.zeros((BLOCK_M, SIZE), tl.float32)
        table = block_tables + sequence.to(tl.int64) * table_stride
        for begin in range(first, last, TILE):
            key_at = begin + tl.arange(0, TILE)
            in_range = key_at < last
            k, v = load_tile(
                key_cache, value_cache, table, key_at, in_range, head, dim, in_head,
                key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE, FAR,
            )  # fmt: skip
            scores = compute_scores(
                q, k, key_at, context + step, in_range, scale, window, soft_cap,
                WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION,
            )  # fmt: skip
            top, total, weighted = add_tile(top, total, weighted, scores, v, COMPUTE, PRECISION)
        sums = tl.where(total == 0.0, 1.0, total)
        weighted = weighted / sums[:, None]
        if SPLIT:
            at = (token * (tl.num_programs(1) // parts * GROUP) + of_query) * num_splits + split
            tl.store(partial_log + at, top + tl.log2(sums), mask=is_row)
            written = is_row[:, None] & (first < last)  # of others the logarithm is read, no more
            tl.store(partial + at[:, None] * SIZE + dim[None, :], weighted, mask=written)
        else:
            to = token[:, None] * out_token + of_query[:, None] * out_head + dim[None, :]
            tl.store(out + to, weighted * v_scale, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out, partial, partial_log, num_splits, v_scale, out_token, out_head,
    HEAD_SIZE: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (token, head): its splits, weighted by the sums of their exponentials.

    `SPLITS` are loaded at once: one after the other each would wait for memory by itself.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, SIZE)
    row = (token * tl.num_programs(1) + head) * num_splits
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((SIZE,), tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        log = tl.load(partial_log + row + split, mask=split < num_splits, other=float("-inf"))
        part = tl.load(
            partial + (row + split)[:, None] * SIZE + dim[None, :],
            mask=(log > float("-inf"))[:, None], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(log, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(log - base)
        total = total * shrink + tl.sum(weight, 0)
        weighted = weighted * shrink + tl.sum(part * weight[:, None], 0)
        top = higher
    weighted = weighted / tl.where(total == 0.0, 1.0, total) * v_scale
    tl.store(out + token * out_token + head * out_head + dim, weighted, mask=dim < HEAD_SIZE)


class Tiling(NamedTuple):
    """How work is cut: rows of queries, keys at a time, warps, stages of prefetching."""

    part: int
    """Heads of a group that one program computes; a wider group goes to several."""
    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"
    """How float32 factors are multiplied; others are exact."""
    registers_max: int | None = None
    """For each thread; None where the assembler's own guess is a good one."""


def choose_tiling(size: int, group: int, element_size: int, max_query_len: int | None) -> Tiling:
    """The tiling for heads padded to `size`; decodes take the smallest tile that holds a group.

    The sizes are those that fit the registers of sm_90a (tests/kernels/test_compiled.py). They were
    not tuned on a GPU.
    """
    rows_max = choose_rows_max(size, element_size)
    part = cut_group(group, rows_max)
    few = int(max(16, triton.next_power_of_2(part)))
    if element_size == 4:
        # Three products of tf32 on the tensor cores have about the accuracy of one of float32. They
        # hold a row of queries twice in registers, which 256 dimensions do not leave room for.
        if size >= 256:
            return Tiling(part, few, 16, 4, 1)
        return Tiling(part, few, 16, 8 if size >= 128 else 4, 1, "tf32x3")
    if max_query_len is not None and max_query_len * part <= min(2 * few, rows_max):
        block_m = int(max(16, triton.next_power_of_2(max_query_len * part)))
    else:
        block_m = max(64, few)
    if block_m >= 64:
        tile, num_warps = (32, 8) if size >= 256 else (64, 4 if block_m < 128 else 8)
        return Tiling(part, block_m, tile, num_warps, 2)
    # Left to itself the assembler spills 8 bytes to fit one more program on a multiprocessor.
    if size >= 256:
        return Tiling(part, block_m, 32, 4, 2, registers_max=255)
    registers_max = 128 if size <= 64 else (168 if block_m == 32 else None)
    return Tiling(part, block_m, 32 if block_m == 32 else 64, 4, 3, registers_max=registers_max)


def choose_rows_max(size: int, element_size: int) -> int:
    """Rows of queries that one program holds in its registers beside their weighted values."""
    if element_size == 4:
        return 16 if size >= 256 else 32
    return 64 if size >= 256 else 128


def cut_group(group: int, most: int) -> int:
    """The heads of a part, so that the fewest parts of at most `most` are about equal."""
    return int(triton.cdiv(group, triton.cdiv(group, most)))


def choose_num_splits(num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Splits that give each multiprocessor two programs, if the sequences are long enough."""
    wanted = triton.cdiv(2 * num_processors, num_programs)
    possible = triton.cdiv(max_seq_len, NUM_KEYS_PER_SPLIT_MIN)
    return int(max(1, min(wanted, possible, NUM_SPLITS_MAX)))


@on_device_of_first
def launch_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rules: Rules,
    max_query_len: int | None,
    max_seq_len: int | None,
    out: Tensor,
) -> None:
    """A grid sized by the batch; short queries of few sequences split their keys."""
    num_tokens, num_heads, head_size = query.shape
    num_seqs, block_size, num_kv_heads = len(seq_lens), key_cache.shape[1], key_cache.shape[2]
    group, size = num_heads // num_kv_heads, triton.next_power_of_2(head_size)
    compute = choose_compute(query, key_cache)
    tiling = choose_tiling(size, group, compute.primitive_bitwidth // 8, max_query_len)
    block_q = tiling.block_m // tiling.part
    num_groups = num_kv_heads * triton.cdiv(group, tiling.part)
    one_tile = max_query_len is not None and max_query_len <= block_q
    num_tiles = num_seqs if one_tile else num_tokens // block_q + num_seqs
    longest = block_tables.shape[1] * block_size if max_seq_len is None else max_seq_len
    num_splits = 1
    if one_tile:
        num_splits = choose_num_splits(
            num_tiles * num_groups, longest, count_processors(query.device)
        )
    far = block_size * max(key_cache.stride(1), value_cache.stride(1)) >= 1 << 31
    partial = partial_log = out
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        partial = torch.empty((*shape, size), dtype=torch.float32, device=query.device)
        partial_log = torch.empty(shape, dtype=torch.float32, device=query.device)
    attention_kernel[(num_tiles, num_groups, num_splits)](
        out, partial, partial_log, query, key_cache, value_cache, block_tables, query_start_loc,
        seq_lens, num_seqs, num_splits, rules.scale * rules.k_scale * LOG2_E,
        rules.sliding_window or rules.chunk_size or 0, (rules.soft_cap or 0.0) * LOG2_E,
        rules.v_scale,
        *query.stride()[:2], *out.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        block_tables.stride(0), GROUP=group, PART=tiling.part, HEAD_SIZE=head_size, SIZE=size,
        BLOCK_SIZE=block_size, BLOCK_Q=block_q, BLOCK_M=tiling.block_m, TILE=tiling.tile,
        ONE_TILE=one_tile, SPLIT=num_splits > 1, WINDOW=rules.sliding_window is not None,
        CHUNKS=rules.chunk_size is not None, SOFT_CAP=rules.soft_cap is not None,
        COMPUTE=compute, PRECISION=tiling.precision,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.registers_max,
        FAR=far,
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[(num_tokens, num_heads)](
            out, partial, partial_log, num_splits, rules.v_scale, *out.stride()[:2],
            HEAD_SIZE=head_size, SIZE=size, SPLITS=NUM_SPLITS_AT_ONCE, num_warps=4,
        )  # fmt: skip


def choose_compute(query: Tensor, cache: Tensor) -> tl.dtype:
    """The dtype of the factors of both products; sums are always float32.

    An fp8 cache would waste float32, and bfloat16 has its range. The interpreter takes the bits of
    a bfloat16 for an integer, so there it is float32.
    """
    if not is_compiled(query):
        return tl.float16 if query.dtype == torch.float16 else tl.float32
    if query.dtype == torch.float16:
        return tl.float16
    if query.dtype == torch.float32 and cache.dtype == torch.float32:
        return tl.float32
    return tl.bfloat16


def is_compiled(query: Tensor) -> bool:
    """Whether this is for a GPU."""
    return bool(query.is_cuda)


def count_processors(device: torch.device) -> int:
    """Multiprocessors of the device; interpreted, those of an H100."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
