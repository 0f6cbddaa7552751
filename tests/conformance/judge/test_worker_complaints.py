"""Voices: each place where the worker complains is, for some plan or state, the only one.

Whoever never speaks alone is not missed when it falls silent. So for every line of the worker that
complains there is a plan here, or a state, of which nothing else is said.
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
"""What is said, of what, and how it comes to that."""


def complains(sentence: str) -> Callable[[Case], Case]:
    """Add a case, of which this is said, and nothing else."""

    def add(case: Case) -> Case:
        CASES.append((sentence, case.__name__, case))
        return case

    return add


# Rows.


def next_row(computed: int, outputs: int, **fields: Any) -> list[Finding]:
    """Findings of a second row of A."""
    return started().execute(v.Plan(1, cached=(cached("A", computed, outputs, **fields),)))


@complains("remapped_request_has_a_row")
def one_that_is_resumed_is_remapped_too() -> list[Finding]:
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


@complains("dropped_position_runs_again")
def one_goes_on_behind_a_token_that_was_dropped() -> list[Finding]:
    worker = make_worker(max_frames_in_flight=3)
    worker.drops_tokens_in_flight = True
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    tokens = tuple(worker.views["A"].tokens)
    assert len(tokens) == 6
    assert worker.execute(v.Plan(1, preempted_req_ids=("A",))) == []
    return resume(worker, tokens, 1)


@complains("resumed_request_was_preempted")
def one_that_runs_is_resumed() -> list[Finding]:
    worker = started()
    return resume(worker, tuple(worker.views["A"].tokens), 1)


@complains("resumed_request_was_preempted")
def one_that_was_resumed_is_resumed_again() -> list[Finding]:
    worker = started()
    worker.reset(forced=True)
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, resumed=True, all_token_ids=tokens, num_scheduled_tokens=5)
    assert worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((1, 2, 3),)),))) == []
    return resume(worker, tokens, 1)


@complains("resumed_request_was_preempted")
def one_is_resumed_after_a_reset_that_preempted_none() -> list[Finding]:
    worker = started()
    worker.reset(forced=False)
    return resume(worker, tuple(worker.views["A"].tokens), 1)


@complains("resumed_request_has_no_token_in_flight")
def one_is_resumed_while_its_token_is_in_flight() -> list[Finding]:
    worker = waiting_for_its_token()
    assert worker.execute(v.Plan(2, preempted_req_ids=("A",))) == []
    return resume(worker, A.prompt_token_ids, 1)


@complains("preempted_request_returns_resumed")
def one_that_was_preempted_runs_on() -> list[Finding]:
    worker = started()
    assert worker.execute(v.Plan(1, preempted_req_ids=("A",))) == []
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, all_token_ids=tokens, num_scheduled_tokens=6)
    return worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((7, 8, 9),)),)))


@complains("plan_counts_the_computed_tokens_of_the_worker")
def rejected_drafts_are_taken_back_before_they_are_known() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    row = cached("A", 7, 5, num_scheduled_tokens=1)
    return worker.execute(v.Plan(3, cached=(row,)))


@complains("tokens_are_sent_after_a_gap")
def one_returns_after_a_gap_without_its_tokens() -> list[Finding]:
    worker = started()
    assert worker.execute(v.Plan(1)) == []
    return worker.execute(v.Plan(2, cached=(cached("A", 5, 1),)))


@complains("tokens_are_sent_after_a_gap")
def one_is_resumed_at_once_without_its_tokens() -> list[Finding]:
    worker = started()
    worker.reset(forced=True)
    row = cached("A", 0, 1, resumed=True, new_block_ids=((4, 5, 6),), num_scheduled_tokens=6)
    return worker.execute(v.Plan(1, cached=(row,)))


@complains("sent_tokens_are_those_of_the_worker")
def a_text_is_sent_with_its_end_in_flight() -> list[Finding]:
    worker = pipelined()
    row = cached("A", 6, 2, new_block_ids=((4,),))
    return worker.execute(
        v.Plan(2, cached=(replace(row, all_token_ids=tuple(worker.views["A"].tokens)),))
    )


@complains("plan_counts_the_outputs_of_the_worker")
def drafts_in_flight_are_not_counted() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker.execute(v.Plan(3, cached=(cached("A", 9, 3, new_block_ids=((6,),)),)))


# Drafts.


PLACEHOLDER = "placeholder_stands_for_a_draft_after_the_last_plan"


@complains(PLACEHOLDER)
def a_placeholder_is_one_too_many() -> list[Finding]:
    worker = pipelined(**{**DRAFTING, "num_speculative_tokens": 1})
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    return worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),)))


@complains(PLACEHOLDER)
def a_placeholder_comes_after_a_plan_without_its_request() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    other = v.NewRow(v.Request("B", (7,)), ((9,),), 0, 1)
    assert worker.execute(v.Plan(2, new=(other,))) == []
    row = cached("A", 6, 2, num_scheduled_tokens=2, draft_token_ids=PLACEHOLDERS[:1])
    worker.commit(v.Commit(0, worker.answer(0)))
    row = replace(row, all_token_ids=tuple(worker.views["A"].reported_token_ids))
    return worker.execute(v.Plan(3, cached=(replace(row, new_block_ids=((4,),)),)))


@complains(PLACEHOLDER)
def a_placeholder_is_for_a_draft_of_before_a_preemption() -> list[Finding]:
    worker = make_worker(max_frames_in_flight=2, async_scheduling=True, **DRAFTING)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    assert worker.views["A"].proposal
    worker.reset(forced=True)
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 0, 1, resumed=True, all_token_ids=tokens, new_block_ids=((4, 5, 6, 7),))
    row = replace(row, num_scheduled_tokens=len(tokens) + 1, draft_token_ids=PLACEHOLDERS[:1])
    return worker.execute(v.Plan(1, cached=(row,)))


@complains(PLACEHOLDER)
def a_worker_that_keeps_no_drafts_is_sent_a_placeholder() -> list[Finding]:
    row = cached("A", 5, 1, num_scheduled_tokens=2, draft_token_ids=PLACEHOLDERS[:1])
    worker = started(**DRAFTING)
    return worker.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),)))


@complains(PLACEHOLDER)
def a_placeholder_comes_after_a_chunk_that_sampled_nothing() -> list[Finding]:
    worker = make_worker(max_frames_in_flight=2, async_scheduling=True, **DRAFTING)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 2),))) == []
    row = cached("A", 2, 0, num_scheduled_tokens=4, draft_token_ids=PLACEHOLDERS[:1])
    return worker.execute(v.Plan(1, cached=(row,)))


# What there is of a KV group.

WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=3)
GROUPED: dict[str, Any] = {"groups": (v.KVGroup(v.GroupKind.FULL, 2), WINDOW)}


def in_groups(*tables: tuple[int, ...]) -> Worker:
    """A has run its prompt in a block table of each group."""
    worker = make_worker(**GROUPED)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, tables, 0, 5),))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker


@complains("attended_slot_was_written")
def a_block_is_read_that_changed_its_group_and_was_not_written_since() -> list[Finding]:
    """In block 2 the window has written its second slot, and reads the first."""
    worker = in_groups((1, 2, 3), (4, 5, 6))
    worker.execute(v.Plan(1, finished_req_ids=("A",)))
    row = v.NewRow(v.Request("B", (1, 2, 3, 4)), ((1, 7), (2, 3)), 1, 3)
    return worker.execute(v.Plan(2, new=(row,)))


def hit_in_groups(*tables: tuple[int, ...]) -> list[Finding]:
    """Findings of a hit of four tokens in these tables; at position 4 the window begins at 2."""
    row = v.NewRow(v.Request("B", (1, 2, 3, 4, 9)), tables, 4, 1)
    return in_groups((1, 2, 3), (4, 5, 6)).execute(v.Plan(1, new=(row,)))


def with_a_hint(*counts: int, **fields: Any) -> list[Finding]:
    """A and B have the block of their first two tokens in common, and none of the window."""
    rows = (v.NewRow(A, ((1, 2, 3), (4, 5, 6)), 0, 2),)
    worker = make_worker(**GROUPED)
    assert worker.execute(v.Plan(0, new=rows)) == []
    row = v.NewRow(v.Request("B", (1, 2, 9)), ((1, 7), (4, 8)), 2, 1)
    old = replace(cached("A", 2, 0, new_block_ids=((), ())), num_scheduled_tokens=3)
    return worker.execute(v.Plan(1, new=(row,), cached=(old,), num_common_prefix_blocks=counts))


def test_a_hint_may_be_less_than_it_could_be() -> None:
    assert with_a_hint(1, 0) == with_a_hint(0, 0) == with_a_hint() == []


# States.

STATES = v.KVGroup(v.GroupKind.RECURRENT, 2, mamba_cache_mode=v.MambaCacheMode.ALIGN)
WITH_STATES: dict[str, Any] = {"groups": (v.KVGroup(v.GroupKind.FULL, 2), STATES)}


def with_states(mode: v.MambaCacheMode = v.MambaCacheMode.ALIGN) -> Worker:
    """A has run four tokens, so that a state stands behind them in block 5, or in 4 and 5."""
    groups = (v.KVGroup(v.GroupKind.FULL, 2), replace(STATES, mamba_cache_mode=mode))
    worker = make_worker(groups=groups)
    states = (0, 5) if mode is v.MambaCacheMode.ALIGN else (4, 5)
    assert worker.execute(v.Plan(0, new=(v.NewRow(A, ((1, 2), states), 0, 4),))) == []
    return worker


def going_on(num_computed: int, *states: int) -> v.NewRow:
    """B begins like A; it is told that so many of its tokens are computed."""
    full = (1, 2)[: num_computed // 2] + (7, 8, 9)[: 3 - num_computed // 2]
    return v.NewRow(replace(A, request_id="B"), (full, states), num_computed, 5 - num_computed)


# What is read across.

BESIDE: dict[str, Any] = {
    "groups": (v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.CROSS_ATTENTION, 2)),
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "disable_chunked_mm_input": True,
    "is_encoder_decoder": True,
    "encoder_compute_budget": 8,
    "encoder_cache_size": 8,
}


def begins(request_id: str, identifier: str, *tables: tuple[int, ...]) -> v.Plan:
    """Plan 0 of a request with one token, whose item of three embeddings is made."""
    request = v.Request(request_id, (1,), items=(v.MultiModalItem(identifier, 0, 3),))
    inputs = (v.EncoderInputs(request_id, (0,)),)
    return v.Plan(0, new=(v.NewRow(request, tables, 0, 1),), scheduled_encoder_inputs=inputs)


def across() -> Worker:
    """A has read an owl across, from blocks 4 and 5."""
    worker = make_worker(**BESIDE)
    assert worker.execute(begins("A", "owl", (1,), (4, 5))) == []
    worker.commit(v.Commit(0, worker.answer(0)))
    return worker


def goes_on_across(worker: Worker, frame_id: int, *dropped: str) -> v.Plan:
    tokens = tuple(worker.views["A"].tokens)
    row = cached("A", 1, 1, new_block_ids=((), ()), all_token_ids=tokens)
    return v.Plan(frame_id, cached=(row,), free_encoder_mm_hashes=dropped)


@complains("attended_slot_is_of_the_same_adapter_salt_and_items")
def another_item_was_written_where_a_row_reads_across() -> list[Finding]:
    worker = across()
    plan = replace(begins("B", "cat", (2,), (4, 3)), free_encoder_mm_hashes=("owl",))
    assert worker.execute(replace(plan, frame_id=1)) == []
    worker.commit(v.Commit(1, worker.answer(1)))
    return worker.execute(goes_on_across(worker, 2, "cat"))


@complains("attended_slot_is_of_the_group_that_reads_it")
def tokens_were_written_where_a_row_reads_across() -> list[Finding]:
    worker = across()
    row = v.NewRow(v.Request("B", (1,)), ((4,), ()), 0, 1)
    assert worker.execute(v.Plan(1, new=(row,), free_encoder_mm_hashes=("owl",))) == []
    worker.commit(v.Commit(1, worker.answer(1)))
    return worker.execute(goes_on_across(worker, 2))


@complains("written_block_is_in_one_place")
def two_requests_have_one_item_in_one_block_across() -> list[Finding]:
    plans = begins("A", "owl", (1,), (4, 5)), begins("B", "owl", (2,), (4, 6))
    both = replace(
        plans[0],
        new=tuple([row for plan in plans for row in plan.new]),
        scheduled_encoder_inputs=tuple([it for p in plans for it in p.scheduled_encoder_inputs]),
    )
    return make_worker(**BESIDE).execute(both)


def test_a_row_without_its_item_lacks_it_and_reads_what_is_in_its_blocks() -> None:
    plan = replace(begins("A", "owl", (1,), (4, 5)), scheduled_encoder_inputs=())
    assert summarize(make_worker(**BESIDE).execute(plan)) == [
        ("P22", "item_that_a_row_reads_is_there"),
        ("P4", "attended_slot_was_written"),
    ]


@complains("block_of_a_state_is_zeroed_for_attention")
def a_block_of_a_state_goes_to_attention_as_it_is() -> list[Finding]:
    worker = with_states()
    worker.execute(v.Plan(1, finished_req_ids=("A",)))
    return worker.execute(v.Plan(2, new=(v.NewRow(v.Request("B", (7, 8)), ((5,), (6,)), 0, 2),)))


def test_a_state_is_found_where_it_was_left() -> None:
    """Behind a chunk; with `all` behind each block; zeroed a block is good for attention."""
    assert with_states().execute(v.Plan(1, new=(going_on(4, 0, 5, 6),))) == []
    assert with_states(v.MambaCacheMode.ALL).execute(v.Plan(1, new=(going_on(2, 4, 6, 3),))) == []
    worker = with_states()
    worker.execute(v.Plan(1, finished_req_ids=("A",)))
    row = v.NewRow(v.Request("B", (7, 8)), ((5,), (6,)), 0, 2)
    assert worker.execute(v.Plan(2, new=(row,), new_block_ids_to_zero=(5,))) == []


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_request_goes_on_from_the_state_behind_its_last_right_draft(num_right: int) -> None:
    """And the state at a block's end that right drafts passed is copied to that block."""
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
    # Block 4 ends behind six tokens; 5, 6 and 8 hold the states behind six to eight.
    key = v.BlockKey(v.BlockKey(FIRST, (3, 4)), (5, text[5]), group=1)
    assert publish(worker, 4, key) == []
    blocks = ((9,), (10,)) if num_right == 2 else ((), ())
    row = cached("A", computed, 2 + num_right, new_block_ids=blocks)
    assert worker.execute(v.Plan(2, cached=(row,))) == []


