"""Property checks: each passes on correct steps and fails on a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from bends_support import in_answer, in_output, in_request, in_row, in_state, in_step
from play_support import (
    disabled_features,
    forks,
    kv_events,
    kv_transfer,
    pins,
    request_features,
    tiers,
    work_left,
)
from play_support.altered import alter_each
from play_support.groups import going_on, with_its_token
from play_support.play import (
    CONFIG,
    A,
    Bend,
    C,
    Play,
    after,
    before,
    changed,
    observed,
    table_of,
    with_count,
    with_key,
    with_row,
)
from play_support.scenes import (
    aborted,
    aborted_before_it_ran,
    admitted,
    admitted_together,
    ahead,
    ahead_four_deep,
    alone_and_preempted,
    answered,
    back_again,
    back_again_in_pipeline,
    blocked,
    chunked,
    chunked_by_one,
    chunks_ahead,
    chunks_in_pipeline,
    committed,
    committed_together,
    delivering_in_pipeline,
    delivering_to_the_preempted,
    drafted,
    drafted_ahead,
    drafted_and_paused,
    drafted_in_pipeline,
    embedded,
    gap,
    grammar_ready,
    hitting,
    hitting_a_copy,
    hitting_all,
    hitting_before_a_head,
    idle,
    idle_for_two,
    last_token_in_flight,
    passing_over,
    passing_over_by_priority,
    passing_over_in_pipeline,
    paused,
    pausing,
    preempted_again,
    preempting,
    preempting_ahead,
    preempting_by_priority,
    preempting_in_pipeline,
    promoted,
    promoted_already,
    publishing,
    publishing_at_the_end,
    refused,
    refused_a_plan_too_many,
    refused_for_size,
    refused_out_of_order,
    reset_done,
    reset_forced,
    reset_forced_with_one_waiting,
    reset_refused,
    rolled_back,
    rolled_back_ahead,
    running_on_in_pipeline,
    scheduled_drafts,
    sharing,
    skipping_the_cache,
    skipping_the_unready,
    starving,
    submitted,
    taking_a_row_back,
    taking_turns,
    waiting_for_its_token,
)

from blockstep.conformance.judge.checks import CHECKS_OF, PROPERTIES, check_step
from blockstep.conformance.judge.properties.history import RequestHistory
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.worker.prefix_names import PrefixNames
from blockstep.conformance.protocol.findings import FindingKind, leave_out_raised
from blockstep.spec.vocabulary import (
    EVENT_TYPES,
    NO_TRANSFERS,
    Abort,
    Ack,
    BlockKey,
    CachedRow,
    Commit,
    Drafts,
    DraftsTaken,
    FinishReason,
    Fork,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVTransfers,
    NewRow,
    OutputRow,
    Outputs,
    PauseState,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    Request,
    RequestSnapshot,
    Reset,
    RowTokens,
    Schedule,
    SetPause,
    Snapshot,
    SpecMethod,
    Stats,
    Status,
    StreamingUpdate,
    Submit,
    TransfersReported,
)

CHECKS = {sentence.sentence: sentence for entry in PROPERTIES for sentence in entry.checks}


def old_copy(step: Step) -> Step:
    """D takes the younger copy of its first block."""
    (blocks,) = [blocks for blocks in step.before.cached.values() if len(blocks) > 1]
    row = step.plan.new[0]
    assert row.block_ids[0][0] == blocks[0]
    return with_row(step, "D", block_ids=((blocks[1], *row.block_ids[0][1:]),))


def other_extras(step: Step) -> Step:
    """The key of the first block of B has the same tokens and a salt."""
    block = table_of(step, "B")[0]
    key = step.after.block_keys[block]
    assert key is not None
    return with_key(step, block, BlockKey(None, key.token_ids, cache_salt="x"))


def swapped_hit(step: Step) -> Step:
    """B takes no hit although two blocks are cached."""
    row = step.plan.new[0]
    assert row.num_computed_tokens == 4
    fresh = tuple(block for block in range(1, 9) if block not in row.block_ids[0])[:3]
    return with_row(step, "B", block_ids=(fresh,), num_computed_tokens=0, num_scheduled_tokens=5)


def reversed_frees(step: Step) -> Step:
    """The blocks of a finished request join the free queue head first."""
    kept = len(step.before.free_queue)
    queue = step.after.free_queue
    assert len(queue) > kept + 1
    return after(step, free_queue=queue[:kept] + queue[: kept - 1 : -1])


def reversed_tail(step: Step) -> Step:
    return after(step, free_queue=step.after.free_queue[::-1])


def with_rows_for_all(step: Step) -> Step:
    """A row for A, for which the plan has none."""
    row = CachedRow("A", False, ((),), None, step.old["A"].num_computed_tokens, 1, 1)
    return observed(step, cached=(row,))


def leaving_c_waiting(step: Step) -> Step:
    """C is left waiting behind A although it fits."""
    bent = observed(step, new=())
    return after(bent, waiting=("C",), running=(), free_queue=tuple(range(1, 9)))


def preempted_instead(step: Step, name: str, other: str) -> Step:
    """`other` was preempted instead of `name`."""
    bent = changed(step, name, status=Status.RUNNING)
    bent = changed(bent, other, status=Status.PREEMPTED)
    running = tuple(name if it == other else it for it in step.after.running)
    return after(bent, running=running)


def one_key_more(step: Step) -> Step:
    return after(step, block_keys=(*step.after.block_keys, None))


def losing_a_block(step: Step) -> Step:
    return after(step, free_queue=step.after.free_queue[1:])


def counting_a_query(step: Step) -> Step:
    stats = step.after.stats
    return after(step, stats=replace(stats, prefix_cache_queries=stats.prefix_cache_queries + 1))


def unpublishing(step: Step, name: str) -> Step:
    """The last published block of a request loses its key."""
    before = step.before.block_keys
    (block,) = [
        block
        for block, key in enumerate(step.after.block_keys)
        if key is not None and before[block] is None
    ]
    assert block in step.old[name].block_tables[0]
    return with_key(step, block, None)


def with_another_key(step: Step, salt: str | None, *tokens: int) -> Step:
    """The last published block of A has a key with other tokens or a salt."""
    table = table_of(step, "A")
    key = step.after.block_keys[table[2]]
    assert key is not None
    links = [each.token_ids for each in key.chain()[:2]] + [tokens or key.token_ids]
    other = None
    for index, link in enumerate(links):
        other = BlockKey(other, link, cache_salt=None if index else salt)
    return with_key(step, table[2], other)


def publishing_once_more(step: Step) -> Step:
    """The cache map lists an unverified block under a key, too."""
    key, blocks = next(iter(step.after.cached.items()))
    return after(step, cached={**step.after.cached, key: (*blocks, step.after.free_queue[0])})


def freeing_one_more(step: Step) -> Step:
    """A has freed a block that it attends to."""
    full, window = step.new["A"].block_tables
    return changed(step, "A", block_tables=(full, (0, 0, *window[2:])))


CASES: list[tuple[str, Callable[[], Play], Bend]] = [
    ("pool_keeps_its_size", admitted, lambda s: after(s, block_keys=(*s.after.block_keys, None))),
    ("pool_keeps_its_size", admitted, lambda s: after(s, ref_counts=(*s.after.ref_counts, 0))),
    ("pool_keeps_its_size", admitted, lambda s: after(s, ref_counts=s.after.ref_counts[:-1])),
    ("pool_keeps_its_size", admitted, in_state(ref_counts=())),
    ("every_block_is_free_or_held", admitted,
     lambda s: after(s, free_queue=s.after.free_queue[1:])),
    ("every_block_is_free_or_held", admitted,
     lambda s: after(s, free_queue=(*s.after.free_queue, s.after.free_queue[0]))),
    ("every_block_is_free_or_held", admitted, lambda s: with_count(s, table_of(s, "C")[0], 2)),
    ("every_block_is_free_or_held", admitted, in_request("C", block_tables=((99,),))),
    ("block_still_to_be_written_has_one_holder", chunked,
     lambda s: with_count(s, table_of(s, "A")[-1], 2)),
    ("block_still_to_be_written_is_not_published", chunked,
     lambda s: with_key(s, table_of(s, "A")[-1], BlockKey(None, (3, 4)))),
    ("cache_map_and_blocks_agree", hitting,
     lambda s: with_key(s, table_of(s, "B")[0], BlockKey(None, (6, 6)))),
    ("cache_map_and_blocks_agree", admitted, in_state(cached={BlockKey(None, (6,)): ()})),
    ("nothing_is_cached_without_caching", admitted,
     lambda s: replace(s, config=replace(s.config, enable_prefix_caching=False))),
    ("computed_full_blocks_are_published", admitted,
     lambda s: with_key(s, table_of(s, "C")[0], None)),
    ("computed_full_blocks_are_published", admitted, in_request("C", num_cached_blocks=(0,))),
    ("only_computed_blocks_are_published", admitted,
     lambda s: with_key(s, s.after.free_queue[-1], BlockKey(None, (6, 6)))),
    ("held_block_key_matches_its_tokens", admitted,
     lambda s: with_key(s, table_of(s, "C")[0], BlockKey(None, (7, 9)))),
    ("held_block_key_has_adapter_salt_and_items", hitting, other_extras),
    ("hit_is_whole_blocks_and_leaves_a_token", hitting, in_row("B", num_computed_tokens=3)),
    ("hit_is_whole_blocks_and_leaves_a_token", skipping_the_cache,
     in_row("D", num_computed_tokens=4)),
    ("hit_is_the_longest_possible", hitting, swapped_hit),
    ("hit_takes_the_oldest_copy", hitting_a_copy, old_copy),
    ("rejected_event_changes_nothing", refused, in_state(stats=Stats(prefix_cache_queries=5))),
    ("request_without_a_row_stays_the_same", blocked, in_request("B", num_cached_tokens=2)),
    ("request_without_a_row_stays_the_same", blocked, in_state(requests=())),
    ("request_without_a_row_stays_the_same", skipping_the_unready,
     in_request("A", status=Status.WAITING)),
    ("empty_plan_changes_nothing", idle, in_state(stats=Stats(prefix_cache_queries=5))),
    ("row_gains_exactly_the_blocks_it_needs", admitted,
     lambda s: with_row(s, "C", block_ids=((*table_of(s, "C"), 8),))),
    ("row_gains_exactly_the_blocks_it_needs", admitted, in_row("A", new_block_ids=((8,),))),
    ("admission_leaves_room_for_the_whole_prompt", chunked,
     lambda s: before(s, free_queue=s.before.free_queue[:2])),
    ("plan_stays_within_token_budget", admitted,
     lambda s: replace(s, config=replace(s.config, max_num_batched_tokens=2))),
    ("running_stays_within_max_num_seqs", admitted,
     lambda s: replace(s, config=replace(s.config, max_num_seqs=1))),
    ("row_stays_within_its_caps", admitted,
     lambda s: replace(s, config=replace(s.config, long_prefill_token_threshold=1))),
    ("row_stays_within_its_caps", admitted, in_row("A", num_scheduled_tokens=0)),
    ("row_stays_within_max_model_len", admitted,
     lambda s: replace(s, config=replace(s.config, max_model_len=6))),
    ("paused_scheduler_admits_no_request", paused, in_answer(new=(NewRow(A, ((4, 5, 6),), 0, 5),))),
    ("prompt_is_not_cut_without_chunking", chunked,
     lambda s: replace(s, config=replace(s.config, enable_chunked_prefill=False))),
    ("counters_stay_within_what_is_known", rolled_back,
     lambda s: changed(s, "A", num_computed_tokens=s.new["A"].num_computed_tokens + 1)),
    ("counters_stay_within_what_is_known", admitted, in_request("A", num_output_placeholders=1)),
    ("counters_stay_within_what_is_known", admitted, in_request("A", request_id="nobody")),
    ("only_running_requests_hold_anything", blocked, in_request("B", num_computed_tokens=2)),
    ("row_advances_by_what_it_runs", admitted, in_request("C", num_computed_tokens=1)),
    ("row_advances_by_what_it_runs", admitted, in_row("A", num_computed_tokens=4)),
    ("preempted_request_starts_again", preempting, in_request("B", num_preemptions=0)),
    ("submitted_request_starts_from_nothing", submitted, in_request("A", status="?")),
    ("submitted_request_starts_from_nothing", submitted, in_state(requests=())),
    ("accepted_request_fits_an_empty_pool", submitted,
     lambda s: replace(s, config=replace(s.config, num_blocks=3))),
    ("request_is_refused_for_its_size_only_if_it_never_fits", refused_for_size,
     lambda s: replace(s, config=replace(s.config, num_blocks=40))),
    ("rejection_names_the_problem", refused, in_step(observation=Rejected(RejectCode.BAD_DRAFTS))),
    ("stale_or_wrong_event_is_rejected", refused, in_step(observation=Ack())),
    ("stale_or_wrong_event_is_rejected", committed, in_step(event=Commit(77, ()))),
    ("delivered_rows_are_those_that_sampled", committed, in_step(observation=Outputs())),
    ("delivered_tokens_are_the_sampled_ones_until_the_stop", committed,
     in_output(new_token_ids=(1, 2))),
    ("finish_reason_is_the_one_that_holds", committed, in_output(finish_reason=None)),
    ("finish_reason_is_the_one_that_holds", rolled_back,
     in_output(finish_reason=FinishReason.STOP)),
    ("finished_requests_leave_the_state", committed, in_state(requests=())),
    ("outputs_in_the_state_are_those_delivered", committed, in_request("C", output_token_ids=(1,))),
    ("sampling_leaves_one_token_to_compute", rolled_back,
     lambda s: changed(s, "A", num_computed_tokens=s.old["A"].num_computed_tokens)),
    ("commit_changes_only_outputs_and_computed_tokens", committed,
     in_request("C", num_preemptions=1)),
    ("running_request_gets_all_it_can", admitted, in_answer(cached=())),
    ("tokens_of_a_preempted_row_are_given_back", taking_a_row_back,
     lambda s: observed(s, cached=s.plan.cached[:1])),
    ("head_of_the_queue_is_admitted_when_it_fits", blocked, in_state(free_queue=(1, 2, 3, 4))),
    ("every_request_is_in_one_queue", submitted, in_state(waiting=("A",))),
    ("new_request_joins_the_end_of_its_queue", submitted,
     lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("admissions_follow_the_policy", admitted,
     lambda s: before(s, waiting=("A", *s.before.waiting))),
    ("queues_keep_their_order", preempting, in_state(waiting=())),
    ("queues_keep_their_order", reset_forced, lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("running_list_keeps_its_order", committed_together,
     lambda s: after(s, running=s.after.running[::-1])),
    ("running_list_keeps_its_order", admitted, lambda s: after(s, running=s.after.running[::-1])),
    ("running_list_keeps_its_order", admitted_together,
     lambda s: after(s, running=s.after.running[::-1])),
    ("preempted_fcfs_are_the_youngest", preempting, lambda s: preempted_instead(s, "B", "A")),
    ("preempted_priority_never_outrank_survivors", preempting_by_priority,
     lambda s: preempted_instead(s, "C", "A")),
    ("no_admission_after_a_preemption", admitted, in_request("A", status=Status.PREEMPTED)),
    ("new_blocks_come_from_the_head_of_the_free_queue", admitted,
     lambda s: with_row(s, "C", block_ids=((s.before.free_queue[-1],),))),
    ("new_blocks_come_from_the_head_of_the_free_queue", admitted, reversed_tail),
    ("preempted_tail_is_evicted_first", preempting, reversed_tail),
    ("freed_tail_is_evicted_first", committed, reversed_frees),
    ("freed_tail_is_evicted_first", aborted, in_state(free_queue=())),
    ("freed_tail_is_evicted_first", reset_forced, reversed_frees),
    ("event_changes_only_what_it_is_about", pausing, in_state(next_frame_id=9)),
    ("event_leaves_other_requests_alone", aborted, in_request("A", num_preemptions=3)),
    ("event_changes_only_what_it_is_about", drafted, in_request("A", num_preemptions=3)),
    ("event_leaves_other_requests_alone", drafted, in_state(requests=())),
    ("signal_is_remembered", grammar_ready, in_request("A", grammar_ready=False)),
    ("signal_is_remembered", pausing, in_state(pause_state=PauseState.PAUSED_NEW)),
    ("abort_finishes_exactly_the_named_requests", aborted, in_answer(request_ids=("C", "C"))),
    ("counters_grow_by_what_happened", hitting, in_state(stats=Stats())),
    ("counters_grow_by_what_happened", rolled_back, lambda s: after(s, stats=s.before.stats)),
    ("counters_grow_by_what_happened", reset_forced, lambda s: after(s, stats=s.before.stats)),
    ("first_hit_is_remembered", hitting, in_request("B", num_cached_tokens=0)),
    ("reported_cached_tokens_are_of_the_first_hit", committed, in_output(num_cached_tokens=2)),
    ("reported_external_tokens_are_those_loaded", committed,
     in_output(num_external_tokens=2)),
    ("dispatched_drafts_are_the_last_proposed_ones", scheduled_drafts,
     in_row("A", draft_token_ids=(-1, -1, -1))),
    ("attached_drafts_are_the_last_proposed_ones", drafted, in_request("A", spec_token_ids=(1,))),
    ("attached_drafts_are_the_last_proposed_ones", scheduled_drafts,
     lambda s: changed(s, "A", spec_token_ids=s.old["A"].spec_token_ids)),
    ("drafts_are_taken_only_for_the_next_position", drafted, in_answer(request_ids=())),
    ("reset_empties_the_cache", reset_done, lambda s: with_key(s, 1, BlockKey(None, (1, 2)))),
    ("reset_succeeds_unless_blocks_are_held", reset_refused, in_answer(success=True)),
    ("forced_reset_preempts_all_running_requests", reset_forced, in_state(running=("A",))),
    ("forced_reset_preempts_all_running_requests", reset_refused, in_state(running=())),
    ("refused_reset_changes_nothing", reset_refused, in_state(cached={})),
    ("plan_names_the_finished", hitting, in_answer(finished_req_ids=())),
    ("finished_ids_wait_for_the_next_plan", aborted, in_state(finished_req_ids=())),
    ("plan_names_the_preempted", preempting, in_answer(preempted_req_ids=())),
    ("new_row_carries_the_request_as_submitted", admitted,
     in_row("C", request=replace(C, max_tokens=99))),
    # Progress.
    ("preemption_leaves_a_running_request", preempting, in_state(running=())),
    ("no_repeated_preemption_without_progress", preempted_again, in_state(running=("C",))),
    # Several frames in flight without placeholders.
    ("counters_stay_within_what_is_known", waiting_for_its_token,
     in_request("A", num_output_placeholders=1)),
    ("counters_stay_within_what_is_known", waiting_for_its_token,
     in_request("A", num_computed_tokens=4)),
    ("sampling_leaves_one_token_to_compute", chunks_in_pipeline,
     in_request("A", num_computed_tokens=2)),
    ("sampling_leaves_one_token_to_compute", running_on_in_pipeline,
     in_request("A", num_computed_tokens=7)),
    ("dispatched_drafts_are_the_last_proposed_ones", drafted_in_pipeline,
     in_row("A", draft_token_ids=(7, 7, 7))),
    ("event_changes_only_what_it_is_about", running_on_in_pipeline,
     lambda s: with_key(s, table_of(s, "A")[2], BlockKey(None, (5, 48)))),
    ("head_of_the_queue_is_admitted_when_it_fits", passing_over_in_pipeline, leaving_c_waiting),
    ("queues_keep_their_order", passing_over_in_pipeline,
     in_state(waiting=("A",), skipped_waiting=())),
    ("queues_keep_their_order", back_again_in_pipeline, in_state(skipped_waiting=("A",))),
    ("preempted_request_starts_again", preempting_in_pipeline,
     in_request("B", num_output_placeholders=1)),
    ("commit_changes_only_outputs_and_computed_tokens", delivering_in_pipeline,
     in_request("B", num_computed_tokens=3)),
    # Embeddings.
    ("held_block_key_has_adapter_salt_and_items", embedded,
     lambda s: with_key(s, table_of(s, "B")[1], s.before.block_keys[table_of(s, "A")[1]])),
    # Several frames in flight, with placeholders.
    ("counters_stay_within_what_is_known", ahead, in_request("A", num_output_placeholders=2)),
    ("counters_stay_within_what_is_known", ahead_four_deep, in_request("A", num_computed_tokens=7)),
    ("counters_stay_within_what_is_known", delivering_to_the_preempted,
     in_request("B", num_output_placeholders=0)),
    ("running_request_gets_all_it_can", ahead, in_answer(cached=())),
    ("row_advances_by_what_it_runs", ahead, in_request("A", is_prefill_chunk=True)),
    ("row_advances_by_what_it_runs", drafted_ahead, in_request("A", spec_token_ids=())),
    ("preempted_request_starts_again", preempting_ahead,
     in_request("B", num_output_placeholders=0)),
    ("no_row_after_the_last_token", last_token_in_flight, with_rows_for_all),
    ("head_of_the_queue_is_admitted_when_it_fits", passing_over, leaving_c_waiting),
    ("admissions_follow_the_policy", passing_over,
     lambda s: before(s, waiting=("B", *s.before.waiting), requests=(*s.before.requests,
         RequestSnapshot("B", Status.WAITING)))),
    ("queues_keep_their_order", passing_over, in_state(waiting=("A",), skipped_waiting=())),
    ("queues_keep_their_order", passing_over_by_priority,
     in_state(waiting=("A",), skipped_waiting=())),
    ("queues_keep_their_order", back_again, in_state(skipped_waiting=("A",))),
    ("request_without_a_row_stays_the_same", gap, in_request("A", num_preemptions=1)),
    ("attached_drafts_are_the_last_proposed_ones", gap, in_request("A", spec_token_ids=(-1, -1))),
    ("attached_drafts_are_the_last_proposed_ones", drafted_ahead,
     in_request("A", spec_token_ids=(-1,))),
    ("dispatched_drafts_are_the_last_proposed_ones", drafted_ahead,
     in_row("A", draft_token_ids=(-1,))),
    ("dispatched_drafts_are_the_last_proposed_ones", drafted_ahead,
     in_row("A", draft_token_ids=(7, 30))),
    ("verified_full_blocks_are_published", publishing, lambda s: unpublishing(s, "A")),
    ("verified_full_blocks_are_published", publishing_at_the_end, lambda s: unpublishing(s, "A")),
    ("verified_full_blocks_are_published", publishing, in_request("A", num_cached_blocks=(2,))),
    ("only_verified_blocks_are_published", answered,
     lambda s: with_key(s, table_of(s, "A")[2], BlockKey(None, (5, 48)))),
    ("only_verified_blocks_are_published", answered,
     lambda s: with_key(s, table_of(s, "A")[0], None)),
    ("only_verified_blocks_are_published", publishing, publishing_once_more),
    ("only_verified_blocks_are_published", delivering_to_the_preempted,
     lambda s: with_key(s, s.after.free_queue[0], BlockKey(None, (11, 12)))),
    ("held_block_key_matches_its_tokens", publishing,
     lambda s: with_another_key(s, None, 5, 49)),
    ("held_block_key_has_adapter_salt_and_items", publishing,
     lambda s: with_another_key(s, "x")),
    ("sampling_leaves_one_token_to_compute", answered, in_request("A", num_computed_tokens=5)),
    ("sampling_leaves_one_token_to_compute", rolled_back_ahead,
     lambda s: changed(s, "A", num_computed_tokens=s.old["A"].num_computed_tokens)),
    ("sampling_leaves_one_token_to_compute", chunks_ahead, in_request("A", num_computed_tokens=2)),
    ("commit_changes_only_outputs_and_computed_tokens", chunks_ahead,
     in_request("A", num_output_placeholders=1)),
    ("commit_changes_only_outputs_and_computed_tokens", rolled_back_ahead,
     in_request("A", spec_token_ids=())),
    ("commit_changes_only_outputs_and_computed_tokens", delivering_to_the_preempted,
     in_request("B", num_computed_tokens=3)),
    ("event_changes_only_what_it_is_about", answered, in_state(prev_scheduled_req_ids=())),
    ("counters_grow_by_what_happened", rolled_back_ahead, lambda s: after(s, stats=s.before.stats)),
    ("stale_or_wrong_event_is_rejected", answered,
     in_step(event=Commit(2, (RowTokens("A", (48,)),)))),
    ("stale_or_wrong_event_is_rejected", drafted_ahead,
     in_step(event=Drafts(()), observation=DraftsTaken())),
    ("stale_or_wrong_event_is_rejected", rolled_back_ahead,
     in_step(event=Commit(1, (RowTokens("A", (1, 2, 3, 4)),)))),
    ("rejection_names_the_problem", refused_out_of_order,
     in_step(observation=Rejected(RejectCode.UNKNOWN_FRAME))),
    # Findings of one check.
    *(
        (
            "hit_is_whole_blocks_and_leaves_a_token",
            scene,
            lambda s: with_row(s, "B", num_computed_tokens=4),
        )
        for scene in (hitting_all, hitting_before_a_head)
    ),
    ("prompt_is_not_cut_without_chunking", chunked_by_one,
     lambda s: replace(s, config=replace(s.config, enable_chunked_prefill=False))),
    ("counters_stay_within_what_is_known", chunked, in_request("A", num_cached_blocks=(2,))),
    ("admission_leaves_room_for_the_whole_prompt", hitting,
     lambda s: before(s, free_queue=table_of(s, "B")[:2])),
    ("empty_plan_changes_nothing", idle_for_two,
     lambda s: after(s, waiting=s.after.waiting[::-1])),
    ("request_without_a_row_stays_the_same", promoted, in_request("A", num_preemptions=1)),
    ("request_without_a_row_stays_the_same", promoted_already,
     in_request("A", status=Status.RUNNING)),
    ("request_without_a_row_stays_the_same", drafted_and_paused,
     in_request("A", spec_token_ids=())),
    ("request_without_a_row_stays_the_same", blocked,
     lambda s: after(s, requests=(*s.after.requests, RequestSnapshot("Z", Status.WAITING)))),
    ("row_advances_by_what_it_runs", admitted,
     in_row("A", num_computed_tokens=4, num_scheduled_tokens=2)),
    ("plan_names_the_finished", hitting, in_state(finished_req_ids=("A",))),
    ("cache_map_and_blocks_agree", admitted,
     lambda s: after(s, cached={**s.after.cached, BlockKey(None, (6,)): ()})),
    ("cache_map_and_blocks_agree", admitted,
     lambda s: after(s, cached={key: at * 2 for key, at in s.after.cached.items()})),
    ("abort_finishes_exactly_the_named_requests", aborted,
     lambda s: after(s, requests=s.before.requests)),
    ("forced_reset_preempts_all_running_requests", reset_forced_with_one_waiting,
     in_request("C", num_cached_tokens=3)),
    ("counters_stay_within_what_is_known", admitted, in_request("A", num_cached_blocks=(9,))),
    ("counters_stay_within_what_is_known", admitted, in_request("A", num_cached_blocks=(-1,))),
    ("counters_stay_within_what_is_known", admitted, in_request("A", block_tables=((),))),
    ("counters_stay_within_what_is_known", ahead, in_request("A", num_computed_tokens=6)),
    ("counters_stay_within_what_is_known", ahead, in_request("A", num_computed_tokens=8)),
    ("only_running_requests_hold_anything", preempting, in_request("B", num_cached_blocks=(1,))),
    ("only_running_requests_hold_anything", preempting, in_request("B", block_tables=((5,),))),
    # Events of each kind.
    ("pool_keeps_its_size", committed, one_key_more),
    ("pool_keeps_its_size", reset_done, one_key_more),
    ("every_request_is_in_one_queue", committed, lambda s: after(s, running=s.before.running)),
    ("row_advances_by_what_it_runs", chunked, in_request("A", output_token_ids=(1,))),
    ("row_advances_by_what_it_runs", admitted, in_request("A", grammar_ready=True)),
    ("row_advances_by_what_it_runs", preempted_again, in_request("A", num_cached_blocks=(1,))),
    ("event_leaves_other_requests_alone", drafted, in_state(requests=())),
    ("event_leaves_other_requests_alone", grammar_ready,
     lambda s: after(s, requests=s.after.requests * 2)),
    ("pool_keeps_its_size", aborted, one_key_more),
    ("every_block_is_free_or_held", committed, losing_a_block),
    ("every_block_is_free_or_held", aborted, losing_a_block),
    ("every_block_is_free_or_held", reset_done, losing_a_block),
    ("block_still_to_be_written_has_one_holder", rolled_back,
     lambda s: with_count(s, table_of(s, "A")[-1], 2)),
    ("block_still_to_be_written_is_not_published", rolled_back,
     lambda s: with_key(s, table_of(s, "A")[-1], BlockKey(None, (3, 4)))),
    ("cache_map_and_blocks_agree", publishing, in_state(cached={})),
    ("cache_map_and_blocks_agree", aborted, in_state(cached={})),
    ("cache_map_and_blocks_agree", reset_refused, in_state(cached={})),
    ("counters_stay_within_what_is_known", aborted, in_request("A", num_output_placeholders=1)),
    ("counters_stay_within_what_is_known", reset_forced,
     in_request("A", num_output_placeholders=1)),
    ("only_running_requests_hold_anything", delivering_to_the_preempted,
     in_request("B", spec_token_ids=(1,))),
    ("only_running_requests_hold_anything", aborted_before_it_ran,
     in_request("A", num_computed_tokens=1)),
    ("only_running_requests_hold_anything", reset_forced, in_request("A", spec_token_ids=(1,))),
    ("preempted_request_starts_again", reset_forced, in_request("A", num_preemptions=0)),
    ("every_request_is_in_one_queue", admitted, in_state(waiting=("C",))),
    ("every_request_is_in_one_queue", aborted, in_state(running=())),
    ("every_request_is_in_one_queue", reset_forced, in_state(waiting=())),
    ("stale_or_wrong_event_is_rejected", refused_a_plan_too_many, in_step(observation=Plan(3))),
    ("stale_or_wrong_event_is_rejected", aborted,
     in_step(event=Abort("C"))),  # type: ignore[arg-type]
    ("stale_or_wrong_event_is_rejected", grammar_ready, in_step(event=GrammarReady("nobody"))),
    ("stale_or_wrong_event_is_rejected", grammar_ready, in_step(event=GrammarReady("C"))),
    ("stale_or_wrong_event_is_rejected", pausing,
     in_step(event=SetPause("?"))),  # type: ignore[arg-type]
    ("stale_or_wrong_event_is_rejected", reset_done,
     in_step(event=Reset(3))),  # type: ignore[arg-type]
    ("event_leaves_other_requests_alone", submitted, in_request("C", num_preemptions=1)),
    ("event_leaves_other_requests_alone", grammar_ready, in_request("C", num_preemptions=1)),
    ("event_changes_only_what_it_is_about", grammar_ready, in_request("A", num_preemptions=1)),
    *(
        ("counters_grow_by_what_happened", scene, counting_a_query)
        for scene in (submitted, drafted, aborted, grammar_ready, pausing)
    ),
    ("attached_drafts_are_the_last_proposed_ones", rolled_back,
     in_request("A", spec_token_ids=(1,))),
    ("finished_ids_wait_for_the_next_plan", committed, in_state(finished_req_ids=())),
    ("attended_blocks_are_held", going_on, freeing_one_more),
    ("attended_blocks_are_held", with_its_token, freeing_one_more),
    ("row_has_freed_skipped_blocks", going_on,
     lambda s: changed(s, "A", block_tables=s.old["A"].block_tables)),
    *request_features.EACH_KIND,
    *kv_events.EACH_KIND,
    *kv_transfer.EACH_KIND,
    *pins.EACH_KIND,
    *forks.EACH_KIND,
    *disabled_features.EACH_KIND,
]  # fmt: skip


@cache
def stage(scene: Callable[[], Play]) -> Play:
    """Return a play of a scene, whose last step many cases change."""
    return scene()


@pytest.mark.parametrize(
    ("sentence", "scene", "bend"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_a_wrong_step_fails_its_check(sentence: str, scene: Callable[[], Play], bend: Bend) -> None:
    play = stage(scene)
    judge = CHECKS[sentence]
    if type(play.step.event) in judge.kinds and not isinstance(play.step.observation, Rejected):
        assert judge(play.step, play.history) == []
    wrong = bend(play.step)
    findings = judge(wrong, play.history)
    assert findings
    assert {(each.property_id, each.sentence) for each in findings} == {
        (judge.property_id, sentence)
    }
    assert sentence in {each.sentence for each in check_step(wrong, play.history)}


FRAMES = ("frames_in_flight", "next_frame_id", "prev_scheduled_req_ids")
POOL = ("ref_counts", "free_queue", "block_keys", "cached")
QUEUES = ("waiting", "skipped_waiting", "running")
UNCHANGED: list[tuple[Callable[[], Play], tuple[str, ...]]] = [
    (submitted, ("pause_state", "encoder", "running", *POOL, *FRAMES, "finished_req_ids")),
    (drafted, ("pause_state", "encoder", *QUEUES, *POOL, *FRAMES, "finished_req_ids")),
    (grammar_ready, ("pause_state", "encoder", *QUEUES, *POOL, *FRAMES, "finished_req_ids")),
    (pausing, ("encoder", *QUEUES, *POOL, *FRAMES, "finished_req_ids", "requests")),
    (admitted, ("pause_state",)),
    (committed, ("pause_state", "block_keys", "cached", "next_frame_id", "prev_scheduled_req_ids")),
    (publishing, ("pause_state", "next_frame_id", "prev_scheduled_req_ids")),
    (aborted, ("pause_state", "block_keys", "cached", *FRAMES)),
    (reset_forced, ("pause_state", "frames_in_flight", "next_frame_id", "finished_req_ids")),
    (
        request_features.ENCODER_RESET,
        ("pause_state", *QUEUES, *POOL, *FRAMES, "finished_req_ids", "requests"),
    ),
    (
        request_features.OFFERED,
        ("pause_state", "encoder", *QUEUES, *POOL, *FRAMES, "finished_req_ids", "requests"),
    ),
    (
        kv_transfer.offered,
        ("pause_state", "encoder", *QUEUES, *POOL, *FRAMES, "finished_req_ids", "requests"),
    ),
    (kv_transfer.received, ("pause_state", "block_keys", "cached", *FRAMES)),
    *[
        (play, ("pause_state", "encoder", *QUEUES, *POOL, *FRAMES, "finished_req_ids", "requests"))
        for play in (pins.clocked, pins.estimated_anew)
    ],
    (
        forks.forked,
        (
            *("pause_state", "encoder", "running", "skipped_waiting", "free_queue", *FRAMES),
            "finished_req_ids",
        ),
    ),
]
"""Scenes with an event of each kind, and the fields that this event may not change."""


@pytest.mark.parametrize(
    ("scene", "names"), UNCHANGED, ids=[scene.__name__ for scene, _ in UNCHANGED]
)
def test_an_event_changes_only_what_it_is_about(
    scene: Callable[[], Play], names: tuple[str, ...]
) -> None:
    """The check fails for these fields only; other checks cover the rest."""
    play, judge = stage(scene), CHECKS["event_changes_only_what_it_is_about"]
    for owner, name, state in alter_each(play.step.after):
        if owner is Snapshot and state != play.step.after:
            accused = bool(judge(replace(play.step, after=state), play.history))
            assert accused is (name in names), name


UNCHECKED = {"prompt_token_ids", "num_streaming_updates", "grammar_state", "reasoning_ended"}
"""Fields of sessions and grammars that no property check reads."""
ONLY_COMPARED = {"running", "frames_in_flight", "next_frame_id", "prev_scheduled_req_ids"}
"""The order of the running list and the numbers of plans: a difference from the specification
names itself."""


@pytest.mark.parametrize("scene", [scene for scene, _ in UNCHANGED] + [preempting, refused, gap])
def test_each_changed_field_of_a_state_fails_some_check(scene: Callable[[], Play]) -> None:
    """Each field of a state and of its requests is changed alone."""
    play = stage(scene)
    for owner, name, state in alter_each(play.step.after):
        is_free = name == "has_work" and state.frames_in_flight  # a commit wakes the loop up
        if state != play.step.after and name not in UNCHECKED | ONLY_COMPARED and not is_free:
            step = replace(play.step, after=state)
            assert check_step(step, play.history), (owner.__name__, name)


def test_every_check_has_a_wrong_step_of_each_kind_of_event() -> None:
    tried: set[tuple[str, type]] = {
        ("event_changes_only_what_it_is_about", type(stage(scene).step.event))
        for scene, _ in UNCHANGED
    }
    for sentence, scene, bend in CASES:
        step = bend(stage(scene).step)
        is_refused = isinstance(step.observation, Rejected)
        tried.add((sentence, Rejected if is_refused else type(step.event)))
    alone = request_features.ALONE + kv_transfer.ALONE + pins.ALONE + forks.ALONE
    alone += tiers.ALONE + disabled_features.ALONE
    tried |= {(name, type(stage(scene).step.event)) for name, scene, _, _ in alone}
    tried |= {(name, kind) for name in work_left.NAMES for kind in EVENT_TYPES}  # test_work.py
    required = {(name, kind) for name, each in CHECKS.items() for kind in each.kinds}
    unchecked = (StreamingUpdate, GrammarFailed, GrammarBitmask)
    assert tried >= {(name, kind) for name, kind in required if kind not in unchecked}
    assert {name for name, _ in tried} == CHECKS.keys()


def test_a_lone_request_with_tokens_in_flight_may_preempt_itself() -> None:
    play = alone_and_preempted()
    judge = CHECKS["preemption_leaves_a_running_request"]
    assert play.step.plan.preempted_req_ids == ("A",)
    assert play.step.after.running == ()
    assert judge(play.step, play.history) == []
    play.history.promised.clear()
    assert judge(play.step, play.history)


def test_repeated_preemption_needs_progress_in_between() -> None:
    """Two equal requests that preempt each other by turns are found, unless there was progress."""
    play = preempted_again()
    judge, history = CHECKS["no_repeated_preemption_without_progress"], play.history
    assert judge(play.step, history) == []
    history.lives["A"].admitted_in = history.lives["B"].admitted_in + 1
    assert judge(play.step, history), "A was admitted after B, so it was preempted since"
    history.num_progress += 1
    assert judge(play.step, history) == []
    first = starving(5)
    assert first.step.plan.preempted_req_ids == ("B",)
    assert judge(after(first.step, running=("C",)), first.history) == []


IDLE_REPORTS = (
    TransfersReported(NO_TRANSFERS),
    TransfersReported(KVTransfers(("nobody",), ("nobody",))),
)
"""Reports that change nothing."""


@pytest.mark.parametrize("between", [None, *IDLE_REPORTS])
@pytest.mark.parametrize("depth", [1, 3])
def test_two_requests_that_preempt_each_other_by_turns_are_found(
    depth: int, between: TransfersReported | None
) -> None:
    """vLLM 0.19.1 preempts the older of two equal requests; the check finds it without a reference.

    Reports of a store between the plans do not hide it if they change nothing.
    """
    accused = 0
    for step, history, _ in taking_turns(depth, 120 if between else 60, between):
        if isinstance(step.event, Schedule):
            accused += len(CHECKS["no_repeated_preemption_without_progress"](step, history))
            assert CHECKS["preemption_leaves_a_running_request"](step, history) == []
    assert accused > 5
    assert all(each.num_preemptions > 5 for each in step.after.requests)


def test_the_end_of_a_load_is_progress_once_for_each_length_of_its_request() -> None:
    """A load that fails, or is lost by its request and repeated, is no progress."""
    play = kv_transfer.offered().do(Schedule())
    first = play.history.num_progress
    for _ in range(3):
        block = play.step.plan.kv_loads[0].block_ids[0][0]
        transfers = KVTransfers(("A",), invalid_block_ids=(block,))
        play.do(TransfersReported(transfers), Schedule())
        assert play.history.num_progress == first + 1
    play.do(TransfersReported(KVTransfers(("A",))), Schedule())
    assert play.history.num_progress == first + 1
    play.commit().do(Schedule())
    assert play.history.num_progress == first + 2, "a token was delivered"


def test_a_read_by_the_store_is_progress_when_it_ends() -> None:
    play = kv_transfer.held().do(Schedule())
    before = play.history.num_progress
    play.do(
        TransfersReported(KVTransfers(finished_sending=("B",))), TransfersReported(NO_TRANSFERS)
    )
    assert play.history.num_progress == before + 1
    play.do(TransfersReported(KVTransfers(finished_sending=("B",))), Schedule())
    assert play.history.num_progress == before + 1


def test_accepted_drafts_are_not_compared_where_only_the_worker_knows_them() -> None:
    play = rolled_back_ahead()
    wrong = replace(play.step, event=Commit(1, (RowTokens("A", (8, 30)),)))
    assert not CHECKS["stale_or_wrong_event_is_rejected"](wrong, play.history)


def test_an_aborted_request_has_no_tokens_due_after_its_commits() -> None:
    play = ahead().do(Abort(("A",))).commit().commit()
    assert play.history.promised == {"A": 2}, "the last of these is not recorded yet"
    play.commit().do(Submit(A))
    assert play.history.promised == {}


def test_properties_and_their_checks_are_in_order() -> None:
    numbers = [int(entry.id[1:]) for entry in PROPERTIES]
    assert numbers == sorted(set(numbers))
    for entry in PROPERTIES:
        assert {each.property_id for each in entry.checks} == {entry.id}
        assert all(each.explanation.strip() and each.kinds for each in entry.checks)
    assert sum(map(len, CHECKS_OF.values())) == sum(len(each.kinds) for each in CHECKS.values())


def test_an_answer_of_the_wrong_kind_is_one_finding() -> None:
    play = submitted()
    findings = check_step(replace(play.step, observation=Outputs()), play.history)
    assert [each.sentence for each in findings] == ["answer_is_of_the_kind_of_the_event"]


@pytest.mark.parametrize("fewer", [-2, -1, 1])
def test_a_wrong_number_of_blocks_is_named_first(fewer: int) -> None:
    """Checks that read ref counts or keys of blocks that are not there have no meaning."""
    play = admitted()
    counts, keys = play.step.after.ref_counts, play.step.after.block_keys
    for wrong in (
        {"ref_counts": counts[:-fewer] if fewer > 0 else (*counts, *[0] * -fewer)},
        {"block_keys": keys[:-fewer] if fewer > 0 else (*keys, *[None] * -fewer)},
        {"ref_counts": counts[1:]},
    ):
        first, *_ = check_step(after(play.step, **wrong), play.history)
        assert first.sentence == "pool_keeps_its_size"
        assert re.fullmatch(r"\d+ (ref counts|keys) for a pool of \d+ blocks, .*", first.message)


def test_a_malformed_state_is_a_finding_and_no_crash() -> None:
    play = admitted()
    findings = check_step(after(play.step, requests=()), play.history)
    assert FindingKind.HARNESS in {each.kind for each in findings}
    assert {each.kind for each in leave_out_raised(findings)} == {FindingKind.PROPERTY}


def test_a_wrong_count_of_computed_tokens_is_shown_with_both_values() -> None:
    play = admitted()
    wrong = changed(play.step, "C", num_computed_tokens=1)
    (found,) = CHECKS["row_advances_by_what_it_runs"](wrong, play.history)
    assert [(row.field, row.expected, row.seen) for row in found.differences] == [
        ("num_computed_tokens", "2", "1")
    ]


def test_an_output_row_for_no_request_is_accused() -> None:
    play = committed()
    assert isinstance(play.step.observation, Outputs)
    rows = (*play.step.observation.rows, OutputRow("nobody", (1,)))
    findings = check_step(observed(play.step, rows=rows), play.history)
    assert {"delivered_rows_are_those_that_sampled"} <= {each.sentence for each in findings}


def test_shared_blocks_stay_out_of_the_free_queue() -> None:
    play = sharing()
    assert table_of(play.step, "A")[:2] == table_of(play.step, "B")[:2]
    play.commit().do(Abort(("A",)))
    wrong = after(play.step, free_queue=(*play.step.after.free_queue, table_of(play.step, "B")[0]))
    assert CHECKS["freed_tail_is_evicted_first"](wrong, play.history)


def test_a_block_copied_for_a_victim_in_the_same_step_is_freed() -> None:
    """A is scheduled first, with a copy of the block shared with H; then B needs a block of A."""
    config = replace(
        CONFIG,
        num_blocks=5,
        block_size=4,
        policy=Policy.PRIORITY,
        enable_prefix_caching=False,
        spec_method=SpecMethod.DRAFT_MODEL,
        num_speculative_tokens=3,
        enable_forks=True,
    )
    play = Play(config).do(Submit(Request("A", (0,), max_tokens=3, priority=3)), Schedule())
    play.do(Submit(Request("B", (0,), max_tokens=2))).commit().do(Schedule()).commit()
    known = play.step.new["A"].output_token_ids
    play.do(Fork("A", "H", known[:1]), Schedule())
    assert play.step.preempted == ["A"]
    assert play.step.after.free_queue == (4,), "the copy; the other block of A is with B"


def test_the_name_of_a_block_that_a_commit_fills_has_the_new_tokens() -> None:
    names = PrefixNames(2)
    life, later = (RequestHistory(Request(name, (1, 2, 3)), names) for name in "AB")
    later.tokens.append(4)
    assert life.block_name_with((4, 5), 1, 2) == later.block_name(1)
    assert life.block_name_with((4, 5), 0, 2) == later.block_name(0)
    assert (life.num_known, len(life.chain)) == (3, 3), "it knows no more than before"
