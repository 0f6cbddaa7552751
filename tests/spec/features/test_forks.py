"""Forks: rejections, blocks that a branch shares, copy on write, reclaim and the watermark."""

from __future__ import annotations

from typing import Any

import pytest
from groups_support import chunks, full, recurrent, window

from blockstep.spec import Config, Oracle, Policy, Request, SpecMethod
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    BlockCopy,
    BlockStored,
    EncoderEntry,
    EncoderInputs,
    Event,
    Fork,
    Grammar,
    MultiModalItem,
    Observation,
    Plan,
    RejectCode,
    Rejected,
    RepetitionDetection,
    RequestSnapshot,
    Reset,
    ResetDone,
    Status,
    Submit,
    config_problems,
)


def build(**changes: Any) -> Oracle:
    fields: dict[str, Any] = {
        "num_blocks": 12,
        "block_size": 4,
        "max_model_len": 40,
        "scheduler_reserve_full_isl": False,
        "enable_forks": True,
    }
    return Oracle(Config(**fields | changes))


def apply(oracle: Oracle, event: Event) -> Observation:
    answer = oracle.apply(event)
    assert get_broken_invariants(oracle.state) == ()
    return answer


def bring(oracle: Oracle, name: str, num_tokens: int, **more: Any) -> None:
    """Submit a request whose prompt differs from all others."""
    first = 100 * ord(name[0])
    prompt = tuple(range(first, first + num_tokens))
    assert apply(oracle, Submit(Request(name, prompt, **{"max_tokens": 8} | more))) == Ack()


def step(oracle: Oracle, *tokens: int) -> Plan:
    """Plan a step and commit it.

    The rows sample `tokens`, one each. If there are more rows, the last token is repeated.
    """
    plan = oracle.schedule()
    assert get_broken_invariants(oracle.state) == ()
    answer(oracle, plan, *tokens)
    return plan


def answer(oracle: Oracle, plan: Plan, *tokens: int) -> None:
    frame = next((f for f in oracle.state.frames if f.frame_id == plan.frame_id), None)
    left, sampled = [*tokens] or [7], {}
    for row in frame.rows if frame else ():
        if row.samples:
            sampled[row.request_id] = (left.pop(0) if len(left) > 1 else left[0],)
    if frame:
        oracle.commit(plan, sampled)
    assert get_broken_invariants(oracle.state) == ()


def begin(oracle: Oracle, num_tokens: int, num_outputs: int = 1, **more: Any) -> None:
    """Run request `a` until it has `num_outputs` outputs, each of them 7."""
    bring(oracle, "a", num_tokens, **more)
    for _ in range(num_outputs):
        step(oracle)


def fork(oracle: Oracle, child: str, *outputs: int, parent: str = "a") -> Observation:
    return apply(oracle, Fork(parent, child, outputs))


def code(answer: Observation) -> RejectCode | None:
    return answer.code if isinstance(answer, Rejected) else None


def shown(oracle: Oracle, name: str) -> RequestSnapshot:
    return next(r for r in oracle.snapshot().requests if r.request_id == name)


def tables(oracle: Oracle, name: str) -> tuple[tuple[int, ...], ...]:
    return shown(oracle, name).block_tables


def refused(oracle: Oracle, event: Fork) -> RejectCode | None:
    """Return the code of the rejection, and check that the state is unchanged."""
    before = oracle.state
    found = code(apply(oracle, event))
    assert oracle.state == before
    return found


# F1: rejections, in the order in which they are checked.


def test_a_fork_is_rejected_if_forks_are_off() -> None:
    oracle = build(enable_forks=False)
    begin(oracle, 5)
    assert refused(oracle, Fork("a", "b")) is RejectCode.BAD_FORK
    assert refused(oracle, Fork("nobody", "a")) is RejectCode.BAD_FORK