def test_a_block_of_two_groups_is_of_no_request() -> None:
    row = v.NewRow(v.Request("B", (1, 2)), ((1,), (1,)), 0, 2)
    findings = make_worker(**GROUPED).execute(v.Plan(0, new=(row,)))
    assert (
        findings[0].message
        == "block 1 is of 'B' at index 0 of group 0 and 'B' at index 0 of group 1"
    )
    assert {found.property_id for found in findings} == {"P2", "P3"}


def test_what_is_attended_to_no_more_may_be_anybodys() -> None:
    """No plan tells that A gave block 4 back: its table here names it to the end."""
    worker = in_groups((1, 2, 3), (4, 5, 6))
    new = v.NewRow(v.Request("B", (7, 8)), ((7,), (4,)), 0, 2)
    row = cached("A", 5, 1, new_block_ids=((), ()))
    assert worker.execute(v.Plan(1, new=(new,), cached=(row,))) == []
    assert worker.views["A"].tables == [[1, 2, 3], [4, 5, 6]]


# What is in a slot that is read.


def read(worker: Worker, request: v.Request, *blocks: int, computed: int) -> list[Finding]:
    """A new request is told that so many of its tokens are computed in these blocks."""
    num_new = len(request.prompt_token_ids) - computed
    return worker.execute(v.Plan(1, new=(v.NewRow(request, (blocks,), computed, num_new),)))


