"""Hits (P5, P16): the length of a request's prefix hit, and the blocks that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import TypeAlias

from blockstep.conformance.judge.attention_ranges import count_unattended, is_recurrent
from blockstep.conformance.judge.properties.history import History, RequestHistory
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    sentence,
    unequal,
)
from blockstep.conformance.judge.worker.prefix_names import Name
from blockstep.spec import vocabulary as v


def may_ask_the_cache(step: Step, life: RequestHistory) -> bool:
    """Whether a request may have a prefix hit at all."""
    return step.config.enable_prefix_caching and not life.request.skip_reading_prefix_cache


def may_ask_the_store(config: v.Config, request: v.Request) -> bool:
    """Whether a store is asked for an offer for a request without blocks, if there is a store."""
    return config.kv_connector and not request.skip_reading_prefix_cache


def find_offered(history: History, name: v.RequestId, num_hit: int) -> tuple[int, bool]:
    """Number of tokens that a store offers after a hit, and whether they are loaded asynchronously.

    The last known token is always computed, since its logits are needed. A state belongs to the
    last token of an offer, so with states an offer that includes this token is useless.
    """
    life, offer = history.lives[name], history.store.transfers.get_offer(name)
    if not may_ask_the_store(history.config, life.request):
        return 0, False
    num_offered, num_wanted = offer.num_tokens or 0, life.num_known - 1
    if num_offered > num_wanted and any(map(is_recurrent, history.config.groups)):
        return 0, False
    count = min(num_offered, num_wanted) - num_hit
    return (count, offer.is_async) if count > 0 else (0, False)


@sentence("P5", v.Schedule, of="askers", fixes="where a hit may end")
def hit_is_whole_blocks_and_leaves_a_token(step: Step, history: History) -> Complaints:
    """A hit is whole blocks and leaves a known token to compute, since its logits are needed.

    With a draft head the block after the hit is computed again, so it must be cached as well.
    """
    config = step.config
    unit = lcm(*step.block_sizes)
    for row in step.askers:
        life = history.lives[row.request_id]
        most = 0
        if may_ask_the_cache(step, life):
            most = min([longest_of(config, life, group) for group in step.groups])
        if row.num_hit % unit or not 0 <= row.num_hit <= max(most, 0):
            yield Complaint(
                f"{row.request_id!r} has a hit of {row.num_hit} tokens; "
                f"it knows {life.num_known}, and a block is {unit}",
                subjects=row.request_id,
            )


def count_behind(config: v.Config, group: v.KVGroup) -> int:
    """Number of cached blocks that a group must have after a hit.

    A state depends on the tokens before it only; KV that a proposer reads depends on the next
    token, too.
    """
    return int(config.drops_last_hit_block and not is_recurrent(group))


def longest_of(config: v.Config, life: RequestHistory, group: v.KVGroup) -> int:
    """Tokens of the longest hit that whole blocks of one group allow; negative if there is none."""
    num_blocks = (life.num_known - 1) // group.block_size
    return (num_blocks - count_behind(config, group)) * group.block_size


@sentence("P5", v.Schedule, of="askers", fixes="how long a hit is")
def hit_is_the_longest_possible(step: Step, history: History) -> Complaints:
    """A hit takes every leading block that was cached before the step and still is.

    Blocks that a row of this step took are left out, since it is not visible when they were
    evicted.
    """
    if not step.askers or not (step.before.cached or step.config.groups):
        return
    for row in step.askers:
        life = history.lives[row.request_id]
        if not may_ask_the_cache(step, life):
            continue
        length, _ = longest_hit(step.config, life, lambda *at: _lasting(step, history, *at))
        if row.num_hit < length:
            what = f"{row.request_id!r} took a shorter hit than was there"
            yield unequal(what, "hit tokens", length, row.num_hit, subjects=row.request_id)


Find: TypeAlias = Callable[[Name, int], Sequence[v.BlockId]]
"""The blocks cached under a name in a KV group, oldest first."""


def longest_hit(
    config: v.Config, life: RequestHistory, find: Find
) -> tuple[int, list[list[v.BlockId]]]:
    """The greatest length in tokens that is a hit in every group, and the blocks that each group
    shares.

    The length is whole blocks in each group. Each block must be cached that a later token attends
    to, and with a draft head the next block as well, which is computed again.
    """
    if not config.groups:
        return _longest_prefix(config, life, find)
    unit = lcm(*config.block_sizes)
    for length in range((life.num_known - 1) // unit * unit, 0, -unit):
        tables = []
        for at in range(len(config.groups)):
            table = _table_behind(config, life, find, at, length)
            if table is None:
                break
            tables.append(table)
        else:
            return length, tables
    return 0, [[] for _ in config.groups]


def _longest_prefix(
    config: v.Config, life: RequestHistory, find: Find
) -> tuple[int, list[list[v.BlockId]]]:
    """Under full attention the first missing block ends the search."""
    hits: list[v.BlockId] = []
    for index in range((life.num_known - 1) // config.block_size):
        blocks = find(life.block_name(index), 0)
        if not blocks:
            break
        hits.append(blocks[0])
    if config.drops_last_hit_block and hits:
        hits.pop()
    return len(hits) * config.block_size, [hits]


def _table_behind(
    config: v.Config, life: RequestHistory, find: Find, at: int, length: int
) -> list[v.BlockId] | None:
    """The blocks that a group shares for a hit of `length` tokens; None if one is missing."""
    group = config.groups[at]
    if length > longest_of(config, life, group):
        return None
    first, end = count_unattended(group, length), length // group.block_size
    behind = end + count_behind(config, group)
    table = [v.NULL_BLOCK] * first
    for index in range(first, behind):
        blocks = find(life.block_name(index, group.block_size), at)
        if not blocks:
            return None
        table.append(blocks[0])
    return table[:end]


@sentence("P16", v.Schedule, of="askers", fixes="which of several copies is hit")
def hit_takes_the_oldest_copy(step: Step, history: History) -> Complaints:
    """A hit takes the block published first of several blocks with one key.

    This is a policy: any copy would do. It is fixed because the order of eviction depends on it.
    """
    if not step.before.cached:
        return
    for row in step.askers:
        life = history.lives[row.request_id]
        for group, table in enumerate(row.hit_tables):
            named, size = history.named_blocks(step.before, group), step.block_sizes[group]
            for index, block in enumerate(table):
                name = life.block_name(index, size)
                oldest = named.get(name, (block,))[0]
                if block and oldest != block and oldest in _lasting(step, history, name, group):
                    what = f"{row.request_id!r} hit another copy than the oldest"
                    yield unequal(
                        what, f"block table[{index}]", oldest, block, subjects=row.request_id
                    )


def _lasting(step: Step, history: History, name: Name, group: int) -> list[v.BlockId]:
    """Blocks that had this name throughout the step."""
    before, after = step.before.block_keys, step.after.block_keys
    gained = step.all_gained
    return [
        block
        for block in history.named_blocks(step.before, group).get(name, ())
        if block not in gained and after[block] is not None and after[block] == before[block]
    ]


def hit_now(
    step: Step, history: History, life: RequestHistory
) -> tuple[int, list[list[v.BlockId]]]:
    """The longest prefix hit in the state after the step: tokens, and a table for each group."""
    config, after = step.config, step.after
    if not may_ask_the_cache(step, life) or not (after.cached or config.groups):
        return 0, [[] for _ in config.block_sizes]

    def find(name: Name, group: int) -> Sequence[v.BlockId]:
        if config.groups and is_recurrent(config.groups[group]):
            # States are read before any row writes, so those of this step do not count.
            return _lasting(step, history, name, group)
        return history.named_blocks(after, group).get(name, ())

    return longest_hit(config, life, find)
