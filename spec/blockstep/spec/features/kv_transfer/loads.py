"""Loading: external hits of waiting requests, synchronous and asynchronous.

    at once   |  hit  |  external  |   new   |     a row computes the new tokens after the load
    later     |  hit  |  external  |               no row, no running slot until the load has ended
    back      |       computed     |   new   |     it asks neither cache nor store

A request whose asynchronous load has ended holds blocks until it is admitted, and two of them could
each lack the blocks of the other: they are reclaimed like those of a session (`features.reclaim`).
Those of a load under way are not: it ends by itself.

Until a load is confirmed only the blocks of the local hit are published (P19).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import admission
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.queues import select_queue
from blockstep.spec.core.requests import Frame, FrameRow, Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import compute_num_blocks, publish_slots, release_slots
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features import reclaim
from blockstep.spec.features.groups.kinds import compute_num_skipped_blocks
from blockstep.spec.features.kv_transfer.transfers import (
    TRANSFERS,
    Transfers,
    compute_num_external,
    forget_load,
    get_offer,
    is_received,
    is_under_way,
    start_load,
)
from blockstep.spec.features.reclaim import without_blocks
from blockstep.spec.features.statistics import process_counted
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockTables,
    Config,
    KVLoad,
    Plan,
    RequestId,
    Status,
)

LOADS: Final = Note[tuple[KVLoad, ...]]("loads", ())
"""The loads of a step, in the order in which requests were tried."""
FRAME_LOADS: Final = Part[tuple[KVLoad, ...]]("loads", ())
"""The loads of a frame that end before its rows read them, in the order of the plan."""


def asks_store(request: RequestState) -> bool:
    """Whether a waiting request asks a store: if it computed nothing, and may read the cache.

    Upstream also asks for requests that may not. Source: vLLM 0.19.1 `schedule`; P6, P21.
    """
    is_reading = not request.request.skip_reading_prefix_cache
    return is_reading and request.num_computed_tokens == 0


def counts_as_asked(request: RequestState, rules: Rules) -> bool:
    """Whether the metrics of a store count a request that is admitted. Source: P21."""
    return rules[asks_store](request)


def get_offered_hit(
    config: Config, transfers: Transfers, request: RequestState, hit: Hit, rules: Rules
) -> tuple[Hit, bool] | None:
    """Return the hit extended by the store's offer, and whether the load is asynchronous.

    None if the store has no answer yet. Of a recurrent group the store has only the state after the
    last token of the offer, so the offer is loaded up to there or not at all: a state of fewer
    tokens is not available, and one of more tokens would compute some of them twice. Upstream
    leaves that to the store, which offers one token less than the prompt (NIXL).
    Source: vLLM 0.19.1 `get_num_new_matched_tokens`; P3, P5.
    """
    if not rules[asks_store](request):
        return hit, False
    offer = get_offer(transfers, request.request_id)
    if offer.num_tokens is None:
        return None
    num_known, num_local = request.num_known_tokens, hit.num_tokens
    num_external = rules[compute_num_external](
        offer.num_tokens, num_known, num_local, offer.is_async
    )
    num_start = num_local + num_external
    is_cut = config.has_states and num_start < offer.num_tokens
    if num_external == 0 or is_cut:
        return hit, False
    tables = hit.block_tables
    if config.groups:
        tables = get_clipped_tables(config, hit, num_start, request.block_tables)
    hit = Hit(num_start, tables, num_external)
    return hit, offer.is_async


def is_unconfirmed(hit: Hit, is_async: bool) -> bool:
    """Whether no block of a request is published until its load is confirmed. Source: P19."""
    del is_async
    return hit.num_pending > 0


def get_clipped_tables(config: Config, hit: Hit, num_start: int, held: BlockTables) -> BlockTables:
    """Return, per group, the blocks of a hit, with null blocks for those skipped after the load.

        hit      | 1 | 2 | 3 |                  of a window that begins in the fourth block:
        clipped  | 0 | 0 | 0 | 0 | what is loaded, and new

    Blocks that are held already are left out; a request that asks a store mostly holds none.
    Source: vLLM 0.19.1 `allocate_new_computed_blocks`; P5, P8.
    """
    found = hit.block_tables or ((),) * len(config.groups)
    tables = []
    for group, table, own in zip(config.groups, found, held, strict=True):
        num_null = compute_num_skipped_blocks(group, num_start)
        tables.append(((NULL_BLOCK,) * num_null + table[num_null:])[len(own) :])
    return tuple(tables)


def process_load(step: Step, request: RequestState, hit: Hit, is_async: bool) -> None:
    """Have the worker load the external part of a request's hit into its blocks.

    Source: vLLM 0.19.1 `update_state_after_alloc`; P17.
    """
    sizes = step.state.config.block_sizes
    tables = [
        table[: compute_num_blocks(hit.num_tokens, size)]
        for table, size in zip(request.block_tables, sizes, strict=True)
    ]
    load = KVLoad(request.request_id, tuple(tables), hit.num_local, hit.num_pending, is_async)
    LOADS.set(step, (*LOADS.of(step), load))


def process_return(step: Step, request_id: RequestId) -> None:
    """Confirm a request's asynchronous load, which has finished, and publish the loaded blocks.

    If nothing was loaded, it holds nothing and asks again. If it is not admitted afterwards, all of
    this is undone (P7). Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    request = get_unparked(step.requests[request_id], TRANSFERS.of(step))
    TRANSFERS.set(step, forget_load(TRANSFERS.of(step), request_id))
    if request.num_computed_tokens == 0:
        fence = step.get_fence(request_id)
        step.pool = release_slots(step.pool, request, step.state.rules, fence)
        request = without_blocks(request)
    else:
        get = step.state.rules[get_returned]
        step.pool, request = get(step.state.config, step.pool, request, step.state.rules)
    step.requests[request_id] = request


