"""Telling: KV events for blocks that are published.

|  cached  |  null  |  stored  |  null  |  stored  |
           ^ parent ^          ^ parent ^             one event for each run of blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from blockstep.spec.hashing import get_group_keys, get_tokens
from blockstep.spec.requests import RequestState
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, BlockStored, Config


def get_stored(
    config: Config, request: RequestState, group: int, fresh: Sequence[BlockId], first: int
) -> tuple[BlockStored, ...]:
    """Return the events for blocks of one group that are published, from index `first` on.

    Each event has consecutive blocks, so that its parent and its tokens apply to all of them. Null
    blocks are left out; upstream reports the tokens of such, and an event without blocks if all are
    null. Source: vLLM 0.19.1 `cache_full_blocks`; P20.
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
