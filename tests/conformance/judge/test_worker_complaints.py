"""Findings of the worker: each place that reports one is the only one for some plan or state.

A place that never reports alone would not be missed if it stopped reporting. So each line of the
worker that reports a finding has a plan or a state here for which no other line reports one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worker_support import (
    CONFIG,
    A,
    cached,
    make_worker,
    pipelined,
    started,
    summarize,
    waiting_for_its_token,
)

from blockstep.conformance.judge.worker import Worker, prefix_names, worker
from blockstep.conformance.judge.worker import blockless_worker as counting
from blockstep.conformance.judge.worker import tagged_kv as kv
from blockstep.conformance.judge.worker.blockless_worker import CountingWorker
from blockstep.conformance.judge.worker.tagged_kv import TaggedKV
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.token_function import token_function
from blockstep.conformance.report.check_texts import SENTENCES
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v

DRAFTING: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 2}
PLACEHOLDERS = (v.DRAFT_PLACEHOLDER,) * 2
EMPTY = HostEngine(CONFIG).snapshot()
FIRST = v.BlockKey(None, (1, 2))
CAT = v.MultiModalItem("cat", 1, 1)

Case = Callable[[], list[Finding]]
CASES: list[tuple[str, str, Case]] = []
"""Check that fails, name of the case, and the function that returns the findings."""


def only_fails(sentence: str) -> Callable[[Case], Case]:
    """Add a case in which only this check fails."""

    def add(case: Case) -> Case:
        CASES.append((sentence, case.__name__, case))
        return case

    return add


# Rows.


def next_row(computed: int, outputs: int, **fields: Any) -> list[Finding]:
    """Findings of a second row of A."""
    return started().execute(v.Plan(1, cached=(cached("A", computed, outputs, **fields),)))


@only_fails("remapped_request_has_a_row")
def a_resumed_request_is_also_remapped() -> list[Finding]:
    worker = started()
    assert worker.execute(v.Plan(1, preempted_req_ids=("A",))) == []
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, resumed=True, all_token_ids=tokens, num_scheduled_tokens=6)
    row = replace(row, new_block_ids=((4, 5, 6),))
    return worker.execute(v.Plan(2, cached=(row,), remapped_req_ids=("A",)))


def resume(worker: Worker, tokens: tuple[int, ...], outputs: int) -> list[Finding]:
    """A runs from its start in other blocks."""
    row = cached("A", 0, outputs, resumed=True, new_block_ids=((4, 5, 6, 7),))
    row = replace(row, all_token_ids=tokens, num_scheduled_tokens=len(tokens))
    return worker.execute(v.Plan(9, cached=(row,)))


@only_fails("dropped_position_runs_again")
def a_resumed_request_skips_the_position_of_a_dropped_token() -> list[Finding]:
    worker = make_worker(max_frames_in_flight=3)
    worker.drops_tokens_in_flight = True
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    tokens = tuple(worker.views["A"].tokens)
    assert len(tokens) == 6
    assert worker.execute(v.Plan(1, preempted_req_ids=("A",))) == []
    return resume(worker, tokens, 1)


@only_fails("resumed_request_was_preempted")
def a_running_request_is_resumed() -> list[Finding]:
    worker = started()
    return resume(worker, tuple(worker.views["A"].tokens), 1)


@only_fails("resumed_request_was_preempted")
def a_resumed_request_is_resumed_again() -> list[Finding]:
    worker = started()
    worker.reset(forced=True)
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, resumed=True, all_token_ids=tokens, num_scheduled_tokens=5)
    assert worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((1, 2, 3),)),))) == []
    return resume(worker, tokens, 1)


@only_fails("resumed_request_was_preempted")
def a_request_is_resumed_after_a_reset_that_preempted_none() -> list[Finding]:
    worker = started()
    worker.reset(forced=False)
    return resume(worker, tuple(worker.views["A"].tokens), 1)


@only_fails("resumed_request_has_no_token_in_flight")
def a_request_is_resumed_while_its_token_is_in_flight() -> list[Finding]:
    worker = waiting_for_its_token()
    assert worker.execute(v.Plan(2, preempted_req_ids=("A",))) == []
    return resume(worker, A.prompt_token_ids, 1)


@only_fails("preempted_request_returns_resumed")
def a_preempted_request_continues_without_resumption() -> list[Finding]:
    worker = started()
    assert worker.execute(v.Plan(1, preempted_req_ids=("A",))) == []
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, all_token_ids=tokens, num_scheduled_tokens=6)
    return worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((7, 8, 9),)),)))


@only_fails("plan_counts_the_computed_tokens_of_the_worker")
def drafts_are_rolled_back_before_they_are_rejected() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    row = cached("A", 7, 5, num_scheduled_tokens=1)
    return worker.execute(v.Plan(3, cached=(row,)))


@only_fails("tokens_are_sent_after_a_gap")
def a_request_returns_after_a_gap_without_its_tokens() -> list[Finding]:
    worker = started()
    assert worker.execute(v.Plan(1)) == []
    return worker.execute(v.Plan(2, cached=(cached("A", 5, 1),)))


@only_fails("tokens_are_sent_after_a_gap")
def a_request_is_resumed_after_a_reset_without_its_tokens() -> list[Finding]:
    worker = started()
    worker.reset(forced=True)
    row = cached("A", 0, 1, resumed=True, new_block_ids=((4, 5, 6),), num_scheduled_tokens=6)
    return worker.execute(v.Plan(1, cached=(row,)))


@only_fails("sent_tokens_are_those_of_the_worker")
def tokens_in_flight_are_sent_as_if_they_were_known() -> list[Finding]:
    worker = pipelined()
    row = cached("A", 6, 2, new_block_ids=((4,),))
    return worker.execute(
        v.Plan(2, cached=(replace(row, all_token_ids=tuple(worker.views["A"].tokens)),))
    )


@only_fails("plan_counts_the_outputs_of_the_worker")
def drafts_in_flight_are_not_counted() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker.execute(v.Plan(3, cached=(cached("A", 9, 3, new_block_ids=((6,),)),)))


# Drafts.


PLACEHOLDER = "placeholder_stands_for_a_draft_after_the_last_plan"


@only_fails(PLACEHOLDER)
def a_row_has_a_placeholder_too_many() -> list[Finding]:
    worker = pipelined(**{**DRAFTING, "num_speculative_tokens": 1})
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    return worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),)))


@only_fails(PLACEHOLDER)
def a_placeholder_comes_after_a_plan_without_its_request() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    other = v.NewRow(v.Request("B", (7,)), ((9,),), 0, 1)
    assert worker.execute(v.Plan(2, new=(other,))) == []
    row = cached("A", 6, 2, num_scheduled_tokens=2, draft_token_ids=PLACEHOLDERS[:1])
    worker.commit(v.Commit(0, worker.answer(0)))
    row = replace(row, all_token_ids=tuple(worker.views["A"].reported_token_ids))
    return worker.execute(v.Plan(3, cached=(replace(row, new_block_ids=((4,),)),)))


@only_fails(PLACEHOLDER)
def a_placeholder_is_for_a_draft_from_before_a_preemption() -> list[Finding]:
    worker = make_worker(max_frames_in_flight=2, async_scheduling=True, **DRAFTING)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    assert worker.views["A"].proposal
    worker.reset(forced=True)
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, resumed=True, all_token_ids=tokens, new_block_ids=((4, 5, 6, 7),))
    row = replace(row, num_scheduled_tokens=len(tokens) + 1, draft_token_ids=PLACEHOLDERS[:1])
    return worker.execute(v.Plan(1, cached=(row,)))


@only_fails(PLACEHOLDER)
def a_worker_that_keeps_no_drafts_is_sent_a_placeholder() -> list[Finding]:
    row = cached("A", 5, 1, num_scheduled_tokens=2, draft_token_ids=PLACEHOLDERS[:1])
    worker = started(**DRAFTING)
    return worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),)))


@only_fails(PLACEHOLDER)
def a_placeholder_comes_after_a_chunk_that_sampled_nothing() -> list[Finding]:
    worker = make_worker(max_frames_in_flight=2, async_scheduling=True, **DRAFTING)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 2),))) == []
    row = cached("A", 2, 0, num_scheduled_tokens=4, draft_token_ids=PLACEHOLDERS[:1])
    return worker.execute(v.Plan(1, cached=(row,)))


# KV groups.

WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=3)
GROUPED: dict[str, Any] = {"groups": (v.KVGroup(v.GroupKind.FULL, 2), WINDOW)}


def in_groups(*tables: tuple[int, ...]) -> Worker:
    """A has run its prompt in a block table of each group."""
    worker = make_worker(**GROUPED)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, tables, 0, 5),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker


@only_fails("attended_slot_was_written")
def a_block_that_changed_its_group_is_read_before_it_is_written() -> list[Finding]:
    """The window has written the second slot of block 2, and reads the first."""
    worker = in_groups((1, 2, 3), (4, 5, 6))
    worker.execute(v.Plan(1, finished_req_ids=("A",)))
    row = v.NewRow(v.Request("B", (1, 2, 3, 4)), ((1, 7), (2, 3)), 1, 3)
    return worker.execute(v.Plan(2, new=(row,)))


def hit_in_groups(*tables: tuple[int, ...]) -> list[Finding]:
    """Findings of a hit of four tokens in these tables; at position 4 the window begins at 2."""
    row = v.NewRow(v.Request("B", (1, 2, 3, 4, 9)), tables, 4, 1)
    return in_groups((1, 2, 3), (4, 5, 6)).execute(v.Plan(1, new=(row,)))


def run_with_a_hint(*counts: int, **fields: Any) -> list[Finding]:
    """A and B have the block of their first two tokens in common, and none of the window."""
    rows = (v.NewRow(A, ((1, 2, 3), (4, 5, 6)), 0, 2),)
    worker = make_worker(**GROUPED)
    assert worker.execute(v.Plan(0, new=rows)) == []
    row = v.NewRow(v.Request("B", (1, 2, 9)), ((1, 7), (4, 8)), 2, 1)
    old = replace(cached("A", 2, 0, new_block_ids=((), ())), num_scheduled_tokens=3)
    return worker.execute(v.Plan(1, new=(row,), cached=(old,), num_common_prefix_blocks=counts))


def test_a_hint_may_count_fewer_blocks_than_are_shared() -> None:
    assert run_with_a_hint(1, 0) == run_with_a_hint(0, 0) == run_with_a_hint() == []


# States.

STATES = v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALIGN)
WITH_STATES: dict[str, Any] = {"groups": (v.KVGroup(v.GroupKind.FULL, 2), STATES)}


def start_with_states(mode: v.MambaCacheMode = v.MambaCacheMode.ALIGN) -> Worker:
    """A has run four tokens: the state after them is in block 5, with `all` also one in block 4."""
    groups = (v.KVGroup(v.GroupKind.FULL, 2), replace(STATES, mamba_cache_mode=mode))
    worker = make_worker(groups=groups)
    states = (0, 5) if mode is v.MambaCacheMode.ALIGN else (4, 5)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2), states), 0, 4),))) == []
    return worker


def make_row_of_b(num_computed: int, *states: int) -> v.NewRow:
    """Return the row of B, which begins like A, with `num_computed` computed tokens."""
    full = (1, 2)[: num_computed // 2] + (7, 8, 9)[: 3 - num_computed // 2]
    return v.NewRow(replace(A, request_id="B"), (full, states), num_computed, 5 - num_computed)


# Cross attention.

ENCODER_DECODER: dict[str, Any] = {
    "groups": (v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.CROSS_ATTENTION, 2)),
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
    "encoder_compute_budget": 8,
    "encoder_cache_size": 8,
}


def make_first_plan(request_id: str, identifier: str, *tables: tuple[int, ...]) -> v.Plan:
    """Return plan 0, with a request of one token whose item of three embeddings is encoded."""
    request = v.Request(request_id, (1,), items=(v.MultiModalItem(identifier, 0, 3),))
    inputs = (v.EncoderInputs(request_id, (0,)),)
    return v.Plan(0, new=(v.NewRow(request, tables, 0, 1),), scheduled_encoder_inputs=inputs)


def start_cross_attention() -> Worker:
    """A has attended to an owl in blocks 4 and 5."""
    worker = make_worker(**ENCODER_DECODER)
    assert worker.execute(make_first_plan("A", "owl", (1,), (4, 5))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker


def make_next_plan(worker: Worker, frame_id: int, *dropped: str) -> v.Plan:
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 1, 1, new_block_ids=((), ()), all_token_ids=tokens)
    return v.Plan(frame_id, cached=(row,), free_encoder_mm_hashes=dropped)


@only_fails("attended_slot_is_of_the_same_adapter_salt_and_items")
def cross_attention_reads_a_block_with_another_item() -> list[Finding]:
    worker = start_cross_attention()
    plan = replace(make_first_plan("B", "cat", (2,), (4, 3)), free_encoder_mm_hashes=("owl",))
    assert worker.execute(replace(plan, frame_id=1)) == []
    worker.commit(v.Commit(1, worker.answer(1)))
    return worker.execute(make_next_plan(worker, 2, "cat"))


@only_fails("attended_slot_is_of_the_group_that_reads_it")
def cross_attention_reads_a_block_with_tokens() -> list[Finding]:
    worker = start_cross_attention()
    row = v.NewRow(v.Request("B", (1,)), ((4,), ()), 0, 1)
    assert worker.execute(v.Plan(1, new=(row,), free_encoder_mm_hashes=("owl",))) == []
    worker.commit(v.Commit(1, worker.answer(1)))
    return worker.execute(make_next_plan(worker, 2))


@only_fails("written_block_is_in_one_place")
def two_requests_write_one_item_to_one_cross_attention_block() -> list[Finding]:
    plans = make_first_plan("A", "owl", (1,), (4, 5)), make_first_plan("B", "owl", (2,), (4, 6))
    both = replace(
        plans[0],
        new=tuple([row for plan in plans for row in plan.new]),
        scheduled_encoder_inputs=tuple([it for p in plans for it in p.scheduled_encoder_inputs]),
    )
    return make_worker(**ENCODER_DECODER).execute(both)


def test_a_row_whose_item_is_not_encoded_reads_unwritten_slots() -> None:
    plan = replace(make_first_plan("A", "owl", (1,), (4, 5)), scheduled_encoder_inputs=())
    assert summarize(make_worker(**ENCODER_DECODER).execute(plan)) == [
        ("P22", "item_that_a_row_reads_is_there"),
        ("P4", "attended_slot_was_written"),
    ]


@only_fails("block_of_a_state_is_zeroed_for_attention")
def a_state_block_is_used_for_attention_without_zeroing() -> list[Finding]:
    worker = start_with_states()
    worker.execute(v.Plan(1, finished_req_ids=("A",)))
    return worker.execute(v.Plan(2, new=(v.NewRow(v.Request("B", (7, 8)), ((5,), (6,)), 0, 2),)))


def test_a_state_is_read_from_the_block_in_which_a_chunk_left_it() -> None:
    """With `all`, each block has a state; a zeroed state block may be used for attention."""
    assert start_with_states().execute(v.Plan(1, new=(make_row_of_b(4, 0, 5, 6),))) == []
    assert (
        start_with_states(v.MambaCacheMode.ALL).execute(v.Plan(1, new=(make_row_of_b(2, 4, 6, 3),)))
        == []
    )
    worker = start_with_states()
    worker.execute(v.Plan(1, finished_req_ids=("A",)))
    row = v.NewRow(v.Request("B", (7, 8)), ((5,), (6,)), 0, 2)
    assert worker.execute(v.Plan(2, new=(row,), new_block_ids_to_zero=(5,))) == []


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_request_continues_from_the_state_after_its_last_accepted_draft(num_right: int) -> None:
    """The state at a block end that accepted drafts passed is copied to that block."""
    states = replace(STATES, num_speculative_blocks=2)
    groups = (v.KVGroup(v.GroupKind.FULL, 2), states)
    worker = make_worker(num_blocks=12, groups=groups, **DRAFTING)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3), (0, 0, 4, 5, 6)), 0, 5),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    drafts = worker.propose("A", 2, num_right)
    row = cached("A", 5, 1, new_block_ids=((7,), (8,)), num_scheduled_tokens=3)
    assert worker.execute(v.Plan(1, cached=(replace(row, draft_token_ids=drafts),))) == []
    worker.commit(v.Commit(1, worker.answer(1)))
    text, computed = worker.views["A"].tokens, 6 + num_right
    assert len(text) == computed + 1
    # Block 4 ends after six tokens; 5, 6 and 8 hold the states after six to eight.
    key = v.BlockKey(v.BlockKey(FIRST, (3, 4)), (5, text[5]), group=1)
    assert publish(worker, 4, key) == []
    blocks = ((9,), (10,)) if num_right == 2 else ((), ())
    row = cached("A", computed, 2 + num_right, new_block_ids=blocks)
    assert worker.execute(v.Plan(2, cached=(row,))) == []


def test_a_block_in_the_tables_of_two_groups_is_found() -> None:
    row = v.NewRow(v.Request("B", (1, 2)), ((1,), (1,)), 0, 2)
    findings = make_worker(**GROUPED).execute(v.Plan(0, new=(row,)))
    assert (
        findings[0].message
        == "block 1 is of 'B' at index 0 of group 0 and 'B' at index 0 of group 1"
    )
    assert {found.property_id for found in findings} == {"P2", "P3"}


def test_a_skipped_block_may_be_given_to_another_request() -> None:
    """No plan shows that A freed block 4, so the worker keeps it in the table of A."""
    worker = in_groups((1, 2, 3), (4, 5, 6))
    new = v.NewRow(v.Request("B", (7, 8)), ((7,), (4,)), 0, 2)
    row = cached("A", 5, 1, new_block_ids=((), ()))
    assert worker.execute(v.Plan(1, new=(new,), cached=(row,))) == []
    assert worker.views["A"].tables == [[1, 2, 3], [4, 5, 6]]


# What is in a slot that is read.


def read(worker: Worker, request: v.Request, *blocks: int, computed: int) -> list[Finding]:
    """Return the findings of a new request that has a hit of `computed` tokens in these blocks."""
    num_new = len(request.prompt_token_ids) - computed
    return worker.execute(v.Plan(1, new=(v.NewRow(request, (blocks,), computed, num_new),)))


@only_fails("attended_slot_was_written_since_the_reset")
def kv_from_before_a_reset_is_read() -> list[Finding]:
    worker = started()
    worker.reset(forced=False)
    return read(worker, replace(A, request_id="B"), 1, 2, 4, computed=4)


@only_fails("attended_slot_holds_the_right_prefix")
def kv_of_rejected_drafts_is_read() -> list[Finding]:
    """The rejected draft was not overwritten: another request has a hit that includes its slot."""
    first = started(**DRAFTING)
    row = cached("A", 5, 1, num_scheduled_tokens=2, draft_token_ids=first.propose("A", 1, 0))
    assert first.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),))) == []
    first.commit(v.Commit(1, first.answer(1)))
    text = (*first.views["A"].tokens, 7)
    return read(first, v.Request("B", text), 1, 2, 3, 4, computed=7)


# Writers of a block.


SHARED = "written_block_is_in_one_place"


@only_fails(SHARED)
def two_requests_write_one_block() -> list[Finding]:
    """The requests do not read each other's slots."""
    worker = started(v.Request("A", (1, 2, 3, 4)), block_size=4)
    assert worker.execute(v.Plan(1, cached=(cached("A", 4, 1, new_block_ids=((2,),)),))) == []
    second = v.NewRow(v.Request("B", (1, 2, 3, 4, 9)), ((1, 3),), 4, 1)
    assert worker.execute(v.Plan(2, new=(second,), finished_req_ids=("A",))) == []
    worker.commit(v.Commit(2, worker.answer(2)))
    # B writes the second slot of block 3, and C its first one, with the same text.
    third = v.NewRow(v.Request("C", (1, 2, 3, 4, 9)), ((1, 3),), 4, 1)
    rows = v.Plan(3, new=(third,), cached=(cached("B", 5, 1),))
    return worker.execute(rows)


