"""Admission: waiting requests are tried one by one; each is admitted, skipped, or ends the
phase."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.beside.transfers import Transfers, is_received, start_load
from blockstep.spec.copies import replace
from blockstep.spec.memory.forks import list_copies
from blockstep.spec.memory.prefix import get_prefix_hit, reads_prefix_cache
from blockstep.spec.memory.slots import NO_HIT, allocate_slots, can_finish, skip_slots
from blockstep.spec.pool import Pool, get_num_free_blocks, withdraw_blocks
from blockstep.spec.requests import (
    Frame,
    Hit,
    RequestState,
    count_in_doubt,
    list_rows_in_flight,
    without_nulls,
)
from blockstep.spec.step.loading import (
    counts_as_asked,
    get_offered_hit,
    is_unconfirmed,
    process_load,
    process_return,
)
from blockstep.spec.step.preemption import process_giving_way
from blockstep.spec.step.queues import is_blocked, process_prepend, select_queue, waits_apart
from blockstep.spec.step.share import (
    compute_num_drafts,
    compute_share,
    get_threshold,
    process_limits,
)
from blockstep.spec.step.work import Scheduled, Step, Verdict
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    BlockId,
    GroupKind,
    PauseState,
    RequestId,
    Status,
)


def process_waiting_phase(step: Step) -> None:
    """Admit waiting requests, in queue order, while tokens, running slots and blocks last.

    The first that does not fit ends the phase (head-of-line blocking), and no request is preempted
    for it. Source: seed 001 "Waiting Queue -- Admission Gate"; seed 000 "Phase 2"; P15, P16.
    """
    rules = step.state.rules
    while has_room(step):
        queue = rules[get_open_queue](step)
        if not queue:
            break
        verdict = get_verdict(step, queue[0])
        if verdict in (Verdict.NO_ROOM, Verdict.NO_BLOCKS):
            rules[process_received_behind](step, queue[0])
            break
        request_id = queue.pop(0)
        if verdict is not Verdict.ADMITTED:
            step.passed_over.append(request_id)
    for request_id in reversed(rules[list_passed_over](step)):
        is_apart = rules[waits_apart](step.requests[request_id], is_blocked=True)
        queue = step.skipped if is_apart else step.waiting
        process_prepend(step.state.config.policy, queue, request_id, step.requests)


def get_open_queue(step: Step) -> list[RequestId]:
    """Return the queue whose head is tried next; empty if both are, or while admission is paused.

    Source: seed 001 "Queue Selection: FCFS vs PRIORITY"; P16.
    """
    if step.state.pause_state is not PauseState.UNPAUSED:
        return []
    return select_queue(step.state.config.policy, step.waiting, step.skipped, step.requests)


def list_passed_over(step: Step) -> list[RequestId]:
    """Return the skipped requests in the order in which they return to their queue. Source: P7."""
    return step.passed_over


def has_room(step: Step) -> bool:
    """Whether tokens and a running slot are left. Source: seed 001 "Unified Token Budget"; P9."""
    num_seats = step.state.rules[count_seats](step)
    return step.budget > 0 and num_seats < step.state.config.max_num_seqs


def count_seats(step: Step) -> int:
    """Return the running slots that are taken: those of running requests. Source: P9."""
    return len(step.running)


def process_received_behind(step: Step, head_id: RequestId) -> None:
    """Admit requests behind a head that does not fit if their asynchronous load has ended.

    They have their blocks already. They are tried in queue order, each is admitted or stays where
    it is, and no blocks are reclaimed for them. Otherwise they would wait, holding blocks, for a
    head that may wait for these blocks; upstream lets them wait. Source: vLLM 0.19.1 `schedule`;
    P10, P15, P17.
    """
    if not step.transfers.parked:
        return
    queues, policy = ([*step.waiting], [*step.skipped]), step.state.config.policy
    while queue := select_queue(policy, *queues, step.requests):
        request_id = queue.pop(0)
        if not has_room(step):
            return
        if request_id == head_id or not is_received(step.transfers, request_id):
            continue
        if process_trial(step, request_id) is Verdict.ADMITTED:
            (step.skipped if request_id in step.skipped else step.waiting).remove(request_id)


def get_verdict(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit the request, reclaiming blocks if no request runs; return the verdict.

    Source: seed 001 "Waiting Queue -- Admission Gate"; P15, P16.
    """
    verdict = process_trial(step, request_id)
    while (
        verdict is Verdict.NO_BLOCKS and not step.running and process_giving_way(step, request_id)
    ):
        verdict = process_trial(step, request_id)
    return verdict


