"""The Triton kernels of paged attention: the splits of all requests are shared among programs.

Each launch has as many programs as the device runs at once. `plan_kernel` computes from the lengths
which splits each program computes (`blockstep.kernels.partition`): a contiguous range, in the order
request, KV head, query tile, split. One launch of `attention_kernel` serves the requests with few
rows of queries, a second one those with more, each with its own tile sizes.

    programs           |--------- 0 ---------|--------- 1 ---------|--------- 2 ...
    query tiles        |--- A ---|------ B ------|---------- C ----------|
    their splits       | 0  1  2 | 0  1  2  3  4 | 0  1  2  3  4  5  6  7 |

Program 0 writes the result of A. For B it stores splits 0 to 3, merged, and program 1 stores split
4; whichever of the two finishes last merges these and writes the result. Splits are always merged
in their order, so the bits of a result do not depend on which program computes which split.

A short request is one split. Its time is that of loads that wait for each other: the plan's row,
the table of blocks, keys and values. On a GPU that can, both kernels are launched while earlier
ones run, and wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels import partition
from blockstep.kernels.attention import AttentionPlan, AttentionWorkspace, Rules
from blockstep.kernels.dispatch import count_processors, list_launch_options, on_device_of_first
from blockstep.kernels.partition import FEW, MANY, Splits, count_splits_max

LOG2_E = 1.4426950408889634
NUM_LANES = 512
"""Requests whose lengths a program reads at once."""
NUM_ITEM_LANES = 32
"""Query tiles of a request that a program plans at once."""
ROW = tl.constexpr(16)
"""Number of integers in a row of a plan."""


def make_callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of `partition` for kernels. Interpreted kernels call it as it is."""
    made: Any = triton.jit(function)
    return made if isinstance(made, triton.JITFunction) else function


has_program_for_each = make_callable(partition.has_program_for_each)
find_first_key = make_callable(partition.find_first_key)
choose_split_tiles = make_callable(partition.choose_split_tiles)
weigh_query_tile = make_callable(partition.weigh_query_tile)
count_splits_before = make_callable(partition.count_splits_before)
find_query_tile = make_callable(partition.find_query_tile)


@triton.jit
def wait_for_earlier_kernels():
    """Let the next kernel be launched; then wait until all earlier ones have ended.

    Each program must call it before its first load or store: kernels in front of this one may have
    begun just as early, so lengths, plans, block tables, caches and workspaces may be in use.
    """
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def divide_up(number, by):
    """Return the quotient, rounded up."""
    return (number + by - 1) // by


@triton.jit
def count_splits_before_program(
    program, first_tile, weight, num_splits, num_tiles_all, num_programs
):  # fmt: skip
    """Compute `count_splits_before` in 64 bits."""
    return count_splits_before(
        program.to(tl.int64), first_tile.to(tl.int64), weight, num_splits, num_tiles_all,
        num_programs,
    ).to(tl.int32)  # fmt: skip


