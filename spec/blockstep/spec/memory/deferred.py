"""Deferred frees: blocks that a frame in flight reads or writes are free behind its answer.

    plan 0 names block 3 | abort: block 3 is given up |  ...  | answer 0: block 3 is free
    frame 0 runs         |<----- it may still write block 3 ----->|

Steps are carried out in the order of their plans, so a row of a later plan may have such a block at
once. A store is ordered behind nothing: it could load KV into the block, and the frame then writes
over it, or reads what is loaded for somebody else. Beside a store blocks of a request that a frame
in flight names therefore wait for the newest of these frames, whatever gave them up: an end, a
preemption, a window that moved on, a session that stopped or gave way, the end of a transfer.

Each wait has an owner, which is the frame, and an end, which is its answer (P17). Until then the
blocks are held as before: nobody is given them, and what they carry can be hit.
Source: upstream #45357, #47728, #48481; vLLM 0.33.0 `deferred_frees`, which waits for the newest of
all frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.copies import replace
from blockstep.spec.pool import Pool
from blockstep.spec.requests import Frame, without_nulls
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import BlockTables, Config, DeferredFree, FrameId, RequestId


def get_fence(config: Config, frames: Sequence[Frame], request_id: RequestId) -> FrameId | None:
    """The newest frame in flight with a row of a request, whose answer its blocks wait for.

    None if they need not wait: no frame names the request, there is no store, or no load can begin
    before the only frame in flight is answered. Source: vLLM 0.33.0 `_request_blocks_can_be_freed`;
    P17.
    """
    if not config.kv_connector or config.max_frames_in_flight == 1:
        return None
    for frame in reversed(frames):
        if any(row.request_id == request_id for row in frame.rows):
            return frame.frame_id
    return None


def give_up_blocks(
    pool: Pool, block_tables: BlockTables, rules: Rules, fence: FrameId | None = None
) -> Pool:
    """The pool when a request gives up these tables: behind the answer to frame `fence`, if given.

    At once they are freed group by group; behind a frame all groups together, the last block first.
    Source: vLLM 0.33.0 `_free_request_blocks`, `pop_blocks_for_free`; P1, P17.
    """
    tables = [without_nulls(table) for table in block_tables]
    if fence is None:
        for table in tables:
            pool = rules.free_blocks(pool, table)
        return pool
    if not any(tables):
        return pool
    deferred = DeferredFree(fence, sum(tables, ()))
    return replace(pool, deferred_frees=(*pool.deferred_frees, deferred))


def free_deferred_blocks(pool: Pool, frame_id: FrameId, rules: Rules) -> Pool:
    """The pool when a frame has been answered: what waited for it is freed, in that order.

    Source: vLLM 0.33.0 `_drain_deferred_frees`; P1, P16, P17.
    """
    due = [deferred for deferred in pool.deferred_frees if deferred.frame_id == frame_id]
    if not due:
        return pool
    left = tuple([other for other in pool.deferred_frees if other.frame_id != frame_id])
    pool = replace(pool, deferred_frees=left)
    for deferred in due:
        pool = rules.free_blocks(pool, deferred.block_ids)
    return pool
