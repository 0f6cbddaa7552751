"""Transfers on the host: what a store offers, when it is relied on, and who holds blocks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from groups_support import ALIGN, ALL, full, recurrent, window

from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Commit,
    FinishReason,
    Grammar,
    GrammarReady,
    HeldBlocks,
    KVLoad,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    MambaCacheMode,
    OutputRow,
    Outputs,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    Request,
    Reset,
    ResetDone,
    RowTokens,
    SpecMethod,
    Status,
    StreamingUpdate,
    Submit,
    TransfersReported,
    TransfersSnapshot,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession, Session

RECOMPUTE: dict[str, Any] = {"kv_load_failure_policy": KVLoadFailurePolicy.RECOMPUTE}
POLICIES = list(KVLoadFailurePolicy)
PARKED = Status.WAITING_FOR_REMOTE_KVS
NOTHING = TransfersSnapshot()


def open_with_store(session: OpenSession, **fields: Any) -> Session:
    """Blocks of 2 tokens, as many as are given; all else large."""
    given = {
        "num_blocks": 17,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "scheduler_reserve_full_isl": False,
        **fields,
    }
    return session(block_size=2, max_model_len=32, kv_connector=True, **given)


def bring(
    s: Session, name: str, num_prompt: int, num_tokens: int | None, is_async: bool = False,
    **fields: Any,
) -> None:  # fmt: skip
    """Submit a request of which the store has so many tokens; prompts of two names differ."""
    first = 100 * ord(name[0])
    prompt = range(first, first + num_prompt)
    delays_free = fields.pop("delays_free", False)
    fields.setdefault("max_tokens", 3)
    assert s.submit(name, prompt, **fields) == Ack()
    s.apply(KVOffer(name, num_tokens, is_async, delays_free))


def report(s: Session, **told: Any) -> Outputs:
    outputs = s.apply(TransfersReported(KVTransfers(**told)))
    assert isinstance(outputs, Outputs)
    return outputs


def answer(s: Session, plan: Plan, invalid: tuple[int, ...] = (), **tokens: Any) -> Outputs:
    """Answer a plan with a report of invalid blocks; a row that is not named gets no tokens."""
    ids = [row.request_id for row in plan.new] + [row.request_id for row in plan.cached]
    rows = tuple(RowTokens(name, tokens.get(name, ())) for name in ids)
    told = KVTransfers(invalid_block_ids=invalid)
    outputs = s.apply(Commit(plan.frame_id, rows, told))
    assert isinstance(outputs, Outputs), outputs
    return outputs


def transfers(s: Session) -> TransfersSnapshot:
    found = s.state().transfers
    assert found is not None
    return found


def list_cached(s: Session) -> list[int]:
    """Places of the blocks that are found."""
    return sorted(key.index for key in s.state().cached)


# What it offers.


def test_an_offer_lives_with_its_request(session: OpenSession) -> None:
    s = open_with_store(session)
    assert s.apply(KVOffer("a", 4)) == Ack()
    assert transfers(s) == NOTHING
    bring(s, "a", 6, 4)
    bring(s, "b", 6, None)
    assert transfers(s).offers == (KVOffer("a", 4), KVOffer("b", None))
    s.apply(KVOffer("a"))
    assert transfers(s).offers == (KVOffer("b", None),)
    s.apply(Abort(("b",)))
    assert transfers(s) == NOTHING


def test_without_a_store_nothing_is_asked_told_or_kept(session: OpenSession) -> None:
    s = session(num_blocks=9, block_size=2, max_model_len=32)
    bring(s, "a", 6, 4)
    assert s.state().transfers is None
    assert report(s, finished_recving=("a",), invalid_block_ids=(1,)) == Outputs()
    plan = s.plan()
    assert plan.kv_loads == ()
    assert plan.new[0].num_computed_tokens == 0
    assert s.apply(Reset(reset_running_requests=True, reset_connector=True)) == ResetDone(False)
    assert s.state().running == ("a",)


def test_who_has_no_answer_is_passed_over(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 6, None)
    bring(s, "b", 4, 0)
    plan = s.plan()
    assert [row.request_id for row in plan.new] == ["b"]
    assert s.state().skipped_waiting == ("a",)
    stats = s.state().stats
    assert (stats.prefix_cache_queries, stats.external_prefix_cache_queries) == (4, 4)


def test_who_reads_no_prefix_does_not_ask(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 6, None, skip_reading_prefix_cache=True)
    bring(s, "b", 6, 4, skip_reading_prefix_cache=True)
    plan = s.plan()
    assert [row.num_scheduled_tokens for row in plan.new] == [6, 6]
    assert plan.kv_loads == ()
    assert s.state().stats.external_prefix_cache_queries == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_external"), [(1, 1), (4, 4), (7, 5), (99, 5)])
def test_the_last_token_is_computed_in_any_case(
    session: OpenSession, num_tokens: int, num_external: int, caching: bool
) -> None:
    s = open_with_store(session, enable_prefix_caching=caching)
    bring(s, "a", 6, num_tokens)
    plan = s.plan()
    row = plan.new[0]
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (num_external, 6 - num_external)
    end = -(-num_external // 2)
    assert plan.kv_loads == (KVLoad("a", (row.block_ids[0][:end],), 0, num_external),)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_hit_serves_is_not_loaded(session: OpenSession, is_async: bool) -> None:
    s = open_with_store(session)
    bring(s, "a1", 9, 0)
    s.step(a1=(7,))
    bring(s, "a2", 9, 6, is_async)
    bring(s, "a3", 15, 12, is_async)
    plan = s.plan()
    # a1 has published 4 blocks: a hit of all 8 tokens that can be hit.
    load = plan.kv_loads[0]
    assert plan.kv_loads == (KVLoad("a3", load.block_ids, 8, 4, is_async),)
    assert load.block_ids == (s.request("a3").block_tables[0][:6],)
    assert s.request("a2").status is Status.RUNNING
    stats = s.state().stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9 + 9 + 15, 8 + 8)
    assert stats.external_prefix_cache_queries == 9 + 1 + 7
    assert stats.external_prefix_cache_hits == 4


def test_a_parked_one_is_not_among_those_who_share_a_prefix(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a1", 9, 0)
    s.step(a1=(7,))
    bring(s, "a2", 9, 0)
    bring(s, "a3", 15, 12, is_async=True)
    plan = s.plan()
    assert (s.request("a3").status, plan.num_common_prefix_blocks) == (PARKED, (4,))


# Loads at once.


def test_a_load_is_nobody_elses_until_it_is_answered(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, max_num_batched_tokens=3)
    bring(s, "a", 9, 4)
    first = s.plan()
    assert first.new[0].num_scheduled_tokens == 3
    assert transfers(s).unsettled == ("a",)
    second = s.plan()  # a chunk of 2 more tokens
    assert list_cached(s) == []
    s.commit(first)
    assert transfers(s).unsettled == ()
    assert list_cached(s) == [0, 1, 2, 3]  # what the second computes, too
    s.commit(second, a=(7,))
    assert s.request("a").num_cached_tokens == 4


def test_a_load_under_asynchronous_scheduling_is_settled_by_its_own_frame(
    session: OpenSession,
) -> None:
    s = open_with_store(session, max_frames_in_flight=2, async_scheduling=True)
    bring(s, "a", 5, 4)
    first = s.plan()
    second = s.plan()
    assert list_cached(s) == []
    s.commit(first, a=(7,))
    assert list_cached(s) == [0, 1]
    s.commit(second, a=(8,))
    assert list_cached(s) == [0, 1, 2]


def test_a_preempted_one_is_unsettled_no_more_and_asks_again(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, max_num_batched_tokens=6)
    bring(s, "a", 12, 4)
    first = s.plan()
    assert s.apply(Reset(reset_running_requests=True)) == ResetDone(True)
    assert transfers(s).unsettled == ()
    s.apply(KVOffer("a", 6))
    second = s.plan()
    assert second.kv_loads[0].num_external_tokens == 6
    assert s.request("a").num_cached_tokens == 4
    assert transfers(s).unsettled == ("a",)
    s.commit(first)
    assert transfers(s).unsettled == ("a",)
    assert list_cached(s) == []
    s.commit(second, a=(7,))
    assert list_cached(s) == [0, 1, 2, 3, 4, 5]


def test_groups_load_together(session: OpenSession) -> None:
    s = open_with_store(session, groups=(full(2), full(4)))
    bring(s, "a", 12, 7)
    plan = s.plan()
    tables = plan.new[0].block_ids
    assert plan.kv_loads == (KVLoad("a", (tables[0][:4], tables[1][:2]), 0, 7),)
    s.commit(plan, a=(1,))
    assert s.request("a").num_cached_blocks == (6, 3)


def test_the_gate_counts_all_of_it(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=8, scheduler_reserve_full_isl=True)
    bring(s, "a", 6, 0)
    s.step(a=(7,))
    bring(s, "b", 10, 4, is_async=True)
    bring(s, "c", 6, 4, is_async=True)
    plan = s.plan()
    assert plan.kv_loads == ()
    assert s.state().waiting == ("b", "c")
    s.apply(Abort(("b",)))
    s.commit(plan, a=(7,))
    assert [load.request_id for load in s.plan().kv_loads] == ["c"]


# Loads that take longer.


def park(s: Session, name: str = "a", num_prompt: int = 9, num_tokens: int = 6) -> Plan:
    bring(s, name, num_prompt, num_tokens, is_async=True)
    plan = s.plan()
    assert s.request(name).status is PARKED
    return plan


def test_a_parked_one_takes_blocks_of_its_load_and_nothing_else(session: OpenSession) -> None:
    s = open_with_store(session, max_num_seqs=1, max_num_batched_tokens=4)
    plan = park(s)
    assert (plan.new, s.state().frames_in_flight) == ((), ())
    assert plan.kv_loads == (KVLoad("a", ((1, 2, 3),), 0, 6, is_async=True),)
    request = s.request("a")
    assert (request.num_computed_tokens, request.num_cached_tokens) == (6, -1)
    assert (s.state().skipped_waiting, list_cached(s)) == (("a",), [])
    stats = s.state().stats
    assert (stats.prefix_cache_queries, stats.external_prefix_cache_queries) == (9, 9)
    bring(s, "b", 4, 0)
    plan = s.plan()
    assert [row.request_id for row in plan.new] == ["b"]
    assert s.state().skipped_waiting == ("a",)


def test_it_comes_back_when_its_load_has(session: OpenSession) -> None:
    s = open_with_store(session)
    park(s)
    s.plan()
    report(s, finished_recving=("a", "a"))
    assert transfers(s).received == ("a",)
    assert report(s, finished_recving=("a",)) == Outputs()
    s.apply(KVOffer("a", None))  # nobody asks any more
    plan = s.plan()
    row = plan.new[0]
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (6, 3)
    assert row.block_ids == ((1, 2, 3, 4, 5),)
    assert (plan.kv_loads, transfers(s).received) == ((), ())
    assert list_cached(s) == [0, 1, 2, 3]
    assert s.request("a").num_cached_tokens == 6
    assert s.state().stats.external_prefix_cache_queries == 9


def test_one_that_was_preempted_comes_back_as_resumed(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 9, 0)
    s.step(a=(7,))
    s.apply(KVOffer("a", 8, is_async=True))
    s.apply(Reset(reset_running_requests=True))
    s.plan()
    assert s.request("a").status is PARKED
    report(s, finished_recving=("a",))
    plan = s.plan()
    assert plan.cached[0].resumed
    assert plan.cached[0].num_scheduled_tokens == 2
    assert s.request("a").num_cached_tokens == 0


def test_a_session_that_goes_on_is_new_to_the_worker_when_its_load_has_come(
    session: OpenSession,
) -> None:
    s = open_with_store(session)
    s.submit("a", range(8), max_tokens=1, resumable=True)
    plan = s.plan()
    s.apply(Reset(reset_running_requests=True))
    s.commit(plan, a=(7,))
    assert (s.request("a").num_preemptions, s.request("a").block_tables) == (1, ((),))
    s.apply(StreamingUpdate(Request("a", (1, 2, 3), max_tokens=1, resumable=True)))
    s.apply(KVOffer("a", 6, is_async=True))
    s.plan()
    assert s.request("a").status is PARKED
    report(s, finished_recving=("a",))
    row = s.plan().new[0]
    assert (row.request.prompt_token_ids[-3:], row.num_computed_tokens) == ((1, 2, 3), 6)


def test_who_is_not_admitted_stays_parked_and_publishes_nothing(session: OpenSession) -> None:
    s = open_with_store(session, max_loras=1)
    s.submit("x", range(4), adapter="x", max_tokens=9)
    s.submit("y", range(9), adapter="y", max_tokens=9)
    s.apply(KVOffer("y", 6, is_async=True))
    plan = s.plan()
    # Its adapter has no seat: it is passed over before anybody asks.
    assert plan.kv_loads == ()
    s.apply(Abort(("x",)))
    s.commit(plan, x=(1,))
    assert len(s.plan().kv_loads) == 1
    s.submit("x2", range(4), adapter="x", max_tokens=9)
    plan = s.plan()
    report(s, finished_recving=("y",))
    before = s.state()
    s.commit(plan, x2=(1,))
    s.plan()
    after = s.state()
    assert after.request("y") == before.request("y")
    assert after.transfers == before.transfers
    assert after.skipped_waiting == ("y",)


def test_one_that_does_not_fit_stays_as_it_is(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=7)
    park(s)
    bring(s, "b", 5, 0)
    plan = s.plan()
    report(s, finished_recving=("a",))
    s.commit(plan, b=(1,))
    before = s.request("a")
    s.step(b=(2,))
    assert s.request("a") == before
    assert transfers(s).received == ("a",)
    assert [key.index for key in s.state().cached] == [0, 1, 2]  # of b


# Behind a head that does not fit, and giving.


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_loaded_ones_run_behind_a_head_that_does_not_fit(
    session: OpenSession, policy: Policy
) -> None:
    s = open_with_store(session, num_blocks=11, policy=policy)
    for name, num_prompt, num_tokens in (("h", 7, 4), ("b", 7, 4), ("c", 5, 4)):
        bring(s, name, num_prompt, num_tokens, is_async=True, arrival_time=ord(name) % 7)
    s.plan()
    s.apply(KVOffer("h", 0))
    line = s.state().skipped_waiting
    assert set(line) == {"h", "b", "c"}
    bring(s, "r", 5, 0, priority=-1)
    running = s.plan()
    report(s, finished_recving=("b", "c", "h"))
    s.commit(running, r=(1,))
    plan = s.plan()  # one block is free: the first two lack two, and the last lacks one
    assert [row.request_id for row in plan.new] == ["c"]
    assert s.state().skipped_waiting == tuple(name for name in line if name != "c")


def test_who_runs_behind_the_head_has_a_seat(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=11, max_loras=1)
    for name, num_prompt, adapter in (("h", 7, None), ("b", 7, None), ("c", 5, "y")):
        bring(s, name, num_prompt, 4, is_async=True, adapter=adapter)
    s.plan()
    bring(s, "r", 5, 0, adapter="x")
    s.step(r=(1,))
    report(s, finished_recving=("b", "c", "h"))
    assert s.plan().new == ()
    assert transfers(s).received == ("b", "c", "h")


def test_behind_the_head_nobody_is_parked_without_budget(session: OpenSession) -> None:
    tight = {"max_num_batched_tokens": 2, "scheduler_reserve_full_isl": True}
    s = open_with_store(session, num_blocks=11, **tight, **RECOMPUTE)
    for name, num_prompt in (("h", 7), ("b", 5), ("c", 4)):
        bring(s, name, num_prompt, 4, is_async=True)
    s.plan()
    bring(s, "r", 5, 0, max_tokens=4)
    for tokens in ((), (), (1,)):
        s.step(r=tokens)
    failed = s.request("c").block_tables[0]
    report(s, finished_recving=("b", "c", "h"), invalid_block_ids=failed)
    plan = s.plan()
    assert [row.request_id for row in plan.new] == ["b"]
    assert plan.kv_loads == ()
    assert transfers(s).received == ("c", "h")


def test_where_nobody_runs_a_loaded_one_gives_its_blocks(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=9)
    park(s, "a", 13, 8)
    park(s, "b", 13, 8)
    report(s, finished_recving=("a", "b"))
    plan = s.plan()
    assert [row.request_id for row in plan.new] == ["a"]
    request = s.request("b")
    assert (request.status, request.num_computed_tokens) == (Status.WAITING, 0)
    assert (request.block_tables, transfers(s).received) == (((),), ())
    assert s.state().skipped_waiting == ("b",)


def test_nobody_gives_what_a_load_writes(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=9)
    park(s, "a", 13, 8)
    park(s, "b", 13, 8)
    report(s, finished_recving=("b",))
    assert s.plan().new == ()
    # b fits nowhere, and does not take what is a's.
    assert s.request("b").status is PARKED
    report(s, finished_recving=("a",))
    assert [row.request_id for row in s.plan().new] == ["a"]


def test_the_last_who_runs_takes_from_loaded_ones(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=7)
    bring(s, "r", 4, 0, max_tokens=5)
    s.step(r=(1,))
    bring(s, "a", 9, 6, is_async=True)
    s.step(r=(2,))
    assert (s.request("a").status, s.engine.pool.num_free) == (PARKED, 0)
    report(s, finished_recving=("a",))
    s.step(r=(3,))
    assert transfers(s).received == ("a",)
    plan = s.plan()
    assert s.request("a").status is Status.WAITING
    assert (plan.preempted_req_ids, transfers(s).received) == ((), ())
    assert plan.cached[0].new_block_ids == ((6,),)


# What could not be loaded.


def test_invalid_blocks_of_a_load_at_once_are_computed_again(session: OpenSession) -> None:
    s = open_with_store(session, **RECOMPUTE)
    bring(s, "a", 9, 6)
    plan = s.plan()
    outputs = answer(s, plan, invalid=(2,), a=(7,))
    assert outputs.rows == ()
    request = s.request("a")
    assert (request.num_computed_tokens, request.is_prefill_chunk) == (2, True)
    assert (request.output_token_ids, list_cached(s)) == ((), [0])
    assert transfers(s).unsettled == ()
    plan = s.plan()
    assert plan.cached[0].num_scheduled_tokens == 7
    assert list_cached(s) == [0, 1, 2, 3]
    assert answer(s, plan, a=(7,)).rows[0].new_token_ids == (7,)


def test_invalid_blocks_drop_rows_that_stand_on_them(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, async_scheduling=True, **RECOMPUTE)
    bring(s, "a", 5, 4)
    bring(s, "b", 5, 4)
    first = s.plan()
    second = s.plan()
    outputs = answer(s, first, invalid=(1,), a=(7,), b=(8,))
    assert [row.request_id for row in outputs.rows] == ["b"]
    request = s.request("a")
    assert (request.num_computed_tokens, request.num_output_placeholders) == (0, 0)
    third = s.plan()
    assert third.cached[0].num_scheduled_tokens == 5
    assert [row.request_id for row in answer(s, second, a=(7,), b=(8,)).rows] == ["b"]
    assert [row.new_token_ids for row in answer(s, third, a=(6,), b=(8,)).rows] == [(6,), (8,)]


def test_a_failed_load_ends_its_request(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, async_scheduling=True)
    bring(s, "a", 5, 4)
    bring(s, "b", 5, 4)
    first = s.plan()
    second = s.plan()
    outputs = answer(s, first, invalid=(1, 2), a=(7,), b=(8,))
    error = OutputRow("a", (), FinishReason.ERROR, None, 4)
    assert outputs.rows == (OutputRow("b", (8,), None, None, 4), error)
    assert [r.request_id for r in s.state().requests] == ["b"]
    assert s.state().finished_req_ids == ("a",)
    assert len(answer(s, second, a=(7,), b=(8,)).rows) == 1


def test_a_load_whose_request_has_gone_stops_no_other_of_its_frame(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 5, 4)
    bring(s, "b", 5, 4)
    plan = s.plan()
    s.apply(Abort(("a",)))
    answer(s, plan, a=(7,), b=(8,))
    assert transfers(s).unsettled == ()


def test_the_first_block_that_is_not_there_is_not_found(session: OpenSession) -> None:
    s = session(num_blocks=17, block_size=1, max_model_len=32, kv_connector=True, **RECOMPUTE)
    bring(s, "a", 5, 4)
    plan = s.plan()
    answer(s, plan, invalid=plan.kv_loads[0].block_ids[0][2:3], a=(7,))
    assert list_cached(s) == [0, 1]


def test_blocks_that_nobody_loads_are_nothing(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a1", 9, 0)
    s.step(a1=(7,))
    bring(s, "a2", 15, 12)
    bring(s, "c", 5, 4, is_async=True)
    plan = s.plan()
    hit = plan.new[0].block_ids[0][0]
    behind = plan.new[0].block_ids[0][6:]
    before = s.state()
    assert report(s, invalid_block_ids=(hit, *behind, 0, 999)) == Outputs()
    assert report(s, invalid_block_ids=plan.new[0].block_ids[0]) == Outputs()
    assert s.state() == before
    outputs = answer(s, plan, invalid=(hit, *behind), a1=(1,), a2=(2,))
    assert [row.finish_reason for row in outputs.rows] == [None, None]


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_who_was_preempted_meanwhile_fails_only_if_it_waits_for_the_row(
    session: OpenSession, policy: KVLoadFailurePolicy, samples: bool
) -> None:
    s = open_with_store(
        session,
        max_frames_in_flight=2,
        async_scheduling=True,
        max_num_batched_tokens=5 if samples else 3,
        kv_load_failure_policy=policy,
    )
    bring(s, "a", 9, 4)
    plan = s.plan()
    s.apply(Reset(reset_running_requests=True))
    s.apply(KVOffer("a", 6))
    outputs = answer(s, plan, invalid=(1,), a=(7,) if samples else ())
    if samples and policy is KVLoadFailurePolicy.FAIL:
        assert outputs.rows == (OutputRow("a", (), FinishReason.ERROR, None, 4),)
        return
    assert outputs.rows == ()
    request = s.request("a")
    assert (request.status, request.output_token_ids) == (Status.PREEMPTED, ())
    assert request.num_output_placeholders == 0
    assert s.plan().kv_loads[0].num_external_tokens == 6


def test_a_later_row_stands_on_the_load_as_well(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, max_num_batched_tokens=3, **RECOMPUTE)
    bring(s, "a", 9, 4)
    first, second = s.plan(), s.plan()
    s.apply(Reset(reset_running_requests=True))
    assert answer(s, first, invalid=(1,)).rows == ()
    assert answer(s, second, a=(7,)).rows == ()
    assert s.request("a").output_token_ids == ()


def test_who_has_begun_anew_stands_on_its_own_load(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, max_num_batched_tokens=3, **RECOMPUTE)
    bring(s, "a", 9, 4)
    first = s.plan()
    s.apply(Reset(reset_running_requests=True))
    s.apply(KVOffer("a", 8))
    second = s.plan()
    assert answer(s, first, invalid=first.kv_loads[0].block_ids[0]).rows == ()
    assert s.request("a").num_computed_tokens == 9
    assert transfers(s).unsettled == ("a",)
    assert answer(s, second, a=(7,)).rows[0].new_token_ids == (7,)


# Windows.


def test_a_window_loads_what_is_read_behind(session: OpenSession) -> None:
    s = open_with_store(session, groups=(full(2), window(2, 3)), num_blocks=49)
    bring(s, "a1", 9, 0)
    s.step(a1=(7,))
    bring(s, "a2", 15, 11)
    before = s.state()
    plan = s.plan()
    (load,), (row,) = plan.kv_loads, plan.new
    whole, windowed = row.block_ids
    assert (load.num_computed_tokens, load.num_external_tokens) == (8, 3)
    assert load.block_ids == (whole[:6], windowed[:6])
    # Behind 11 tokens the last two are read: what the hit has of the window is not.
    assert [block == 0 for block in windowed] == [True] * 4 + [False] * 4
    assert s.request("a2").num_cached_blocks == (4, 4)
    hit = before.request("a1")
    assert hit is not None
    assert [s.state().ref_counts[block] for block in hit.block_tables[0][:4]] == [2] * 4
    answer(s, plan, a1=(7,), a2=(7,))
    assert s.request("a2").num_cached_blocks == (7, 7)


def test_of_windows_nothing_is_kept_if_some_is_missing(session: OpenSession) -> None:
    s = open_with_store(session, groups=(full(2), window(2, 3)), num_blocks=49, **RECOMPUTE)
    bring(s, "a", 15, 10)
    bring(s, "b", 15, 10, is_async=True)
    plan = s.plan()
    assert s.request("a").num_cached_blocks == (0, 0)
    last = plan.kv_loads[0].block_ids[0][-1], plan.kv_loads[1].block_ids[1][-1]
    assert answer(s, plan, invalid=(0, *last), a=(7,)).rows == ()
    request = s.request("a")
    assert (request.status, request.num_computed_tokens) == (Status.PREEMPTED, 0)
    assert (request.num_preemptions, request.block_tables) == (1, ((), ()))
    assert (s.state().waiting, s.state().stats.preemptions) == (("a",), 1)
    assert s.state().prev_scheduled_req_ids == ()
    assert s.engine.transfers.loads == {}
    assert s.request("b").num_computed_tokens == 0
    report(s, finished_recving=("b",))
    s.apply(KVOffer("b", None))
    held = s.request("b").block_tables
    plan = s.plan()
    assert s.request("b").block_tables == held
    s.apply(KVOffer("b"))
    s.commit(plan, a=(7,))
    assert s.plan().new[0].num_computed_tokens == 0


def test_of_a_later_load_what_came_is_kept(session: OpenSession) -> None:
    s = open_with_store(session, **RECOMPUTE)
    park(s)
    report(s, invalid_block_ids=(3,))
    assert s.request("a").num_computed_tokens == 4
    report(s, invalid_block_ids=(2, 3), finished_recving=("a",))
    assert s.request("a").num_computed_tokens == 2
    report(s, invalid_block_ids=(3,))
    assert s.request("a").num_computed_tokens == 2
    row = s.plan().new[0]
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (2, 7)
    assert row.block_ids == ((1, 2, 3, 4, 5),)
    assert s.request("a").num_cached_tokens == 2


def test_of_unequal_groups_the_first_failure_counts(session: OpenSession) -> None:
    s = open_with_store(session, groups=(full(2), full(4)), **RECOMPUTE)
    plan = park(s, "a", 15, 12)
    first, second = plan.kv_loads[0].block_ids
    report(s, invalid_block_ids=(first[4], second[1]), finished_recving=("a",))
    assert s.request("a").num_computed_tokens == 4
    s.plan()
    assert s.request("a").num_computed_tokens == 15


def test_who_has_got_nothing_asks_anew(session: OpenSession) -> None:
    s = open_with_store(session, **RECOMPUTE)
    park(s)
    report(s, invalid_block_ids=(1,), finished_recving=("a",))
    s.apply(KVOffer("a", None))
    before = s.state().requests
    s.plan()
    assert s.state().requests == before
    assert transfers(s).received == ("a",)
    s.apply(KVOffer("a", 4, is_async=True))
    assert s.plan().kv_loads[0].num_external_tokens == 4
    assert (s.request("a").status, transfers(s).received) == (PARKED, ())
    report(s, invalid_block_ids=s.request("a").block_tables[0], finished_recving=("a",))
    s.apply(KVOffer("a", 2))
    plan = s.plan()
    assert plan.new[0].num_computed_tokens == 2
    assert [load.is_async for load in plan.kv_loads] == [False]


def test_who_asks_anew_in_vain_keeps_its_blocks(session: OpenSession) -> None:
    s = open_with_store(session, num_blocks=9, **RECOMPUTE)
    bring(s, "a", 13, 6, is_async=True)
    s.apply(KVOffer("a"))
    s.step(a=(7,))
    s.apply(Reset(reset_running_requests=True))
    s.apply(KVOffer("a", 6, is_async=True))
    s.plan()
    bring(s, "b", 3, 0)
    plan = s.plan()
    failed = s.request("a").block_tables[0]
    report(s, invalid_block_ids=failed, finished_recving=("a",))
    assert s.request("a").num_computed_tokens == 0
    s.commit(plan, b=(1,))
    s.apply(KVOffer("a"))
    before = s.state()
    idle = s.plan()  # a needs 7 blocks, and would have 6
    after = s.state()
    assert after.request("a") == before.request("a")
    assert after.free_queue == before.free_queue
    assert after.ref_counts == before.ref_counts
    assert (transfers(s).received, transfers(s).offers) == (("a",), ())
    s.commit(idle, b=(1,))
    s.apply(Abort(("b",)))
    assert s.plan().cached[0].resumed


def test_a_failed_later_load_ends_its_request_and_holds_what_is_written_still(
    session: OpenSession,
) -> None:
    s = open_with_store(session)
    park(s, "a")
    park(s, "b")
    report(s, finished_recving=("b",))
    outputs = report(s, invalid_block_ids=(6, 1))
    rows = [OutputRow(name, (), FinishReason.ERROR, None, 0) for name in "ab"]
    assert outputs.rows == tuple(rows)
    assert transfers(s).held == (HeldBlocks("a", ((1, 2, 3),), is_recving=True),)
    report(s, finished_recving=("a",))
    assert (transfers(s), s.engine.pool.num_free) == (NOTHING, 16)


# Who holds blocks when a request ends.


def test_an_abort_leaves_blocks_to_the_load_that_writes_them(session: OpenSession) -> None:
    s = open_with_store(session)
    park(s)
    assert s.apply(Abort(("a",))) == Aborted(("a",))
    assert transfers(s).held == (HeldBlocks("a", ((1, 2, 3),), is_recving=True),)
    refused = s.apply(Submit(Request("a", (1, 2))))
    assert isinstance(refused, Rejected)
    assert refused.code is RejectCode.REQUEST_IN_FLIGHT
    assert s.plan().finished_req_ids == ("a",)
    report(s, finished_sending=("a",))
    assert len(transfers(s).held) == 1
    report(s, finished_recving=("a",))
    assert s.state().free_queue[-3:] == (3, 2, 1)
    assert s.submit("a", (1, 2)) == Ack()


def test_a_stop_leaves_blocks_to_the_store_that_reads_them(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 4, 0, max_tokens=1, delays_free=True)
    s.step(a=(7,))
    assert transfers(s).held == (HeldBlocks("a", ((1, 2),), is_sending=True),)
    assert list_cached(s) == [0, 1]
    report(s, finished_recving=("a",), finished_sending=("x",))
    assert len(transfers(s).held) == 1
    report(s, finished_sending=("a", "a"))
    assert s.state().free_queue[-2:] == (2, 1)


def test_both_holds_must_end(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 9, 6, is_async=True, delays_free=True)
    s.plan()
    s.apply(Abort(("a",)))
    assert transfers(s).held[0] == HeldBlocks("a", ((1, 2, 3),), True, True)
    report(s, finished_sending=("a",))
    assert transfers(s).held[0] == HeldBlocks("a", ((1, 2, 3),), True, False)
    report(s, finished_recving=("a",))
    assert transfers(s) == NOTHING


@pytest.mark.parametrize("delays_free", [True, False])
def test_who_holds_nothing_leaves_nothing(session: OpenSession, delays_free: bool) -> None:
    s = open_with_store(session)
    bring(s, "a", 9, 6, delays_free=delays_free)
    s.apply(Abort(("a",)))
    assert transfers(s) == NOTHING
    park(s, "b")
    report(s, finished_recving=("b",))
    s.apply(Abort(("b",)))
    assert transfers(s) == NOTHING


# Resets.


def test_nobody_resets_what_is_under_way(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "r", 4, 0, delays_free=True)
    park(s)
    forced = Reset(reset_running_requests=True, reset_connector=True)
    before = s.state()
    assert s.apply(forced) == ResetDone(False)
    assert s.state() == before
    report(s, finished_recving=("a",))
    s.apply(Abort(("r",)))
    assert s.apply(forced) == ResetDone(False)
    report(s, finished_sending=("r",))
    assert s.apply(Reset(reset_connector=True)) == ResetDone(False)
    assert s.apply(Reset(reset_running_requests=True)) == ResetDone(True)
    assert transfers(s) == TransfersSnapshot(offers=(KVOffer("a", 6, True),))
    assert s.request("a").status is Status.WAITING
    assert s.apply(Reset(reset_connector=True)) == ResetDone(True)
    assert transfers(s) == NOTHING


def test_a_frame_in_flight_keeps_its_loads_over_a_reset(session: OpenSession) -> None:
    s = open_with_store(session)
    bring(s, "a", 9, 6)
    plan = s.plan()
    s.apply(Reset(reset_running_requests=True, reset_connector=True))
    assert answer(s, plan, invalid=(1,), a=(7,)).rows[0].finish_reason is FinishReason.ERROR


def test_a_store_of_what_is_not_here_gets_no_answer(session: OpenSession) -> None:
    s = open_with_store(session)
    told = {"finished_recving": ("x",), "finished_sending": ("x",), "invalid_block_ids": (3,)}
    assert report(s, **told) == Outputs()
    bring(s, "a", 9, 0)
    plan = s.plan()
    before = s.state()
    told = {"finished_recving": ("a",), "finished_sending": ("a",), "invalid_block_ids": (1,)}
    assert report(s, **told) == Outputs()
    assert s.state() == before
    assert answer(s, plan, a=(7,)).rows[0].new_token_ids == (7,)


ONLY_FIVES = Grammar((((5, 0),),))


def test_what_is_sampled_behind_a_failed_load_is_held_to_no_grammar(session: OpenSession) -> None:
    s = open_with_store(session, max_frames_in_flight=2, async_scheduling=True, **RECOMPUTE)
    bring(s, "a", 5, 4, structured_output=True, grammar=ONLY_FIVES)
    s.apply(GrammarReady("a"))
    first, second = s.plan(), s.plan()
    lost = KVTransfers(invalid_block_ids=first.kv_loads[0].block_ids[0][:1])
    assert s.apply(Commit(first.frame_id, (RowTokens("a", (5,)),), lost)) == Outputs()
    assert s.commit(second, a=(6,)) == Outputs()


def test_what_is_sampled_behind_a_stop_of_a_session_is_held_to_no_grammar(
    session: OpenSession,
) -> None:
    s = session(
        num_blocks=17, block_size=2, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=32,
        max_frames_in_flight=2, async_scheduling=True,
    )  # fmt: skip
    constrained = {"structured_output": True, "grammar": ONLY_FIVES}
    s.submit("a", range(5), max_tokens=3, resumable=True, stop_token_ids=(5,), **constrained)
    s.apply(GrammarReady("a"))
    first, second = s.plan(), s.plan()
    assert [row.new_token_ids for row in s.commit(first, a=(5,)).rows] == [(5,)]
    assert s.commit(second, a=(6,)) == Outputs()


# Beside recurrent groups.


@pytest.mark.parametrize("mode", [ALIGN, ALL])
def test_a_state_is_loaded_at_the_end_of_an_offer(
    session: OpenSession, mode: MambaCacheMode
) -> None:
    s = open_with_store(session, groups=(full(2), recurrent(2, mode)))
    bring(s, "a", 8, 7, is_async=True)
    (load,) = s.plan().kv_loads
    assert load.num_external_tokens == 7
    assert list(map(bool, load.block_ids[1])) == [False, False, False, True]


@pytest.mark.parametrize("num_offered", [8, 99])
def test_a_state_behind_the_last_token_is_of_no_use(session: OpenSession, num_offered: int) -> None:
    s = open_with_store(session, groups=(full(2), recurrent(2)))
    bring(s, "a", 8, num_offered)
    plan = s.plan()
    assert plan.kv_loads == ()
    assert plan.new[0].num_computed_tokens == 0


def test_a_chunk_behind_a_load_has_a_block_beside_that_of_the_loaded_state(
    session: OpenSession,
) -> None:
    s = open_with_store(session, num_blocks=3, groups=(recurrent(2),))
    bring(s, "a", 6, 2)
    (row,) = s.plan().new
    assert row.block_ids == ((1, 0, 2),)
    assert s.state().free_queue == ()


def test_spare_blocks_of_states_stand_behind_what_is_loaded(session: OpenSession) -> None:
    s = open_with_store(
        session, groups=(full(2), recurrent(2, ALIGN, 1)), spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1,
    )  # fmt: skip
    bring(s, "a", 8, 5, is_async=True)
    s.plan()
    assert s.request("a").block_tables == ((1, 2, 3), (0, 0, 4, 5))


def test_blocks_that_a_store_writes_later_are_not_zeroed(session: OpenSession) -> None:
    s = open_with_store(session, groups=(full(2), recurrent(2)))
    bring(s, "a", 8, 7, is_async=True)
    assert s.plan().new_block_ids_to_zero == ()
    bring(s, "b", 4, 2)
    plan = s.plan()
    assert plan.new_block_ids_to_zero == plan.new[0].block_ids[0]
