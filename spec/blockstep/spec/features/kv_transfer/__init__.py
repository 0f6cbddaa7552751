"""KV transfer: a store from which KV is loaded, and which may hold blocks of finished requests.

`transfers` is the machine, `loads` what waiting requests load. This module has what a worker
reports, and what a store changes besides.

    loaded    |  hit  |  there  | invalid |  there  |      of a load that failed in the middle
    after     |    computed     | computed again, or its request finishes with an error

No request computes on KV that was not loaded, or hits it (P19): neither one that waits for an
asynchronous load, nor one whose load is part of a frame. A report about any other request changes
nothing (P18).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec import idle
from blockstep.spec.copies import replace
from blockstep.spec.core import admission, block_pool, commit, endings, lifecycle
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.requests import Frame, RequestState, list_rows_in_flight
from blockstep.spec.core.schedule import create_step
from blockstep.spec.core.state import State
from blockstep.spec.features import reclaim, resets
from blockstep.spec.features.kv_transfer import loads
from blockstep.spec.features.kv_transfer.invariants import INVARIANTS
from blockstep.spec.features.kv_transfer.loads import FRAME_LOADS, get_first_blocks, settle_slots
from blockstep.spec.features.kv_transfer.transfers import (
    NO_OFFERS,
    TRANSFERS,
    compute_num_valid,
    end_transfer,
    hold_ended,
    is_moving,
    take_offer,
)
from blockstep.spec.features.structured_output import get_error_row
from blockstep.spec.features.structured_output.masks import drop_row
from blockstep.spec.vocabulary import (
    Ack,
    BlockId,
    Commit,
    Config,
    FrameId,
    KVLoad,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    OutputRow,
    Outputs,
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


# Reports.


def process_kv_offer(state: State, offer: KVOffer) -> tuple[State, Ack]:
    """Store the store's answer about a request, if there is a store and such a request.

    Source: vLLM 0.19.1 `get_num_new_matched_tokens`; architecture D12; P18.
    """
    if not state.config.kv_connector or offer.request_id not in state.requests:
        return state, Ack()
    return TRANSFERS.put(state, take_offer(TRANSFERS.of(state), offer)), Ack()


def process_transfers_reported(state: State, transfers: KVTransfers) -> tuple[State, Outputs]:
    """Process a report without a model output. Source: vLLM 0.19.1 `update_from_output`; P17,
    P18."""
    if not state.config.kv_connector:
        return state, Outputs()
    # requests
    state, failed = state.rules[get_failures](state, transfers.invalid_block_ids, None)
    state, rows = state.rules[get_reported](state, transfers, failed)
    # observe
    state, changes = endings.take_changes(state)
    return state, Outputs(rows, changes)


def get_reported(
    state: State, transfers: KVTransfers, failed: Sequence[RequestId]
) -> tuple[State, tuple[OutputRow, ...]]:
    """Finish failed requests, then end the finished transfers; return state and output rows.

    Source: vLLM 0.19.1 `update_from_output`; P13, P17, P18.
    """
    failed = [name for name in dict.fromkeys(failed) if name in state.requests]
    rows = tuple([get_error_row(state.requests[name]) for name in failed])
    state = endings.get_ended(state, failed)
    moving, pool = TRANSFERS.of(state), state.pool
    ends = [(name, True) for name in transfers.finished_recving]
    ends += [(name, False) for name in transfers.finished_sending]
    for name, is_recving in ends:
        moving, tables = state.rules[end_transfer](moving, name, is_recving)
        fence = state.rules[block_pool.get_fence](state.config, state.frames, name)
        pool = block_pool.give_up_blocks(pool, tables, state.rules, fence)
    return TRANSFERS.put(replace(state, pool=pool), moving), rows


def get_committed(state: State, answer: Commit) -> tuple[State, list[OutputRow]]:
    """Return the state after a commit with a report of a store, and what it delivers.

    Before the rows are processed, the loads of the frame are confirmed, or have failed.
    Source: vLLM 0.33.0 `update_from_output`; P13, P17, P19.
    """
    invalid = answer.transfers.invalid_block_ids
    state, failed = state.rules[get_failures](state, invalid, state.frames[0])
    state, outputs = commit.get_committed(state, answer)
    state, rows = state.rules[get_reported](state, answer.transfers, failed)
    return state, [*outputs, *rows]


# Failures.


def get_failures(
    state: State, invalid: Sequence[BlockId], frame: Frame | None
) -> tuple[State, tuple[RequestId, ...]]:
    """Process blocks that could not be loaded; return the state, and requests that fail by policy.

    They concern requests that wait for asynchronous loads, and those of the oldest frame, `frame`,
    if it is being committed: its loads are confirmed, or the requests go back. Source: vLLM 0.19.1
    `_handle_invalid_blocks`, `KVTransferConfig`; P19.
    """
    config = state.config
    fails = config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL
    state, parked = get_parked_cut(state, invalid)
    failed = parked if fails else []
    for load in FRAME_LOADS.of(frame) if frame is not None else ():
        if not is_awaited(state, load):
            continue
        request = state.requests[load.request_id]
        firsts = [load.num_computed_tokens // size for size in config.block_sizes]
        num_valid = compute_num_valid(load.block_ids, firsts, config.block_sizes, invalid)
        if num_valid is None:
            if request.status is Status.RUNNING:
                state = get_settled(state, request, request.num_computed_tokens)
            continue
        if fails:
            failed.append(load.request_id)
        else:
            state = get_gone_back(state, request, num_valid)
        frames = tuple([drop_row(other, load.request_id) for other in state.frames])
        state = replace(state, frames=frames)
    return state, tuple(failed)


def get_parked_cut(state: State, invalid: Sequence[BlockId]) -> tuple[State, list[RequestId]]:
    """Limit the computed tokens of requests with asynchronous loads to those that were loaded.

    With windows none are left: null blocks take the places of skipped blocks, and a row that starts
    further back would attend to these. Also returns these requests. Source: vLLM 0.19.1
    `_handle_invalid_blocks`; P19.
    """
    config, requests, parked = state.config, state.requests, TRANSFERS.of(state).parked
    cut: list[RequestId] = []
    queued = (*state.skipped_waiting, *state.waiting) if invalid and parked else ()
    for request in [requests[name] for name in queued if name in parked]:
        settled = [holding.num_cached_blocks for holding in request.holdings]
        tables = get_first_blocks(config, request, request.num_computed_tokens)
        num_valid = compute_num_valid(tables, settled, config.block_sizes, invalid)
        if num_valid is not None:
            after = replace(request, num_computed_tokens=0 if config.has_windows else num_valid)
            requests = requests.having(request.request_id, after)
            cut.append(request.request_id)
    return replace(state, requests=requests), cut


def is_awaited(state: State, load: KVLoad) -> bool:
    """Whether a request runs on this load of the oldest frame, or has tokens of frames in flight.

    It may have been preempted since, and even admitted with another load, or none, if no frame
    samples for it. Source: P13, P19.
    """
    name, request = load.request_id, state.requests.get(load.request_id)
    if request is None:
        return False
    if request.status is not Status.RUNNING:
        return any(row.samples for row in list_rows_in_flight(state.frames, name))
    later = [other.request_id for frame in state.frames[1:] for other in FRAME_LOADS.of(frame)]
    return request.is_unsettled and name not in later


def get_settled(state: State, request: RequestState, num_there: int) -> State:
    """Return the state with a load confirmed, up to a number of tokens. Source: P4, P19."""
    pool, request = settle_slots(state.config, state.pool, request, num_there, state.rules)
    requests = state.requests.having(request.request_id, request)
    return replace(state, pool=pool, requests=requests)


def get_gone_back(state: State, request: RequestState, num_valid: int) -> State:
    """Roll a request back to its loaded tokens; tokens that frames sample for it do not count.

    A preempted one computes everything again, anyway. Source: vLLM 0.19.1
    `_update_requests_with_invalid_blocks`; P12, P13, P19.
    """
    name, is_running = request.request_id, request.status is Status.RUNNING
    request = replace(request, num_output_placeholders=0)
    if is_running and not state.config.has_windows:
        request = replace(request, spec_token_ids=(), is_prefill_chunk=True)
        return get_settled(state, replace(request, num_computed_tokens=num_valid), num_valid)
    state = replace(state, requests=state.requests.having(name, request))
    return get_preempted_alone(state, name) if is_running else state


def get_preempted_alone(state: State, request_id: RequestId) -> State:
    """Preempt one running request between two plans.

    The next plan lists no victim, and resumes the request when it is admitted. Its blocks do not
    wait for the oldest frame, which is being committed. Source: P17, P19, P26.
    """
    step = create_step(replace(state, frames=state.frames[1:]))
    process_preemption(step, step.running.index(request_id))
    known = tuple([name for name in state.prev_scheduled_req_ids if name != request_id])
    return step.get_state(prev_scheduled_req_ids=known, frames=state.frames)


# Blocks of requests.


def get_fence(config: Config, frames: Sequence[Frame], request_id: RequestId) -> FrameId | None:
    """Return the newest frame in flight with a row of a request, whose commit its blocks wait for.

    A store is not ordered after frames: it could load KV into a block, and the frame then
    overwrites it, or reads what was loaded for another request. So blocks wait whatever released
    them. None if no frame has a row of the request, or no load can begin before the only frame in
    flight is committed. Source: upstream #45357, #47728, #48481; vLLM 0.33.0
    `_request_blocks_can_be_freed`; P17.
    """
    if config.max_frames_in_flight == 1:
        return None
    rows = [(frame.frame_id, row) for frame in reversed(frames) for row in frame.rows]
    return next((frame_id for frame_id, row in rows if row.request_id == request_id), None)


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

    Source: vLLM 0.19.1 `_free_request`, `request_finished`; P1, P17.
    """
    transfers = hold_ended(TRANSFERS.of(state), request.request_id, request.block_tables)
    state = TRANSFERS.put(state, transfers)
    is_held = request.request_id in transfers.held
    return state if is_held else endings.get_released(state, request)


