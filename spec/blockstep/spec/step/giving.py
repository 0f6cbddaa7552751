"""Giving: where nobody else can give way, those do that hold blocks and do not run.

Between two chunks a session keeps its blocks, though nobody can say for how long: a client that
never goes on would hold them for ever, and two that wait for their turn could each lack what the
other holds (upstream #49439). So whoever lacks blocks while nobody else runs takes them from
sessions, one at a time, and only as many as it needs. Since the empty pool can hold everybody
alone, the first in line is then admitted, and who runs alone goes on: nobody waits for ever (P10),
and each hold has an end (P17). While others run it waits for theirs, as everybody does.

Who is parked for a load that has come holds blocks likewise, until its turn comes, and two of them
could each lack what the other holds. One whose load is under way cannot give: that ends by itself.

Those that rest give way before those that wait for their turn, and then whoever would be looked at
last. A session that gave way has lost no tokens: it looks for a hit and computes the rest again, as
after a preemption; but it did not run, so it is none.
"""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.spec.beside.transfers import Transfers, forget_load, is_under_way
from blockstep.spec.copies import replace
from blockstep.spec.memory.slots import release_slots
from blockstep.spec.requests import NOTHING_HELD, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.step.queues import Requests, get_rank
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import Policy, RequestId, Status


def process_giving(step: Step, receiver_id: RequestId) -> bool:
    """Take the blocks of a request that does not run, for one that lacks some; whether it did.

    Not if they would be free only behind the answer to a frame in flight: then the step waits for
    that answer, and takes no blocks of others meanwhile. Source: upstream #49439; P10, P17.
    """
    giver_id = find_giver(step, receiver_id)
    if giver_id is None:
        return False
    if step.get_fence(giver_id) is not None:
        step.awaits_answer = True
        return False
    process_gift(step, giver_id)
    return True


def find_giver(step: Step, receiver_id: RequestId | None = None) -> RequestId | None:
    """The request, not the receiver, that is the first to give up its blocks while it does not run.

    Source: upstream #49439; P10, P17.
    """
    queued = [*step.passed_over, *step.skipped, *step.waiting]
    if step.transfers.parked:
        queued = [name for name in queued if not is_under_way(step.transfers, name)]
    rules = step.state.rules
    if not (rules.takes_back_from_sessions and rules.takes_back_from_parked):
        queued = [name for name in queued if may_give(step.requests[name], rules)]
    givers = get_givers(step.state.config.policy, queued, step.requests)
    return next((name for name in givers if name != receiver_id), None)


def process_gift(step: Step, giver_id: RequestId) -> None:
    """Take the blocks of a request that does not run. Source: P10, P17."""
    giver = step.requests[giver_id]
    fence = step.get_fence(giver_id)
    step.pool = release_slots(step.pool, giver, step.state.rules, fence)
    if giver.status is Status.WAITING_FOR_REMOTE_KVS:
        giver = get_unparked(giver, step.transfers)
        step.transfers = forget_load(step.transfers, giver_id)
    step.requests[giver_id] = without_blocks(giver)


def may_give(request: RequestState, rules: Rules) -> bool:
    """Whether the rules have one that does not run give its blocks up. Source: P10, P17."""
    if request.status is Status.WAITING_FOR_REMOTE_KVS:
        return rules.takes_back_from_parked
    return rules.takes_back_from_sessions


def get_givers(policy: Policy, queued: Iterable[RequestId], requests: Requests) -> list[RequestId]:
    """Those in the queues that hold blocks, who gives way first, first. Source: P10, P17."""
    holders = [name for name in queued if any(requests[name].block_tables)]
    if policy is Policy.PRIORITY:
        holders.sort(key=lambda name: get_rank(requests[name]))
    holders.reverse()
    holders.sort(key=lambda name: requests[name].status is not Status.WAITING_FOR_STREAMING_REQ)
    return holders


def without_blocks(request: RequestState) -> RequestState:
    """A request once its blocks are gone: it computes all of it again. Source: P10, P17."""
    held = NOTHING_HELD * len(request.holdings)
    return replace(request, num_computed_tokens=0, holdings=held)


def get_unparked(request: RequestState, transfers: Transfers) -> RequestState:
    """A request that was parked, as what it was before: a worker knows it, or it does not.

    Source: vLLM 0.19.1 `_try_promote_blocked_waiting_request`; P26.
    """
    status = transfers.parked[request.request_id].status
    return replace(request, status=status, is_unsettled=False)