@complains("attended_slot_was_written_since_the_reset")
def kv_from_before_a_reset_is_read() -> list[Finding]:
    worker = started()
    worker.reset(forced=False)
    return read(worker, replace(A, request_id="B"), 1, 2, 4, computed=4)


@complains("attended_slot_holds_the_right_prefix")
def kv_of_rejected_drafts_is_read() -> list[Finding]:
    """The rejected draft was not written over: the worker is told to go on behind it."""
    first = started(**DRAFTING)
    row = cached("A", 5, 1, num_scheduled_tokens=2, draft_token_ids=first.propose("A", 1, 0))
    assert first.execute(v.Plan(1, cached=(replace(row, new_block_ids=((4,),)),))) == []
    first.commit(v.Commit(1, first.answer(1)))
    text = (*first.views["A"].tokens, 7)
    return read(first, v.Request("B", text), 1, 2, 3, 4, computed=7)


# Who writes a block.


SHARED = "written_block_is_in_one_place"


@complains(SHARED)
def two_write_one_block() -> list[Finding]:
    """Neither reads what the other writes there."""
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
    """Two prompts run in one step, with their first block in common."""
    rows = [
        v.NewRow(v.Request(name, prompt), ((1, place),), 0, len(prompt))
        for name, prompt, place in (("A", first, 2), ("B", second, 3))
    ]
    return make_worker().execute(v.Plan(0, new=tuple(rows)))


