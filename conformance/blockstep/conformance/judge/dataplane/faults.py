"""Faults: what goes wrong in a data plane, planted around the kernels under test.

Each wraps the kernels and gets one thing wrong. A check on such kernels must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from blockstep.conformance.judge.dataplane.worker import Kernels


class Wrapped:
    """The kernels, unchanged. A fault overrides one."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class ShiftedSlots(Wrapped):
    """Slot mapping is off by one."""

    def prepare_step(self, *args: Any, **kwargs: Any) -> Any:
        """Every token goes one slot further."""
        step = self._kernels.prepare_step(*args, **kwargs)
        return step._replace(slot_mapping=step.slot_mapping + 1)


class WrongBlockAtBoundary(Wrapped):
    """The block of a token is looked up by the position before it."""

    def prepare_step(
        self, block_tables: torch.Tensor, computed: Any, scheduled: Any, size: int, **kwargs: Any
    ) -> Any:
        """Only the first slot of a block is wrong, and never that of the first block."""
        step = self._kernels.prepare_step(block_tables, computed, scheduled, size, **kwargs)
        tables = kwargs["out_block_tables"]
        counts = step.query_start_loc.diff()
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        block = tables[row, (step.positions - 1).clamp(min=0) // size].long()
        return step._replace(slot_mapping=block * size + step.positions % size)


class StaleRows(Wrapped):
    """A step is prepared from the block tables of the step before."""

    _before: torch.Tensor | None = None

    def prepare_step(self, block_tables: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As where the update of a table comes later than the step that needs it."""
        stale = self._before
        self._before = block_tables.clone()
        if stale is None or stale.shape != block_tables.shape:
            stale = block_tables
        return self._kernels.prepare_step(stale, *args, **kwargs)


class DraftsBeforeTheLast(Wrapped):
    """The drafts of a row stand before the token that they follow."""

    def merge_drafts(
        self, ids: torch.Tensor, start: Any, last: Any, drafts: torch.Tensor, ends: torch.Tensor
    ) -> Any:
        """Right for rows without drafts, and where all of a row's tokens are alike."""
        rows = self._kernels.merge_drafts(ids, start, last, drafts, ends)
        for first, stop, end in zip(ends[:-1], ends[1:], start[1:], strict=True):
            part = slice(int(end) - int(stop - first) - 1, int(end))
            ids[part] = ids[part].roll(-1)
        return rows


class SwappedKeysAndValues(Wrapped):
    """Values are written as keys, and keys as values."""

    def reshape_and_cache(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        """The two arguments have one shape and one type: nothing else can tell."""
        self._kernels.reshape_and_cache(value, key, *args, **kwargs)


class LastTokenNotWritten(Wrapped):
    """The grid of the scatter is one token short."""

    def reshape_and_cache(
        self, key: Any, value: Any, keys: Any, values: Any, slots: torch.Tensor
    ) -> None:
        """Who decodes writes nothing when it is the last one of the batch."""
        self._kernels.reshape_and_cache(key[:-1], value[:-1], keys, values, slots[:-1])


class CopiedInAnyOrder(Wrapped):
    """Copies read their sources as they were before all of them."""

    def copy_blocks(self, caches: Any, pairs: torch.Tensor) -> None:
        """Right unless a pair copies on what another has brought."""
        before = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            for source, destination in pairs.tolist():
                cache[destination] = old[source]


class CopiedBackwards(Wrapped):
    """Pairs are copied in the opposite order."""

    def copy_blocks(self, caches: Any, pairs: torch.Tensor) -> None:
        """The last pair first."""
        self._kernels.copy_blocks(caches, pairs.flip(0))


class KeysCopiedOnly(Wrapped):
    """A copy forgets the values."""

    def copy_blocks(self, caches: Any, pairs: torch.Tensor) -> None:
        """Keys find the right slots, and read something else there."""
        self._kernels.copy_blocks(caches[:1], pairs)


class SwappedInElsewhere(Wrapped):
    """Blocks come back from the buffer in sorted order."""

    def scatter_blocks(self, staging: Any, block_ids: torch.Tensor, cache: Any) -> None:
        """Right whenever the targets happen to ascend."""
        self._kernels.scatter_blocks(staging, block_ids.sort().values, cache)


class BlindToItself(Wrapped):
    """Attention is strictly causal: a token does not see its own slot."""

    def paged_attention(
        self, query: Any, keys: Any, values: Any, tables: Any, start: Any, lens: Any, **kwargs: Any
    ) -> Any:
        """The length of a sequence is one short."""
        counts = start.diff()
        short = torch.maximum(lens - 1, counts).int()
        return self._kernels.paged_attention(query, keys, values, tables, start, short, **kwargs)


class HeadsInterleaved(Wrapped):
    """Query heads are given to KV heads in turn, not in groups."""

    def paged_attention(self, query: torch.Tensor, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Right for one KV head, and where each query head has its own."""
        num_heads, num_kv_heads = query.shape[1], keys.shape[2]
        order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()
        out = self._kernels.paged_attention(query[:, order].contiguous(), keys, *args, **kwargs)
        return out[:, order.argsort()]


FAULTS: Final[Mapping[str, Callable[[Kernels], Any]]] = {
    "shifted-slots": ShiftedSlots,
    "wrong-block-at-boundary": WrongBlockAtBoundary,
    "stale-rows": StaleRows,
    "drafts-before-the-last": DraftsBeforeTheLast,
    "swapped-keys-and-values": SwappedKeysAndValues,
    "last-token-not-written": LastTokenNotWritten,
    "copied-in-any-order": CopiedInAnyOrder,
    "copied-backwards": CopiedBackwards,
    "keys-copied-only": KeysCopiedOnly,
    "swapped-in-elsewhere": SwappedInElsewhere,
    "blind-to-itself": BlindToItself,
    "heads-interleaved": HeadsInterleaved,
}
"""All of them, by name."""