def run_both(first: tuple[int, ...], second: tuple[int, ...]) -> list[Finding]:
    """Return the findings of a step in which two prompts run with a shared first block."""
    rows = [
        v.NewRow(v.Request(name, prompt), ((1, place),), 0, len(prompt))
        for name, prompt, place in (("A", first, 2), ("B", second, 3))
    ]
    return make_worker().execute(v.Plan(0, new=tuple(rows)))


def test_two_requests_may_fill_one_block_with_equal_content() -> None:
    assert run_both((1, 2, 3), (1, 2, 4)) == []
    unequal = summarize(run_both((1, 2, 3), (4, 2, 3)))
    assert unequal == [("P2", SHARED), ("P3", "attended_slot_holds_the_right_prefix")]


# What is published.


def publish(worker: Worker, block: int, key: v.BlockKey) -> list[Finding]:
    """Return the findings of a state in which the block is published under the key."""
    keys: list[v.BlockKey | None] = [None] * worker.config.num_blocks
    keys[block] = key
    return worker.check_published(replace(EMPTY, block_keys=tuple(keys)))


@only_fails("published_block_was_written")
def a_block_is_published_before_it_is_full() -> list[Finding]:
    worker = started()
    text = tuple(worker.views["A"].tokens)
    return publish(worker, 3, v.BlockKey(v.BlockKey(FIRST, (3, 4)), text[4:6]))


