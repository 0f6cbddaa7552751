"""Changes: the requests whose snapshots differ from the last ones, in machine code."""

from __future__ import annotations

from typing import Final

import numpy as np

from blockstep.impl.host import state as c
from blockstep.impl.host.jit import compiled, entry
from blockstep.impl.host.state import Int32s, Int64s, State

_SHOWN: Final = (
    *(c.BIRTH, c.STATUS, c.NUM_KNOWN, c.NUM_COMPUTED, c.NUM_PROMISED, c.NUM_DRAFTS, c.IS_PREFILL),
    *(c.NUM_CACHED_TOKENS, c.TIMES_PREEMPTED, c.GRAMMAR_READY, c.NUM_PROMPT, c.LAST_NODE),
    c.SEAT,  # by which drafts and tables are found
)
"""Columns of a request that its snapshot shows, or that change whenever its tokens do."""


def forget(s: State) -> State:
    """Return arrays for `find_changes` which no request of `s` equals.

    Only those arrays are new that it compares; it writes no others.
    """
    return s._replace(
        requests=np.full_like(s.requests, c.NONE),
        holdings=np.zeros_like(s.holdings),
        block_tables=np.zeros_like(s.block_tables),
        drafts=np.zeros_like(s.drafts),
    )


def fits(last: State, s: State) -> bool:
    """Return whether the arrays that `find_changes` compares have the same shapes in both."""
    compared = ("requests", "holdings", "block_tables", "drafts")
    return all(getattr(last, name).shape == getattr(s, name).shape for name in compared)


@entry("state", "state", "out int64 1")
def find_changes(s: State, last: State, found: Int64s) -> int:
    """List the changed requests and both queues; return the number of entries written.

    Args:
        s: The state.
        last: What the call before has seen, which is brought up to date.
        found: [3 + 3 * slots]: the numbers of changed, waiting and skipped requests, and then
            these requests.
    """
    end = 3
    for slot in range(len(s.requests)):
        if s.requests[slot, c.BIRTH] and _take_changes(s, last, slot):
            found[end] = slot
            end += 1
    found[0] = end - 3
    for queue in range(2):
        slot, first = s.scalars[c.QUEUES + 2 * queue], end
        while slot != c.NONE:
            found[end] = slot
            end += 1
            slot = s.requests[slot, c.NEXT]
        found[1 + queue] = end - first
    return end


@compiled
def _take_changes(s: State, last: State, slot: int) -> bool:
    """Return whether a request has changed, and copy what has into `last`."""
    is_changed = False
    for column in _SHOWN:
        if last.requests[slot, column] != s.requests[slot, column]:
            last.requests[slot, column] = s.requests[slot, column]
            is_changed = True
    seat = s.requests[slot, c.SEAT]
    is_changed |= _take(s.drafts[seat], last.drafts[seat], s.requests[slot, c.NUM_DRAFTS])
    for group in range(len(s.groups)):
        held, known = s.holdings[slot, group], last.holdings[slot, group]
        is_changed |= _take(held, known, c.HOLDING_COLUMNS)
        is_changed |= _take(
            s.block_tables[group, seat], last.block_tables[group, seat], held[c.HELD]
        )
    return is_changed


@compiled
def _take(row: Int64s | Int32s, last: Int64s | Int32s, count: int) -> bool:
    """Return whether the first `count` values of a row have changed, and copy those that have."""
    is_changed = False
    for index in range(count):
        if last[index] != row[index]:
            last[index] = row[index]
            is_changed = True
    return is_changed
