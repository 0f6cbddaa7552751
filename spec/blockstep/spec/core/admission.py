"""Admission: waiting requests are tried one by one; each is admitted, skipped, or ends the
phase."""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool, get_num_free_blocks
from blockstep.spec.core.preemption import process_giving_way
from blockstep.spec.core.prefix_cache import get_prefix_hit
from blockstep.spec.core.queues import process_prepend, select_queue, waits_apart
from blockstep.spec.core.requests import NO_HIT, Hit, RequestState
from blockstep.spec.core.slots import allocate_slots
from blockstep.spec.core.token_budget import (
    compute_num_drafts,
    compute_share,
    get_threshold,
    process_limits,
)
from blockstep.spec.core.work import ENDS_ADMISSION, Scheduled, Step, Verdict
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, PauseState, RequestId, Status


def process_waiting_phase(step: Step) -> None:
    """Admit waiting requests, in queue order, while tokens, running slots and blocks last.

    The first that does not fit ends the phase (head-of-line blocking), and no request is preempted
    for it. Source: seed 001 "Waiting Queue -- Admission Gate"; seed 000 "Phase 2"; P15, P16.
    """
    rules = step.state.rules
    while has_room(step):
        queue = rules[get_open_queue](step)
        if not queue:
            break
        verdict = get_verdict(step, queue[0])
        if verdict in ENDS_ADMISSION:
            for look in rules.hooks.stuck:
                rules[look](step, queue[0])
            break
        request_id = queue.pop(0)
        if verdict is not Verdict.ADMITTED:
            step.passed_over.append(request_id)
    rules[process_passed_over](step)


def get_open_queue(step: Step) -> list[RequestId]:
    """Return the queue whose head is tried next; empty if both are, or while admission is paused.

    Source: seed 001 "Queue Selection: FCFS vs PRIORITY"; P16.
    """
    if step.state.pause_state is not PauseState.UNPAUSED:
        return []
    return select_queue(step.state.config.policy, step.waiting, step.skipped, step.requests)


def process_passed_over(step: Step) -> None:
    """Put the skipped requests back to the front of a queue, in the order in which they were tried.

    Source: vLLM 0.19.1 `schedule`; P7.
    """
    for request_id in reversed(step.passed_over):
        is_apart = step.state.rules[waits_apart](step.requests[request_id], was_skipped=True)
        queue = step.skipped if is_apart else step.waiting
        process_prepend(step.state.config.policy, queue, request_id, step.requests)


def has_room(step: Step) -> bool:
    """Whether tokens and a running slot are left. Source: seed 001 "Unified Token Budget"; P9."""
    num_slots = step.state.rules[count_running_slots](step)
    return step.budget > 0 and num_slots < step.state.config.max_num_seqs


def count_running_slots(step: Step) -> int:
    """Return the running slots that are taken: those of running requests. Source: P9."""
    return len(step.running)