@only_fails("published_block_holds_the_right_prefix")
def the_second_of_two_blocks_is_published_under_other_tokens() -> list[Finding]:
    worker = started()
    keys = (None, FIRST, v.BlockKey(FIRST, (3, 9)), *EMPTY.block_keys[3:])
    return worker.check_published(replace(EMPTY, block_keys=keys))


@only_fails("published_block_was_written_since_the_reset")
def a_block_stays_published_through_a_reset() -> list[Finding]:
    worker = started()
    assert publish(worker, 1, FIRST) == []
    worker.reset(forced=False)
    return publish(worker, 1, FIRST)


@only_fails("published_block_holds_the_right_prefix")
def a_block_that_is_overwritten_stays_published() -> list[Finding]:
    worker = started()
    assert publish(worker, 1, FIRST) == []
    other = v.NewRow(v.Request("B", (9,)), ((1,),), 0, 1)
    assert worker.execute(v.Plan(1, new=(other,), finished_req_ids=("A",))) == []
    return publish(worker, 1, FIRST)


# What a store could not load.


def loaded_in_part() -> Worker:
    """Return a worker for which the store failed to load the first of two blocks of A."""
    worker = Worker(replace(CONFIG, kv_connector=True), token_function(1, 50))
    assert worker.observe(v.Submit(A), v.Ack()) == []
    load = v.KVLoad("A", ((1, 2),), 0, 4, is_async=True)
    assert worker.observe(v.Schedule(), v.Plan(0, kv_loads=(load,))) == []
    report = v.TransfersReported(v.KVTransfers(("A",), invalid_block_ids=(1,)))
    assert worker.observe(report, v.Outputs()) == []
    return worker


