"""Invariants of groups: what each table has in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blockstep.spec.core.requests import Holding, RequestState, list_rows_in_flight, without_nulls
from blockstep.spec.core.state import State
from blockstep.spec.features.groups.kinds import (
    compute_max_held_blocks,
    compute_max_reach,
    compute_max_unverified,
    compute_num_skipped_blocks,
    get_num_slots_of,
)
from blockstep.spec.vocabulary import NULL_BLOCK, GroupKind, KVGroup, Status

PARKED = Status.WAITING_FOR_REMOTE_KVS


def list_holdings(state: State) -> list[tuple[RequestState, KVGroup, Holding]]:
    """Return what every request holds of every group. Source: architecture D13."""
    return [
        (request, group, holding)
        for _, request in sorted(state.requests.items())
        for group, holding in zip(state.config.kv_groups, request.holdings, strict=True)
    ]


def is_every_attended_block_held(state: State) -> bool:
    """Null blocks only replace blocks to which no token still to be computed attends.

    Such a token may be the first draft in flight. Null blocks come first in a table, except in a
    recurrent group, whose states of drafts move. There the attended blocks are those that the next
    row may continue from, and the blocks for states after drafts. A request whose asynchronous load
    failed from the first token on will start again in other blocks. Source: P1, P8.
    """
    for request, group, holding in list_holdings(state):
        table, num_computed = holding.block_table, request.num_computed_tokens
        is_begun = any(request.block_tables) and (num_computed or request.status is not PARKED)
        if group.kind is GroupKind.CROSS_ATTENTION or not is_begun:
            continue
        rows = list_rows_in_flight(state.frames, request.request_id)
        num_unverified = sum(len(row.draft_token_ids) for row in rows)
        num_skipped = compute_num_skipped_blocks(group, num_computed - num_unverified)
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
    reach, doubt = compute_max_reach(state.config), compute_max_unverified(state.config)
    for _, group, holding in list_holdings(state):
        table = holding.block_table
        num_slots = (len(table) - group.num_speculative_blocks) * group.block_size
        if len(without_nulls(table)) > compute_max_held_blocks(group, num_slots, reach, doubt):
            return False
    return True


def is_every_table_begun(state: State) -> bool:
    """A request with computed tokens has a block in each table, except for cross attention without
    items. Source: P12."""
    return all(
        holding.block_table
        or request.num_computed_tokens == 0
        or get_num_slots_of(group, 1, request.request) == 0
        for request, group, holding in list_holdings(state)
    )


INVARIANTS: Final[tuple[Callable[[State], bool], ...]] = (
    is_every_attended_block_held,
    is_every_window_as_small_as_charged,
    is_every_table_begun,
)
