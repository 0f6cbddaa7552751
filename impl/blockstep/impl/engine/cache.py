"""Cache: the KV of all layers in one block of memory, allotted once and never moved.

    kv [num_layers, 2 (keys, values), num_blocks, block_size, num_kv_heads, head_size]
    slot = block_id * block_size + offset        block 0 is the null block: nobody's

A draft model keeps its KV in a cache of its own under the same block ids, so one block costs what
it takes in both. Source: seed 002 "Physical Memory Layout of a Single Block", "The Free Pool".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.errors import SettingsError


def compute_block_bytes(
    num_layers: int, num_kv_heads: int, head_size: int, block_size: int, dtype_bytes: int
) -> int:
    """Bytes of one block over all layers, keys and values. Source: seed 002 (its table)."""
    return block_size * num_kv_heads * head_size * 2 * dtype_bytes * num_layers


def get_block_bytes(models: Sequence[ModelConfig], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in the caches of all models that share block ids."""
    return sum(
        compute_block_bytes(
            model.num_layers, model.num_kv_heads, model.head_size, block_size, dtype.itemsize
        )
        for model in models
    )


def compute_num_blocks(memory_bytes: int, block_bytes: int) -> int:
    """Blocks that fit into `memory_bytes`, the null block among them.

    Raises:
        SettingsError: fewer than two: the null block serves nobody.
    """
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 2:
        raise SettingsError(
            f"kv_cache_bytes = {memory_bytes}: a block takes {block_bytes} bytes, and at least "
            f"two are needed, for block 0 serves nobody; give {2 * block_bytes} or more"
        )
    return num_blocks


class PagedCache:
    """The KV cache of one model."""

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        shape = (
            model.num_layers, 2, num_blocks, block_size, model.num_kv_heads, model.head_size,
        )  # fmt: skip
        try:
            kv = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            size = get_block_bytes([model], block_size, dtype) * num_blocks
            raise SettingsError(
                f"num_blocks = {num_blocks}: the machine has no {size} bytes for the cache; "
                "give fewer blocks, or less as kv_cache_bytes"
            ) from error
        self.block_size = block_size
        self.layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = tuple(
            (layer[0], layer[1]) for layer in kv
        )
        """Keys and values of each layer: views [num_blocks, block_size, num_kv_heads, head_size]"""
