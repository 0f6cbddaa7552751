"""Loading: external hits of waiting requests, synchronous and asynchronous.

    at once   |  hit  |  external  |   new   |     a row computes the new tokens after the load
    later     |  hit  |  external  |               no row, no running slot until the load has ended
    back      |       computed     |   new   |     it asks neither cache nor store

Until a load is confirmed only the blocks of the local hit are published (P19).
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.beside.transfers import (
    Transfers,
    compute_num_external,
    forget_load,
    get_offer,
)
from blockstep.spec.copies import replace
from blockstep.spec.memory.groups import compute_num_skipped_blocks
from blockstep.spec.memory.slots import compute_num_blocks, release_slots, settle_slots
from blockstep.spec.pool import Pool
from blockstep.spec.requests import FrameRow, Hit, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.step.giving import get_unparked, without_blocks
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import NULL_BLOCK, BlockTables, Config, KVLoad, Plan, RequestId


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
    """Return the hit extended by what the store has, and whether the load is asynchronous.

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
    hit = Hit(num_start, tables, hit.junction, num_external)
    return hit, offer.is_async


def is_unconfirmed(hit: Hit, is_async: bool) -> bool:
    """Whether no block of a request is published until its load is confirmed. Source: P19."""
    del is_async
    return hit.num_external > 0


def get_clipped_tables(config: Config, hit: Hit, num_start: int, held: BlockTables) -> BlockTables:
    """Return, per group, the blocks of a hit, with null blocks for those skipped after the load.

        hit      | 1 | 2 | 3 |                  of a window that begins in the fourth block:
        clipped  | 0 | 0 | 0 | 0 | what is loaded, and new

    Blocks that are held already are left out; a request that asks a store holds none, except by a
    quirk. Source: vLLM 0.19.1 `allocate_new_computed_blocks`; P5, P8.
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
    load = KVLoad(request.request_id, tuple(tables), hit.num_local, hit.num_external, is_async)
    step.loads.append(load)


def process_return(step: Step, request_id: RequestId) -> None:
    """Confirm the ended asynchronous load of a request, and publish the loaded blocks.

    If nothing was loaded, it holds nothing and asks again. If it is not admitted afterwards, all of
    this is undone (P7). Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    request = get_unparked(step.requests[request_id], step.transfers)
    step.transfers = forget_load(step.transfers, request_id)
    if request.num_computed_tokens == 0:
        fence = step.get_fence(request_id)
        step.pool = release_slots(step.pool, request, step.state.rules, fence)
        request = without_blocks(request)
    else:
        get = step.state.rules[get_returned]
        step.pool, request = get(step.state.config, step.pool, request)
    step.requests[request_id] = request


def get_returned(config: Config, pool: Pool, request: RequestState) -> tuple[Pool, RequestState]:
    """Return pool and request after its asynchronous load: all loaded tokens are computed.

    Source: vLLM 0.19.1 `_update_waiting_for_remote_kv`; P4, P19.
    """
    return settle_slots(config, pool, request, request.num_computed_tokens)


def tell_transfers(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the loads and saves of the step. Source: P19, P26."""
    return replace(plan, kv_loads=tuple(step.loads), kv_saves=tuple(step.saves))
