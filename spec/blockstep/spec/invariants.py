"""Invariants: predicates that hold in every state that the specification can reach.

The name of each says what holds. They are about the spec's own state; the properties of every
engine are in `blockstep.conformance.judge.properties`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from blockstep.spec.core.prefix_cache import get_group_keys
from blockstep.spec.core.queues import get_rank
from blockstep.spec.core.requests import (
    NOTHING_HELD,
    FrameRow,
    Holding,
    RequestState,
    list_rows_in_flight,
    without_nulls,
)
from blockstep.spec.core.state import State
from blockstep.spec.features import FEATURES
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    Config,
    KVGroup,
    Policy,
    RequestId,
    Status,
)

PARKED = Status.WAITING_FOR_REMOTE_KVS


def list_holdings(state: State) -> list[tuple[RequestState, int, KVGroup, Holding]]:
    """Return what every request holds of every group, with the group's index.

    Source: architecture D13.
    """
    groups = [*enumerate(state.config.kv_groups)]
    return [
        (request, index, group, holding)
        for request in state.requests.values()
        for (index, group), holding in zip(groups, request.holdings, strict=True)
    ]


def list_rows_of(state: State) -> dict[RequestId, list[FrameRow]]:
    """Return the rows in flight that will deliver, by request, oldest first. Source: P13."""
    return {name: list_rows_in_flight(state.frames, name) for name in state.requests}


def is_every_block_free_or_held(state: State) -> bool:
    """A block is queued exactly once with no holder, or not at all with all of its holders.

    The null block is neither, wherever a table has it. Source: P1.
    """
    pool = state.pool
    holders = [0] * state.config.num_blocks
    for _, _, _, holding in list_holdings(state):
        for block_id in without_nulls(holding.block_table):
            holders[block_id] += 1
    for list_held in [one.list_held for one in FEATURES if one.list_held is not None]:
        for tables in list_held(state):
            for block_id in without_nulls(sum(tables, ())):
                holders[block_id] += 1
    for deferred in pool.deferred_frees:
        for block_id in deferred.block_ids:
            holders[block_id] += 1
    usable = range(NULL_BLOCK + 1, state.config.num_blocks)
    return (
        pool.ref_counts == tuple(holders)
        and holders[NULL_BLOCK] == 0
        and sorted(pool.free_queue) == [block_id for block_id in usable if holders[block_id] == 0]
    )


def is_every_unpublished_block_held_once(state: State) -> bool:
    """A block that may still be written has one holder, or a copy is written. Source: P2."""
    return all(
        state.pool.ref_counts[block_id] == 1
        for request, _, group, holding in list_holdings(state)
        for block_id in without_nulls(
            holding.block_table[count_unwritable(state, request, group, holding) :]
        )
    )


def count_unwritable(state: State, request: RequestState, group: KVGroup, holding: Holding) -> int:
    """Return the leading blocks of a table that are not written without having been copied.

    Source: P2.
    """
    num_tokens = request.num_computed_tokens if state.config.enable_forks else 0
    return max(holding.num_cached_blocks, -(-num_tokens // group.block_size))


def is_cache_map_exact(state: State) -> bool:
    """The prefix-cache map and the blocks' keys agree. Source: P3."""
    pool = state.pool
    mapped: dict[BlockId, object] = {}
    for key in pool.cached:
        for block_id in pool.cached[key]:
            if block_id in mapped:
                return False
            mapped[block_id] = key
    return all(mapped.get(block_id) == key for block_id, key in enumerate(pool.block_keys))


def is_every_settled_block_keyed(state: State) -> bool:
    """The published or hit blocks of a table have the keys of its request's tokens. Source: P3."""
    for request, index, group, holding in list_holdings(state):
        num_settled, num_links = (
            holding.num_cached_blocks,
            group.block_size // state.config.block_size,
        )
        keys = get_group_keys(request.block_keys, index, num_links, 0, num_settled)
        settled = holding.block_table[:num_settled]
        if not len(settled) == len(keys) == num_settled:
            return False
        for block_id, key in zip(settled, keys, strict=True):
            if state.pool.block_keys[block_id] != (None if block_id == NULL_BLOCK else key):
                return False
    return True


def is_every_request_in_one_place(state: State) -> bool:
    """Each unfinished request is in exactly one queue, the one of its status. Source: P13."""
    places = (*state.waiting, *state.skipped_waiting, *state.running)
    return sorted(places) == sorted(state.requests) and all(
        (state.requests[name].status is Status.RUNNING) == (name in state.running)
        for name in places
    )


def may_hold_blocks(config: Config, request: RequestState) -> bool:
    """Whether it runs, has an asynchronous load, is a session that has run, or a branch.

    Source: P17.
    """
    return request.status in (Status.RUNNING, PARKED) or (
        (request.request.resumable or config.enable_forks)
        and request.status in (Status.WAITING, Status.WAITING_FOR_STREAMING_REQ)
    )


def is_token_accounting_sound(state: State) -> bool:
    """Computed tokens are known, except for drafts in flight; only running requests have any.

    Source: P12.
    """
    for name, rows in list_rows_of(state).items():
        request, num_drafts = state.requests[name], len(rows[-1].draft_token_ids) if rows else 0
        num_ahead = request.num_output_placeholders or num_drafts
        if not 0 <= request.num_computed_tokens <= request.num_known_tokens + num_ahead:
            return False
        if not may_hold_blocks(state.config, request) and {*request.holdings} != {*NOTHING_HELD}:
            return False
    return True


def is_every_placeholder_in_flight(state: State) -> bool:
    """A request's placeholders are those of its rows in flight; it then runs just after them.

    Source: P12.
    """
    for name, rows in list_rows_of(state).items():
        request, num_promised = state.requests[name], 0
        if state.config.async_scheduling:
            num_promised = sum(1 + len(row.draft_token_ids) for row in rows if row.samples)
        if request.num_output_placeholders != num_promised:
            return False
        num_behind = request.num_computed_tokens - request.num_known_tokens
        if num_promised and request.status is Status.RUNNING and num_behind != num_promised - 1:
            return False
    return True


def is_within_limits(state: State) -> bool:
    """Running slots and frames are within their limits. Source: P9, P10."""
    config = state.config
    num_running, num_frames = len(state.running), len(state.frames)
    return num_running <= config.max_num_seqs and num_frames <= config.max_frames_in_flight


def is_priority_queue_sorted(state: State) -> bool:
    """Under PRIORITY both waiting queues are in order of rank. Source: P16."""
    if state.config.policy is not Policy.PRIORITY:
        return True
    return all(
        get_rank(state.requests[first]) < get_rank(state.requests[second])
        for queue in (state.waiting, state.skipped_waiting)
        for first, second in pairwise(queue)
    )


INVARIANTS: tuple[Callable[[State], bool], ...] = (
    is_every_block_free_or_held,
    is_every_unpublished_block_held_once,
    is_cache_map_exact,
    is_every_settled_block_keyed,
    is_every_request_in_one_place,
    is_token_accounting_sound,
    is_every_placeholder_in_flight,
    is_within_limits,
    is_priority_queue_sorted,
    *[invariant for feature in FEATURES for invariant in feature.invariants],
)


def get_broken_invariants(state: State) -> tuple[str, ...]:
    """Return the names of invariants that do not hold in `state`. Source: properties P1 to P16."""
    return tuple(holds.__name__ for holds in INVARIANTS if not holds(state))
