"""Transfers: a store's offers, its loads, and its holds on blocks of finished requests.

    offer    nothing, no answer yet, or a number of tokens, loaded at once or asynchronously
    load     asynchronous, of a waiting request: under way, then received
    hold     on blocks of a finished request that are written (recving), or read (sending), or both

A state machine of its own (architecture D11): it knows ids and blocks, and no request. The store
may be as late and as wrong as it likes: a report about a request of which none is expected changes
nothing (P18). Each hold has an owner and an end: a load or a read. The blocks of a finished request
are free when the last of its holds has ended (P17).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.core.parts import Part
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    BlockTables,
    HeldBlocks,
    KVLoad,
    KVOffer,
    RequestId,
    Status,
)

NO_OFFERS: Final[FrozenMap[RequestId, KVOffer]] = FrozenMap()
NOTHING_HELD_BACK: Final[FrozenMap[RequestId, HeldBlocks]] = FrozenMap()


@dataclass(frozen=True, slots=True)
class Load:
    """An asynchronous load that a request waits for."""

    status: Status
    """Status of the request before the load, which it gets back."""
    is_received: bool = False
    """Whether the load has ended."""


NONE_PARKED: Final[FrozenMap[RequestId, Load]] = FrozenMap()


@wide_dataclass(frozen=True, slots=True)
class Transfers:
    """Offers, loads and holds."""

    offers: FrozenMap[RequestId, KVOffer] = NO_OFFERS
    """Offers for unfinished requests, without those equal to `KVOffer(request_id)`."""
    parked: FrozenMap[RequestId, Load] = NONE_PARKED
    """Asynchronous loads, by request."""
    held: FrozenMap[RequestId, HeldBlocks] = NOTHING_HELD_BACK
    """Holds on blocks of finished requests."""


NO_STORE: Final = Transfers()
TRANSFERS: Final = Part("kv_transfer", NO_STORE)
"""The transfers of a state, or of a step."""
FRAME_LOADS: Final = Part[tuple[KVLoad, ...]]("loads", ())
"""The loads of a frame that end before its rows read them, in the order of the plan."""


# Offers.


def compute_num_external(offer: KVOffer, num_known: int, num_local: int) -> int:
    """Return the tokens to load after a request's local hit, of those that the store has.

    The last known token is never loaded: it is computed, because a token must be sampled after it,
    and published blocks are not written. Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P2,
    P13.
    """
    assert offer.num_tokens is not None, "the store has answered"
    return max(min(offer.num_tokens, num_known - 1) - num_local, 0)


def get_offer(transfers: Transfers, request_id: RequestId) -> KVOffer:
    """Return the store's answer about a request. Source: vLLM 0.19.1
    `get_num_new_matched_tokens`."""
    return transfers.offers.get(request_id) or KVOffer(request_id)


def take_offer(transfers: Transfers, offer: KVOffer) -> Transfers:
    """Replace the offer for a request. Source: architecture D12."""
    offers = transfers.offers.without(offer.request_id)
    if offer != KVOffer(offer.request_id):
        offers = offers.having(offer.request_id, offer)
    return replace(transfers, offers=offers)


# Loads.


def is_under_way(transfers: Transfers, request_id: RequestId) -> bool:
    """Whether the store may still write for a request. Source: P17."""
    return request_id in transfers.parked and not is_received(transfers, request_id)


def is_received(transfers: Transfers, request_id: RequestId) -> bool:
    """Whether a request waits and its asynchronous load has ended. Source: P17."""
    load = transfers.parked.get(request_id)
    return load is not None and load.is_received


def is_moving(transfers: Transfers) -> bool:
    """Whether blocks are written or read that cannot be released. Source: P17, P25."""
    return bool(transfers.held) or not all(load.is_received for load in transfers.parked.values())


def compute_num_valid(
    tables: BlockTables,
    firsts: Sequence[int],
    block_sizes: Sequence[int],
    invalid: Collection[BlockId],
) -> int | None:
    """Return the leading tokens of a load before its first invalid block, None if all were loaded.

    Per group: a table, the index of its first loaded block, its block size. The least over all
    groups counts; null blocks are not loaded. Source: vLLM 0.19.1
    `_update_requests_with_invalid_blocks`; P5, P19.
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
    """Forget a finished request, except for blocks that are still written or read.

    Source: vLLM 0.19.1 `_free_request`, `request_finished`; P17.
    """
    is_recving = is_under_way(transfers, request_id)
    is_sending = get_offer(transfers, request_id).delays_free
    held = transfers.held
    if (is_recving or is_sending) and any(tables):
        held = held.having(request_id, HeldBlocks(request_id, tables, is_recving, is_sending))
    offers, parked = transfers.offers.without(request_id), transfers.parked.without(request_id)
    return Transfers(offers, parked, held)


def end_transfer(
    transfers: Transfers, request_id: RequestId, is_recving: bool
) -> tuple[Transfers, BlockTables]:
    """End the load of a request, or the read of its blocks.

    Also returns the tables of a finished request that nothing holds any more, to be freed. Source:
    vLLM 0.19.1 `_update_from_kv_xfer_finished`; P17, P18.
    """
    if is_recving and is_under_way(transfers, request_id):
        load = replace(transfers.parked[request_id], is_received=True)
        return replace(transfers, parked=transfers.parked.having(request_id, load)), ()
    entry = transfers.held.get(request_id)
    if entry is None:
        return transfers, ()
    entry = replace(entry, is_recving=False) if is_recving else replace(entry, is_sending=False)
    if entry.is_recving or entry.is_sending:
        return replace(transfers, held=transfers.held.having(request_id, entry)), ()
    return replace(transfers, held=transfers.held.without(request_id)), entry.block_tables