def test_a_fork_of_an_unknown_or_finished_request_is_rejected() -> None:
    oracle = build()
    begin(oracle, 5)
    assert refused(oracle, Fork("nobody", "a")) is RejectCode.UNKNOWN_REQUEST
    apply(oracle, Abort(("a",)))
    assert refused(oracle, Fork("a", "b")) is RejectCode.UNKNOWN_REQUEST


def test_a_fork_is_rejected_if_the_id_of_the_branch_is_in_use() -> None:
    oracle = build()
    begin(oracle, 5, resumable=True)
    bring(oracle, "b", 5)
    oracle.schedule()
    assert refused(oracle, Fork("a", "a")) is RejectCode.DUPLICATE_REQUEST
    assert refused(oracle, Fork("a", "b")) is RejectCode.DUPLICATE_REQUEST
    apply(oracle, Abort(("b",)))
    assert refused(oracle, Fork("a", "b")) is RejectCode.REQUEST_IN_FLIGHT
    assert refused(oracle, Fork("a", "c")) is RejectCode.BAD_FORK  # it is a session, in flight


def test_a_fork_is_rejected_before_the_parent_has_an_output() -> None:
    oracle = build()
    bring(oracle, "a", 5)
    assert refused(oracle, Fork("a", "b")) is RejectCode.BAD_FORK
    oracle.schedule()
    assert refused(oracle, Fork("a", "b", (-1,))) is RejectCode.MALFORMED_EVENT
    assert refused(oracle, Fork("a", "b")) is RejectCode.FORK_IN_FLIGHT


def test_a_waiting_branch_cannot_be_forked() -> None:
    oracle = build()
    begin(oracle, 5)
    fork(oracle, "b", 7)
    assert refused(oracle, Fork("b", "c")) is RejectCode.BAD_FORK


def test_a_request_preempted_in_flight_cannot_be_forked_before_its_commit() -> None:
    oracle = build(max_frames_in_flight=2, async_scheduling=True)
    begin(oracle, 5)
    plan = oracle.schedule()
    apply(oracle, Reset(reset_running_requests=True))
    assert shown(oracle, "a").status is Status.PREEMPTED
    assert refused(oracle, Fork("a", "b")) is RejectCode.FORK_IN_FLIGHT
    answer(oracle, plan)
    assert fork(oracle, "b", 7, 7, 3) == Ack()
    assert shown(oracle, "b").num_computed_tokens == 0


ENDS = (
    # fields, outputs that do not finish the request, one more that does
    ({"eos_token_id": 9}, (7,), 9),
    ({"stop_token_ids": (8, 9)}, (7,), 8),
    ({"max_tokens": 3}, (7, 8), 9),
    ({"max_tokens": 99}, (7,) * 34, 7),
    ({"repetition_detection": RepetitionDetection(2, 1, 3)}, (1, 5, 5), 5),
)


@pytest.mark.parametrize(("fields", "outputs", "last"), ENDS)
def test_a_fork_is_rejected_if_its_outputs_would_finish_the_branch(
    fields: dict[str, Any], outputs: tuple[int, ...], last: int
) -> None:
    oracle = build()
    begin(oracle, 5, **fields)
    assert refused(oracle, Fork("a", "b", (*outputs, last))) is RejectCode.BAD_FORK
    assert refused(oracle, Fork("a", "b", (*outputs, last, 1))) is RejectCode.BAD_FORK
    assert fork(oracle, "b", *outputs) == Ack()


def test_min_tokens_applies_to_the_outputs_of_a_branch() -> None:
    oracle = build()
    begin(oracle, 5, eos_token_id=9, min_tokens=3)
    assert fork(oracle, "b", 7, 9) == Ack()
    assert refused(oracle, Fork("a", "c", (7, 9, 9))) is RejectCode.BAD_FORK


