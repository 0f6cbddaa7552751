"""Scheduling: small programs whose plans are worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    CachedRow,
    GrammarReady,
    NewRow,
    PauseState,
    Plan,
    Policy,
    Request,
    Reset,
    ResetDone,
    SetPause,
    SpecMethod,
    Status,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession

# Seed 003, section 3.2, with letters as tokens. Its block ids start at 0; ours are one higher,
# because block 0 is the null block.
ABCDEFGHIJKL = tuple(range(12))


def test_the_worked_example_of_seed_003(session: OpenSession) -> None:
    s = session(num_blocks=11, block_size=4, max_model_len=64)
    s.submit("req0", (*ABCDEFGHIJKL, 12, 13, 14), max_tokens=3)
    plan, _ = s.step(req0=(15,))
    assert plan.new[0].block_ids == ((1, 2, 3, 4),)
    plan, _ = s.step(req0=(16,))
    assert plan.cached[0].new_block_ids == ((),)
    assert s.request("req0").num_cached_blocks == (4,)

    s.submit("req1", (*ABCDEFGHIJKL[:10], 50, 51, 52, 53), max_tokens=2)
    plan = s.plan()
    assert plan.cached[0].new_block_ids == ((5,),)
    assert plan.new[0].block_ids == ((1, 2, 6, 7),)
    assert plan.new[0].num_computed_tokens == 8
    assert s.state().ref_counts == (0, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0)

    s.commit(plan, req0=(17,), req1=(54,))
    assert s.state().free_queue == (8, 9, 10, 5, 4, 3)
    s.step(req1=(55,))
    assert s.state().free_queue == (8, 9, 10, 5, 4, 3, 7, 6, 2, 1)

    s.submit("req2", (*ABCDEFGHIJKL, *range(100, 117)), max_tokens=1)
    plan = s.plan()
    assert plan.new[0].block_ids == ((1, 2, 3, 8, 9, 10, 5, 4),)
    assert plan.new[0].num_computed_tokens == 12
    assert s.state().free_queue == (7, 6)
    assert s.state().stats.prefix_cache_queries == 15 + 14 + 29
    assert s.state().stats.prefix_cache_hits == 0 + 8 + 12


def test_prefill_and_decode_share_one_budget(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_num_batched_tokens=6, max_model_len=64)
    s.submit("a", range(4))
    s.submit("b", range(10, 20))
    plan, outputs = s.step(a=(1,))
    assert plan.new == (
        NewRow(Request("a", tuple(range(4))), ((1,),), 0, 4),
        NewRow(Request("b", tuple(range(10, 20))), ((2,),), 0, 2),
    )
    assert [row.request_id for row in outputs.rows] == ["a"]
    assert s.request("b").is_prefill_chunk
    plan, _ = s.step(a=(2,))
    assert plan.cached == (
        CachedRow("a", False, ((3,),), None, 4, 1, 1),
        CachedRow("b", False, ((4,),), None, 2, 0, 5),
    )
    assert plan.total_num_scheduled_tokens == 6
    plan, _ = s.step(a=(3,), b=(1,))
    assert plan.cached[1] == CachedRow("b", False, ((5,),), None, 7, 0, 3)
    assert not s.request("b").is_prefill_chunk


def test_the_threshold_caps_prefill_chunks(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, long_prefill_token_threshold=3, max_model_len=64)
    s.submit("a", range(7))
    assert [s.step()[0].new[0].num_scheduled_tokens, s.step()[0].total_num_scheduled_tokens] == [
        3
    ] * 2
    plan, _ = s.step(a=(1,))
    assert plan.cached[0].num_scheduled_tokens == 1


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_num_batched_tokens=8, max_model_len=8,
        enable_chunked_prefill=False,
    )  # fmt: skip
    s.submit("a", range(5), max_tokens=2)
    s.submit("b", range(10, 14), max_tokens=2)
    plan, _ = s.step(a=(1,))
    assert [row.request_id for row in plan.new] == ["a"]
    plan, _ = s.step(a=(1,), b=(1,))
    assert [row.request_id for row in plan.new] == ["b"]


def test_a_full_hit_leaves_one_block_to_run(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64)
    s.submit("a", range(8), max_tokens=1)
    s.step(a=(1,))
    s.submit("b", range(8))
    plan = s.plan()
    assert plan.new[0].num_computed_tokens == 4
    assert plan.new[0].block_ids == ((1, 3),)
    second = s.state().block_keys[2]
    assert second is not None
    assert s.state().cached[second] == (2, 3)


def test_a_hidden_state_head_drops_the_last_hit_block(session: OpenSession) -> None:
    s = session(
        num_blocks=20, block_size=4, max_model_len=64,
        spec_method=SpecMethod.EAGLE, num_speculative_tokens=2,
    )  # fmt: skip
    s.submit("a", range(9), max_tokens=1)
    s.step(a=(1,))
    s.submit("b", range(9))
    plan = s.plan()
    assert plan.new[0].num_computed_tokens == 4
    assert s.state().stats.prefix_cache_hits == 4


def test_who_skips_reading_the_cache_is_not_counted_but_publishes(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64)
    s.submit("a", range(5), max_tokens=1, skip_reading_prefix_cache=True)
    s.step(a=(1,))
    s.submit("b", range(5), max_tokens=1, skip_reading_prefix_cache=True)
    plan, outputs = s.step(b=(1,))
    assert plan.new[0].num_computed_tokens == 0
    assert outputs.rows[0].num_cached_tokens == 0
    assert s.state().stats.prefix_cache_queries == 0
    assert list(s.state().cached.values()) == [(1, 3)]


def test_without_caching_no_block_carries_a_key(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64, enable_prefix_caching=False)
    for name in ("a", "b"):
        s.submit(name, range(9), max_tokens=1)
        plan, _ = s.step(**{name: (1,)})
        assert plan.new[0].num_computed_tokens == 0
    assert s.state().cached == {}
    assert s.state().stats.prefix_cache_queries == 0
    assert s.apply(Reset()) == ResetDone(True)


def test_the_whole_prompt_is_reserved_at_admission_if_asked(session: OpenSession) -> None:
    for reserve, admitted in ((True, 1), (False, 2)):
        s = session(
            num_blocks=6, block_size=4, max_num_batched_tokens=8, max_model_len=20,
            long_prefill_token_threshold=4, scheduler_reserve_full_isl=reserve,
        )  # fmt: skip
        s.submit("a", range(8), max_tokens=1)
        s.submit("b", range(100, 119), max_tokens=1)
        before = s.state()
        assert len(s.plan().new) == admitted
        assert s.request("b").status is (Status.WAITING if reserve else Status.RUNNING)
        if reserve:
            assert s.request("b") == before.request("b")
            assert s.state().stats.prefix_cache_queries == 8


def test_fcfs_preempts_the_last_and_resumes_it_first(session: OpenSession) -> None:
    s = session(num_blocks=5, block_size=4, max_model_len=64)
    s.submit("a", range(7), max_tokens=6)
    s.submit("b", range(10, 17), max_tokens=6)
    s.step(a=(1,), b=(1,))
    s.step(a=(2,), b=(2,))
    s.submit("c", range(20, 23), max_tokens=1)
    plan = s.plan()
    # b gives back 4 and 3; a takes 4, whose key is evicted, and 3 stays findable.
    assert plan == Plan(
        2, (), (CachedRow("a", False, ((4,),), None, 8, 2, 1),), preempted_req_ids=("b",)
    )
    assert s.state().waiting == ("b", "c")
    assert s.state().free_queue == (3,)
    assert s.state().block_keys[3] is not None
    assert s.request("b").num_preemptions == 1
    assert s.request("b").num_cached_blocks == (0,)
    s.commit(plan, a=(3,))
    for token in (4, 5, 6):
        plan, _ = s.step(a=(token,))
        assert plan.new == ()
    assert s.state().free_queue == (3, 4, 2, 1)
    plan = s.plan()
    assert plan.cached == (CachedRow("b", True, ((3, 4, 2),), (*range(10, 17), 1, 2), 4, 2, 5),)
    assert [row.request_id for row in plan.new] == ["c"]
    assert plan.finished_req_ids == ("a",)
    assert s.request("b").num_cached_tokens == 0
    outputs = s.commit(plan, b=(3,), c=(9,))
    assert [row.request_id for row in outputs.rows] == ["b", "c"]


def test_who_preempts_himself_ends_the_running_phase(session: OpenSession) -> None:
    s = session(num_blocks=5, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
    s.submit("low", range(7), max_tokens=6, priority=1)
    s.submit("high", range(10, 16), max_tokens=6, arrival_time=1)
    s.plan()
    assert s.state().running == ("high", "low")
    s = session(num_blocks=5, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
    s.submit("low", range(7), max_tokens=6, priority=1)
    plan = s.plan()
    s.submit("high", range(10, 16), max_tokens=6)
    s.commit(plan, low=(1,))
    s.step(low=(2,), high=(1,))
    plan = s.plan()
    assert plan == Plan(2, preempted_req_ids=("low",))
    assert s.state().running == ("high",)
    plan, _ = s.step(high=(2,))
    assert plan.cached[0].all_token_ids == (*range(10, 16), 1)


def test_a_victim_of_this_very_step_leaves_no_key_behind(session: OpenSession) -> None:
    # low runs two blocks per step and is scheduled first; in the fifth step it takes the last two
    # blocks, then high needs one. P4; upstream #43569.
    s = session(
        num_blocks=13, block_size=4, max_num_batched_tokens=16, max_model_len=64,
        long_prefill_token_threshold=8, policy=Policy.PRIORITY, scheduler_reserve_full_isl=False,
    )  # fmt: skip
    s.submit("low", range(40), max_tokens=1, priority=1)
    s.step()
    s.submit("high", range(100, 106), max_tokens=7)
    s.step(high=(1,))
    s.step(high=(2,))
    s.step(high=(3,))
    assert s.state().free_queue == (11, 12)
    plan = s.plan()
    assert plan == Plan(
        4, (), (CachedRow("high", False, ((12,),), None, 8, 3, 1),), preempted_req_ids=("low",)
    )
    assert s.state().free_queue == (11, 10, 9, 8, 7, 4, 3, 2, 1)
    assert s.state().block_keys[11] is None
    assert s.state().block_keys[10] is not None
    assert s.request("low").status is Status.PREEMPTED
    assert s.state().frames_in_flight == (4,)


def test_the_tokens_of_a_victim_go_to_those_after_it(session: OpenSession) -> None:
    # As above, with mid behind high: it runs on with what low gives back, 8 tokens and not 7.
    s = session(
        num_blocks=17, block_size=4, max_num_batched_tokens=16, max_model_len=64,
        long_prefill_token_threshold=8, policy=Policy.PRIORITY, scheduler_reserve_full_isl=False,
    )  # fmt: skip
    s.submit("low", range(40), max_tokens=1, priority=1)
    s.step()
    s.submit("high", range(100, 106), max_tokens=7)
    s.submit("mid", range(200, 230), max_tokens=1, arrival_time=1)
    s.step(high=(1,))
    s.step(high=(2,))
    plan, _ = s.step(high=(3,))
    assert [row.num_scheduled_tokens for row in plan.cached] == [8, 1, 7]
    assert s.state().free_queue == (15, 16)
    plan = s.plan()
    assert plan.preempted_req_ids == ("low",)
    assert [(row.request_id, row.num_scheduled_tokens) for row in plan.cached] == [
        ("high", 1), ("mid", 8),
    ]  # fmt: skip


def test_the_latest_of_the_least_urgent_is_preempted(session: OpenSession) -> None:
    s = session(num_blocks=7, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
    for name, start, arrival in (("a", 0, 0), ("b", 10, 1), ("c", 20, 2)):
        s.submit(name, range(start, start + 7), max_tokens=6, arrival_time=arrival)
    s.step(a=(1,), b=(1,), c=(1,))
    s.step(a=(2,), b=(2,), c=(2,))
    assert s.plan().preempted_req_ids == ("c",)


def test_the_reserve_counts_hits_that_nobody_holds(session: OpenSession) -> None:
    s = session(num_blocks=6, block_size=4, max_model_len=20, long_prefill_token_threshold=4)
    s.submit("a", range(8), max_tokens=1)
    s.step()
    s.step(a=(1,))
    s.submit("holder", (99,), max_tokens=2)
    s.submit("b", range(19), max_tokens=1)
    # b needs 3 new blocks and its 2 hits; 4 are free.
    plan, _ = s.step(holder=(1,))
    assert [row.request_id for row in plan.new] == ["holder"]
    assert s.state().stats.prefix_cache_queries == 8 + 1
    s.step(holder=(1,))
    plan = s.plan()
    assert plan.new[0].num_computed_tokens == 8


def test_nobody_is_admitted_in_a_step_that_preempted(session: OpenSession) -> None:
    s = session(num_blocks=6, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
    s.submit("a", range(7), max_tokens=6)
    s.submit("b", range(10, 21), max_tokens=4, priority=1)
    s.step(a=(1,), b=(1,))
    s.step(a=(2,), b=(2,))
    # a needs a third block, so b goes, which leaves two blocks free: enough for c.
    s.submit("c", (30,), max_tokens=1)
    plan = s.plan()
    assert plan.preempted_req_ids == ("b",)
    assert plan.new == ()
    assert len(s.state().free_queue) == 2
    assert s.state().waiting == ("c", "b")


def test_of_equally_urgent_victims_the_last_by_id_goes(session: OpenSession) -> None:
    s = session(num_blocks=7, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
    for name, start, priority in (("a", 0, 0), ("b", 10, 1), ("c", 20, 1)):
        s.submit(name, range(start, start + 7), max_tokens=6, priority=priority)
    s.step(a=(1,), b=(1,), c=(1,))
    s.step(a=(2,), b=(2,), c=(2,))
    plan = s.plan()
    assert plan.preempted_req_ids == ("c",)
    assert [row.request_id for row in plan.cached] == ["a", "b"]


def test_priority_admits_by_rank_from_both_queues(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64, policy=Policy.PRIORITY)
    s.submit("d", range(3), priority=1)
    s.submit("c", range(3), priority=1, structured_output=True)
    s.submit("b", range(3), priority=0, arrival_time=2)
    s.submit("a", range(3), priority=0, arrival_time=2, structured_output=True)
    assert s.apply(GrammarReady("c")) == Ack()
    plan = s.plan()
    assert [row.request_id for row in plan.new] == ["b", "c", "d"]
    assert s.state().skipped_waiting == ("a",)


def test_a_request_without_its_grammar_is_passed_over(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64, max_num_seqs=2)
    s.submit("a", range(3), structured_output=True)
    s.submit("b", range(3), structured_output=True)
    s.submit("c", range(3))
    s.submit("d", range(3))
    assert s.state().skipped_waiting == ("a", "b")
    assert s.apply(GrammarReady("b")) == Ack()
    assert s.request("b").status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    plan, _ = s.step(b=(1,), c=(1,))
    assert [row.request_id for row in plan.new] == ["b", "c"]
    assert s.state().skipped_waiting == ("a",)
    assert s.state().waiting == ("d",)


def test_pausing_stops_admission_or_everything(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64)
    s.submit("a", range(3))
    s.step(a=(1,))
    s.submit("b", range(3))
    assert s.apply(SetPause(PauseState.PAUSED_NEW)) == Ack()
    plan, _ = s.step(a=(2,))
    assert [row.request_id for row in plan.cached] == ["a"]
    s.apply(SetPause(PauseState.PAUSED_ALL))
    assert s.plan() == Plan(2)
    assert s.state().frames_in_flight == ()
    s.apply(SetPause(PauseState.UNPAUSED))
    plan = s.plan()
    assert plan.cached[0].all_token_ids == (0, 1, 2, 1, 2)
    assert [row.request_id for row in plan.new] == ["b"]


def test_an_abort_frees_at_once_and_ends_each_request_once(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64, max_num_seqs=1)
    s.submit("a", range(5))
    s.submit("b", range(5))
    s.submit("c", range(5), structured_output=True)
    plan = s.plan()
    assert s.apply(Abort(("c", "nobody", "a", "a", "b"))) == Aborted(("c", "a", "b"))
    assert s.state().requests == ()
    assert s.state().free_queue[-2:] == (2, 1)
    assert s.state().finished_req_ids == ("a", "b", "c")
    assert s.commit(plan, a=(1,)).rows == ()
    assert s.plan() == Plan(1, finished_req_ids=("a", "b", "c"))
    assert s.plan() == Plan(2)


def test_a_reset_needs_an_unused_pool_or_preempts_all(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64)
    s.submit("a", range(5))
    s.submit("b", range(10, 15))
    s.step(a=(1,), b=(1,))
    before = s.state()
    assert s.apply(Reset()) == ResetDone(False)
    assert s.state() == before
    plan = s.plan()
    assert s.apply(Reset(True)) == ResetDone(True)
    assert s.state().waiting == ("a", "b")
    assert s.state().cached == {}
    assert s.state().prev_scheduled_req_ids == ()
    assert s.state().stats.preemptions == 2
    assert s.state().frames_in_flight == (1,)
    s.commit(plan, a=(2,), b=(2,))
    assert s.request("a").output_token_ids == (1, 2)
    assert s.request("a").num_computed_tokens == 0
    plan = s.plan()
    assert [(row.request_id, row.resumed) for row in plan.cached] == [("a", True), ("b", True)]
    assert plan.preempted_req_ids == ()
    assert s.state().stats.prefix_cache_hits == 0


def test_a_request_may_end_while_it_is_preempted(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64)
    s.submit("a", range(5), max_tokens=1)
    plan = s.plan()
    s.apply(Reset(True))
    assert s.commit(plan, a=(2,)).rows[0].new_token_ids == (2,)
    assert s.state().requests == ()
    assert s.state().waiting == ()


def test_an_id_can_be_used_again_after_its_end(session: OpenSession) -> None:
    s = session(num_blocks=20, block_size=4, max_model_len=64)
    s.submit("a", range(5), max_tokens=1)
    s.step(a=(2,))
    s.submit("a", range(5), max_tokens=1)
    plan = s.plan()
    assert plan.finished_req_ids == ("a",)
    assert plan.new[0].num_computed_tokens == 4
