"""Adapters: all LoRA adapters of a model in one sum, so that each token of a pass has its own.

    owners      0 0 0 1 1 2 2 2 2     whose column it is; ranks may differ
    token of 1  . . . x x . . . .     all of them are computed, those of others count as nothing
    no adapter  . . . . . . . . .

Columns of all adapters lie side by side, so a module costs two products more, however many adapters
a pass has. What is computed in the columns of others is overwritten, not multiplied by zero: where
it overflows nobody else sees it.
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
    """What all adapters add to one matrix [out, in]."""

    down: torch.Tensor
    """[num_columns, in]"""
    up: torch.Tensor
    """[out, num_columns]; a column gives nothing but to the rows of its module."""
    owners: torch.Tensor
    """[num_columns] int64: the adapter of each."""

    def add_to(self, output: torch.Tensor, taken: torch.Tensor, adapters: torch.Tensor) -> None:
        """Add to `output` [num_tokens, out] what comes of `taken` [num_tokens, in].

        `adapters` [num_tokens] int64: the adapter of each token, or `NO_ADAPTER`.
        """
        inner = F.linear(taken, self.down)
        inner.masked_fill_(adapters[:, None] != self.owners, 0)
        output += F.linear(inner, self.up)


LayerAdapters = Mapping[str, Columns]
"""By matrix, of those that some adapter adapts."""


def stack_adapters(
    adapters: Sequence[Lora], num_layers: int, widths: Mapping[str, tuple[int, int]]
) -> tuple[LayerAdapters, ...]:
    """Per layer what the adapters add; `widths`: of what each module gives and takes."""
    return tuple(
        {
            matrix: columns
            for matrix, modules in FUSED.items()
            if (columns := _stack(adapters, layer, {name: widths[name][0] for name in modules}))
        }
        for layer in range(num_layers)
    )


def _stack(adapters: Sequence[Lora], layer: int, modules: Mapping[str, int]) -> Columns | None:
    """The columns of one matrix, which consists of `modules`, so high each."""
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