@triton.jit
def weigh_request(
    query_len, seq_len, window, is_alike, NUM_GROUPS: tl.constexpr, FEW_MAX: tl.constexpr,
    BLOCK_Q: tl.constexpr, TILE: tl.constexpr, IS_FEW: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the key tiles of a query tile, and the request's number of query tiles for all heads.

    The number is 0 if the other launch serves the request. is_alike: whether each query tile counts
    as one tile of keys.
    """
    first = find_first_key(seq_len - query_len, window, WINDOW, CHUNKS)
    weight = weigh_query_tile(
        query_len.to(tl.int64), seq_len.to(tl.int64), first, window, BLOCK_Q, TILE, IS_FEW,
        WINDOW | CHUNKS,
    ).to(tl.int32)  # fmt: skip
    is_few = (query_len > 0) & (query_len <= FEW_MAX)
    is_served = is_few if IS_FEW else query_len > FEW_MAX
    num_items = (query_len + BLOCK_Q - 1) // BLOCK_Q * NUM_GROUPS
    return tl.where(is_alike, 1, weight), tl.where(is_served, num_items, 0)


@triton.jit
def weigh_requests(
    query_start_loc, seq_lens, first_request, num_seqs, window, is_alike, NUM_GROUPS: tl.constexpr,
    FEW_MAX: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, IS_FEW: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the result of `weigh_request` for `LANES` requests, both `[LANES]` int32."""
    request = first_request + tl.arange(0, LANES)
    mask = request < num_seqs
    start = tl.load(query_start_loc + request, mask=mask, other=0)
    stop = tl.load(query_start_loc + request + 1, mask=mask, other=0)
    seq_len = tl.load(seq_lens + request, mask=mask, other=0)
    return weigh_request(
        stop - start, seq_len, window, is_alike,
        NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS,
    )  # fmt: skip


@triton.jit
def find_request(
    query_start_loc, seq_lens, position, num_seqs, window, is_alike, NUM_GROUPS: tl.constexpr,
    FEW_MAX: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, IS_FEW: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the request of key tile number `position`; key tiles and query tiles before it."""
    request = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    items_before = tl.zeros((), tl.int32)
    base = tl.zeros((), tl.int32)
    for first_request in range(0, num_seqs, LANES):
        weights, num_items = weigh_requests(
            query_start_loc, seq_lens, first_request, num_seqs, window, is_alike,
            NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS, LANES,
        )  # fmt: skip
        tiles = weights * num_items
        ends = base + tl.cumsum(tiles, 0)
        is_before = ends <= position
        request += tl.sum(is_before.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
        items_before += tl.sum(tl.where(is_before, num_items, 0), 0)
        base += tl.sum(tiles, 0)
    return request, before, items_before


@triton.jit
def load_request(
    query_start_loc, seq_lens, request, window, is_alike, NUM_GROUPS: tl.constexpr,
    FEW_MAX: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, IS_FEW: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the start of a request's queries, its lengths, and the result of `weigh_request`."""
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    weight, num_items = weigh_request(
        query_len, seq_len, window, is_alike,
        NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS,
    )  # fmt: skip
    return start, query_len, seq_len, weight, num_items


@triton.jit
def store_run(
    row, mask, start, query_len, seq_len, request, group, local, split, stop, num_splits,
    split_tiles, place, num_merged, first,
):  # fmt: skip
    """Store the plan's row for splits `split` to `stop - 1` of a query tile."""
    zero = split - split
    tl.store(row, zero + start, mask=mask)
    tl.store(row + 1, zero + query_len, mask=mask)
    tl.store(row + 2, zero + seq_len, mask=mask)
    tl.store(row + 3, zero + request, mask=mask)
    tl.store(row + 4, group, mask=mask)
    tl.store(row + 5, local, mask=mask)
    tl.store(row + 6, split, mask=mask)
    tl.store(row + 8, num_splits, mask=mask)
    tl.store(row + 9, split_tiles, mask=mask)
    tl.store(row + 10, place, mask=mask)
    tl.store(row + 11, zero + num_merged, mask=mask)
    tl.store(row + 12, first, mask=mask)
    tl.store(row + 13, stop, mask=mask)


@triton.jit
def plan_items(
    plan, header, runs_at, program, num_programs, num_tiles_all, end, start, query_len,
    seq_len, request, before, items_before, index, num_items, weight, first_run, stop_run,
    window, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, IS_FEW: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the runs of query tiles `index` of a request; return the first and last row of runs."""
    num_query_tiles = divide_up(query_len, BLOCK_Q)
    local = find_query_tile(index % num_query_tiles, num_query_tiles) * BLOCK_Q
    context = seq_len - query_len
    first = find_first_key(context + local, window, WINDOW, CHUNKS)
    last = context + tl.minimum(local + BLOCK_Q, query_len)
    num_tiles = divide_up(last, TILE) - first // TILE
    split_tiles = choose_split_tiles(num_tiles, num_query_tiles, SPLITS)
    num_splits = divide_up(num_tiles, split_tiles)
    origin = before + index * weight
    split = count_splits_before_program(
        program, origin, weight, num_splits, num_tiles_all, num_programs
    )  # fmt: skip
    stop = count_splits_before_program(
        program + 1, origin, weight, num_splits, num_tiles_all, num_programs
    )  # fmt: skip
    owner = (origin.to(tl.int64) * num_programs // num_tiles_all).to(tl.int32)
    num_own = count_splits_before_program(
        owner + 1, origin, weight, num_splits, num_tiles_all, num_programs
    )  # fmt: skip
    place = owner
    num_merged = num_own  # of the stored splits, in the first slot
    if not IS_FEW:
        # The next programs may store their splits of the owner's last query tile while the owner is
        # still at one of which it has all splits: the two must not use the same place.
        place = owner + num_programs * (num_own == num_splits).to(tl.int32)
        num_merged = num_own * 0 + 1
    has_any = (index < num_items) & (origin < end) & (split < stop)
    run = items_before + index + program
    first_run = tl.minimum(first_run, tl.min(tl.where(has_any, run, 0x7FFFFFFF), 0))
    stop_run = tl.maximum(stop_run, tl.max(tl.where(has_any, run + 1, 0), 0))
    is_first = has_any & (run == first_run)
    store_run(
        plan + (runs_at + run) * ROW, has_any, start, query_len, seq_len, request,
        index // num_query_tiles, local, split, stop, num_splits, split_tiles, place,
        num_merged, first,
    )  # fmt: skip
    store_run(
        header + run * 0, is_first, start, query_len, seq_len, request,
        index // num_query_tiles, local, split, stop, num_splits, split_tiles, place,
        num_merged, first,
    )  # fmt: skip
    return first_run, stop_run


@triton.jit
def weigh_batch(
    query_start_loc, seq_lens, num_seqs, num_programs, window, NUM_GROUPS: tl.constexpr,
    FEW_MAX: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, IS_FEW: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the number of key tiles of all query tiles, and whether each of these counts as one.

    The latter gives each query tile a program of its own, if all are short and there are enough.
    """
    num_tiles = tl.zeros((), tl.int32)  # 32 bits suffice for all memory there is
    num_items_all = tl.zeros((), tl.int32)
    longest = tl.zeros((), tl.int32)
    for first_request in range(0, num_seqs, LANES):
        weights, num_items = weigh_requests(
            query_start_loc, seq_lens, first_request, num_seqs, window, False,
            NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS, LANES,
        )  # fmt: skip
        num_tiles += tl.sum(weights * num_items, 0)
        num_items_all += tl.sum(num_items, 0)
        longest = tl.maximum(longest, tl.max(tl.where(num_items > 0, weights, 0), 0))
    is_alike = has_program_for_each(num_items_all, longest, num_programs, SPLITS)
    return tl.where(is_alike, num_items_all, num_tiles), is_alike


@triton.jit
def plan_program(
    plan, program, num_programs, header_at, runs_at, query_start_loc, seq_lens, num_seqs, window,
    NUM_GROUPS: tl.constexpr, FEW_MAX: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
    IS_FEW: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr, ITEM_LANES: tl.constexpr,
):  # fmt: skip
    """Write the runs of a program: for each of its query tiles, the splits that it computes.

    The key tiles of all query tiles are numbered. A program computes the splits whose first key
    tile is in its range of numbers. Query tile `i` of program `p` is in row `i + p` of the runs:
    only the last one of a program may also be the first one of the next. The first run is in the
    program's header as well, with the range of rows of its runs.
    """
    num_tiles_all, is_alike = weigh_batch(
        query_start_loc, seq_lens, num_seqs, num_programs, window,
        NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, SPLITS, WINDOW, CHUNKS, LANES,
    )  # fmt: skip
    position = (program.to(tl.int64) * num_tiles_all // num_programs).to(tl.int32)
    end = ((program + 1).to(tl.int64) * num_tiles_all + num_programs - 1) // num_programs
    end = end.to(tl.int32)
    request = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    items_before = tl.zeros((), tl.int32)
    first_run = tl.full((), 0x7FFFFFFF, tl.int32)
    stop_run = tl.zeros((), tl.int32)
    header = plan + (header_at + program) * ROW
    while position < end:
        start, query_len, seq_len, weight, num_items = load_request(
            query_start_loc, seq_lens, request, window, is_alike,
            NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS,
        )  # fmt: skip
        if position >= before + weight * num_items:
            request, before, items_before = find_request(
                query_start_loc, seq_lens, position, num_seqs, window, is_alike,
                NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS, LANES,
            )  # fmt: skip
            start, query_len, seq_len, weight, num_items = load_request(
                query_start_loc, seq_lens, request, window, is_alike,
                NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, IS_FEW, WINDOW, CHUNKS,
            )  # fmt: skip
        first_index = (position - before) // weight
        index = first_index + tl.arange(0, ITEM_LANES)
        first_run, stop_run = plan_items(
            plan, header, runs_at, program, num_programs, num_tiles_all, end, start, query_len,
            seq_len, request, before, items_before, index, num_items, weight, first_run, stop_run,
            window, BLOCK_Q, TILE, IS_FEW, SPLITS, WINDOW, CHUNKS,
        )  # fmt: skip
        stop_index = first_index + ITEM_LANES
        position = before + stop_index * weight
        if stop_index >= num_items:
            position = before + num_items * weight
            before = position
            items_before += num_items
            request += 1
    tl.store(header + 7, first_run)
    tl.store(header + 14, stop_run)


# These numbers change from step to step; compiling for each value is avoided.
@triton.jit(do_not_specialize=["num_few", "runs_at", "num_few_runs", "num_seqs"])
def plan_kernel(
    plan, num_few, runs_at, num_few_runs, query_start_loc, seq_lens, num_seqs, window,
    NUM_GROUPS: tl.constexpr, FEW_MAX: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, MANY_BLOCK_Q: tl.constexpr, MANY_TILE: tl.constexpr,
    MANY_SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    ITEM_LANES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Plan one program of `attention_kernel` per program: the first `num_few` are for few rows."""
    if DEPENDENT:
        wait_for_earlier_kernels()
    program = tl.program_id(0)
    if program < num_few:
        plan_program(
            plan, program, num_few, 0, runs_at, query_start_loc, seq_lens, num_seqs, window,
            NUM_GROUPS, FEW_MAX, BLOCK_Q, TILE, True, SPLITS, WINDOW, CHUNKS, LANES, ITEM_LANES,
        )  # fmt: skip
    else:
        plan_program(
            plan, program - num_few, tl.num_programs(0) - num_few, num_few, runs_at + num_few_runs,
            query_start_loc, seq_lens, num_seqs, window, NUM_GROUPS, FEW_MAX, MANY_BLOCK_Q,
            MANY_TILE, False, MANY_SPLITS, WINDOW, CHUNKS, LANES, ITEM_LANES,
        )  # fmt: skip


@triton.jit
def load_blocks(table, tile, first, last, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the block of each key of a tile, `[TILE]` int32; 0 for keys outside [first, last)."""
    key_at = tile * TILE + tl.arange(0, TILE)
    in_range = (key_at >= first) & (key_at < last)
    # Division without a sign is a shift.
    index = (key_at.to(tl.uint32) // BLOCK_SIZE).to(tl.int32)
    return tl.load(table + index, mask=in_range, other=0)


@triton.jit
def load_tile(
    key_cache, value_cache, block, key_at, in_range, head, dim, in_head,
    key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE: tl.constexpr,
    FAR: tl.constexpr, ALIKE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return keys and values of a tile, both `[TILE, SIZE]`; 0 outside the range.

    Loads are masked, unless all keys are in range: a slot that was never written may hold NaN.
    """
    block = block.to(tl.int64)
    slot = key_at - (key_at.to(tl.uint32) // BLOCK_SIZE).to(tl.int32) * BLOCK_SIZE
    if FAR:  # else 32 bits are enough, and save registers
        slot = slot.to(tl.int64)
    from_key = block * key_block + slot * key_slot + head.to(tl.int64) * key_head
    from_value = from_key
    if not ALIKE:
        from_value = block * value_block + slot * value_slot + head.to(tl.int64) * value_head
    keys = key_cache + from_key[:, None] + dim[None, :]
    values = value_cache + from_value[:, None] + dim[None, :]
    if MASKED:
        mask = in_range[:, None] & in_head[None, :]
        k = tl.load(keys, mask=mask, other=0.0)
        v = tl.load(values, mask=mask, other=0.0)
    else:
        k = tl.load(keys)
        v = tl.load(values)
    return k, v


@triton.jit
def compute_scores(
    q, k, key_at, position, scale, window, soft_cap, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr, SOFT_CAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return scores, -inf if a query does not see a key; without a soft cap they are not scaled
    yet.

    Unless `MASKED`, all queries see all keys.
    """
    scores = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision=PRECISION)
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); float32 has no number between tanh(15) and 1.
        ratio = tl.clamp(scores * (scale / soft_cap), -15.0, 15.0, tl.PropagateNan.ALL)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))
    if MASKED:
        visible = key_at[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (key_at[None, :] > position[:, None] - window)
        if CHUNKS:
            visible = visible & (key_at[None, :] >= (position - position % window)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def weigh_tile(top, scores, scale, SOFT_CAP: tl.constexpr):
    """Return the running maximum with one more tile, the factor of what was summed before, and the
    exponentials of the tile.

    The maximum is that of scaled scores, times log2(e).
    """
    highest = tl.max(scores, 1)
    if not SOFT_CAP:  # scaled here, so that multiplication and subtraction are one instruction
        highest = highest * scale
    higher = tl.maximum(top, highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    if SOFT_CAP:
        weights = tl.exp2(scores - base[:, None])
    else:
        weights = tl.exp2(scores * scale - base[:, None])
    return higher, tl.exp2(top - base), weights


@triton.jit
def add_values(weighted, shrink, weights, v, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """Return weighted values with those of one more tile."""
    weighted = weighted * shrink[:, None]
    return weighted + tl.dot(weights.to(COMPUTE), v.to(COMPUTE), input_precision=PRECISION)


@triton.jit
def add_tiles(
    top, total, weighted, q, key_cache, value_cache, table, start_tile, stop_tile, first, last,
    position, head, dim, in_head, scale, window, soft_cap,
    key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr, SOFT_CAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr, ALIKE: tl.constexpr,
    PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum of exponentials and weighted values with tiles `start_tile` to
    `stop_tile - 1`, of keys `first` to `last - 1`."""
    # The blocks of a tile are loaded an iteration ahead, since its keys wait for them.
    next_block = load_blocks(table, start_tile, first, last, TILE, BLOCK_SIZE)
    for tile in tl.range(start_tile, stop_tile):
        block = next_block
        next_block = load_blocks(table, tile + 1, first, last, TILE, BLOCK_SIZE)
        key_at = tile * TILE + tl.arange(0, TILE)
        in_range = (key_at >= first) & (key_at < last)
        k, v = load_tile(
            key_cache, value_cache, block, key_at, in_range, head, dim, in_head,
            key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE,
            FAR, ALIKE, MASKED | PADDED,
        )  # fmt: skip
        scores = compute_scores(
            q, k, key_at, position, scale, window, soft_cap,
            WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, MASKED,
        )  # fmt: skip
        top, shrink, weights = weigh_tile(top, scores, scale, SOFT_CAP)
        total = total * shrink + tl.sum(weights, 1)
        weighted = add_values(weighted, shrink, weights, v, COMPUTE, PRECISION)
    return top, total, weighted


@triton.jit
def merge(top, total, weighted, next_top, next_total, next_weighted):
    """Return running maximum, sum of exponentials and weighted values, with those of the next
    split.

    Each multiplication and addition is rounded as written here: if the compiler could choose which
    of them to fuse, bits would depend on whether a split was merged from registers or from memory.
    """
    higher = tl.maximum(top, next_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(top - base)
    take = tl.exp2(next_top - base)
    total = tl.fma(next_total, take, total * keep)
    many = tl.broadcast_to(take[:, None], weighted.shape)
    weighted = tl.fma(next_weighted, many, weighted * keep[:, None])
    return higher, total, weighted


@triton.jit
def store_split(
    partial, partial_sums, slot, top, total, weighted, m, is_row, dim,
    BLOCK_M: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a split into a slot of the workspace."""
    tl.store(partial_sums + slot * (2 * BLOCK_M) + m, top, mask=is_row)
    tl.store(partial_sums + slot * (2 * BLOCK_M) + BLOCK_M + m, total, mask=is_row)
    at = slot * (BLOCK_M * SIZE) + m[:, None] * SIZE + dim[None, :]
    tl.store(partial + at, weighted, mask=is_row[:, None])


@triton.jit
def load_split(
    partial, partial_sums, slot, m, is_row, dim, BLOCK_M: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return rows `m` of a stored split; invalid rows have the sums of no key."""
    sums = partial_sums + slot * (2 * BLOCK_M) + m
    top = tl.load(sums, mask=is_row, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums + BLOCK_M, mask=is_row, other=0.0, cache_modifier=".cg")
    at = slot * (BLOCK_M * SIZE) + m[:, None] * SIZE + dim[None, :]
    weighted = tl.load(partial + at, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
    return top, total, weighted


@triton.jit
def store_out(out, row, dim, total, weighted, v_scale, mask):
    """Store the weighted mean of the values."""
    sums = tl.where(total == 0.0, 1.0, total)
    tl.store(out + row[:, None] + dim[None, :], weighted / sums[:, None] * v_scale, mask=mask)


@triton.jit
def merge_stored(
    out, partial, partial_sums, first_slot, start_split, num_splits, start, query_len, local, group,
    dim, in_head, v_scale, out_token, out_head, GROUP: tl.constexpr, PART: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge splits 0 to `start_split - 1`, which are in the first slot, with the later ones.

    The others are in slots of their own. The result is stored `ROWS` rows at a time. Several splits
    are merged in one iteration, since each iteration waits for memory.
    """
    num_rows = tl.minimum(query_len - local, BLOCK_Q) * PART
    for first_row in range(0, num_rows, ROWS):
        m = first_row + tl.arange(0, ROWS)
        step, head, is_row = find_rows(m, query_len, local, group, GROUP, PART, BLOCK_Q)
        top, total, weighted = load_split(
            partial, partial_sums, first_slot, m, is_row, dim, BLOCK_M, SIZE
        )  # fmt: skip
        for begin in tl.range(start_split, num_splits, AT_ONCE, num_stages=STAGES):
            for offset in tl.static_range(AT_ONCE):
                split = begin + offset
                next_top, next_total, next_weighted = load_split(
                    partial, partial_sums, first_slot + split, m, is_row & (split < num_splits),
                    dim, BLOCK_M, SIZE,
                )  # fmt: skip
                top, total, weighted = merge(
                    top, total, weighted, next_top, next_total, next_weighted
                )  # fmt: skip
        row = (start + step).to(tl.int64) * out_token + head * out_head
        mask = is_row[:, None] & in_head[None, :]
        store_out(out, row, dim, total, weighted, v_scale, mask)


@triton.jit
def find_rows(m, query_len, local, group, GROUP: tl.constexpr, PART: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Return, for rows `m` of a query tile, the token of the step, the head, and whether it is
    valid."""
    parts: tl.constexpr = (GROUP + PART - 1) // PART
    step = local + m // PART
    in_group = group % parts * PART + m % PART
    is_row = (m < BLOCK_Q * PART) & (step < query_len) & (in_group < GROUP)
    return step, group // parts * GROUP + in_group, is_row


@triton.jit
def load_queries(
    query, start, query_len, local, group, m, dim, in_head, query_token, query_head,
    GROUP: tl.constexpr, PART: tl.constexpr, BLOCK_Q: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return rows `m` of a query tile, `[BLOCK_M, SIZE]`; their tokens, and which rows are
    valid."""
    step, head, is_row = find_rows(m, query_len, local, group, GROUP, PART, BLOCK_Q)
    row = (start + step).to(tl.int64) * query_token + head * query_head
    mask = is_row[:, None] & in_head[None, :]
    q = tl.load(query + row[:, None] + dim[None, :], mask=mask, other=0.0).to(COMPUTE)
    return q, step, is_row


@triton.jit
def finish_splits(
    out, partial, partial_sums, counters, at, top, total, weighted, split, stop, num_splits,
    first_slot, start, query_len, local, group, m, dim, in_head, v_scale, out_token, out_head,
    GROUP: tl.constexpr, PART: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr, IS_FEW: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Store the result of a query tile if these are all splits; else store a partial result.

    The program that counts the last split merges all.
    """
    step, head, is_row = find_rows(m, query_len, local, group, GROUP, PART, BLOCK_Q)
    num_new = stop - split
    if num_new == num_splits:
        row = (start + step).to(tl.int64) * out_token + head * out_head
        mask = is_row[:, None] & in_head[None, :]
        store_out(out, row, dim, total, weighted, v_scale, mask)
    else:
        if (split == 0) | (not IS_FEW):
            store_split(
                partial, partial_sums, first_slot + split, top, total, weighted, m, is_row, dim,
                BLOCK_M, SIZE,
            )  # fmt: skip
        counter, num_merged = counters + tl.load(at + 10), tl.load(at + 11)
        tl.debug_barrier()  # all threads have stored before one of them counts
        num_stored = tl.atomic_add(counter, num_new, sem="acq_rel") + num_new
        if num_stored == num_splits:
            merge_stored(
                out, partial, partial_sums, first_slot, num_merged, num_splits, start,
                query_len, local, group, dim, in_head, v_scale, out_token, out_head, GROUP, PART,
                BLOCK_Q, BLOCK_M, SIZE, ROWS, AT_ONCE, MERGE_STAGES,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have loaded before a slot is used again
            tl.atomic_xchg(counter, 0, sem="relaxed")


@triton.jit
def attend_few(
    partial, partial_sums, first_slot, q, key_cache, value_cache, table, next_block, first_tile,
    num_tiles, split_tiles, split, stop_split, first, last, position, m, is_row, head, dim, in_head,
    scale, window, soft_cap, key_block, key_slot, key_head, value_block, value_slot, value_head,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKS: tl.constexpr, SOFT_CAP: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Compute splits `split` to `stop_split - 1` of a query tile, in one loop.

    Splits from split 0 on are merged and returned. Others are stored one by one. next_block: the
    blocks of the first tile. Exponentials are summed over the keys of a tile only at the end of a
    split, since that sum waits for all threads.
    """
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M, TILE), tl.float32)
    weighted = tl.zeros((BLOCK_M, SIZE), tl.float32)
    merged_top, merged_total, merged = top, tl.zeros((BLOCK_M,), tl.float32), weighted
    stop_tile = tl.minimum(num_tiles, stop_split * split_tiles)
    left = split_tiles  # tiles of the current split
    slot = first_slot + split
    # The blocks of a tile are loaded an iteration ahead, since its keys wait for them.
    for tile in tl.range(split * split_tiles, stop_tile):
        block = next_block
        next_block = load_blocks(table, first_tile + tile + 1, first, last, TILE, BLOCK_SIZE)
        key_at = (first_tile + tile) * TILE + tl.arange(0, TILE)
        in_range = (key_at >= first) & (key_at < last)
        k, v = load_tile(
            key_cache, value_cache, block, key_at, in_range, head, dim, in_head,
            key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE,
            FAR, ALIKE, True,
        )  # fmt: skip
        scores = compute_scores(
            q, k, key_at, position, scale, window, soft_cap,
            WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, True,
        )  # fmt: skip
        top, shrink, weights = weigh_tile(top, scores, scale, SOFT_CAP)
        sums = sums * shrink[:, None] + weights
        weighted = add_values(weighted, shrink, weights, v, COMPUTE, PRECISION)
        left -= 1
        if (left == 0) | (tile + 1 == stop_tile):
            total = tl.sum(sums, 1)
            if split == 0:
                merged_top, merged_total, merged = merge(
                    merged_top, merged_total, merged, top, total, weighted
                )  # fmt: skip
            else:
                store_split(
                    partial, partial_sums, slot,
                    top, total, weighted, m, is_row, dim, BLOCK_M, SIZE,
                )  # fmt: skip
            slot += 1
            left = split_tiles
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            sums = tl.zeros((BLOCK_M, TILE), tl.float32)
            weighted = tl.zeros((BLOCK_M, SIZE), tl.float32)
    return merged_top, merged_total, merged


@triton.jit
def attend_many(
    q, key_cache, value_cache, table, start_tile, stop_tile, first, last, first_position, position,
    head, dim, in_head, scale, window, soft_cap, key_block, key_slot, key_head,
    value_block, value_slot, value_head, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
    SOFT_CAP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
    ALIKE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute a split of a query tile; only tiles that some query does not see are masked.

    key tiles    first | some see | all see ... all see | some see | last
    """
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    weighted = tl.zeros((BLOCK_M, SIZE), tl.float32)
    full_start = start_tile
    if WINDOW | CHUNKS:
        full_start = divide_up(find_first_key(last - 1, window, WINDOW, CHUNKS), TILE)
        full_start = tl.minimum(tl.maximum(full_start, start_tile), stop_tile)
        top, total, weighted = add_tiles(
            top, total, weighted, q, key_cache, value_cache, table, start_tile, full_start,
            first, last, position, head, dim, in_head, scale, window, soft_cap,
            key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE, TILE,
            WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, FAR, ALIKE, PADDED, True,
        )  # fmt: skip
    full_stop = tl.minimum((first_position + 1) // TILE, stop_tile)
    full_stop = tl.maximum(full_stop, full_start)
    top, total, weighted = add_tiles(
        top, total, weighted, q, key_cache, value_cache, table, full_start, full_stop,
        first, last, position, head, dim, in_head, scale, window, soft_cap,
        key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE, TILE,
        WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, FAR, ALIKE, PADDED, False,
    )  # fmt: skip
    return add_tiles(
        top, total, weighted, q, key_cache, value_cache, table, full_stop, stop_tile,
        first, last, position, head, dim, in_head, scale, window, soft_cap,
        key_block, key_slot, key_head, value_block, value_slot, value_head, BLOCK_SIZE, TILE,
        WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, FAR, ALIKE, PADDED, True,
    )  # fmt: skip


@triton.jit
def split_query_tile(
    index, query_len, seq_len, window, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the splits of query tile `index` of a request.

    These are: its group of heads, its first token in this step, its first key and the one after its
    last, its first key tile and their number, the number of tiles in a split, and the number of
    splits.
    """
    num_query_tiles = divide_up(query_len, BLOCK_Q)
    local = find_query_tile(index % num_query_tiles, num_query_tiles) * BLOCK_Q
    context = seq_len - query_len
    first = find_first_key(context + local, window, WINDOW, CHUNKS)
    last = context + tl.minimum(local + BLOCK_Q, query_len)
    first_tile = first // TILE
    num_tiles = divide_up(last, TILE) - first_tile
    split_tiles = choose_split_tiles(num_tiles, num_query_tiles, SPLITS)
    num_splits = divide_up(num_tiles, split_tiles)
    group = index // num_query_tiles
    return group, local, first, last, first_tile, num_tiles, split_tiles, num_splits


@triton.jit
def find_program(index, num_programs, PER_PROCESSOR: tl.constexpr):
    """Return the program of the plan that program `index` of the launch runs.

    The first programs of a launch go to different multiprocessors, further ones to the same again.
    If a plan has few tiles, programs with work are at equal distances, and so would meet on one.
    """
    if PER_PROCESSOR > 1:
        processors = num_programs // PER_PROCESSOR
        index = index % processors * PER_PROCESSOR + index // processors
    return index


@triton.jit
def begin_program(PER_PROCESSOR: tl.constexpr, DEPENDENT: tl.constexpr):
    """Wait for earlier kernels, and return the program of the plan that this program runs."""
    if DEPENDENT:
        wait_for_earlier_kernels()
    return find_program(tl.program_id(0), tl.num_programs(0), PER_PROCESSOR)


@triton.jit
def load_runs(at):
    """Return the first row of a program's runs, and the one after the last, from its header.

    They are in different sectors of 32 bytes, so that all of the row is in the cache afterwards.
    """
    return tl.load(at + 7), tl.load(at + 14)


@triton.jit
def load_run(at, resumed, num_slots, IS_FEW: tl.constexpr, VOLATILE: tl.constexpr):
    """Return the data of a row of a plan.

    These are: the request's first query and its number of tokens, the part of heads, the first
    token of the query tile; the next split and the one after it, the end of the program's splits,
    the number of all splits; the first slot.
    """
    start = tl.load(at, volatile=VOLATILE)
    query_len = tl.load(at + 1, volatile=VOLATILE)
    group = tl.load(at + 4, volatile=VOLATILE)
    local = tl.load(at + 5, volatile=VOLATILE)
    split = tl.maximum(tl.load(at + 6, volatile=VOLATILE), resumed)
    stop = tl.load(at + 13, volatile=VOLATILE)
    num_splits = tl.load(at + 8, volatile=VOLATILE)
    first_slot = tl.load(at + 10, volatile=VOLATILE) * num_slots
    next_split = stop if IS_FEW else split + 1
    return start, query_len, group, local, split, next_split, stop, num_splits, first_slot


@triton.jit
def load_keys(
    at, query_len, local, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, LIMITED: tl.constexpr
):  # fmt: skip
    """Return the keys of a row of a plan.

    These are: the position of the request's first query; the first key of the query tile and the
    one after its last; its first key tile, their number, and the number of tiles in a split.
    """
    context = tl.load(at + 2) - query_len
    first = tl.zeros((), tl.int32)
    if LIMITED:  # else known to the compiler
        first = tl.load(at + 12)
    last = context + tl.minimum(local + BLOCK_Q, query_len)
    first_tile = first // TILE
    return context, first, last, first_tile, divide_up(last, TILE) - first_tile, tl.load(at + 9)


@triton.jit(do_not_specialize=["header_at", "runs_at", "num_slots", "table_stride"])
def attention_kernel(
    out, plan, header_at, runs_at, partial, partial_sums, counters, query, key_cache, value_cache,
    block_tables, num_slots, scale, window, soft_cap, v_scale, query_token, query_head, out_token,
    out_head, key_block, key_slot, key_head, value_block, value_slot, value_head, table_stride,
    GROUP: tl.constexpr, PART: tl.constexpr, HEAD_SIZE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    IS_FEW: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr, SOFT_CAP: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr, ALIKE: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, MERGE_STAGES: tl.constexpr,
    PER_PROCESSOR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the splits of a program's plan; a query tile has `BLOCK_Q` tokens by `PART` heads.

    With few rows it computes all splits of a query tile in one loop. `scale` includes the scale of
    the keys and log2(e), since softmax is in base 2. With `CHUNKS`, `window` is a chunk's size.
    """
    row_of_plan = header_at + begin_program(PER_PROCESSOR, DEPENDENT)
    run, stop_run = load_runs(plan + row_of_plan * ROW)
    resumed = tl.zeros((), tl.int32)  # the next split of a begun query tile, or 0
    dim = tl.arange(0, SIZE)
    in_head = dim < HEAD_SIZE
    parts: tl.constexpr = (GROUP + PART - 1) // PART
    while run < stop_run:
        at = plan + row_of_plan * ROW
        start, query_len, group, local, split, next_split, stop, num_splits, first_slot = load_run(
            at, resumed, num_slots, IS_FEW, False
        )  # fmt: skip
        context, first, last, first_tile, num_tiles, split_tiles = load_keys(
            at, query_len, local, BLOCK_Q, TILE, WINDOW | CHUNKS)  # fmt: skip
        table = block_tables + tl.load(at + 3).to(tl.int64) * table_stride
        # Always `arange`; it depends on `run`, so that no register keeps what is derived from it.
        m = tl.arange(0, BLOCK_M) + (run < 0).to(tl.int32)
        start_tile = first_tile + split * split_tiles
        if IS_FEW:  # loaded before the queries: keys and values wait for their blocks
            next_block = load_blocks(table, start_tile, first, last, TILE, BLOCK_SIZE)
        q, step, is_row = load_queries(
            query, start, query_len, local, group, m, dim, in_head, query_token, query_head, GROUP,
            PART, BLOCK_Q, COMPUTE)  # fmt: skip
        if IS_FEW:
            top, total, weighted = attend_few(
                partial, partial_sums, first_slot, q, key_cache, value_cache, table, next_block,
                first_tile, num_tiles, split_tiles, split, next_split, first, last, context + step,
                m, is_row, group // parts, dim, in_head, scale, window, soft_cap,
                key_block, key_slot, key_head, value_block, value_slot, value_head, SIZE,
                BLOCK_SIZE, BLOCK_M, TILE, WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, FAR, ALIKE,
            )  # fmt: skip
        else:
            stop_tile = first_tile + tl.minimum(num_tiles, next_split * split_tiles)
            top, total, weighted = attend_many(
                q, key_cache, value_cache, table, start_tile, stop_tile, first, last,
                context + local, context + step, group // parts, dim, in_head, scale, window,
                soft_cap, key_block, key_slot, key_head, value_block, value_slot, value_head, SIZE,
                BLOCK_SIZE, BLOCK_M, TILE, WINDOW, CHUNKS, SOFT_CAP, COMPUTE, PRECISION, FAR,
                ALIKE, HEAD_SIZE < SIZE,
            )  # fmt: skip
            # Loaded again: keeping all this from above would fill the registers.
            start, query_len, group, local, split, next_split, stop, num_splits, first_slot = (
                load_run(at, resumed, num_slots, IS_FEW, True)
            )
            m = tl.arange(0, BLOCK_M) + (group < 0).to(tl.int32)
        finish_splits(
            out, partial, partial_sums, counters, at, top, total, weighted, split, next_split,
            num_splits, first_slot, start, query_len, local, group, m, dim, in_head, v_scale,
            out_token, out_head, GROUP, PART, BLOCK_Q, BLOCK_M, SIZE, IS_FEW, ROWS, AT_ONCE,
            MERGE_STAGES,
        )  # fmt: skip
        is_done = next_split >= stop
        resumed = tl.where(is_done, 0, next_split)
        run += is_done.to(tl.int32)
        row_of_plan = tl.where(is_done, runs_at + run, row_of_plan)


class Tiling(NamedTuple):
    """Tile sizes and compile options for one kind of requests."""

    block_m: int
    """Rows of queries of a program: tokens times heads."""
    tile: int
    """Keys processed at a time."""
    num_warps: int
    num_stages: int
    """Stages of prefetching."""
    num_programs: int
    """Programs that a multiprocessor runs at once."""
    splits: Splits
    num_merged_at_once: int = 1
    """Stored splits that an iteration merges."""
    num_merge_stages: int = 1
    """Stages of prefetching when stored splits are merged."""
    precision: str = "ieee"
    """Precision of products of float32 factors; other dtypes are exact."""
    registers_max: int | None = None
    """Registers per thread; None to let the assembler choose."""


class Tilings(NamedTuple):
    """The tilings of both kinds of requests."""

    part: int
    """Heads of a group that one program computes; a wider group is split among programs."""
    few: Tiling
    """The part of requests with at most `few_max` tokens in a step."""
    many: Tiling

    @property
    def few_max(self) -> int:
        """Most tokens whose rows fit the smaller tile."""
        return self.few.block_m // self.part


@cache
def choose_tilings(size: int, group: int, element_size: int, *, is_fp8: bool = False) -> Tilings:
    """Choose tilings for heads padded to `size`; those for few rows hold one token of a group.

    element_size: bytes of a factor of the products. is_fp8: whether the cache is converted to it.

    The sizes are those that fit the registers of sm_90a (tests/kernels/test_compiled.py).
    """
    part = cut_group(group, choose_rows_max(size, element_size))
    rows = int(max(16, triton.next_power_of_2(part)))
    if element_size == 4:
        # Three products of tf32 on the tensor cores have about the accuracy of one of float32. They
        # hold a row of queries twice in registers; with 256 dimensions there is no room for that.
        precision = "ieee" if size >= 256 else "tf32x3"
        few = Tiling(rows, 16, 8, 1, 2, FEW, precision=precision)
        many = few._replace(splits=MANY, num_warps=4 if size >= 256 else 8)
        return Tilings(part, few, many)
    if rows >= 64:
        few = Tiling(rows, 64, 8, 2, 1, FEW)
    elif size >= 256:
        few = Tiling(rows, 16, 4, 4, 2, FEW, 2, 4, registers_max=255)
    else:
        splits = FEW if size > 64 or rows > 16 else FEW._replace(whole=6)
        few = Tiling(rows, 32 if rows > 16 else 64, 4, 3, 2, splits, 8, 1, registers_max=255)
    many = Tiling(64, 32, 8, 2, 1, MANY)
    if size < 256:
        many = Tiling(128, 64 if is_fp8 else 128, 8, 2, 1, MANY)
    return Tilings(part, few, many)


def find_tilings(query: Tensor, key_cache: Tensor) -> Tilings:
    """Return the tilings for the arguments of a call."""
    _, num_heads, head_size = query.shape
    return choose_tilings(
        triton.next_power_of_2(head_size), num_heads // key_cache.shape[2],
        choose_compute(query, key_cache).primitive_bitwidth // 8,
        is_fp8=key_cache.dtype == torch.float8_e4m3fn,
    )  # fmt: skip


def choose_rows_max(size: int, element_size: int) -> int:
    """Return the rows of queries that fit a program's registers with their weighted values."""
    if element_size == 4:
        return 16 if size >= 128 else 32
    return 32 if size >= 256 else 64


def cut_group(group: int, most: int) -> int:
    """Return the heads of a part, so that the fewest parts of at most `most` are about equal."""
    return int(triton.cdiv(group, triton.cdiv(group, most)))


def count_places(num_programs: int, is_few: bool) -> int:
    """Return the query tiles that can be stored at once: for many rows, two that start per
    program."""
    return num_programs if is_few else 2 * num_programs


def count_slots(tiling: Tiling, max_seq_len: int) -> int:
    """Return the most splits of a query tile that sees at most `max_seq_len` keys."""
    return count_splits_max(triton.cdiv(max_seq_len, tiling.tile), tiling.splits)


def make_workspace(
    query: Tensor, key_cache: Tensor, max_seq_len: int
) -> AttentionWorkspace:  # fmt: skip
    """Return memory for one call at a time, for block tables of up to `max_seq_len` slots."""
    size, device = triton.next_power_of_2(query.shape[2]), query.device
    tilings = find_tilings(query, key_cache)
    processors = count_processors(device)
    both = [
        (tiling, count_places(processors * tiling.num_programs, tiling is tilings.few))
        for tiling in (tilings.few, tilings.many)
    ]
    num_elements = max(
        num_places * count_slots(tiling, max_seq_len) * tiling.block_m * size
        for tiling, num_places in both
    )
    return AttentionWorkspace(
        torch.zeros(max(n for _, n in both), dtype=torch.int32, device=device),
        torch.empty((num_elements,), dtype=torch.float32, device=device),
        torch.empty((2 * num_elements // size,), dtype=torch.float32, device=device),
    )


@on_device_of_first
def make_plan(
    query: Tensor,
    key_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sliding_window: int | None,
    chunk_size: int | None,
    max_query_len: int | None,
) -> AttentionPlan:
    """Plan the programs for few rows, and those for many if a request may have that many."""
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, num_seqs = key_cache.shape[2], len(seq_lens)
    group = num_heads // num_kv_heads
    tilings = find_tilings(query, key_cache)
    few, many, part = tilings.few, tilings.many, tilings.part
    num_groups = num_kv_heads * triton.cdiv(group, part)
    processors = count_processors(query.device)
    num_few = processors * few.num_programs
    num_few_runs = num_seqs * num_groups + num_few
    num_many = num_many_runs = 0
    if (num_tokens if max_query_len is None else max_query_len) > tilings.few_max:
        num_many = processors * many.num_programs
        num_query_tiles = num_tokens // (many.block_m // part) + num_seqs
        num_many_runs = num_query_tiles * num_groups + num_many
    num_programs = num_few + num_many
    rows = torch.empty(
        (num_programs + num_few_runs + num_many_runs, ROW.value), dtype=torch.int32,
        device=query.device,
    )  # fmt: skip
    plan_kernel[(num_programs,)](
        rows, num_few, num_programs, num_few_runs, query_start_loc, seq_lens, num_seqs,
        sliding_window or chunk_size or 0, NUM_GROUPS=num_groups, FEW_MAX=tilings.few_max,
        BLOCK_Q=few.block_m // part, TILE=few.tile, SPLITS=few.splits,
        MANY_BLOCK_Q=many.block_m // part, MANY_TILE=many.tile, MANY_SPLITS=many.splits,
        WINDOW=sliding_window is not None, CHUNKS=chunk_size is not None, LANES=NUM_LANES,
        ITEM_LANES=NUM_ITEM_LANES, num_warps=4, **list_launch_options(query.device),
    )  # fmt: skip
    shape = (*query.shape, num_kv_heads, num_seqs, sliding_window, chunk_size)
    return AttentionPlan(rows, num_few, num_many, num_few_runs, shape)


@on_device_of_first
def launch_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    plan: AttentionPlan,
    rules: Rules,
    workspace: AttentionWorkspace | None,
    out: Tensor,
) -> None:
    """Launch the kernel for few rows, and the one for many if the plan has programs for it."""
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    group, size = num_heads // num_kv_heads, triton.next_power_of_2(head_size)
    compute = choose_compute(query, key_cache)
    tilings = find_tilings(query, key_cache)
    capacity = block_tables.shape[1] * block_size
    if workspace is None:
        workspace = make_workspace(query, key_cache, capacity)
    far = block_size * max(key_cache.stride(1), value_cache.stride(1)) >= 1 << 31
    runs_at = plan.num_few + plan.num_many
    kinds = (
        (tilings.few, plan.num_few, 0, runs_at),
        (tilings.many, plan.num_many, plan.num_few, runs_at + plan.num_few_runs),
    )
    for tiling, num_programs, header_at, first_run in kinds[: 2 if plan.num_many else 1]:
        num_slots = count_slots(tiling, capacity)
        num_places = count_places(num_programs, tiling is tilings.few)
        needed = num_places * num_slots * tiling.block_m * size
        if needed > workspace.partial.numel() or num_places > workspace.counters.numel():
            raise ValueError(
                f"workspace: must hold {needed} elements, but holds {workspace.partial.numel()}; "
                f"make it for this model, and with a max_seq_len of at least {capacity}"
            )
        attention_kernel[(num_programs,)](
            out, plan.rows, header_at, first_run, workspace.partial, workspace.sums,
            workspace.counters, query, key_cache, value_cache, block_tables,
            num_slots, rules.scale * rules.k_scale * LOG2_E,
            rules.sliding_window or rules.chunk_size or 0, (rules.soft_cap or 0.0) * LOG2_E,
            rules.v_scale,
            *query.stride()[:2], *out.stride()[:2], *key_cache.stride()[:3],
            *value_cache.stride()[:3], block_tables.stride(0), GROUP=group, PART=tilings.part,
            HEAD_SIZE=head_size, SIZE=size, BLOCK_SIZE=block_size,
            BLOCK_Q=tiling.block_m // tilings.part, BLOCK_M=tiling.block_m, TILE=tiling.tile,
            IS_FEW=tiling is tilings.few, WINDOW=rules.sliding_window is not None,
            CHUNKS=rules.chunk_size is not None, SOFT_CAP=rules.soft_cap is not None,
            COMPUTE=compute, PRECISION=tiling.precision, FAR=far,
            ALIKE=key_cache.stride() == value_cache.stride(),
            ROWS=min(16, max(4, triton.next_power_of_2(tilings.part))),
            AT_ONCE=tiling.num_merged_at_once, MERGE_STAGES=tiling.num_merge_stages,
            PER_PROCESSOR=tiling.num_programs, **list_launch_options(query.device),
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.registers_max,
        )  # fmt: skip


def choose_compute(query: Tensor, cache: Tensor) -> tl.dtype:
    """Return the dtype of the factors of both products; sums are always float32.

    An fp8 cache would waste float32, and bfloat16 has the range. The interpreter mistakes the bits
    of a bfloat16 for an integer, so there it is float32.
    """
    if not is_compiled(query):
        return tl.float16 if query.dtype == torch.float16 else tl.float32
    if query.dtype == torch.float16:
        return tl.float16
    if query.dtype == torch.float32 and cache.dtype == torch.float32:
        return tl.float32
    return tl.bfloat16


def is_compiled(query: Tensor) -> bool:
    """Whether the kernel is compiled for a GPU."""
    return bool(query.is_cuda)
