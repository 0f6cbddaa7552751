"""Queues: waiting requests in the order of admission, as lists linked through the requests."""

from __future__ import annotations

from blockstep.impl.compiled.jit import compiled, entry
from blockstep.impl.compiled.state import (
    ARRIVAL,
    IS_PRIORITY,
    LABEL,
    NEXT,
    NONE,
    PASSED,
    PREVIOUS,
    PRIORITY,
    QUEUE,
    QUEUES,
    SKIPPED,
    WAITING,
    State,
)


@compiled
def get_head(s: State, queue: int) -> int:
    """Return the first request of a queue; NONE if it is empty."""
    return int(s.scalars[QUEUES + 2 * queue])


@compiled
def goes_before(s: State, slot: int, other: int) -> bool:
    """Whether `slot` is served before `other` under `Policy.PRIORITY` (seed 001, P16)."""
    if s.requests[slot, PRIORITY] != s.requests[other, PRIORITY]:
        return bool(s.requests[slot, PRIORITY] < s.requests[other, PRIORITY])
    if s.requests[slot, ARRIVAL] != s.requests[other, ARRIVAL]:
        return bool(s.requests[slot, ARRIVAL] < s.requests[other, ARRIVAL])
    return bool(s.requests[slot, LABEL] < s.requests[other, LABEL])


@compiled
def _insert(s: State, queue: int, slot: int, before: int) -> None:
    """Insert `slot` into a queue before `before`; at its end if that is NONE."""
    first = QUEUES + 2 * queue
    after = s.scalars[first + 1] if before == NONE else s.requests[before, PREVIOUS]
    s.requests[slot, PREVIOUS], s.requests[slot, NEXT] = after, before
    s.requests[slot, QUEUE] = queue
    if after == NONE:
        s.scalars[first] = slot
    else:
        s.requests[after, NEXT] = slot
    if before == NONE:
        s.scalars[first + 1] = slot
    else:
        s.requests[before, PREVIOUS] = slot


@entry("state", "int", "int")
def append(s: State, queue: int, slot: int) -> None:
    """Append the request to a queue; under PRIORITY, insert it by its order."""
    before = NONE
    if s.scalars[IS_PRIORITY]:
        last = s.scalars[QUEUES + 2 * queue + 1]
        while last != NONE and goes_before(s, slot, last):
            before, last = last, s.requests[last, PREVIOUS]
    _insert(s, queue, slot, before)


@entry("state", "int", "int")
def prepend(s: State, queue: int, slot: int) -> None:
    """Prepend the request to a queue; under PRIORITY, insert it by its order."""
    before = s.scalars[QUEUES + 2 * queue]
    if s.scalars[IS_PRIORITY]:
        while before != NONE and goes_before(s, before, slot):
            before = s.requests[before, NEXT]
    _insert(s, queue, slot, before)


@entry("state", "int")
def leave_queue(s: State, slot: int) -> None:
    """Remove the request from the queue that it is in."""
    first = QUEUES + 2 * s.requests[slot, QUEUE]
    before, after = s.requests[slot, PREVIOUS], s.requests[slot, NEXT]
    if before == NONE:
        s.scalars[first] = after
    else:
        s.requests[before, NEXT] = after
    if after == NONE:
        s.scalars[first + 1] = before
    else:
        s.requests[after, PREVIOUS] = before


@compiled
def select_queue(s: State) -> int:
    """Return the queue whose head is tried next; `WAITING` if both are empty."""
    waiting, skipped = get_head(s, WAITING), get_head(s, SKIPPED)
    if skipped == NONE:
        return WAITING
    if waiting == NONE or s.scalars[IS_PRIORITY] == 0:
        return SKIPPED
    return WAITING if goes_before(s, waiting, skipped) else SKIPPED


@entry("state", "int")
def pass_over(s: State, slot: int) -> None:
    """Skip a request that cannot be admitted in this step, while others may be."""
    leave_queue(s, slot)
    _insert(s, PASSED, slot, NONE)


@compiled
def return_passed(s: State) -> None:
    """Put the requests skipped in this step first in the skipped queue, in the same order."""
    slot = s.scalars[QUEUES + 2 * PASSED + 1]
    while slot != NONE:
        before = s.requests[slot, PREVIOUS]
        leave_queue(s, slot)
        prepend(s, SKIPPED, slot)
        slot = before
