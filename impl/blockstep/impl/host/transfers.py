"""Transfers: what a store offers, which loads are under way, and blocks that outlive requests.

A machine of its own: it knows requests by their ids, and no queue, table or pool. Who is parked is
told by the status of a request; here is whose load has come.
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
    """What is under way between the pool and a store (P17 to P19)."""

    def __init__(self) -> None:
        self.offers: dict[RequestId, KVOffer] = {}
        """Of unfinished requests; of one that is not here the store has and wants nothing."""
        self.received: set[RequestId] = set()
        """Parked requests whose load has come to its end."""
        self.parked_as: dict[RequestId, Status] = {}
        """By parked request: the status that it had."""
        self.unsettled: dict[RequestId, FrameId] = {}
        """Running ones whose load is part of this frame, which is in flight."""
        self.loads: dict[FrameId, tuple[KVLoad, ...]] = {}
        """Of frames in flight: what is loaded before their rows read it, in order."""
        self.held: dict[RequestId, HeldBlocks] = {}
        """By ended request: its blocks, of which a transfer has not come to its end."""
        self.deferred_frees: list[DeferredFree] = []
        """Blocks that are free once their frame is answered, in the order of being given up."""
        self.last_answered: FrameId = -1
        """The last frame that was answered, or is being answered; -1 before the first."""
        self.queries = 0
        """Tokens behind the local hit of who was given blocks after asking."""
        self.hits = 0
        """Tokens of those that were to be loaded."""

    def take_offer(self, offer: KVOffer) -> None:
        """From now on the store answers this about an unfinished request."""
        if offer == KVOffer(offer.request_id):
            self.offers.pop(offer.request_id, None)
        else:
            self.offers[offer.request_id] = offer

    def has_no_answer(self, request: Request) -> bool:
        """Whether the store does not know yet; one that reads no prefix does not ask."""
        offer = self._find_offer(request)
        return offer is not None and offer.num_tokens is None

    def find_load(self, request: Request, num_hit: int, num_known: int) -> tuple[int, bool]:
        """Tokens that are loaded behind a local hit, and whether they come later than the step.

        The last known token is computed in any case: what is sampled is sampled behind it.
        """
        offer = self._find_offer(request)
        if offer is None or offer.num_tokens is None:
            return 0, False
        num_tokens = min(offer.num_tokens, num_known - 1) - num_hit
        return (num_tokens, offer.is_async) if num_tokens > 0 else (0, False)

    def count(self, request: Request, num_asked: int, num_loaded: int) -> None:
        """A request has been given blocks, which may have asked for so many tokens (P21)."""
        if not request.skip_reading_prefix_cache:
            self.queries += num_asked
            self.hits += num_loaded

    def open_frame(self, frame_id: FrameId, loads: Sequence[KVLoad]) -> None:
        """A plan with these loads is issued."""
        at_once = tuple([load for load in loads if not load.is_async])
        if at_once:
            self.loads[frame_id] = at_once

    def park(self, request_id: RequestId, status: Status) -> None:
        """The load of a request takes longer than a step."""
        self.parked_as[request_id] = status

    def unpark(self, request_id: RequestId) -> Status:
        """A parked request has its status back."""
        self.received.discard(request_id)
        return self.parked_as.pop(request_id)

    def end(self, request_id: RequestId, block_tables: BlockTables) -> bool:
        """A request has ended; whether its blocks stay held (P17)."""
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
        """One direction has come to its end, if it was open; what nobody holds any more."""
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
        """Keep blocks that nobody needs any more from the pool until a frame is answered (P17)."""
        if blocks:
            self.deferred_frees.append(DeferredFree(frame_id, tuple(blocks)))

    def take_deferred(self, frame_id: FrameId) -> list[tuple[BlockId, ...]]:
        """The blocks that waited for a frame, which wait no longer."""
        due = [entry.block_ids for entry in self.deferred_frees if entry.frame_id == frame_id]
        if due:
            self.deferred_frees = [one for one in self.deferred_frees if one.frame_id != frame_id]
        return due

    def awaits_any(self) -> bool:
        """Whether a load or a hold has not come to its end."""
        return bool(self.held) or not self.parked_as.keys() <= self.received

    def snapshot(self) -> TransfersSnapshot:
        """Its canonical state."""
        return TransfersSnapshot(
            offers=tuple([offer for _, offer in sorted(self.offers.items())]),
            received=tuple(sorted(self.received)),
            unsettled=tuple(sorted(self.unsettled)),
            held=tuple([held for _, held in sorted(self.held.items())]),
            deferred_frees=tuple(self.deferred_frees),
        )

    def _find_offer(self, request: Request) -> KVOffer | None:
        """What the store answers a request that asks."""
        if request.skip_reading_prefix_cache:
            return None
        return self.offers.get(request.request_id)


def find_valid(
    block_tables: BlockTables,
    firsts: Sequence[int],
    block_sizes: Sequence[int],
    invalid: frozenset[int],
) -> int | None:
    """Leading tokens that are there in all groups; None if no loaded block is invalid.

    Args:
        block_tables: of each group, up to the last block that is loaded.
        firsts: of each group, the first place of a loaded block.
        block_sizes: of each group, in tokens.
        invalid: blocks that could not be loaded.
    """
    broken = [
        index * size
        for table, first, size in zip(block_tables, firsts, block_sizes, strict=True)
        for index, block in enumerate(table[first:], first)
        if block in invalid
    ]
    return min(broken, default=None)
