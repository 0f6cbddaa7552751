"""Results: what is sampled is delivered once, up to the token that ends a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockstep.spec.vocabulary import (
    Abort,
    Drafts,
    DraftsTaken,
    FinishReason,
    Plan,
    RepetitionDetection,
    Reset,
    RowTokens,
    SpecMethod,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession, Session

STOP, LENGTH, REPETITION = FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION


def decode(s: Session, *tokens: int) -> tuple[FinishReason | None, int | None, int]:
    """Feed request a one token per step: why it ended, by which stop token, after how many."""
    for count, token in enumerate(tokens, 1):
        _, outputs = s.step(a=(token,))
        row = outputs.rows[0]
        assert row.new_token_ids == (token,)
        if row.finish_reason is not None:
            assert s.state().requests == ()
            return row.finish_reason, row.stop_token_id, count
    return None, None, len(tokens)


@pytest.mark.parametrize(
    ("fields", "tokens", "expected"),
    [
        ({"eos_token_id": 9}, (1, 9), (STOP, None, 2)),
        ({"stop_token_ids": (8, 9)}, (1, 9), (STOP, 9, 2)),
        ({"eos_token_id": 9, "stop_token_ids": (9,)}, (9,), (STOP, None, 1)),
        ({"eos_token_id": 9, "min_tokens": 2}, (9, 9), (STOP, None, 2)),
        ({"stop_token_ids": (9,), "min_tokens": 3}, (9, 9, 1), (None, None, 3)),
        ({"max_tokens": 2}, (1, 1), (LENGTH, None, 2)),
        ({"max_tokens": 2, "min_tokens": 2, "eos_token_id": 9}, (9, 9), (STOP, None, 2)),
        ({"max_tokens": 50}, (1,) * 7, (LENGTH, None, 7)),
    ],
)
def test_stopping(
    session: OpenSession,
    fields: dict[str, int],
    tokens: tuple[int, ...],
    expected: tuple[FinishReason | None, int | None, int],
) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=10)
    s.submit("a", (5, 6, 7), **fields)
    assert decode(s, *tokens) == expected


@pytest.mark.parametrize(
    ("detection", "tokens", "expected"),
    [
        (RepetitionDetection(1), (4, 4), (REPETITION, None, 2)),
        (RepetitionDetection(3), (1, 2, 3, 1, 2, 3), (REPETITION, None, 6)),
        (RepetitionDetection(2**31 - 1, 2), (1, 1, 1, 1), (REPETITION, None, 4)),
        (RepetitionDetection(2), (1, 2, 3, 1, 2, 3), (None, None, 6)),
        (RepetitionDetection(2, min_count=3), (1, 2, 1, 2, 1, 2), (REPETITION, None, 6)),
        (RepetitionDetection(1, min_count=3), (1, 1, 2, 1, 1, 1), (REPETITION, None, 6)),
    ],
)
def test_repetition(
    session: OpenSession,
    detection: RepetitionDetection,
    tokens: tuple[int, ...],
    expected: tuple[FinishReason | None, int | None, int],
) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=40)
    # The prompt ends with what would complete a pattern; only outputs count.
    s.submit("a", (4, 4, 1, 2, 3), repetition_detection=detection)
    assert decode(s, *tokens) == expected


def test_length_comes_before_repetition(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=40)
    s.submit("a", (1,), max_tokens=2, repetition_detection=RepetitionDetection(1))
    assert decode(s, 4, 4) == (LENGTH, None, 2)


def drafting(session: OpenSession, **fields: object) -> Session:
    s = session(
        num_blocks=20, block_size=4, max_model_len=40, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3, **fields,
    )  # fmt: skip
    s.submit("a", range(6), max_tokens=20, eos_token_id=99)
    s.step(a=(6,))
    return s


def propose(s: Session, *tokens: int) -> None:
    assert s.apply(Drafts((RowTokens("a", tokens),))) == DraftsTaken(("a",))


def test_accepted_drafts_and_one_more_are_delivered(session: OpenSession) -> None:
    s = drafting(session)
    propose(s, 7, 8, 9)
    plan = s.plan()
    row = plan.cached[0]
    assert (row.num_scheduled_tokens, row.draft_token_ids) == (4, (7, 8, 9))
    assert row.new_block_ids == ((3,),)
    assert s.request("a").spec_token_ids == ()
    assert s.request("a").num_computed_tokens == 10
    # Drafts are never published: of 10 slots, 7 hold verified tokens.
    assert s.request("a").num_cached_blocks == (1,)
    outputs = s.commit(plan, a=(7, 8, 50))
    assert outputs.rows[0].new_token_ids == (7, 8, 50)
    request = s.request("a")
    assert (request.num_computed_tokens, request.output_token_ids) == (9, (6, 7, 8, 50))
    assert (s.state().stats.drafts_scheduled, s.state().stats.drafts_accepted) == (3, 2)


def test_rejecting_all_drafts_restores_the_counters(session: OpenSession) -> None:
    with_drafts, without = drafting(session), drafting(session)
    propose(with_drafts, 7, 8)
    with_drafts.step(a=(50,))
    without.step(a=(50,))
    assert with_drafts.request("a").num_computed_tokens == 7
    assert with_drafts.request("a").output_token_ids == without.request("a").output_token_ids


def test_nothing_is_kept_after_the_token_that_stops(session: OpenSession) -> None:
    s = drafting(session)
    propose(s, 7, 99, 8)
    _, outputs = s.step(a=(7, 99, 8, 1))
    assert outputs.rows[0].new_token_ids == (7, 99)
    assert outputs.rows[0].finish_reason is STOP
    assert s.state().stats.drafts_accepted == 3


def test_drafts_use_the_budget_of_the_step(session: OpenSession) -> None:
    s = drafting(session, max_num_batched_tokens=6)
    s.submit("b", range(20, 30), max_tokens=1)
    propose(s, 7, 8, 9)
    plan = s.plan()
    assert plan.cached[0].draft_token_ids == (7, 8, 9)
    assert plan.new[0].num_scheduled_tokens == 2
    s.commit(plan, a=(50,))
    propose(s, 7, 8, 9)
    assert s.plan().cached[1].num_scheduled_tokens == 2


def test_a_threshold_cuts_drafts(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_model_len=40, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3, long_prefill_token_threshold=3,
    )  # fmt: skip
    s.submit("a", range(3), max_tokens=20)
    s.step(a=(6,))
    propose(s, 7, 8, 9)
    plan, _ = s.step(a=(7, 8, 1))
    assert plan.cached[0].draft_token_ids == (7, 8)
    assert s.request("a").spec_token_ids == ()


def test_lookahead_slots_are_reserved_for_a_draft_model(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_model_len=40, spec_method=SpecMethod.DRAFT_MODEL,
        num_speculative_tokens=3,
    )  # fmt: skip
    s.submit("a", range(4), max_tokens=20)
    plan, _ = s.step(a=(6,))
    assert plan.new[0].block_ids == ((1,),)
    propose(s, 7, 8, 9)
    plan, _ = s.step(a=(7, 8, 9, 1))
    # computed 4 + 4 scheduled + 3 lookahead = 11 slots
    assert plan.cached[0].new_block_ids == ((2, 3),)


def test_drafts_are_dropped_where_they_do_not_continue_known_tokens(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_model_len=40, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3, max_num_batched_tokens=8,
    )  # fmt: skip
    for name, start in (("a", 0), ("b", 10), ("c", 20)):
        s.submit(name, range(start, start + 5), max_tokens=20)
    s.step(a=(1,))
    rows = tuple(RowTokens(name, (7,)) for name in ("nobody", "c", "b", "a"))
    assert s.apply(Drafts(rows)) == DraftsTaken(("a",))
    assert s.apply(Drafts((RowTokens("a", ()),))) == DraftsTaken(("a",))
    assert s.request("a").spec_token_ids == ()
    s.apply(Drafts(rows))
    plan = s.plan()
    assert s.apply(Drafts(rows)) == DraftsTaken(())
    s.commit(plan, a=(7, 8), b=(1,))
    assert s.apply(Drafts(rows)) == DraftsTaken(("b", "a"))


def test_rows_are_answered_in_any_order(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=40)
    s.submit("a", range(3))
    s.submit("b", range(3))
    plan = s.plan()
    reordered = Plan(plan.frame_id, plan.new[::-1])
    assert [row.request_id for row in s.commit(reordered, a=(1,), b=(2,)).rows] == ["a", "b"]


def test_drafts_of_an_aborted_request_are_not_counted(session: OpenSession) -> None:
    s = drafting(session)
    propose(s, 7, 8)
    plan = s.plan()
    s.apply(Abort(("a",)))
    assert s.commit(plan, a=(7, 1)).rows == ()
    assert s.state().stats.drafts_scheduled == 0


def test_tokens_of_a_preempted_request_are_delivered(session: OpenSession) -> None:
    s = drafting(session)
    propose(s, 7, 8)
    plan = s.plan()
    s.apply(Reset(True))
    assert s.commit(plan, a=(7, 1)).rows[0].new_token_ids == (7, 1)
    assert s.request("a").num_computed_tokens == 0
    assert s.state().stats.drafts_accepted == 1
    plan = s.plan()
    assert plan.cached[0].all_token_ids == (*range(7), 7, 1)


def test_drafts_are_cut_below_max_model_len(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_model_len=9, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3,
    )  # fmt: skip
    s.submit("a", range(6), max_tokens=20)
    s.step(a=(6,))
    propose(s, 7, 8, 9)
    # Positions 6 and 7 may run; the ninth token is the last and is never run.
    plan, outputs = s.step(a=(7, 1))
    assert plan.cached[0].draft_token_ids == (7,)
    assert outputs.rows[0].finish_reason is LENGTH


def test_a_chunk_that_leaves_one_token_takes_no_drafts(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_model_len=40, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3, max_num_batched_tokens=4,
    )  # fmt: skip
    s.submit("a", range(5))
    s.step()
    assert s.apply(Drafts((RowTokens("a", (7,)),))) == DraftsTaken(())


def test_preemption_drops_attached_drafts(session: OpenSession) -> None:
    s = session(
        num_blocks=5, block_size=4, max_model_len=40, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1,
    )  # fmt: skip
    s.submit("a", range(7), max_tokens=6)
    s.submit("b", range(10, 17), max_tokens=6)
    s.step(a=(1,), b=(1,))
    s.step(a=(2,), b=(2,))
    s.apply(Drafts((RowTokens("b", (7,)),)))
    assert s.request("b").spec_token_ids == (7,)
    assert s.plan().preempted_req_ids == ("b",)
    assert s.request("b").spec_token_ids == ()
