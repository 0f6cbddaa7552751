"""KV transfer: a store from which KV is loaded, and which may hold blocks of finished requests.

`transfers` is the machine, `loads` what waiting requests load, `reports` what workers report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec import idle
from blockstep.spec.copies import replace
from blockstep.spec.core import admission, block_pool, commit, endings, lifecycle
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.requests import Frame, RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features import reclaim, resets
from blockstep.spec.features.kv_transfer import loads, reports
from blockstep.spec.features.kv_transfer.transfers import (
    NO_OFFERS,
    TRANSFERS,
    Transfers,
    hold_ended,
    is_moving,
    is_under_way,
)
from blockstep.spec.vocabulary import (
    Config,
    FrameId,
    KVOffer,
    RejectCode,
    Rejected,
    RequestId,
    Reset,
    ResetDone,
    Status,
)


def has_store(config: Config) -> bool:
    """Whether there is a store. Source: vLLM 0.19.1 `KVTransferConfig`; P17."""
    return config.kv_connector


# Blocks of requests.


def get_fence(config: Config, frames: Sequence[Frame], request_id: RequestId) -> FrameId | None:
    """Return the newest frame in flight with a row of a request, whose commit its blocks wait for.

    A store is not ordered after frames: it could load KV into a block, and the frame then
    overwrites it, or reads what was loaded for another request. So blocks wait whatever released
    them: a finish, a preemption, a sliding window, a session that stopped or was reclaimed, the end
    of a transfer. None if no frame has a row of the request, or no load can begin before the only
    frame in flight is committed. Source: upstream #45357, #47728, #48481; vLLM 0.33.0
    `_request_blocks_can_be_freed`, which waits for the newest of all frames; P17.
    """
    if config.max_frames_in_flight == 1:
        return None
    for frame in reversed(frames):
        if any(row.request_id == request_id for row in frame.rows):
            return frame.frame_id
    return None


def get_id_problem(state: State, request_id: RequestId) -> Rejected | None:
    """Return why no request can have this id now: a transfer may hold blocks of the last one.

    Source: P13, P17.
    """
    problem = lifecycle.get_id_problem(state, request_id)
    if problem is None and request_id in TRANSFERS.of(state).held:
        detail = f"a transfer holds blocks of finished {request_id!r}; report its end first"
        return Rejected(RejectCode.REQUEST_IN_FLIGHT, detail)
    return problem


def get_released(state: State, request: RequestState) -> State:
    """Return the state after a finished request released its blocks, unless a transfer holds them.

    Source: vLLM 0.19.1 `_free_request`; P1, P17.
    """
    hold = state.rules[get_held_at_end]
    pool, transfers, request = hold(state, state.pool, TRANSFERS.of(state), request)
    state = TRANSFERS.put(replace(state, pool=pool), transfers)
    is_held = request.request_id in transfers.held
    return state if is_held else endings.get_released(state, request)


def get_held_at_end(
    state: State, pool: Pool, transfers: Transfers, request: RequestState
) -> tuple[Pool, Transfers, RequestState]:
    """Return pool, transfers and a request that finishes with a store, which may hold its blocks.

    Source: vLLM 0.19.1 `_free_request`, `request_finished`; P17.
    """
    del state
    return pool, hold_ended(transfers, request.request_id, request.block_tables), request


# The loop, and resets.


def has_work(state: State) -> bool:
    """Whether a further plan may do anything, or the end of a transfer is awaited.

    Upstream does not count transfers: a loop then forgets a finished request whose blocks a store
    reads, and the blocks are never freed. Source: vLLM 0.19.1 `has_requests`; P10, P17.
    """
    return has_transfers(state) or idle.has_work(state)


def has_transfers(state: State) -> bool:
    """Whether the end of a load, or of a hold, is awaited. Source: P17."""
    moving = TRANSFERS.of(state)
    return bool(moving.held) or any(is_under_way(moving, name) for name in sorted(moving.parked))


def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
    """Empty the prefix cache, unless transfers are under way, whose blocks cannot be released.

    With `reset_connector` the store's offers are removed, too. Source: vLLM 0.19.1
    `reset_connector_cache`; P17, P25.
    """
    if state.rules[is_awaiting_transfers](state, resets.is_idle(state)):
        return state, ResetDone(False)
    of_pool = replace(reset, reset_connector=False)
    state, done = resets.process_reset(state, of_pool)
    if done.success and reset.reset_connector:
        state = TRANSFERS.put(state, replace(TRANSFERS.of(state), offers=NO_OFFERS))
    return state, done


def is_awaiting_transfers(state: State, is_idle: bool) -> bool:
    """Whether a reset is refused because transfers are under way.

    `is_idle`: whether no block is held. Source: P17, P25.
    """
    del is_idle
    return is_moving(TRANSFERS.of(state))


# Every state.


def is_every_load_of_who_is_parked(state: State) -> bool:
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
    planned = {
        load.request_id: load for frame in state.frames for load in loads.FRAME_LOADS.of(frame)
    }
    for name, request in sorted(state.requests.items()):
        is_parked = name in TRANSFERS.of(state).parked
        if not request.is_unsettled:
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


def is_every_hold_of_somebody_gone(state: State) -> bool:
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


def process_reset_without_store(state: State, reset: Reset) -> tuple[State, ResetDone]:
    """Empty the prefix cache; with `reset_connector` nothing happens. Source: P25."""
    done = (state, ResetDone(False))
    return done if reset.reset_connector else resets.process_reset(state, reset)


def has_no_store(config: Config) -> bool:
    """Whether there is no store. Source: vLLM 0.19.1 `KVTransferConfig`; P17."""
    return not config.kv_connector


ABSENT: Final = Feature(
    "no_store", has_no_store, instead={resets.process_reset: process_reset_without_store}
)
FEATURE: Final = Feature(
    "kv_transfer",
    has_store,
    Hooks(
        hits=(loads.look_in_store,),
        stuck=(loads.process_received_behind,),
        admits=(loads.process_admitted,),
        fields=(loads.tell_transfers,),
        frames=(loads.fill_loads,),
    ),
    instead={
        block_pool.get_fence: get_fence,
        admission.process_gates: loads.process_trial,
        reclaim.list_queued: loads.list_queued,
        reclaim.process_gift: loads.process_gift,
        commit.get_committed: reports.get_committed,
        endings.get_released: get_released,
        lifecycle.get_id_problem: get_id_problem,
        resets.process_reset: process_reset,
        idle.has_work: has_work,
    },
    invariants=(
        is_every_load_of_who_is_parked,
        is_every_load_unpublished,
        is_every_hold_of_somebody_gone,
        is_every_offer_of_an_unfinished_request,
    ),
)