def get_verdict(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit the request, reclaiming blocks if no request runs; return the verdict.

    Source: seed 001 "Waiting Queue -- Admission Gate"; P15, P16.
    """
    process_trial = step.state.rules[process_gates]
    verdict = process_trial(step, request_id)
    while (
        verdict is Verdict.NO_BLOCKS and not step.running and process_giving_way(step, request_id)
    ):
        verdict = process_trial(step, request_id)
    return verdict


def process_gates(step: Step, request_id: RequestId) -> Verdict:
    """Try to admit a waiting request; the first gate that stops it gives the verdict.

    Source: seed 001 "Waiting Queue -- Admission Gate"; P15, P16.
    """
    rules = step.state.rules
    for gate in rules.hooks.gates:
        verdict = rules[gate](step, step.requests[request_id])
        if verdict is not None:
            return verdict
    return process_admission(step, step.requests[request_id])


def process_admission(step: Step, request: RequestState) -> Verdict:
    """Admit `request` if it fits; otherwise change nothing (P7).

    A request with computed tokens continues after them, without a prefix hit. Source: seed 001
    "Decision 2: Which WAITING requests get admitted?", "Full ISL reservation"; upstream #37307; P7,
    P8.
    """
    config, rules = step.state.config, step.state.rules
    # refuse
    num_computed, hit = request.num_computed_tokens, NO_HIT
    if num_computed == 0:
        hit = get_prefix_hit(config, rules[get_findable_pool](step), request, rules)
    for look in rules.hooks.hits:
        found = rules[look](step, request, hit)
        if isinstance(found, Verdict):
            return found
        request, hit = found
    num_start = num_computed + hit.num_tokens
    num_new = rules[get_waiting_share](step, request, num_start)
    if isinstance(num_new, Verdict):
        return num_new
    num_new = rules[process_limits](step, request, num_start, num_new)
    if num_new == 0:
        return rules[process_shortage](step, request)
    granted = rules[get_slots_at_admission](step, request, num_new, hit)
    if isinstance(granted, Verdict):
        for refuse in rules.hooks.refusals:
            rules[refuse](step, request)
        return granted
    # pool
    step.pool, after = granted
    # requests
    process_entrance(step, request, after, hit, num_new)
    for grant in rules.hooks.grants:
        rules[grant](step, request)
    return Verdict.ADMITTED


def get_waiting_share(step: Step, request: RequestState, num_start: int) -> int | Verdict:
    """Return the tokens that a waiting request could have in this step, or why it has none.

    It starts behind `num_start` tokens. If the budget is too small for its first chunk, no later
    request overtakes it. Source: seed 001 "For Waiting Requests (First Prefill)"; P9, P16.
    """
    num_new = compute_share(
        request.num_known_tokens,
        num_start,
        step.state.rules[get_threshold](step),
        step.budget,
        end=request.num_known_tokens,
        is_whole=not step.state.config.enable_chunked_prefill,
    )
    return num_new if num_new > 0 else Verdict.NO_ROOM


def process_shortage(step: Step, request: RequestState) -> Verdict:
    """Return the verdict on a request for which the limits of its row leave no token.

    No later request overtakes it. Source: seed 001 "Waiting Queue -- Admission Gate"; P16.
    """
    for lack in step.state.rules.hooks.shortages:
        step.state.rules[lack](step, request)
    return Verdict.NO_ROOM


def get_slots_at_admission(
    step: Step, request: RequestState, num_new: int, hit: Hit
) -> tuple[Pool, RequestState] | Verdict:
    """Return pool and request with slots for its first tokens, or NO_BLOCKS if it does not fit.

    Source: seed 001 "Full ISL reservation"; P7, P8, P10.
    """
    rules = step.state.rules
    pool, request = rules[get_skipped_at_admission](step, request)
    num_spared = sum([rules[spare](step) for spare in rules.hooks.spares])
    for reserve in rules.hooks.reserves:
        if not rules[reserve](step, pool, request, hit, num_spared):
            return Verdict.NO_BLOCKS
    granted = rules[allocate_first_slots](step, pool, request, num_new, hit)
    if granted is None or num_spared > get_num_free_blocks(granted[0]):
        return Verdict.NO_BLOCKS
    return granted


def get_skipped_at_admission(step: Step, request: RequestState) -> tuple[Pool, RequestState]:
    """Return pool and request without the blocks that it does not need any more. Source: P8,
    P14."""
    pool, rules = step.pool, step.state.rules
    for skip in rules.hooks.skips:
        pool, request = rules[skip](step, pool, request)
    return pool, request


def allocate_first_slots(
    step: Step, pool: Pool, request: RequestState, num_new: int, hit: Hit
) -> tuple[Pool, RequestState] | None:
    """Allocate slots for the first tokens of an admission; without lookahead, because nothing is
    drafted yet. Source: seed 001 "allocate_slots() -- The Block Allocation Pipeline"; P8.
    """
    return allocate_slots(step.state.config, pool, request, num_new, 0, hit, step.state.rules)


def get_findable_pool(step: Step) -> Pool:
    """Return the pool in which hits are looked for. Source: seed 001 "Decision 2"; P15."""
    return step.pool


def process_entrance(
    step: Step, request: RequestState, after: RequestState, hit: Hit, num_new: int
) -> None:
    """Move an admitted request to the running list, with its row and counters.

    Source: seed 001 "For Waiting Requests (First Prefill)"; P21.
    """
    num_known, num_start = request.num_known_tokens, request.num_computed_tokens + hit.num_tokens
    step.requests[request.request_id] = replace(
        after,
        status=Status.RUNNING,
        num_computed_tokens=num_start,
        num_cached_tokens=step.state.rules[get_num_cached_tokens](request, num_start),
    )
    step.running.append(request.request_id)
    for admit in step.state.rules.hooks.admits:
        step.state.rules[admit](step, request, after, hit)
    drafts = (DRAFT_PLACEHOLDER,) * compute_num_drafts(num_start, num_new, num_known)
    name, status = request.request_id, request.status
    step.add(Scheduled(name, num_start, num_new, after.block_tables, drafts, status))


def get_num_cached_tokens(request: RequestState, num_start: int) -> int:
    """Return the cached tokens to report for an admitted request: those of its first admission.

    `num_start`: the tokens that it starts behind now. Source: seed 001 "For Waiting Requests (First
    Prefill)"; P21.
    """
    return num_start if request.num_cached_tokens < 0 else request.num_cached_tokens
