"""Oracle: methods for events raise on a rejection; queries change nothing."""

from __future__ import annotations

import pytest

from blockstep.spec import Config, Oracle, PauseState, RejectedEvent, Request, SpecMethod
from blockstep.spec.vocabulary import RejectCode, Status

CONFIG = Config(
    num_blocks=9, block_size=2, max_model_len=16, spec_method=SpecMethod.NGRAM,
    num_speculative_tokens=2,
)  # fmt: skip


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(CONFIG)


def code_of(refused: pytest.ExceptionInfo[RejectedEvent]) -> RejectCode:
    return refused.value.rejected.code


def test_propose_stores_drafts_and_raises_on_a_rejection(oracle: Oracle) -> None:
    oracle.submit(Request("A", (1, 2, 3)))
    oracle.commit(oracle.schedule(), {"A": [4]})
    assert oracle.propose({"A": [5, 6], "gone": [1]}) == ("A",)
    (row,) = oracle.schedule().rows
    assert row.draft_token_ids == (5, 6)
    with pytest.raises(RejectedEvent) as refused:
        oracle.propose({"A": [1, 2, 3]})
    assert code_of(refused) is RejectCode.BAD_DRAFTS


def test_grammar_ready_lets_a_request_run(oracle: Oracle) -> None:
    oracle.submit(Request("A", (1, 2), structured_output=True))
    assert oracle.schedule().rows == ()
    oracle.grammar_ready("A")
    assert [row.request_id for row in oracle.schedule().rows] == ["A"]
    with pytest.raises(RejectedEvent) as refused:
        oracle.grammar_ready("B")
    assert code_of(refused) is RejectCode.UNKNOWN_REQUEST


def test_a_pause_lasts_until_it_is_resumed(oracle: Oracle) -> None:
    oracle.submit(Request("A", (1, 2)))
    oracle.pause()
    assert oracle.schedule().rows == ()
    oracle.pause(PauseState.PAUSED_NEW)
    assert oracle.schedule().rows == ()
    oracle.resume()
    assert oracle.schedule().rows != ()


def test_a_reset_returns_whether_it_succeeded(oracle: Oracle) -> None:
    oracle.submit(Request("A", (1, 2)))
    oracle.schedule()
    assert not oracle.reset()
    assert oracle.reset(reset_running_requests=True)
    assert oracle.state.requests["A"].status is Status.PREEMPTED


def test_an_abort_returns_the_aborted_requests(oracle: Oracle) -> None:
    oracle.submit(Request("A", (1, 2)))
    assert oracle.abort("A", "B") == ("A",)


def test_a_peek_returns_the_hit_and_changes_nothing(oracle: Oracle) -> None:
    oracle.submit(Request("A", (1, 2, 3, 4, 5), max_tokens=1))
    oracle.commit(oracle.schedule(), {"A": [6]})
    before = oracle.state
    assert oracle.peek(Request("B", (1, 2, 3, 4, 9))) == 4
    assert oracle.peek(Request("B", (1, 2, 3, 4))) == 2, "a token is left to compute"
    assert oracle.peek(Request("B", (1, 2, 3, 4, 9), cache_salt="x")) == 0
    assert oracle.peek(Request("B", (1, 2, 3, 4, 9), skip_reading_prefix_cache=True)) == 0
    assert oracle.state is before
    oracle.submit(Request("B", (1, 2, 3, 4, 9)))
    (row,) = oracle.schedule().new
    assert row.num_computed_tokens == 4
    with pytest.raises(RejectedEvent) as refused:
        oracle.peek(Request("C", ()))
    assert code_of(refused) is RejectCode.BAD_REQUEST


def test_counts_are_available_without_a_snapshot(oracle: Oracle) -> None:
    assert (oracle.num_running, oracle.num_waiting, oracle.num_free_blocks) == (0, 0, 8)
    oracle.submit(Request("A", (1, 2, 3)))
    oracle.submit(Request("B", (1,), structured_output=True))
    assert (oracle.num_running, oracle.num_waiting) == (0, 2)
    oracle.schedule()
    assert (oracle.num_running, oracle.num_waiting, oracle.num_free_blocks) == (1, 1, 6)