# Malformed keys, each tried after the correct one.


def try_key(
    block: int, right: v.BlockKey, wrong: v.BlockKey, request: v.Request = A
) -> list[Finding]:
    worker = started(request)
    assert publish(worker, block, right) == []
    return publish(worker, block, wrong)


@only_fails("published_block_is_of_the_same_adapter_salt_and_items")
def a_key_has_two_items_in_one_slot() -> list[Finding]:
    request = replace(A, items=(CAT,))
    right = v.BlockKey(None, (1, 2), items=(("cat", 1),))
    return try_key(1, right, v.BlockKey(None, (1, 2), items=(("dog", 1), ("cat", 1))), request)


@only_fails("published_block_holds_the_right_prefix")
def a_key_has_an_embedding_after_its_last_token() -> list[Finding]:
    request = replace(A, prompt_embeds=(4, 5, 6, 7, 8))
    right = v.BlockKey(None, (1, 2), embeds=(4, 5))
    return try_key(1, right, v.BlockKey(None, (1, 2), embeds=(4, 5, 6)), request)


# Requests in a state.


def show_state(worker: Worker, **fields: Any) -> v.Snapshot:
    """Return a state in which A is as the worker knows it, except for `fields`."""
    view = worker.views["A"]
    request = v.RequestSnapshot(
        request_id="A",
        status=v.Status.RUNNING,
        output_token_ids=view.output_token_ids,
        num_computed_tokens=view.num_computed + view.num_rejected,
        num_output_placeholders=view.num_promised if worker.config.async_scheduling else 0,
        block_tables=(tuple(view.table),),
    )
    assert worker.check_view(replace(EMPTY, requests=(request,))) == []
    return replace(EMPTY, requests=(replace(request, **fields),))