def test_two_may_write_equal_content_to_a_block_that_it_fills() -> None:
    assert run_both((1, 2, 3), (1, 2, 4)) == []
    unequal = summarize(run_both((1, 2, 3), (4, 2, 3)))
    assert unequal == [("P2", SHARED), ("P3", "attended_slot_holds_the_right_prefix")]


# What is published.


def publish(worker: Worker, block: int, key: v.BlockKey) -> list[Finding]:
    """A state in which the block can be hit under the key."""
    keys: list[v.BlockKey | None] = [None] * worker.config.num_blocks
    keys[block] = key
    return worker.check_published(replace(EMPTY, block_keys=tuple(keys)))


@complains("published_block_was_written")
def a_block_is_published_before_it_is_full() -> list[Finding]:
    worker = started()
    text = tuple(worker.views["A"].tokens)
    return publish(worker, 3, v.BlockKey(v.BlockKey(FIRST, (3, 4)), text[4:6]))


@complains("published_block_holds_the_right_prefix")
def the_second_of_two_blocks_is_published_under_another_text() -> list[Finding]:
    worker = started()
    keys = (None, FIRST, v.BlockKey(FIRST, (3, 9)), *EMPTY.block_keys[3:])
    return worker.check_published(replace(EMPTY, block_keys=keys))


