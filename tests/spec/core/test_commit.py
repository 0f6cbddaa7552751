"""Commit: finish reasons, accepted and rejected drafts, aborted rows, resets and pauses."""

from typing import Any

import pytest

from blockstep.spec import (
    Config,
    Drafts,
    FinishReason,
    Oracle,
    Outputs,
    PauseState,
    Plan,
    Request,
    Reset,
    SetPause,
    SpecMethod,
    Status,
)
from blockstep.spec.vocabulary import RepetitionDetection, RowTokens

CONFIG = Config(
    num_blocks=20,
    block_size=4,
    max_model_len=32,
    spec_method=SpecMethod.NGRAM,
    num_speculative_tokens=3,
)


def run(tokens: list[int], **asked: Any) -> Outputs:
    """Prefill a prompt of two tokens, then sample `tokens` one per step."""
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2), **{"max_tokens": 8, **asked}))
    for token in tokens:
        outputs = oracle.commit(oracle.schedule(), {"A": [token]})
    return outputs


@pytest.mark.parametrize(
    ("tokens", "asked", "reason", "stop_token"),
    [
        ([5, 9], {"eos_token_id": 9}, FinishReason.STOP, None),
        ([5, 9], {"stop_token_ids": (8, 9)}, FinishReason.STOP, 9),
        ([5, 9], {"eos_token_id": 9, "stop_token_ids": (9,)}, FinishReason.STOP, None),
        ([5, 9], {"max_tokens": 2}, FinishReason.LENGTH, None),
        ([5, 9], {"max_tokens": 2, "eos_token_id": 9}, FinishReason.STOP, None),
        ([9, 9], {"eos_token_id": 9, "min_tokens": 2}, FinishReason.STOP, None),
        ([9], {"eos_token_id": 9, "min_tokens": 2}, None, None),
        ([9, 9], {"max_tokens": 2, "min_tokens": 2}, FinishReason.LENGTH, None),
        ([3, 4, 3, 4], {"repetition_detection": RepetitionDetection(2, 2)}, "repetition", None),
        ([3, 3], {"repetition_detection": RepetitionDetection(2, 2)}, None, None),
        ([3, 3], {"repetition_detection": RepetitionDetection(2)}, "repetition", None),
        ([3, 3], {"repetition_detection": RepetitionDetection(2), "min_tokens": 3}, None, None),
        ([1, 2, 3, 3], {"repetition_detection": RepetitionDetection(1)}, "repetition", None),
        ([1, 2, 3, 1, 2, 3], {"repetition_detection": RepetitionDetection(2)}, None, None),
    ],
)
def test_finish_reasons(
    tokens: list[int], asked: dict[str, Any], reason: FinishReason | None, stop_token: int | None
) -> None:
    (row,) = run(tokens, **asked).rows
    assert (row.finish_reason, row.stop_token_id) == (reason, stop_token)
    assert row.new_token_ids == (tokens[-1],)


def drafted() -> tuple[Oracle, Plan]:
    """Return an oracle and a plan with drafts 11, 12, 13 of request A in flight."""
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2), max_tokens=8, eos_token_id=12))
    oracle.commit(oracle.schedule(), {"A": [10]})
    oracle.apply(Drafts((RowTokens("A", (11, 12, 13)),)))
    plan = oracle.schedule()
    assert plan.cached[0].draft_token_ids == (11, 12, 13)
    assert plan.cached[0].num_scheduled_tokens == 4
    return oracle, plan


def test_rejected_drafts_do_not_count_as_computed() -> None:
    oracle, plan = drafted()
    oracle.commit(plan, {"A": [11, 50]})
    request = oracle.state.requests["A"]
    assert request.output_token_ids == (10, 11, 50)
    assert request.num_computed_tokens == request.num_known_tokens - 1 == 4
    assert (oracle.state.stats.drafts_scheduled, oracle.state.stats.drafts_accepted) == (3, 1)


def test_accepted_drafts_after_the_stop_token_are_dropped() -> None:
    oracle, plan = drafted()
    (row,) = oracle.commit(plan, {"A": [11, 12, 13, 14]}).rows
    assert row.new_token_ids == (11, 12)
    assert row.finish_reason is FinishReason.STOP
    assert "A" not in oracle.state.requests
    assert len(oracle.state.pool.free_queue) == 19


def test_a_commit_ignores_the_row_of_an_aborted_request() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2)))
    oracle.submit(Request("B", (3, 4)))
    plan = oracle.schedule()
    oracle.abort("A")
    outputs = oracle.commit(plan, {"A": [5], "B": [6]})
    assert [row.request_id for row in outputs.rows] == ["B"]
    assert oracle.schedule().finished_req_ids == ("A",)


def test_tokens_in_flight_survive_a_forced_reset() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2, 3, 4, 5)))
    plan = oracle.schedule()
    oracle.apply(Reset(reset_running_requests=True))
    assert oracle.state.requests["A"].status is Status.PREEMPTED
    assert not oracle.state.pool.cached
    (row,) = oracle.commit(plan, {"A": [6]}).rows
    assert row.new_token_ids == (6,)
    (resumed,) = oracle.schedule().cached
    assert resumed.resumed
    assert resumed.all_token_ids == (1, 2, 3, 4, 5, 6)
    assert (resumed.num_computed_tokens, resumed.num_scheduled_tokens) == (0, 6)


def test_a_reset_that_is_not_forced_fails_while_a_block_is_held() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2, 3, 4, 5), max_tokens=1))
    plan = oracle.schedule()
    before = oracle.state
    oracle.apply(Reset())
    assert oracle.state == before
    oracle.commit(plan, {"A": [6]})
    assert oracle.state.pool.cached
    oracle.apply(Reset())
    assert not oracle.state.pool.cached


def test_a_pause_stops_all_rows_or_only_admission() -> None:
    oracle = Oracle(CONFIG)
    oracle.submit(Request("A", (1, 2)))
    oracle.commit(oracle.schedule(), {"A": [5]})
    oracle.submit(Request("B", (3, 4)))
    oracle.apply(SetPause(PauseState.PAUSED_ALL))
    assert oracle.schedule().rows == ()
    oracle.apply(SetPause(PauseState.PAUSED_NEW))
    plan = oracle.schedule()
    assert [row.request_id for row in plan.rows] == ["A"]
    assert plan.cached[0].all_token_ids == (1, 2, 5), "it was not in the plan before"
    oracle.commit(plan, {"A": [6]})
    oracle.apply(SetPause(PauseState.UNPAUSED))
    assert [row.request_id for row in oracle.schedule().rows] == ["B", "A"]