REBUILT = "plans_alone_rebuild_the_request"


@only_fails("running_request_is_known")
def an_unknown_request_runs_in_the_state() -> list[Finding]:
    worker = started()
    return worker.check_view(show_state(worker, request_id="B"))


@only_fails(REBUILT)
def a_running_request_is_wrong_after_a_waiting_one() -> list[Finding]:
    worker = started()
    wrong = show_state(worker, num_computed_tokens=6)
    waits = v.RequestSnapshot("0", v.Status.WAITING)
    return worker.check_view(replace(wrong, requests=(waits, *wrong.requests)))


@only_fails(REBUILT)
def drafts_in_flight_are_already_rolled_back_in_the_state() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    return worker.check_view(show_state(worker, num_computed_tokens=worker.views["A"].num_computed))


@only_fails(REBUILT)
def the_state_has_other_outputs() -> list[Finding]:
    worker = started()
    return worker.check_view(show_state(worker, output_token_ids=(99,)))


@only_fails(REBUILT)
def the_state_of_a_preempted_request_has_other_outputs() -> list[Finding]:
    worker = started()
    changes = {"status": v.Status.PREEMPTED, "output_token_ids": (99,), "block_tables": ((),)}
    return worker.check_view(show_state(worker, **changes))


@only_fails(REBUILT)
def the_state_has_other_blocks() -> list[Finding]:
    worker = started()
    return worker.check_view(show_state(worker, block_tables=((1, 2, 4),)))


@only_fails(REBUILT)
def the_state_has_other_blocks_than_the_last_plan() -> list[Finding]:
    worker = started()
    return worker.check_view(show_state(worker, block_tables=((1, 2, 4),)), {"A"})


@only_fails(REBUILT)
def the_state_has_a_block_more_than_all_plans() -> list[Finding]:
    worker = started()
    return worker.check_view(show_state(worker, block_tables=((1, 2, 3, 4),)), ())


@only_fails(REBUILT)
def the_state_has_computed_more() -> list[Finding]:
    worker = started()
    return worker.check_view(show_state(worker, num_computed_tokens=6))


@only_fails(REBUILT)
def the_state_has_a_placeholder_too_few() -> list[Finding]:
    worker = pipelined()
    return worker.check_view(show_state(worker, num_output_placeholders=1))


# All of them.


