"""Paged attention: one entry for prefill chunks, decodes and drafts, mixed in one batch."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blockstep.kernels.arguments import (
    CACHES,
    FLOATS,
    HEAD_SIZES,
    Arguments,
    check_offsets,
    check_positive,
    check_range,
)
from blockstep.kernels.cache import check_scales, from_cache
from blockstep.kernels.dispatch import find_kernels

NUM_GATHERED_MAX = 1 << 19
"""Most elements of keys that the reference gathers at once; more sequences are split into groups.
These few MiB stay in the CPU's cache, and an allocator reuses them instead of asking for pages."""


NUM_CHECKED_MAX = 1024
"""Most combinations of shapes that are remembered, since batches differ from step to step."""
_checked: set[tuple[object, ...]] = set()


class Rules(NamedTuple):
    """Options of a call that all sequences share."""

    scale: float
    sliding_window: int | None
    chunk_size: int | None
    soft_cap: float | None
    k_scale: float
    v_scale: float


class AttentionWorkspace(NamedTuple):
    """Memory in which the programs of a call of `paged_attention` exchange results of splits."""

    counters: Tensor
    """int32: the number of stored splits of each query tile under way; 0 between calls."""
    partial: Tensor
    """float32: weighted values of splits."""
    sums: Tensor
    """float32: for each row of a split the maximum of its scores and the sum of exponentials."""


def make_attention_workspace(
    query: Tensor, key_cache: Tensor, max_seq_len: int
) -> AttentionWorkspace:
    """Allocate the workspace of `paged_attention` for a model whose layers have equal shapes.

    Calls on one stream may share it, those of different layers too. Calls on two streams must not:
    one would merge results of the other. A call that fails half way leaves it unusable.

    query, key_cache: examples of the arguments of the calls; only heads, head size, dtypes and
    device matter. max_seq_len: slots of the widest block table, `max_blocks * block_size`. The
    torch reference needs no workspace, and on the CPU it is empty.
    """
    if kernels := find_kernels("attention", query):
        made: AttentionWorkspace = kernels.make_workspace(query, key_cache, max_seq_len)
        return made
    return AttentionWorkspace(
        torch.zeros(0, dtype=torch.int32, device=query.device),
        *(torch.zeros(0, device=query.device) for _ in range(2)),
    )


class AttentionPlan(NamedTuple):
    """The work of each GPU program, for calls of `paged_attention` with the same lengths."""

    rows: Tensor
    """[num_rows, 16] int32: one row per program with its first splits, then rows of all splits."""
    num_few: int
    """Number of programs for requests with few rows of queries."""
    num_many: int
    """Number of programs for requests with more rows; 0 if there are none."""
    num_few_runs: int
    """Number of the rows of splits that belong to the former."""
    shape: tuple[int | None, ...]
    """Shapes that the plan was made for: tokens, heads, head size, KV heads, requests, window,
    chunk size."""


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    max_query_len: int | None = None,
) -> AttentionPlan:
    """Plan `paged_attention` of a step, once for all layers with the same window or chunk size.

    Arguments are those of `paged_attention`. Of `query` and `key_cache` only shapes, dtypes and the
    device matter. Captured in a CUDA graph, the plan follows lengths that change. The torch
    reference needs no plan, and on the CPU it is empty.
    """
    if kernels := find_kernels("attention", query):
        made: AttentionPlan = kernels.make_plan(
            query, key_cache, query_start_loc, seq_lens, sliding_window, attention_chunk_size,
            max_query_len,
        )  # fmt: skip
        return made
    shape = (
        *query.shape, key_cache.shape[2], len(seq_lens), sliding_window, attention_chunk_size
    )  # fmt: skip
    return AttentionPlan(torch.empty((0, 16), dtype=torch.int32), 0, 0, 0, shape)


