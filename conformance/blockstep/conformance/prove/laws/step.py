"""Laws about one whole Schedule with one to three requests.

PYTEST_DONT_REWRITE.

These laws run `process_schedule` itself. The running requests and the blocks that they hold are
concrete; token counts, budget, block size, model length and priorities are symbolic.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.conformance.prove.laws.preemption import budget_of_the_victim_is_lost
from blockstep.spec.core.schedule import process_grant, process_running_phase
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.releases.policy_order import victim_without_a_row_skips_a_request as shift_rule
from blockstep.spec.vocabulary import Plan, Policy

ROOM = LawModule("step")


# Mistakes.


@instead(process_grant)
def grant_takes_nothing_off_the_budget(right: Right[None], step: Step) -> None:
    """Each request gets the whole budget."""
    budget = step.budget
    right()
    step.budget = budget


@instead(process_running_phase, theirs="not found upstream")
def victim_without_a_row_skips_a_request(right: Right[None], step: Step) -> None:
    """The index into the running list is corrected only for a victim that had a row."""
    before = step.state
    step.state = replace(before, rules=shift_rule(before.rules, before.config))
    right()
    step.state = before


# One running request: it holds blocks 1 and 2; blocks 3 and 4 are free.


def step_of_one(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> tuple[State, Plan]:
    """Plan a step with one running request."""
    caps = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
    config = h.build_config(block_size, num_blocks=5, **caps)
    return h.schedule(
        h.build_state(config, (h.build_runner("a", num_known, num_computed, (1, 2)),))
    )


@ROOM.law("P9 P10 P11", (50, 20, 30, 0, 16))
def check_request_alone_in_the_pool_gets_a_token_in_every_step(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> None:
    """It gets at least one token, within budget and threshold, if the pool can hold the request."""
    assert 1 <= block_size and 1 <= budget and 0 <= threshold
    assert 0 <= num_computed <= 2 * block_size and num_computed < num_known <= 4 * block_size
    assert num_known < 8192
    _, plan = step_of_one(num_known, num_computed, budget, threshold, block_size)
    amounts = [row.num_scheduled_tokens for row in plan.rows]
    assert len(amounts) == 1
    assert 1 <= amounts[0] <= budget
    assert threshold == 0 or amounts[0] <= threshold


@ROOM.law("P1 P2 P8", (50, 20, 30, 0, 16))
def check_running_request_holds_exactly_the_blocks_of_its_tokens(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> None:
    """It holds no block more than its tokens need; all others stay free."""
    assert 1 <= block_size and 1 <= budget and 0 <= threshold
    assert block_size < num_computed <= 2 * block_size and num_computed < num_known
    assert num_known < 8192
    after, _ = step_of_one(num_known, num_computed, budget, threshold, block_size)
    request = after.requests["a"]
    table = h.table_of(request)
    assert len(table) * block_size >= request.num_computed_tokens
    assert (len(table) - 1) * block_size < request.num_computed_tokens or not table
    assert h.is_conserved(after.pool)
    assert sorted((*table, *after.pool.free_queue)) == [1, 2, 3, 4]


# Two running requests: a holds blocks 1 and 2, b holds 3; 4 is free.


def step_of_two(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> tuple[State, Plan]:
    """Plan a step with two running requests; `b` has no computed tokens in its block yet."""
    config = h.build_config(block_size, num_blocks=5, max_num_batched_tokens=budget)
    first = h.build_runner("a", known_a, computed_a, (1, 2))
    return h.schedule(h.build_state(config, (first, h.build_runner("b", known_b, 0, (3,)))))


@ROOM.law("P1 P2 P9 P16", (60, 20, 30, 12, 16), grant_takes_nothing_off_the_budget)
def check_two_requests_share_budget_and_blocks_in_order(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> None:
    """Each block is once in a table or in the free queue, as the ref counts say.

    The older request runs as long as any does; it may take the blocks of the younger one.
    """
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a < 8192 and 1 <= known_b < 8192
    after, plan = step_of_two(known_a, known_b, computed_a, budget, block_size)
    assert sum(row.num_scheduled_tokens for row in plan.rows) <= budget
    tables = h.table_of(after.requests["a"]) + h.table_of(after.requests["b"])
    assert sorted(tables + after.pool.free_queue) == [1, 2, 3, 4]
    assert h.is_conserved(after.pool)
    assert after.running + after.waiting == ("a", "b")


@ROOM.law("P10 P15", (60, 20, 30, 40, 16))
def check_oldest_request_gets_the_whole_budget_if_it_fits_the_pool(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> None:
    """The younger request may be preempted for it; so some request always progresses."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a <= 4 * block_size and known_a < 8192 and 1 <= known_b < 8192
    after, _ = step_of_two(known_a, known_b, computed_a, budget, block_size)
    assert after.requests["a"].num_computed_tokens == min(known_a, computed_a + budget)


