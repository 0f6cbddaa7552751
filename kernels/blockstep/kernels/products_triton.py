"""The Triton kernels of products of few rows: each program reads some rows of the weight, once.

A weight does not depend on the kernel in front, so programs ask for it before they wait for that
kernel: `product_kernel` has the first lines brought into the L2 cache, `vector_kernel` loads
those of its first two units into registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels.attention_triton import choose_compute
from blockstep.kernels.dispatch import count_processors, list_launch_options, on_device_of_first
from blockstep.kernels.layers_triton import compute_gated
from blockstep.kernels.products import PART_SIZE_OF_ONE, find_part_size


class Tiling(NamedTuple):
    """Sizes of a program's tiles, and resources of the program."""

    block_k: int
    """Input columns of an iteration."""
    num_warps: int
    num_stages: int


BLOCK_M = tl.constexpr(64)
"""Tokens of a tile, padding included: the rows of one matrix instruction of four warps."""
COLUMNS_MAX = 64
"""Most columns of the result that a program computes."""
PRODUCT = Tiling(block_k=128, num_warps=4, num_stages=4)
GATED = Tiling(block_k=64, num_warps=4, num_stages=5)
NUM_LINES = tl.constexpr(4)
"""Lines of 128 bytes of each row of the weight that are asked for before the wait. Kernels further
behind ask as early, and more lines would evict each other from the cache."""
NUM_KEPT = 4
"""Rows of the weight, of `PART_SIZE_OF_ONE` columns, that a program of one token computes at a
time; it keeps twice as many in registers."""
NUM_WARPS_OF_ONE = 4
NUM_AT_ONCE = 5
"""Programs of one token that a multiprocessor runs at once."""
ROUNDS_MAX = 8
"""Most units that a program of one token computes; its loop over them is unrolled."""