def paged_attention(
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
    max_query_len: int | None = None,
    plan: AttentionPlan | None = None,
    workspace: AttentionWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return causal attention over each token's sequence; `[num_tokens, num_heads, head_size]`.

    The tokens of sequence `s` are rows `query_start_loc[s]` to `query_start_loc[s + 1]` of `query`,
    the last of them at position `seq_lens[s] - 1`; their own keys are already in the cache:

        position   0 ............ num_computed ............ seq_len
                   |-- in the cache before --|-- this step --|
        token i of the step sees  0 .. num_computed + i, the last `sliding_window` of them
                                  or those of its chunk of `attention_chunk_size` positions

    query: `[num_tokens, num_heads, head_size]`, float32, float16 or bfloat16, heads grouped by KV
    head: head `h` reads KV head `h // (num_heads // num_kv_heads)`. key_cache, value_cache: as in
    `reshape_and_cache`, the query's dtype or float8_e4m3fn with scales (then a GPU computes a
    float32 query in bfloat16). block_tables: `[num_seqs, max_blocks]` int32; entries past a
    sequence's last block are not read, nor are those wholly before the window or the chunk of its
    first token. query_start_loc: `[num_seqs + 1]` int32. seq_lens: `[num_seqs]` int32, computed
    tokens and this step's. Rows of `query` past the last sequence are padding, and undefined in the
    result. soft_cap: `soft_cap * tanh(score / soft_cap)`.

    On a GPU the bits of a request's rows depend only on the request: its lengths, queries, keys and
    values. They are the same in every batch and in a CUDA graph whose lengths change.

    max_query_len: upper bound of a request's tokens; a GPU saves a launch if it is small. plan:
    from `plan_attention` for these lengths; without one each call plans. workspace: from
    `make_attention_workspace`; without one each call allocates it.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device, layout or number, a workspace that is
            too small, or a plan for another batch; on the CPU also lengths that contradict each
            other and block ids outside the cache.
    """
    rules = Rules(scale, sliding_window, attention_chunk_size, soft_cap, k_scale, v_scale)
    check_once(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, rules)
    out = check_options(query, out, max_query_len)
    if query.numel() == 0 or seq_lens.numel() == 0:
        return out
    if kernels := find_kernels("attention", query):
        if plan is None:
            plan = kernels.make_plan(
                query, key_cache, query_start_loc, seq_lens, sliding_window, attention_chunk_size,
                max_query_len,
            )  # fmt: skip
        check_plan(plan, query, key_cache, seq_lens, rules)
        kernels.launch_paged_attention(
            query, key_cache, value_cache, block_tables, plan, rules, workspace, out
        )
        return out
    attend_grouped(
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, rules, out
    )
    return out


def check_options(query: Tensor, out: Tensor | None, max_query_len: int | None) -> Tensor:
    """Check the optional arguments; return the result's memory, the caller's or new."""
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"max_query_len: must be at least 1, but is {max_query_len}; leave it out")
    if out is None:
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    arguments = Arguments()
    arguments.check("query", query, "num_tokens num_heads head_size", *FLOATS)
    arguments.check("out", out, "num_tokens num_heads head_size", query.dtype, rows=True)
    return out


def check_plan(
    plan: AttentionPlan, query: Tensor, key_cache: Tensor, seq_lens: Tensor, rules: Rules
) -> None:
    """Refuse a plan that was made for other shapes, another window or other chunks."""
    window = rules.sliding_window, rules.chunk_size
    shape = (*query.shape, key_cache.shape[2], len(seq_lens), *window)
    if plan.shape != shape:
        raise ValueError(
            f"plan: must be for tokens, heads and so on {shape}, but is for {plan.shape}; "
            f"plan each step"
        )


def check_once(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rules]) -> None:
    """Check arguments as `check_arguments` does, on a GPU once for each combination of shapes.

    On a GPU only shapes, strides, dtypes, devices and numbers are checked, which are the same for
    all layers. The check takes longer than a small launch.
    """
    *tensors, rules = arguments
    if not all(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in tensors):
        check_arguments(*arguments)
        return
    seen = (
        rules,
        *((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors),
    )
    if seen not in _checked:
        check_arguments(*arguments)
        if len(_checked) >= NUM_CHECKED_MAX:
            _checked.clear()
        _checked.add(seen)


def check_arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rules: Rules,
) -> None:
    """Check all arguments of a call, before anything is launched."""
    arguments = Arguments()
    arguments.check("query", query, "num_tokens num_heads head_size", *FLOATS, rows=True)
    dims = "num_blocks block_size num_kv_heads head_size"
    arguments.check("key_cache", key_cache, dims, query.dtype, CACHES[-1], rows=True)
    arguments.check("value_cache", value_cache, dims, key_cache.dtype, rows=True)
    arguments.check("block_tables", block_tables, "num_seqs max_blocks", torch.int32, rows=True)
    arguments.check("query_start_loc", query_start_loc, "num_seqs+1", torch.int32, rows=True)
    arguments.check("seq_lens", seq_lens, "num_seqs", torch.int32, rows=True)
    if arguments["head_size"] not in HEAD_SIZES:
        raise ValueError(
            f"query: head_size must be one of {HEAD_SIZES}, but is {arguments['head_size']}; "
            f"pad the heads with zeros"
        )
    num_heads, num_kv_heads = arguments["num_heads"], arguments["num_kv_heads"]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query: num_heads must be a multiple of num_kv_heads, but {num_heads} is not one of "
            f"{num_kv_heads}; pass the cache that belongs to this model"
        )
    check_positive("scale", rules.scale)
    check_scales(key_cache, rules.k_scale, rules.v_scale)
    if rules.soft_cap is not None:
        check_positive("soft_cap", rules.soft_cap)
    for name, size, none in (
        ("sliding_window", rules.sliding_window, "no window"),
        ("attention_chunk_size", rules.chunk_size, "no chunks"),
    ):
        if size is not None and size < 1:
            raise ValueError(f"{name}: must be at least 1, but is {size}; None means {none}")
    if rules.sliding_window is not None and rules.chunk_size is not None:
        raise ValueError(
            "attention_chunk_size: must not be given with sliding_window; a layer has one of them"
        )
    if query.is_cuda or arguments["num_seqs"] == 0:
        return
    capacity = arguments["max_blocks"] * arguments["block_size"]
    last = int(query_start_loc[-1])
    check_offsets("query_start_loc", query_start_loc, min(last, query.shape[0]), "the tokens")
    check_range("seq_lens", seq_lens, 0, capacity + 1, "what a row of block_tables can hold,")
    if bool((query_start_loc.diff() > seq_lens).any()):
        raise ValueError(
            "seq_lens: must count this step's tokens too, but is less than the query's length of "
            "a sequence; pass computed + scheduled tokens"
        )


def attend_grouped(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rules: Rules,
    out: Tensor,
) -> None:
    """Compute the torch reference, for all sequences with equally many tokens at once."""
    starts = query_start_loc.tolist()
    groups: dict[int, list[int]] = {}
    for row, (start, stop) in enumerate(pairwise(starts)):
        groups.setdefault(stop - start, []).append(row)
    groups.pop(0, None)
    lengths = seq_lens.tolist()
    slot_elements = key_cache.shape[2] * key_cache.shape[3]
    for query_len, members in groups.items():
        for rows in split_by_memory(members, lengths, slot_elements):
            index = torch.tensor(rows, device=query.device)
            tokens = query_start_loc[index, None] + torch.arange(query_len, device=query.device)
            out[tokens] = attend(
                query[tokens], key_cache, value_cache, block_tables[index], seq_lens[index], rules
            )


def split_by_memory(rows: list[int], lengths: list[int], slot_elements: int) -> list[list[int]]:
    """Return groups of sequences of similar length whose gathered keys fit `NUM_GATHERED_MAX`."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -lengths[row]):
        fits = groups and (len(groups[-1]) + 1) * longest * slot_elements <= NUM_GATHERED_MAX
        if fits and 2 * lengths[row] >= longest:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = max(1, lengths[row])
    return groups


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    rules: Rules,
) -> Tensor:
    """Return the attention of sequences with equally many tokens; `query`: `[S, query_len, heads,
    size]`.

    The heads of one KV head become rows of one product, so that no key is repeated. Slots that a
    sequence does not have are read at its last position and masked: an unwritten slot of a cache
    may hold NaN, and 0 * NaN is NaN.
    """
    num_seqs, query_len, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    device = query.device
    last = seq_lens.long()[:, None] - 1
    first = torch.zeros_like(last)
    if rules.sliding_window is not None:
        first = (last - query_len - rules.sliding_window + 2).clamp(min=0)
    if rules.chunk_size is not None:
        first = (last - query_len + 1).clamp(min=0)
        first -= first % rules.chunk_size
    keys = first + torch.arange(int((last - first).max()) + 1, device=device)
    at = torch.minimum(keys, last)
    blocks = block_tables.gather(1, at // block_size).long()
    check_range("block_tables", blocks, 0, key_cache.shape[0], "ids of blocks of the cache")
    key, value = (
        gather_slots(cache, blocks, at % block_size) for cache in (key_cache, value_cache)
    )
    key = from_cache(key, query.dtype, rules.k_scale).transpose(1, 2)
    value = from_cache(value, query.dtype, rules.v_scale).transpose(1, 2)

    position = last - query_len + 1 + torch.arange(query_len, device=device)
    visible = keys[:, None] <= position[..., None]
    if rules.sliding_window is not None:
        visible &= keys[:, None] > position[..., None] - rules.sliding_window
    if rules.chunk_size is not None:
        visible &= keys[:, None] >= (position - position % rules.chunk_size)[..., None]
    group = num_heads // num_kv_heads
    folded = query.view(num_seqs, query_len, num_kv_heads, group, head_size)
    folded = folded.permute(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, head_size)
    mask = visible[:, None].repeat(1, 1, group, 1)
    if rules.soft_cap is None:
        attended = scaled_dot_product_attention(folded, key, value, mask, scale=rules.scale)
    else:
        scores = (folded @ key.transpose(2, 3)).float() * rules.scale
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = weights.to(value.dtype) @ value
    unfolded = attended.view(num_seqs, num_kv_heads, group, query_len, head_size)
    return unfolded.permute(0, 3, 1, 2, 4).reshape(query.shape)


def gather_slots(cache: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Return the contents of slots, `[..., num_kv_heads, head_size]`."""
    if not cache.is_contiguous():
        return cache[blocks, offsets]
    slots = (blocks * cache.shape[1] + offsets).view(-1)
    rows = cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, slots)
    return rows.view(*blocks.shape, *cache.shape[2:])
