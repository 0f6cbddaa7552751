"""Whole blocks: copy-on-write inside a cache, and gather and scatter for swapping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockstep.kernels.arguments import CACHES, Arguments, check_range
from blockstep.kernels.dispatch import find_kernels

DMA_BLOCK_BYTES_MIN = 1 << 20
"""Size from which one copy per block is as fast as the link. Below it, calls cost
more than bytes, and one kernel moves all blocks. A call takes the host some 10 microseconds, in
which a link of 50 GB/s moves half of this. The figure follows from that: it was not measured."""
NUM_BUFFER_BYTES_MAX = 64 << 20
"""Most bytes that the kernel path holds on the device, on the way to or from the host."""


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor, *, independent: bool = False) -> None:
    """Copy whole blocks inside each cache, in place, pair after pair (copy-on-write).

    caches: key and value caches of any layers, each `[num_blocks, ...]` with contiguous blocks, on
    one device, `num_blocks` the same for all. pairs: `[num_pairs, 2]` int64, `(source,
    destination)`. The meaning is sequential: the source of a pair is read after all earlier pairs
    were written, so `(0, 1), (1, 2)` puts block 0 into both. independent: no destination is named
    twice or is a source, as with fresh blocks for copy-on-write; then a GPU copies all pairs at
    once. Bound: twice the bytes copied.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also an id outside
            the cache, and pairs that are not independent.
    """
    arguments = Arguments()
    arguments.check("pairs", pairs, "num_pairs 2", torch.int64)
    for number, cache in enumerate(caches):
        check_cache(arguments, f"caches[{number}]", cache)
    if not caches or pairs.numel() == 0:
        return
    check_range("pairs", pairs, 0, arguments["num_blocks"], "ids of blocks of the caches")
    if independent and not pairs.is_cuda:
        destinations = pairs[:, 1].unique()
        if len(destinations) < len(pairs) or bool(torch.isin(pairs[:, 0], destinations).any()):
            raise ValueError(
                "pairs: a destination is named twice or is a source, so the order of the pairs "
                "matters; leave out independent"
            )
    if kernels := find_kernels("blocks", pairs):
        for cache in caches:
            kernels.launch_copy_blocks(cache, pairs, independent=independent)
        return
    for source, destination in pairs.tolist():
        for cache in caches:
            cache[destination] = cache[source]


def gather_blocks(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy scattered blocks of a cache into consecutive ones of a staging buffer (swap out).

    cache: `[num_blocks, ...]` with contiguous blocks. block_ids: `[num_ids]` int64, on the cache's
    device or on the CPU. staging: `[num_ids, ...]`, contiguous, of the cache's dtype; on its device
    or, pinned to overlap, on the CPU. `staging[i] = cache[block_ids[i]]`.

    Blocks of `DMA_BLOCK_BYTES_MIN` and more are moved one by one by the copy engines, which needs
    their ids on the host. Smaller ones are moved by a kernel, `NUM_BUFFER_BYTES_MAX` at a time,
    which needs them on the device. Ids that are elsewhere are fetched, which waits. Copies to and
    from a pinned staging buffer are asynchronous: synchronise before it is read, or written again.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; ids on the CPU also when
            outside the cache.
    """
    check_swap(cache, block_ids, staging)
    if block_ids.numel() == 0:
        return
    if cache[0].nbytes >= DMA_BLOCK_BYTES_MIN:
        for index, block in enumerate(block_ids.tolist()):
            staging[index].copy_(cache[block], non_blocking=True)
    elif kernels := find_kernels("blocks", cache):
        ids = block_ids.to(cache.device)
        for part in list_parts(staging, cache.device):
            away = staging[part].device != cache.device
            buffer = torch.empty_like(staging[part], device=cache.device) if away else staging[part]
            kernels.launch_gather_blocks(cache, ids[part], buffer)
            if away:
                staging[part].copy_(buffer, non_blocking=True)
    else:
        staging.copy_(cache[block_ids.to(cache.device)])


def scatter_blocks(staging: Tensor, block_ids: Tensor, cache: Tensor) -> None:
    """Copy consecutive blocks of a staging buffer to scattered ones of a cache (swap in).

    The inverse of `gather_blocks`, with the same arguments: `cache[block_ids[i]] = staging[i]`. If
    an id is named twice, it is not defined which of the two remains.

    Raises:
        TypeError, ValueError: as `gather_blocks`.
    """
    check_swap(cache, block_ids, staging)
    if block_ids.numel() == 0:
        return
    if cache[0].nbytes >= DMA_BLOCK_BYTES_MIN:
        for index, block in enumerate(block_ids.tolist()):
            cache[block].copy_(staging[index], non_blocking=True)
    elif kernels := find_kernels("blocks", cache):
        ids = block_ids.to(cache.device)
        for part in list_parts(staging, cache.device):
            buffer = staging[part].to(cache.device, non_blocking=True)
            kernels.launch_scatter_blocks(buffer, ids[part], cache)
    else:
        cache[block_ids.to(cache.device)] = staging.to(cache.device)


def list_parts(staging: Tensor, device: torch.device) -> list[slice]:
    """Return slices of the staging buffer that go through a buffer on the device one by one."""
    if staging.device == device:
        return [slice(None)]
    size = max(1, NUM_BUFFER_BYTES_MAX // max(1, staging[0].nbytes))
    return [slice(start, start + size) for start in range(0, len(staging), size)]


def check_cache(arguments: Arguments, name: str, cache: Tensor) -> None:
    """Check that each block of a cache is contiguous; the rest of its shape is free."""
    if not isinstance(cache, Tensor) or cache.dim() < 2:
        raise ValueError(f"{name}: must be a tensor [num_blocks, ...] of two dimensions or more")
    arguments.check(name, cache, "num_blocks" + " *" * (cache.dim() - 1), *CACHES)
    if cache.shape[0] and not cache[0].is_contiguous():
        raise ValueError(
            f"{name}: each block must be contiguous, but strides are {cache.stride()}; "
            f"keep num_blocks the outermost dimension of the cache"
        )


def check_swap(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Check the arguments of a gather or a scatter; staging and ids may be on the CPU."""
    check_cache(Arguments(), "cache", cache)
    Arguments().check("block_ids", block_ids, "num_ids", torch.int64)
    if staging.dtype != cache.dtype:
        raise TypeError(f"staging: must be {cache.dtype} as the cache, but is {staging.dtype}")
    wanted = (block_ids.shape[0], *cache.shape[1:])
    if tuple(staging.shape) != wanted or not staging.is_contiguous():
        raise ValueError(
            f"staging: must be contiguous of shape {wanted}, one block per id, but its shape is "
            f"{tuple(staging.shape)}; allocate it with torch.empty"
        )
    for name, tensor in (("block_ids", block_ids), ("staging", staging)):
        if tensor.device != cache.device and tensor.device.type != "cpu":
            raise ValueError(
                f"{name}: must be on {cache.device} as the cache, or on the CPU, but is on "
                f"{tensor.device}; move it"
            )
    check_range("block_ids", block_ids, 0, cache.shape[0], "ids of blocks of the cache")
