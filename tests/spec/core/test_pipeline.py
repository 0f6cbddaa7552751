"""Several frames in flight without asynchronous scheduling: a request waits for its own token."""

from __future__ import annotations

import pytest

from blockstep.spec import Config, ConfigError, Oracle, Plan, Request, SpecMethod
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import RequestId


def make(depth: int = 3, **fields: object) -> Oracle:
    sizes = {"num_blocks": 9, "block_size": 4, "max_model_len": 32, **fields}
    return Oracle(Config(**sizes, max_frames_in_flight=depth))  # type: ignore[arg-type]


def names(plan: Plan) -> list[RequestId]:
    return [row.request_id for row in plan.rows]


def test_asynchronous_scheduling_needs_a_pipeline() -> None:
    with pytest.raises(ConfigError, match="needs room for a plan ahead"):
        Oracle(Config(num_blocks=9, async_scheduling=True))


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    oracle = make(max_num_batched_tokens=2)
    oracle.submit(Request("A", (1, 2, 3, 4, 5)))
    plans = [oracle.schedule() for _ in range(3)]
    assert [plan.total_num_scheduled_tokens for plan in plans] == [2, 2, 1]
    for plan in plans[:2]:
        oracle.commit(plan, {})
    oracle.commit(plans[2], {"A": [7]})
    assert oracle.state.requests["A"].output_token_ids == (7,)


def test_a_preempted_request_waits_for_its_token_in_flight() -> None:
    """Upstream #48245: an earlier admission would sample the same position twice."""
    oracle = make(num_blocks=5, block_size=2, max_model_len=8, enable_prefix_caching=False)
    oracle.submit(Request("A", (1, 2), max_tokens=2))
    first = oracle.schedule()
    oracle.submit(Request("B", (3, 4, 5, 6, 7), max_tokens=2))
    second = oracle.schedule()
    oracle.commit(first, {"A": [7]})
    third = oracle.schedule()  # A needs a second block, and B has the others
    assert (names(third), third.preempted_req_ids) == (["A"], ("B",))
    oracle.abort("A")
    assert names(oracle.schedule()) == [], "there is room, but its token is in flight"
    outputs = oracle.commit(second, {"B": [8]})
    assert outputs.rows[0].new_token_ids == (8,)
    plan = oracle.schedule()
    assert [row.num_scheduled_tokens for row in plan.rows] == [6]
    assert not get_broken_invariants(oracle.state)


def test_a_chunk_in_flight_does_not_delay_admission_after_a_reset() -> None:
    oracle = make(max_num_batched_tokens=2)
    oracle.submit(Request("A", (1, 2, 3)))
    oracle.schedule()
    oracle.reset(reset_running_requests=True)
    assert names(oracle.schedule()) == ["A"]


def test_drafts_are_accepted_while_other_requests_are_in_flight() -> None:
    oracle = make(spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    oracle.submit(Request("A", (1, 2)))
    first = oracle.schedule()
    oracle.submit(Request("B", (3, 4)))
    oracle.schedule()
    assert oracle.propose({"A": [5, 6]}) == (), "its position is in flight"
    oracle.commit(first, {"A": [7]})
    assert oracle.propose({"A": [5, 6], "B": [5]}) == ("A",)
    (row,) = oracle.schedule().rows
    assert row.draft_token_ids == (5, 6)
