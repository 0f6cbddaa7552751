"""Loading: external hits of waiting requests, synchronous and asynchronous.

    at once   |  hit  |  external  |   new   |     a row computes the new tokens after the load
    later     |  hit  |  external  |               no row, no running slot until the load has ended
    back      |       computed     |   new   |     it asks neither cache nor store

A request whose asynchronous load has ended holds blocks until it is admitted, and two of them could
each lack the blocks of the other: they are reclaimed like those of a session (`features.reclaim`).
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
from blockstep.spec.core.slots import compute_num_blocks, publish_slots
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features import reclaim
from blockstep.spec.features.groups.hits import get_hit_table
from blockstep.spec.features.kv_transfer.transfers import (
    TRANSFERS,
    Load,
    compute_num_external,
    get_offer,
    is_received,
    is_under_way,
)
from blockstep.spec.vocabulary import (
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
    if not rules[asks_store](request):
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
    hit, request = Hit(num_start, tables, num_external), replace(request, is_unsettled=True)
    return rules[process_parking](step, request, hit) if offer.is_async else (request, hit)


def get_clipped_tables(config: Config, hit: Hit, num_start: int, held: BlockTables) -> BlockTables:
    """Return, per group, the blocks of a hit, with null blocks for those skipped after the load.

        hit      | 1 | 2 | 3 |                  of a window that begins in the fourth block:
        clipped  | 0 | 0 | 0 | 0 | what is loaded, and new

    Blocks that are held already are left out; a request that asks a store mostly holds none.
    Source: vLLM 0.19.1 `allocate_new_computed_blocks`; P5, P8.
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


def process_return(step: Step, request_id: RequestId) -> None:
    """Confirm a request's asynchronous load, which has finished, and publish the loaded blocks.

    If nothing was loaded, it holds nothing and asks again. If it is not admitted afterwards, all of
    this is undone (P7). Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    num_loaded = step.requests[request_id].num_computed_tokens
    if num_loaded == 0:
        process_gift(step, request_id)
        return
    request, rules = process_unparking(step, request_id), step.state.rules
    step.pool, request = settle_slots(step.state.config, step.pool, request, num_loaded, rules)
    step.requests[request_id] = request


def process_unparking(step: Step, request_id: RequestId) -> RequestState:
    """Forget the asynchronous load of a request; return the request with the status from before
    it: waiting or preempted. Source: vLLM 0.19.1 `_try_promote_blocked_waiting_request`; P26.
    """
    transfers = TRANSFERS.of(step)
    TRANSFERS.set(step, replace(transfers, parked=transfers.parked.without(request_id)))
    status = transfers.parked[request_id].status
    return replace(step.requests[request_id], status=status, is_unsettled=False)


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


def tell_transfers(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the loads of the step. Source: P19, P26."""
    return replace(plan, kv_loads=LOADS.of(step))


def fill_loads(step: Step, frame: Frame) -> Frame:
    """Return a frame with the loads that end before its rows read them. Source: P19."""
    return FRAME_LOADS.put(frame, tuple([load for load in LOADS.of(step) if not load.is_async]))


# Admission.


def process_parking(step: Step, request: RequestState, hit: Hit) -> Verdict:
    """Start an asynchronous load for `request` if its blocks are available; else change nothing.

    It takes no tokens and no running slot, and blocks only for the loaded tokens, and for drafts
    after a state; but the admission gate asks for all of the request, as for others. The loaded
    tokens count as computed; none is reported as cached before it is admitted. Source: vLLM 0.19.1
    `schedule` (`load_kv_async`); P7, P8, P19, P21.
    """
    rules, name, transfers = step.state.rules, request.request_id, TRANSFERS.of(step)
    granted = rules[admission.get_slots_at_admission](step, request, 0, hit)
    if isinstance(granted, Verdict):
        return granted
    step.pool, after = granted
    status = Status.WAITING_FOR_REMOTE_KVS
    step.requests[name] = replace(after, status=status, num_computed_tokens=hit.num_tokens)
    parked = transfers.parked.having(name, Load(request.status))
    TRANSFERS.set(step, replace(transfers, parked=parked))
    for admit in rules.hooks.admits:
        rules[admit](step, request, after, hit)
    return Verdict.SUSPENDED


def process_trial(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit a waiting request; one with an ended asynchronous load as it is after the load.

    If it is not admitted it keeps waiting for the load's admission, and none of its blocks is
    published. Source: P7, P15, P19.
    """
    pool, request, transfers = step.pool, step.requests[request_id], TRANSFERS.of(step)
    if request_id not in transfers.parked:
        return admission.process_gates(step, request_id)
    if not is_received(transfers, request_id):
        return Verdict.PASSED_OVER
    step.state.rules[process_return](step, request_id)
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
    if not step.state.rules[asks_store](request):
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
    if giver_id in TRANSFERS.of(step).parked:
        step.requests[giver_id] = process_unparking(step, giver_id)
