"""The small operations of a decoder layer, each in one kernel: norm, RoPE with KV write, gate.

    hidden -> add_rms_norm -> [qkv product] -> rotate_and_cache -> paged_attention -> [o product]
           -> add_rms_norm -> [gate and up product] -> silu_and_mul -> [down product]

All of them compute in float32 and round once to the dtype of their tensors. Those behind a product
take it in parts, too (`products.multiply_in_parts`): they add the parts while they read them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from blockstep.kernels.arguments import (
    CACHES,
    FLOATS,
    HEAD_SIZES,
    Arguments,
    check_positive,
    check_range,
)
from blockstep.kernels.cache import check_scales, write_to_cache
from blockstep.kernels.dispatch import find_kernels


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden / sqrt(mean(hidden ** 2) + eps) * weight`, `[num_tokens, hidden_size]`.

    hidden: `[num_tokens, hidden_size]`, float32, float16 or bfloat16, with a contiguous last
    dimension; weight: `[hidden_size]` of the same dtype. The mean is that of each row.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device, layout or eps.
    """
    _check_norm(hidden, None, weight, eps)
    if hidden.numel() and (kernels := find_kernels("layers", hidden)):
        normed: Tensor = kernels.launch_rms_norm(hidden, None, weight, eps)
        return normed
    return _normalise(hidden, weight, eps)


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `hidden` to `residual` in place, and return `rms_norm(residual, weight, eps)`.

    hidden, residual: `[num_tokens, hidden_size]` of one dtype, float32, float16 or bfloat16, with
    contiguous last dimensions and no memory in common; weight: `[hidden_size]` of the same dtype.
    hidden may be a product in parts, `[num_parts, num_tokens, hidden_size]` float32. The norm is
    computed from the sum as it is stored, rounded to the dtype.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device, layout or eps.
    """
    _check_norm(hidden, residual, weight, eps)
    if hidden.numel() and (kernels := find_kernels("layers", hidden)):
        normed: Tensor = kernels.launch_rms_norm(hidden, residual, weight, eps)
        return normed
    if hidden.dim() == 3:
        residual.copy_(residual.float() + hidden.sum(0))
    else:
        residual += hidden
    return _normalise(residual, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[num_tokens, inner_size]`, where `silu(x) = x / (1 + exp(-x))`.

    gate_up: `[num_tokens, 2 * inner_size]`, float32, float16 or bfloat16, with a contiguous last
    dimension; its first half is `gate`, its second `up`.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or layout.
    """
    arguments = Arguments()
    arguments.check("gate_up", gate_up, "num_tokens both", *FLOATS, rows=True)
    if arguments["both"] % 2:
        raise ValueError(
            f"gate_up: its last dimension must be even, gate and up, but is {arguments['both']}; "
            f"pass both concatenated"
        )
    if gate_up.numel() and (kernels := find_kernels("layers", gate_up)):
        gated: Tensor = kernels.launch_silu_and_mul(gate_up)
        return gated
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)