def settle_slots(
    config: Config, pool: Pool, request: RequestState, num_there: int, rules: Rules
) -> tuple[Pool, RequestState]:
    """Confirm the KV of `num_there` tokens in total, and publish their blocks.

    Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    request = replace(request, is_unsettled=False)
    if not config.enable_prefix_caching:
        return pool, request
    num_there = min(num_there, request.num_known_tokens)
    nums_full = [num_there // size for size in config.block_sizes]
    return publish_slots(config, pool, request, nums_full, rules)


def get_returned(
    config: Config, pool: Pool, request: RequestState, rules: Rules
) -> tuple[Pool, RequestState]:
    """Return pool and request after its asynchronous load: all loaded tokens are computed.

    Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    return settle_slots(config, pool, request, request.num_computed_tokens, rules)


def tell_transfers(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the loads of the step. Source: P19, P26."""
    return replace(plan, kv_loads=LOADS.of(step))


def fill_loads(step: Step, frame: Frame) -> Frame:
    """Return a frame with the loads that end before its rows read them. Source: P19."""
    return FRAME_LOADS.put(frame, tuple([load for load in LOADS.of(step) if not load.is_async]))


# Admission.


def look_in_store(
    step: Step, request: RequestState, hit: Hit
) -> tuple[RequestState, Hit] | Verdict:
    """Return the request and its hit extended by the external hit, or the verdict: it waits for the
    store's answer, or for its load. Source: vLLM 0.19.1 `get_num_new_matched_tokens`; P5, P19.
    """
    config, rules = step.state.config, step.state.rules
    offered = get_offered_hit(config, TRANSFERS.of(step), request, hit, rules)
    if offered is None:
        return Verdict.PASSED_OVER
    hit, is_async = offered
    request = replace(request, is_unsettled=rules[is_unconfirmed](hit, is_async))
    return rules[process_parking](step, request, hit) if is_async else (request, hit)


def process_parking(step: Step, request: RequestState, hit: Hit) -> Verdict:
    """Start an asynchronous load for `request` if its blocks are available; else change nothing.

    It takes no tokens and no running slot, and blocks only for the loaded tokens, and for drafts
    after a state; but the admission gate asks for all of the request, as for others.
    Source: vLLM 0.19.1 `schedule`
    (`load_kv_async`); P7, P8, P19.
    """
    granted = step.state.rules[admission.get_slots_at_admission](step, request, 0, hit)
    if isinstance(granted, Verdict):
        return granted
    step.pool, after = granted
    after = step.state.rules[get_parked](after, hit)
    step.requests[request.request_id] = after
    transfers = start_load(TRANSFERS.of(step), request.request_id, request.status)
    TRANSFERS.set(step, transfers)
    process_load(step, after, hit, is_async=True)
    process_counted(step, request, hit)
    process_asked(step, request, hit)
    return Verdict.SUSPENDED


def get_parked(request: RequestState, hit: Hit) -> RequestState:
    """Return a request that waits for its asynchronous load; the loaded tokens count as computed.

    Nothing is reported as cached before it is admitted. Source: vLLM 0.19.1 `schedule`; P19, P21.
    """
    status = Status.WAITING_FOR_REMOTE_KVS
    return replace(request, status=status, num_computed_tokens=hit.num_tokens)


def process_trial(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit a waiting request; one with an ended asynchronous load as it is after the load.

    If it is not admitted it keeps waiting for the load's admission, and none of its blocks is
    published. Source: P7, P15, P19.
    """
    request = step.requests[request_id]
    if request.status is not Status.WAITING_FOR_REMOTE_KVS:
        return admission.process_gates(step, request_id)
    transfers = TRANSFERS.of(step)
    if not is_received(transfers, request_id):
        return Verdict.PASSED_OVER
    pool = step.pool
    process_return(step, request_id)
    verdict = admission.process_gates(step, request_id)
    if verdict not in (Verdict.ADMITTED, Verdict.SUSPENDED):
        step.state.rules[process_refused_return](step, request, pool, transfers)
    return verdict


def process_refused_return(
    step: Step, request: RequestState, pool: Pool, transfers: Transfers
) -> None:
    """Undo the confirmation of a load, because its request is not admitted. Source: P7, P19."""
    step.pool, step.requests[request.request_id] = pool, request
    TRANSFERS.set(step, transfers)


def process_received_behind(step: Step, head_id: RequestId) -> None:
    """Admit requests behind a head that does not fit if their asynchronous load has ended.

    They have their blocks already. They are tried in queue order, each is admitted or stays where
    it is, and no blocks are reclaimed for them. Otherwise they would wait, holding blocks, for a
    head that may wait for these blocks; upstream lets them wait. Source: vLLM 0.19.1 `schedule`;
    P10, P15, P17.
    """
    if not TRANSFERS.of(step).parked:
        return
    queues, policy = ([*step.waiting], [*step.skipped]), step.state.config.policy
    while queue := select_queue(policy, *queues, step.requests):
        request_id = queue.pop(0)
        if not admission.has_room(step):
            return
        if request_id == head_id or not is_received(TRANSFERS.of(step), request_id):
            continue
        if process_trial(step, request_id) is Verdict.ADMITTED:
            (step.skipped if request_id in step.skipped else step.waiting).remove(request_id)


def process_admitted(step: Step, request: RequestState, after: RequestState, hit: Hit) -> None:
    """Load the external part of an admitted request's hit, and count it. Source: P17, P21."""
    if hit.num_pending:
        process_load(step, after, hit, is_async=False)
    process_asked(step, request, hit)


def process_asked(step: Step, request: RequestState, hit: Hit) -> None:
    """Count the store hit of a request that asked for one and got blocks. Source: vLLM 0.19.1
    `make_stats`; P21."""
    if not step.state.rules[counts_as_asked](request, step.state.rules):
        return
    stats, num_behind = step.stats, request.num_known_tokens - hit.num_local
    step.stats = replace(
        stats,
        external_prefix_cache_queries=stats.external_prefix_cache_queries + num_behind,
        external_prefix_cache_hits=stats.external_prefix_cache_hits + hit.num_pending,
    )


# Reclaim.


def list_queued(step: Step) -> list[RequestId]:
    """Return the queued requests without those with a load under way, which ends by itself.

    Source: P10, P17.
    """
    transfers = TRANSFERS.of(step)
    return [name for name in reclaim.list_queued(step) if not is_under_way(transfers, name)]


def process_gift(step: Step, giver_id: RequestId) -> None:
    """Take the blocks of a request that does not run; an ended load is forgotten. Source: P10,
    P17."""
    reclaim.process_gift(step, giver_id)
    if step.requests[giver_id].status is Status.WAITING_FOR_REMOTE_KVS:
        step.requests[giver_id] = get_unparked(step.requests[giver_id], TRANSFERS.of(step))
        TRANSFERS.set(step, forget_load(TRANSFERS.of(step), giver_id))


def get_unparked(request: RequestState, transfers: Transfers) -> RequestState:
    """Return a request with the status from before its asynchronous load: waiting or preempted.

    Source: vLLM 0.19.1 `_try_promote_blocked_waiting_request`; P26.
    """
    status = transfers.parked[request.request_id].status
    return replace(request, status=status, is_unsettled=False)
