"""Model: the forward pass of a decoder, over the tokens of a whole step in one row.

    tokens -> embedding -> [norm -> attention -> + -> norm -> gated MLP -> +] x layers -> norm

There is no batch dimension: the tokens of requests are concatenated (`query_start_loc`), prefills
and decodes mixed. Keys and values are written to the paged cache before attention reads it, so a
token attends to itself, and a request reads what another one writes in the same step.

A layer without adapters is nine launches on a GPU: norm, qkv, rotation with the write to the cache,
attention, o, norm, gate_up, gate, down. Each sum with the residual is part of the norm after it.
With few tokens, as in a decode step, gate_up and gate are one launch, and the other products stay
in parts, which the launches after them add.
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
from blockstep.kernels import (
    AttentionPlan,
    AttentionWorkspace,
    add_rms_norm,
    is_product_of_few,
    make_attention_workspace,
    multiply_in_parts,
    multiply_silu_and_mul,
    paged_attention,
    plan_attention,
    rms_norm,
    rotate_and_cache,
    silu_and_mul,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one forward pass; all tensors are on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64"""
    slot_mapping: torch.Tensor
    """[num_groups, num_tokens] int64: the slot of each token's KV, in each group; -1 for none."""
    block_tables: torch.Tensor
    """[num_groups, num_seqs, max_blocks] int32; blocks outside a sliding window are not read."""
    query_start_loc: torch.Tensor
    """[num_seqs + 1] int32: index of each request's first token, then the number of tokens."""
    seq_lens: torch.Tensor
    """[num_seqs] int32: number of keys of each request, including those of this step."""
    max_query_len: int
    """An upper bound of the tokens of one request in this pass."""
    adapters: torch.Tensor | None = None
    """[num_tokens] int64: the number of each token's adapter, or `NO_ADAPTER`; None if no token has
    one."""


class Model:
    """A decoder with its weights and its KV cache."""

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
        """Adapters per layer; if empty, `Inputs.adapters` is ignored."""
        embedding = weights.embedding
        self.cos_sin = config.rope.build_table(
            num_positions, embedding.dtype, str(embedding.device)
        )
        self.scale = config.head_size**-0.5
        self._workspaces: list[AttentionWorkspace] = []
        """Workspaces of attention, the largest last; captured graphs keep using older ones."""
        self._workspace_len = 0
        """Number of keys of the widest block table that the last workspace serves."""

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Return hidden states after the last norm, [num_tokens, hidden_size]; write KV on the way.

        All tensors of `inputs` must agree with each other; the kernels check shapes and types.
        """
        weights, eps = self.weights, self.config.rms_norm_eps
        slots, tables = inputs.slot_mapping.unbind(), inputs.block_tables.unbind()
        residual = weights.embedding[inputs.token_ids]
        added: torch.Tensor | None = None
        plans: dict[int | None, AttentionPlan] = {}
        for number, layer in enumerate(weights.layers):
            group = self.cache.group_of_layer[number]
            if added is None:
                normed = rms_norm(residual, layer.input_norm, eps)
            else:
                normed = add_rms_norm(added, residual, layer.input_norm, eps)
            attended = self._attend(
                normed, layer, number, slots[group], tables[group], inputs, plans
            )
            added = self._apply(attended, number, "o", layer.o, layer.o_bias, inputs)
            normed = add_rms_norm(added, residual, layer.post_norm, eps)
            gated = self._gate(normed, layer, number, inputs)
            added = self._apply(gated, number, "down", layer.down, layer.down_bias, inputs)
        assert added is not None, "a config has a layer at least"
        return add_rms_norm(added, residual, weights.norm, eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] of `hidden` [num_rows, hidden_size], in its
        dtype."""
        return F.linear(hidden, self.weights.lm_head)

    def _attend(
        self,
        normed: torch.Tensor,
        layer: LayerWeights,
        number: int,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        inputs: Inputs,
        plans: dict[int | None, AttentionPlan],
    ) -> torch.Tensor:
        """Return the attention of one layer, [num_tokens, q_size], with its group's slots and
        tables.

        `plans`: the attention plan of this pass for each window; a missing one is made.
        """
        config = self.config
        key_cache, value_cache = self.cache.layers[number]
        query = rotate_and_cache(
            self._apply(normed, number, "qkv", layer.qkv, layer.qkv_bias, inputs),
            key_cache,
            value_cache,
            slot_mapping,
            inputs.positions,
            self.cos_sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        window = config.sliding_windows[number]
        if window not in plans:
            plans[window] = plan_attention(
                query,
                key_cache,
                inputs.query_start_loc,
                inputs.seq_lens,
                sliding_window=window,
                max_query_len=inputs.max_query_len,
            )
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables,
            inputs.query_start_loc,
            inputs.seq_lens,
            scale=self.scale,
            sliding_window=window,
            max_query_len=inputs.max_query_len,
            plan=plans[window],
            workspace=self._get_workspace(query, key_cache, block_tables.shape[1]),
        )
        return attended.flatten(1)

    def _get_workspace(
        self, query: torch.Tensor, key_cache: torch.Tensor, max_blocks: int
    ) -> AttentionWorkspace:
        """Return the attention workspace for tables of up to `max_blocks` blocks; layers share
        it."""
        max_seq_len = max_blocks * key_cache.shape[1]
        if max_seq_len > self._workspace_len:
            self._workspaces.append(make_attention_workspace(query, key_cache, max_seq_len))
            self._workspace_len = max_seq_len
        return self._workspaces[-1]

    def _gate(
        self, normed: torch.Tensor, layer: LayerWeights, number: int, inputs: Inputs
    ) -> torch.Tensor:
        """Return `silu(gate) * up` of one layer, [num_tokens, intermediate_size]."""
        if self._is_few(normed, layer.gate_up, inputs):
            return multiply_silu_and_mul(normed, layer.gate_up, layer.gate_up_bias)
        return silu_and_mul(
            self._apply(normed, number, "gate_up", layer.gate_up, layer.gate_up_bias, inputs)
        )

    def _is_few(self, taken: torch.Tensor, matrix: torch.Tensor, inputs: Inputs) -> bool:
        """Return whether a product is one of few rows, to which no adapter adds."""
        has_adapters = inputs.adapters is not None and bool(self.adapters)
        return not has_adapters and is_product_of_few(taken, matrix)

    def _apply(
        self,
        taken: torch.Tensor,
        number: int,
        name: str,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        inputs: Inputs,
    ) -> torch.Tensor:
        """Multiply by one matrix of a layer, and add each token's adapter.

        The product is [num_tokens, out], or in parts, [num_parts, num_tokens, out] float32.
        """
        if self._is_few(taken, matrix, inputs):
            return multiply_in_parts(taken, matrix, bias)
        output = F.linear(taken, matrix, bias)
        if inputs.adapters is not None and self.adapters:
            columns = self.adapters[number].get(name)
            if columns is not None:
                columns.add_to(output, taken, inputs.adapters)
        return output
