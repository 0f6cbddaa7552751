"""Transfers: KV that comes from a store beside the pool, or goes there, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blockstep.spec.vocabulary.request import BlockId, BlockTables, FrameId, RequestId


@dataclass(frozen=True, slots=True)
class KVLoad:
    """KV of one request that the worker has a store write into blocks (vLLM: what a connector's
    metadata says of it)."""

    request_id: RequestId
    block_ids: BlockTables
    """Per group: the block table of the request, from its first block to the last that is loaded.
    Null blocks stand for what is not attended any more."""
    num_computed_tokens: int
    """Tokens that a local hit serves: what is loaded begins behind them."""
    num_external_tokens: int
    """Tokens that are loaded; at least 1."""
    is_async: bool = False
    """False: it is there before the first row of this step reads it, or its blocks are reported as
    invalid beside the answer to this plan. True: it comes at any later time, and is reported."""


@dataclass(frozen=True, slots=True)
class KVSave:
    """KV of a request that is preempted, which the worker has a store keep.

    It is read before anything else is done to a block in the step, so that the blocks are free at
    once. Whether the store keeps it, and for how long, it says when it is asked (`KVOffer`).
    Source: seed 002 "Swap-Out", made sound.
    """

    request_id: RequestId
    block_ids: BlockTables
    """Per group: its block table up to `num_tokens`, as it was before the step. Null blocks stand
    for what is not attended any more."""
    num_tokens: int
    """Its leading tokens, known and computed, that are saved: full blocks of every group."""


@dataclass(frozen=True, slots=True)
class KVTransfers:
    """What a worker reports of transfers.

    No signal raises: what is late, comes twice, or is about nobody known changes nothing (P18). A
    report of somebody whose load is under way is about that load: a store does not say of one load
    what is true of an earlier one only.
    """

    finished_recving: tuple[RequestId, ...] = ()
    """Whose asynchronous loads have come to their end, whether or not blocks of them were invalid:
    nothing is written to their blocks from now on."""
    finished_sending: tuple[RequestId, ...] = ()
    """Ended requests whose blocks the store has read."""
    invalid_block_ids: tuple[BlockId, ...] = ()
    """Blocks that could not be loaded: of a parked request, also once its load has come to its end,
    or of a load of the plan that is answered. Blocks of a local hit are no part of a load.

    They are taken before the rows of that answer, loads that ended behind them, then reads. What
    comes of it is `kv_load_failure_policy`'s. One that was preempted while the plan was in flight
    has a failed load only if its row samples: what it has computed is gone anyway."""


NO_TRANSFERS: Final = KVTransfers()
"""A worker has nothing to report."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of a request that has ended, which a transfer reads or writes still (P17).

    Who ended without any block leaves none.
    """

    request_id: RequestId
    block_tables: BlockTables
    """Per group, as they were when it ended."""
    is_recving: bool = False
    """Whether an asynchronous load of it has not come to its end."""
    is_sending: bool = False
    """Whether the store reads them."""


@dataclass(frozen=True, slots=True)
class DeferredFree:
    """Blocks that were given up while a frame in flight reads or writes them (P17).

    They are not free before that frame is answered: a store could write them earlier, and nothing
    orders a store behind the frame. vLLM calls them `deferred_frees`.
    """

    frame_id: FrameId
    """The frame in flight whose answer frees them."""
    block_ids: tuple[BlockId, ...]
    """In the order of the table, group by group; without null blocks."""
