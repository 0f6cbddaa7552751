"""Transfers: the offers of a store, the loads under way, and the blocks held for them.

This state machine knows requests by their ids, and no queue, block table or pool. A request that
waits for its load has its own status; this class keeps which loads have finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.spec.vocabulary import (
    BlockId,
    BlockTables,
    DeferredFree,
    FrameId,
    HeldBlocks,
    KVLoad,
    KVOffer,
    Request,
    RequestId,
    Status,
    TransfersSnapshot,
)


class Transfers:
    """The transfers between the pool and a store (P17 to P19).

    `has_states`: whether some groups have states, of which the store has one for each offer.
    """

    def __init__(self, has_states: bool = False) -> None:
        self.has_states = has_states
        self.offers: dict[RequestId, KVOffer] = {}
        """The offers for unfinished requests; without one, the store neither loads nor stores KV.
        """
        self.received: set[RequestId] = set()
        """The requests that waited for a load which has finished."""
        self.parked_as: dict[RequestId, Status] = {}
        """The status that each request which waits for its load had before."""
        self.unsettled: dict[RequestId, FrameId] = {}
        """The running requests whose load belongs to this frame, which is in flight."""
        self.loads: dict[FrameId, tuple[KVLoad, ...]] = {}
        """For frames in flight, the loads that finish before their rows run, in order."""
        self.held: dict[RequestId, HeldBlocks] = {}
        """The blocks of finished requests that a transfer still uses."""
        self.deferred_frees: list[DeferredFree] = []
        """Blocks that become free when their frame is committed, in the order in which they were
        given up."""
        self.last_answered: FrameId = -1
        """The last frame that was committed, or is being committed; -1 before the first."""
        self.queries = 0
        """Tokens after the local hit, summed over admitted requests that asked the store."""
        self.hits = 0
        """The part of these tokens that the store had."""

    def take_offer(self, offer: KVOffer) -> None:
        """Set the store's offer for an unfinished request."""
        if offer == KVOffer(offer.request_id):
            self.offers.pop(offer.request_id, None)
        else:
            self.offers[offer.request_id] = offer

    def has_no_answer(self, request: Request) -> bool:
        """Return whether the store does not know yet; a request that reads no cached prefix does
        not ask."""
        offer = self._find_offer(request)
        return offer is not None and offer.num_tokens is None

    def find_load(self, request: Request, num_hit: int, num_known: int) -> tuple[int, bool]:
        """Return the tokens loaded after a local hit, and whether the load takes longer than the
        step.

        The last known token is always computed, as the next token is sampled from it. A state is
        that after the last token of an offer, so with states a longer offer cannot be used (P3).
        """
        offer = self._find_offer(request)
        if offer is None or offer.num_tokens is None:
            return 0, False
        if self.has_states and offer.num_tokens >= num_known:
            return 0, False
        num_tokens = min(offer.num_tokens, num_known - 1) - num_hit
        return (num_tokens, offer.is_async) if num_tokens > 0 else (0, False)

    def count(self, request: Request, num_asked: int, num_loaded: int) -> None:
        """Count the store's queries and hits for a request that was given blocks (P21)."""
        if not request.skip_reading_prefix_cache:
            self.queries += num_asked
            self.hits += num_loaded

    def open_frame(self, frame_id: FrameId, loads: Sequence[KVLoad]) -> None:
        """Keep the loads of a plan that finish within its step."""
        at_once = tuple([load for load in loads if not load.is_async])
        if at_once:
            self.loads[frame_id] = at_once

    def park(self, request_id: RequestId, status: Status) -> None:
        """Park a request whose load takes longer than a step."""
        self.parked_as[request_id] = status

    def unpark(self, request_id: RequestId) -> Status:
        """Unpark a request and return the status that it had."""
        self.received.discard(request_id)
        return self.parked_as.pop(request_id)

    def end(self, request_id: RequestId, block_tables: BlockTables) -> bool:
        """Take a finished request; return whether a transfer keeps its blocks held (P17)."""
        offer = self.offers.pop(request_id, None)
        is_recving = request_id in self.parked_as and request_id not in self.received
        self.parked_as.pop(request_id, None)
        is_sending = offer is not None and offer.delays_free
        self.received.discard(request_id)
        self.unsettled.pop(request_id, None)
        if not any(block_tables) or not (is_recving or is_sending):
            return False
        self.held[request_id] = HeldBlocks(request_id, block_tables, is_recving, is_sending)
        return True

    def release(self, request_id: RequestId, is_recving: bool) -> BlockTables:
        """End the load or the store of a finished request's blocks; return the blocks that are free
        now."""
        held = self.held.get(request_id)
        if held is None:
            return ()
        held = replace(held, is_recving=False) if is_recving else replace(held, is_sending=False)
        if held.is_recving or held.is_sending:
            self.held[request_id] = held
            return ()
        del self.held[request_id]
        return held.block_tables

    def defer(self, frame_id: FrameId, blocks: Sequence[BlockId]) -> None:
        """Keep blocks out of the pool until a frame is committed (P17)."""
        if blocks:
            self.deferred_frees.append(DeferredFree(frame_id, tuple(blocks)))

    def take_deferred(self, frame_id: FrameId) -> list[tuple[BlockId, ...]]:
        """Return the blocks that waited for a frame, and forget them."""
        due = [entry.block_ids for entry in self.deferred_frees if entry.frame_id == frame_id]
        if due:
            self.deferred_frees = [one for one in self.deferred_frees if one.frame_id != frame_id]
        return due

    def awaits_any(self) -> bool:
        """Return whether a load or a transfer of held blocks has not finished."""
        return bool(self.held) or not self.parked_as.keys() <= self.received

    def snapshot(self) -> TransfersSnapshot:
        """Return its canonical state."""
        return TransfersSnapshot(
            offers=tuple([offer for _, offer in sorted(self.offers.items())]),
            received=tuple(sorted(self.received)),
            unsettled=tuple(sorted(self.unsettled)),
            held=tuple([held for _, held in sorted(self.held.items())]),
            deferred_frees=tuple(self.deferred_frees),
        )

    def _find_offer(self, request: Request) -> KVOffer | None:
        """Return the store's offer if the request reads cached prefixes, else None."""
        if request.skip_reading_prefix_cache:
            return None
        return self.offers.get(request.request_id)


def find_valid(
    block_tables: BlockTables,
    firsts: Sequence[int],
    block_sizes: Sequence[int],
    invalid: frozenset[int],
) -> int | None:
    """Return the leading tokens that are valid in all groups; None if no loaded block is invalid.

    Args:
        block_tables: for each group, the blocks up to the last one that is loaded.
        firsts: for each group, the index of the first loaded block.
        block_sizes: for each group, the block size in tokens.
        invalid: the blocks that could not be loaded.
    """
    broken = [
        index * size
        for table, first, size in zip(block_tables, firsts, block_sizes, strict=True)
        for index, block in enumerate(table[first:], first)
        if block in invalid
    ]
    return min(broken, default=None)
