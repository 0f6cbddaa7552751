"""Prefill cadence: while requests decode, prompts get tokens in every n-th step only."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec import Commit, Config, Oracle, Outputs, Request
from blockstep.spec.features.prefill_cadence import PREFILL_WAIT
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import Ack, KVOffer, Plan, RowTokens, config_problems

CONFIG = Config(
    40,
    block_size=2,
    max_num_seqs=4,
    max_num_batched_tokens=4,
    max_model_len=30,
    prefill_schedule_interval=3,
)
AHEAD = replace(CONFIG, max_frames_in_flight=2)


def request(name: str, num_tokens: int, first: int, max_tokens: int = 9) -> Request:
    return Request(name, tuple(range(first, first + num_tokens)), max_tokens=max_tokens)


A, B = request("A", 2, 0), request("B", 9, 10)


def format_plan(plan: Plan) -> str:
    """Return the rows of a plan: request and number of tokens."""
    return " ".join([f"{row.request_id}{row.num_scheduled_tokens}" for row in plan.rows])


def answer(oracle: Oracle) -> None:
    """Commit the oldest frame: every row that can sample samples the same token."""
    frame = oracle.state.frames[0]
    tokens = [RowTokens(row.request_id, (50,) if row.samples else ()) for row in frame.rows]
    assert isinstance(oracle.apply(Commit(frame.frame_id, tuple(tokens))), Outputs)


def run(oracle: Oracle, num_steps: int) -> list[str]:
    """Run some steps and return their plans."""
    lines = []
    for _ in range(num_steps):
        lines.append(format_plan(oracle.schedule()))
        assert get_broken_invariants(oracle.state) == ()
        answer(oracle)
    return lines


def test_admissions_and_chunks_wait_for_the_nth_step() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(A)
    assert run(oracle, 1) == ["A2"]
    oracle.submit(B)
    assert run(oracle, 8) == ["A1", "A1", "B3 A1", "A1", "A1", "A1 B3", "A1", "A1"]


def test_a_load_starts_while_prompts_wait() -> None:
    oracle = Oracle(replace(CONFIG, kv_connector=True))
    oracle.submit(A)
    run(oracle, 1)
    oracle.submit(B)
    assert oracle.apply(KVOffer("B", 8, is_async=True)) == Ack()
    plan = oracle.schedule()
    assert format_plan(plan) == "A1"
    assert [load.request_id for load in plan.kv_loads] == ["B"]


def test_a_plan_without_rows_is_not_counted() -> None:
    oracle = Oracle(AHEAD)
    oracle.submit(A)
    oracle.schedule()
    wait = PREFILL_WAIT.of(oracle.state)
    assert format_plan(oracle.schedule()) == ""
    assert PREFILL_WAIT.of(oracle.state) == wait == 2


def test_the_interval_is_at_least_one() -> None:
    (problem,) = config_problems(replace(CONFIG, prefill_schedule_interval=0))
    assert problem.field == "prefill_schedule_interval"
    assert Config(8).has_prefill_interval is False
