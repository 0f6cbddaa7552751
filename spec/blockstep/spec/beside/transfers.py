"""Transfers: what a store has of requests, what it loads for them, what it reads of ended ones.

    offer    nothing, not known yet, so many tokens at once, or so many later
    load     of who is parked for it: under way, then received
    hold     of who has ended while its blocks are written (recving), or read (sending), or both

A machine of its own (architecture D11): it knows ids and blocks, and no request. The store is as
late and as wrong as it likes: what it says of somebody of whom nothing is expected changes nothing
(P18). Each hold has an owner and an end: a load one, a read one, and the blocks of an ended request
are free when the last of its holds has ended (P17).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.maps import FrozenMap
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    BlockTables,
    HeldBlocks,
    KVOffer,
    RequestId,
    Status,
)

NO_OFFERS: Final[FrozenMap[RequestId, KVOffer]] = FrozenMap()
NOTHING_HELD_BACK: Final[FrozenMap[RequestId, HeldBlocks]] = FrozenMap()


@dataclass(frozen=True, slots=True)
class Load:
    """What somebody is parked for."""

    status: Status
    """Its own before, which comes back."""
    is_received: bool = False
    """Whether it has come to its end."""


NOBODY_PARKED: Final[FrozenMap[RequestId, Load]] = FrozenMap()


@dataclass(frozen=True, slots=True)
class Transfers:
    """What is under way between pool and store."""

    offers: FrozenMap[RequestId, KVOffer] = NO_OFFERS
    """Of unfinished requests, but for those of nothing."""
    parked: FrozenMap[RequestId, Load] = NOBODY_PARKED
    """Of those that are parked."""
    held: FrozenMap[RequestId, HeldBlocks] = NOTHING_HELD_BACK
    """Of those that have ended."""


NO_STORE: Final = Transfers()


# Offers.


def compute_num_external(num_offered: int, num_known: int, num_local: int, is_async: bool) -> int:
    """Tokens to load of a request behind its local hit, of so many that a store has.

    Never the last known one: it is computed, for something must be sampled behind it, and nobody
    writes into a block that is published. Upstream loads it, then computes it into that block.
    Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P2, P13.
    """
    del is_async
    return max(min(num_offered, num_known - 1) - num_local, 0)


def get_offer(transfers: Transfers, request_id: RequestId) -> KVOffer:
    """What the store answers about a request. Source: vLLM 0.19.1 `get_num_new_matched_tokens`."""
    return transfers.offers.get(request_id) or KVOffer(request_id)


def take_offer(transfers: Transfers, offer: KVOffer) -> Transfers:
    """With this offer instead of the one before. Source: architecture D12."""
    offers = transfers.offers.without(offer.request_id)
    if offer != KVOffer(offer.request_id):
        offers = offers.having(offer.request_id, offer)
    return replace(transfers, offers=offers)


# Loads.


def start_load(transfers: Transfers, request_id: RequestId, status: Status) -> Transfers:
    """A load is under way, for which its request is parked. Source: P17."""
    return replace(transfers, parked=transfers.parked.having(request_id, Load(status)))


def forget_load(transfers: Transfers, request_id: RequestId) -> Transfers:
    """Its request is parked no more. Source: P17."""
    return replace(transfers, parked=transfers.parked.without(request_id))


def is_under_way(transfers: Transfers, request_id: RequestId) -> bool:
    """Whether the store may still write for a request. Source: P17."""
    load = transfers.parked.get(request_id)
    return load is not None and not load.is_received


def is_received(transfers: Transfers, request_id: RequestId) -> bool:
    """Whether a request is parked and its load has come to its end. Source: P17."""
    load = transfers.parked.get(request_id)
    return load is not None and load.is_received


def is_moving(transfers: Transfers) -> bool:
    """Whether blocks are written or read that nobody can take back. Source: P17, P25."""
    return bool(transfers.held) or not all(load.is_received for load in transfers.parked.values())


def compute_num_valid(
    tables: BlockTables,
    firsts: Sequence[int],
    block_sizes: Sequence[int],
    invalid: Collection[BlockId],
) -> int | None:
    """Leading tokens of a load that are there, None if all are: up to the first invalid block.

    Per group: a table, the index of its first block that is loaded, its block size. What one group
    lacks no other makes up for; null blocks are not there to be loaded. Upstream looks at the first
    group alone, and at blocks that were not loaded, too.
    Source: vLLM 0.19.1 `_update_requests_with_invalid_blocks`; P5, P19.
    """
    ends = [
        index * size
        for table, first, size in zip(tables, firsts, block_sizes, strict=True)
        for index in range(first, len(table))
        if table[index] != NULL_BLOCK and table[index] in invalid
    ]
    return min(ends, default=None)


# Holds.


def hold_ended(transfers: Transfers, request_id: RequestId, tables: BlockTables) -> Transfers:
    """Without a request that has ended, but for the blocks that are still written or read.

    Source: vLLM 0.19.1 `_free_request`, `request_finished`; P17.
    """
    is_recving = is_under_way(transfers, request_id)
    is_sending = get_offer(transfers, request_id).delays_free
    held = transfers.held
    if (is_recving or is_sending) and any(tables):
        entry = HeldBlocks(request_id, tables, is_recving, is_sending)
        held = held.having(request_id, entry)
    offers, parked = transfers.offers.without(request_id), transfers.parked.without(request_id)
    return Transfers(offers, parked, held)


def end_recving(
    transfers: Transfers, request_id: RequestId, is_only: bool
) -> tuple[Transfers, BlockTables]:
    """A load has come to its end; and the tables that nothing holds any more, to be freed.

    Source: vLLM 0.19.1 `_update_from_kv_xfer_finished`, which stops by an error where it knows of
    no load; P17, P18.
    """
    if is_under_way(transfers, request_id):
        load = replace(transfers.parked[request_id], is_received=True)
        return replace(transfers, parked=transfers.parked.having(request_id, load)), ()
    entry = transfers.held.get(request_id)
    if entry is None:
        return transfers, ()
    return end_hold(transfers, replace(entry, is_recving=False), is_only)


def end_sending(
    transfers: Transfers, request_id: RequestId, is_only: bool
) -> tuple[Transfers, BlockTables]:
    """The store has read the blocks of an ended request; likewise. Source: P17, P18."""
    entry = transfers.held.get(request_id)
    if entry is None:
        return transfers, ()
    return end_hold(transfers, replace(entry, is_sending=False), is_only)


def end_hold(
    transfers: Transfers, entry: HeldBlocks, is_only: bool
) -> tuple[Transfers, BlockTables]:
    """With what is left of the holds of an ended request; behind the last one its tables are given
    back. Source: P17."""
    if (entry.is_recving or entry.is_sending) and not is_only:
        return replace(transfers, held=transfers.held.having(entry.request_id, entry)), ()
    held = transfers.held.without(entry.request_id)
    return replace(transfers, held=held), entry.block_tables
