"""KV events: reports of blocks that were published, or lost their keys.

|  cached  |  null  |  stored  |  null  |  stored  |
           ^ parent ^          ^ parent ^             one event for each run of blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Changes, Pool
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.prefix_cache import get_group_keys, get_tokens
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, BlockStored, Config


def get_stored(
    config: Config, request: RequestState, group: int, fresh: Sequence[BlockId], first: int
) -> tuple[BlockStored, ...]:
    """Return the events for blocks of one group that are published, from index `first` on.

    Each event has consecutive blocks, so that its parent and its tokens apply to all of them. Null
    blocks are left out. Source: vLLM 0.19.1 `cache_full_blocks`; P20.
    """
    size = config.block_sizes[group]
    num_links = size // config.block_size
    there = [index for index, block_id in enumerate(fresh, first) if block_id != NULL_BLOCK]
    stored = []
    for _, run in groupby(enumerate(there), key=lambda at: at[1] - at[0]):
        indices = [index for _, index in run]
        begin, end = indices[0], indices[-1] + 1
        parent = get_group_keys(request.block_keys, group, num_links, max(begin - 1, 0), begin)
        stored.append(
            BlockStored(
                keys=get_group_keys(request.block_keys, group, num_links, begin, end),
                parent=parent[0] if parent else None,
                token_ids=get_tokens(request, begin * size, end * size),
                block_size=size,
                adapter=request.request.adapter,
            )
        )
    return tuple(stored)


def take_events(pool: Pool) -> tuple[Pool, Changes]:
    """Return the entries of the journal, and the pool without them.

    Source: vLLM 0.19.1 `take_events`; P20.
    """
    return (replace(pool, journal=()), pool.journal) if pool.journal else (pool, ())


def report_events(state: State) -> tuple[State, Changes]:
    """Return the KV events since the last answer. Source: vLLM 0.19.1 `take_events`; P20."""
    pool, changes = state.rules[take_events](state.pool)
    return (state if pool is state.pool else replace(state, pool=pool)), changes


def get_state_with_journal(state: State) -> State:
    """Return the state before the first event with a journal. Source: P20."""
    return replace(state, pool=replace(state.pool, journal=()))


def has_events(config: Config) -> bool:
    """Whether KV events are on. Source: vLLM 0.19.1 `KVEventsConfig`; P20."""
    return config.enable_kv_cache_events


FEATURE: Final = Feature(
    "kv_events",
    has_events,
    Hooks(creates=(get_state_with_journal,), publishes=(get_stored,), answers=(report_events,)),
)