CASES += [
    ("preempted_request_was_known", "an_unknown_request_is_preempted",
     lambda: started().execute(v.Plan(1, preempted_req_ids=("B",)))),
    ("preempted_request_was_known", "a_finished_request_is_preempted",
     lambda: started().execute(v.Plan(1, finished_req_ids=("A",), preempted_req_ids=("A",)))),
    ("remapped_request_has_a_row", "a_request_without_a_row_is_remapped",
     lambda: started().execute(v.Plan(1, remapped_req_ids=("A",)))),
    ("new_row_is_new", "a_known_request_is_new_again",
     lambda: started().execute(v.Plan(1, new=(v.NewRow(A, ((4, 5, 6),), 0, 5),)))),
    ("cached_row_is_known", "an_unknown_request_has_a_cached_row",
     lambda: started().execute(v.Plan(1, cached=(cached("B", 5, 1),)))),
    ("row_waits_for_the_token_of_its_request", "a_request_runs_before_its_token_is_known",
     lambda: waiting_for_its_token().execute(v.Plan(2, cached=(cached("A", 5, 1,
         all_token_ids=A.prompt_token_ids),)))),
    ("plan_counts_the_computed_tokens_of_the_worker", "a_request_runs_a_computed_token_again",
     lambda: next_row(4, 1, num_scheduled_tokens=2)),
    ("sent_tokens_are_those_of_the_worker", "other_tokens_are_sent",
     lambda: next_row(5, 1, all_token_ids=(*A.prompt_token_ids, 99))),
    ("plan_counts_the_outputs_of_the_worker", "an_output_too_many_is_counted",
     lambda: next_row(5, 2)),
    ("plan_counts_the_outputs_of_the_worker", "a_token_in_flight_is_not_counted",
     lambda: pipelined().execute(v.Plan(2, cached=(cached("A", 6, 1, new_block_ids=((4,),)),)))),
    ("plan_has_one_table_per_group", "a_row_has_two_tables",
     lambda: next_row(5, 1, new_block_ids=((), ()))),
    ("plan_has_one_table_per_group", "a_row_has_no_table",
     lambda: next_row(5, 1, new_block_ids=())),
    ("plan_names_real_blocks", "a_row_gets_the_null_block",
     lambda: next_row(5, 1, new_block_ids=((0,),))),
    ("plan_names_real_blocks", "a_row_gets_a_block_beyond_the_last",
     lambda: next_row(5, 1, new_block_ids=((10,),))),
    ("copy_names_real_blocks", "a_block_is_copied_to_one_beyond_the_last",
     lambda: started().execute(v.Plan(1, block_copies=(v.BlockCopy(1, 10),)))),
    ("row_runs_a_token", "a_row_runs_nothing", lambda: next_row(5, 1, num_scheduled_tokens=0)),
    ("table_holds_the_scheduled_tokens", "a_row_has_a_slot_too_few",
     lambda: next_row(5, 1, num_scheduled_tokens=2, draft_token_ids=(7,))),
    ("plan_shows_no_blocks", "a_plan_without_blocks_names_some",
     lambda: CountingWorker(CONFIG, len).execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0,
         5),)))),
    ("drafts_are_the_last_scheduled_tokens", "a_row_has_a_draft_that_it_does_not_run",
     lambda: next_row(5, 1, draft_token_ids=(7,))),
    ("drafts_are_the_last_scheduled_tokens", "a_row_runs_past_its_tokens_without_a_draft",
     lambda: next_row(5, 1, num_scheduled_tokens=2, new_block_ids=((4,),))),
    (PLACEHOLDER, "a_new_row_runs_past_its_prompt",
     lambda: make_worker().execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 6),)))),
    ("attended_position_has_a_block", "a_row_writes_to_a_null_block",
     lambda: make_worker(**GROUPED).execute(v.Plan(0, new=(v.NewRow(v.Request("B", (1, 2, 3)),
         ((1, 2),
         (0, 3)), 0, 2),)))),
    ("attended_position_has_a_block", "a_hit_has_a_null_block_that_is_attended_to",
     lambda: hit_in_groups((1, 2, 7), (0, 0, 8))),
    ("attended_slot_is_of_the_group_that_reads_it", "a_window_reads_what_the_full_group_wrote",
     lambda: hit_in_groups((1, 2, 7), (0, 2, 8))),
    ("attended_slot_was_written", "a_window_reads_a_block_that_no_group_wrote",
     lambda: hit_in_groups((1, 2, 7), (0, 9, 8))),
    ("published_block_is_of_the_group_that_reads_it",
     "a_block_is_published_in_another_group_than_wrote_it",
     lambda: publish(in_groups((1, 2, 3), (4, 5, 6)), 1, FIRST.in_group(1))),
    ("plan_names_real_blocks", "a_table_of_full_attention_has_a_null_block",
     lambda: make_worker(**GROUPED).execute(v.Plan(0, new=(v.NewRow(v.Request("B", (1, 2)), ((0, 1),
         (2,)), 0, 2),)))),
    ("common_prefix_is_of_every_row", "a_hint_counts_a_block_that_only_one_row_has",
     lambda: run_with_a_hint(2, 0)),
    ("common_prefix_is_of_every_row", "a_hint_counts_blocks_of_a_window",
     lambda: run_with_a_hint(1, 1)),
    # Block 5 holds the state after four tokens, and is read for the one after two.
    ("attended_slot_holds_the_right_prefix", "the_state_after_other_tokens_is_read",
     lambda: start_with_states().execute(v.Plan(1, new=(make_row_of_b(2, 5, 0, 6),)))),
    ("attended_slot_was_written", "a_state_that_no_chunk_ended_at_is_read",
     lambda: start_with_states().execute(v.Plan(1, new=(make_row_of_b(2, 4, 0, 6),)))),
    ("attended_position_has_a_block", "a_row_has_no_state_to_continue_from",
     lambda: start_with_states().execute(v.Plan(1, new=(make_row_of_b(4, 0, 0, 6),)))),
    # KV is written before it is read, a state read before any is written.
    ("attended_slot_was_written", "a_state_is_read_in_the_plan_that_writes_it",
     lambda: make_worker(**WITH_STATES).execute(v.Plan(0, new=(v.NewRow(A, ((1, 2), (0, 5)), 0, 4),
         make_row_of_b(4, 0, 5, 6))))),
    ("cross_attention_table_holds_the_embeddings", "a_cross_attention_table_is_a_slot_too_short",
     lambda: make_worker(**ENCODER_DECODER).execute(make_first_plan("A", "owl", (1,), (4,)))),
    ("plan_names_real_blocks", "a_cross_attention_table_has_a_null_block",
     lambda: make_worker(**ENCODER_DECODER).execute(make_first_plan("A", "owl", (1,), (4, 5, 0)))),
    ("written_block_is_in_one_place", "two_requests_write_their_states_to_one_block",
     lambda: make_worker(**WITH_STATES).execute(v.Plan(0, new=(v.NewRow(A, ((1, 2), (0, 5)), 0, 4),
         v.NewRow(v.Request("B", (7,) * 5), ((3, 4), (0, 5)), 0, 4))))),
    ("published_block_holds_the_right_prefix", "a_state_is_published_for_another_boundary",
     lambda: publish(start_with_states(), 5, FIRST.in_group(1))),
    ("attended_slot_was_written", "an_unwritten_slot_is_read",
     lambda: read(make_worker(), A, 1, 2, 3, computed=4)),
    ("attended_slot_holds_the_right_prefix", "a_slot_with_another_prefix_is_read",
     lambda: read(started(), v.Request("B", (1, 2, 9, 4, 5)), 1, 2, 4, computed=4)),
    ("attended_slot_holds_the_right_prefix",
     "a_slot_with_another_prefix_is_read_in_a_partial_block",
     lambda: read(started(v.Request("A", (1, 2, 3, 4, 5, 6)), block_size=4), v.Request("B", (1, 2,
         3,
         4, 9, 6, 7)), 1, 2, computed=6)),
    ("attended_slot_was_written", "an_unwritten_slot_is_read_in_a_partial_block",
     lambda: read(started(v.Request("A", (1, 2, 3, 4)), block_size=4), v.Request("B", (1, 2, 3, 4,
         5,
         6)), 1, 2, computed=5)),
    ("attended_slot_is_of_the_same_adapter_salt_and_items", "the_kv_of_another_adapter_is_read",
     lambda: read(started(), replace(A, request_id="B", adapter="x"), 1, 2, 4, computed=4)),
    (SHARED, "two_requests_share_a_block_that_both_fill_later", lambda: run_both((1,), (1,))),
    (SHARED, "a_row_writes_a_block_at_another_place_in_another_table",
     lambda: make_worker().execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),
         v.NewRow(v.Request("B", (7,)), ((4, 9, 1),), 0, 1))))),
    (SHARED, "a_table_has_the_written_block_twice",
     lambda: make_worker().execute(v.Plan(0, new=(v.NewRow(v.Request("B", (7,)), ((4, 4),), 0,
         1),)))),
    ("published_block_holds_the_right_prefix", "a_block_is_published_under_other_tokens",
     lambda: publish(started(), 1, v.BlockKey(None, (1, 3)))),
    ("published_block_is_of_the_same_adapter_salt_and_items",
     "a_block_is_published_under_another_salt",
     lambda: publish(started(), 1, v.BlockKey(None, (1, 2), cache_salt="x"))),
    ("attended_slot_was_loaded", "a_block_that_failed_to_load_is_read",
     lambda: loaded_in_part().execute(v.Plan(1, new=(v.NewRow(v.Request("B", (1, 2, 9)), ((1,
         3),), 2,
         1),)))),
    ("published_block_was_loaded", "a_block_that_failed_to_load_is_published",
     lambda: publish(loaded_in_part(), 1, FIRST)),
    ("published_block_holds_the_right_prefix", "a_key_after_the_first_block_has_a_salt",
     lambda: try_key(2, v.BlockKey(FIRST, (3, 4)), v.BlockKey(FIRST, (3, 4), cache_salt="x"))),
    ("published_block_holds_the_right_prefix", "a_key_has_another_adapter_than_its_parent",
     lambda: try_key(2, v.BlockKey(FIRST, (3, 4)), v.BlockKey(FIRST, (3, 4), adapter="x"))),
    ("published_block_holds_the_right_prefix", "a_key_is_of_another_group",
     lambda: try_key(1, FIRST, v.BlockKey(None, (1, 2), group=1))),
    ("published_block_is_of_the_same_adapter_salt_and_items",
     "a_key_has_an_item_after_its_last_token",
     lambda: try_key(1, FIRST, v.BlockKey(None, (1, 2), items=(("cat", 2),)))),
    ("published_block_holds_the_right_prefix", "a_key_has_a_token_too_many",
     lambda: try_key(1, FIRST, v.BlockKey(None, (1, 2, 3)))),
    ("published_block_holds_the_right_prefix", "a_key_has_a_token_too_few",
     lambda: try_key(1, FIRST, v.BlockKey(None, (1,)))),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "case"), [(one, case) for one, _, case in CASES],
                         ids=[name for _, name, _ in CASES])  # fmt: skip
