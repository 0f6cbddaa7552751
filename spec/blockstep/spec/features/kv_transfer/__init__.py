"""KV transfer: a store from which KV is loaded, and which may hold blocks of finished requests.

    at once   |  hit  |  external  |   new   |     a row computes the new tokens after the load
    later     |  hit  |  external  |               no row, no running slot until the load has ended
    back      |       computed     |   new   |     it asks neither cache nor store

    loaded    |  hit  |  there  | invalid |  there  |      of a load that failed in the middle
    after     |    computed     | computed again, or its request finishes with an error

`transfers` is the state machine. Until a load is confirmed only the blocks of the local hit are
published, and no request computes on KV that was not loaded, or hits it (P19).

After an asynchronous load a request holds blocks until it is admitted. Two such requests could each
need the blocks of the other, so these blocks are reclaimed like those of an idle session
(`features.reclaim`).
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
from blockstep.spec.core.parts import Note
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.queues import select_queue
from blockstep.spec.core.requests import Frame, FrameRow, Hit, RequestState, list_rows_in_flight
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import create_step
from blockstep.spec.core.slots import compute_num_blocks, publish_slots
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features import reclaim, resets
from blockstep.spec.features.groups.hits import get_hit_table
from blockstep.spec.features.kv_transfer.invariants import INVARIANTS
from blockstep.spec.features.kv_transfer.transfers import (
    FRAME_LOADS,
    NO_OFFERS,
    TRANSFERS,
    Load,
    compute_num_external,
    compute_num_valid,
    end_transfer,
    get_offer,
    hold_ended,
    is_moving,
    is_received,
    is_under_way,
    take_offer,
)
from blockstep.spec.features.structured_output import drop_row
from blockstep.spec.vocabulary import (
    Ack,
    BlockId,
    BlockTables,
    Commit,
    Config,
    FrameId,
    KVLoad,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    OutputRow,
    Outputs,
    Plan,
    RejectCode,
    Rejected,
    RequestId,
    Reset,
    ResetDone,
    Status,
    TransfersReported,
    TransfersSnapshot,
)

LOADS: Final = Note[tuple[KVLoad, ...]]("loads", ())
"""The loads of a step, in the order in which requests were tried."""


def has_store(config: Config) -> bool:
    """Whether there is a store. Source: vLLM 0.19.1 `KVTransferConfig`; P17."""
    return config.kv_connector


# Loads.


def queries_store(request: RequestState) -> bool:
    """Whether a waiting request asks a store: if it computed nothing, and may read the cache.

    Source: vLLM 0.19.1 `schedule`; P6, P21.
    """
    is_reading = not request.request.skip_reading_prefix_cache
    return is_reading and request.num_computed_tokens == 0


def look_in_store(
    step: Step, request: RequestState, hit: Hit
) -> tuple[RequestState, Hit] | Verdict:
    """Return the request and its hit extended by the store's offer, or the verdict: it waits for
    the store's answer, or for its load.

    Of a recurrent group the store has only the state after the last token of the offer, so the
    offer is loaded up to there or not at all: a state of fewer tokens is not available, and one of
    more tokens would compute some of them twice. Source: vLLM 0.19.1 `get_num_new_matched_tokens`;
    P3, P5, P19.
    """
    config, rules = step.state.config, step.state.rules
    if not rules[queries_store](request):
        return request, hit
    offer = get_offer(TRANSFERS.of(step), request.request_id)
    if offer.num_tokens is None:
        return Verdict.PASSED_OVER
    num_external = rules[compute_num_external](offer, request.num_known_tokens, hit.num_tokens)
    num_start = hit.num_tokens + num_external
    if num_external == 0 or (config.has_states and num_start < offer.num_tokens):
        return request, hit
    tables = hit.block_tables
    if config.groups:
        tables = get_clipped_tables(config, hit, num_start, request.block_tables)
    hit, request = Hit(num_start, tables, num_external), replace(request, has_unconfirmed_kv=True)
    return rules[process_async_load](step, request, hit) if offer.is_async else (request, hit)


def get_clipped_tables(config: Config, hit: Hit, num_start: int, held: BlockTables) -> BlockTables:
    """Return, per group, the blocks of a hit, with null blocks for those skipped after the load.

        hit      | 1 | 2 | 3 |                  of a window that begins in the fourth block:
        clipped  | 0 | 0 | 0 | 0 | what is loaded, and new

    Blocks that are held already are left out. Source: vLLM 0.19.1 `allocate_new_computed_blocks`;
    P5, P8.
    """
    found = hit.block_tables or ((),) * len(config.groups)
    groups = zip(config.groups, found, held, strict=True)
    return tuple(
        [get_hit_table(group, table, num_start)[len(own) :] for group, table, own in groups]
    )


def get_first_blocks(config: Config, request: RequestState, num_tokens: int) -> BlockTables:
    """Return, per group, the blocks of a request's first tokens; behind these it may have spare
    ones for states after drafts. Source: P19.
    """
    tables = zip(request.block_tables, config.block_sizes, strict=True)
    return tuple([table[: compute_num_blocks(num_tokens, size)] for table, size in tables])


def process_load_done(step: Step, request_id: RequestId) -> None:
    """Confirm a request's asynchronous load, which has finished, and publish the loaded blocks.

    If nothing was loaded, it holds nothing and asks again. If it is not admitted afterwards, all of
    this is undone (P7). Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    num_loaded = step.requests[request_id].num_computed_tokens
    if num_loaded == 0:
        process_gift(step, request_id)
        return
    request, rules = process_unparking(step, request_id), step.state.rules
    step.pool, request = publish_loaded(step.state.config, step.pool, request, num_loaded, rules)
    step.requests[request_id] = request