def test_a_branch_has_the_grammar_state_of_its_outputs() -> None:
    grammar = Grammar((((7, 1), (8, 2)), ((7, 1),), ((3, 0),)))
    oracle = build()
    bring(oracle, "a", 5, structured_output=True, grammar=grammar)
    oracle.grammar_ready("a")
    step(oracle, 7)
    assert refused(oracle, Fork("a", "b", (7, 8))) is RejectCode.BAD_FORK
    assert fork(oracle, "b", 8) == Ack()
    branch = shown(oracle, "b")
    assert (branch.status, branch.grammar_ready, branch.grammar_state) == (Status.WAITING, True, 2)
    plan = oracle.schedule()
    assert {row.request_id: row.allowed for row in oracle.mask(plan)} == {
        "a": ((7,),),
        "b": ((3,),),
    }


# F3: blocks that a branch shares.


def test_a_branch_of_a_preempted_parent_shares_no_blocks_but_hits_the_cache() -> None:
    oracle = build()
    begin(oracle, 9)
    apply(oracle, Reset(reset_running_requests=True))
    fork(oracle, "b", 7)
    assert tables(oracle, "b") == ((),)
    plan = step(oracle)
    assert [row.request_id for row in plan.rows] == ["b", "a"]  # new rows first
    assert plan.cached[0].num_computed_tokens == 8
    assert plan.block_copies == ()


def test_a_branch_does_not_share_a_window_that_lacks_attended_blocks() -> None:
    oracle = build(num_blocks=30, block_size=2, groups=(full(2), window(2, 3)))
    begin(oracle, 9, 6)
    assert tables(oracle, "a")[1][:6] == (0, 0, 0, 0, 0, tables(oracle, "a")[1][5])
    fork(oracle, "b", 7, 7, 9)  # 11 tokens in common: position 11 attends to 9 and later
    assert shown(oracle, "b").num_computed_tokens == 0
    fork(oracle, "c", 7, 7, 7, 7, 7)  # 13 tokens in common, and the last block is cached
    branch, table = shown(oracle, "c"), tables(oracle, "a")
    assert branch.num_computed_tokens == 12
    assert branch.block_tables == (table[0][:6], table[1][:6])
    plan = step(oracle)
    assert [len(row.block_ids) for row in plan.new] == [2, 2]


def test_a_branch_recomputes_from_the_start_of_a_chunk_with_freed_blocks() -> None:
    oracle = build(num_blocks=30, block_size=2, groups=(full(2), chunks(2, 4)))
    begin(oracle, 10, 4)  # 13 computed tokens: only the chunk from 12 on is held
    fork(oracle, "b", 7, 9)  # 11 tokens in common, in the chunk from 8 on
    assert shown(oracle, "b").num_computed_tokens == 8
    assert tables(oracle, "b") == (tables(oracle, "a")[0][:4], (0, 0, 0, 0))


# F4: full blocks are published before they are shared.


def test_a_block_filled_by_drafts_is_published_before_it_is_shared() -> None:
    oracle = build(
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=3, enable_kv_cache_events=True
    )
    begin(oracle, 6)
    oracle.propose({"a": (7, 7, 7)})
    assert len(oracle.commit(oracle.schedule(), {"a": (7, 7, 7, 5)}).kv_events) == 0
    assert (shown(oracle, "a").num_computed_tokens, shown(oracle, "a").num_cached_blocks) == (
        *(10,),
        (1,),
    )
    fork(oracle, "b", 7, 7, 7, 7)
    assert (shown(oracle, "a").num_cached_blocks, shown(oracle, "b").num_cached_blocks) == (
        *((2,),),
        (2,),
    )
    assert shown(oracle, "b").num_computed_tokens == 9
    events = oracle.commit(oracle.schedule(), {"a": (1,), "b": (2,)}).kv_events
    assert [type(event) for event in events] == [BlockStored]


# F5: copy on write.


