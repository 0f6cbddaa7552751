"""Graphs: decode steps replayed as CUDA graphs, so that launching costs nothing.

A graph is captured for a few batch sizes, at first use; a step of n requests with a token each is
padded to the next size. A padding row reads one key of the null block and writes nothing. Steps
with a prefill or drafts run without a graph, and so does the first pass of a draft model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch

from blockstep.impl.engine.adapters import NO_ADAPTER, LayerAdapters
from blockstep.impl.engine.cache import PagedCache
from blockstep.impl.engine.checkpoint import ModelWeights
from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.model import Inputs, Model

NUM_WARM_UPS = 2


def get_graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every multiple of 8, up to the first that is not below `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


def take_rows(inputs: Inputs, size: int) -> Inputs:
    """The first `size` requests of inputs that have a token each; views, no copies."""
    return replace(
        inputs,
        token_ids=inputs.token_ids[:size],
        positions=inputs.positions[:size],
        slot_mapping=inputs.slot_mapping[:, :size],
        block_tables=inputs.block_tables[:, :size],
        query_start_loc=inputs.query_start_loc[: size + 1],
        seq_lens=inputs.seq_lens[:size],
        adapters=None if inputs.adapters is None else inputs.adapters[:size],
    )


class GraphedModel(Model):
    """A model whose decodes are replayed.

    All graphs share the buffers of the largest, and their memory. So a replayed result is good
    until the next replay. What is made of it (logits, tokens) is memory of its own, and the stream
    makes it before that replay.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: PagedCache,
        num_positions: int,
        max_num_seqs: int,
        num_groups: int = 1,
        adapters: Sequence[LayerAdapters] = (),
    ) -> None:
        super().__init__(config, weights, cache, num_positions, adapters)
        self.sizes = get_graph_sizes(max_num_seqs)
        device = weights.embedding.device
        largest = self.sizes[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.buffers = Inputs(
            token_ids=zeros(largest),
            positions=zeros(largest),
            slot_mapping=zeros(num_groups, largest),
            block_tables=zeros(
                num_groups, largest, -(-num_positions // cache.block_size), dtype=torch.int32
            ),
            query_start_loc=torch.arange(largest + 1, dtype=torch.int32, device=device),
            seq_lens=zeros(largest, dtype=torch.int32),
            max_query_len=1,
            max_seq_len=num_positions,
            adapters=zeros(largest) if adapters else None,
        )
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        """By number of rows, and whether adapters are added."""
        self._pool: object = None
        """Memory of the first graph; none of two that never run at once needs its own."""

    def fits(self, inputs: Inputs) -> bool:
        """Whether a step has a token of each request and nothing else."""
        return inputs.max_query_len == 1 and len(inputs.seq_lens) <= self.sizes[-1]

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """As `Model.forward`; a decode by replay, whose result is overwritten by the next one."""
        if not self.fits(inputs):
            return super().forward(inputs)
        num_seqs = len(inputs.seq_lens)
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        key = size, bool(self.adapters) and inputs.adapters is not None
        self._fill(inputs, size)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, hidden = self._graphs[key]
        graph.replay()
        return hidden[:num_seqs]

    def _fill(self, inputs: Inputs, size: int) -> None:
        buffers, num_seqs = self.buffers, len(inputs.seq_lens)
        for name, padding in (
            ("token_ids", 0), ("positions", 0), ("slot_mapping", -1), ("seq_lens", 1),
            ("adapters", NO_ADAPTER),
        ):  # fmt: skip
            buffer = getattr(buffers, name)
            if buffer is None or getattr(inputs, name) is None:
                continue
            buffer[..., :num_seqs].copy_(getattr(inputs, name))
            buffer[..., num_seqs:size].fill_(padding)
        num_blocks = inputs.block_tables.shape[2]
        buffers.block_tables[:, :num_seqs, :num_blocks].copy_(inputs.block_tables)
        buffers.block_tables[:, num_seqs:size].zero_()

    def _capture(self, size: int, has_adapters: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Record a pass over the first `size` rows of the buffers.

        Warming up first compiles the kernels, which must not happen while recording. It runs on the
        real inputs, and running a step twice writes the same KV. It has no stream of its own, since
        torch keeps a workspace of cuBLAS for good for every stream that it multiplies on.
        """
        inputs = take_rows(self.buffers, size)
        if not has_adapters:
            inputs = replace(inputs, adapters=None)
        for _ in range(NUM_WARM_UPS):
            super().forward(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = super().forward(inputs)
        self._pool = graph.pool()
        return graph, hidden
