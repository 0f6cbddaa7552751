"""Reclaim: blocks are taken from requests that hold some without running.

Between two inputs a session keeps its blocks for an unknown time: a client that never continues
would keep them for ever, and two waiting sessions could each lack the blocks that the other holds
(upstream #49439). So if a request lacks blocks and no other one runs, it takes them from sessions,
one at a time, and only as many as it needs. Since the empty pool can hold every request alone, the
head of the queue is then admitted, and a request that runs alone continues: no request waits for
ever (P10), and each hold has an end (P17). While other requests run it waits for their blocks.

Idle sessions are reclaimed before requests that wait for admission, and among equals the one that
would be tried last. A session loses no tokens by this: it looks for a hit and computes the rest
again, as after a preemption; but it did not run, so it does not count as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.queues import Requests, get_rank
from blockstep.spec.core.requests import NOTHING_HELD, RequestState
from blockstep.spec.core.slots import release_slots
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import Policy, RequestId, Status


def process_reclaim(step: Step, receiver_id: RequestId) -> bool:
    """Reclaim the blocks of a request that does not run; return whether one was found.

    Blocks that would be free only after a commit of a frame in flight are not reclaimed: the step
    waits for that commit, and reclaims no other blocks meanwhile. Source: upstream #49439; P10,
    P17.
    """
    giver_id = find_giver(step, receiver_id)
    if giver_id is None:
        return False
    if step.get_fence(giver_id) is not None:
        step.awaits_answer = True
        return False
    step.state.rules[process_gift](step, giver_id)
    return True


def find_giver(step: Step, receiver_id: RequestId | None = None) -> RequestId | None:
    """Return the request whose blocks are reclaimed first; never the receiver, nor a running one.

    Source: upstream #49439; P10, P17.
    """
    queued = step.state.rules[list_queued](step)
    givers = get_reclaimable(step.state.config.policy, queued, step.requests)
    return next((name for name in givers if name != receiver_id), None)


def process_gift(step: Step, giver_id: RequestId) -> None:
    """Take the blocks of a request that does not run. Source: P10, P17."""
    giver = step.requests[giver_id]
    fence = step.get_fence(giver_id)
    step.pool = release_slots(step.pool, giver, step.state.rules, fence)
    step.requests[giver_id] = without_blocks(giver)


def list_queued(step: Step) -> list[RequestId]:
    """Return the requests that do not run, in the order in which they would be tried. Source:
    P10."""
    return [*step.passed_over, *step.skipped, *step.waiting]


def get_reclaimable(
    policy: Policy, queued: Iterable[RequestId], requests: Requests
) -> list[RequestId]:
    """Return the queued requests that hold blocks, in the order of reclaim. Source: P10, P17."""
    holders = [name for name in queued if any(requests[name].block_tables)]
    if policy is Policy.PRIORITY:
        holders.sort(key=lambda name: get_rank(requests[name]))
    holders.reverse()
    holders.sort(key=lambda name: requests[name].status is not Status.WAITING_FOR_STREAMING_REQ)
    return holders


def without_blocks(request: RequestState) -> RequestState:
    """Return a request without blocks: it computes all of it again. Source: P10, P17."""
    held = NOTHING_HELD * len(request.holdings)
    return replace(request, num_computed_tokens=0, holdings=held)


def process_clearing(step: Step) -> None:
    """Take the blocks of all requests that hold some without running. Source: P17, P25."""
    while (giver_id := find_giver(step)) is not None:
        step.state.rules[process_gift](step, giver_id)


FEATURE: Final = Feature(
    "reclaim", is_always, Hooks(givers=(process_reclaim,), clears=(process_clearing,))
)
