"""KV scatter: writes the keys and values of this step's tokens into their slots of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from blockstep.kernels.arguments import CACHES, FLOATS, FP8, Arguments, check_positive, check_range
from blockstep.kernels.dispatch import find_kernels

FP8_MAX = 448.0
"""The largest finite float8_e4m3fn; larger values are clamped to it, not turned into NaN."""


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write the keys and values of `num_tokens` tokens into their slots, in place.

    key, value: `[num_tokens, num_kv_heads, head_size]`, float32, float16 or bfloat16; any strides
    with a contiguous last dimension. key_cache, value_cache: `[num_blocks, block_size,
    num_kv_heads, head_size]` of one dtype: those three, or float8_e4m3fn, which stores `x / scale`
    clamped to 448. Other dtypes are plain casts, and scales must be 1 there. slot_mapping:
    `[num_tokens]` int64; -1 writes nothing (padding). If a slot is named twice, it is not defined
    which of the two it holds. Bound: twice the bytes of key and value.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also a slot
            outside the cache.
    """
    arguments = Arguments()
    arguments.check("key", key, "num_tokens num_kv_heads head_size", *FLOATS, rows=True)
    arguments.check("value", value, "num_tokens num_kv_heads head_size", key.dtype, rows=True)
    dims = "num_blocks block_size num_kv_heads head_size"
    arguments.check("key_cache", key_cache, dims, *CACHES, rows=True)
    arguments.check("value_cache", value_cache, dims, key_cache.dtype, rows=True)
    arguments.check("slot_mapping", slot_mapping, "num_tokens", torch.int64)
    check_scales(key_cache, k_scale, v_scale)
    num_slots = arguments["num_blocks"] * arguments["block_size"]
    check_range("slot_mapping", slot_mapping, -1, num_slots, "slots, or -1,")
    if key.numel() == 0:
        return
    if kernels := find_kernels("cache", key):
        kernels.launch_reshape_and_cache(
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
        )
        return
    write_to_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def check_scales(cache: Tensor, k_scale: float, v_scale: float) -> None:
    """Check that scales are positive, and 1 for a cache that is not quantised.

    Raises:
        ValueError: they are not.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_positive(name, scale)
        if cache.dtype != FP8 and scale != 1.0:
            raise ValueError(
                f"{name}: must be 1 unless the cache is float8_e4m3fn, but is {scale} for a "
                f"{str(cache.dtype).removeprefix('torch.')} cache; leave it out"
            )


def write_to_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write keys and values to their slots: the torch reference of `reshape_and_cache`."""
    rows = slot_mapping >= 0
    if not bool(rows.all()):
        slot_mapping, key, value = slot_mapping[rows], key[rows], value[rows]
    where = (slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1])
    key_cache[where] = to_cache(key, key_cache.dtype, k_scale)
    value_cache[where] = to_cache(value, value_cache.dtype, v_scale)


def to_cache(tensor: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return what a cache of this dtype stores for these numbers."""
    if dtype != FP8:
        return tensor.to(dtype)
    return (tensor.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def from_cache(tensor: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return the numbers that a cache represents, in the dtype of the query."""
    if tensor.dtype != FP8:
        return tensor.to(dtype)
    return (tensor.float() * scale).to(dtype)