@complains("published_block_was_written_since_the_reset")
def a_block_stays_published_through_a_reset() -> list[Finding]:
    worker = started()
    assert publish(worker, 1, FIRST) == []
    worker.reset(forced=False)
    return publish(worker, 1, FIRST)


@complains("published_block_holds_the_right_prefix")
def a_block_stays_published_that_is_written_again() -> list[Finding]:
    worker = started()
    assert publish(worker, 1, FIRST) == []
    other = v.NewRow(v.Request("B", (9,)), ((1,),), 0, 1)
    assert worker.execute(v.Plan(1, new=(other,), finished_req_ids=("A",))) == []
    return publish(worker, 1, FIRST)


# What a store could not load.


def loaded_in_part() -> Worker:
    """The first of two blocks that a store was to load for A did not come."""
    worker = Worker(replace(CONFIG, kv_connector=True), token_function(1, 50))
    assert worker.observe(v.Submit(A), v.Ack()) == []
    load = v.KVLoad("A", ((1, 2),), 0, 4, is_async=True)
    assert worker.observe(v.Schedule(), v.Plan(0, kv_loads=(load,))) == []
    report = v.TransfersReported(v.KVTransfers(("A",), invalid_block_ids=(1,)))
    assert worker.observe(report, v.Outputs()) == []
    return worker


# Keys that no content has, each next to one that is right.


def odd(block: int, right: v.BlockKey, wrong: v.BlockKey, request: v.Request = A) -> list[Finding]:
    worker = started(request)
    assert publish(worker, block, right) == []
    return publish(worker, block, wrong)


@complains("published_block_is_of_the_same_adapter_salt_and_items")
def a_key_has_two_items_in_one_slot() -> list[Finding]:
    request = replace(A, items=(CAT,))
    right = v.BlockKey(None, (1, 2), items=(("cat", 1),))
    return odd(1, right, v.BlockKey(None, (1, 2), items=(("dog", 1), ("cat", 1))), request)


@complains("published_block_holds_the_right_prefix")
def a_key_has_an_embedding_behind_its_last_token() -> list[Finding]:
    request = replace(A, prompt_embeds=(4, 5, 6, 7, 8))
    right = v.BlockKey(None, (1, 2), embeds=(4, 5))
    return odd(1, right, v.BlockKey(None, (1, 2), embeds=(4, 5, 6)), request)


# What a state says of a request.


def shown(worker: Worker, **fields: Any) -> v.Snapshot:
    """A state in which A runs as the worker knows it, but for `fields`."""
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


@complains("running_request_is_known")
def a_stranger_runs_in_the_state() -> list[Finding]:
    worker = started()
    return worker.check_view(shown(worker, request_id="B"))


@complains(REBUILT)
def one_that_runs_is_behind_one_that_waits() -> list[Finding]:
    worker = started()
    wrong = shown(worker, num_computed_tokens=6)
    waits = v.RequestSnapshot("0", v.Status.WAITING)
    return worker.check_view(replace(wrong, requests=(waits, *wrong.requests)))


@complains(REBUILT)
def drafts_that_are_rejected_in_flight_are_taken_back_in_the_state() -> list[Finding]:
    worker = pipelined(**DRAFTING)
    row = cached("A", 6, 2, num_scheduled_tokens=3, draft_token_ids=PLACEHOLDERS)
    assert worker.execute(v.Plan(2, cached=(replace(row, new_block_ids=((4, 5),)),))) == []
    return worker.check_view(shown(worker, num_computed_tokens=worker.views["A"].num_computed))


@complains(REBUILT)
def the_state_has_other_outputs() -> list[Finding]:
    worker = started()
    return worker.check_view(shown(worker, output_token_ids=(99,)))


@complains(REBUILT)
def the_state_of_one_that_was_preempted_has_other_outputs() -> list[Finding]:
    worker = started()
    changes = {"status": v.Status.PREEMPTED, "output_token_ids": (99,), "block_tables": ((),)}
    return worker.check_view(shown(worker, **changes))


@complains(REBUILT)
def the_state_has_other_blocks() -> list[Finding]:
    worker = started()
    return worker.check_view(shown(worker, block_tables=((1, 2, 4),)))


@complains(REBUILT)
def the_state_has_other_blocks_than_the_last_plan() -> list[Finding]:
    worker = started()
    return worker.check_view(shown(worker, block_tables=((1, 2, 4),)), {"A"})


