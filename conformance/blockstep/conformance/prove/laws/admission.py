"""Laws about one whole Schedule that admits one or two requests, or none.

PYTEST_DONT_REWRITE.

These laws run `process_schedule` itself, with symbolic token counts, budgets and block sizes.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.conformance.prove.laws.allocation import full_hit_leaves_nothing_to_compute
from blockstep.spec.core.admission import process_admission
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.slots import compute_num_blocks
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.vocabulary import Config

ROOM = LawModule("admission")


# Mistakes.


@instead(process_admission)
def head_that_does_not_fit_is_overtaken(
    right: Right[Verdict], step: Step, request: RequestState
) -> Verdict:
    """Requests behind a head that does not fit are admitted, so the head may wait for ever."""
    verdict = right()
    if verdict is not Verdict.ADMITTED:
        for name in [name for name in step.waiting if name != request.request_id]:
            if right(request=step.requests[name]) is Verdict.ADMITTED:
                step.waiting.remove(name)
    return verdict


@instead(process_admission)
def refused_admission_is_counted_as_a_query(
    right: Right[Verdict], step: Step, request: RequestState
) -> Verdict:
    """A failed admission counts as a prefix-cache query, and again in the next step."""
    verdict = right()
    if verdict is not Verdict.ADMITTED:
        queries = step.stats.prefix_cache_queries + request.num_known_tokens
        step.stats = replace(step.stats, prefix_cache_queries=queries)
    return verdict


# Laws.


@ROOM.law("P9", (5, 5, 20, 1))
def check_no_admission_without_a_running_slot(
    known_a: int, known_b: int, budget: int, max_num_seqs: int
) -> None:
    """Two requests wait; only the number of running slots may not suffice for both."""
    assert 1 <= known_a < 1000 and 1 <= known_b < 1000 and 1 <= budget and 1 <= max_num_seqs
    config = h.build_config(
        1000, num_blocks=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    waiting = (h.build_request("a", known_a), h.build_request("b", known_b))
    after, plan = h.schedule(h.build_state(config, (), waiting))
    assert 1 <= len(after.running) <= max_num_seqs
    assert sum(row.num_scheduled_tokens for row in plan.rows) <= budget
    assert after.running + after.waiting == ("a", "b")


@ROOM.law("P15 P16", (40, 5, 20, 16), head_that_does_not_fit_is_overtaken)
def check_no_request_overtakes_a_head_that_does_not_fit(
    known_a: int, known_b: int, budget: int, block_size: int
) -> None:
    """Request `a` is admitted exactly if two blocks hold it, and `b` never without `a`."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_a < 8192 and 1 <= known_b < 8192
    config = h.build_config(block_size, num_blocks=3, max_num_batched_tokens=budget)
    waiting = (h.build_request("a", known_a), h.build_request("b", known_b))
    after, _ = h.schedule(h.build_state(config, (), waiting))
    assert ("a" in after.running) == (known_a <= 2 * block_size)
    assert "b" not in after.running or after.running == ("a", "b")


@ROOM.law("P7 P21", (40, 20, 16), refused_admission_is_counted_as_a_query)
def check_failed_admission_changes_nothing(known_a: int, budget: int, block_size: int) -> None:
    """The requests, the queues, the pool and the statistics stay as they were."""
    assert 1 <= block_size and 1 <= budget
    assert 2 * block_size < known_a <= 4 * block_size and known_a < 8192
    config = Config(num_blocks=3, block_size=block_size, max_num_batched_tokens=budget)
    before = h.build_state(config, (), (h.build_request("a", known_a),))
    after, plan = h.schedule(before)
    assert not plan.rows
    assert after.requests["a"] is before.requests["a"]
    assert (after.waiting, after.skipped_waiting, after.running) == (("a",), (), ())
    assert after.pool is before.pool
    assert after.stats == before.stats


@ROOM.law("P8 P10", (40, 20, 16))
def check_admission_leaves_room_for_the_rest_of_the_prompt(
    known_a: int, budget: int, block_size: int
) -> None:
    """Otherwise its next chunk would preempt it, and it would start again, for ever."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_a < 8192
    config = h.build_config(block_size, num_blocks=4, max_num_batched_tokens=budget)
    after, _ = h.schedule(h.build_state(config, (), (h.build_request("a", known_a),)))
    num_later = compute_num_blocks(known_a, block_size) - len(h.table_of(after.requests["a"]))
    assert after.waiting or num_later <= len(after.pool.free_queue)


@ROOM.law("P5 P9 P12", (40, 20, 16), full_hit_leaves_nothing_to_compute)
def check_admission_with_a_hit_computes_the_other_tokens(
    known_a: int, budget: int, block_size: int
) -> None:
    """Two blocks of the prompt are published; the hit is as many of them as leave a token."""
    assert 1 <= block_size and 1 <= budget and 1 <= known_a <= 4 * block_size and known_a < 8192
    config = Config(num_blocks=6, block_size=block_size, max_num_batched_tokens=budget)
    request = replace(h.build_request("a", known_a), block_keys=tuple(map(h.key_of, (1, 2, 3, 4))))
    before = h.build_state(config, (), (request,))
    pool = h.build_pool((0,) * 6, before.pool.free_queue, published=(1, 2))
    after, plan = h.schedule(replace(before, pool=pool))
    assert len(plan.rows) == 1
    row, request = plan.rows[0], after.requests["a"]
    assert row.num_scheduled_tokens >= 1
    assert row.num_computed_tokens + row.num_scheduled_tokens <= known_a
    assert request.num_computed_tokens == min(known_a, row.num_computed_tokens + budget)
    assert row.num_computed_tokens in (0, block_size, 2 * block_size)
