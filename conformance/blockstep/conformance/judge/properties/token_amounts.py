"""Amounts: the tokens and blocks that a request may ask for, computed here only.

0          first              known           due            end
| computed | known, to be run | placeholders | drafts to run | lookahead | ... max_model_len

Placeholders are tokens that frames in flight may still bring. Without asynchronous scheduling a
request with tokens in flight gets no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from blockstep.conformance.judge.attention_ranges import (
    count_across,
    count_unattended,
    is_across,
    is_recurrent,
    most_attended_before,
    slots_of,
)
from blockstep.conformance.judge.properties.history import History
from blockstep.spec import vocabulary as v


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def blocks_behind(
    config: v.Config,
    num_tokens: int,
    tables: Sequence[Sequence[v.BlockId | None]],
    num_across: int = 0,
) -> int:
    """Number of blocks that tables lack to hold `num_tokens` in each group, summed over the groups.

    `num_across`: slots in cross-attention tables.
    """
    return sum(_lacking(config, num_tokens, tables, num_across))


def blocks_to_begin(
    config: v.Config,
    end: int,
    hits: Sequence[Sequence[v.BlockId]],
    num_across: int,
    is_loaded: bool,
) -> int:
    """Number of blocks that an admission takes besides its hits, in all groups, to compute up to
    `end`.

    Where chunks end at states it writes one state, however many blocks it passes, and reads one
    more if a store loads that (`is_loaded`).
    """
    lacking = _lacking(config, end, hits, num_across)
    if not config.groups:
        return sum(lacking)
    return sum(
        min(num, 1 + is_loaded + group.num_speculative_blocks)
        if group.mamba_cache_mode is v.MambaCacheMode.ALIGN
        else num
        for group, num in zip(config.groups, lacking, strict=True)
    )


def _lacking(
    config: v.Config, num_tokens: int, tables: Sequence[Sequence[v.BlockId | None]], num_across: int
) -> list[int]:
    """Per group: the blocks that its table lacks to hold `num_tokens`."""
    if not config.groups:
        return [max(blocks_for(num_tokens, config.block_size) - len(tables[0]), 0)]
    needs = [slots_of(group, num_tokens, num_across) for group in config.groups]
    needed = zip(config.groups, needs, strict=True)
    lengths = [table_length(group, slots, slots) for group, slots in needed]
    pairs = zip(lengths, tables, strict=True)
    return [max(length - len(table), 0) for length, table in pairs]


def table_length(group: v.KVGroup, end: int, num_slots: int) -> int:
    """Blocks in a table after a row that ends at `end`, with lookahead slots up to `num_slots`.

    A recurrent group has one more for each draft. A proposer keeps no states, but this is counted
    so only where chunks end at states.
    """
    num_tokens = end if group.mamba_cache_mode is v.MambaCacheMode.ALIGN else num_slots
    return blocks_for(num_tokens, group.block_size) + group.num_speculative_blocks


def longest_row(config: v.Config) -> int:
    """The most tokens of one request in one step."""
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    return min(budget, threshold) if threshold else budget


def blocks_across(config: v.Config, num_across: int) -> int:
    """Number of blocks that hold `num_across` slots in each cross-attention group."""
    across = [group for group in config.groups if is_across(group)]
    return sum([blocks_for(num_across, group.block_size) for group in across])


@lru_cache(maxsize=4096)
def most_held(config: v.Config, first: int, end: int, num_across: int = 0) -> int:
    """The most blocks that a request holds at once, in all groups, to compute [first, end) in rows.

    A row may begin at any token, depending on the budget that others leave. The request holds the
    blocks that the first token of the row attends to, room for the whole row, the state that it
    writes and those of drafts, and all its cross-attention blocks.
    """
    row = longest_row(config)
    attended = list_of_tokens(config.kv_groups)
    always = count_least_states(config) + blocks_across(config, num_across)
    return always + max(
        sum(
            blocks_for(min(start + row, end), group.block_size) - count_unattended(group, start)
            for group in attended
        )
        for start in range(first, end)
    )


def list_of_tokens(groups: Sequence[v.KVGroup]) -> list[v.KVGroup]:
    """Groups whose blocks hold the KV of tokens."""
    return [group for group in groups if not (is_recurrent(group) or is_across(group))]


def count_least_states(config: v.Config) -> int:
    """State blocks that a row needs in all groups: the one that it writes, and those of drafts."""
    return sum([1 + group.num_speculative_blocks for group in config.groups if is_recurrent(group)])


def charge_at_most(config: v.Config, group: v.KVGroup, num_blocks: int) -> int:
    """The most blocks that may be charged for `num_blocks` of a group: those that a step touches.

    These are the blocks attended to before a row, which may begin anywhere in a block, those of the
    row, of drafts in flight before it and of lookahead slots after it, and one for the state after
    each draft.
    """
    num_before = most_attended_before(group)
    if num_before is None:
        return num_blocks
    num_ahead = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    reach = longest_row(config) + num_ahead * config.num_speculative_tokens
    num_touched = num_before + reach + config.num_lookahead_tokens
    num_touched_blocks = blocks_for(group.block_size - 1 + num_touched, group.block_size)
    return min(num_blocks, num_touched_blocks) + group.num_speculative_blocks


def least_need(config: v.Config, request: v.Request) -> int:
    """Number of blocks without which a request cannot be served, in all groups.

    Under full attention these hold its longest extent. In other groups they are what a request
    needs to compute everything again, or what its last token attends to, whichever is more.
    """
    extent = longest_extent(config, request)
    if not config.groups:
        return blocks_for(extent, config.block_size)
    tokens = len(request.prompt_token_ids) + request.max_tokens - 1
    last = min(tokens, config.max_model_len - 1)
    end = min(last - 1 + longest_row(config) + config.num_lookahead_tokens, extent)
    num_across = count_across(config, request)
    always = count_least_states(config) + blocks_across(config, num_across)
    at_the_end = always + sum(
        blocks_for(end, group.block_size) - count_unattended(group, last - 1)
        for group in list_of_tokens(config.groups)
    )
    return max(most_held(config, 0, last, num_across), at_the_end)


def most_need(config: v.Config, request: v.Request) -> int:
    """Number of blocks with which a request must not be rejected as too large, in all groups."""
    extent, num_across = longest_extent(config, request), count_across(config, request)
    return sum(
        charge_at_most(
            config, group, blocks_for(slots_of(group, extent, num_across), group.block_size)
        )
        for group in config.kv_groups
    )


def longest_extent(config: v.Config, request: v.Request) -> int:
    """The slots that a request needs at its greatest length, in tokens.

    The last output needs no slot; drafts and lookahead slots do.
    """
    tokens = len(request.prompt_token_ids) + request.max_tokens - 1
    drafts = config.num_speculative_tokens if request.max_tokens > 1 else 0
    scheduled = min(tokens + drafts, config.max_model_len - 1)
    return min(scheduled + config.num_lookahead_tokens, config.max_model_len)


def ends_in_flight(history: History, request: v.RequestSnapshot) -> bool:
    """Whether a frame in flight may bring the last output that a request can have.

    A further row would then run for nothing. The rule is upstream's: it counts computed tokens as
    if every draft in flight were rejected.
    """
    promised = history.placeholders(request.request_id)
    if not promised:
        return False
    life = history.lives[request.request_id]
    certain = request.num_computed_tokens + 2 - promised
    return certain >= life.num_prompt + life.request.max_tokens


def share_of(history: History, request: v.RequestSnapshot) -> int:
    """Tokens that a running request would run with an unlimited budget; below 1 it gets no row."""
    if ends_in_flight(history, request):
        return 0
    name, config, computed = request.request_id, history.config, request.num_computed_tokens
    due = history.lives[name].num_known + history.placeholders(name) + len(request.spec_token_ids)
    # The position max_model_len - 1 is never run: sampling it would end the request anyway.
    return min(admitted_share(config, due, computed), config.max_model_len - 1 - computed)


def running_slots(config: v.Config, end: int) -> int:
    """Slots that a running request needs to run up to `end`, lookahead included."""
    return min(end + config.num_lookahead_tokens, config.max_model_len)


def admitted_share(config: v.Config, num_known: int, num_hit_tokens: int) -> int:
    """Tokens that an admitted request would run with an unlimited budget."""
    share, threshold = num_known - num_hit_tokens, config.long_prefill_token_threshold
    return min(share, threshold) if threshold else share
