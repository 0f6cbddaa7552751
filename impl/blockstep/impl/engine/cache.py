"""Cache: the KV of all layers in one tensor, allocated once and never moved.

    kv [num_stacked, 2 (keys, values), num_blocks, block_size, num_kv_heads, head_size]
    slot = block_id * block_size + offset        block 0 is the null block: no request owns it

A block holds as many layers as the largest KV group has: all, if there is one group (see `groups`).
A draft model has a cache of its own under the same block ids, so one block costs its bytes in both.
`tiers.costs` computes them. Source: seed 002 "The Free Pool".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.errors import SettingsError
from blockstep.impl.engine.groups import LayerGroup, count_stacked
from blockstep.impl.engine.host_to_device import to_device
from blockstep.impl.tiers import KVShape
from blockstep.kernels import copy_blocks
from blockstep.spec.vocabulary import BlockCopy


def get_block_bytes(
    models: Sequence[ModelConfig],
    groups: Sequence[LayerGroup],
    block_size: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of one block, summed over the caches of all models, which share `groups`."""
    return sum(
        KVShape(
            count_stacked(groups, place),
            model.num_kv_heads,
            model.head_size,
            block_size,
            dtype.itemsize,
        ).block_bytes
        for place, model in enumerate(models)
    )


def compute_num_blocks(memory_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks that fit into `memory_bytes`, including the null block.

    Raises:
        SettingsError: fewer than two fit; no request can use the null block.
    """
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 2:
        raise SettingsError(
            f"kv_cache_bytes = {memory_bytes}: a block takes {block_bytes} bytes, and at least "
            f"two are needed, as block 0 is the null block; give {2 * block_bytes} or more"
        )
    return num_blocks


class PagedCache:
    """The KV cache of one model; `groups`: the layers of this model in each group."""

    def __init__(
        self,
        model: ModelConfig,
        groups: Sequence[Sequence[int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        num_stacked = max(map(len, groups))
        shape = (
            num_stacked, 2, num_blocks, block_size, model.num_kv_heads, model.head_size,
        )  # fmt: skip
        try:
            kv = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            shape_of_kv = KVShape(
                num_stacked, model.num_kv_heads, model.head_size, block_size, dtype.itemsize
            )
            size = num_blocks * shape_of_kv.block_bytes
            raise SettingsError(
                f"num_blocks = {num_blocks}: the machine has no {size} bytes for the cache; "
                "give fewer blocks, or less as kv_cache_bytes"
            ) from error
        self.block_size = block_size
        self.kv = kv
        """The whole tensor, as drawn above."""
        places = sorted(
            (number, group, place)
            for group, numbers in enumerate(groups)
            for place, number in enumerate(numbers)
        )
        self.group_of_layer = tuple(group for _, group, _ in places)
        """The KV group of each layer, whose block tables and slots it uses."""
        self.layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = tuple(
            (kv[place][0], kv[place][1]) for _, _, place in places
        )
        """Keys and values of each layer: views [num_blocks, block_size, num_kv_heads, head_size]"""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers, one copy after the other.

        A source may be the destination of a later copy: the block is free again by then.
        """
        pairs = np.array([(copy.source, copy.destination) for copy in copies], np.int64)
        sources, targets = set(pairs[:, 0].tolist()), set(pairs[:, 1].tolist())
        copy_blocks(
            self.kv.flatten(0, 1).unbind(),
            to_device(pairs, self.kv.device),
            independent=len(targets) == len(pairs) and not sources & targets,
        )
