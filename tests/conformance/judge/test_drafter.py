"""Draft KV: the worker checks the KV that a draft model keeps in the blocks of requests."""

from __future__ import annotations

from typing import Any

from worker_support import A, cached, make_worker, started, summarize

from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v

MODEL: dict[str, Any] = {"spec_method": v.SpecMethod.DRAFT_MODEL, "num_speculative_tokens": 2}
HEAD: dict[str, Any] = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 2}
OTHER = v.Request("B", (1, 2, 3, 4, 9))


def drafting() -> Worker:
    """Return a worker on which A has run six tokens in blocks 1 to 3; block 4 is for its drafts."""
    worker = started(**MODEL)
    plan = v.Plan(1, cached=(cached("A", 5, 1, new_block_ids=((4,),)),))
    assert worker.execute(plan) == []
    worker.commit(v.Commit(1, worker.answer(1)))
    return worker


def test_a_block_with_draft_kv_is_not_read_by_another_request() -> None:
    """B gets the block with the drafts of A as if it held the KV that B reads."""
    worker = drafting()
    row = v.NewRow(OTHER, ((1, 2, 4),), 4, 1)
    assert (
        summarize(worker.execute(v.Plan(2, new=(row,)))) == []
    )  # it writes the slot before it reads
    wrong = v.Plan(2, new=(v.NewRow(OTHER, ((1, 4, 5),), 4, 1),))
    assert ("P3", "drafter_reads_no_draft_of_another") in summarize(drafting().execute(wrong))


def test_a_copied_block_has_the_draft_kv_of_its_source() -> None:
    worker = drafting()
    wrong = v.NewRow(OTHER, ((1, 6, 5),), 4, 1)
    plan = v.Plan(2, new=(wrong,), block_copies=(v.BlockCopy(4, 6),))
    assert ("P3", "drafter_reads_no_draft_of_another") in summarize(worker.execute(plan))
    right = v.Plan(2, new=(v.NewRow(OTHER, ((1, 6, 5),), 4, 1),), block_copies=(v.BlockCopy(2, 6),))
    assert summarize(drafting().execute(right)) == []


def test_a_running_request_has_slots_for_its_drafts() -> None:
    worker = started(**MODEL)
    short = v.Plan(1, cached=(cached("A", 5, 1),))
    assert summarize(worker.execute(short)) == [("P26", "table_holds_the_slots_of_its_drafts")]


def test_no_slot_for_a_draft_is_needed_beyond_max_model_len() -> None:
    worker = started(**MODEL, max_model_len=6)
    assert worker.execute(v.Plan(1, cached=(cached("A", 5, 1),))) == []


def run_prompt(request: v.Request, *blocks: int) -> Worker:
    """Return a worker with a draft head that has run a prompt."""
    worker = make_worker(**HEAD)
    row = v.NewRow(request, (blocks,), 0, len(request.prompt_token_ids))
    assert worker.execute(v.Plan(0, new=(row,))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker


def test_a_hit_needs_the_head_to_have_run_the_token_after_it() -> None:
    """A has computed 1 2 3 4 5: the head has run 3 after 1 2, and 5, not 9, after 1 2 3 4."""
    right = v.Plan(1, new=(v.NewRow(OTHER, ((1, 4, 5),), 2, 3),))
    assert summarize(run_prompt(A, 1, 2, 3).execute(right)) == []
    whole = v.Plan(1, new=(v.NewRow(OTHER, ((1, 2, 4),), 4, 1),))
    found = summarize(run_prompt(A, 1, 2, 3).execute(whole))
    assert found == [("P5", "draft_head_has_run_the_token_behind_a_hit")]
    same = v.Plan(1, new=(v.NewRow(v.Request("C", A.prompt_token_ids), ((1, 2, 4),), 4, 1),))
    assert summarize(run_prompt(A, 1, 2, 3).execute(same)) == []


def test_a_head_has_run_the_token_that_was_sampled_after_a_prompt() -> None:
    worker = run_prompt(v.Request("A", (1, 2, 3, 4)), 1, 2)
    sampled = worker.views["A"].tokens[-1]
    again = v.Request("C", (1, 2, 3, 4, sampled))
    assert summarize(worker.execute(v.Plan(1, new=(v.NewRow(again, ((1, 2, 4),), 4, 1),)))) == []


def test_after_a_reset_no_hit_is_valid_for_a_head() -> None:
    worker = run_prompt(A, 1, 2, 3)
    worker.observe(v.Reset(True), v.ResetDone(True))
    plan = v.Plan(1, new=(v.NewRow(v.Request("C", A.prompt_token_ids), ((1, 2, 4),), 4, 1),))
    assert ("P5", "draft_head_has_run_the_token_behind_a_hit") in summarize(worker.execute(plan))


def test_a_hit_may_end_before_the_input_of_a_session() -> None:
    """A computes 0, samples a token, and continues with another 0. B hits the first 0, although the
    head has run the sampled token after it: it also finds the second, computed in the same step."""
    session = v.Request("A", (0,), max_tokens=1, resumable=True)
    late = v.Request("B", (0, 0, 0), max_tokens=1, arrival_time=22)
    config = v.Config(
        num_blocks=5,
        block_size=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        policy=v.Policy.PRIORITY,
        spec_method=v.SpecMethod.EAGLE,
        num_speculative_tokens=1,
    )
    first = (
        v.Submit(v.Request("C", (0,), max_tokens=1)),
        v.Submit(session),
        v.StreamingUpdate(session),
    )
    steps = (v.Submit(late), v.Schedule(), Answer(), v.Schedule())
    program = Program(config, first + steps, vocabulary_size=2)
    run, findings = run_program(program, load_engine("host"))
    assert findings == []
    plan = run.exchanges[-1].seen
    assert isinstance(plan, v.Plan)
    assert [row.num_computed_tokens for row in plan.new] == [1, 1]