@complains(REBUILT)
def the_state_has_a_block_more_than_all_plans() -> list[Finding]:
    worker = started()
    return worker.check_view(shown(worker, block_tables=((1, 2, 3, 4),)), ())


@complains(REBUILT)
def the_state_has_computed_more() -> list[Finding]:
    worker = started()
    return worker.check_view(shown(worker, num_computed_tokens=6))


@complains(REBUILT)
def the_state_waits_for_a_token_less() -> list[Finding]:
    worker = pipelined()
    return worker.check_view(shown(worker, num_output_placeholders=1))


# All of them.


CASES += [
    ("preempted_request_was_known", "a_stranger_is_preempted",
     lambda: started().execute(v.Plan(1, preempted_req_ids=("B",)))),
    ("preempted_request_was_known", "one_that_has_ended_is_preempted",
     lambda: started().execute(v.Plan(1, finished_req_ids=("A",), preempted_req_ids=("A",)))),
    ("remapped_request_has_a_row", "one_without_a_row_is_remapped",
     lambda: started().execute(v.Plan(1, remapped_req_ids=("A",)))),
    ("new_row_is_new", "a_known_request_is_new_again",
     lambda: started().execute(v.Plan(1, new=(v.NewRow(A, ((4, 5, 6),), 0, 5),)))),
    ("cached_row_is_known", "a_stranger_runs_on",
     lambda: started().execute(v.Plan(1, cached=(cached("B", 5, 1),)))),
    ("row_waits_for_the_token_of_its_request", "one_runs_before_its_token_is_known",
     lambda: waiting_for_its_token().execute(v.Plan(2, cached=(cached("A", 5, 1,
         all_token_ids=A.prompt_token_ids),)))),
    ("plan_counts_the_computed_tokens_of_the_worker", "one_runs_what_it_has_run",
     lambda: next_row(4, 1, num_scheduled_tokens=2)),
    ("sent_tokens_are_those_of_the_worker", "another_text_is_sent",
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
    ("plan_shows_no_blocks", "a_plan_names_blocks_after_all",
     lambda: CountingWorker(CONFIG, len).execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0,
         5),)))),
    ("drafts_are_the_last_scheduled_tokens", "a_row_has_a_draft_that_it_does_not_run",
     lambda: next_row(5, 1, draft_token_ids=(7,))),
    ("drafts_are_the_last_scheduled_tokens", "a_row_runs_past_its_text_without_a_draft",
     lambda: next_row(5, 1, num_scheduled_tokens=2, new_block_ids=((4,),))),
    (PLACEHOLDER, "a_new_row_runs_past_its_prompt",
     lambda: make_worker().execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 6),)))),
    ("attended_position_has_a_block", "a_null_block_stands_where_a_row_writes",
     lambda: make_worker(**GROUPED).execute(v.Plan(0, new=(v.NewRow(v.Request("B", (1, 2, 3)),
         ((1, 2),
         (0, 3)), 0, 2),)))),
    ("attended_position_has_a_block", "a_hit_has_a_null_block_where_it_is_attended_to",
     lambda: hit_in_groups((1, 2, 7), (0, 0, 8))),
    ("attended_slot_is_of_the_group_that_reads_it", "a_window_reads_what_the_full_group_wrote",
     lambda: hit_in_groups((1, 2, 7), (0, 2, 8))),
    ("attended_slot_was_written", "a_window_reads_a_block_that_no_group_wrote",
     lambda: hit_in_groups((1, 2, 7), (0, 9, 8))),
    ("published_block_is_of_the_group_that_reads_it",
     "a_block_can_be_found_in_another_group_than_wrote_it",
     lambda: publish(in_groups((1, 2, 3), (4, 5, 6)), 1, FIRST.in_group(1))),
    ("plan_names_real_blocks", "a_null_block_stands_where_all_is_attended_to",
     lambda: make_worker(**GROUPED).execute(v.Plan(0, new=(v.NewRow(v.Request("B", (1, 2)), ((0, 1),
         (2,)), 0, 2),)))),
    ("common_prefix_is_of_every_row", "a_hint_counts_a_block_that_only_one_row_has",
     lambda: with_a_hint(2, 0)),
    ("common_prefix_is_of_every_row", "a_hint_counts_blocks_of_a_window",
     lambda: with_a_hint(1, 1)),
    # Block 5 holds the state behind four tokens, and is read for the one behind two.
    ("attended_slot_holds_the_right_prefix", "the_state_behind_other_tokens_is_read",
     lambda: with_states().execute(v.Plan(1, new=(going_on(2, 5, 0, 6),)))),
    ("attended_slot_was_written", "a_state_that_no_chunk_ended_at_is_read",
     lambda: with_states().execute(v.Plan(1, new=(going_on(2, 4, 0, 6),)))),
    ("attended_position_has_a_block", "there_is_no_state_to_go_on_from",
     lambda: with_states().execute(v.Plan(1, new=(going_on(4, 0, 0, 6),)))),
    # KV is written before it is read, a state read before any is written.
    ("attended_slot_was_written", "a_state_is_read_in_the_very_plan_that_writes_it",
     lambda: make_worker(**WITH_STATES).execute(v.Plan(0, new=(v.NewRow(A, ((1, 2), (0, 5)), 0, 4),
         going_on(4, 0, 5, 6))))),
    ("cross_attention_table_holds_the_embeddings", "a_table_across_is_a_slot_too_short",
     lambda: make_worker(**BESIDE).execute(begins("A", "owl", (1,), (4,)))),
    ("plan_names_real_blocks", "a_null_block_stands_across",
     lambda: make_worker(**BESIDE).execute(begins("A", "owl", (1,), (4, 5, 0)))),
    ("written_block_is_in_one_place", "two_requests_leave_their_states_in_one_block",
     lambda: make_worker(**WITH_STATES).execute(v.Plan(0, new=(v.NewRow(A, ((1, 2), (0, 5)), 0, 4),
         v.NewRow(v.Request("B", (7,) * 5), ((3, 4), (0, 5)), 0, 4))))),
    ("published_block_holds_the_right_prefix", "the_state_of_another_boundary_can_be_found",
     lambda: publish(with_states(), 5, FIRST.in_group(1))),
    ("attended_slot_was_written", "a_slot_is_read_that_nobody_wrote",
     lambda: read(make_worker(), A, 1, 2, 3, computed=4)),
    ("attended_slot_holds_the_right_prefix", "another_text_is_read",
     lambda: read(started(), v.Request("B", (1, 2, 9, 4, 5)), 1, 2, 4, computed=4)),
    ("attended_slot_holds_the_right_prefix",
     "another_text_is_read_in_the_last_block_which_is_not_full",
     lambda: read(started(v.Request("A", (1, 2, 3, 4, 5, 6)), block_size=4), v.Request("B", (1, 2,
         3,
         4, 9, 6, 7)), 1, 2, computed=6)),
    ("attended_slot_was_written", "a_slot_of_the_last_block_is_read_that_nobody_wrote",
     lambda: read(started(v.Request("A", (1, 2, 3, 4)), block_size=4), v.Request("B", (1, 2, 3, 4,
         5,
         6)), 1, 2, computed=5)),
    ("attended_slot_is_of_the_same_adapter_salt_and_items", "the_kv_of_another_adapter_is_read",
     lambda: read(started(), replace(A, request_id="B", adapter="x"), 1, 2, 4, computed=4)),
    (SHARED, "two_share_a_block_in_which_they_go_on", lambda: run_both((1,), (1,))),
    (SHARED, "one_writes_what_another_reads_elsewhere",
     lambda: make_worker().execute(v.Plan(0, new=(v.NewRow(A, ((1, 2, 3),), 0, 5),
         v.NewRow(v.Request("B", (7,)), ((4, 9, 1),), 0, 1))))),
    (SHARED, "one_has_a_block_twice_that_it_writes",
     lambda: make_worker().execute(v.Plan(0, new=(v.NewRow(v.Request("B", (7,)), ((4, 4),), 0,
         1),)))),
    ("published_block_holds_the_right_prefix", "a_block_is_published_under_another_text",
     lambda: publish(started(), 1, v.BlockKey(None, (1, 3)))),
    ("published_block_is_of_the_same_adapter_salt_and_items",
     "a_block_is_published_under_another_salt",
     lambda: publish(started(), 1, v.BlockKey(None, (1, 2), cache_salt="x"))),
    ("attended_slot_was_loaded", "a_block_is_read_that_did_not_come",
     lambda: loaded_in_part().execute(v.Plan(1, new=(v.NewRow(v.Request("B", (1, 2, 9)), ((1,
         3),), 2,
         1),)))),
    ("published_block_was_loaded", "a_block_is_published_that_did_not_come",
     lambda: publish(loaded_in_part(), 1, FIRST)),
    ("published_block_holds_the_right_prefix", "a_key_has_a_salt_behind_the_first_block",
     lambda: odd(2, v.BlockKey(FIRST, (3, 4)), v.BlockKey(FIRST, (3, 4), cache_salt="x"))),
    ("published_block_holds_the_right_prefix", "a_key_has_another_adapter_than_its_parent",
     lambda: odd(2, v.BlockKey(FIRST, (3, 4)), v.BlockKey(FIRST, (3, 4), adapter="x"))),
    ("published_block_holds_the_right_prefix", "a_key_is_of_another_group",
     lambda: odd(1, FIRST, v.BlockKey(None, (1, 2), group=1))),
    ("published_block_is_of_the_same_adapter_salt_and_items",
     "a_key_has_an_item_behind_its_last_token",
     lambda: odd(1, FIRST, v.BlockKey(None, (1, 2), items=(("cat", 2),)))),
    ("published_block_holds_the_right_prefix", "a_key_has_a_token_too_many",
     lambda: odd(1, FIRST, v.BlockKey(None, (1, 2, 3)))),
    ("published_block_holds_the_right_prefix", "a_key_has_a_token_too_few",
     lambda: odd(1, FIRST, v.BlockKey(None, (1,)))),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "case"), [(one, case) for one, _, case in CASES],
                         ids=[name for _, name, _ in CASES])  # fmt: skip