@ROOM.law("P15", (32, 20, 30, 12, 16))
def check_younger_request_gets_the_rest_of_the_budget(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> None:
    """It gets all of the rest, if the blocks suffice for both."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a <= 2 * block_size and known_a < 8192
    assert 1 <= known_b <= 2 * block_size and known_b < 8192
    after, _ = step_of_two(known_a, known_b, computed_a, budget, block_size)
    rest = budget - min(known_a - computed_a, budget)
    assert after.requests["b"].num_computed_tokens == min(known_b, rest)


# Three running requests and a full pool: a holds 1 and 2, b holds 3, c holds 4.


def step_of_three(
    gap_a: int, gap_b: int, known_c: int, budget: int, block_size: int, priority_a: int
) -> tuple[State, Plan]:
    """Plan a step by priority: `a` continues in its blocks, `b` needs another, `c` begins."""
    config = h.build_config(
        block_size, num_blocks=5, max_num_batched_tokens=budget, policy=Policy.PRIORITY
    )
    first = h.build_runner("a", block_size + gap_a, block_size, (1, 2), priority=priority_a)
    second = h.build_runner("b", block_size + gap_b, block_size, (3,))
    return h.schedule(h.build_state(config, (first, second, h.build_runner("c", known_c, 0, (4,)))))


@ROOM.law("P9 P15", (2, 10, 10, 20, 16), budget_of_the_victim_is_lost)
def check_tokens_of_a_victim_go_to_later_requests(
    gap_a: int, gap_b: int, known_c: int, budget: int, block_size: int
) -> None:
    """Request `a` is planned, then preempted for a block of `b`; `c` gets the rest of the
    budget.
    """
    assert 1 <= gap_a <= block_size and 1 <= gap_b <= block_size and 1 <= known_c <= block_size
    assert gap_a < budget and 4 * block_size < 8192
    after, plan = step_of_three(gap_a, gap_b, known_c, budget, block_size, priority_a=1)
    num_second = min(gap_b, budget - gap_a)
    assert plan.preempted_req_ids == ("a",)
    assert after.requests["b"].num_computed_tokens == block_size + num_second
    assert after.requests["c"].num_computed_tokens == min(known_c, budget - num_second)


@ROOM.law("P10 P16", (2, 10, 10, 20, 16, 1))
def check_least_urgent_of_three_is_preempted_and_ties_break_by_id(
    gap_a: int, gap_b: int, known_c: int, budget: int, block_size: int, priority_a: int
) -> None:
    """`b` needs a block; of equal requests the last is the victim, so that two never alternate."""
    assert 1 <= gap_a <= block_size and 1 <= gap_b <= block_size and 1 <= known_c <= block_size
    assert gap_a < budget and 4 * block_size < 8192
    after, _ = step_of_three(gap_a, gap_b, known_c, budget, block_size, priority_a)
    assert after.running == (("b", "c") if priority_a > 0 else ("a", "b"))
    assert after.waiting == (("a",) if priority_a > 0 else ("c",))


@ROOM.law("P15", (12, 10, 10, 20, 16), victim_without_a_row_skips_a_request)
def check_victim_without_a_row_makes_no_request_skipped(
    known_a: int, gap_b: int, known_c: int, budget: int, block_size: int
) -> None:
    """`a` waits for its last token and is preempted for a block of `b`; `c` is next."""
    assert 1 <= known_a <= block_size and 1 <= budget and 4 * block_size < 8192
    assert 1 <= gap_b <= block_size and 1 <= known_c <= block_size
    config = h.build_config(
        block_size,
        num_blocks=4,
        max_num_batched_tokens=budget,
        policy=Policy.PRIORITY,
        max_frames_in_flight=2,
    )
    first = h.build_runner("a", known_a, known_a, (1,), max_tokens=1, priority=1)
    first = replace(first, num_output_placeholders=1)
    second = h.build_runner("b", block_size + gap_b, block_size, (2,))
    third = h.build_runner("c", known_c, 0, (3,))
    after, plan = h.schedule(h.build_state(config, (first, second, third)))
    num_second = min(gap_b, budget)
    assert plan.preempted_req_ids == ("a",)
    assert after.requests["b"].num_computed_tokens == block_size + num_second
    assert after.requests["c"].num_computed_tokens == min(known_c, budget - num_second)


@ROOM.law("P1 P9 P16", (20, 40, 10, 50, 16), grant_takes_nothing_off_the_budget, is_slow=True)
def check_three_requests_share_budget_and_blocks_in_order(
    known_a: int, known_b: int, known_c: int, budget: int, block_size: int
) -> None:
    """It covers the budget, the place of every block, the order and the progress of the oldest."""
    assert 1 <= block_size and 1 <= budget
    assert 1 <= known_a <= 4 * block_size and known_a < 8192
    assert 1 <= known_b < 8192 and 1 <= known_c < 8192
    config = h.build_config(block_size, num_blocks=5, max_num_batched_tokens=budget)
    runners = tuple(
        h.build_runner(name, num_known, 0, (block_id,))
        for block_id, name, num_known in ((1, "a", known_a), (2, "b", known_b), (3, "c", known_c))
    )
    after, plan = h.schedule(h.build_state(config, runners))
    tables = [block_id for name in "abc" for block_id in h.table_of(after.requests[name])]
    assert sum(row.num_scheduled_tokens for row in plan.rows) <= budget
    assert sorted((*tables, *after.pool.free_queue)) == [1, 2, 3, 4]
    assert h.is_conserved(after.pool)
    assert after.running + after.waiting == ("a", "b", "c")
    assert after.requests["a"].num_computed_tokens == min(known_a, budget)
