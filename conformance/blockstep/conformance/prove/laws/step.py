"""Step: one whole Schedule, over one to three requests with symbolic counters. PYTEST_DONT_REWRITE.

These laws run `process_schedule` itself. Who runs and which blocks they hold is concrete; token
counts, budget, block size, model length and priorities are symbolic.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove.harness import (
    build_pool,
    build_request,
    build_runner,
    build_state,
    is_conserved,
    key_of,
    schedule,
    table_of,
)
from blockstep.conformance.prove.law import Room, instead, instead_in
from blockstep.spec.memory.prefix import compute_max_hit_blocks
from blockstep.spec.memory.slots import (
    compute_num_blocks,
    compute_num_new_blocks,
    revoke_slots,
)
from blockstep.spec.pool import Pool, free_blocks
from blockstep.spec.releases.order import victim_without_a_row_shifts_the_next as shift_rule
from blockstep.spec.requests import Holding, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.state import State
from blockstep.spec.step import admission as admission_room
from blockstep.spec.step.admission import process_admission, process_waiting_phase
from blockstep.spec.step.preemption import process_preemption
from blockstep.spec.step.queues import Requests, select_victim
from blockstep.spec.step.running import process_grant, process_running_phase
from blockstep.spec.step.share import compute_share
from blockstep.spec.step.work import Step, Verdict
from blockstep.spec.vocabulary import BlockTables, Config, Plan, Policy, RequestId

ROOM = Room("step")
_process_admission = process_admission  # twins of these names call the right ones
_process_grant = process_grant
_process_preemption = process_preemption
_process_running_phase = process_running_phase
_process_waiting_phase = process_waiting_phase


# Mistakes.


def grant_takes_nothing_off_the_budget(
    step: Step, request: RequestState, num_new: int, granted: tuple[Pool, RequestState]
) -> None:
    """Each request is given the whole budget."""
    budget = step.budget
    _process_grant(step, request, num_new, granted)
    step.budget = budget


def grant_forgets_the_new_blocks(
    step: Step, request: RequestState, num_new: int, granted: tuple[Pool, RequestState]
) -> None:
    """They leave the pool, and no table names them: a leak."""
    pool, after = granted
    _process_grant(step, request, num_new, (pool, replace(after, holdings=request.holdings)))


def each_chunk_starts_a_block(num_slots: int, block_size: int, num_held: int) -> int:
    """What is left over in the last held block is not used."""
    return compute_num_blocks(max(num_slots - num_held * block_size + 1, 0), block_size) + 1


def last_partial_block_is_forgotten(num_tokens: int, block_size: int) -> int:
    """The quotient, rounded down."""
    return num_tokens // block_size


def oldest_goes(
    policy: Policy,
    running: list[RequestId],
    requests: Requests,
    get_victim_rank: object = None,
) -> int:
    """First come, first preempted."""
    return 0


def victim_without_a_row_shifts_the_next(step: Step) -> None:
    """The place in line is counted back only for a victim that had a row."""
    before = step.state
    step.state = replace(before, rules=shift_rule(before.rules, before.config))
    _process_running_phase(step)
    step.state = before


def blocks_of_the_victim_leak(
    pool: Pool, request: RequestState, block_size: int, rules: Rules
) -> Pool:
    """Preempted, and its blocks stay held by nobody."""
    return pool


def blocks_of_the_victim_are_freed_twice(
    pool: Pool, request: RequestState, block_size: int, rules: Rules
) -> Pool:
    """They stand in the free queue two times."""
    freed = free_blocks(pool, table_of(request))
    return replace(freed, free_queue=(*freed.free_queue, *table_of(request)))


def budget_of_the_victim_is_lost(step: Step, victim_index: int) -> RequestId:
    """Its tokens are not given back, and somebody waits for nothing."""
    budget = step.budget
    victim_id = _process_preemption(step, victim_index)
    step.budget = budget
    return victim_id


def one_token_of_the_budget_is_kept(
    num_wanted: int,
    num_computed: int,
    threshold: int,
    budget: int,
    end: int,
    is_whole: bool = False,
) -> int:
    """For whoever may come."""
    return min(num_wanted - num_computed, budget - 1, end - num_computed)


def seats_are_counted_before_the_step(step: Step) -> None:
    """Each newcomer is told that there is a place."""
    before = step.state
    more = replace(before.config, max_num_seqs=before.config.max_num_seqs + 1)
    step.state = replace(before, config=more)
    _process_waiting_phase(step)
    step.state = before


def head_that_does_not_fit_is_overtaken(step: Step, request: RequestState) -> Verdict:
    """The search goes on behind it: it may wait for ever."""
    verdict = _process_admission(step, request)
    if verdict is Verdict.ADMITTED:
        return verdict
    others = [name for name in step.waiting if name != request.request_id]
    for name in others:
        if _process_admission(step, step.requests[name]) is Verdict.ADMITTED:
            step.waiting.remove(name)
    return verdict


def refused_admission_is_counted_as_a_query(step: Step, request: RequestState) -> Verdict:
    """Statistics of a request that will ask again next step."""
    verdict = _process_admission(step, request)
    if verdict is Verdict.ADMITTED:
        return verdict
    queries = step.stats.prefix_cache_queries + request.num_known_tokens
    step.stats = replace(step.stats, prefix_cache_queries=queries)
    return verdict


def gate_looks_at_nothing(
    pool: Pool,
    num_slots: int,
    block_size: int,
    holdings: tuple[Holding, ...],
    hit_tables: BlockTables,
) -> bool:
    """Admission checks only the first chunk."""
    return True


def full_hit_leaves_nothing_to_compute(num_known: int, block_size: int) -> int:
    """All full blocks may be hit, as a connector reports them."""
    return num_known // block_size


def hit_is_computed_again(
    num_wanted: int,
    num_computed: int,
    threshold: int,
    budget: int,
    end: int,
    is_whole: bool = False,
) -> int:
    """The hit is not taken off."""
    return min(num_wanted, budget)


# One running request: it holds blocks 1 and 2; 3 and 4 are free.


def step_of_one(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> tuple[State, Plan]:
    """A step with one running request."""
    config = Config(
        num_blocks=5,
        block_size=block_size,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=False,
    )
    return schedule(build_state(config, (build_runner("a", num_known, num_computed, (1, 2)),)))


@ROOM.law(
    "P9",
    "P10",
    "P11",
    witness=(50, 20, 30, 0, 16),
    twins=(
        instead(compute_num_new_blocks, each_chunk_starts_a_block),
        instead(compute_share, one_token_of_the_budget_is_kept),
    ),
)
def check_request_alone_in_the_pool_gets_a_token_in_every_step(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> bool:
    """One at least, within budget and threshold, as long as the pool can hold it at all."""
    assert 1 <= block_size and 1 <= budget and 0 <= threshold
    assert 0 <= num_computed <= 2 * block_size and num_computed < num_known <= 4 * block_size
    assert num_known < 8192
    _, plan = step_of_one(num_known, num_computed, budget, threshold, block_size)
    amounts = [row.num_scheduled_tokens for row in plan.rows]
    assert len(amounts) == 1
    assert 1 <= amounts[0] <= budget
    assert threshold == 0 or amounts[0] <= threshold
    return True


@ROOM.law(
    "P1",
    "P2",
    "P8",
    witness=(50, 20, 30, 0, 16),
    twins=(
        instead(process_grant, grant_forgets_the_new_blocks),
        instead(compute_num_blocks, last_partial_block_is_forgotten),
    ),
)
def check_every_computed_token_of_a_runner_lies_in_a_block_of_its_own(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> bool:
    """With no block more than that takes; all others stay free."""
    assert 1 <= block_size and 1 <= budget and 0 <= threshold
    assert block_size < num_computed <= 2 * block_size and num_computed < num_known
    assert num_known < 8192
    after, _ = step_of_one(num_known, num_computed, budget, threshold, block_size)
    request = after.requests["a"]
    table = table_of(request)
    assert len(table) * block_size >= request.num_computed_tokens
    assert (len(table) - 1) * block_size < request.num_computed_tokens or not table
    assert is_conserved(after.pool)
    assert sorted((*table, *after.pool.free_queue)) == [1, 2, 3, 4]
    return True


# Two running requests: a holds 1 and 2, b holds 3; 4 is free.


def step_of_two(
    known_a: int,
    known_b: int,
    computed_a: int,
    budget: int,
    block_size: int,
    policy: Policy = Policy.FCFS,
    priority_a: int = 0,
    priority_b: int = 0,
) -> tuple[State, Plan]:
    """A step with two running requests; b has computed nothing of its block yet."""
    config = Config(
        num_blocks=5,
        block_size=block_size,
        max_num_batched_tokens=budget,
        policy=policy,
        enable_prefix_caching=False,
    )
    first = build_runner("a", known_a, computed_a, (1, 2))
    second = build_runner("b", known_b, 0, (3,))
    first = replace(first, request=replace(first.request, priority=priority_a))
    second = replace(second, request=replace(second.request, priority=priority_b))
    return schedule(build_state(config, (first, second)))


@ROOM.law(
    "P9",
    witness=(40, 20, 30, 12, 16),
    twins=(instead(process_grant, grant_takes_nothing_off_the_budget),),
)
def check_two_requests_share_one_budget(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> bool:
    """Also when one of them is preempted for the other."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a < 8192 and 1 <= known_b < 8192
    _, plan = step_of_two(known_a, known_b, computed_a, budget, block_size)
    assert sum(row.num_scheduled_tokens for row in plan.rows) <= budget
    return True