def test_it_is_the_only_one_to_complain(sentence: str, case: Case) -> None:
    assert summarize(case()) == [(SENTENCES[sentence][0], sentence)]


def list_places() -> Iterator[tuple[str, int]]:
    """Module and line of each call that complains, but for those that hand a complaint on."""
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


def test_each_complaint_is_the_only_one_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_each_thing_that_a_slot_can_hold_wrongly_is_checked_of_both() -> None:
    """Their sentences are made of two halves, so no line stands for one of them."""
    both = {name for name in SENTENCES if name.startswith(("attended_slot_", "published_block_"))}
    assert both <= {sentence for sentence, _, _ in CASES}
    assert len(both) == 2 * 6


# What a voice rests on.


def test_a_name_is_the_same_when_names_of_keys_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_names, "MEMO_SIZE_MAX", 2)
    known = prefix_names.PrefixNames(2)
    keys = [v.BlockKey(v.BlockKey(None, (1, 2)), (3, token)) for token in range(6)]
    before = [list(known.of_key(key)) for key in keys]
    assert [known.of_key(key) for key in keys] == before
    assert len({tuple(one) for one in before}) == len(keys)


def test_of_tables_that_are_not_yet_in_a_plan_only_the_length_is_asked() -> None:
    worker = started()
    assert worker.check_view(shown(worker, block_tables=((1, 2, 4),)), ()) == []


