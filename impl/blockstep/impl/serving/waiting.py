"""Waiting: why each request that waits does, read off a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blockstep.impl.host.digests import SHA256
from blockstep.impl.host.lineage import Lineage
from blockstep.spec.vocabulary import (
    Config,
    PauseState,
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
    """The reason of each request that waits, in the order in which they are tried.

    Who waits in a pipeline without asynchronous scheduling for a token of its own in flight is told
    by another reason: no state shows those.

    Args:
        config: of the engine, with one KV group.
        state: between two events.
        requests: as they were submitted; of sessions, as they have become.

    Raises:
        ValueError: the config has several KV groups, whose room is not reckoned here.
    """
    if config.groups:
        rule = "must be empty: the room of several KV groups is not reckoned"
        raise ValueError(f"config: groups = {config.groups}: {rule}; give a state of one group")
    shown = {request.request_id: request for request in state.requests}
    adapters = {requests[name].adapter for name in state.running} - {None}
    found: dict[RequestId, WaitingReason] = {}
    is_behind = False
    for name in _list_in_line(config, state, requests):
        asked = requests[name]
        reason = _find_own(shown[name])
        if reason is None and _lacks_seat(config, asked.adapter, adapters):
            reason = WaitingReason.ADAPTER
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
    """How many wait for each reason, also for none: what a gauge shows."""
    return {reason: sum(one is reason for one in reasons.values()) for reason in WaitingReason}


def _list_in_line(
    config: Config, state: Snapshot, requests: Mapping[RequestId, Request]
) -> list[RequestId]:
    """Who waits, in the order in which they are tried."""
    line = [*state.skipped_waiting, *state.waiting]
    if config.policy is Policy.PRIORITY:
        line.sort(key=lambda name: (requests[name].priority, requests[name].arrival_time, name))
    return line


def _find_own(request: RequestSnapshot) -> WaitingReason | None:
    """What it waits for outside of the scheduler, if anything."""
    if request.status is Status.WAITING_FOR_STREAMING_REQ:
        return WaitingReason.INPUT
    is_for_grammar = request.status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    if is_for_grammar and not request.grammar_ready:
        return WaitingReason.GRAMMAR
    if request.num_output_placeholders:
        return WaitingReason.IN_FLIGHT
    return None


def _lacks_seat(config: Config, adapter: str | None, in_use: set[str | None]) -> bool:
    """Whether its adapter would be one too many."""
    if not config.max_loras or adapter is None or adapter in in_use:
        return False
    return len(in_use) >= config.max_loras


def _find_room(
    config: Config, state: Snapshot, request: RequestSnapshot, asked: Request
) -> WaitingReason:
    """What keeps the first in line out."""
    if len(state.running) >= config.max_num_seqs:
        return WaitingReason.SEATS
    tokens = (*asked.prompt_token_ids, *request.output_token_ids)
    held, num_computed = len(request.block_tables[0]), request.num_computed_tokens
    hits = [] if num_computed else list(_list_hits(config, state, asked, tokens))
    num_free = len(state.free_queue) - sum(state.ref_counts[block] == 0 for block in hits)
    size, num_start = config.block_size, num_computed + len(hits) * config.block_size
    whole = min(len(tokens), config.max_model_len)
    chunk = len(tokens) - num_start
    if config.long_prefill_token_threshold:
        chunk = min(chunk, config.long_prefill_token_threshold)
    chunk = min(chunk, config.max_num_batched_tokens)
    missing = [-(-end // size) - held - len(hits) for end in (whole, num_start + chunk)]
    if missing[1] > num_free:
        return WaitingReason.CAPACITY
    is_gated = config.scheduler_reserve_full_isl and missing[0] > num_free
    return WaitingReason.GATE if is_gated else WaitingReason.NEXT


def _list_hits(
    config: Config, state: Snapshot, asked: Request, tokens: tuple[int, ...]
) -> Iterator[int]:
    """The blocks of its prefix that can be found; one token at least is left to compute."""
    if not config.enable_prefix_caching or asked.skip_reading_prefix_cache:
        return
    size, blocks = config.block_size, []
    lineage = Lineage(asked, size, SHA256)
    for token_id in tokens[len(asked.prompt_token_ids) :]:
        lineage.append(token_id)
    for index in range((len(tokens) - 1) // size):
        key = lineage.key_of(index)
        if key not in state.cached:
            break
        blocks.append(state.cached[key][0])
    yield from blocks[: len(blocks) - config.drops_last_hit_block]
