"""Model: the forward pass of a decoder, over the tokens of a whole step in one row.

    tokens -> embedding -> [norm -> attention -> + -> norm -> gated MLP -> +] x layers -> norm

There is no batch dimension: requests lie one behind the other (`query_start_loc`), prefills and
decodes mixed. Keys and values go through the paged cache: written first, then attended, so that a
token sees itself and a request sees what another one has written in this very step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from blockstep.impl.engine.adapters import LayerAdapters
from blockstep.impl.engine.cache import PagedCache
from blockstep.impl.engine.checkpoint import LayerWeights, ModelWeights
from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.rope import apply_rope
from blockstep.kernels import paged_attention, reshape_and_cache


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one forward pass runs on; all tensors on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64"""
    slot_mapping: torch.Tensor
    """[num_groups, num_tokens] int64: where each token's KV goes, in each group; -1 for nowhere."""
    block_tables: torch.Tensor
    """[num_groups, num_seqs, max_blocks] int32; what a window has left behind is not read."""
    query_start_loc: torch.Tensor
    """[num_seqs + 1] int32: where each request's tokens begin, and the end."""
    seq_lens: torch.Tensor
    """[num_seqs] int32: keys of each request, those of this step included."""
    max_query_len: int
    """An upper bound of the tokens of one request in this pass."""
    max_seq_len: int
    """An upper bound of `seq_lens`."""
    adapters: torch.Tensor | None = None
    """[num_tokens] int64: the number of each token's adapter, `NO_ADAPTER` for none; None: nobody
    has one."""


class Model:
    """A decoder with its weights and its cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        cache: PagedCache,
        num_positions: int,
        adapters: Sequence[LayerAdapters] = (),
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.adapters = adapters
        """Per layer; empty where the model has none, whatever its inputs say."""
        embedding = weights.embedding
        table = config.rope.build_table(num_positions, embedding.dtype, str(embedding.device))
        self.cos, self.sin = table[0], table[1]
        self.scale = config.head_size**-0.5

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden_size]; KV is written on the way.

        All tensors of `inputs` must agree with each other; the kernels check shapes and types.
        """
        config, weights = self.config, self.weights
        cos = self.cos[inputs.positions].unsqueeze(1)
        sin = self.sin[inputs.positions].unsqueeze(1)
        slots, tables = inputs.slot_mapping.unbind(), inputs.block_tables.unbind()
        hidden = weights.embedding[inputs.token_ids]
        for number, layer in enumerate(weights.layers):
            group = self.cache.group_of_layer[number]
            normed = self._norm(hidden, layer.input_norm)
            attended = self._attend(
                normed, layer, number, cos, sin, slots[group], tables[group], inputs
            )
            hidden += self._apply(attended, number, "o", layer.o, layer.o_bias, inputs)
            normed = self._norm(hidden, layer.post_norm)
            gate, up = self._apply(
                normed, number, "gate_up", layer.gate_up, layer.gate_up_bias, inputs
            ).split(config.intermediate_size, dim=-1)
            hidden += self._apply(
                F.silu(gate).mul_(up), number, "down", layer.down, layer.down_bias, inputs
            )
        return self._norm(hidden, weights.norm)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] in float32 of hidden states [num_rows, hidden_size]."""
        return F.linear(hidden, self.weights.lm_head).float()

    def _attend(
        self,
        normed: torch.Tensor,
        layer: LayerWeights,
        number: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        inputs: Inputs,
    ) -> torch.Tensor:
        """Attention of one layer, [num_tokens, q_size], with the slots and tables of its group."""
        config = self.config
        heads = self._apply(normed, number, "qkv", layer.qkv, layer.qkv_bias, inputs)
        heads = heads.view(len(normed), -1, config.head_size)
        split = config.num_heads + config.num_kv_heads
        turned, value = heads[:, :split], heads[:, split:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = self._norm(turned[:, : config.num_heads], layer.q_norm)
            key = self._norm(turned[:, config.num_heads :], layer.k_norm)
            turned = torch.cat((query, key), dim=1)
        turned = apply_rope(turned, cos, sin)
        query, key = turned[:, : config.num_heads], turned[:, config.num_heads :]
        key_cache, value_cache = self.cache.layers[number]
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables,
            inputs.query_start_loc,
            inputs.seq_lens,
            scale=self.scale,
            sliding_window=config.sliding_windows[number],
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
        )
        return attended.flatten(1)

    def _apply(
        self,
        taken: torch.Tensor,
        number: int,
        name: str,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        inputs: Inputs,
    ) -> torch.Tensor:
        """One matrix of a layer, and for each token what its adapter adds."""
        output = F.linear(taken, matrix, bias)
        if inputs.adapters is not None and self.adapters:
            columns = self.adapters[number].get(name)
            if columns is not None:
                columns.add_to(output, taken, inputs.adapters)
        return output

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (weight.shape[0],), weight, self.config.rms_norm_eps)
