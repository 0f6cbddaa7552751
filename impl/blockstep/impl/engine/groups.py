"""Groups: layers with the same attention share block tables, and groups share memory.

    layer     0     1     2     3     4     5
    window    all   7     7     all   7     7
    group     0     1     2     0     1     2      as many layers in each group: two
    memory    [0]   [0]   [0]   [1]   [1]   [1]    layer 0, 1 and 2 keep KV in one tensor

A block belongs to one group at a time, so layers of different groups never share a block at once.
Groups of equal size waste nothing: a block has room for as many layers as the largest group has.
Source: vLLM 0.19.1 `kv_cache_utils`, groups of a uniform page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockstep.impl.engine.config import ModelConfig
from blockstep.spec.vocabulary import GroupKind, KVGroup

UNEVEN = 1.5
"""One group per kind, if the commonest has fewer layers than this many times the rarest's."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV lies in blocks of one table per request."""

    sliding_window: int | None
    """Tokens that a token attends to, including itself; None for all."""
    layers: tuple[tuple[int, ...], ...]
    """Layer numbers, per model."""

    def get_kv_group(self, block_size: int) -> KVGroup:
        """Return the group as the scheduler's `Config` describes it."""
        if self.sliding_window is None:
            return KVGroup(GroupKind.FULL, block_size)
        return KVGroup(GroupKind.SLIDING_WINDOW, block_size, sliding_window=self.sliding_window)


def group_layers(
    models: Sequence[ModelConfig], max_model_len: int, *, one_for_all: bool = False
) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a model and of its draft model, if any, which shares its tables.

    Groups are in the order of each kind's first layer. The model's own layers decide the group
    size: as many layers as its rarest kind has, or as its commonest if that has hardly more. A
    window that covers `max_model_len` counts as full attention. `one_for_all`: all layers are in
    one group and keep all KV, as under full attention.
    """
    numbers: dict[int | None, list[list[int]]] = {}
    for place, model in enumerate(models):
        for number, window in enumerate(model.sliding_windows):
            is_full = one_for_all or window is None or window >= max_model_len
            kind = None if is_full else window
            numbers.setdefault(kind, [[] for _ in models])[place].append(number)
    counts = [len(own) for own, *_ in numbers.values() if own]
    size = max(counts) if max(counts) < UNEVEN * min(counts) else min(counts)
    groups = []
    for kind, per_model in numbers.items():
        num_groups = max(-(-len(per_model[0]) // size), 1)
        for first in range(num_groups):
            layers = tuple(tuple(own[first::num_groups]) for own in per_model)
            groups.append(LayerGroup(kind, layers))
    return tuple(groups)


def count_stacked(groups: Sequence[LayerGroup], model: int) -> int:
    """Return how many layers of one model a block has room for: those of its largest group."""
    return max(len(group.layers[model]) for group in groups)


def get_kv_groups(groups: Sequence[LayerGroup], block_size: int) -> tuple[KVGroup, ...]:
    """Return `Config.groups`: empty for a single group with full attention."""
    if len(groups) == 1 and groups[0].sliding_window is None:
        return ()
    return tuple(group.get_kv_group(block_size) for group in groups)
