"""Queues: waiting requests in the order of admission, as lists linked through the requests."""

from __future__ import annotations

from blockstep.impl.host import state as c
from blockstep.impl.host.jit import compiled, entry
from blockstep.impl.host.state import State


@compiled
def goes_before(s: State, slot: int, other: int) -> bool:
    """Whether `slot` is served before `other` under `Policy.PRIORITY` (seed 001, P16)."""
    if s.requests[slot, c.PRIORITY] != s.requests[other, c.PRIORITY]:
        return bool(s.requests[slot, c.PRIORITY] < s.requests[other, c.PRIORITY])
    if s.requests[slot, c.ARRIVAL] != s.requests[other, c.ARRIVAL]:
        return bool(s.requests[slot, c.ARRIVAL] < s.requests[other, c.ARRIVAL])
    return bool(s.requests[slot, c.LABEL] < s.requests[other, c.LABEL])


@compiled
def _insert(s: State, queue: int, slot: int, before: int) -> None:
    """Insert `slot` into a queue before `before`; at its end if that is NONE."""
    first = c.QUEUES + 2 * queue
    after = s.scalars[first + 1] if before == c.NONE else s.requests[before, c.PREVIOUS]
    s.requests[slot, c.PREVIOUS], s.requests[slot, c.NEXT] = after, before
    s.requests[slot, c.QUEUE] = queue
    if after == c.NONE:
        s.scalars[first] = slot
    else:
        s.requests[after, c.NEXT] = slot
    if before == c.NONE:
        s.scalars[first + 1] = slot
    else:
        s.requests[before, c.PREVIOUS] = slot


@entry("state", "int", "int")
def append(s: State, queue: int, slot: int) -> None:
    """Append the request to a queue; under PRIORITY, insert it by its order."""
    before = c.NONE
    if s.scalars[c.IS_PRIORITY]:
        last = s.scalars[c.QUEUES + 2 * queue + 1]
        while last != c.NONE and goes_before(s, slot, last):
            before, last = last, s.requests[last, c.PREVIOUS]
    _insert(s, queue, slot, before)


@entry("state", "int", "int")
def prepend(s: State, queue: int, slot: int) -> None:
    """Prepend the request to a queue; under PRIORITY, insert it by its order."""
    before = s.scalars[c.QUEUES + 2 * queue]
    if s.scalars[c.IS_PRIORITY]:
        while before != c.NONE and goes_before(s, before, slot):
            before = s.requests[before, c.NEXT]
    _insert(s, queue, slot, before)


@entry("state", "int")
def leave_queue(s: State, slot: int) -> None:
    """Remove the request from the queue that it is in."""
    first = c.QUEUES + 2 * s.requests[slot, c.QUEUE]
    before, after = s.requests[slot, c.PREVIOUS], s.requests[slot, c.NEXT]
    if before == c.NONE:
        s.scalars[first] = after
    else:
        s.requests[before, c.NEXT] = after
    if after == c.NONE:
        s.scalars[first + 1] = before
    else:
        s.requests[after, c.PREVIOUS] = before


@compiled
def select_head(s: State) -> int:
    """Return the request that is tried next; NONE if both queues are empty."""
    waiting, skipped = s.scalars[c.QUEUES + 2 * c.WAITING], s.scalars[c.QUEUES + 2 * c.SKIPPED]
    if skipped == c.NONE:
        return int(waiting)
    if waiting == c.NONE or s.scalars[c.IS_PRIORITY] == 0:
        return int(skipped)
    return int(waiting if goes_before(s, waiting, skipped) else skipped)


@entry("state", "int")
def pass_over(s: State, slot: int) -> None:
    """Skip a request that cannot be admitted in this step, while others may be."""
    leave_queue(s, slot)
    _insert(s, c.PASSED, slot, c.NONE)


@compiled
def return_passed(s: State) -> None:
    """Put the requests skipped in this step first in the skipped queue, in the same order."""
    slot = s.scalars[c.QUEUES + 2 * c.PASSED + 1]
    while slot != c.NONE:
        before = s.requests[slot, c.PREVIOUS]
        leave_queue(s, slot)
        prepend(s, c.SKIPPED, slot)
        slot = before
