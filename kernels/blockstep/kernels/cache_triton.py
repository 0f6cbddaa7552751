"""The Triton kernel of the KV scatter."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels.arguments import FP8
from blockstep.kernels.cache import FP8_MAX
from blockstep.kernels.dispatch import on_device_of_first

NUM_ELEMENTS_MAX = 1024
"""Most elements of a token's keys that one program moves: 8 for each of 128 threads."""


@triton.jit
def scatter_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
    key_token, key_head, value_token, value_head,
    key_block, key_slot, key_cache_head, value_block, value_slot, value_cache_head,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr, FP8_LIMIT: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Program (token, part): write `SIZE` elements of a token's keys, and as many of its values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        element = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        head = (element // HEAD_SIZE).to(tl.int64)
        dim = element % HEAD_SIZE
        mask = element < NUM_HEADS * HEAD_SIZE
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        k = tl.load(key + token * key_token + head * key_head + dim, mask=mask)
        v = tl.load(value + token * value_token + head * value_head + dim, mask=mask)
        if CAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
            if FP8_LIMIT > 0:
                k = tl.clamp(k / k_scale, -FP8_LIMIT, FP8_LIMIT, tl.PropagateNan.ALL)
                v = tl.clamp(v / v_scale, -FP8_LIMIT, FP8_LIMIT, tl.PropagateNan.ALL)
            k = k.to(key_cache.dtype.element_ty)
            v = v.to(value_cache.dtype.element_ty)
        to_key = block * key_block + offset * key_slot + head * key_cache_head + dim
        to_value = block * value_block + offset * value_slot + head * value_cache_head + dim
        tl.store(key_cache + to_key, k, mask=mask)
        tl.store(value_cache + to_value, v, mask=mask)


@on_device_of_first
def launch_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Launch one program per `NUM_ELEMENTS_MAX` elements of each token."""
    num_tokens, num_heads, head_size = key.shape
    size = min(NUM_ELEMENTS_MAX, triton.next_power_of_2(num_heads * head_size))
    scatter_kernel[(num_tokens, triton.cdiv(num_heads * head_size, size))](
        key, value, key_cache, value_cache, slot_mapping.contiguous(), k_scale, v_scale,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        NUM_HEADS=num_heads, HEAD_SIZE=head_size, BLOCK_SIZE=key_cache.shape[1], SIZE=size,
        FP8_LIMIT=FP8_MAX if key_cache.dtype == FP8 else 0.0, CAST=key.dtype != key_cache.dtype,
        num_warps=4,
    )  # fmt: skip