def process_unparking(step: Step, request_id: RequestId) -> RequestState:
    """Forget the asynchronous load of a request; return the request with the status from before
    it: waiting or preempted. Source: vLLM 0.19.1 `_try_promote_blocked_waiting_request`; P26.
    """
    transfers = TRANSFERS.of(step)
    TRANSFERS.set(step, replace(transfers, parked=transfers.parked.without(request_id)))
    status = transfers.parked[request_id].status
    return replace(step.requests[request_id], status=status, has_unconfirmed_kv=False)


def publish_loaded(
    config: Config, pool: Pool, request: RequestState, num_there: int, rules: Rules
) -> tuple[Pool, RequestState]:
    """Confirm the KV of `num_there` tokens in total, and publish their blocks.

    Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    request = replace(request, has_unconfirmed_kv=False)
    if not config.enable_prefix_caching:
        return pool, request
    num_there = min(num_there, request.num_known_tokens)
    nums_full = [num_there // size for size in config.block_sizes]
    return publish_slots(config, pool, request, nums_full, rules)


def add_loads(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the loads of the step. Source: P19, P26."""
    return replace(plan, kv_loads=LOADS.of(step)) if LOADS.of(step) else plan


def fill_loads(step: Step, frame: Frame) -> Frame:
    """Return a frame with the loads that end before its rows read them. Source: P19."""
    return FRAME_LOADS.put(frame, tuple([load for load in LOADS.of(step) if not load.is_async]))


def process_async_load(step: Step, request: RequestState, hit: Hit) -> Verdict:
    """Start an asynchronous load for `request` if its blocks are available; else change nothing.

    It takes no tokens and no running slot, and blocks only for the loaded tokens, and for drafts
    after a state; but the admission gate asks for all of the request, as for others. The loaded
    tokens count as computed. Source: vLLM 0.19.1 `schedule` (`load_kv_async`); P7, P8, P19, P21.
    """
    rules, name, status = step.state.rules, request.request_id, Status.WAITING_FOR_REMOTE_KVS
    granted = rules[admission.get_slots_at_admission](step, request, 0, hit)
    if isinstance(granted, Verdict):
        return granted
    step.pool, after = granted
    step.requests[name] = replace(after, status=status, num_computed_tokens=hit.num_tokens)
    parked = TRANSFERS.of(step).parked.having(name, Load(request.status))
    TRANSFERS.set(step, replace(TRANSFERS.of(step), parked=parked))
    for admit in rules.hooks.admits:
        rules[admit](step, request, after, hit)
    return Verdict.SUSPENDED


