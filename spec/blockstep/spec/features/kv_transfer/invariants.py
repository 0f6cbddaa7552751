"""Invariants of transfers: what holds of loads, holds and offers in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features.kv_transfer.transfers import FRAME_LOADS, TRANSFERS
from blockstep.spec.vocabulary import NULL_BLOCK, KVOffer, Status


def is_every_load_of_a_parked_request(state: State) -> bool:
    """Exactly the requests that wait for an asynchronous load have one, with blocks. Source:
    P17."""
    parked = sorted(TRANSFERS.of(state).parked)
    waiting = [name for name in sorted(state.requests) if _is_parked(state.requests[name])]
    return parked == waiting and all(all(state.requests[name].block_tables) for name in parked)


def _is_parked(request: RequestState) -> bool:
    return request.status is Status.WAITING_FOR_REMOTE_KVS


def is_every_load_unpublished(state: State) -> bool:
    """No block of an unconfirmed load is published.

    Only loads of a frame in flight, and asynchronous ones, may be unconfirmed. Source: P4, P19.
    """
    planned = {load.request_id: load for frame in state.frames for load in FRAME_LOADS.of(frame)}
    for name, request in sorted(state.requests.items()):
        is_parked = name in TRANSFERS.of(state).parked
        if not request.has_unconfirmed_kv:
            if is_parked:
                return False
            continue
        if is_parked:
            continue
        load = planned.get(name)
        if load is None or request.status is not Status.RUNNING:
            return False
        for holding, size in zip(request.holdings, state.config.block_sizes, strict=True):
            if holding.num_cached_blocks * size > load.num_computed_tokens:
                return False
    return True


def is_every_hold_of_a_finished_request(state: State) -> bool:
    """Blocks are held only for finished requests, by a read or a write. Source: P17."""
    return all(
        name == entry.request_id
        and name not in state.requests
        and (entry.is_recving or entry.is_sending)
        and any(map(any, entry.block_tables))
        for name, entry in sorted(TRANSFERS.of(state).held.items())
    )


def is_every_offer_of_an_unfinished_request(state: State) -> bool:
    """Every offer is for an unfinished request, and says something. Source: P18."""
    return all(
        name in state.requests and offer != KVOffer(name)
        for name, offer in sorted(TRANSFERS.of(state).offers.items())
    )


def is_every_deferred_free_of_a_frame_in_flight(state: State) -> bool:
    """Deferred frees wait for a frame in flight, and exist only with a store. Source: P17."""
    frame_ids = [frame.frame_id for frame in state.frames]
    deferred_frees = state.pool.deferred_frees
    return (state.config.kv_connector or not deferred_frees) and all(
        deferred.frame_id in frame_ids
        and deferred.block_ids
        and NULL_BLOCK not in deferred.block_ids
        for deferred in deferred_frees
    )


INVARIANTS: Final[tuple[Callable[[State], bool], ...]] = (
    is_every_load_of_a_parked_request,
    is_every_load_unpublished,
    is_every_hold_of_a_finished_request,
    is_every_offer_of_an_unfinished_request,
    is_every_deferred_free_of_a_frame_in_flight,
)