def test_a_group_takes_the_block_of_its_copy_first() -> None:
    oracle = build(num_blocks=30, block_size=2, groups=(full(2), window(2, 5)))
    begin(oracle, 3)
    fork(oracle, "b", 5, 6, 7)  # 3 tokens in common, 3 to compute
    (first, second), head = tables(oracle, "a"), oracle.state.pool.free_queue
    plan = step(oracle)
    # The parent copies a block of each group, the branch then writes in place.
    assert plan.block_copies == (BlockCopy(first[1], head[0]), BlockCopy(second[1], head[1]))
    assert plan.new[0].block_ids == ((*first, head[2]), (*second, head[3]))
    fork(oracle, "c", 5, 6, 7, 7, 8, parent="b")
    (first, second), head = tables(oracle, "b"), oracle.state.pool.free_queue
    oracle.pause()
    fork(oracle, "d", 5, 6, 7, 7, 8, parent="b")
    oracle.resume()
    plan = step(oracle)
    assert [row.request_id for row in plan.new] == ["d", "c"]
    assert plan.block_copies == ()  # there is no partly filled block


@pytest.mark.parametrize(("num_blocks", "names"), [(5, ["a"]), (6, ["a", "c"]), (7, ["a", "c"])])
@pytest.mark.parametrize("is_gated", [False, True])
def test_an_admission_counts_the_block_of_a_copy(
    num_blocks: int, names: list[str], is_gated: bool
) -> None:
    oracle = build(num_blocks=num_blocks, scheduler_reserve_full_isl=is_gated, max_num_seqs=3)
    begin(oracle, 5, max_tokens=5)
    bring(oracle, "z", 1, max_tokens=5)
    step(oracle)
    fork(oracle, "b", 7, 7)
    fork(oracle, "c", 7, 7)
    # Three are held. The parent takes a copy; of what is left the first branch takes one.
    plan = oracle.schedule()
    assert [row.request_id for row in plan.rows if row.request_id != "z"] == sorted(
        names, reverse=True
    )


# F7: blocks of a waiting branch are reclaimed.


def test_a_request_that_runs_alone_reclaims_blocks_of_a_waiting_branch() -> None:
    oracle = build(num_blocks=4, max_num_seqs=1, max_model_len=13)
    begin(oracle, 4, 2, max_tokens=9)
    fork(oracle, "b", 9)
    held = [tables(oracle, "b")]
    while "a" in oracle.state.requests:
        assert step(oracle).preempted_req_ids == ()
        held.append(tables(oracle, "b"))
    assert (held[0], held[-1]) == (((1,),), ((1,),))  # reclaiming a block that both hold frees none
    plan = step(oracle)
    assert (plan.new[0].request_id, plan.new[0].output_token_ids) == ("b", (9,))


def test_blocks_are_reclaimed_from_the_last_branch_that_frees_one() -> None:
    oracle = build(num_blocks=5, max_num_seqs=1)
    begin(oracle, 5, max_tokens=10)
    fork(oracle, "b", 7)
    fork(oracle, "c")
    assert (tables(oracle, "b"), tables(oracle, "c")) == (((1, 2),), ((1,),))
    assert step(oracle).block_copies == (BlockCopy(2, 3),)
    while len(tables(oracle, "a")[0]) < 4:
        assert step(oracle).preempted_req_ids == ()
    assert (tables(oracle, "a"), tables(oracle, "b")) == (((1, 3, 4, 2),), ((),))
    assert (tables(oracle, "c"), shown(oracle, "b").status) == (((1,),), Status.WAITING)


def test_only_a_forced_reset_takes_blocks_of_a_waiting_branch() -> None:
    oracle = build()
    begin(oracle, 6)
    fork(oracle, "b", 7)
    apply(oracle, Abort(("a",)))
    assert apply(oracle, Reset()) == ResetDone(False)
    assert tables(oracle, "b") != ((),)
    assert apply(oracle, Reset(reset_running_requests=True)) == ResetDone(True)
    branch = shown(oracle, "b")
    assert (branch.status, branch.num_computed_tokens, branch.block_tables) == (
        *(Status.WAITING, 0),
        ((),),
    )
    plan = step(oracle)
    assert plan.new[0].output_token_ids == (7,)
    assert plan.new[0].num_scheduled_tokens == 7