def rotate_and_cache(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots, and return the queries.

    qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_size]`, float32, float16 or bfloat16,
    with a contiguous last dimension: query heads, then key heads, then value heads. The queries are
    rotated in place, and what is returned is a view of them, `[num_tokens, num_heads, head_size]`.
    qkv may be a product in parts, `[num_parts, num_tokens, ...]` float32: its sum is rounded to the
    dtype of cos_sin, and the queries get memory of their own.
    key_cache, value_cache, slot_mapping, k_scale, v_scale: as in `reshape_and_cache`; they give
    num_kv_heads and head_size, and slot -1 writes nothing.

    positions: `[num_tokens]` int64. cos_sin: `[num_positions, head_size]` of the model's dtype,
    contiguous: for each position the `head_size / 2` cosines, then the sines. Component `i` of a
    head is rotated with component `i + head_size / 2` (RoPE as in Llama):

        left  = left * cos - right * sin
        right = right * cos + left * sin

    q_norm, k_norm: `[head_size]` of the model's dtype, both or neither: each query and key head is
    normed with them before it is rotated, as by `rms_norm` with `eps`. Bound: reading qkv once, and
    writing it once.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device, layout or number; on the CPU also a
            slot outside the cache, or a position outside the table.
    """
    _check_rotation(
        qkv, key_cache, value_cache, slot_mapping, positions, cos_sin, q_norm, k_norm, eps
    )
    check_scales(key_cache, k_scale, v_scale)
    num_kv_heads, head_size = key_cache.shape[2:]
    num_tokens, num_all = qkv.shape[-2], qkv.shape[-1] // head_size
    num_heads = num_all - 2 * num_kv_heads
    if qkv.dim() == 2:
        query = qkv.view(num_tokens, num_all, head_size)[:, :num_heads]
    else:
        query = torch.empty(
            (num_tokens, num_heads, head_size), dtype=cos_sin.dtype, device=qkv.device
        )
    if num_tokens == 0:
        return query
    if kernels := find_kernels("layers", qkv):
        kernels.launch_rotate_and_cache(
            query, qkv, key_cache, value_cache, slot_mapping, positions, cos_sin, q_norm, k_norm,
            eps, k_scale, v_scale,
        )  # fmt: skip
        return query
    key, value = _rotate(query, qkv, num_kv_heads, positions, cos_sin, q_norm, k_norm, eps)
    write_to_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return query


def _rotate(
    query: Tensor,
    qkv: Tensor,
    num_kv_heads: int,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return rotated keys and the values; write rotated queries to `query`."""
    num_tokens, num_heads, head_size = query.shape
    heads = qkv if qkv.dim() == 2 else qkv.sum(0).to(cos_sin.dtype)
    heads = heads.view(num_tokens, -1, head_size)
    turned = heads[:, : num_heads + num_kv_heads].float()
    if q_norm is not None and k_norm is not None:
        normed = _normalise(turned[:, :num_heads], q_norm.float(), eps)
        turned = torch.cat((normed, _normalise(turned[:, num_heads:], k_norm.float(), eps)), dim=1)
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    left, right = turned.chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)
    query.copy_(turned[:, :num_heads])
    return turned[:, num_heads:], heads[:, -num_kv_heads:]


def _normalise(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, (weight.shape[0],), weight, eps)


def _check_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    arguments, dims = Arguments(), "num_tokens hidden_size"
    dtypes: tuple[torch.dtype, ...] = FLOATS
    if residual is not None and _is_in_parts(hidden):
        arguments.check("hidden", hidden, f"num_parts {dims}", torch.float32, rows=True)
    else:
        arguments.check("hidden", hidden, dims, *FLOATS, rows=True)
        dtypes = (hidden.dtype,)
    if residual is not None:
        arguments.check("residual", residual, dims, *dtypes, rows=True)
        dtypes = (residual.dtype,)
    arguments.check("weight", weight, "hidden_size", *dtypes, rows=True)
    check_positive("eps", eps)


def _is_in_parts(product: Tensor) -> bool:
    """Return whether an argument is a product in parts; another type is refused later."""
    return isinstance(product, Tensor) and product.dim() == 3


def _check_rotation(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Refuse tensors that do not belong together."""
    arguments = Arguments()
    if _is_in_parts(qkv):
        arguments.check("qkv", qkv, "num_parts num_tokens width", torch.float32, rows=True)
        dtypes: tuple[torch.dtype, ...] = FLOATS
    else:
        arguments.check("qkv", qkv, "num_tokens width", *FLOATS, rows=True)
        dtypes = (qkv.dtype,)
    dims = "num_blocks block_size num_kv_heads head_size"
    arguments.check("key_cache", key_cache, dims, *CACHES, rows=True)
    arguments.check("value_cache", value_cache, dims, key_cache.dtype, rows=True)
    arguments.check("slot_mapping", slot_mapping, "num_tokens", torch.int64, rows=True)
    arguments.check("positions", positions, "num_tokens", torch.int64, rows=True)
    arguments.check("cos_sin", cos_sin, "num_positions head_size", *dtypes, rows=True)
    head_size, num_kv_heads = arguments["head_size"], arguments["num_kv_heads"]
    if head_size not in HEAD_SIZES:
        raise ValueError(
            f"key_cache: head_size must be one of {HEAD_SIZES}, but is {head_size}; pad the heads "
            f"with zeros"
        )
    num_heads, rest = divmod(arguments["width"], head_size)
    if rest or num_kv_heads == 0 or num_heads <= 2 * num_kv_heads:
        raise ValueError(
            f"qkv: its last dimension must be (num_heads + 2 * num_kv_heads) * head_size, with "
            f"num_kv_heads {num_kv_heads} and head_size {head_size} as in key_cache, but is "
            f"{arguments['width']}; pass the cache that belongs to this model"
        )
    if not cos_sin.is_contiguous():
        raise ValueError("cos_sin: must be contiguous; pass cos_sin.contiguous()")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm, k_norm: must be given together; pass both or neither")
    if q_norm is not None:
        arguments.check("q_norm", q_norm, "head_size", cos_sin.dtype, rows=True)
        arguments.check("k_norm", k_norm, "head_size", cos_sin.dtype, rows=True)
        check_positive("eps", eps)
    num_slots = arguments["num_blocks"] * arguments["block_size"]
    check_range("slot_mapping", slot_mapping, -1, num_slots, "slots, or -1,")
    check_range("positions", positions, 0, arguments["num_positions"], "positions")
