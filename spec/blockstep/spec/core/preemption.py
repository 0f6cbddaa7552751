"""Preemption: when blocks are short, a running request loses all of its own.

Its blocks are free at once (`slots.revoke_slots`): the last of its table is queued first, and
computed blocks stay cached until they are reused. It waits at the front and computes everything
again.

A victim whose blocks would not be free at once is not preempted: if they wait for the frame in
flight with its row (`block_pool.get_fence`), the step would gain nothing. The running phase ends
there, no request is admitted, and the next step can preempt the victim if that is still needed.
"""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.queues import process_prepend, select_victim
from blockstep.spec.core.requests import NOTHING_HELD, RequestState
from blockstep.spec.core.slots import allocate_slots, revoke_slots
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import RequestId, Status


def process_claim(
    step: Step, index: int, num_new: int
) -> tuple[tuple[Pool, RequestState] | None, int]:
    """Allocate slots for the running request at `index`, preempting others while they are short.

    Running requests are victims; the only running request first reclaims blocks of requests that do
    not run, before it preempts itself.

    Returns pool and request, or None if it preempted itself or waits for a commit
    (`Step.awaits_answer`); and the index at which the running phase continues: after a
    self-preemption that of the next request. Source: seed 001 "Preemption in the Running Loop";
    vLLM 0.33.0 `_request_blocks_can_be_freed`; P15, P16, P17.
    """
    config, rules = step.state.config, step.state.rules
    request = step.requests[step.running[index]]
    for skip in rules.hooks.skips:
        step.pool, request = rules[skip](step, step.pool, request)
        step.requests[request.request_id] = request
    while True:
        granted = allocate_slots(
            config, step.pool, request, num_new, config.num_lookahead_tokens, rules=rules
        )
        if granted is not None:
            return granted, index
        if len(step.running) == 1 and process_giving_way(step, request.request_id):
            continue
        victim_index = rules[get_victim_index](step)
        victim_id = step.running[victim_index]
        step.awaits_answer = step.awaits_answer or step.get_fence(victim_id) is not None
        if step.awaits_answer:
            return None, index
        index_after = rules[process_making_room](step, index, victim_index)
        if victim_id == request.request_id:
            return None, index
        index = index_after


def get_victim_index(step: Step) -> int:
    """Return the index in `running` of the request to preempt.

    Source: seed 001 "Preemption in the Running Loop"; P16.
    """
    select, policy = step.state.rules[select_victim], step.state.config.policy
    return select(policy, step.running, step.requests)


def process_giving_way(step: Step, receiver_id: RequestId) -> bool:
    """Reclaim blocks that no running request holds, for a request that lacks some.

    Returns whether there were any. Source: P10, P17.
    """
    rules = step.state.rules
    return any(rules[give](step, receiver_id) for give in rules.hooks.givers)


def process_making_room(step: Step, index: int, victim_index: int) -> int:
    """Preempt a running request for the one at `index`; return the index of the latter afterwards.

    Source: seed 001 "Preemption in the Running Loop"; P15.
    """
    process_preemption(step, victim_index)
    return index - (victim_index < index)


def process_preemption(step: Step, victim_index: int) -> RequestId:
    """Preempt one running request, and withdraw its row if it has one in this step.

    Under PRIORITY the victim may have been planned earlier in the same step: its tokens return to
    the budget, and its row, its drafts and the keys published for this step are withdrawn. Source:
    seed 001 "Preemption in the Running Loop"; upstream #23347, #23713, #28558, #43569; P4, P9, P14.
    """
    config, rules = step.state.config, step.state.rules
    victim_id = step.running.pop(victim_index)
    # select
    victim = step.requests[victim_id]
    had_row = step.withdraw(victim_id)
    step.preempted.append(victim_id)
    for hook in rules.hooks.victims:
        rules[hook](step, victim, had_row)
    # pool, requests
    fence = step.get_fence(victim_id)
    step.pool = rules[revoke_slots](step.pool, victim, config.block_sizes, rules, fence)
    step.requests[victim_id] = rules[get_preempted](victim)
    step.stats = replace(step.stats, preemptions=step.stats.preemptions + 1)
    process_prepend(config.policy, step.waiting, victim_id, step.requests)
    return victim_id


def get_preempted(request: RequestState) -> RequestState:
    """Return the request without its blocks: it recomputes everything, but keeps its outputs.

    It keeps its placeholders, too: frames in flight still deliver its tokens, and until they have
    it is not admitted again. Source: seed 001
    "Preemption Policy -- Recomputation Only in V1"; upstream #47900, #48245; P12.
    """
    return replace(
        request,
        status=Status.PREEMPTED,
        num_computed_tokens=0,
        spec_token_ids=(),
        holdings=NOTHING_HELD * len(request.holdings),
        num_preemptions=request.num_preemptions + 1,
        has_unconfirmed_kv=False,
    )
