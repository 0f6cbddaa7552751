"""The same operations, slow and obviously right: float64, one token at a time, no cleverness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """`paged_attention`, one score at a time."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    block_size = key_cache.shape[1]
    group = query.shape[1] // key_cache.shape[2]
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, stop = query_start_loc[s : s + 2].tolist()
        slots = [divmod(position, block_size) for position in range(seq_len)]
        blocks = [int(block_tables[s, block]) if block < block_tables.shape[1] else -1
                  for block, _ in slots]  # fmt: skip
        for token in range(start, stop):
            position = seq_len - (stop - token)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            if attention_chunk_size is not None:
                first = position // attention_chunk_size * attention_chunk_size
            seen = range(first, position + 1)
            where = ([blocks[p] for p in seen], [slots[p][1] for p in seen])
            keys = key_cache[where].double() * k_scale
            values = value_cache[where].double() * v_scale
            for head in range(query.shape[1]):
                scores = keys[:, head // group] @ query[token, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[token, head] = scores.softmax(0) @ values[:, head // group]
    return out


@dataclass
class Batch:
    """Arguments of one call of `paged_attention`, and how they were made."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    rules: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def make(self, device: str = "cpu") -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Positional and named arguments. Slots that no sequence has hold NaN."""
        draw = torch.Generator().manual_seed(self.seed)
        cache_dtype = self.cache_dtype or self.dtype
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        caches = [torch.full(shape, float("nan")) for _ in range(2)]
        order = torch.randperm(num_blocks, generator=draw).tolist()
        tables = torch.full((len(counts), max([1, *counts])), 2**30, dtype=torch.int32)
        for s, (count, seq_len) in enumerate(zip(counts, self.seq_lens, strict=True)):
            for index in range(count):
                block = order.pop()
                tables[s, index] = block
                filled = min(self.block_size, seq_len - index * self.block_size)
                for cache in caches:
                    cache[block, :filled] = torch.randn(filled, *shape[2:], generator=draw)
        query_lens = torch.tensor([0, *self.query_lens])
        num_tokens = int(query_lens.sum())
        query = torch.randn(num_tokens, self.num_heads, self.head_size, generator=draw)
        arguments = (
            query.to(self.dtype), caches[0].to(cache_dtype), caches[1].to(cache_dtype), tables,
            query_lens.cumsum(0).to(torch.int32), torch.tensor(self.seq_lens, dtype=torch.int32),
        )  # fmt: skip
        moved = tuple(argument.to(device) for argument in arguments)
        return moved, {"scale": self.head_size**-0.5, **self.rules}
