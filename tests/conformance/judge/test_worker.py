"""Worker: correct plans and states have no finding, and a wrong read names its writer.

`test_worker_complaints.py` has a wrong plan or state for each of its findings.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from worker_support import (
    CONFIG,
    ROW_BEHIND_A_FAILED_LOAD,
    A,
    cached,
    make_worker,
    pipelined,
    started,
    summarize,
)

from blockstep.conformance.judge.worker import PrefixNames, Worker, extras_of
from blockstep.conformance.judge.worker.prefix_names import BEFORE_RESET, NEVER_WRITTEN
from blockstep.conformance.lockstep.action_resolver import ask_mask
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.token_function import token_function
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import get_profile

# Views.


def test_a_correct_plan_has_no_finding_and_its_output_is_the_true_token() -> None:
    worker = make_worker()
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    (row,) = worker.answer(0)
    assert row == v.RowTokens("A", (worker.next_token([1, 2, 3, 4, 5]),))
    assert worker.answer(0) == (row,)
    assert worker.execute(v.Plan(1, cached=(cached("A", 5, 1),))) == []
    assert worker.views["A"].output_token_ids == row.token_ids
    assert worker.answer(99) == ()


def test_executing_a_plan_twice_does_nothing_more() -> None:
    worker = make_worker()
    plan = v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))
    assert worker.execute(plan) == worker.execute(plan) == []


def test_tokens_of_a_commit_replace_the_output_of_the_worker() -> None:
    worker = make_worker()
    worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    worker.answer(0)
    worker.commit(v.Commit(0, (v.RowTokens("A", (42,)),)))
    assert worker.views["A"].output_token_ids == (42,)
    worker.commit(v.Commit(0, (v.RowTokens("A", (43,)),)))
    assert worker.views["A"].output_token_ids == (42,)


def test_without_commits_the_output_counts_and_any_request_may_be_resumed() -> None:
    worker = make_worker()
    worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    tokens = (1, 2, 3, 4, 5, *worker.answer(0)[0].token_ids)
    row = cached("A", 0, 1, resumed=True, new_block_ids=((4, 5, 6),), num_scheduled_tokens=6)
    assert worker.execute(v.Plan(1, cached=(replace(row, all_token_ids=tokens),))) == []


def test_tokens_of_an_observed_commit_replace_the_output_of_the_worker() -> None:
    worker = make_worker()
    worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    assert worker.observe(v.Commit(0, (v.RowTokens("A", (42,)),)), v.Outputs()) == []
    assert worker.views["A"].output_token_ids == (42,)


def test_the_worker_follows_the_events_of_an_engine() -> None:
    worker = make_worker()
    plan = v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))
    assert worker.observe(v.Schedule(), plan) == []
    assert worker.observe(v.Commit(0, worker.answer(0)), v.Outputs()) == []
    assert worker.observe(v.Reset(True), v.ResetDone(True)) == []
    assert worker.observe(v.Submit(A), v.Ack()) == []
    assert worker.views["A"].may_resume
    assert summarize(worker.observe(v.Schedule(), v.Plan(1, preempted_req_ids=("Z",)))) == [
        ("P26", "preempted_request_was_known")
    ]


# KV.


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": "x"},
        {"cache_salt": "x"},
        {"items": (v.MultiModalItem("cat", 0, 2),)},
        {"items": (v.MultiModalItem("cat", 1, 2),)},
        {"prompt_embeds": (7, 7, 7, 7, 7)},
    ],
)
def test_a_hit_with_another_adapter_salt_item_or_embedding_is_found(fields: dict[str, Any]) -> None:
    other = replace(A, request_id="B", **fields)
    findings = started().execute(v.Plan(1, new=(v.NewRow(other, ((1, 2, 4),), 4, 1),)))
    assert summarize(findings) == [("P6", "attended_slot_is_of_the_same_adapter_salt_and_items")]


def test_embeddings_distinguish_slots_at_their_positions() -> None:
    worker = make_worker()
    first = replace(A, prompt_embeds=(1, 2, 3, 4, 5))
    assert worker.execute(v.Plan(0, new=(v.NewRow(first, ((1, 2, 3),), 0, 5),))) == []
    same = replace(first, request_id="B", prompt_embeds=(1, 2, 3, 4, 9))
    assert worker.execute(v.Plan(1, new=(v.NewRow(same, ((1, 2, 4),), 4, 1),))) == []
    other = replace(first, request_id="C", prompt_embeds=(1, 2, 9, 4, 5))
    findings = worker.execute(v.Plan(2, new=(v.NewRow(other, ((1, 2, 5),), 4, 1),)))
    assert summarize(findings) == [("P6", "attended_slot_is_of_the_same_adapter_salt_and_items")]
    assert findings[0].differences[0].field == "kv[2][0]"


def test_after_a_forced_reset_a_request_may_be_resumed() -> None:
    worker = started()
    worker.reset(forced=True)
    row = cached("A", 0, 1, resumed=True, new_block_ids=((1, 2, 3),), num_scheduled_tokens=6)
    tokens = tuple(worker.views["A"].tokens)
    assert worker.execute(v.Plan(1, cached=(replace(row, all_token_ids=tokens),))) == []


def get_note(findings: list[Finding]) -> str:
    (difference,) = findings[0].differences
    return difference.note


def test_a_read_of_another_prefix_names_its_writer_and_its_last_holder() -> None:
    worker = started()
    other = v.NewRow(v.Request("B", (9, 8, 7, 6)), ((1, 2),), 0, 4)
    assert worker.execute(v.Plan(1, new=(other,), finished_req_ids=("A",))) == []
    stale = v.NewRow(v.Request("C", (1, 2, 3, 4)), ((1, 4),), 2, 2)
    assert get_note(worker.execute(v.Plan(2, new=(stale,)))) == (
        "read by 'C' at position 0 in plan 2; written by 'B' in plan 1"
    )


def test_a_read_of_a_freed_block_names_its_last_holder() -> None:
    worker = started()
    gone = v.Plan(1, preempted_req_ids=("A",))
    assert worker.execute(gone) == []
    reader = v.NewRow(v.Request("B", (1, 2, 9, 9, 9)), ((1, 2, 4),), 4, 1)
    assert get_note(worker.execute(v.Plan(2, new=(reader,)))) == (
        "read by 'B' at position 2 in plan 2; written by 'A' in plan 0; "
        "given back by 'A', which was preempted, says plan 1"
    )


@pytest.mark.parametrize(
    ("text", "slot", "story"),
    [
        ((9, 8, 3, 4), 0, "'A' in plan 0; given back by 'A', which ended, says plan 1"),
        ((1, 9, 3, 4), 1, "'B' in plan 1"),
        ((1, 8, 3, 4), 2, "'A' in plan 0; given back by 'A', which ended, says plan 1"),
    ],
)
def test_each_slot_of_a_block_has_its_own_writer(text: Any, slot: int, story: str) -> None:
    """B has written one slot in the middle of a block of A, and no other slot."""
    worker = started(v.Request("A", (1, 2, 3)), block_size=4)
    other = v.NewRow(v.Request("B", (1, 8)), ((1,),), 1, 1)
    assert worker.execute(v.Plan(1, new=(other,), finished_req_ids=("A",))) == []
    findings = worker.execute(v.Plan(2, new=(v.NewRow(v.Request("C", text), ((1,),), 3, 1),)))
    place = f"read by 'C' at position {slot} in plan 2"
    assert get_note(findings) == f"{place}; written by {story}"


def test_a_slot_written_in_a_later_plan_than_the_first_of_its_block_has_a_writer() -> None:
    worker = started()
    assert worker.execute(v.Plan(1, cached=(cached("A", 5, 1),))) == []
    text = (1, 2, 3, 4, 9, 9, 9)
    findings = worker.execute(
        v.Plan(2, new=(v.NewRow(v.Request("B", text), ((1, 2, 3, 5),), 6, 1),))
    )
    assert get_note(findings) == "read by 'B' at position 4 in plan 2; written by 'A' in plan 0"


def test_a_read_of_a_block_that_was_remapped_names_its_last_holder() -> None:
    worker = started()
    other = v.NewRow(v.Request("B", (1, 2)), ((4,),), 0, 2)
    assert worker.execute(v.Plan(1, new=(other,), cached=(cached("A", 5, 1),))) == []
    row = cached("A", 6, 2, new_block_ids=((4, 2, 3, 5),))
    assert worker.execute(v.Plan(2, cached=(row,), remapped_req_ids=("A",))) == []
    findings = worker.execute(
        v.Plan(3, new=(v.NewRow(v.Request("C", (9, 9, 9)), ((1, 6),), 2, 1),))
    )
    assert get_note(findings) == (
        "read by 'C' at position 0 in plan 3; written by 'A' in plan 0; "
        "given back by 'A', which was remapped, says plan 2"
    )


def test_a_slot_that_was_never_written_has_no_history() -> None:
    worker = make_worker()
    findings = worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 4, 1),)))
    assert get_note(findings) == "read by 'A' at position 0 in plan 0"


def test_a_freed_block_with_two_writers_is_reported_with_its_last_holder() -> None:
    worker = started()
    rows = tuple(v.NewRow(v.Request(name, (1, ord(name))), ((3,),), 0, 2) for name in "BC")
    findings = worker.execute(v.Plan(1, new=rows, finished_req_ids=("A",)))
    assert findings[0].message == (
        "block 3 is of 'B' at index 0 and 'C' at index 0; "
        "given back by 'A', which ended, says plan 1"
    )


# Drafts.


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_right_drafts_are_accepted_and_the_next_is_not(num_right: int) -> None:
    worker = started()
    drafts = worker.propose("A", 3, num_right)
    row = cached("A", 5, 1, num_scheduled_tokens=4, draft_token_ids=drafts)
    assert worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    (answer,) = worker.answer(1)
    assert len(answer.token_ids) == num_right + 1
    assert answer.token_ids[:-1] == drafts[:num_right]
    # Rejected drafts are overwritten before a row reads their slots.
    for step, blocks in enumerate([(), (6,), (), (7,)]):
        worker.commit(v.Commit(1 + step, worker.answer(1 + step)))
        following = cached("A", 6 + num_right + step, 2 + num_right + step)
        row = replace(following, new_block_ids=(blocks,))
        assert worker.execute(v.Plan(2 + step, cached=(row,))) == []
    tokens, table = worker.views["A"].tokens, worker.views["A"].table
    key: v.BlockKey | None = None
    keys: list[v.BlockKey | None] = [None] * 10
    for index in range(4):
        key = v.BlockKey(key, tuple(tokens[2 * index : 2 * index + 2]))
        keys[table[index]] = key
    snapshot = HostEngine(CONFIG).snapshot()
    assert worker.check_published(replace(snapshot, block_keys=tuple(keys))) == []


def test_no_draft_after_a_wrong_one_is_accepted() -> None:
    worker = started()
    (right,) = worker.propose("A", 1, 1)
    row = cached("A", 5, 1, num_scheduled_tokens=3, draft_token_ids=(right ^ 1, right))
    assert worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),))) == []
    assert worker.answer(1) == (v.RowTokens("A", (right,)),)


def test_fewer_drafts_may_be_committed_than_the_worker_accepted() -> None:
    worker = started()
    row = cached("A", 5, 1, num_scheduled_tokens=3, draft_token_ids=worker.propose("A", 2, 2))
    assert worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),))) == []
    (answer,) = worker.answer(1)
    assert len(answer.token_ids) == 3
    worker.commit(v.Commit(1, (v.RowTokens("A", answer.token_ids[:1]),)))
    assert worker.views["A"].output_token_ids[1:] == answer.token_ids[:1]
    assert worker.execute(v.Plan(2, cached=(cached("A", 6, 2),))) == []


def test_drafts_are_also_proposed_for_an_unknown_request() -> None:
    assert len(make_worker().propose("nobody", 3, 3)) == 3


# The state.


def engine_with(*requests: v.Request) -> tuple[HostEngine, Worker]:
    engine, worker = HostEngine(CONFIG), make_worker()
    for request in requests:
        engine.apply(v.Submit(request))
    return engine, worker


def step(engine: HostEngine, worker: Worker) -> v.Snapshot:
    plan = engine.apply(v.Schedule())
    assert isinstance(plan, v.Plan)
    assert worker.execute(plan) == []
    commit = v.Commit(plan.frame_id, worker.answer(plan.frame_id))
    engine.apply(commit)
    worker.commit(commit)
    return engine.snapshot()


def test_the_states_of_an_engine_agree_with_the_worker() -> None:
    engine, worker = engine_with(A, replace(A, request_id="B"))
    for _ in range(3):
        snapshot = step(engine, worker)
        assert worker.check_view(snapshot) == []
        assert worker.check_published(snapshot) == []


@pytest.mark.parametrize(
    "key",
    [
        v.BlockKey(None, (1, 2), adapter="x"),
        v.BlockKey(None, (1, 2), items=(("cat", 1),)),
        v.BlockKey(None, (1, 2), embeds=(4, 4)),
    ],
)
def test_a_published_block_is_of_the_adapter_items_and_embeddings_of_its_key(
    key: v.BlockKey,
) -> None:
    snapshot = HostEngine(CONFIG).snapshot()
    published = replace(snapshot, block_keys=(None, key, *snapshot.block_keys[2:]))
    worker = started()
    for _ in range(2):
        assert summarize(worker.check_published(published)) == [
            ("P6", "published_block_is_of_the_same_adapter_salt_and_items")
        ]


# Names.


def test_prefix_names_are_those_of_block_keys() -> None:
    names = PrefixNames(2)
    items = (v.MultiModalItem("cat", 1, 4), v.MultiModalItem("dog", 5, 1))
    request = v.Request("A", (1, 2, 3, 4, 5, 6), adapter="x", cache_salt="y", items=items)
    chain: list[int] = []
    starts = extras_of(request, 2)
    assert starts == {1: ("cat", 0), 2: ("cat", 1), 4: ("cat", 3), 5: ("dog", 0)}
    names.extend(chain, names.root("x", "y"), request.prompt_token_ids, starts, 0)
    first = v.BlockKey(None, (1, 2), "x", "y", (("cat", 1),))
    second = v.BlockKey(first, (3, 4), "x", None, (("cat", -1),))
    third = v.BlockKey(second, (5, 6), "x", None, (("cat", -3), ("dog", 1)))
    assert [*names.of_key(first), *names.of_key(second), *names.of_key(third)] == chain
    assert names.of_key(third) is names.of_key(third)


def test_an_embedding_is_named_at_its_position() -> None:
    names = PrefixNames(2)
    items = (v.MultiModalItem("cat", 1, 1),)
    request = v.Request("A", (1, 2, 3), items=items, prompt_embeds=(7, 8, 9))
    starts = extras_of(request, 2)
    assert starts == {0: (7,), 1: ("cat", 0, 8), 2: (9,)}
    chain: list[int] = []
    names.extend(chain, names.root(None, None), (1, 2, 3, 4), starts, 0)
    first = v.BlockKey(None, (1, 2), items=(("cat", 1),), embeds=(7, 8))
    second = v.BlockKey(first, (3, 4), embeds=(9,))
    assert [*names.of_key(first), *names.of_key(second)] == chain
    other = v.BlockKey(first, (3, 4), embeds=(9, 4))
    assert names.of_key(other)[0] == chain[2]
    assert names.same_tokens(names.of_key(other)[1], chain[3])


def test_prefix_names_are_shown_as_tokens() -> None:
    names = PrefixNames(2)
    chain: list[int] = []
    names.extend(chain, names.root(None, None), (1, 2, 3), {}, 0)
    assert names.show(chain[2]) == "[1 2 3]"
    assert names.show(chain[2], 2) == "[... 2 3]"
    assert names.show(NEVER_WRITTEN) == "never written"
    assert names.show(BEFORE_RESET) == "written before the last reset"
    assert not names.same_tokens(chain[1], chain[2])


def test_a_step_takes_little_time_per_block() -> None:
    config = v.Config(num_blocks=600, block_size=16, max_model_len=8192)
    worker = Worker(config, token_function(1, 50))
    prompt = tuple(range(8000))
    blocks = tuple(range(1, 502))
    worker.execute(v.Plan(0, new=(v.NewRow(v.Request("A", prompt), (blocks,), 0, 8000),)))
    worker.answer(0)
    started_at = time.perf_counter()
    for index in range(16):
        plan = v.Plan(index + 1, cached=(cached("A", 8000 + index, 1 + index),))
        assert worker.execute(plan) == []
        worker.answer(index + 1)
    assert (time.perf_counter() - started_at) / 16 / 500 < 10e-6


# Several frames in flight.


def test_the_worker_is_ahead_of_the_scheduler_by_the_frames_in_flight() -> None:
    worker = pipelined()
    view = worker.views["A"]
    assert (len(view.tokens), view.num_unreported, view.num_promised) == (7, 2, 2)
    assert view.output_token_ids == ()
    assert worker.execute(v.Plan(2, cached=(cached("A", 6, 2, new_block_ids=((4,),)),))) == []
    first = worker.answer(0)
    worker.commit(v.Commit(0, first))
    assert view.output_token_ids == first[0].token_ids
    assert (view.num_unreported, view.num_promised) == (2, 2)


def test_rejected_drafts_put_the_scheduler_ahead_until_they_are_reported() -> None:
    drafting = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 2}
    worker = make_worker(max_frames_in_flight=3, async_scheduling=True, **drafting)
    worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    row = cached("A", 5, 1, num_scheduled_tokens=3, draft_token_ids=(v.DRAFT_PLACEHOLDER,) * 2)
    assert worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),))) == []
    view = worker.views["A"]
    assert (view.num_computed, view.num_rejected) == (6, 2)
    following = cached("A", 8, 4, new_block_ids=((5,),))
    assert worker.execute(v.Plan(2, cached=(following,))) == []
    assert view.num_computed == 7
    for frame in (0, 1):
        worker.commit(v.Commit(frame, worker.answer(frame)))
    assert view.num_rejected == 0
    late = cached("A", 9, 4, new_block_ids=((6,),))  # as if they were still accepted
    sentence = ("P26", "plan_counts_the_computed_tokens_of_the_worker")
    assert sentence in summarize(worker.execute(v.Plan(3, cached=(late,))))


def test_acceptance_sets_how_many_placeholders_are_accepted() -> None:
    drafting = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 2}
    worker = make_worker(max_frames_in_flight=2, async_scheduling=True, **drafting)
    worker.acceptance = (2, 0)
    worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),)))
    row = cached("A", 5, 1, num_scheduled_tokens=3, draft_token_ids=(v.DRAFT_PLACEHOLDER,) * 2)
    worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),)))
    assert len(worker.answer(1)[0].token_ids) == 3
    following = replace(row, num_computed_tokens=8, num_output_tokens=5, new_block_ids=((5, 6),))
    worker.commit(v.Commit(0, worker.answer(0)))
    assert worker.execute(v.Plan(2, cached=(replace(following, num_output_tokens=4),))) == []
    assert len(worker.answer(2)[0].token_ids) == 1, "by turns"
    worker.commit(v.Commit(1, worker.answer(1)))
    assert len(worker.views["A"].proposal) == 2
    last = cached("A", 9, 7, num_scheduled_tokens=3, draft_token_ids=(v.DRAFT_PLACEHOLDER,) * 2)
    worker.commit(v.Commit(2, worker.answer(2)))
    worker.execute(v.Plan(3, cached=(replace(last, new_block_ids=((7,),)),)))
    assert len(worker.answer(3)[0].token_ids) == 3, "and from the start"


def test_a_commit_does_not_change_tokens_that_later_frames_have_read() -> None:
    worker = pipelined()
    before = list(worker.views["A"].tokens)
    worker.commit(v.Commit(0, (v.RowTokens("A", (before[5] ^ 1,)),)))
    assert worker.views["A"].tokens == before


def test_a_request_resumed_after_a_reset_has_freed_its_old_blocks() -> None:
    worker = pipelined(spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=(v.DRAFT_PLACEHOLDER,) * 2)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    for frame in range(3):
        worker.commit(v.Commit(frame, worker.answer(frame)))
    worker.reset(forced=True)
    text = tuple(worker.views["A"].tokens)
    row = cached("A", 0, len(text) - 5, resumed=True, all_token_ids=text)
    row = replace(row, new_block_ids=((6, 7, 8, 9),), num_scheduled_tokens=len(text))
    assert worker.execute(v.Plan(3, cached=(row,))) == []
    worker.commit(v.Commit(3, worker.answer(3)))
    following = cached("A", len(text), len(text) - 4, new_block_ids=((1,),))
    assert worker.execute(v.Plan(4, cached=(following,))) == []
    reader = v.NewRow(v.Request("B", (1, 2, 3)), ((2, 3),), 2, 1)
    note = get_note(worker.execute(v.Plan(5, new=(reader,))))
    assert note.endswith("given back by 'A', which was preempted, says plan 3")


@pytest.mark.parametrize("last", range(4, 10))
def test_a_row_that_reads_wrong_kv_samples_another_token(last: int) -> None:
    other = v.Request("B", (1, 2, 9, 9, last))
    right, wrong = make_worker(), started()
    right.execute(v.Plan(0, new=(v.NewRow(other, ((4, 5, 6),), 0, 5),)))
    wrong.execute(v.Plan(1, new=(v.NewRow(other, ((1, 2, 4),), 4, 1),)))
    assert wrong.answer(1)[0].token_ids != right.answer(0)[0].token_ids


def test_drafts_are_proposed_for_a_row_behind_a_failed_load() -> None:
    """They are proposed before the load is known to have failed: vLLM 0.19.1 counts a draft as
    scheduled unless its grammar is asked."""
    profile = get_profile("vllm-0.19.1")
    assert profile is not None
    run, findings = run_program(
        ROW_BEHIND_A_FAILED_LOAD, lambda config: SpecEngine(config, profile), profile
    )
    assert findings == []
    (drafts,) = ask_mask(run.worker, run.plans[0]).drafts
    assert (drafts.request_id, len(drafts.token_ids)) == ("A", 1)


def test_a_load_without_a_table_is_reported_also_with_drafts() -> None:
    """It used to break the worker, which looked for the drafter's table."""
    fields: dict[str, Any] = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 2}
    worker = make_worker(kv_connector=True, **fields)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3, 4),), 0, 5),))) == []
    worker._drafts[3] = {1: ("A", 0)}
    assert worker.execute(v.Plan(1, kv_loads=(v.KVLoad("A", (), 0, 2),)))
