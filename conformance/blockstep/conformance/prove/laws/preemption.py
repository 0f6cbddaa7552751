"""Laws about the victim, what it keeps, and which request is next.

PYTEST_DONT_REWRITE.

Priorities and arrivals are symbolic; the ids a, b, c decide between equals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.host_states import PLANNING, build_host
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.preemption import get_preempted, process_preemption
from blockstep.spec.core.queues import get_rank, process_prepend, select_queue, select_victim
from blockstep.spec.core.requests import NOTHING_HELD, Holding, RequestState
from blockstep.spec.core.work import Scheduled, Step
from blockstep.spec.vocabulary import Config, Policy, RequestId, Stats, Status

ROOM = LawModule("preemption")

Requests = Mapping[RequestId, RequestState]


def rank(**places: tuple[int, int]) -> dict[RequestId, RequestState]:
    """Return requests by name, with these priorities and arrivals."""
    return {
        name: h.build_runner(name, 1, 0, priority=priority, arrival_time=arrival_time)
        for name, (priority, arrival_time) in places.items()
    }


# Mistakes.


@instead(select_victim, theirs="not found upstream")
def first_of_equals_goes(running: list[RequestId], requests: Requests) -> int:
    """The request id is ignored, so the first of equal priority and arrival is the victim."""
    ranks = [get_rank(requests[name])[:2] for name in running]
    return ranks.index(max(ranks))


@instead(get_rank)
def arrival_comes_before_priority(request: RequestState) -> tuple[int, int, RequestId]:
    """The arrival decides before the priority, as under FCFS."""
    asked = request.request
    return (asked.arrival_time, asked.priority, asked.request_id)


@instead(process_preemption)
def budget_of_the_victim_is_lost(right: Right[RequestId], step: Step) -> RequestId:
    """The tokens of the victim's row do not return to the budget."""
    budget = step.budget
    victim_id = right()
    step.budget = budget
    return victim_id


# The victim, and the next request.


@ROOM.law("P10 P16", (1, 5, 1, 5, 0, 9), first_of_equals_goes)
def check_victim_has_the_last_rank_of_running_requests(
    priority_a: int,
    arrival_a: int,
    priority_b: int,
    arrival_b: int,
    priority_c: int,
    arrival_c: int,
) -> None:
    """The rank is that of the queues, ids included, so two equals never preempt each other for
    ever.
    """
    assert 0 <= arrival_a and 0 <= arrival_b and 0 <= arrival_c
    requests = rank(a=(priority_a, arrival_a), b=(priority_b, arrival_b), c=(priority_c, arrival_c))
    running = ["b", "a", "c"]
    victim = running[select_victim(Policy.PRIORITY, running, requests)]
    last = get_rank(requests[victim])
    assert all(get_rank(requests[name]) < last for name in running if name != victim)


@ROOM.law("P16", (1, 5, 0, 9))
def check_fcfs_preempts_the_last_admitted(
    priority_a: int, arrival_a: int, priority_b: int, arrival_b: int
) -> None:
    """This holds for all priorities."""
    assert 0 <= arrival_a and 0 <= arrival_b
    requests = rank(a=(priority_a, arrival_a), b=(priority_b, arrival_b))
    index = select_victim(Policy.FCFS, ["b", "a"], requests)
    assert index == 1


@ROOM.law("P16", (1, 5, 1, 4), arrival_comes_before_priority)
def check_priority_comes_before_arrival_and_arrival_before_the_id(
    priority_a: int, arrival_a: int, priority_b: int, arrival_b: int
) -> None:
    """Two requests never have the same rank."""
    assert 0 <= arrival_a and 0 <= arrival_b
    requests = rank(a=(priority_a, arrival_a), b=(priority_b, arrival_b))
    a_is_first = get_rank(requests["a"]) < get_rank(requests["b"])
    if priority_a != priority_b:
        assert a_is_first == (priority_a < priority_b)
    elif arrival_a != arrival_b:
        assert a_is_first == (arrival_a < arrival_b)
    else:
        assert a_is_first