def process_admission_attempt(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit a waiting request; one with an ended asynchronous load as it is after the load.

    If it is not admitted it keeps waiting for the load's admission, and none of its blocks is
    published. Source: P7, P15, P19.
    """
    pool, request, transfers = step.pool, step.requests[request_id], TRANSFERS.of(step)
    if request_id not in transfers.parked:
        return admission.process_gates(step, request_id)
    if not is_received(transfers, request_id):
        return Verdict.PASSED_OVER
    step.state.rules[process_load_done](step, request_id)
    verdict = admission.process_gates(step, request_id)
    if verdict not in (Verdict.ADMITTED, Verdict.SUSPENDED):
        step.pool, step.requests[request_id] = pool, request
        TRANSFERS.set(step, transfers)
    return verdict


def process_received_behind(step: Step, head_id: RequestId) -> None:
    """Admit requests behind a head that does not fit if their asynchronous load has ended.

    They have their blocks already. They are tried in queue order, each is admitted or stays where
    it is, and no blocks are reclaimed for them. Otherwise they would wait, holding blocks, for a
    head that may wait for these blocks. Source: vLLM 0.19.1 `schedule`; P10, P15, P17.
    """
    if not TRANSFERS.of(step).parked:
        return
    queues, policy = ([*step.waiting], [*step.skipped]), step.state.config.policy
    while admission.has_room(step) and (queue := select_queue(policy, *queues, step.requests)):
        request_id = queue.pop(0)
        if request_id == head_id or not is_received(TRANSFERS.of(step), request_id):
            continue
        if step.state.rules[admission.process_gates](step, request_id) is Verdict.ADMITTED:
            (step.skipped if request_id in step.skipped else step.waiting).remove(request_id)


def process_admitted(step: Step, request: RequestState, after: RequestState, hit: Hit) -> None:
    """Plan to load the external part of the hit of a request that has its blocks, and count it if
    the request asked the store. Source: vLLM 0.19.1 `update_state_after_alloc`, `make_stats`; P17,
    P21."""
    if hit.num_pending:
        name, tables = after.request_id, get_first_blocks(step.state.config, after, hit.num_tokens)
        is_async = name in TRANSFERS.of(step).parked
        load = KVLoad(name, tables, hit.num_local, hit.num_pending, is_async)
        LOADS.set(step, (*LOADS.of(step), load))
    if not step.state.rules[queries_store](request):
        return
    stats, num_behind = step.stats, request.num_known_tokens - hit.num_local
    step.stats = replace(
        stats,
        external_prefix_cache_queries=stats.external_prefix_cache_queries + num_behind,
        external_prefix_cache_hits=stats.external_prefix_cache_hits + hit.num_pending,
    )


# Reclaim.


def list_queued(step: Step) -> list[RequestId]:
    """Return the queued requests that have no load under way. Source: P10, P17."""
    transfers = TRANSFERS.of(step)
    return [name for name in reclaim.list_queued(step) if not is_under_way(transfers, name)]


def process_gift(step: Step, giver_id: RequestId) -> None:
    """Take the blocks of a request that does not run; an ended load is forgotten. Source: P10,
    P17."""
    reclaim.process_gift(step, giver_id)
    if giver_id in TRANSFERS.of(step).parked:
        step.requests[giver_id] = process_unparking(step, giver_id)


# Reports.


def process_kv_offer(state: State, offer: KVOffer) -> tuple[State, Ack]:
    """Store the store's answer about a request, if there is a store and such a request.

    Source: vLLM 0.19.1 `get_num_new_matched_tokens`; architecture D12; P18.
    """
    if not state.config.kv_connector or offer.request_id not in state.requests:
        return state, Ack()
    return TRANSFERS.put(state, take_offer(TRANSFERS.of(state), offer)), Ack()


def process_transfers_reported(state: State, reported: TransfersReported) -> tuple[State, Outputs]:
    """Process a report without a model output. Source: vLLM 0.19.1 `update_from_output`; P17,
    P18."""
    if not state.config.kv_connector:
        return state, Outputs()
    # requests
    transfers = reported.transfers
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
    rows = tuple([endings.get_error_row(state.requests[name]) for name in failed])
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
                state = get_load_confirmed(state, request, request.num_computed_tokens)
            continue
        if fails:
            failed.append(load.request_id)
        else:
            state = get_rolled_back_to_load(state, request, num_valid)
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

    It may have been preempted since, and even admitted with another load. Source: P13, P19.
    """
    name, request = load.request_id, state.requests.get(load.request_id)
    if request is None:
        return False
    if request.status is not Status.RUNNING:
        return any(row.samples for row in list_rows_in_flight(state.frames, name))
    later = [other.request_id for frame in state.frames[1:] for other in FRAME_LOADS.of(frame)]
    return request.has_unconfirmed_kv and name not in later


def get_load_confirmed(state: State, request: RequestState, num_there: int) -> State:
    """Return the state with a load confirmed, up to a number of tokens. Source: P4, P19."""
    pool, request = publish_loaded(state.config, state.pool, request, num_there, state.rules)
    return replace(state, pool=pool, requests=state.requests.having(request.request_id, request))


def get_rolled_back_to_load(state: State, request: RequestState, num_valid: int) -> State:
    """Roll a request back to its loaded tokens; tokens that frames sample for it do not count.

    A preempted one computes everything again, anyway. Source: vLLM 0.19.1
    `_update_requests_with_invalid_blocks`; P12, P13, P19.
    """
    name, is_running = request.request_id, request.status is Status.RUNNING
    request = replace(request, num_output_placeholders=0)
    if is_running and not state.config.has_windows:
        request = replace(request, spec_token_ids=(), is_prefill_chunk=True)
        return get_load_confirmed(state, replace(request, num_computed_tokens=num_valid), num_valid)
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
    Source: P13, P17."""
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
    return state if request.request_id in transfers.held else endings.get_released(state, request)


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


def list_held(state: State) -> list[BlockTables]:
    """Return the tables of blocks that are held for finished requests. Source: P1, P17."""
    return [entry.block_tables for _, entry in sorted(TRANSFERS.of(state).held.items())]


def get_snapshot(state: State) -> TransfersSnapshot:
    """Return the transfers between pool and store. Source: architecture D1."""
    moving, requests = TRANSFERS.of(state), state.requests
    unsettled = [name for name in state.running if requests[name].has_unconfirmed_kv]
    return TransfersSnapshot(
        offers=tuple([moving.offers[name] for name in sorted(moving.offers)]),
        received=tuple([name for name in sorted(moving.parked) if is_received(moving, name)]),
        unsettled=tuple(sorted(unsettled)),
        held=tuple([moving.held[name] for name in sorted(moving.held)]),
        deferred_frees=state.pool.deferred_frees,
    )


FEATURE: Final = Feature(
    "kv_transfer",
    has_store,
    Hooks(
        hits=(look_in_store,),
        stuck=(process_received_behind,),
        admits=(process_admitted,),
        fields=(add_loads,),
        frames=(fill_loads,),
    ),
    instead={
        block_pool.get_fence: get_fence,
        admission.process_gates: process_admission_attempt,
        reclaim.list_queued: list_queued,
        reclaim.process_gift: process_gift,
        commit.get_committed: get_committed,
        endings.get_released: get_released,
        lifecycle.get_id_problem: get_id_problem,
        resets.process_reset: process_reset,
        idle.has_work: has_work,
    },
    events={KVOffer: process_kv_offer, TransfersReported: process_transfers_reported},
    shows={"transfers": get_snapshot},
    list_held=list_held,
    invariants=INVARIANTS,
)
