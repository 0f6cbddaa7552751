"""Reports: a worker's reports about transfers, and their effect on requests.

    loaded    |  hit  |  there  | invalid |  there  |      of a load that failed in the middle
    after     |    computed     | computed again, or its request finishes with an error

No request computes on KV that was not loaded, or hits it (P19): neither one that waits for an
asynchronous load, nor one whose load is part of a frame. A report about any other request changes
nothing (P18).
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.copies import replace
from blockstep.spec.core import commit as commit_rows
from blockstep.spec.core.block_pool import get_fence, give_up_blocks
from blockstep.spec.core.endings import get_ended, take_changes
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.requests import Frame, RequestState, list_rows_in_flight
from blockstep.spec.core.schedule import create_step
from blockstep.spec.core.slots import compute_num_blocks
from blockstep.spec.core.state import State
from blockstep.spec.features.kv_transfer.loads import FRAME_LOADS, settle_slots
from blockstep.spec.features.kv_transfer.transfers import (
    TRANSFERS,
    compute_num_valid,
    end_recving,
    end_sending,
    take_offer,
)
from blockstep.spec.features.structured_output import get_error_row
from blockstep.spec.features.structured_output.masks import drop_row
from blockstep.spec.vocabulary import (
    Ack,
    BlockId,
    Commit,
    KVLoad,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    OutputRow,
    Outputs,
    RequestId,
    Status,
)


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
    state, rows = get_reported(state, transfers, failed)
    # observe
    state, changes = take_changes(state)
    return state, Outputs(rows, changes)


def get_reported(
    state: State, transfers: KVTransfers, failed: Sequence[RequestId]
) -> tuple[State, tuple[OutputRow, ...]]:
    """Finish failed requests, then end the finished transfers; return state and output rows.

    Source: vLLM 0.19.1 `update_from_output`; P13, P17, P18.
    """
    failed = [name for name in dict.fromkeys(failed) if name in state.requests]
    rows = tuple([state.rules[get_failed_row](state.requests[name]) for name in failed])
    state = get_ended(state, failed)
    moving, pool = TRANSFERS.of(state), state.pool
    ends = [(end_recving, name) for name in transfers.finished_recving]
    ends += [(end_sending, name) for name in transfers.finished_sending]
    for end, name in ends:
        moving, tables = end(moving, name, state.rules)
        fence = state.rules[get_fence](state.config, state.frames, name)
        pool = give_up_blocks(pool, tables, state.rules, fence)
    return TRANSFERS.put(replace(state, pool=pool), moving), rows


def get_committed(state: State, commit: Commit) -> tuple[State, list[OutputRow]]:
    """Return the state after a commit with a report of a store, and what it delivers.

    Before the rows are processed, the loads of the frame are confirmed, or have failed.
    Source: vLLM 0.33.0 `update_from_output`; P13, P17, P19.
    """
    invalid = commit.transfers.invalid_block_ids
    state, failed = state.rules[get_failures](state, invalid, state.frames[0])
    state, outputs = commit_rows.get_committed(state, commit)
    state, rows = get_reported(state, commit.transfers, failed)
    return state, [*outputs, *rows]


# Failures.


def get_failed_row(request: RequestState) -> OutputRow:
    """Return the output row of a request whose load has failed, by policy. Source: P13, P19."""
    return get_error_row(request)


def get_failures(
    state: State, invalid: Sequence[BlockId], frame: Frame | None
) -> tuple[State, tuple[RequestId, ...]]:
    """Process blocks that could not be loaded; return the state, and requests that fail by policy.

    They concern requests that wait for asynchronous loads, and those of the oldest frame, `frame`,
    if it is being committed. Source: vLLM 0.19.1 `_handle_invalid_blocks`; P19.
    """
    state, parked = get_failures_of_parked(state, invalid)
    if frame is None:
        return state, parked
    state, planned = get_failures_of_frame(state, invalid)
    return state, (*parked, *planned)


def get_failures_of_parked(
    state: State, invalid: Sequence[BlockId]
) -> tuple[State, tuple[RequestId, ...]]:
    """Limit the computed tokens of requests with asynchronous loads to those that were loaded.

    Also returns the requests that fail by policy. Source: vLLM 0.19.1 `_handle_invalid_blocks`;
    P19.
    """
    if not invalid or not TRANSFERS.of(state).parked:
        return state, ()
    requests, affected = state.requests, []
    for name in (*state.skipped_waiting, *state.waiting):
        request = requests[name]
        if request.status is not Status.WAITING_FOR_REMOTE_KVS:
            continue
        settled = [holding.num_cached_blocks for holding in request.holdings]
        sizes = state.config.block_sizes
        # Spare blocks, for states of drafts, are behind the loaded ones.
        loaded = [
            table[: compute_num_blocks(request.num_computed_tokens, size)]
            for table, size in zip(request.block_tables, sizes, strict=True)
        ]
        num_valid = compute_num_valid(tuple(loaded), settled, sizes, invalid)
        if num_valid is not None:
            num_valid = get_num_kept(state, num_valid)
            num_computed = min(request.num_computed_tokens, num_valid)
            requests = requests.having(name, replace(request, num_computed_tokens=num_computed))
            affected.append(name)
    state = replace(state, requests=requests)
    return state, tuple(affected) if fails(state) else ()


def get_failures_of_frame(
    state: State, invalid: Sequence[BlockId]
) -> tuple[State, tuple[RequestId, ...]]:
    """Confirm the loads of the oldest frame, or roll their requests back.

    Also returns the requests that fail by policy instead. Source: vLLM 0.19.1
    `_handle_invalid_blocks`; P19.
    """
    failed: list[RequestId] = []
    for load in FRAME_LOADS.of(state.frames[0]):
        if not is_awaited(state, load):
            continue
        request, sizes = state.requests[load.request_id], state.config.block_sizes
        firsts = [load.num_computed_tokens // size for size in sizes]
        num_valid = compute_num_valid(load.block_ids, firsts, sizes, invalid)
        if num_valid is None and request.status is Status.RUNNING:
            state = get_settled(state, request, request.num_computed_tokens)
        elif num_valid is None:
            continue
        elif fails(state):
            failed.append(load.request_id)
            state = without_rows(state, load.request_id)
        else:
            state = get_gone_back(state, request, num_valid)
    return state, tuple(failed)


def fails(state: State) -> bool:
    """Whether a request whose load has failed finishes.

    Source: vLLM 0.19.1 `KVTransferConfig`; P19.
    """
    return state.config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL


def is_awaited(state: State, load: KVLoad) -> bool:
    """Whether a request runs on this load of the oldest frame, or has tokens of frames in flight.

    It may have been preempted since, and even admitted with another load, or none, if no frame
    samples for it. Source: P13, P19.
    """
    name, frames = load.request_id, state.frames
    request = state.requests.get(name)
    if request is None:
        return False
    if request.status is not Status.RUNNING:
        return any(row.samples for row in list_rows_in_flight(frames, name))
    is_last = all(
        other.request_id != name for frame in frames[1:] for other in FRAME_LOADS.of(frame)
    )
    return request.is_unsettled and is_last


def get_settled(state: State, request: RequestState, num_there: int) -> State:
    """Return the state with a load confirmed, up to a number of tokens. Source: P4, P19."""
    pool, request = settle_slots(state.config, state.pool, request, num_there, state.rules)
    requests = state.requests.having(request.request_id, request)
    return replace(state, pool=pool, requests=requests)


def get_gone_back(state: State, request: RequestState, num_valid: int) -> State:
    """Roll a request back to its loaded tokens; tokens that frames sampled beyond are dropped.

    Upstream drops the tokens of this frame, and keeps those and the placeholders of later ones.
    Source: vLLM 0.19.1 `_update_requests_with_invalid_blocks`; P12, P13, P19.
    """
    name, num_valid = request.request_id, get_num_kept(state, num_valid)
    request = replace(request, num_output_placeholders=0)
    if request.status is Status.RUNNING and state.config.has_windows:
        state = get_preempted_alone(state, name)
        request = replace(state.requests[name], num_output_placeholders=0)
        state = replace(state, requests=state.requests.having(name, request))
    elif request.status is Status.RUNNING:
        request = replace(
            request, num_computed_tokens=num_valid, spec_token_ids=(), is_prefill_chunk=True
        )
        state = get_settled(state, request, num_valid)
    else:  # it was preempted, and computes everything again
        state = replace(state, requests=state.requests.having(name, request))
    return without_rows(state, name)


def get_num_kept(state: State, num_valid: int) -> int:
    """Return the tokens that are kept of a load that failed after `num_valid`.

    None if groups have windows: null blocks take the places of skipped blocks, and a row that
    starts further back would attend to these. Source: P19.
    """
    return 0 if state.config.has_windows else num_valid


def get_preempted_alone(state: State, request_id: RequestId) -> State:
    """Preempt one running request between two plans.

    The next plan lists no victim, and resumes the request when it is admitted. Its blocks do not
    wait for the oldest frame, which is being committed. Source: P17, P19, P26.
    """
    step = create_step(replace(state, frames=state.frames[1:]))
    process_preemption(step, step.running.index(request_id))
    known = tuple([name for name in state.prev_scheduled_req_ids if name != request_id])
    return step.get_state(prev_scheduled_req_ids=known, frames=state.frames)


def without_rows(state: State, request_id: RequestId) -> State:
    """Mark all rows of a request in flight as dropped: they deliver nothing. Source: P13."""
    frames: list[Frame] = [drop_row(frame, request_id) for frame in state.frames]
    return replace(state, frames=tuple(frames))