@ROOM.law("P16", (1, 5, 3))
def check_priority_queue_stays_sorted_when_a_victim_returns(
    priority_a: int, priority_b: int, priority_c: int
) -> None:
    """A preemption makes no request more urgent."""
    assert priority_a <= priority_b
    requests = rank(a=(priority_a, 0), b=(priority_b, 0), c=(priority_c, 0))
    queue = ["a", "b"]
    process_prepend(Policy.PRIORITY, queue, "c", requests)
    ranks = [get_rank(requests[name]) for name in queue]
    assert len(queue) == 3
    assert ranks[0] < ranks[1] < ranks[2]


@ROOM.law("P16", (5, 1))
def check_most_urgent_head_of_both_queues_is_next(priority_a: int, priority_b: int) -> None:
    """A skipped request does not become more urgent."""
    assert priority_a != priority_b
    requests = rank(a=(priority_a, 0), b=(priority_b, 0))
    queue = select_queue(Policy.PRIORITY, ["a"], ["b"], requests)
    assert queue == (["a"] if priority_a < priority_b else ["b"])


# The victim and its step.


def build_step(budget: int, num_first: int, num_second: int) -> Step:
    """Return a step with rows of `a` and `b`, in which `c` runs without one."""
    blocks: dict[str, tuple[int, ...]] = {"a": (1,), "b": (2,), "c": ()}
    running = tuple(h.build_runner(name, 9, 0, table) for name, table in blocks.items())
    state = h.build_state(Config(num_blocks=4, policy=Policy.PRIORITY), running)
    requests = state.requests.to_dict()
    step = Step(state, budget, state.pool, requests, [*blocks], [], [], Stats())
    step.rows = [Scheduled("a", 0, num_first, ()), Scheduled("b", 0, num_second, ())]
    return step


@ROOM.law("P9 P14 P15 P26", (3, 5, 7, 0), budget_of_the_victim_is_lost)
def check_preemption_returns_the_tokens_of_the_victim_only(
    budget: int, num_first: int, num_second: int, victim_index: int
) -> None:
    """The victim has no row and waits, its tokens return to the budget, and one preemption is
    counted.
    """
    assert 0 <= budget and 1 <= num_first and 1 <= num_second and 0 <= victim_index <= 2
    step = build_step(budget, num_first, num_second)
    victim = process_preemption(step, victim_index)
    num_left = sum(row.num_scheduled for row in step.rows)
    assert step.budget + num_left == budget + num_first + num_second
    assert victim == ("a", "b", "c")[victim_index]
    assert [row.request_id for row in step.rows] == [name for name in "ab" if name != victim]
    assert step.running == [name for name in "abc" if name != victim]
    assert step.waiting == [victim]
    assert step.stats.preemptions == 1


@ROOM.law("P12 P13", (10, 5, 12, 3, 2))
def check_preempted_request_keeps_only_its_tokens_and_those_in_flight(
    num_prompt: int, num_outputs: int, num_computed: int, num_placeholders: int, num_before: int
) -> None:
    """It computes all tokens again, but samples none twice."""
    assert 1 <= num_prompt and 0 <= num_outputs and 0 <= num_computed and 0 <= num_placeholders
    request = replace(
        h.build_request("a", num_prompt, num_outputs),
        status=Status.RUNNING,
        num_computed_tokens=num_computed,
        num_output_placeholders=num_placeholders,
        spec_token_ids=(7, 8),
        holdings=(Holding((1, 2), num_cached_blocks=1),),
        num_preemptions=num_before,
    )
    after = get_preempted(request)
    assert after.num_known_tokens == num_prompt + num_outputs
    assert after.num_output_placeholders == num_placeholders
    assert (after.num_computed_tokens, after.holdings) == (0, NOTHING_HELD)
    assert after.spec_token_ids == ()
    assert after.num_preemptions == num_before + 1
    assert after.status is Status.PREEMPTED


# The engine.


@ROOM.law("P10 P16", (1, 5, 1, 5))
def check_engine_preempts_the_same_request(
    priority_a: int, arrival_a: int, priority_b: int, arrival_b: int
) -> None:
    """This includes requests of equal priority and arrival."""
    assert 0 <= arrival_a and 0 <= arrival_b
    requests = rank(a=(priority_a, arrival_a), b=(priority_b, arrival_b))
    host = build_host(h.build_config(policy=Policy.PRIORITY), *requests.values())
    due = select_victim(Policy.PRIORITY, ["a", "b"], requests)
    assert PLANNING._select_victim(host) == due