# The loop, and resets.


def has_work(state: State) -> bool:
    """Whether a further plan may do anything, or the end of a transfer is awaited: a loop that
    slept would never free the blocks of a finished request that a store reads. Source: vLLM 0.19.1
    `has_requests`; P10, P17.
    """
    return is_moving(TRANSFERS.of(state)) or idle.has_work(state)


def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
    """Empty the prefix cache, unless transfers are under way, whose blocks cannot be released.

    With `reset_connector` the store's offers are removed, too. Source: vLLM 0.19.1
    `reset_connector_cache`; P17, P25.
    """
    if state.rules[is_awaiting_transfers](state):
        return state, ResetDone(False)
    state, done = resets.process_reset(state, replace(reset, reset_connector=False))
    if done.success and reset.reset_connector:
        state = TRANSFERS.put(state, replace(TRANSFERS.of(state), offers=NO_OFFERS))
    return state, done


def is_awaiting_transfers(state: State) -> bool:
    """Whether a reset is refused because transfers are under way. Source: P17, P25."""
    return is_moving(TRANSFERS.of(state))


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
        commit.get_committed: get_committed,
        endings.get_released: get_released,
        lifecycle.get_id_problem: get_id_problem,
        resets.process_reset: process_reset,
        idle.has_work: has_work,
    },
    invariants=INVARIANTS,
)