def process_trial(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit a waiting request; one with an ended asynchronous load as it is after the load.

    If it is not admitted it keeps waiting for the load's admission, and none of its blocks is
    published. Source: P7, P15, P19.
    """
    request = step.requests[request_id]
    if request.status is not Status.WAITING_FOR_REMOTE_KVS:
        return process_gates(step, request_id)
    if not is_received(step.transfers, request_id):
        return Verdict.PASSED_OVER
    pool, transfers = step.pool, step.transfers
    process_return(step, request_id)
    verdict = process_gates(step, request_id)
    if verdict not in (Verdict.ADMITTED, Verdict.PARKED):
        step.state.rules[process_refused_return](step, request, pool, transfers)
    return verdict


def process_refused_return(
    step: Step, request: RequestState, pool: Pool, transfers: Transfers
) -> None:
    """Undo the confirmation of a load, because its request is not admitted. Source: P7, P19."""
    step.pool, step.transfers, step.requests[request.request_id] = pool, transfers, request


def process_gates(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit a waiting request; the first gate that stops it gives the verdict.

    Source: seed 001 "Waiting Queue -- Admission Gate"; P15, P16.
    """
    rules = step.state.rules
    for gate in rules.hooks.gates:
        verdict = rules[gate](step, step.requests[request_id])
        if verdict is not None:
            return verdict
    return process_admission(step, step.requests[request_id])


def process_grammar_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip a request whose grammar is not compiled; once it is, the request waits like others.

    An idle session is skipped until it gets further input. Source: seed 001 "Filter on blocking
    status"; P15.
    """
    if not is_blocked(request):
        return None
    if request.status is Status.WAITING_FOR_STREAMING_REQ or not request.grammar_ready:
        return Verdict.PASSED_OVER
    step.requests[request.request_id] = replace(request, status=Status.WAITING)
    return None


def process_flight_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip a preempted request until frames in flight have delivered its tokens.

    Admitted before, it would sample a position twice (upstream #48245). Source: P13.
    """
    frames = step.state.frames
    is_held = bool(frames) and step.state.rules[is_held_by_frames](frames, request)
    return Verdict.PASSED_OVER if is_held else None


def is_held_by_frames(frames: Sequence[Frame], request: RequestState) -> bool:
    """Whether a frame in flight samples for the request. Source: upstream #48245; P13."""
    return any(row.samples for row in list_rows_in_flight(frames, request.request_id))


def process_admission(step: Step, request: RequestState) -> Verdict:
    """Admit `request`, or start its asynchronous load, if it fits; otherwise change nothing (P7).

    A session continues after its computed tokens, without a prefix hit; so does a request whose
    asynchronous load has ended. Source: seed 001 "Decision 2: Which WAITING requests get
    admitted?", "Full ISL reservation"; upstream #37307; P7, P8.
    """
    config, rules = step.state.config, step.state.rules
    # refuse
    num_computed, hit = request.num_computed_tokens, NO_HIT
    if num_computed == 0:
        hit = get_prefix_hit(config, rules[get_findable_pool](step), request, rules)
    if hit.junction != request.junction:
        request = replace(request, junction=hit.junction)
    if config.kv_connector:
        offered = get_offered_hit(config, step.transfers, request, hit, rules)
        if offered is None:
            return Verdict.PASSED_OVER
        hit, is_async = offered
        is_unsettled = rules[is_unconfirmed](hit, is_async)
        request = replace(request, is_unsettled=is_unsettled)
        if is_async:
            return process_parking(step, request, hit)
    num_start = num_computed + hit.num_tokens
    num_new = rules[get_waiting_share](step, request, num_start)
    if isinstance(num_new, Verdict):
        return num_new
    num_new = rules[process_limits](step, request, num_start, num_new)
    if num_new == 0:
        for lack in rules.hooks.shortages:
            rules[lack](step, request)
        return rules[get_verdict_without_tokens](step)
    granted = rules[get_slots_at_admission](step, request, num_new, hit)
    if isinstance(granted, Verdict):
        for refuse in rules.hooks.refusals:
            rules[refuse](step, request)
        return granted
    # pool
    step.pool, after = granted
    # requests
    process_entrance(step, request, after, hit, num_new)
    for grant in rules.hooks.grants:
        rules[grant](step, request)
    return Verdict.ADMITTED


def get_waiting_share(step: Step, request: RequestState, num_start: int) -> int | Verdict:
    """Return the tokens that a waiting request could have in this step, or why it has none.

    It starts behind `num_start` tokens. If the budget is too small for its first chunk, no later
    request overtakes it. Source: seed 001 "For Waiting Requests (First Prefill)"; P9, P16.
    """
    num_new = compute_share(
        request.num_known_tokens,
        num_start,
        step.state.rules[get_threshold](step),
        step.budget,
        end=request.num_known_tokens,
        is_whole=not step.state.config.enable_chunked_prefill,
    )
    return num_new if num_new > 0 else Verdict.NO_ROOM


def process_parking(step: Step, request: RequestState, hit: Hit) -> Verdict:
    """Start an asynchronous load for `request` if its blocks are available; else change nothing.

    It takes no tokens and no running slot, and blocks only for the loaded tokens, and for drafts
    after a state; but the admission gate asks for all of the request, as for others.
    Source: vLLM 0.19.1 `schedule`
    (`load_kv_async`); P7, P8, P19.
    """
    granted = step.state.rules[get_slots_at_admission](step, request, 0, hit)
    if isinstance(granted, Verdict):
        return granted
    step.pool, after = granted
    after = step.state.rules[get_parked](after, hit)
    step.requests[request.request_id] = after
    taken = Scheduled(request.request_id, hit.num_tokens, 0, after.block_tables, hit.block_tables)
    step.granted.append(taken)
    step.transfers = start_load(step.transfers, request.request_id, request.status)
    process_load(step, after, hit, is_async=True)
    process_counted(step, request, hit)
    return Verdict.PARKED


def get_parked(request: RequestState, hit: Hit) -> RequestState:
    """Return a request that waits for its asynchronous load; the loaded tokens count as computed.

    Nothing is reported as cached before it is admitted. Source: vLLM 0.19.1 `schedule`; P19, P21.
    """
    status = Status.WAITING_FOR_REMOTE_KVS
    return replace(request, status=status, num_computed_tokens=hit.num_tokens)


def get_verdict_without_tokens(step: Step) -> Verdict:
    """Return the verdict on a request for which the limits of its row leave no token.

    No later request overtakes it. Source: seed 001 "Waiting Queue -- Admission Gate"; P16.
    """
    del step
    return Verdict.NO_ROOM


def get_slots_at_admission(
    step: Step, request: RequestState, num_new: int, hit: Hit
) -> tuple[Pool, RequestState] | Verdict:
    """Return pool and request with slots for its first tokens, or NO_BLOCKS if it does not fit.

    While other requests run it must leave them some free blocks (watermark); upstream leaves none.
    With no running request there is no watermark, so no request waits without need. Source: seed
    001 "Full ISL reservation"; seed 002 "The Watermark", which applies to an empty engine, too; P7,
    P8, P10.
    """
    config, rules = step.state.config, step.state.rules
    pool, request = rules[get_skipped_at_admission](step, request)
    num_spared = config.watermark_blocks if step.running else 0
    if config.scheduler_reserve_full_isl and not rules[can_finish](
        config, pool, request, hit, rules, num_spared
    ):
        return Verdict.NO_BLOCKS
    granted = rules[allocate_first_slots](step, pool, request, num_new, hit)
    if granted is None or num_spared > get_num_free_blocks(granted[0]):
        return Verdict.NO_BLOCKS
    return granted


def get_skipped_at_admission(step: Step, request: RequestState) -> tuple[Pool, RequestState]:
    """Return pool and request without the blocks that a request with computed tokens skips.

    Source: vLLM 0.19.1 `remove_skipped_blocks`; P8, P14.
    """
    config, name = step.state.config, request.request_id
    if not config.groups or not request.num_computed_tokens:
        return step.pool, request
    num_in_doubt = step.state.rules[count_in_doubt](step.state.frames, name)
    fence = step.get_fence(name)
    return skip_slots(config, step.pool, request, num_in_doubt, step.state.rules, fence)


def allocate_first_slots(
    step: Step, pool: Pool, request: RequestState, num_new: int, hit: Hit
) -> tuple[Pool, RequestState] | None:
    """Allocate slots for the first tokens of an admission; without lookahead, because nothing is
    drafted yet. Source: seed 001 "allocate_slots() -- The Block Allocation Pipeline"; P8.
    """
    return allocate_slots(step.state.config, pool, request, num_new, 0, hit, step.state.rules)


def get_findable_pool(step: Step) -> Pool:
    """Return the pool in which hits are looked for: without states that this very step writes.

    Source: upstream #56525; P4, P15.
    """
    unwritten = get_unwritten_states(step) if step.state.config.groups else []
    return withdraw_blocks(step.pool, unwritten) if unwritten else step.pool


def get_unwritten_states(step: Step) -> list[BlockId]:
    """Return the state blocks that this very step writes: they are excluded from prefix hits.

    KV of a layer is written before any row reads it, but states are read first. States of frames in
    flight are there, because those frames run before. Upstream makes a request that would hit one
    wait, and all requests behind it; here it takes a shorter hit. Source: vLLM 0.19.1
    `cached_blocks_this_step`; upstream #56525; P4, P15.
    """
    unwritten: list[BlockId] = []
    for index, group in enumerate(step.state.config.groups):
        if group.kind is not GroupKind.RECURRENT:
            continue
        for row in step.rows:
            table = step.requests[row.request_id].block_tables[index]
            unwritten += without_nulls(table[row.num_computed // group.block_size :])
    return unwritten


def process_entrance(
    step: Step, request: RequestState, after: RequestState, hit: Hit, num_new: int
) -> None:
    """Move an admitted request to the running list, with its row and counters.

    Source: seed 001 "For Waiting Requests (First Prefill)"; P21.
    """
    num_known, num_hit = request.num_known_tokens, hit.num_tokens
    num_start = request.num_computed_tokens + num_hit
    step.requests[request.request_id] = replace(
        after,
        status=Status.RUNNING,
        num_computed_tokens=num_start,
        num_cached_tokens=step.state.rules[get_num_cached_tokens](request, num_start),
    )
    step.running.append(request.request_id)
    process_counted(step, request, hit)
    if hit.num_external:
        process_load(step, after, hit, is_async=False)
    drafts = (DRAFT_PLACEHOLDER,) * compute_num_drafts(num_start, num_new, num_known)
    tables = after.block_tables
    is_kept = num_start > num_hit
    hit_tables = request.block_tables if is_kept else hit.block_tables
    copies = list_copies(request.block_tables, tables) if step.state.config.enable_forks else ()
    name, status = request.request_id, request.status
    step.add(Scheduled(name, num_start, num_new, tables, hit_tables, drafts, status, copies))


def get_num_cached_tokens(request: RequestState, num_start: int) -> int:
    """Return the cached tokens to report for an admitted request: those of its first admission.

    `num_start`: the tokens that it starts behind now. Source: seed 001 "For Waiting Requests (First
    Prefill)"; P21.
    """
    return num_start if request.num_cached_tokens < 0 else request.num_cached_tokens


def process_counted(step: Step, request: RequestState, hit: Hit) -> None:
    """Count the cache and store hits of a request that asked for them and got blocks.

    Source: seed 001 "For Waiting Requests (First Prefill)", vLLM 0.19.1 `make_stats`; P21.
    """
    config, stats, num_local = step.state.config, step.stats, hit.num_local
    if request.num_computed_tokens == 0 and reads_prefix_cache(config, request):
        stats = replace(
            stats,
            prefix_cache_queries=stats.prefix_cache_queries + request.num_known_tokens,
            prefix_cache_hits=stats.prefix_cache_hits + num_local,
        )
    if config.kv_connector and step.state.rules[counts_as_asked](request, step.state.rules):
        num_behind = request.num_known_tokens - num_local
        stats = replace(
            stats,
            external_prefix_cache_queries=stats.external_prefix_cache_queries + num_behind,
            external_prefix_cache_hits=stats.external_prefix_cache_hits + hit.num_external,
        )
    step.stats = stats
