"""Schedule: token budget, admission, order of the queues, preemption, and rows of the plan."""

from dataclasses import replace

from blockstep.spec import (
    Config,
    Drafts,
    GrammarReady,
    Oracle,
    Plan,
    Policy,
    Request,
    SpecMethod,
    Status,
)
from blockstep.spec.core.slots import compute_max_slots
from blockstep.spec.core.token_budget import compute_share
from blockstep.spec.vocabulary import RowTokens

CONFIG = Config(num_blocks=21, block_size=4, max_model_len=64)


def amounts(plan: Plan) -> dict[str, int]:
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


def step(oracle: Oracle, token: int = 99) -> Plan:
    """Schedule, then commit a token for every row that samples."""
    plan = oracle.schedule()
    frame = oracle.state.frames[-1] if plan.rows else None
    samples = {row.request_id: [token] for row in frame.rows if row.samples} if frame else {}
    if plan.rows:
        oracle.commit(plan, samples)
    return plan


def test_tokens_that_must_be_scheduled_whole_get_all_or_nothing() -> None:
    assert compute_share(9, 2, 0, 7, 9, is_whole=True) == 7
    assert compute_share(9, 2, 0, 6, 9, is_whole=True) == 0
    assert compute_share(9, 2, 5, 6, 9, is_whole=True) == 5, "the threshold comes first"


def test_the_last_output_needs_no_slot_but_drafts_and_lookahead_do() -> None:
    assert compute_max_slots(10, 5, 0, 0, 100) == 14
    assert compute_max_slots(10, 5, 3, 0, 100) == 17
    assert compute_max_slots(10, 5, 3, 3, 100) == 20
    assert compute_max_slots(10, 1, 3, 0, 100) == 10, "no output before the last: no drafts"
    assert compute_max_slots(10, 50, 3, 0, 20) == 19
    assert compute_max_slots(10, 50, 3, 3, 20) == 20


def test_without_chunked_prefill_a_prompt_waits_for_enough_budget() -> None:
    config = replace(
        CONFIG, enable_chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=9
    )
    oracle = Oracle(config)
    oracle.submit(Request("A", tuple(range(40)), max_tokens=1, cache_salt="A"))
    oracle.submit(Request("B", tuple(range(30)), max_tokens=1, cache_salt="B"))
    oracle.submit(Request("C", (1,), max_tokens=1))
    assert amounts(step(oracle)) == {"A": 40}, "C does not overtake B"
    assert amounts(step(oracle)) == {"B": 30, "C": 1}


def test_the_admission_gate_reserves_blocks_for_the_whole_prompt() -> None:
    """Upstream #37307: without the gate, a request is admitted and then preempted (#25538)."""

    def admitted(gate: bool) -> bool:
        config = replace(
            CONFIG, num_blocks=6, max_num_batched_tokens=8, scheduler_reserve_full_isl=gate
        )
        oracle = Oracle(config)
        oracle.submit(Request("A", tuple(range(7)), max_tokens=9, cache_salt="A"))
        step(oracle)
        oracle.submit(Request("B", tuple(range(16)), max_tokens=2, cache_salt="B"))
        return "B" in amounts(step(oracle))

    assert not admitted(gate=True)
    assert admitted(gate=False)


def test_fully_cached_prompt_recomputes_its_last_block() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", tuple(range(8)), max_tokens=1))
    step(oracle)
    oracle.submit(Request("B", tuple(range(8)), max_tokens=1))
    (row,) = oracle.schedule().new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (4, 4)


def test_an_eagle_head_drops_the_last_block_of_a_hit() -> None:
    config = replace(CONFIG, spec_method=SpecMethod.EAGLE, num_speculative_tokens=2)
    oracle = Oracle(config)
    oracle.submit(Request("A", tuple(range(12)), max_tokens=1))
    step(oracle)
    oracle.submit(Request("B", (*range(12), 50), max_tokens=1))
    (row,) = oracle.schedule().new
    assert row.num_computed_tokens == 8


def test_a_request_hits_blocks_published_in_the_same_step() -> None:
    """An earlier request in the same step writes these blocks before they are read."""
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", tuple(range(9))))
    oracle.submit(Request("B", tuple(range(9))))
    first, second = oracle.schedule().new
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 8)
    assert second.block_ids[0][:2] == first.block_ids[0][:2]


