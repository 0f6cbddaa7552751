"""Asynchronous scheduling: placeholders, order of commits, events while frames are in flight."""

from __future__ import annotations

from blockstep.spec import (
    Config,
    Drafts,
    Oracle,
    Plan,
    Policy,
    Request,
    Reset,
    SpecMethod,
    Submit,
)
from blockstep.spec.core.requests import RequestState
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    CachedRow,
    Commit,
    FinishReason,
    Outputs,
    RejectCode,
    Rejected,
    RowTokens,
)


def make(depth: int = 2, **fields: object) -> Oracle:
    config = Config(
        **{"num_blocks": 9, "block_size": 4, "max_model_len": 32, **fields},  # type: ignore[arg-type]
        max_frames_in_flight=depth,
        async_scheduling=depth > 1,
    )
    return Oracle(config)


def state_of(oracle: Oracle, name: str = "A") -> RequestState:
    assert not get_broken_invariants(oracle.state)
    return oracle.state.requests[name]


def counts(oracle: Oracle, name: str = "A") -> tuple[int, int, int]:
    """Return known tokens, placeholders and computed tokens."""
    request = state_of(oracle, name)
    return (
        request.num_known_tokens,
        request.num_output_placeholders,
        request.num_computed_tokens,
    )


def only_row(plan: Plan) -> CachedRow:
    (row,) = plan.cached
    return row


def test_a_step_is_planned_before_the_token_of_the_last_one_is_known() -> None:
    oracle = make()
    oracle.submit(Request("A", (1, 2, 3), max_tokens=4))
    first = oracle.schedule()
    assert counts(oracle) == (3, 1, 3)
    second = oracle.schedule()
    assert counts(oracle) == (3, 2, 4)
    row = only_row(second)
    assert (row.num_computed_tokens, row.num_scheduled_tokens, row.num_output_tokens) == (3, 1, 1)
    assert oracle.apply(Submit(Request("A", (1,)))) == Rejected(RejectCode.DUPLICATE_REQUEST)
    oracle.commit(first, {"A": [7]})
    assert counts(oracle) == (4, 1, 4)
    oracle.commit(second, {"A": [8]})
    assert counts(oracle) == (5, 0, 4)


def test_no_row_is_planned_after_the_last_token() -> None:
    oracle = make(depth=3)
    oracle.submit(Request("A", (1, 2, 3), max_tokens=2))
    frames = [oracle.schedule(), oracle.schedule()]
    # One token is in flight. With it the request reaches max_tokens.
    oracle.commit(frames[0], {"A": [7]})
    assert not oracle.schedule().rows
    outputs = oracle.commit(frames[1], {"A": [8]})
    assert outputs.rows[0].finish_reason is FinishReason.LENGTH


def test_rejected_drafts_roll_back_tokens_of_later_frames() -> None:
    oracle = make(num_speculative_tokens=2, spec_method=SpecMethod.NGRAM)
    oracle.submit(Request("A", (1, 2, 3), max_tokens=12))
    first = oracle.schedule()
    assert state_of(oracle).spec_token_ids == (DRAFT_PLACEHOLDER,) * 2
    second = oracle.schedule()
    assert only_row(second).draft_token_ids == (DRAFT_PLACEHOLDER,) * 2
    assert counts(oracle) == (3, 4, 6)
    oracle.commit(first, {"A": [7]})
    third = oracle.schedule()
    assert only_row(third).num_computed_tokens == 6
    assert counts(oracle) == (4, 6, 9)
    oracle.commit(second, {"A": [8]})  # both drafts were wrong
    assert counts(oracle) == (5, 3, 7)
    oracle.commit(third, {"A": [9, 10, 11]})
    assert counts(oracle) == (8, 0, 7)
    assert oracle.state.stats.drafts_scheduled == 4
    assert oracle.state.stats.drafts_accepted == 2


