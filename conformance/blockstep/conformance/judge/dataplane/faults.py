"""Faults: mistakes of a data plane, planted around the kernels under test.

Each replaces one kernel and makes one mistake. A check on such kernels must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from blockstep.conformance.judge.dataplane.worker import Kernels

FAULTS: Final[dict[str, Callable[[Kernels], Any]]] = {}
"""All faults, by name."""


class Faulty:
    """The kernels, one of them with a fault."""

    def __init__(self, kernel: str, fault: Callable[..., Any], kernels: Kernels) -> None:
        self._kernels = kernels
        setattr(self, kernel, partial(fault, kernels))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def _planted(kernel: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Plant a function in place of a kernel; it gets the right kernels first."""

    def plant(fault: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[name] = partial(Faulty, kernel, fault)
        return fault

    return plant


@_planted("prepare_step", "shifted-slots")
def _shift_slots(kernels: Kernels, *args: Any, **kwargs: Any) -> Any:
    """Slot mapping is off by one: every token goes one slot further."""
    step = kernels.prepare_step(*args, **kwargs)
    return step._replace(slot_mapping=step.slot_mapping + 1)


@_planted("prepare_step", "wrong-block-at-boundary")
def _look_up_the_position_before(
    kernels: Kernels, block_tables: Any, computed: Any, scheduled: Any, size: int, **kwargs: Any
) -> Any:
    """Only the first slot of a block is wrong, and never that of the first block."""
    step = kernels.prepare_step(block_tables, computed, scheduled, size, **kwargs)
    tables = kwargs["out_block_tables"]
    counts = step.query_start_loc.diff()
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    block = tables[row, (step.positions - 1).clamp(min=0) // size].long()
    return step._replace(slot_mapping=block * size + step.positions % size)


def _keep_stale_rows(kernels: Kernels) -> Faulty:
    """Each step has the block tables of the step before, as if their update came too late."""
    before: list[torch.Tensor] = []

    def prepare_step(
        kernels: Kernels, block_tables: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        before.append(block_tables.clone())
        stale = before.pop(0) if len(before) > 1 else block_tables
        if stale.shape != block_tables.shape:
            stale = block_tables
        return kernels.prepare_step(stale, *args, **kwargs)

    return Faulty("prepare_step", prepare_step, kernels)


FAULTS["stale-rows"] = _keep_stale_rows


@_planted("merge_drafts", "drafts-before-the-last")
def _put_drafts_first(
    kernels: Kernels, ids: torch.Tensor, start: Any, last: Any, drafts: Any, ends: torch.Tensor
) -> Any:
    """Put drafts before the last token; right for rows without drafts, or with equal tokens
    only."""
    rows = kernels.merge_drafts(ids, start, last, drafts, ends)
    for first, stop, end in zip(ends[:-1], ends[1:], start[1:], strict=True):
        part = slice(int(end) - int(stop - first) - 1, int(end))
        ids[part] = ids[part].roll(-1)
    return rows


@_planted("reshape_and_cache", "swapped-keys-and-values")
def _swap_keys_and_values(kernels: Kernels, key: Any, value: Any, *args: Any) -> None:
    """Swap keys and values, which have one shape and one type, so that nothing else can notice."""
    kernels.reshape_and_cache(value, key, *args)


@_planted("reshape_and_cache", "last-token-not-written")
def _leave_the_last_token_out(
    kernels: Kernels, key: Any, value: Any, keys: Any, values: Any, slots: torch.Tensor
) -> None:
    """The last token of the batch is not written."""
    kernels.reshape_and_cache(key[:-1], value[:-1], keys, values, slots[:-1])


@_planted("copy_blocks", "copied-in-any-order")
def _copy_in_any_order(
    _kernels: Kernels, caches: Any, pairs: torch.Tensor, **_promise: bool
) -> None:
    """Read sources as they were before all pairs; right unless one pair copies another's target."""
    before = [cache.clone() for cache in caches]
    for cache, old in zip(caches, before, strict=True):
        for source, destination in pairs.tolist():
            cache[destination] = old[source]


@_planted("copy_blocks", "copied-backwards")
def _copy_backwards(kernels: Kernels, caches: Any, pairs: torch.Tensor, **_promise: bool) -> None:
    """Copy the last pair first."""
    kernels.copy_blocks(caches, pairs.flip(0))


@_planted("copy_blocks", "keys-copied-only")
def _copy_keys_only(kernels: Kernels, caches: Any, pairs: torch.Tensor, **_promise: bool) -> None:
    """Copy keys only, so that they find the right slots and read other values there."""
    kernels.copy_blocks(caches[:1], pairs)


@_planted("scatter_blocks", "swapped-in-elsewhere")
def _swap_in_sorted(kernels: Kernels, staging: Any, block_ids: torch.Tensor, cache: Any) -> None:
    """Swap in by ascending targets; right if they ascend anyway."""
    kernels.scatter_blocks(staging, block_ids.sort().values, cache)


@_planted("paged_attention", "blind-to-itself")
def _attend_one_short(
    kernels: Kernels,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    start: Any,
    lens: Any,
    **kw: Any,
) -> Any:
    """Attention is strictly causal: a token does not see its own slot."""
    short = torch.maximum(lens - 1, start.diff()).int()
    return kernels.paged_attention(query, keys, values, tables, start, short, **kw)


@_planted("paged_attention", "heads-interleaved")
def _interleave_heads(
    kernels: Kernels, query: torch.Tensor, keys: Any, *args: Any, **kwargs: Any
) -> Any:
    """Give query heads to KV heads in turn; right for one KV head, or one for each."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[2]
    order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()
    out = kernels.paged_attention(query[:, order].contiguous(), keys, *args, **kwargs)
    return out[:, order.argsort()]


# Faults of several KV groups.


def _take_the_first_block_size(kernels: Kernels) -> Faulty:
    """Lay out all groups as the first one."""
    sizes: list[int] = []

    def prepare_step(
        kernels: Kernels, block_tables: Any, computed: Any, scheduled: Any, size: int, **kwargs: Any
    ) -> Any:
        sizes.append(size)
        return kernels.prepare_step(block_tables, computed, scheduled, min(sizes), **kwargs)

    return Faulty("prepare_step", prepare_step, kernels)


FAULTS["one-block-size-for-all"] = _take_the_first_block_size


@_planted("reshape_and_cache", "null-block-written")
def _write_padding(
    kernels: Kernels, key: Any, value: Any, keys: Any, values: Any, slots: torch.Tensor
) -> None:
    """Rows without tokens write to slot 0, which is in the null block."""
    kernels.reshape_and_cache(key, value, keys, values, slots)
    kernels.reshape_and_cache(key[:1], value[:1], keys, values, torch.zeros_like(slots[:1]))


@_planted("paged_attention", "window-one-short")
def _see_one_less(kernels: Kernels, *args: Any, **kwargs: Any) -> Any:
    """A window counts the tokens before its own."""
    if "sliding_window" in kwargs:
        kwargs["sliding_window"] = max(kwargs["sliding_window"] - 1, 1)
    return kernels.paged_attention(*args, **kwargs)


@_planted("paged_attention", "window-one-long")
def _see_one_more(kernels: Kernels, *args: Any, **kwargs: Any) -> Any:
    """Attend to one slot before the window, where it begins at the first slot of a block."""
    if "sliding_window" in kwargs:
        kwargs["sliding_window"] += 1
    return kernels.paged_attention(*args, **kwargs)


@_planted("paged_attention", "window-of-the-last-token")
def _see_as_the_last(
    kernels: Kernels, query: Any, keys: Any, values: Any, tables: Any, start: Any, lens: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Skip for all tokens of a row the blocks that its last token skips."""
    window, tables = kwargs.get("sliding_window"), tables.clone()
    if window is not None:
        for row, end in enumerate(lens.tolist()):
            tables[row, : max(end - window, 0) // keys.shape[1]] = 0
    return kernels.paged_attention(query, keys, values, tables, start, lens, **kwargs)


@_planted("paged_attention", "chunks-as-windows")
def _see_chunks_as_windows(kernels: Kernels, *args: Any, **kwargs: Any) -> Any:
    """Attend to chunks as to windows; right for the last token of a chunk only."""
    kwargs |= {"sliding_window": kwargs.pop("attention_chunk_size", kwargs.get("sliding_window"))}
    return kernels.paged_attention(*args, **kwargs)


@_planted("paged_attention", "reads-what-it-masks")
def _multiply_by_zero(
    kernels: Kernels, query: Any, keys: Any, values: Any, tables: Any, start: Any, lens: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Read all blocks in the table and multiply those masked by zero, which is wrong for NaN."""
    out = kernels.paged_attention(query, keys, values, tables, start, lens, **kwargs)
    for row, end in enumerate(lens.tolist()):
        named = tables[row, : -(-end // keys.shape[1])].long()
        out[int(start[row]) : int(start[row + 1])] += 0 * values[named].sum()
    return out
