"""Waiting: the reason why each waiting request is not admitted, computed from a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from blockstep.impl.host.digests import SHA256
from blockstep.impl.host.groups import GroupHits, GroupMemory
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.table import Holding
from blockstep.impl.refusals import count_beside
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
        if reason is None and _lacks_seat(config, asked.adapter, adapters):
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


def _lacks_seat(config: Config, adapter: str | None, in_use: set[str | None]) -> bool:
    """Return whether the request needs a LoRA slot and none is free."""
    if not config.max_loras or adapter is None or adapter in in_use:
        return False
    return len(in_use) >= config.max_loras


class _Shown:
    """A state's blocks behind the interface that `GroupMemory` uses."""

    def __init__(self, state: Snapshot, giving: Sequence[RequestSnapshot | Pin]) -> None:
        """Count the blocks of `giving` (requests and pins) as given back."""
        self._cached = state.cached
        given = Counter(
            block
            for one in giving
            for table in one.block_tables
            for block in table
            if block != NULL_BLOCK
        )
        self.ref_counts = [count - given[block] for block, count in enumerate(state.ref_counts)]
        self.num_free = len(state.free_queue)
        self.num_free += sum(self.ref_counts[block] == 0 for block in given)

    def is_free(self, block: BlockId) -> bool:
        return self.ref_counts[block] == 0

    def find(self, lineage: Lineage, index: int, group: int) -> BlockId | None:
        return self._cached.get(lineage.key_of(index, group), (None,))[0]

    def share_keys(self, lineage: Lineage, block: BlockId) -> None:
        """Do nothing: a state does not change."""


def _find_room(
    config: Config, state: Snapshot, request: RequestSnapshot, asked: Request
) -> WaitingReason:
    """Return why the first request in the queue is not admitted."""
    if len(state.running) >= config.max_num_seqs:
        return WaitingReason.SEATS
    computed = request.num_computed_tokens
    giving: list[RequestSnapshot | Pin] = [] if computed else [request]
    if not state.running:
        giving += [one for one in state.requests if one != request and _may_give(state, one)]
    if state.pins is not None:
        giving += [pin for pin in state.pins.pins if not state.running or pin.end <= state.pins.now]
    shown = cast("Any", _Shown(state, giving))
    memory = GroupMemory(config, shown, shown)
    num_known = len(asked.prompt_token_ids) + len(request.output_token_ids)
    if computed:
        holdings = [
            Holding([*table], num_left=_count_left(table), num_beside=count_beside(asked))
            for table in request.block_tables
        ]
        end = _find_end(config, memory, asked, num_known, computed)
        free = shown.num_free + memory.count_leaving(holdings, computed)
        whole = memory.count_to_end(holdings, computed, num_known)
        needed = memory.count_missing(holdings, Extent(end, end))
        needed += memory.count_copies(holdings, computed)
    else:
        hits = _find_hits(config, memory, asked, request)
        start, is_async = _find_start(state, request.request_id, asked, hits, num_known)
        end = start if is_async else _find_end(config, memory, asked, num_known, start)
        free, num_beside = shown.num_free, count_beside(asked)
        whole = memory.count_for_gate(hits, num_known) + memory.count_across(num_beside)
        needed = memory.count_to_admit(hits, Extent(end, end), num_beside)
        needed += sum(shown.is_free(block) for block in hits.shared())
    if state.running:
        free -= config.watermark_blocks
    if needed > free:
        return WaitingReason.CAPACITY
    is_gated = config.scheduler_reserve_full_isl and whole > free
    return WaitingReason.GATE if is_gated else WaitingReason.NEXT


def _may_give(state: Snapshot, request: RequestSnapshot) -> bool:
    """Return whether the request's blocks can be reclaimed when no request runs."""
    is_parked = request.status is Status.WAITING_FOR_REMOTE_KVS
    has_come = state.transfers is not None and request.request_id in state.transfers.received
    return has_come or not is_parked


def _count_left(table: tuple[BlockId, ...]) -> int:
    """Return the number of leading null blocks of a table."""
    return next((index for index, block in enumerate(table) if block != NULL_BLOCK), len(table))


def _find_end(
    config: Config, memory: GroupMemory, asked: Request, num_known: int, start: int
) -> int:
    """Return the end of the next chunk if the request gets the whole token budget."""
    chunk = min(num_known - start, config.max_num_batched_tokens)
    if config.long_prefill_token_threshold:
        chunk = min(chunk, config.long_prefill_token_threshold)
    chunk = memory.align(start, chunk, len(asked.prompt_token_ids), num_known)
    return min(start + chunk, config.max_model_len)


def _find_hits(
    config: Config, memory: GroupMemory, asked: Request, request: RequestSnapshot
) -> GroupHits:
    """Return the cached blocks of the request's prefix; at least one token is left to compute."""
    if not config.enable_prefix_caching or asked.skip_reading_prefix_cache:
        return memory.no_hits
    lineage = Lineage(asked, config.block_size, SHA256)
    for token_id in request.output_token_ids:
        lineage.append(token_id)
    return memory.find_hits(lineage, len(lineage.tokens))


def _find_start(
    state: Snapshot, name: RequestId, asked: Request, hits: GroupHits, num_known: int
) -> tuple[int, bool]:
    """Return the number of tokens hit and loaded, and whether the load is asynchronous."""
    offer, local = _find_offer(state, name), hits.num_tokens
    total = min(offer.num_tokens or 0, num_known - 1)
    if asked.skip_reading_prefix_cache or total <= local:
        return local, False
    return total, offer.is_async