def test_a_row_that_samples_nothing_drops_placeholder_drafts() -> None:
    oracle = make(num_speculative_tokens=2, spec_method=SpecMethod.NGRAM, max_num_batched_tokens=3)
    oracle.submit(Request("A", (1, 2, 3), max_tokens=12))
    oracle.submit(Request("B", (4, 5, 6), max_tokens=12))
    plans = [oracle.schedule(), oracle.schedule()]
    oracle.commit(plans[0], {"A": [7]})
    assert [row.request_id for row in plans[1].rows] == ["A"]
    oracle.commit(plans[1], {"A": [8]})
    oracle.apply(Reset(True))
    plan = oracle.schedule()  # A, resumed, takes all of the budget and samples nothing
    assert state_of(oracle).spec_token_ids == ()
    oracle.commit(plan, {})


def preempted_in_flight(depth: int) -> tuple[Oracle, list[Plan]]:
    """Return an oracle where A takes the last block while a token of B is in flight."""
    oracle = make(depth, num_blocks=4, max_model_len=12, enable_prefix_caching=False)
    oracle.submit(Request("A", (1, 2, 3, 4), max_tokens=6))
    oracle.submit(Request("B", (4, 5, 6, 7), max_tokens=3, eos_token_id=0))
    plans = [oracle.schedule(), oracle.schedule()]
    return oracle, plans


def test_a_preempted_request_may_end_by_its_tokens_in_flight() -> None:
    oracle, plans = preempted_in_flight(4)
    oracle.schedule()
    assert oracle.state.skipped_waiting == ("B",)
    outputs = oracle.commit(plans[0], {"A": [7], "B": [0]})
    assert outputs.rows[1].finish_reason is FinishReason.STOP
    assert not oracle.state.skipped_waiting
    assert set(oracle.state.requests) == {"A"}


def test_frames_are_committed_in_the_order_of_the_plans() -> None:
    oracle = make()
    oracle.submit(Request("A", (1, 2, 3), max_tokens=4))
    first, second = oracle.schedule(), oracle.schedule()
    rows = (RowTokens("A", (7,)),)
    early = oracle.apply(Commit(second.frame_id, rows))
    assert isinstance(early, Rejected)
    assert early == Rejected(RejectCode.FRAME_OUT_OF_ORDER)
    assert early.detail == "frame 0 is older than 1; commit it first"
    assert isinstance(oracle.apply(Commit(first.frame_id, rows)), Outputs)
    assert oracle.apply(Commit(first.frame_id, rows)) == Rejected(RejectCode.UNKNOWN_FRAME)
    assert oracle.apply(Commit(second.frame_id, ())) == Rejected(RejectCode.BAD_RESULT)
    assert oracle.apply(Commit(second.frame_id, (RowTokens("A"),))) == Rejected(
        RejectCode.BAD_RESULT
    )


def test_drafts_are_rejected_under_asynchronous_scheduling() -> None:
    oracle = make(num_speculative_tokens=2, spec_method=SpecMethod.NGRAM)
    refused = oracle.apply(Drafts(()))
    assert refused == Rejected(RejectCode.BAD_DRAFTS)


def test_an_id_of_an_aborted_request_is_free_after_its_frames_are_committed() -> None:
    oracle = make()
    oracle.submit(Request("A", (1, 2, 3), max_tokens=4))
    first, second = oracle.schedule(), oracle.schedule()
    oracle.abort("A")
    again = Submit(Request("A", (5,)))
    assert oracle.apply(again) == Rejected(RejectCode.REQUEST_IN_FLIGHT)
    assert oracle.commit(first, {"A": [7]}) == Outputs(())
    assert oracle.apply(again) == Rejected(RejectCode.REQUEST_IN_FLIGHT)
    oracle.commit(second, {"A": [8]})
    assert not isinstance(oracle.apply(again), Rejected)


def test_a_request_of_lower_priority_is_admitted_past_a_skipped_one() -> None:
    oracle = make(3, num_blocks=4, max_model_len=12, policy=Policy.PRIORITY)
    oracle.submit(Request("A", (1, 2, 3, 4), max_tokens=6))
    oracle.submit(Request("B", (4, 5, 6, 7), max_tokens=3, priority=1))
    oracle.schedule()
    oracle.submit(Request("C", (9,), max_tokens=1, priority=2))
    oracle.schedule()
    assert oracle.state.waiting == ("B", "C")
    plan = oracle.schedule()
    assert oracle.state.skipped_waiting == ("B",)
    assert [row.request_id for row in plan.new] == ["C"]