def test_only_the_expected_check_fails(sentence: str, case: Case) -> None:
    assert summarize(case()) == [(SENTENCES[sentence][0], sentence)]


def list_places() -> Iterator[tuple[str, int]]:
    """Yield module and line of each call that reports a finding and does not only pass one on."""
    for module in (kv, worker, counting):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("_complain"):
                        if not function.name.startswith("_complain"):
                            yield module.__name__, node.lineno


def test_each_place_that_reports_a_finding_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[tuple[str, int]] = set()
    complain = TaggedKV._complain

    def listen(self: TaggedKV, *args: Any, **more: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_name.startswith("_complain") and frame.f_back is not None:
            frame = frame.f_back
        reached.add((frame.f_globals["__name__"], frame.f_lineno))
        complain(self, *args, **more)

    monkeypatch.setattr(TaggedKV, "_complain", listen)
    for _, _, case in CASES:
        case()
    assert set(list_places()) - reached == set()


def test_each_slot_check_has_a_case_for_reading_and_for_publishing() -> None:
    """Their names are made of two halves, so no line of code belongs to one of them alone."""
    both = {name for name in SENTENCES if name.startswith(("attended_slot_", "published_block_"))}
    assert both <= {sentence for sentence, _, _ in CASES}
    assert len(both) == 2 * 6


# Helpers of the checks.


def test_a_prefix_name_is_the_same_after_the_memo_of_keys_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_names, "MEMO_SIZE_MAX", 2)
    known = prefix_names.PrefixNames(2)
    keys = [v.BlockKey(v.BlockKey(None, (1, 2)), (3, token)) for token in range(6)]
    before = [list(known.of_key(key)) for key in keys]
    assert [known.of_key(key) for key in keys] == before
    assert len({tuple(one) for one in before}) == len(keys)


