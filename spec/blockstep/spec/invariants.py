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
from blockstep.spec.features.admission_control import ADMISSION_CLOSED
from blockstep.spec.features.groups.kinds import (
    compute_max_doubt,
    compute_max_held_blocks,
    compute_max_reach,
    compute_num_skipped_blocks,
    get_num_slots_of,
)
from blockstep.spec.features.kv_transfer.transfers import TRANSFERS
from blockstep.spec.features.pins import PINS
from blockstep.spec.features.sessions import UPDATES
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    Config,
    GroupKind,
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
    for entry in TRANSFERS.of(state).held.values():
        for block_id in without_nulls(sum(entry.block_tables, ())):
            holders[block_id] += 1
    for deferred in pool.deferred_frees:
        for block_id in deferred.block_ids:
            holders[block_id] += 1
    for pin in PINS.of(state).pins:
        for block_id in without_nulls(sum(pin.block_tables, ())):
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


def is_every_attended_block_held(state: State) -> bool:
    """Null blocks only replace blocks to which no token still to be computed attends.

    Such a token may be the first draft in flight. Null blocks come first in a table, except in a
    recurrent group, whose states of drafts move. There the attended blocks are those that the next
    row may continue from, and the blocks for states after drafts. A request whose asynchronous load
    failed from the first token on will start again in other blocks. Source: P1, P8.
    """
    rows = list_rows_of(state)
    for request, _, group, holding in list_holdings(state):
        table, num_computed = holding.block_table, request.num_computed_tokens
        is_begun = any(request.block_tables) and (num_computed or request.status is not PARKED)
        if group.kind is GroupKind.CROSS_ATTENTION or not is_begun:
            continue
        num_in_doubt = sum(len(row.draft_token_ids) for row in rows[request.request_id])
        num_skipped = compute_num_skipped_blocks(group, num_computed - num_in_doubt)
        num_blocks = len(table) - group.num_speculative_blocks
        is_gap_free = group.kind is not GroupKind.RECURRENT
        if is_gap_free and NULL_BLOCK in table[table.count(NULL_BLOCK) :]:
            return False
        if NULL_BLOCK in table[num_skipped:] or num_blocks * group.block_size < num_computed:
            return False
    return True


def is_every_window_as_small_as_charged(state: State) -> bool:
    """No request holds more blocks of a group than its admission and its gate assume.

    Source: P8, P11.
    """
    reach, doubt = compute_max_reach(state.config), compute_max_doubt(state.config)
    for _, _, group, holding in list_holdings(state):
        table = holding.block_table
        num_slots = (len(table) - group.num_speculative_blocks) * group.block_size
        if len(without_nulls(table)) > compute_max_held_blocks(group, num_slots, reach, doubt):
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


def is_every_rest_behind_a_stop(state: State) -> bool:
    """A session is idle only without further input, rows in flight and placeholders.

    It has computed what it keeps, or holds nothing. Source: P10, P12, P17.
    """
    return all(
        request.request.resumable
        and not UPDATES.of(request)
        and not list_rows_in_flight(state.frames, request.request_id)
        and (request.num_output_placeholders, request.spec_token_ids) == (0, ())
        and request.num_computed_tokens in (0, request.num_known_tokens - 1)
        for request in state.requests.values()
        if request.status is Status.WAITING_FOR_STREAMING_REQ
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
        if request.num_computed_tokens > 0 and not is_every_table_begun(state.config, request):
            return False
    return True


def is_every_table_begun(config: Config, request: RequestState) -> bool:
    """Whether each table has a block, except for cross attention without items. Source: P12."""
    groups = zip(config.kv_groups, request.block_tables, strict=True)
    return all(table or get_num_slots_of(group, 1, request.request) == 0 for group, table in groups)


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
    """Running slots, frames, adapters and admission thresholds are within their limits.

    Source: P9, P10.
    """
    config = state.config
    adapters = {state.requests[name].request.adapter for name in state.running} - {None}
    return (
        len(state.running) <= config.max_num_seqs
        and len(state.frames) <= config.max_frames_in_flight
        and not 0 < config.max_loras < len(adapters)
        and (config.admission_high_blocks > 0 or not ADMISSION_CLOSED.of(state))
    )


def is_every_deferred_free_of_a_frame_in_flight(state: State) -> bool:
    """Deferred frees wait for a frame in flight, and exist only with a store. Source: P17."""
    frame_ids = [frame.frame_id for frame in state.frames]
    deferred_frees = state.pool.deferred_frees
    return (state.config.kv_connector or not deferred_frees) and all(
        deferred.frame_id in frame_ids
        and deferred.block_ids
        and NULL_BLOCK not in deferred.block_ids
        for deferred in deferred_frees
    )


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
    is_every_attended_block_held,
    is_every_window_as_small_as_charged,
    is_every_request_in_one_place,
    is_every_rest_behind_a_stop,
    is_token_accounting_sound,
    is_every_placeholder_in_flight,
    is_within_limits,
    is_every_deferred_free_of_a_frame_in_flight,
    is_priority_queue_sorted,
    *[invariant for feature in FEATURES for invariant in feature.invariants],
)


def get_broken_invariants(state: State) -> tuple[str, ...]:
    """Return the names of invariants that do not hold in `state`. Source: properties P1 to P16."""
    return tuple(holds.__name__ for holds in INVARIANTS if not holds(state))