@triton.jit
def prefetch_lines(rows, num_lines):
    """Ask for the first `NUM_LINES` lines at each pointer to be brought into the L2 cache."""
    line = tl.minimum(tl.arange(0, NUM_LINES), num_lines - 1)
    lines = rows[:, None] + line[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_tile(pointers, lane, k, stop, is_valid, IS_EVEN: tl.constexpr):
    """Return input columns `k` to `k + BLOCK_K - 1`, those before `stop`, of valid rows."""
    if IS_EVEN:
        tile = tl.load(pointers + k, mask=is_valid[:, None], other=0.0)
    else:
        mask = is_valid[:, None] & (k + lane < stop)[None, :]
        tile = tl.load(pointers + k, mask=mask, other=0.0)
    return tile


# A step of another size must not be compiled anew.
@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    out, hidden, weight, bias, num_tokens, hidden_token, weight_row, OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr, PART_SIZE: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    BLOCK_K: tl.constexpr, COMPUTE: tl.constexpr, IS_EVEN: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (tile, part): compute `COLUMNS` columns of a part of the product.

    With `IS_GATED` half of its lanes are columns of gate, the others the same columns of up.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tl.arange(0, 2 * LANES if IS_GATED else LANES)
    columns = tile * COLUMNS + n % LANES
    is_column = (n % LANES < COLUMNS) & (columns < OUT_SIZE)
    columns += n // LANES * OUT_SIZE
    begin = part * PART_SIZE
    stop = tl.minimum(begin + PART_SIZE, IN_SIZE)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        asked = tl.where(is_column, columns, tile * COLUMNS).to(tl.int64)
        prefetch_lines(weight + asked * weight_row + begin, tl.maximum((stop - begin) // 64, 1))
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BLOCK_M)
    is_token = m < num_tokens
    lane = tl.arange(0, BLOCK_K)
    tokens = hidden + m.to(tl.int64)[:, None] * hidden_token + lane[None, :]
    rows = weight + columns.to(tl.int64)[:, None] * weight_row + lane[None, :]
    acc = tl.zeros((BLOCK_M, 2 * LANES if IS_GATED else LANES), tl.float32)
    for k in range(begin, stop, BLOCK_K):
        x = load_tile(tokens, lane, k, stop, is_token, IS_EVEN)
        w = load_tile(rows, lane, k, stop, is_column, IS_EVEN)
        acc = tl.dot(x.to(COMPUTE), tl.trans(w.to(COMPUTE)), acc, input_precision="ieee")
    if HAS_BIAS and part == 0:
        acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    row = out + (part * num_tokens + m).to(tl.int64)[:, None] * OUT_SIZE
    if IS_GATED:
        both = tl.permute(tl.reshape(acc, (BLOCK_M, 2, LANES)), (0, 2, 1))
        gate, up = tl.split(both)
        column = tile * COLUMNS + tl.arange(0, LANES)
        mask = (tl.arange(0, LANES) < COLUMNS) & (column < OUT_SIZE)
        y = compute_gated(gate, up).to(out.dtype.element_ty)
        tl.store(row + column[None, :], y, mask=is_token[:, None] & mask[None, :])
    else:
        tl.store(row + columns[None, :], acc, mask=is_token[:, None] & is_column[None, :])


@triton.jit
def load_rows(
    weight, unit, part, weight_row, first_row, OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr,
    PART_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a part of the weight's rows for the columns of a unit, `[COLUMNS, PART_SIZE]`."""
    column = unit * COLUMNS + tl.arange(0, COLUMNS)
    k = part * PART_SIZE + tl.arange(0, PART_SIZE)
    rows = weight + (first_row + column).to(tl.int64)[:, None] * weight_row + k[None, :]
    mask = (column < OUT_SIZE)[:, None] & (k < IN_SIZE)[None, :]
    return tl.load(rows, mask=mask, other=0.0)


@triton.jit
def load_unit(
    weight, unit, part, weight_row, OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr,
    PART_SIZE: tl.constexpr, COLUMNS: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Return `load_rows` of a unit, and with `IS_GATED` those of up; otherwise the same twice."""
    rows = load_rows(weight, unit, part, weight_row, 0, OUT_SIZE, IN_SIZE, PART_SIZE, COLUMNS)
    up = rows
    if IS_GATED:
        up = load_rows(
            weight, unit, part, weight_row, OUT_SIZE, OUT_SIZE, IN_SIZE, PART_SIZE, COLUMNS
        )  # fmt: skip
    return rows, up


@triton.jit
def vector_kernel(
    out, hidden, weight, bias, weight_row, OUT_SIZE: tl.constexpr, IN_SIZE: tl.constexpr,
    PART_SIZE: tl.constexpr, COLUMNS: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (unit, part): compute a part of the product of one token.

    A unit is `COLUMNS` columns. A program computes `ROUNDS` units, at a distance of the number of
    programs, and has asked for the weights of the next one while it computes one.
    """
    first, part, step = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    w, w_up = load_unit(
        weight, first, part, weight_row, OUT_SIZE, IN_SIZE, PART_SIZE, COLUMNS, IS_GATED
    )  # fmt: skip
    next_w, next_up = w, w_up
    if ROUNDS > 1:
        next_w, next_up = load_unit(
            weight, first + step, part, weight_row, OUT_SIZE, IN_SIZE, PART_SIZE, COLUMNS, IS_GATED
        )  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    k = part * PART_SIZE + tl.arange(0, PART_SIZE)
    x = tl.load(hidden + k, mask=k < IN_SIZE, other=0.0).to(tl.float32)[None, :]
    for number in tl.static_range(ROUNDS):
        unit = first + number * step
        column = unit * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < OUT_SIZE
        y = tl.sum(w.to(tl.float32) * x, 1)
        if HAS_BIAS and part == 0:
            y += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        if IS_GATED:
            up = tl.sum(w_up.to(tl.float32) * x, 1)
            if HAS_BIAS:
                at_up = bias + OUT_SIZE + column
                up += tl.load(at_up, mask=is_column, other=0.0).to(tl.float32)
            y = compute_gated(y, up)
        at = out + part * OUT_SIZE + column
        tl.store(at, y.to(out.dtype.element_ty), mask=is_column)
        w, w_up = next_w, next_up
        if number + 2 < ROUNDS:
            next_w, next_up = load_unit(
                weight, unit + 2 * step, part, weight_row, OUT_SIZE, IN_SIZE, PART_SIZE, COLUMNS,
                IS_GATED,
            )  # fmt: skip


@on_device_of_first
def launch_multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the programs of all parts; return `[num_parts, num_tokens, out_size]` float32."""
    num_tokens, (out_size, in_size) = len(hidden), weight.shape
    part_size = find_part_size(num_tokens, out_size, in_size)
    shape = triton.cdiv(in_size, part_size), num_tokens, out_size
    parts = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    if num_tokens == 1:
        _launch_one(parts, hidden, weight, bias, part_size, is_gated=False)
    else:
        _launch_few(parts, hidden, weight, bias, part_size, is_gated=False)
    return parts


@on_device_of_first
def launch_multiply_gated(hidden: Tensor, gate_up: Tensor, bias: Tensor | None) -> Tensor:
    """Launch programs that have all input columns; return `[num_tokens, inner_size]`."""
    num_tokens, inner_size, in_size = len(hidden), len(gate_up) // 2, gate_up.shape[1]
    gated = torch.empty((num_tokens, inner_size), dtype=hidden.dtype, device=hidden.device)
    if num_tokens == 1 and in_size <= NUM_KEPT // 2 * PART_SIZE_OF_ONE:
        _launch_one(gated, hidden, gate_up, bias, in_size, is_gated=True)
    else:
        _launch_few(gated, hidden, gate_up, bias, in_size, is_gated=True)
    return gated


def _launch_few(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part_size: int,
    *,
    is_gated: bool,
) -> None:
    """Launch about as many programs as the device has multiprocessors, or a multiple."""
    (num_tokens, in_size), out_size = hidden.shape, out.shape[-1]
    num_parts, tiling = triton.cdiv(in_size, part_size), GATED if is_gated else PRODUCT
    num_programs = max(1, count_processors(hidden.device) // num_parts)
    columns = share_columns(out_size, num_programs)
    product_kernel[(triton.cdiv(out_size, columns), num_parts)](
        out, hidden, weight, hidden if bias is None else bias, num_tokens, hidden.stride(0),
        weight.stride(0), OUT_SIZE=out_size, IN_SIZE=in_size, PART_SIZE=part_size, COLUMNS=columns,
        LANES=max(16, triton.next_power_of_2(columns)), BLOCK_K=tiling.block_k,
        COMPUTE=choose_compute(hidden, weight),
        IS_EVEN=part_size % tiling.block_k == 0 and in_size % tiling.block_k == 0,
        IS_GATED=is_gated, HAS_BIAS=bias is not None, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages, **list_launch_options(hidden.device),
    )  # fmt: skip


def _launch_one(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part_size: int,
    *,
    is_gated: bool,
) -> None:
    """Launch as many programs as run at once, each with about as many units.

    A unit is `NUM_KEPT` rows of the weight, fewer if these are longer.
    """
    in_size, out_size = hidden.shape[1], out.shape[-1]
    size = triton.next_power_of_2(min(part_size, in_size))
    num_kept = NUM_KEPT * PART_SIZE_OF_ONE // max(size, PART_SIZE_OF_ONE)
    columns = num_kept // 2 if is_gated else num_kept
    num_units, num_parts = triton.cdiv(out_size, columns), triton.cdiv(in_size, size)
    most = max(1, count_processors(hidden.device) * NUM_AT_ONCE // num_parts)
    rounds = min(triton.cdiv(num_units, most), ROUNDS_MAX)
    vector_kernel[(triton.cdiv(num_units, rounds), num_parts)](
        out, hidden, weight, hidden if bias is None else bias, weight.stride(0), OUT_SIZE=out_size,
        IN_SIZE=in_size, PART_SIZE=size, COLUMNS=columns, IS_GATED=is_gated,
        HAS_BIAS=bias is not None, ROUNDS=rounds, num_warps=NUM_WARPS_OF_ONE,
        **list_launch_options(hidden.device),
    )  # fmt: skip


def share_columns(out_size: int, num_programs: int) -> int:
    """Return the columns of each program: equal, in as few rounds of programs as possible."""
    rounds = triton.cdiv(triton.cdiv(out_size, COLUMNS_MAX), num_programs)
    return int(triton.cdiv(out_size, rounds * num_programs))