def test_drafts_are_trimmed_to_the_budget_and_the_rest_is_dropped() -> None:
    config = replace(
        CONFIG,
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3,
        max_num_batched_tokens=5,
    )
    oracle = Oracle(config)
    for name in ("A", "B"):
        oracle.submit(Request(name, (1, 2), max_tokens=9))
    step(oracle)
    oracle.apply(Drafts((RowTokens("A", (4, 5, 6)), RowTokens("B", (7, 8, 9)))))
    plan = oracle.schedule()
    assert [row.draft_token_ids for row in plan.cached] == [(4, 5, 6), ()]
    assert amounts(plan) == {"A": 4, "B": 1}
    assert all(request.spec_token_ids == () for request in oracle.state.requests.values())


def test_skipped_requests_stay_ahead_of_newer_ones() -> None:
    oracle = Oracle(CONFIG)
    for name in ("G", "H"):
        oracle.submit(Request(name, (1,), structured_output=True))
    oracle.submit(Request("A", (2,)))
    assert amounts(step(oracle)) == {"A": 1}
    assert oracle.state.skipped_waiting == ("G", "H")
    oracle.apply(GrammarReady("H"))
    assert amounts(step(oracle)) == {"A": 1, "H": 1}
    oracle.submit(Request("B", (3,)))
    oracle.apply(GrammarReady("G"))
    plan = step(oracle)
    assert [row.request_id for row in plan.new] == ["G", "B"], "the skipped are older"


def test_priority_orders_both_queues_by_rank() -> None:
    oracle = Oracle(replace(CONFIG, policy=Policy.PRIORITY, max_num_seqs=3))
    oracle.submit(Request("late", (1,), arrival_time=9))
    oracle.submit(Request("low", (1,), priority=5))
    oracle.submit(Request("b", (1,), arrival_time=3))
    oracle.submit(Request("a", (1,), arrival_time=3))
    oracle.submit(Request("g", (1,), arrival_time=1, structured_output=True))
    oracle.apply(GrammarReady("g"))
    assert oracle.state.waiting == ("a", "b", "late", "low")
    assert [row.request_id for row in oracle.schedule().new] == ["g", "a", "b"]


def test_requests_of_equal_rank_do_not_preempt_each_other_for_ever() -> None:
    """Two requests with equal priority and arrival finish although the pool is too small for both.

    Found by `blockstep check`. 0.19.1 preempts the first of the two in running order, so each step
    preempts the other one.
    """
    oracle = Oracle(
        Config(
            num_blocks=20,
            block_size=2,
            max_model_len=64,
            policy=Policy.PRIORITY,
            enable_prefix_caching=False,
            long_prefill_token_threshold=1,
            scheduler_reserve_full_isl=False,
        )
    )
    oracle.submit(Request("A", tuple(range(22)), max_tokens=5, arrival_time=2))
    oracle.submit(Request("B", tuple(range(18)), max_tokens=12, arrival_time=2))
    for _ in range(100):
        step(oracle)
    assert not oracle.state.requests
    assert oracle.state.stats.preemptions == 1


def test_a_request_that_preempts_itself_is_first_in_the_waiting_queue() -> None:
    oracle = Oracle(replace(CONFIG, num_blocks=4))
    oracle.submit(Request("A", (1, 2, 3, 4), max_tokens=9))
    oracle.submit(Request("B", (5, 6, 7, 8), max_tokens=5))
    oracle.commit(oracle.schedule(), {"A": [1], "B": [2]})
    plan = step(oracle)
    assert plan.preempted_req_ids == ("B",)
    assert amounts(plan) == {"A": 1}
    assert oracle.state.requests["B"].status is Status.PREEMPTED
    oracle.submit(Request("C", (9,), max_tokens=4))
    assert oracle.state.waiting == ("B", "C")


def test_states_after_equal_events_are_equal() -> None:
    first, second = Oracle(CONFIG), Oracle(CONFIG)
    for oracle in (first, second):
        oracle.submit(Request("A", tuple(range(9)), max_tokens=3))
        step(oracle)
    assert first.state == second.state
    assert hash(first.state) == hash(second.state)
    step(first)
    assert first.state != second.state
