"""Queues: the order of admission, and the choice of the victim.

Under FCFS `waiting` and `skipped_waiting` are plain queues: new requests join at the back,
preempted ones return to the front. Under PRIORITY both are kept sorted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from blockstep.spec.core.requests import RequestState
from blockstep.spec.vocabulary import Policy, RequestId, Status

Requests = Mapping[RequestId, RequestState]


def get_rank(request: RequestState) -> tuple[int, int, RequestId]:
    """Return the rank in a priority queue: priority, then arrival, then id; the least is next.

    Source: seed 001 "Request Ordering (PRIORITY mode)"; P16.
    """
    asked = request.request
    return (asked.priority, asked.arrival_time, asked.request_id)


def is_blocked(request: RequestState) -> bool:
    """Whether the request waits for something other than admission.

    Source: seed 001 "RequestStatus Lifecycle" (the three waiting sub-states).
    """
    return request.status not in (Status.WAITING, Status.PREEMPTED)


def waits_apart(request: RequestState, was_skipped: bool) -> bool:
    """Whether a request that joins a queue waits in `skipped_waiting`: if a step skipped it, or if
    it waits for something other than admission. Source: vLLM 0.19.1 `_enqueue_waiting_request`;
    P16.
    """
    return was_skipped or is_blocked(request)


def process_append(
    policy: Policy, queue: list[RequestId], request_id: RequestId, requests: Requests
) -> None:
    """Append a new request to `queue`. Source: seed 001 "FCFSRequestQueue,
    PriorityRequestQueue"."""
    if policy is Policy.PRIORITY:
        insort(queue, request_id, key=lambda other: get_rank(requests[other]))
    else:
        queue.append(request_id)


def process_prepend(
    policy: Policy, queue: list[RequestId], request_id: RequestId, requests: Requests
) -> None:
    """Put a preempted or skipped request at the front of `queue`; under PRIORITY by its rank.

    Source: seed 001 "Preemption Policy"; P16.
    """
    if policy is Policy.PRIORITY:
        insort(queue, request_id, key=lambda other: get_rank(requests[other]))
    else:
        queue.insert(0, request_id)


def select_queue(
    policy: Policy, waiting: list[RequestId], skipped: list[RequestId], requests: Requests
) -> list[RequestId]:
    """Return the queue whose head is tried next; empty if both are.

    FCFS: the skipped queue, whose requests are older. PRIORITY: that with the head of lower rank.
    Source: seed 001 "Queue Selection: FCFS vs PRIORITY"; P16.
    """
    if not skipped or not waiting:
        return skipped or waiting
    if policy is not Policy.PRIORITY:
        return skipped
    first_is_waiting = get_rank(requests[waiting[0]]) < get_rank(requests[skipped[0]])
    return waiting if first_is_waiting else skipped


def select_victim(policy: Policy, running: list[RequestId], requests: Requests) -> int:
    """Return the index in `running` of the request to preempt.

    FCFS: the last admitted. PRIORITY: the one of greatest rank, as in the queues. The rank has the
    id, because two requests of equal priority and arrival that do not both fit would otherwise
    preempt each other for ever. Source: seed 001 "Preemption in the Running Loop"; P10, P16.
    """
    if policy is not Policy.PRIORITY:
        return len(running) - 1
    return max(range(len(running)), key=lambda index: get_rank(requests[running[index]]))