@ROOM.law(
    "P1",
    "P2",
    witness=(60, 20, 30, 12, 16),
    twins=(
        instead(revoke_slots, blocks_of_the_victim_leak),
        instead(revoke_slots, blocks_of_the_victim_are_freed_twice),
    ),
)
def check_every_block_has_one_place_after_a_step_of_two(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> bool:
    """In one of the tables or in the free queue, once, and the counts say the same."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a < 8192 and 1 <= known_b < 8192
    after, _ = step_of_two(known_a, known_b, computed_a, budget, block_size)
    tables = table_of(after.requests["a"]) + table_of(after.requests["b"])
    assert sorted(tables + after.pool.free_queue) == [1, 2, 3, 4]
    assert is_conserved(after.pool)
    return True


@ROOM.law(
    "P16",
    witness=(60, 20, 30, 40, 16),
    twins=(instead(select_victim, oldest_goes),),
)
def check_first_come_first_served_keeps_its_order_through_preemption(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> bool:
    """The older one runs on as long as anybody does, and the preempted wait in order of age."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a < 8192 and 1 <= known_b < 8192
    after, _ = step_of_two(known_a, known_b, computed_a, budget, block_size)
    assert after.running + after.waiting == ("a", "b")
    return True


@ROOM.law(
    "P10",
    "P15",
    witness=(60, 20, 30, 40, 16),
    twins=(
        instead(select_victim, oldest_goes),
        instead(compute_share, one_token_of_the_budget_is_kept),
    ),
)
def check_oldest_request_that_fits_the_pool_gets_all_that_the_budget_has(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> bool:
    """Whatever it costs the younger one: so somebody always gets on."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a <= 4 * block_size and known_a < 8192 and 1 <= known_b < 8192
    after, _ = step_of_two(known_a, known_b, computed_a, budget, block_size)
    assert after.requests["a"].num_computed_tokens == min(known_a, computed_a + budget)
    return True


@ROOM.law(
    "P15",
    witness=(32, 20, 30, 12, 16),
    twins=(instead(compute_share, one_token_of_the_budget_is_kept),),
)
def check_younger_request_gets_what_the_older_one_leaves_of_the_budget(
    known_a: int, known_b: int, computed_a: int, budget: int, block_size: int
) -> bool:
    """All of it, where blocks suffice for both."""
    assert 1 <= block_size and 1 <= budget and 0 <= computed_a <= 2 * block_size
    assert computed_a < known_a <= 2 * block_size and known_a < 8192
    assert 1 <= known_b <= 2 * block_size and known_b < 8192
    after, _ = step_of_two(known_a, known_b, computed_a, budget, block_size)
    rest = budget - min(known_a - computed_a, budget)
    assert after.requests["b"].num_computed_tokens == min(known_b, rest)
    return True


# Three running requests, the pool full: a holds 1 and 2, b holds 3, c holds 4.


def step_of_three(
    gap_a: int, gap_b: int, known_c: int, budget: int, block_size: int, priority_a: int
) -> tuple[State, Plan]:
    """By priority. a goes on in its blocks, b has filled its own, c has computed nothing."""
    config = Config(
        num_blocks=5,
        block_size=block_size,
        max_num_batched_tokens=budget,
        policy=Policy.PRIORITY,
        enable_prefix_caching=False,
    )
    first = build_runner("a", block_size + gap_a, block_size, (1, 2))
    first = replace(first, request=replace(first.request, priority=priority_a))
    second = build_runner("b", block_size + gap_b, block_size, (3,))
    return schedule(build_state(config, (first, second, build_runner("c", known_c, 0, (4,)))))


@ROOM.law(
    "P9",
    "P15",
    witness=(2, 10, 10, 20, 16),
    twins=(instead(process_preemption, budget_of_the_victim_is_lost),),
)
def check_tokens_of_a_victim_go_to_those_behind(
    gap_a: int, gap_b: int, known_c: int, budget: int, block_size: int
) -> bool:
    """a is planned, then preempted for a block that b needs; c gets what both leave."""
    assert 1 <= gap_a <= block_size and 1 <= gap_b <= block_size and 1 <= known_c <= block_size
    assert gap_a < budget and 4 * block_size < 8192
    after, plan = step_of_three(gap_a, gap_b, known_c, budget, block_size, priority_a=1)
    num_second = min(gap_b, budget - gap_a)
    assert plan.preempted_req_ids == ("a",)
    assert after.requests["b"].num_computed_tokens == block_size + num_second
    assert after.requests["c"].num_computed_tokens == min(known_c, budget - num_second)
    return True


@ROOM.law(
    "P10",
    "P16",
    witness=(2, 10, 10, 20, 16, 1),
    twins=(instead(select_victim, oldest_goes),),
)
def check_least_urgent_of_three_goes_and_ties_go_by_the_id(
    gap_a: int, gap_b: int, known_c: int, budget: int, block_size: int, priority_a: int
) -> bool:
    """b needs a block: of equals the last one goes, so that two cannot take turns for ever."""
    assert 1 <= gap_a <= block_size and 1 <= gap_b <= block_size and 1 <= known_c <= block_size
    assert gap_a < budget and 4 * block_size < 8192
    after, _ = step_of_three(gap_a, gap_b, known_c, budget, block_size, priority_a)
    assert after.running == (("b", "c") if priority_a > 0 else ("a", "b"))
    assert after.waiting == (("a",) if priority_a > 0 else ("c",))
    return True


@ROOM.law(
    "P15",
    witness=(12, 10, 10, 20, 16),
    twins=(
        instead(
            process_running_phase,
            victim_without_a_row_shifts_the_next,
            theirs="not found upstream",
        ),
    ),
)
def check_nobody_is_passed_over_because_of_a_victim_without_a_row(
    known_a: int, gap_b: int, known_c: int, budget: int, block_size: int
) -> bool:
    """a waits for its last token and is preempted for a block that b needs; c is next."""
    assert 1 <= known_a <= block_size and 1 <= budget and 4 * block_size < 8192
    assert 1 <= gap_b <= block_size and 1 <= known_c <= block_size
    config = Config(
        num_blocks=4,
        block_size=block_size,
        max_num_batched_tokens=budget,
        policy=Policy.PRIORITY,
        max_frames_in_flight=2,
        async_scheduling=True,
        enable_prefix_caching=False,
    )
    first = build_runner("a", known_a, known_a, (1,))
    asked = replace(first.request, max_tokens=1, priority=1)
    first = replace(first, request=asked, num_output_placeholders=1)
    second = build_runner("b", block_size + gap_b, block_size, (2,))
    third = build_runner("c", known_c, 0, (3,))
    after, plan = schedule(build_state(config, (first, second, third)))
    num_second = min(gap_b, budget)
    assert plan.preempted_req_ids == ("a",)
    assert after.requests["b"].num_computed_tokens == block_size + num_second
    assert after.requests["c"].num_computed_tokens == min(known_c, budget - num_second)
    return True


@ROOM.law(
    "P1",
    "P9",
    "P16",
    witness=(20, 40, 10, 50, 16),
    twins=(
        instead(process_grant, grant_takes_nothing_off_the_budget),
        instead(revoke_slots, blocks_of_the_victim_leak),
        instead(select_victim, oldest_goes),
    ),
    is_slow=True,
)
def check_three_requests_share_budget_and_blocks_in_order(
    known_a: int, known_b: int, known_c: int, budget: int, block_size: int
) -> bool:
    """Everything at once: budget, one place for every block, order, and progress of the oldest."""
    assert 1 <= block_size and 1 <= budget
    assert 1 <= known_a <= 4 * block_size and known_a < 8192
    assert 1 <= known_b < 8192 and 1 <= known_c < 8192
    config = Config(
        num_blocks=5,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    runners = (
        build_runner("a", known_a, 0, (1,)),
        build_runner("b", known_b, 0, (2,)),
        build_runner("c", known_c, 0, (3,)),
    )
    after, plan = schedule(build_state(config, runners))
    tables = [block_id for name in "abc" for block_id in table_of(after.requests[name])]
    assert sum(row.num_scheduled_tokens for row in plan.rows) <= budget
    assert sorted((*tables, *after.pool.free_queue)) == [1, 2, 3, 4]
    assert is_conserved(after.pool)
    assert after.running + after.waiting == ("a", "b", "c")
    assert after.requests["a"].num_computed_tokens == min(known_a, budget)
    return True


# Waiting requests.


@ROOM.law(
    "P9",
    witness=(5, 5, 20, 1),
    twins=(instead(process_waiting_phase, seats_are_counted_before_the_step),),
)
def check_nobody_is_admitted_without_a_seat(
    known_a: int, known_b: int, budget: int, max_num_seqs: int
) -> bool:
    """Two wait, and there is room for everything but perhaps for both of them."""
    assert 1 <= known_a < 1000 and 1 <= known_b < 1000 and 1 <= budget and 1 <= max_num_seqs
    config = Config(
        num_blocks=4,
        block_size=1000,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    waiting = (build_request("a", known_a), build_request("b", known_b))
    after, plan = schedule(build_state(config, (), waiting))
    assert 1 <= len(after.running) <= max_num_seqs
    assert sum(row.num_scheduled_tokens for row in plan.rows) <= budget
    assert after.running + after.waiting == ("a", "b")
    return True


@ROOM.law(
    "P15",
    "P16",
    witness=(40, 5, 20, 16),
    twins=(instead(process_admission, head_that_does_not_fit_is_overtaken),),
)
def check_nobody_overtakes_a_head_that_does_not_fit(
    known_a: int, known_b: int, budget: int, block_size: int
) -> bool:
    """a is admitted exactly when the two blocks hold it, and b never without it."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_a < 8192 and 1 <= known_b < 8192
    config = Config(
        num_blocks=3,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    waiting = (build_request("a", known_a), build_request("b", known_b))
    after, _ = schedule(build_state(config, (), waiting))
    assert ("a" in after.running) == (known_a <= 2 * block_size)
    assert "b" not in after.running or after.running == ("a", "b")
    return True


@ROOM.law(
    "P7",
    "P21",
    witness=(40, 20, 16),
    twins=(instead(process_admission, refused_admission_is_counted_as_a_query),),
)
def check_refused_admission_leaves_no_trace(known_a: int, budget: int, block_size: int) -> bool:
    """Requests, pool and statistics are those before, the queue as well."""
    assert 1 <= block_size and 1 <= budget
    assert 2 * block_size < known_a <= 4 * block_size and known_a < 8192
    config = Config(num_blocks=3, block_size=block_size, max_num_batched_tokens=budget)
    before = build_state(config, (), (build_request("a", known_a),))
    after, plan = schedule(before)
    assert not plan.rows
    assert after.requests["a"] is before.requests["a"]
    assert (after.waiting, after.skipped_waiting, after.running) == (("a",), (), ())
    assert after.pool is before.pool
    assert after.stats == before.stats
    return True


@ROOM.law(
    "P8",
    "P10",
    witness=(40, 20, 16),
    twins=(instead_in(admission_room, "can_hold", gate_looks_at_nothing),),
)
def check_admission_leaves_room_for_the_rest_of_the_prompt(
    known_a: int, budget: int, block_size: int
) -> bool:
    """Or its next chunk would preempt it, and it would start again, for ever."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_a < 8192
    config = Config(
        num_blocks=4,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    after, _ = schedule(build_state(config, (), (build_request("a", known_a),)))
    num_later = compute_num_blocks(known_a, block_size) - len(table_of(after.requests["a"]))
    assert after.waiting or num_later <= len(after.pool.free_queue)
    return True


@ROOM.law(
    "P5",
    "P9",
    "P12",
    witness=(40, 20, 16),
    twins=(
        instead(
            compute_max_hit_blocks,
            full_hit_leaves_nothing_to_compute,
            theirs="#30320 (hits of a connector)",
        ),
        instead(compute_share, hit_is_computed_again),
    ),
)
def check_admission_with_a_hit_computes_only_what_is_left_and_at_least_one_token(
    known_a: int, budget: int, block_size: int
) -> bool:
    """Two blocks of its prompt are published: it hits as much of them as leaves a token."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_a <= 4 * block_size and known_a < 8192
    config = Config(num_blocks=6, block_size=block_size, max_num_batched_tokens=budget)
    request = replace(build_request("a", known_a), block_keys=tuple(map(key_of, (1, 2, 3, 4))))
    before = build_state(config, (), (request,))
    pool = build_pool((0,) * 6, before.pool.free_queue, published=(1, 2))
    after, plan = schedule(replace(before, pool=pool))
    assert len(plan.rows) == 1
    row, request = plan.rows[0], after.requests["a"]
    assert row.num_scheduled_tokens >= 1
    assert row.num_computed_tokens + row.num_scheduled_tokens <= known_a
    assert request.num_computed_tokens == min(known_a, row.num_computed_tokens + budget)
    assert row.num_computed_tokens in (0, block_size, 2 * block_size)
    return True
