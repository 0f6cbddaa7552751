"""Seeded bugs in pins: each deciding change of the seed's fork is broken once.

What the fork records of its steps is checked by `recorded.step_records`, whose tests have a wrong
record for each check."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.commit import get_request_ended
from blockstep.spec.core.preemption import process_claim
from blockstep.spec.core.queues import Requests
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import allocate_slots
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.pins import (
    PINS,
    Pins,
    compute_queue_class,
    forget_jobs,
    get_after_turn,
    get_findable_tables,
    list_givers,
    list_jobs,
    list_of_job,
    list_unfinished_jobs,
    process_estimate,
    process_unpin,
    process_yielding,
    select_cold_victim,
    take_estimate,
)
from blockstep.spec.vocabulary import Ack, Config, PinEstimate, RequestId

PAGE = Page(takes="pins")
KEPT = "policy: which blocks stay pinned, and for how long"
FIRST = "policy: which request is admitted or preempted first"


# Change 4: a job has at most one pin, which is freed when it ends.


@PAGE.exhibit(
    "the pin of the previous turn is replaced, but not freed", "vLLM V1: The Fork, Change 4", "P1"
)
@instead(get_after_turn)
def stale_pin_leaks(right: Right[State], state: State, request_id: RequestId) -> State:
    """The blocks of the old pin keep a reference that nothing will ever drop."""
    pins, asked = PINS.of(state), state.requests[request_id].request
    stale = [] if asked.is_last_step else list_of_job(pins, asked.job_id or "")
    others = tuple([pin for pin in pins.pins if pin not in stale])
    after = right(state=PINS.put(state, replace(pins, pins=others)))
    if asked.job_id in list_jobs(PINS.of(after)):
        return after
    return PINS.put(after, replace(PINS.of(after), pins=pins.pins))


# Change 5: pins expire before the step allocates, and turns of pinned jobs are admitted first.


@PAGE.exhibit(
    "requests of pinned jobs are admitted before preempted requests",
    "vLLM V1: The Fork, Change 5",
    "P16",
    invisible=FIRST,
)
@instead(compute_queue_class)
def warm_ahead_of_the_preempted(request: RequestState, warm: Collection[str]) -> int:
    """A preempted request, which waited longest and lost its KV, waits even longer."""
    return int(request.request.job_id not in warm)


# Change 7: which requests a pin protects.


@PAGE.exhibit(
    "a victim that is not the last running request keeps its row",
    "vLLM V1: The Fork, Changes 7 and 9",
    "P26 P2 P3 P9",
)
def row_of_cold_victim_stays(rules: Rules, config: Config) -> Rules:
    """The plan has more rows than running requests; the fork only warns about this."""
    return rules.replacing(Step.withdraw, lambda _step, _name: False) if config.has_pins else rules


# Change 11: estimates that arrive with a turn.


@PAGE.exhibit(
    "an estimate is lost if it arrives before the turn ends",
    "vLLM V1: The Fork, Change 11",
    "P18 P17",
    invisible_if_hidden=KEPT,
)
@instead(take_estimate)
def estimate_at_arrival_is_lost(right: Right[Pins], pins: Pins, estimate: PinEstimate) -> Pins:
    """A client that sends the estimate together with the turn is ignored."""
    is_pinned = estimate.job_id in list_jobs(pins)
    return right() if is_pinned else pins


# Change 12: which turns are pinned.


@PAGE.exhibit(
    "the plan does not list a finished request that was pinned",
    "vLLM V1: The Fork, Change 12",
    "P26",
)
@instead(get_request_ended)
def pinned_turn_is_not_told(right: Right[State], state: State, request_id: RequestId) -> State:
    """The worker keeps the row of the finished request, and a later request may have its id."""
    after = right()
    if set(PINS.of(after).pins) <= set(PINS.of(state).pins):
        return after
    finished = tuple([name for name in after.finished_req_ids if name != request_id])
    return replace(after, finished_req_ids=finished)


@PAGE.exhibit(
    "all blocks of a turn are pinned, even those that are not cached",
    "vLLM V1: The Fork, Change 4",
    "P17 P16",
    invisible=KEPT,
)
def whole_table_is_pinned(rules: Rules, _config: Config) -> Rules:
    """No next turn can hit them."""
    return rules.replacing(get_findable_tables, lambda request: request.block_tables)


# What the seed leaves open.


@PAGE.exhibit("pins are never reclaimed", "vLLM V1: The Fork, Feature A", "P10")
def pins_never_give_way(rules: Rules, _config: Config) -> Rules:
    """A pool full of pins serves no request until the pins expire."""
    return rules.replacing(process_yielding, lambda _step, _receiver_id: False)


@PAGE.exhibit(
    "pins are reclaimed before any preemption is tried",
    "vLLM V1: The Fork, Feature A",
    "P10 P16",
    wrong_fix_of="pins-never-give-way",
    invisible=FIRST,
)
def pins_give_way_at_once(rules: Rules, config: Config) -> Rules:
    """All pins are gone as soon as blocks are short, which is when they would help."""
    num_ahead = config.num_lookahead_tokens

    def claim(step: Step, index: int, num_new: int) -> Any:
        request, allocate = step.requests[step.running[index]], rules[allocate_slots]
        while PINS.of(step).pins:
            if allocate(config, step.pool, request, num_new, num_ahead, rules=step.state.rules):
                break
            process_yielding(step, request.request_id)
        return rules[process_claim](step, index, num_new)

    return rules.replacing(process_claim, claim)


@PAGE.exhibit(
    "all pins are reclaimed at once",
    "vLLM V1: The Fork, Feature A",
    "P10 P17",
    wrong_fix_of="pins-never-give-way",
    invisible="efficiency: more blocks than needed are computed again",
)
@instead(process_yielding)
def all_pins_give_way(step: Step, receiver_id: RequestId) -> bool:
    """One reclaimed pin may have been enough."""
    givers = list_givers(PINS.of(step), step.requests[receiver_id].request.job_id)
    process_unpin(step, givers)
    return bool(givers)


@PAGE.exhibit(
    "estimates of finished jobs are never dropped",
    "vLLM V1: The Fork, Change 3",
    "P18",
    invisible_if_hidden=KEPT,
)
def estimates_pile_up(rules: Rules, _config: Config) -> Rules:
    """Jobs finish, but the table of estimates only grows."""

    def take(state: State, estimate: PinEstimate) -> tuple[State, Ack]:
        known = [*list_unfinished_jobs(state.requests), *list_jobs(PINS.of(state))]
        is_known = estimate.job_id in known
        return rules[process_estimate](state, estimate) if is_known else (state, Ack())

    changed = rules.replacing(forget_jobs, lambda pins, _unfinished: pins)
    return changed.replacing(process_estimate, take)


@PAGE.exhibit(
    "a request that was preempted once counts as pinned for good",
    "vLLM V1: The Fork, Change 7",
    "P16",
    invisible=FIRST,
)
@instead(select_cold_victim)
def preempted_turns_stay_warm(
    running: Sequence[RequestId], requests: Requests, warm: Collection[str]
) -> int:
    """It is protected from preemption as if its job had a pin."""
    cold = [
        index
        for index, name in enumerate(running)
        if requests[name].request.job_id not in warm and not requests[name].num_preemptions
    ]
    return max(cold, default=len(running) - 1)
