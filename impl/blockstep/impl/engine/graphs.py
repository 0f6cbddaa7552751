"""Graphs: decode steps replayed as CUDA graphs, so that the host launches once per step.

`capture_all` captures one graph per batch size when the model is loaded. A step of n requests with
one token each is padded to the next size. A padding row reads one key of the null block and writes
nothing. Steps with a prefill or drafts run without a graph, and so does the first pass of a draft
model.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from blockstep.impl.engine.adapters import NO_ADAPTER, LayerAdapters
from blockstep.impl.engine.cache import PagedCache
from blockstep.impl.engine.checkpoint import ModelWeights
from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.host_to_device import Layout
from blockstep.impl.engine.model import Inputs, Model

NUM_WARM_UPS = 1
"""Passes before a capture: the first one compiles the kernels and sets up cuBLAS."""
ROOM_PER_ROW = 40
"""Bytes after the inputs of a graph, per row and group, and twice more per row.

They hold which rows sample and how, which tokens the device feeds, and new blocks."""
PADDING: Final = {
    "token_ids": 0, "positions": 0, "slot_mapping": -1, "seq_lens": 1, "adapters": NO_ADAPTER,
}  # fmt: skip
"""Fields of `Inputs` in a padding row: it reads one key of the null block and writes nothing."""
log = logging.getLogger(__name__)


def get_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the row counts for which graphs exist, up to the first that is not below
    `max_num_seqs`.

    1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, and of 32 above. All code that pads a
    decode step uses these sizes, so that matrix products have the same shapes in every
    implementation.
    """
    fine = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16)]
    sizes = [*fine, *range(128, max_num_seqs + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


@dataclass(eq=False, slots=True)
class DecodeGraph:
    """A captured decode step of a fixed number of rows, replayed on its own inputs."""

    size: int
    """Rows, including padding."""
    inputs: Inputs
    """The inputs, to be filled before a replay: views of `flat`, except for the block tables."""
    flat: torch.Tensor
    """[num_bytes] uint8: token ids, positions, slots, lengths and (if the model has any) adapters.

    They are laid out for `size` rows as by `Layout`; there is room after them."""
    lays_out_adapters: bool
    recorded: torch.cuda.CUDAGraph | None = None
    hidden: torch.Tensor | None = None

    def replay(self) -> torch.Tensor:
        """Run the graph; return hidden states [size, hidden_size], valid until the next replay."""
        assert self.recorded is not None, "all graphs are captured at load"
        assert self.hidden is not None, "a captured graph has a result"
        self.recorded.replay()
        return self.hidden


class GraphedModel(Model):
    """A model whose decode steps are replayed as CUDA graphs.

    All graphs share the buffers of the largest one and one memory pool. So the result of a replay
    is valid until the next replay. Logits and tokens have memory of their own, and the stream
    computes them before that replay.
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
        self._num_groups, self._num_positions = num_groups, num_positions
        device, largest = weights.embedding.device, self.sizes[-1]
        num_bytes = self._lay_out(largest).num_bytes + ROOM_PER_ROW * (num_groups + 2) * largest
        self._flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        """See `DecodeGraph`; all graphs share it."""
        shape = num_groups, largest, -(-num_positions // cache.block_size)
        self._block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int, bool], DecodeGraph] = {}
        """Graphs by number of rows, and by whether adapters are added."""
        self._pool: object = None
        """Memory pool of the first graph; two graphs never run at once, so all use it."""

    def _lay_out(self, size: int) -> Layout:
        """Return the layout of token ids, positions, slots, lengths and adapters of `size` rows."""
        tokens = ((size,), torch.int64)
        slots = ((self._num_groups, size), torch.int64)
        more = (tokens,) if self.adapters else ()
        return Layout((tokens, tokens, slots, ((size,), torch.int32), *more))

    def find_graph(self, num_seqs: int, has_adapters: bool) -> DecodeGraph | None:
        """Return the graph for one token of each of `num_seqs` requests, or None if there is none.

        `has_adapters`: whether any of the requests has an adapter.
        """
        place = bisect_left(self.sizes, num_seqs)
        if place == len(self.sizes):
            return None
        return self._get_graph(self.sizes[place], has_adapters and bool(self.adapters))

    def _get_graph(self, size: int, has_adapters: bool) -> DecodeGraph:
        """Return the graph of this size with its inputs; it may not be captured yet."""
        if (size, has_adapters) not in self.graphs:
            parts = [part.view(self._flat) for part in self._lay_out(size).parts]
            inputs = Inputs(
                token_ids=parts[0],
                positions=parts[1],
                slot_mapping=parts[2],
                block_tables=self._block_tables[:, :size],
                query_start_loc=self._starts[: size + 1],
                seq_lens=parts[3],
                max_query_len=1,
                adapters=parts[4] if has_adapters else None,
            )
            graph = DecodeGraph(size, inputs, self._flat, bool(self.adapters))
            self.graphs[size, has_adapters] = graph
        return self.graphs[size, has_adapters]

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Do the same as `Model.forward`; a decode step replays a graph, valid until the next
        replay.

        Inputs that are not the graph's own are copied into them.
        """
        num_seqs, graph = len(inputs.seq_lens), None
        if inputs.max_query_len == 1:
            graph = self.find_graph(num_seqs, inputs.adapters is not None)
        if graph is None:
            return super().forward(inputs)
        self._fill(inputs, graph.inputs)
        return graph.replay()[:num_seqs]

    def _fill(self, inputs: Inputs, filled: Inputs) -> None:
        """Copy `inputs` into those of a graph; the remaining rows become padding."""
        num_seqs = len(inputs.seq_lens)
        for name, padding in PADDING.items():
            buffer = getattr(filled, name)
            if buffer is not None:
                buffer[..., :num_seqs].copy_(getattr(inputs, name))
                buffer[..., num_seqs:].fill_(padding)
        # Columns past the model length hold no block: a caller may have padded its tables.
        width = min(inputs.block_tables.shape[2], filled.block_tables.shape[2])
        filled.block_tables[:, :num_seqs, :width].copy_(inputs.block_tables[..., :width])
        filled.block_tables[:, num_seqs:].zero_()

    def capture_all(self) -> None:
        """Capture the graphs of all sizes, the largest first, so that its memory serves the others.

        To be called once, before any other thread uses the device. Progress is logged (INFO).
        """
        keys = [(size, False) for size in reversed(self.sizes)]
        keys += [(size, True) for size, _ in keys if self.adapters]
        with torch.inference_mode():
            for number, (size, has_adapters) in enumerate(keys, 1):
                self._capture(self._get_graph(size, has_adapters))
                log.info("captured graph %d of %d: %d rows", number, len(keys), size)

    def _capture(self, graph: DecodeGraph) -> None:
        """Record a pass over the inputs of a graph, all of them padding.

        A pass before it compiles the kernels, which must not happen during a capture. It runs on
        the current stream, since torch keeps a cuBLAS workspace for every stream that has
        multiplied once. Calls of other threads (a KV store's) do not invalidate the capture.
        """
        inputs = graph.inputs
        for name, padding in PADDING.items():
            tensor = getattr(inputs, name)
            if tensor is not None:
                tensor.fill_(padding)
        for _ in range(NUM_WARM_UPS):
            super().forward(inputs)
        graph.recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph.recorded, pool=self._pool, capture_error_mode="thread_local"):
            graph.hidden = super().forward(inputs)
        self._pool = graph.recorded.pool()
