"""Adapters: all LoRA adapters of a model in one product, with the right adapter for each token.

    owners      0 0 0 1 1 2 2 2 2     the adapter of each column; ranks may differ
    token of 1  . . . x x . . . .     all columns are computed, those of other adapters are zeroed
    no adapter  . . . . . . . . .

The columns of all adapters are stacked, so a matrix costs two more products, however many adapters
a pass has. Values in the columns of other adapters are overwritten with zero, not multiplied by
zero: an overflow there must not become NaN in another request's token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from blockstep.impl.engine.lora import Lora

NO_ADAPTER = -1
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Matrices of `LayerWeights`, and the modules of which each consists."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The LoRA columns that all adapters add to one matrix [out, in]."""

    down: torch.Tensor
    """[num_columns, in]"""
    up: torch.Tensor
    """[out, num_columns]; a column is zero outside the output rows of its module."""
    owners: torch.Tensor
    """[num_columns] int64: the adapter of each column."""

    def add_to(self, output: torch.Tensor, taken: torch.Tensor, adapters: torch.Tensor) -> None:
        """Add the LoRA product of `taken` [num_tokens, in] to `output` [num_tokens, out].

        `adapters` [num_tokens] int64: the adapter of each token, or `NO_ADAPTER`.
        """
        inner = F.linear(taken, self.down)
        inner.masked_fill_(adapters[:, None] != self.owners, 0)
        output += F.linear(inner, self.up)


LayerAdapters = Mapping[str, Columns]
"""The columns of each matrix that some adapter changes, by the name of the matrix."""


def stack_adapters(
    adapters: Sequence[Lora], num_layers: int, widths: Mapping[str, tuple[int, int]]
) -> tuple[LayerAdapters, ...]:
    """Return the columns of all adapters per layer; `widths`: (out, in) of each module."""
    return tuple(
        {
            matrix: columns
            for matrix, modules in FUSED.items()
            if (columns := _stack(adapters, layer, {name: widths[name][0] for name in modules}))
        }
        for layer in range(num_layers)
    )


def _stack(adapters: Sequence[Lora], layer: int, modules: Mapping[str, int]) -> Columns | None:
    """Return the columns of one fused matrix; `modules`: the height of each module in it, in order.

    None if no adapter changes it.
    """
    downs, ups, owners = [], [], []
    first, height = 0, sum(modules.values())
    for name, size in modules.items():
        for number, adapter in enumerate(adapters):
            factors = adapter.factors.get((layer, name))
            if factors is not None:
                downs.append(factors.down)
                ups.append(F.pad(factors.up, (0, 0, first, height - first - size)))
                owners += [number] * len(factors.down)
        first += size
    if not owners:
        return None
    device = downs[0].device
    return Columns(
        torch.cat(downs), torch.cat(ups, dim=1), torch.tensor(owners, dtype=torch.int64).to(device)
    )
