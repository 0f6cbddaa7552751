"""Waiting: the reason why each waiting request is not admitted, computed from a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from blockstep.impl.host.keys import Keys
from blockstep.impl.host.planning import REFUSED, try_admit
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.results import append_outputs
from blockstep.impl.host.state import (
    BATCH_ROW,
    BUDGET,
    FIRST_BLOCK,
    FREE_BATCH_ROW,
    HAS_EVENTS,
    HAS_SPARE,
    HELD,
    IS_ALIGNED,
    IS_OFFER_ASYNC,
    KIND,
    LAST_NODE,
    LEFT,
    LINKS,
    MAY_SHARE,
    NEXT_BATCH_ROW,
    NEXT_ITEM,
    NONE,
    NUM_COMPUTED,
    NUM_FREE,
    NUM_FULL,
    NUM_RUNNING,
    OFFERED,
    PARENT,
    PUBLISHED,
    REF_COUNT,
    RESERVES_WHOLE,
    State,
    grow_batch,
)
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    Config,
    KVOffer,
    PauseState,
    Pin,
    Policy,
    Request,
    RequestId,
    RequestSnapshot,
    Snapshot,
    Status,
    WaitingReason,
)


def explain_waiting(
    config: Config, state: Snapshot, requests: Mapping[RequestId, Request]
) -> dict[RequestId, WaitingReason]:
    """Return the reason of each waiting request, in the order in which admission tries them.

    A pipelined request without asynchronous scheduling that waits for a token in flight has
    another reason: states do not show such tokens.

    Args:
        config: the engine's config.
        state: a state between two events.
        requests: requests as submitted; sessions with all inputs so far.
    """
    shown = {request.request_id: request for request in state.requests}
    adapters = {requests[name].adapter for name in state.running} - {None}
    found: dict[RequestId, WaitingReason] = {}
    is_behind, is_closed = False, _is_closed(config, state)
    for name in _list_in_line(config, state, requests):
        asked = requests[name]
        reason = _find_own(shown[name]) or _find_remote(state, shown[name], asked)
        if reason is None and _lacks_lora_slot(config, asked.adapter, adapters):
            reason = WaitingReason.ADAPTER
        if is_closed:
            reason = WaitingReason.CLOSED
        if state.pause_state is not PauseState.UNPAUSED:
            reason = WaitingReason.PAUSED
        if reason is None and is_behind:
            reason = WaitingReason.BEHIND
        if reason is None:
            is_behind = True
            reason = _find_room(config, state, shown[name], asked)
        found[name] = reason
    return found


def count_waiting(reasons: Mapping[RequestId, WaitingReason]) -> dict[WaitingReason, int]:
    """Return the number of requests for each reason, 0 included, as a gauge shows them."""
    return {reason: sum(one is reason for one in reasons.values()) for reason in WaitingReason}


def _list_in_line(
    config: Config, state: Snapshot, requests: Mapping[RequestId, Request]
) -> list[RequestId]:
    """Return the waiting requests in the order in which admission tries them."""
    waiting = [*state.waiting]
    if state.pins is not None:
        warm = {pin.job_id for pin in state.pins.pins if pin.end > state.pins.now}
        returning = {r.request_id for r in state.requests if r.status is Status.PREEMPTED}
        cold = {name for name in waiting if requests[name].job_id not in warm}
        waiting.sort(key=lambda name: 0 if name in returning else 1 + (name in cold))
    line = [*state.skipped_waiting, *waiting]
    if config.policy is Policy.PRIORITY:
        line.sort(key=lambda name: (requests[name].priority, requests[name].arrival_time, name))
    return line


def _is_closed(config: Config, state: Snapshot) -> bool:
    """Return whether too few blocks are free to admit requests while others run."""
    was_closed = state.admission_closed
    enough = config.admission_high_blocks if was_closed else config.admission_low_blocks
    return bool(state.running) and len(state.free_queue) < enough


def _find_own(request: RequestSnapshot) -> WaitingReason | None:
    """Return the reason outside of the scheduler; None if there is none."""
    if request.status is Status.WAITING_FOR_STREAMING_REQ:
        return WaitingReason.INPUT
    is_for_grammar = request.status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    if is_for_grammar and not request.grammar_ready:
        return WaitingReason.GRAMMAR
    if request.num_output_placeholders:
        return WaitingReason.IN_FLIGHT
    return None


def _find_remote(state: Snapshot, request: RequestSnapshot, asked: Request) -> WaitingReason | None:
    """Return the reason that is due to the store; None if there is none."""
    if state.transfers is None:
        return None
    is_parked = request.status is Status.WAITING_FOR_REMOTE_KVS
    if is_parked and request.request_id not in state.transfers.received:
        return WaitingReason.REMOTE_KV
    asks = request.num_computed_tokens == 0 and not asked.skip_reading_prefix_cache
    if asks and _find_offer(state, request.request_id).num_tokens is None:
        return WaitingReason.STORE
    return None


def _find_offer(state: Snapshot, name: RequestId) -> KVOffer:
    offers = () if state.transfers is None else state.transfers.offers
    return next((offer for offer in offers if offer.request_id == name), KVOffer(name))


def _lacks_lora_slot(config: Config, adapter: str | None, in_use: set[str | None]) -> bool:
    """Return whether the request needs a LoRA slot and none is free."""
    if not config.max_loras or adapter is None or adapter in in_use:
        return False
    return len(in_use) >= config.max_loras


def _find_room(
    config: Config, state: Snapshot, request: RequestSnapshot, asked: Request
) -> WaitingReason:
    """Return why the first request in the queue is not admitted."""
    if len(state.running) >= config.max_num_seqs:
        return WaitingReason.SEATS
    giving: list[RequestSnapshot | Pin] = [] if request.num_computed_tokens else [request]
    if not state.running:
        giving += [one for one in state.requests if one != request and _may_give(state, one)]
    if state.pins is not None:
        giving += [pin for pin in state.pins.pins if not state.running or pin.end <= state.pins.now]
    s, slot = _imitate(config, state, request, asked, giving)
    if try_admit(s, slot, NONE) != REFUSED:
        return WaitingReason.NEXT
    s.scalars[RESERVES_WHOLE] = False
    is_gated = try_admit(s, slot, NONE) != REFUSED
    return WaitingReason.GATE if is_gated else WaitingReason.CAPACITY


def _imitate(
    config: Config,
    state: Snapshot,
    request: RequestSnapshot,
    asked: Request,
    giving: Sequence[RequestSnapshot | Pin],
) -> tuple[State, int]:
    """Return arrays of the host engine in which only this request is unfinished, and its index.

    The blocks of `giving` count as given back. The engine's own function can try to admit the
    request then: what it reads is as in the state, and the arrays are thrown away.
    """
    requests = Requests(config)
    slot = requests.add(asked)
    outputs = np.array(request.output_token_ids, np.int32)
    requests.reserve_nodes(len(outputs), 1)
    if not append_outputs(requests.state, slot, outputs):
        raise AssertionError(f"{request.request_id!r} waits, although its outputs have ended it")
    s = requests.state = grow_batch(requests.state, 1 + len(requests.state.lines))
    s.scalars[BUDGET], s.scalars[HAS_EVENTS] = config.max_num_batched_tokens, False
    s.scalars[NUM_RUNNING] = bool(state.running)
    row, offer = s.requests[slot], _find_offer(state, request.request_id)
    row[NEXT_ITEM], row[MAY_SHARE] = 1 << 40, config.enable_forks
    row[OFFERED] = 0 if asked.skip_reading_prefix_cache else offer.num_tokens or 0
    row[IS_OFFER_ASYNC] = offer.is_async
    given = Counter(block for one in giving for table in one.block_tables for block in table)
    for block, count in enumerate(state.ref_counts):
        s.blocks[block, REF_COUNT] = count - (given[block] if block != NULL_BLOCK else 0)
    s.scalars[NUM_FREE] = int((s.blocks[1:, REF_COUNT] == 0).sum())
    _show_cached(requests, state, slot)
    if request.num_computed_tokens:
        _show_tables(s, request, slot)
    return s, slot


def _show_cached(requests: Requests, state: Snapshot, slot: int) -> None:
    """Let the first cached block of each content of a request carry it."""
    s, keys = requests.state, Keys(requests)
    node, number = int(s.requests[slot, LAST_NODE]), int(s.requests[slot, NUM_FULL])
    while node != NONE:
        for group, links in enumerate(s.groups[:, LINKS].tolist()):
            if number % links == 0:
                blocks = state.cached.get(keys.key_in(node, group), (NONE,))
                s.carriers[node, group, FIRST_BLOCK] = blocks[0]
        node, number = int(s.nodes[node, PARENT]), number - 1


def _show_tables(s: State, request: RequestSnapshot, slot: int) -> None:
    """Let a request hold its blocks."""
    batch_row = int(s.scalars[FREE_BATCH_ROW])
    s.scalars[FREE_BATCH_ROW] = s.lines[batch_row, NEXT_BATCH_ROW]
    s.requests[slot, BATCH_ROW], s.requests[slot, NUM_COMPUTED] = (
        batch_row,
        request.num_computed_tokens,
    )
    pairs = zip(request.block_tables, request.num_cached_blocks, strict=True)
    for group, (table, published) in enumerate(pairs):
        s.block_tables[group, batch_row, : len(table)] = table
        s.holdings[slot, group, HELD], s.holdings[slot, group, LEFT] = (
            len(table),
            _count_left(table),
        )
        s.holdings[slot, group, PUBLISHED] = published
        s.holdings[slot, group, HAS_SPARE] = s.groups[group, KIND] == IS_ALIGNED


def _may_give(state: Snapshot, request: RequestSnapshot) -> bool:
    """Return whether the request's blocks can be reclaimed when no request runs."""
    is_parked = request.status is Status.WAITING_FOR_REMOTE_KVS
    has_come = state.transfers is not None and request.request_id in state.transfers.received
    return has_come or not is_parked


def _count_left(table: tuple[BlockId, ...]) -> int:
    """Return the number of leading null blocks of a table."""
    return next((index for index, block in enumerate(table) if block != NULL_BLOCK), len(table))
