"""The Triton kernels that move whole blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels.dispatch import on_device_of_first

NUM_ELEMENTS_MAX = 2048
"""Most elements of a block that one program moves."""


@triton.jit(do_not_specialize=["num_pairs"])
def copy_in_sequence_kernel(
    cache, pairs, num_pairs, stride, NUMEL: tl.constexpr, SIZE: tl.constexpr
):
    """Program (part): copy this part of every pair, one pair after the other.

    Parts are disjoint, so the order of pairs is kept without any order among programs. Inside a
    program the barrier keeps it: a warp may read in the next pair what another one wrote, and may
    overwrite what another one has yet to read.
    """
    element = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = element < NUMEL
    for pair in range(num_pairs):
        source = tl.load(pairs + 2 * pair)
        destination = tl.load(pairs + 2 * pair + 1)
        moved = tl.load(cache + source * stride + element, mask=mask)
        tl.store(cache + destination * stride + element, moved, mask=mask)
        tl.debug_barrier()


@triton.jit
def move_kernel(
    source, destination, source_ids, destination_ids, id_stride, source_stride, destination_stride,
    NUMEL: tl.constexpr, SIZE: tl.constexpr, BY_SOURCE: tl.constexpr, BY_DESTINATION: tl.constexpr,
):  # fmt: skip
    """Program (index * parts + part): move one part of the block that each side has at this index.

    One axis for both: the other axes end at 65,535, which is 134 million elements of a block.
    """
    parts: tl.constexpr = (NUMEL + SIZE - 1) // SIZE
    index = (tl.program_id(0) // parts).to(tl.int64)
    element = tl.program_id(0) % parts * SIZE + tl.arange(0, SIZE)
    mask = element < NUMEL
    here = index
    there = index
    if BY_SOURCE:
        here = tl.load(source_ids + index * id_stride)
    if BY_DESTINATION:
        there = tl.load(destination_ids + index * id_stride)
    moved = tl.load(source + here * source_stride + element, mask=mask)
    tl.store(destination + there * destination_stride + element, moved, mask=mask)


def choose_size(numel: int) -> int:
    """Return the elements of one program, for a block of this many."""
    return int(min(NUM_ELEMENTS_MAX, triton.next_power_of_2(numel)))


@on_device_of_first
def launch_copy_blocks(cache: Tensor, pairs: Tensor, *, independent: bool) -> None:
    """Launch a copy of all pairs: independent ones in parallel, others in sequence."""
    numel = cache[0].numel()
    size = choose_size(numel)
    num_parts = triton.cdiv(numel, size)
    pairs = pairs.contiguous()
    if independent:
        move_kernel[(len(pairs) * num_parts,)](
            cache, cache, pairs[:, 0], pairs[:, 1], 2, cache.stride(0), cache.stride(0),
            NUMEL=numel, SIZE=size, BY_SOURCE=True, BY_DESTINATION=True, num_warps=4,
        )  # fmt: skip
    else:
        copy_in_sequence_kernel[(num_parts,)](
            cache, pairs, len(pairs), cache.stride(0), NUMEL=numel, SIZE=size, num_warps=4,
            num_stages=1,  # a prefetched load would overtake the store of the pair before
        )  # fmt: skip


@on_device_of_first
def launch_gather_blocks(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Launch a copy of scattered blocks of the cache into consecutive ones."""
    numel = cache[0].numel()
    size = choose_size(numel)
    block_ids = block_ids.contiguous()
    move_kernel[(len(block_ids) * triton.cdiv(numel, size),)](
        cache, staging, block_ids, block_ids, 1, cache.stride(0), numel,
        NUMEL=numel, SIZE=size, BY_SOURCE=True, BY_DESTINATION=False, num_warps=4,
    )  # fmt: skip


@on_device_of_first
def launch_scatter_blocks(staging: Tensor, block_ids: Tensor, cache: Tensor) -> None:
    """Launch a copy of consecutive blocks into scattered ones of the cache."""
    numel = cache[0].numel()
    size = choose_size(numel)
    block_ids = block_ids.contiguous()
    move_kernel[(len(block_ids) * triton.cdiv(numel, size),)](
        staging, cache, block_ids, block_ids, 1, numel, cache.stride(0),
        NUMEL=numel, SIZE=size, BY_SOURCE=False, BY_DESTINATION=True, num_warps=4,
    )  # fmt: skip