# F8: finish and abort.


@pytest.mark.parametrize("first", ["a", "b"])
def test_parent_and_branch_free_their_own_references(first: str) -> None:
    oracle = build()
    begin(oracle, 6)
    fork(oracle, "b", 7)
    apply(oracle, Abort((first,)))
    assert oracle.num_free_blocks == 9
    apply(oracle, Abort(("ab".replace(first, ""),)))
    assert oracle.num_free_blocks == 11
    assert oracle.schedule().finished_req_ids == ("a", "b")


# F9: the watermark.


def test_the_watermark_does_not_apply_if_no_request_runs() -> None:
    oracle = build(num_blocks=5, max_model_len=16, watermark_blocks=99)
    bring(oracle, "a", 13)
    bring(oracle, "z", 1)
    assert [row.request_id for row in oracle.schedule().new] == ["a"]


def test_only_running_requests_may_use_blocks_below_the_watermark() -> None:
    oracle = build(num_blocks=4, max_model_len=13, watermark_blocks=1)
    begin(oracle, 7, max_tokens=5)
    fork(oracle, "b", 7)
    assert step(oracle).new == ()  # the parent's copy took the last block
    assert oracle.num_free_blocks == 0


# F11: combinations with other features.


ENCODER = {"encoder_compute_budget": 4, "encoder_cache_size": 4}


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        ({"kv_connector": True}, False),
        (ENCODER, True),
        ({**ENCODER, "is_encoder_decoder": True, "enable_chunked_prefill": False}, False),
        ({"policy": Policy.CONTINUUM}, False),
        ({"groups": (full(4), recurrent(4))}, False),
        ({"groups": (full(4), window(4, 5), chunks(4, 8))}, True),
        ({"policy": Policy.PRIORITY, "enable_kv_cache_events": True, "max_loras": 1}, True),
        ({"max_frames_in_flight": 3, "async_scheduling": True}, True),
    ],
)
def test_forks_are_rejected_with_features_that_they_do_not_support(
    fields: dict[str, Any], is_good: bool
) -> None:
    config = Config(9, block_size=4, enable_forks=True, **fields)
    assert ("enable_forks" in [problem.field for problem in config_problems(config)]) != is_good


def entries(oracle: Oracle) -> tuple[EncoderEntry, ...]:
    encoder = oracle.snapshot().encoder
    assert encoder is not None
    return encoder.entries


def test_a_branch_holds_an_item_that_it_has_to_read() -> None:
    """The chunk ends inside of an item: the branch shares the block and computes the rest."""
    room = {"encoder_compute_budget": 8, "encoder_cache_size": 8}
    oracle = build(max_num_batched_tokens=5, **room)
    bring(oracle, "a", 9, items=(MultiModalItem("cat", 2, 6),))
    first = step(oracle)
    assert first.scheduled_encoder_inputs == (EncoderInputs("a", (0,)),)
    assert fork(oracle, "b") == Ack()
    assert shown(oracle, "b").num_computed_tokens == 5
    assert entries(oracle) == (EncoderEntry("cat", 6, ("a",)),)
    plan = step(oracle)
    assert plan.scheduled_encoder_inputs == ()
    assert {row.request_id: row.num_scheduled_tokens for row in plan.rows} == {"a": 4, "b": 1}
    assert entries(oracle) == (EncoderEntry("cat", 6, ("b",)),)
    step(oracle)
    assert entries(oracle) == (EncoderEntry("cat", 6),)


def test_a_branch_does_not_hold_an_item_if_it_shares_its_kv() -> None:
    oracle = build(**ENCODER)
    begin(oracle, 9, items=(MultiModalItem("cat", 2, 4),))
    assert fork(oracle, "b", 7) == Ack()
    plan = step(oracle)
    assert {row.request_id for row in plan.rows} == {"a", "b"}
    assert plan.scheduled_encoder_inputs == ()
    assert entries(oracle) == (EncoderEntry("cat", 4),)
