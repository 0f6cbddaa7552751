"""Transfers: KV moved between the pool and a store, and reports about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blockstep.spec.vocabulary.request import BlockId, BlockTables, FrameId, RequestId


@dataclass(frozen=True, slots=True)
class KVLoad:
    """KV of one request that the worker has a store load into blocks (vLLM: connector metadata)."""

    request_id: RequestId
    block_ids: BlockTables
    """Per group: the block table of the request, from its first block to the last that is loaded.
    Null blocks take the places of skipped blocks."""
    num_computed_tokens: int
    """Tokens of the local hit; the load begins after them."""
    num_external_tokens: int
    """Tokens that are loaded; at least 1. Of a recurrent group one state is, behind the last of
    them."""
    is_async: bool = False
    """False: the KV is there before the first row of this step reads it, or its blocks are reported
    as invalid with the model output of this plan. True: it arrives at any later time, and is
    reported."""


@dataclass(frozen=True, slots=True)
class KVSave:
    """KV of a preempted request that the worker has a store save (swap-out).

    It is read before any other access to a block in the step, so that the blocks are free at once.
    Whether the store keeps it, and for how long, is known when the store is asked (`KVOffer`).
    Source: seed 002 "Swap-Out", corrected.
    """

    request_id: RequestId
    block_ids: BlockTables
    """Per group: its block table up to `num_tokens`, as it was before the step. Null blocks take
    the places of skipped blocks."""
    num_tokens: int
    """Number of leading tokens, known and computed, that are saved: full blocks of every group."""


@dataclass(frozen=True, slots=True)
class KVTransfers:
    """A worker's report about transfers.

    No report raises an error: one that is late, repeated or about an unknown request changes
    nothing (P18). A report about a request whose load is under way is about that load: a store does
    not report something that is true only of an earlier load.
    """

    finished_recving: tuple[RequestId, ...] = ()
    """Requests whose asynchronous loads have ended, with or without invalid blocks: nothing is
    written to their blocks from now on."""
    finished_sending: tuple[RequestId, ...] = ()
    """Finished requests whose blocks the store has read."""
    invalid_block_ids: tuple[BlockId, ...] = ()
    """Blocks that could not be loaded: of a request with an asynchronous load, also after its end,
    or of a load of the plan that is committed. Blocks of a local hit are not part of a load.

    They are processed before the rows of that model output, then ended loads, then reads.
    `kv_load_failure_policy` decides what happens. A request that was preempted while the plan was
    in flight has a failed load only if its row samples: its computed tokens are gone anyway."""


NO_TRANSFERS: Final = KVTransfers()
"""A worker has nothing to report."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of a finished request that a transfer still reads or writes (P17).

    A request that finished without any block has none.
    """

    request_id: RequestId
    block_tables: BlockTables
    """Block tables per group, as they were when it finished."""
    is_recving: bool = False
    """Whether an asynchronous load of it has not ended."""
    is_sending: bool = False
    """Whether the store reads them."""


@dataclass(frozen=True, slots=True)
class DeferredFree:
    """Blocks that were released while a frame in flight reads or writes them (P17).

    They become free when that frame is committed: a store could write to them earlier, and nothing
    orders a store after the frame. vLLM calls them `deferred_frees`.
    """

    frame_id: FrameId
    """The frame in flight whose commit frees them."""
    block_ids: tuple[BlockId, ...]
    """Blocks in the order of the table, group by group; without null blocks."""
