"""Matrix products of few rows: the linear layers of a decode step, bound by reading the weights.

    hidden [num_tokens, in_size] x weight [out_size, in_size] -> parts [num_parts, num_tokens, out]

The input dimension is cut into parts, so that all multiprocessors read weights at once. The parts
are added by the kernel that reads them next (`add_rms_norm`, `rotate_and_cache`), in their order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from blockstep.kernels.arguments import FLOATS, Arguments
from blockstep.kernels.dispatch import find_kernels

NUM_FEW_MAX = 64
"""Most rows of a product of few rows: those of one matrix instruction of a warp group."""
PART_SIZE_MIN = 512
"""Input columns below which there is no further part: adding it would take longer than reading."""
NUM_PARTS_MAX = 3
PART_SIZE_OF_ONE = 2048
"""Input columns of a part in a product of one row: a program keeps them in registers."""


SHARED_BYTES_MIN = 160 * 1024
"""Shared memory of a program on the GPUs that have these kernels: A100, H100 and their like."""


@cache
def has_room(device: torch.device) -> bool:
    """Return whether programs on a device may have as much shared memory as the kernels take."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    # AMD's have no such number.
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_BYTES_MIN)


def find_part_size(num_tokens: int, out_size: int, in_size: int) -> int:
    """Return the input columns of each part but the last, a multiple of 128.

    For two rows or more it does not depend on their number, so that the bits of a row do not.
    """
    if num_tokens == 1:
        return PART_SIZE_OF_ONE
    wanted = NUM_PARTS_MAX if out_size <= in_size * 2 else 1
    num_parts = max(1, min(wanted, in_size // PART_SIZE_MIN))
    return -(-in_size // (num_parts * 128)) * 128


def is_product_of_few(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether a product is one for these kernels.

    That is one on a GPU with enough shared memory, of at most `NUM_FEW_MAX` rows of 16 bits, with a
    multiple of 8 input columns. Others are faster, or more precise, with
    `torch.nn.functional.linear`.
    """
    return (
        find_kernels("products", hidden) is not None
        and has_room(hidden.device)
        and hidden.dtype in (torch.float16, torch.bfloat16)
        and 0 < len(hidden) <= NUM_FEW_MAX
        and weight.shape[1] % 8 == 0
    )


def multiply_in_parts(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden @ weight.T + bias` in parts, `[num_parts, num_tokens, out_size]` float32.

    The sum of the parts is the product. hidden: `[num_tokens, in_size]`, float32, float16 or
    bfloat16, at most `NUM_FEW_MAX` tokens on a GPU; weight: `[out_size, in_size]`; bias:
    `[out_size]`, both of the same dtype, on a GPU of 16 bits. Last dimensions are contiguous. The
    bits of a row do not depend on the other rows; alone a row may have others. Bound: reading the
    weight once.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout.
    """
    _check(hidden, weight, bias, "out_size in_size")
    if hidden.numel() and (kernels := find_kernels("products", hidden)):
        _check_few(hidden)
        parts: Tensor = kernels.launch_multiply(hidden, weight, bias)
        return parts
    out_size, in_size = weight.shape
    size = find_part_size(len(hidden), out_size, in_size)
    shape = -(-in_size // size), len(hidden), out_size
    made = hidden.new_zeros(shape, dtype=torch.float32)
    for part, begin in enumerate(range(0, in_size, size)):
        some = slice(begin, begin + size)
        made[part] = hidden[:, some].float() @ weight[:, some].float().T
    if bias is not None:
        made[0] += bias.float()
    return made


def multiply_silu_and_mul(hidden: Tensor, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up` for `gate, up = hidden @ gate_up.T + bias`, `[num_tokens, inner]`.

    hidden: as in `multiply_in_parts`; gate_up: `[2 * inner_size, in_size]`, its first half is the
    gate's weight; bias: `[2 * inner_size]`. The result is computed from float32 sums, and rounded
    once. Bits as in `multiply_in_parts`. Bound: reading the weight once.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout.
    """
    arguments = _check(hidden, gate_up, bias, "both in_size")
    if arguments["both"] % 2:
        raise ValueError(
            f"gate_up: dimension 0 must be even, gate and up, but is {arguments['both']}; pass "
            f"both concatenated"
        )
    if hidden.numel() and (kernels := find_kernels("products", hidden)):
        _check_few(hidden)
        gated: Tensor = kernels.launch_multiply_gated(hidden, gate_up, bias)
        return gated
    wide = None if bias is None else bias.float()
    gate, up = F.linear(hidden.float(), gate_up.float(), wide).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(hidden.dtype)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, dims: str) -> Arguments:
    arguments = Arguments()
    arguments.check("hidden", hidden, "num_tokens in_size", *FLOATS, rows=True)
    arguments.check("weight", weight, dims, hidden.dtype, rows=True)
    if bias is not None:
        arguments.check("bias", bias, dims.partition(" ")[0], hidden.dtype, rows=True)
    return arguments


def _check_few(hidden: Tensor) -> None:
    """Refuse what the kernels do not compute."""
    if hidden.is_cuda and hidden.dtype == torch.float32:
        raise TypeError(
            "hidden: must be float16 or bfloat16 on a GPU, but is float32; multiply it with "
            "torch.nn.functional.linear"
        )
    if not has_room(hidden.device):
        raise ValueError(
            f"hidden: must be on a GPU whose programs have {SHARED_BYTES_MIN >> 10} KiB of shared "
            f"memory, but {torch.cuda.get_device_name(hidden.device)} has less; multiply it with "
            f"torch.nn.functional.linear"
        )
    if len(hidden) > NUM_FEW_MAX:
        raise ValueError(
            f"hidden: must have at most {NUM_FEW_MAX} tokens, but has {len(hidden)}; multiply "
            f"more of them with torch.nn.functional.linear"
        )