def test_only_the_length_of_tables_that_are_in_no_plan_is_compared() -> None:
    worker = started()
    assert worker.check_view(show_state(worker, block_tables=((1, 2, 4),)), ()) == []


def test_every_wrong_request_of_a_state_is_reported() -> None:
    worker = started()
    wrong = show_state(worker, num_computed_tokens=6)
    stranger = replace(wrong.requests[0], request_id="0")
    findings = worker.check_view(replace(wrong, requests=(stranger, *wrong.requests)))
    assert [found.sentence for found in findings] == ["running_request_is_known", REBUILT]


def test_a_block_need_not_stay_published() -> None:
    worker = started()
    assert publish(worker, 1, FIRST) == []
    assert worker.check_published(EMPTY) == []


def test_the_same_tokens_are_equal_back_to_the_first_one() -> None:
    """The comparison tells other tokens from equal tokens with another adapter, salt or item."""
    known = prefix_names.PrefixNames(2)

    def name(*tokens: int, adapter: str | None = None) -> int:
        chain: list[int] = []
        known.extend(chain, known.root(adapter, None), tokens, {}, 0)
        return chain[-1]

    assert known.same_tokens(name(1, 2, 3), name(1, 2, 3, adapter="x"))
    assert known.same_tokens(name(4), name(4, adapter="x"))
    for left, right in (((9, 3), (8, 3)), ((2, 3), (1, 2, 3)), ((2, 3), (0, 2, 3))):
        assert not known.same_tokens(name(*left), name(*right))
        assert not known.same_tokens(name(*right), name(*left))
        assert not known.same_tokens(name(*left), name(*right, adapter="x"))


@pytest.mark.parametrize(
    ("blocks", "others"),
    [
        ((1, 2, 10), ["table_holds_the_scheduled_tokens"]),
        ((0, 1, 2), ["table_holds_the_scheduled_tokens"]),
        ((0, 1, 2, 3), []),
    ],
)
def test_block_ids_that_do_not_exist_are_left_out_of_the_table(
    blocks: tuple[int, ...], others: list[str]
) -> None:
    findings = make_worker().execute(v.Plan(0, new=(v.NewRow(A, (blocks,), 0, 5),)))
    assert [found.sentence for found in findings] == ["plan_names_real_blocks", *others]


def test_the_worker_continues_with_the_tokens_that_a_row_sends() -> None:
    """The slots that it reads were written for other tokens."""
    row = cached("A", 5, 1, all_token_ids=(9, 2, 3, 4, 5, 6))
    worker = started()
    assert [found.sentence for found in worker.execute(v.Plan(1, cached=(row,)))] == [
        "sent_tokens_are_those_of_the_worker",
        "attended_slot_holds_the_right_prefix",
    ]
    assert worker.views["A"].tokens[:6] == [9, 2, 3, 4, 5, 6]


def test_a_blockless_worker_accepts_a_reused_id_and_checks_tokens() -> None:
    counts = CountingWorker(CONFIG, len)
    new = v.NewRow(A, (), 0, 5)
    for frame in (0, 1):
        assert counts.execute(v.Plan(frame, new=(new,))) == []
        counts.commit(v.Commit(frame, counts.answer(frame)))
    row = cached("A", 5, 0, new_block_ids=(), all_token_ids=(*A.prompt_token_ids, 99))
    assert summarize(counts.execute(v.Plan(2, cached=(row,)))) == [
        ("P26", "sent_tokens_are_those_of_the_worker")
    ]


# What was in flight when a request was resumed.


def test_a_resumption_without_the_token_in_flight_is_reported_once() -> None:
    """Later rows continue from the tokens that were sent."""
    worker = started(max_frames_in_flight=3)
    assert worker.execute(v.Plan(1, cached=(cached("A", 5, 1),))) == []
    text = tuple(worker.views["A"].tokens[:6])
    assert worker.execute(v.Plan(2, preempted_req_ids=("A",))) == []
    assert "resumed_request_has_no_token_in_flight" in [
        found.sentence for found in resume(worker, text, 2)
    ]
    worker.commit(v.Commit(1, worker.answer(1)))
    worker.commit(v.Commit(9, worker.answer(9)))
    assert worker.views["A"].tokens[:6] == list(text)
    assert worker.execute(v.Plan(10, cached=(cached("A", 6, 2),))) == []


def test_a_resumption_in_flight_without_tokens_fails_two_checks() -> None:
    worker = waiting_for_its_token()
    assert worker.execute(v.Plan(2, preempted_req_ids=("A",))) == []
    row = cached("A", 0, 1, resumed=True, new_block_ids=((4, 5, 6),), num_scheduled_tokens=5)
    assert [found.sentence for found in worker.execute(v.Plan(3, cached=(row,)))][:2] == [
        "resumed_request_has_no_token_in_flight",
        "tokens_are_sent_after_a_gap",
    ]
