"""The Triton kernels of a decoder layer's small operations: rows in registers, read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels.arguments import FP8
from blockstep.kernels.cache import FP8_MAX
from blockstep.kernels.dispatch import list_launch_options, on_device_of_first

NUM_PER_THREAD = 4
"""Elements of a row that a thread of `norm_kernel` has: 8 bytes in 16-bit dtypes."""
NUM_GATED = 1024
"""Elements of a token that one program of `gate_kernel` computes."""
NUM_ROTATED = 512
"""Pairs of components that one program of `rotate_kernel` rotates."""


@triton.jit
def load_sum(pointers, mask, part_size, PARTS: tl.constexpr):
    """Return the sum of the `PARTS` numbers at each pointer, `part_size` elements apart."""
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointers + part * part_size, mask=mask, other=0.0)
    return total


@triton.jit
def norm_kernel(
    normed, hidden, residual, weight, eps, hidden_part, hidden_token, residual_token,
    HIDDEN_SIZE: tl.constexpr, SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token): compute the RMS norm of its row, after adding it to the residual's."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SIZE)
    mask = lane < HIDDEN_SIZE
    scale = tl.load(weight + lane, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:  # the weight was not written by an earlier kernel
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = load_sum(hidden + token * hidden_token + lane, mask, hidden_part, PARTS)
    if HAS_RESIDUAL:
        where = residual + token * residual_token + lane
        total = x + tl.load(where, mask=mask, other=0.0).to(tl.float32)
        stored = total.to(residual.dtype.element_ty)
        tl.store(where, stored, mask=mask)
        x = stored.to(tl.float32)
    mean = tl.sum(x * x, 0) / HIDDEN_SIZE
    y = x * tl.rsqrt(mean + eps) * scale
    tl.store(normed + token * HIDDEN_SIZE + lane, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def compute_gated(gate, up):
    """Return `silu(gate) * up`."""
    tail = tl.exp(-tl.abs(gate))  # never overflows
    return gate * tl.where(gate >= 0, 1.0, tail) / (1.0 + tail) * up


@triton.jit
def gate_kernel(
    gated, gate_up, gate_up_token, INNER_SIZE: tl.constexpr, SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token, part): compute `SIZE` elements of `silu(gate) * up`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = element < INNER_SIZE
    where = gate_up + token * gate_up_token + element
    gate = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(where + INNER_SIZE, mask=mask, other=0.0).to(tl.float32)
    y = compute_gated(gate, up)
    tl.store(gated + token * INNER_SIZE + element, y.to(gated.dtype.element_ty), mask=mask)


@triton.jit
def quantise(x, scale, LIMIT: tl.constexpr):
    """Return what a cache stores for `x`; `LIMIT` is 0 unless it is fp8."""
    if LIMIT > 0:
        x = tl.clamp(x.to(tl.float32) / scale, -LIMIT, LIMIT, tl.PropagateNan.ALL)
    return x


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "positions"])
def rotate_kernel(
    query, qkv, key_cache, value_cache, slot_mapping, positions, cos_sin, q_norm, k_norm,
    eps, k_scale, v_scale, query_token, qkv_part, qkv_token, key_block, key_slot, key_head,
    value_block, value_slot, value_head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    HAS_NORM: tl.constexpr, FP8_LIMIT: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token, part): norm and rotate `ROWS` of its heads, and cache keys and values."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_SIZE // 2
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    in_half = lane < half
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    at = (head * HEAD_SIZE)[:, None] + lane[None, :]
    given = qkv + token * qkv_token + at
    given_left = load_sum(given, mask, qkv_part, PARTS).to(query.dtype.element_ty)
    given_right = load_sum(given + half, mask, qkv_part, PARTS).to(query.dtype.element_ty)
    slot = tl.load(slot_mapping + token)
    angle = cos_sin + tl.load(positions + token) * HEAD_SIZE + lane
    cos = tl.load(angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    left = tl.where(is_value[:, None], 0.0, given_left.to(tl.float32))
    right = tl.where(is_value[:, None], 0.0, given_right.to(tl.float32))
    if HAS_NORM:
        mean = tl.sum(left * left + right * right, 1) / HEAD_SIZE
        scale = tl.rsqrt(mean + eps)[:, None]
        q_left = tl.load(q_norm + lane, mask=in_half, other=0.0).to(tl.float32)
        q_right = tl.load(q_norm + half + lane, mask=in_half, other=0.0).to(tl.float32)
        k_left = tl.load(k_norm + lane, mask=in_half, other=0.0).to(tl.float32)
        k_right = tl.load(k_norm + half + lane, mask=in_half, other=0.0).to(tl.float32)
        left = left * scale * tl.where(is_query[:, None], q_left[None, :], k_left[None, :])
        right = right * scale * tl.where(is_query[:, None], q_right[None, :], k_right[None, :])
    # Rounded as a query is stored, even if the cache rounds it further.
    turned_left = (left * cos - right * sin).to(query.dtype.element_ty)
    turned_right = (right * cos + left * sin).to(query.dtype.element_ty)
    at_left = query + token * query_token + at
    tl.store(at_left, turned_left, mask=mask & is_query[:, None])
    tl.store(at_left + half, turned_right, mask=mask & is_query[:, None])
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        is_key = mask & (~(is_query | is_value))[:, None]
        at_key = key_cache + block * key_block + offset * key_slot + lane[None, :]
        at_key += (head - NUM_HEADS).to(tl.int64)[:, None] * key_head
        key_type = key_cache.dtype.element_ty
        key_left = quantise(turned_left, k_scale, FP8_LIMIT)
        key_right = quantise(turned_right, k_scale, FP8_LIMIT)
        tl.store(at_key, key_left.to(key_type), mask=is_key)
        tl.store(at_key + half, key_right.to(key_type), mask=is_key)
        at_value = value_cache + block * value_block + offset * value_slot + lane[None, :]
        at_value += (head - NUM_HEADS - NUM_KV_HEADS).to(tl.int64)[:, None] * value_head
        value_left = quantise(given_left, v_scale, FP8_LIMIT)
        value_right = quantise(given_right, v_scale, FP8_LIMIT)
        tl.store(at_value, value_left.to(key_type), mask=mask & is_value[:, None])
        tl.store(at_value + half, value_right.to(key_type), mask=mask & is_value[:, None])


@on_device_of_first
def launch_rms_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Launch one program per token; `hidden` may be in parts, `[num_parts, num_tokens, size]`."""
    num_tokens, hidden_size = hidden.shape[-2:]
    size = max(triton.next_power_of_2(hidden_size), 32)
    normed = torch.empty((num_tokens, hidden_size), dtype=weight.dtype, device=hidden.device)
    added = hidden if residual is None else residual
    norm_kernel[(num_tokens,)](
        normed, hidden, added, weight, eps, hidden.stride(0), hidden.stride(-2), added.stride(-2),
        HIDDEN_SIZE=hidden_size, SIZE=size, HAS_RESIDUAL=residual is not None,
        PARTS=count_given_parts(hidden), num_warps=min(max(size // (32 * NUM_PER_THREAD), 1), 16),
        **list_launch_options(hidden.device),
    )  # fmt: skip
    return normed


@on_device_of_first
def launch_silu_and_mul(gate_up: Tensor) -> Tensor:
    """Launch one program per `NUM_GATED` elements of each token."""
    num_tokens, inner_size = len(gate_up), gate_up.shape[1] // 2
    size = min(NUM_GATED, triton.next_power_of_2(inner_size))
    gated = torch.empty((num_tokens, inner_size), dtype=gate_up.dtype, device=gate_up.device)
    gate_kernel[(num_tokens, triton.cdiv(inner_size, size))](
        gated, gate_up, gate_up.stride(0), INNER_SIZE=inner_size, SIZE=size, num_warps=4,
        **list_launch_options(gate_up.device),
    )  # fmt: skip
    return gated


@on_device_of_first
def launch_rotate_and_cache(
    query: Tensor,
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """Launch one program per token and as many heads as have `NUM_ROTATED` pairs of components.

    `query`, `[num_tokens, num_heads * head_size]`, gets the rotated queries; it may begin `qkv`.
    """
    _, block_size, num_kv_heads, head_size = key_cache.shape
    num_tokens, num_all = qkv.shape[-2], qkv.shape[-1] // head_size
    lanes = triton.next_power_of_2(head_size // 2)
    rows = min(NUM_ROTATED // lanes, triton.next_power_of_2(num_all))
    has_norm = q_norm is not None
    rotate_kernel[(num_tokens, triton.cdiv(num_all, rows))](
        query, qkv, key_cache, value_cache, slot_mapping, positions, cos_sin,
        q_norm if has_norm else cos_sin, k_norm if has_norm else cos_sin, eps, k_scale, v_scale,
        query.stride(0), qkv.stride(0), qkv.stride(-2), *key_cache.stride()[:3],
        *value_cache.stride()[:3], NUM_HEADS=num_all - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size, BLOCK_SIZE=block_size, ROWS=rows, LANES=lanes, HAS_NORM=has_norm,
        FP8_LIMIT=FP8_MAX if key_cache.dtype == FP8 else 0.0, PARTS=count_given_parts(qkv),
        num_warps=2, **list_launch_options(qkv.device),
    )  # fmt: skip


def count_given_parts(given: Tensor) -> int:
    """Return the parts of a product, `[num_parts, num_tokens, size]`; 1 for a matrix."""
    return len(given) if given.dim() == 3 else 1
