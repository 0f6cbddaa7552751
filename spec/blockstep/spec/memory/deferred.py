"""Deferred frees: blocks that a frame in flight reads or writes are free after its commit.

    plan 0 names block 3 | abort: block 3 released |  ...  | commit 0: block 3 is free
    frame 0 runs         |<----- it may still write block 3 ----->|

Each wait has an owner, which is the frame, and an end, which is its commit (P17). Until then the
blocks keep their ref counts: they are not given to other requests, and cached ones can be hit.
Source: upstream #45357, #47728, #48481; vLLM 0.33.0 `deferred_frees`, which waits for the newest of
all frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.copies import replace
from blockstep.spec.pool import Pool, free_blocks
from blockstep.spec.requests import Frame, without_nulls
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import BlockTables, Config, DeferredFree, FrameId, RequestId


def get_fence(config: Config, frames: Sequence[Frame], request_id: RequestId) -> FrameId | None:
    """Return the frame in flight whose commit the blocks of a request wait for: none.

    Steps are executed in the order of their plans, so a row of a later plan may have such a block
    at once. Source: vLLM 0.19.1 `_free_blocks`; P17.
    """
    del config, frames, request_id
    return None


def give_up_blocks(
    pool: Pool, block_tables: BlockTables, rules: Rules, fence: FrameId | None = None
) -> Pool:
    """Return the pool after a request releases these tables: after frame `fence`, if given.

    At once they are freed group by group; after a frame all groups together, the last block first.
    Source: vLLM 0.33.0 `_free_request_blocks`, `pop_blocks_for_free`; P1, P17.
    """
    tables = [without_nulls(table) for table in block_tables]
    if fence is None:
        for table in tables:
            pool = rules[free_blocks](pool, table)
        return pool
    if not any(tables):
        return pool
    deferred = DeferredFree(fence, sum(tables, ()))
    return replace(pool, deferred_frees=(*pool.deferred_frees, deferred))


def free_deferred_blocks(pool: Pool, frame_id: FrameId, rules: Rules) -> Pool:
    """Return the pool after a frame was committed: blocks that waited for it are freed, in order.

    Source: vLLM 0.33.0 `_drain_deferred_frees`; P1, P16, P17.
    """
    due = [deferred for deferred in pool.deferred_frees if deferred.frame_id == frame_id]
    if not due:
        return pool
    left = tuple([other for other in pool.deferred_frees if other.frame_id != frame_id])
    pool = replace(pool, deferred_frees=left)
    for deferred in due:
        pool = rules[free_blocks](pool, deferred.block_ids)
    return pool