def test_every_wrong_request_of_a_state_is_reported() -> None:
    worker = started()
    wrong = shown(worker, num_computed_tokens=6)
    stranger = replace(wrong.requests[0], request_id="0")
    findings = worker.check_view(replace(wrong, requests=(stranger, *wrong.requests)))
    assert [found.sentence for found in findings] == ["running_request_is_known", REBUILT]


def test_a_block_need_not_stay_published() -> None:
    worker = started()
    assert publish(worker, 1, FIRST) == []
    assert worker.check_published(EMPTY) == []


def test_tokens_are_the_same_only_to_their_first_one() -> None:
    """That tells what is wrong with a slot: what shaped its KV beside the tokens, or the text."""
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
def test_blocks_that_are_none_are_left_out(blocks: tuple[int, ...], others: list[str]) -> None:
    findings = make_worker().execute(v.Plan(0, new=(v.NewRow(A, (blocks,), 0, 5),)))
    assert [found.sentence for found in findings] == ["plan_names_real_blocks", *others]


def test_another_text_that_is_sent_is_gone_on_with() -> None:
    """So what is read for it is not what was written."""
    row = cached("A", 5, 1, all_token_ids=(9, 2, 3, 4, 5, 6))
    worker = started()
    assert [found.sentence for found in worker.execute(v.Plan(1, cached=(row,)))] == [
        "sent_tokens_are_those_of_the_worker",
        "attended_slot_holds_the_right_prefix",
    ]
    assert worker.views["A"].tokens[:6] == [9, 2, 3, 4, 5, 6]


def test_a_counting_worker_knows_a_name_that_comes_again_and_every_text() -> None:
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


def test_after_a_text_without_what_is_in_flight_the_plans_are_followed() -> None:
    """It is told once; later rows are of the text that was sent."""
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


def test_one_in_flight_may_be_resumed_without_its_tokens_and_is_accused_of_both() -> None:
    worker = waiting_for_its_token()
    assert worker.execute(v.Plan(2, preempted_req_ids=("A",))) == []
    row = cached("A", 0, 1, resumed=True, new_block_ids=((4, 5, 6),), num_scheduled_tokens=5)
    assert [found.sentence for found in worker.execute(v.Plan(3, cached=(row,)))][:2] == [
        "resumed_request_has_no_token_in_flight",
        "tokens_are_sent_after_a_gap",
    ]
