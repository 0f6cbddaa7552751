"""Headlines: what a finding says first, in the words of an engineer.

A headline is a class of defect and what is wrong: `CACHE: block 3 is cached before it is full`.
`{request}` and `{block}` are the first subjects of the finding; subjects that are not named there
follow, and then the first wrong value with the expected one, if the line has room for both.

If spec and engine differ in preempted requests, rows, their tokens, or in outputs, the first such
decision (`DECISIONS`) comes first: the other fields differ as a result. The property that it
violates comes second. The message of any other divergence, of a fault and of a failed assertion is
its headline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from blockstep.conformance.protocol.compare import ABSENT
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.findings import (
    CACHED_TOO_EARLY,
    EVICTED_TOO_EARLY,
    MUST_WAIT,
    Difference,
    Finding,
    FindingKind,
    Subjects,
    shown,
    shown_apart,
)

CHARS_MAX = 180
"""Characters of a headline, at most."""
VALUE_CHARS_MAX = 40
"""Characters of a value of the state in a headline, at most."""
NAME_CHARS_MAX = 40
"""Characters of the id of a request in a headline, at most."""

BY_MESSAGE = frozenset(FindingKind) - {FindingKind.PROPERTY, FindingKind.LIVENESS}
"""Kinds of findings whose message is their headline."""

CHECK_HEADLINES: Mapping[str, str] = {
    # P1 pool conservation
    "pool_keeps_its_size": "MEMORY: the state shows another number of blocks than the pool has",
    "every_block_is_free_or_held": (
        "MEMORY: ref count, free queue and holders of {block} disagree"
    ),
    "plan_names_real_blocks": "MEMORY: the plan gives {request} blocks that do not exist",
    "copy_names_real_blocks": "MEMORY: the plan copies blocks that do not exist",
    # P2 exclusive writing
    "block_still_to_be_written_has_one_holder": (
        "CORRUPTION: {request} will write {block}, which it does not own alone"
    ),
    "shared_block_is_not_written": (
        "CORRUPTION: {request} writes {block}, which is shared or cached"
    ),
    "written_block_is_in_one_place": "CORRUPTION: {block} is written at two places in one step",
    # P3 sound cache map
    "cache_map_and_blocks_agree": "CACHE: the prefix cache and the key of {block} disagree",
    "nothing_is_cached_without_caching": "CACHE: a block is cached with prefix caching off",
    "computed_full_blocks_are_published": "CACHE: {request} filled {block}, and it is not cached",
    "verified_full_blocks_are_published": (
        "CACHE: {request} has another number of cached blocks than its verified tokens fill"
    ),
    "held_block_key_matches_its_tokens": (
        "CACHE: {block} is cached under a key of other tokens than {request} has there"
    ),
    "full_blocks_of_a_parent_are_published": (
        "CACHE: after a fork, the full blocks of the parent are not exactly the cached ones"
    ),
    "saved_slot_holds_the_text_of_its_request": (
        "CACHE: the store saves KV of other tokens under the key of {request}"
    ),
    "drafter_reads_no_draft_of_another": (
        "CORRUPTION: the draft model of {request} reads {block} with drafts of another request"
    ),
    "attention_reads_the_slots_of_the_block_table": (
        "CORRUPTION: attention of {request} reads other slots than its block table names"
    ),
    "slot_holds_what_the_plan_writes": "CORRUPTION: a kernel wrote a wrong slot",
    "copied_block_arrives_unchanged": "CORRUPTION: a copied block holds other KV than its source",
    "token_is_written_to_its_slot": "CORRUPTION: the KV of a token is written to a wrong slot",
    "attended_slot_holds_the_right_prefix": (
        "CORRUPTION: {request} reads {block}, which holds KV of another prefix"
    ),
    "attended_slot_is_of_the_group_that_reads_it": (
        "CORRUPTION: {request} reads {block}, which another KV group wrote"
    ),
    "published_block_holds_the_right_prefix": (
        "CACHE: {block} is cached, and holds KV of another prefix"
    ),
    "published_block_is_of_the_group_that_reads_it": (
        "CACHE: {block} is cached, and another KV group wrote it"
    ),
    # P4 publish after write
    "block_still_to_be_written_is_not_published": (
        "CACHE: {block} is cached, and {request} has still to write it"
    ),
    "only_computed_blocks_are_published": "CACHE: {block} is cached before it is full",
    "only_verified_blocks_are_published": (
        "CACHE: a commit changed the key of {block}, which is not verified"
    ),
    "attended_slot_was_written": "CORRUPTION: {request} reads {block}, which was never written",
    "published_block_was_written": "CACHE: {block} is cached, and was never written completely",
    # P5 boundary valid for all groups
    "hit_is_whole_blocks_and_leaves_a_token": (
        "HIT: {request} has a prefix hit of a length that it must not have"
    ),
    "hit_is_the_longest_possible": (
        "HIT: the prefix hit of {request} is shorter than the cache allows"
    ),
    "attended_blocks_are_held": "HIT: {request} lacks a block that it still attends to",
    "branch_shares_all_common_blocks": (
        "HIT: {request} is a branch, and does not share exactly the blocks that it can"
    ),
    "hit_only_with_prefix_caching": (
        "HIT: {request} has a prefix hit although it may not read the cache"
    ),
    "draft_head_has_run_the_token_behind_a_hit": (
        "HIT: the draft head has not run the token behind the hit of {request}"
    ),
    "attended_position_has_a_block": "HIT: {request} attends to a position without a block",
    # P6 key partition
    "held_block_key_has_adapter_salt_and_items": (
        "LEAK: {block} of {request} is cached under another adapter, salt or item"
    ),
    "token_runs_with_the_adapter_of_its_request": (
        "LEAK: a token of {request} runs with another adapter"
    ),
    "attended_slot_is_of_the_same_adapter_salt_and_items": (
        "LEAK: {request} reads {block} with KV of another adapter, salt or item"
    ),
    "published_block_is_of_the_same_adapter_salt_and_items": (
        "LEAK: {block} is cached under a key of another adapter, salt or item than its KV"
    ),
    # P7 failed admission is a no-op
    "rejected_event_changes_nothing": "STATE: a rejected event changed the state",
    "request_without_a_row_stays_the_same": "STATE: {request} has no row, and the plan changed it",
    "empty_plan_changes_nothing": "STATE: an empty plan changed pool, queues or statistics",
    "fork_changes_no_other_request": "STATE: a fork changed another request: {request}",
    # P8 estimate = consumption
    "row_gains_exactly_the_blocks_it_needs": (
        "MEMORY: {request} gets another number of blocks than the step needs"
    ),
    "admission_leaves_room_for_the_whole_prompt": (
        "MEMORY: {request} was admitted although its whole prompt does not fit"
    ),
    "row_has_freed_skipped_blocks": ("MEMORY: {request} keeps blocks that it no longer attends to"),
    "shared_blocks_are_copied_where_they_are_written": (
        "MEMORY: shared blocks that are written are not exactly those that the plan copies"
    ),
    # P9 budgets
    "plan_stays_within_token_budget": "LIMIT: the plan exceeds max_num_batched_tokens",
    "running_stays_within_max_num_seqs": "LIMIT: more requests run than max_num_seqs",
    "row_stays_within_its_caps": (
        "LIMIT: {request} runs no token, or more than long_prefill_token_threshold"
    ),
    "row_stays_within_max_model_len": "LIMIT: {request} runs past max_model_len",
    "paused_scheduler_admits_no_request": (
        "LIMIT: {request} was scheduled while the scheduler is paused"
    ),
    "prompt_is_not_cut_without_chunking": (
        "LIMIT: the prompt of {request} is cut although chunked prefill is off"
    ),
    "encoder_cache_stays_within_its_size": "LIMIT: the encoder cache exceeds encoder_cache_size",
    "plan_stays_within_max_num_seqs": "LIMIT: the plan has more rows than max_num_seqs",
    "worker_keeps_at_most_max_num_seqs_requests": (
        "LIMIT: the worker has to keep more requests than max_num_seqs"
    ),
    "plan_stays_within_encoder_compute_budget": "LIMIT: the plan exceeds encoder_compute_budget",
    "items_stay_within_encoder_cache_size": (
        "LIMIT: the worker has to keep more embeddings than encoder_cache_size"
    ),
    # P10 progress
    "preemption_leaves_a_running_request": "LIVENESS: a step preempted every running request",
    "no_repeated_preemption_without_progress": (
        "LIVENESS: {request} is preempted again and again without progress"
    ),
    "admission_leaves_the_watermark": (
        "LIVENESS: an admission left fewer free blocks than the watermark"
    ),
    "no_admission_while_closed": ("LIVENESS: a request was admitted while admission is closed"),
    "admission_closes_and_opens_at_its_thresholds": (
        "LIVENESS: admission does not close or open at its thresholds"
    ),
    "loop_runs_while_there_is_work": (
        "LIVENESS: the engine says that no work is left, and some is"
    ),
    "loop_sleeps_without_work": ("LIVENESS: the engine says that work is left, and none is"),
    "every_request_finishes_after_faults_stop": "LIVENESS: {request} never finishes",
    "unfinished_requests_make_progress": "LIVENESS: no request gets a token, not even {request}",
    # P11 servability
    "accepted_request_fits_an_empty_pool": (
        "ADMISSION: a request was accepted that does not fit an empty pool"
    ),
    "request_is_refused_for_its_size_only_if_it_never_fits": (
        "ADMISSION: a request was rejected for its size, and it fits"
    ),
    "a_submit_is_taken_or_refused": "PROTOCOL: a Submit was answered with a wrong type",
    # P12 token accounting
    "counters_stay_within_what_is_known": (
        "COUNTERS: {request} counts more or fewer computed tokens than it can have"
    ),
    "only_running_requests_hold_anything": (
        "COUNTERS: {request} waits, and still holds blocks, computed tokens or drafts"
    ),
    "row_advances_by_what_it_runs": (
        "COUNTERS: the plan does not advance {request} by the tokens that it runs"
    ),
    "preempted_request_starts_again": (
        "COUNTERS: {request} was preempted, and does not keep exactly its outputs and history"
    ),
    "submitted_request_starts_from_nothing": (
        "COUNTERS: {request} is new, and does not start from nothing"
    ),
    "computed_tokens_are_in_blocks_that_are_held": (
        "COUNTERS: {request} counts more computed tokens than its blocks hold"
    ),
    "row_runs_a_token": "COUNTERS: the row of {request} runs no token",
    "a_plan_schedules_known_tokens": "COUNTERS: a row runs past the tokens that its request has",
    # P13 exact output
    "delivered_rows_are_those_that_sampled": (
        "OUTPUT: outputs are not of exactly the requests that sampled"
    ),
    "delivered_tokens_are_the_sampled_ones_until_the_stop": (
        "OUTPUT: {request} got wrong tokens: lost, repeated, invented or after its stop"
    ),
    "finish_reason_is_the_one_that_holds": ("OUTPUT: {request} has a wrong finish reason, or none"),
    "finished_requests_leave_the_state": (
        "OUTPUT: a commit ended other requests than those with a finish reason"
    ),
    "outputs_in_the_state_are_those_delivered": (
        "OUTPUT: the state has other outputs of {request} than were delivered"
    ),
    "session_keeps_all_but_its_last_token": (
        "OUTPUT: {request} is a session, and does not continue with its next input as it should"
    ),
    "end_of_input_finishes_an_idle_session": (
        "OUTPUT: the end of its input ended {request}, a session, wrongly or not at all"
    ),
    "row_waits_for_the_token_of_its_request": (
        "OUTPUT: {request} runs while its own token is in flight"
    ),
    "resumed_request_has_no_token_in_flight": (
        "OUTPUT: {request} is resumed while a token of it is in flight"
    ),
    "dropped_position_runs_again": ("OUTPUT: {request} is resumed behind a token that was dropped"),
    "a_commit_gives_outputs": "PROTOCOL: a Commit was not answered with Outputs",
    "every_sampled_token_is_delivered_once": (
        "OUTPUT: sampled tokens were not delivered once each"
    ),
    "a_request_ends_at_its_length_cap": "OUTPUT: {request} does not end at its length limit",
    # P14 exact rollback
    "sampling_leaves_one_token_to_compute": (
        "ROLLBACK: after the commit, {request} has a wrong number of computed tokens"
    ),
    "commit_changes_only_outputs_and_computed_tokens": (
        "ROLLBACK: the commit changed more of {request} than outputs and computed tokens"
    ),
    # P15 work conservation
    "running_request_gets_all_it_can": (
        "SCHEDULING: {request} runs, and got another number of tokens than it could"
    ),
    "no_row_after_the_last_token": (
        "SCHEDULING: {request} runs although its last output may be in flight"
    ),
    "tokens_of_a_preempted_row_are_given_back": (
        "SCHEDULING: {request} did not get the budget of a row that was preempted"
    ),
    "head_of_the_queue_is_admitted_when_it_fits": (
        "SCHEDULING: {request} was left waiting although budget and blocks suffice"
    ),
    "loaded_request_passes_a_blocked_head": (
        "SCHEDULING: {request} was left waiting although its load is done and it fits"
    ),
    "victims_are_saved_up_to_confirmed_blocks": (
        "SCHEDULING: the store is not given exactly the confirmed tokens of the preempted"
    ),
    # P16 policy order
    "every_request_is_in_one_queue": "ORDER: {request} is in a wrong queue, in none or in two",
    "new_request_joins_the_end_of_its_queue": "ORDER: a new request is queued at a wrong place",
    "admissions_follow_the_policy": "ORDER: requests are admitted out of policy order",
    "queues_keep_their_order": "ORDER: a waiting queue is out of order after the plan",
    "running_list_keeps_its_order": (
        "ORDER: the order of the running list is not that of admission"
    ),
    "preempted_fcfs_are_the_youngest": "ORDER: not the youngest requests were preempted",
    "preempted_priority_never_outrank_survivors": (
        "ORDER: not the requests of lowest priority were preempted"
    ),
    "no_admission_after_a_preemption": (
        "ORDER: a step admitted a request although running ones lack blocks"
    ),
    "new_blocks_come_from_the_head_of_the_free_queue": (
        "ORDER: {block} was taken out of the order of the free queue"
    ),
    "preempted_tail_is_evicted_first": (
        "ORDER: blocks of preempted requests are in a wrong order in the free queue"
    ),
    "freed_tail_is_evicted_first": (
        "ORDER: blocks of finished requests are in a wrong order in the free queue"
    ),
    "hit_takes_the_oldest_copy": "ORDER: {request} hit another copy of a block than the oldest",
    "preempted_request_has_no_row_in_flight": (
        "ORDER: {request} was preempted while a frame in flight uses its blocks"
    ),
    "branch_goes_to_the_front_of_the_queue": "ORDER: a branch is queued at a wrong place",
    "running_follows_from_decisions": (
        "ORDER: requests run that the step before neither kept nor admitted"
    ),
    # P17 transfer ownership
    "every_hold_has_an_owner_and_an_end": (
        "TRANSFER: the blocks held for a transfer are not those of {request}"
    ),
    "block_in_transfer_is_not_reused": (
        "TRANSFER: a plan ended a hold, or gave {request} a block that a transfer uses"
    ),
    "deferred_free_ends_with_the_answer_to_its_frame": (
        "TRANSFER: blocks wait for a frame that is not in flight"
    ),
    "block_of_a_frame_in_flight_is_free_behind_its_answer": (
        "TRANSFER: blocks of a frame in flight are freed at the wrong time"
    ),
    "loaded_block_is_of_no_plan_in_flight": (
        "TRANSFER: the store loads into {block}, which a frame in flight still uses"
    ),
    "block_in_transfer_is_not_written": ("TRANSFER: {block} is written while a transfer uses it"),
    "block_under_way_is_not_read": "TRANSFER: {request} reads {block} while it is being loaded",
    # P18 idempotent signals
    "rejection_names_the_problem": "PROTOCOL: an event was rejected with a wrong code",
    "stale_or_wrong_event_is_rejected": (
        "PROTOCOL: a malformed, late, repeated or unknown event was accepted"
    ),
    "event_changes_only_what_it_is_about": (
        "PROTOCOL: an event changed something that it is not about"
    ),
    "event_leaves_other_requests_alone": "PROTOCOL: an event changed another request: {request}",
    "signal_is_remembered": "PROTOCOL: a signal was accepted, and the state does not show it",
    "abort_finishes_exactly_the_named_requests": (
        "PROTOCOL: an abort did not end exactly the unfinished requests that it names"
    ),
    "offers_are_those_made_last": "PROTOCOL: the state does not have the last offers of the store",
    "received_are_those_reported": (
        "PROTOCOL: the loads that count as done are not those that were reported"
    ),
    "report_changes_only_what_it_is_about": (
        "PROTOCOL: a report of transfers changed another request: {request}"
    ),
    "disabled_features_leave_no_state": (
        "PROTOCOL: the state shows a feature that the config does not have"
    ),
    "answer_is_of_the_kind_of_the_event": "PROTOCOL: an event was answered with a wrong type",
    # P19 load failure
    "load_is_what_the_store_offers": "LOAD: {request} is not loaded exactly what the store offers",
    "load_ends_where_the_store_has_the_states": (
        "LOAD: {request} is loaded to a position at which the store has no state"
    ),
    "loading_request_matches_its_load": (
        "LOAD: {request} does not wait for its load, or waits with wrong blocks or counters"
    ),
    "unconfirmed_blocks_are_not_shared": (
        "LOAD: {block} of {request} is shared or cached before its load is confirmed"
    ),
    "unconfirmed_loads_are_those_in_flight": (
        "LOAD: the unconfirmed loads in the state are not those of the frames in flight"
    ),
    "failed_load_counts_no_further_than_it_came": (
        "LOAD: {request} counts tokens as computed that failed to load"
    ),
    "failed_loads_finish_exactly_their_requests": (
        "LOAD: a failed load did not end exactly the requests that it is of"
    ),
    "block_is_shared_once_its_load_has_come": (
        "LOAD: {request} reads or saves {block} before its load is confirmed"
    ),
    "attended_slot_was_loaded": "LOAD: {request} reads {block}, which failed to load",
    "published_block_was_loaded": "LOAD: {block} is cached, and failed to load",
    # P20 faithful events
    "kv_events_rebuild_the_cache": "EVENTS: the KV event log disagrees with the prefix cache",
    "kv_events_remove_only_stored_blocks": "EVENTS: a KV event removes a block that was not stored",
    "stored_events_match_their_blocks": (
        "EVENTS: a KV event tells stored blocks with wrong tokens, parent or keys"
    ),
    # P21 statistics
    "counters_grow_by_what_happened": "METRICS: a counter is not what happened",
    "first_hit_is_remembered": (
        "METRICS: the state has a wrong number of cached tokens of {request}"
    ),
    "reported_cached_tokens_are_of_the_first_hit": (
        "METRICS: the client gets a wrong number of cached tokens of {request}"
    ),
    "reported_external_tokens_are_those_loaded": (
        "METRICS: the client gets a wrong number of loaded tokens of {request}"
    ),
    # P22 encoder cache
    "encoder_cache_adds_up": "ENCODER: the counters of the encoder cache do not add up",
    "only_running_requests_hold_items": (
        "ENCODER: a request holds items in the encoder cache and does not run"
    ),
    "encoded_item_is_of_its_request": "ENCODER: the plan encodes an item that {request} has not",
    "item_is_made_once_in_a_plan": "ENCODER: the plan encodes or loads an item twice",
    "item_that_a_row_reads_is_there": (
        "ENCODER: {request} reads an item that is not in the encoder cache"
    ),
    "row_ends_inside_of_no_whole_item": (
        "ENCODER: the row of {request} ends inside an item that may not be split"
    ),
    "encoder_decoder_items_are_dropped_with_the_next_plan": (
        "ENCODER: the plan does not drop what the plan before encoded"
    ),
    # P23 grammar in step
    "grammar_state_follows_outputs": (
        "GRAMMAR: the grammar state of {request} does not follow from its outputs"
    ),
    "plan_flags_structured_output": (
        "GRAMMAR: the plan says wrongly whether its rows need a bitmask"
    ),
    "failed_grammar_ends_its_request": (
        "GRAMMAR: a failed grammar did not end exactly its request"
    ),
    "attached_drafts_are_accepted_by_the_grammar": (
        "GRAMMAR: {request} keeps drafts that its grammar does not accept"
    ),
    "scheduled_drafts_are_accepted_by_the_grammar": (
        "GRAMMAR: {request} verifies drafts that its grammar does not accept"
    ),
    "mask_has_the_rows_that_sample_under_a_grammar": (
        "GRAMMAR: the bitmask has not exactly the rows that sample under a grammar"
    ),
    "mask_keeps_the_drafts_that_are_accepted": (
        "GRAMMAR: the bitmask of {request} keeps the wrong drafts"
    ),
    "mask_allows_what_the_grammar_does": (
        "GRAMMAR: the bitmask of {request} allows or forbids wrong tokens"
    ),
    # P24 real drafts
    "dispatched_drafts_are_the_last_proposed_ones": (
        "DRAFTS: {request} verifies drafts that were not proposed last for this position"
    ),
    "attached_drafts_are_the_last_proposed_ones": (
        "DRAFTS: {request} keeps drafts that were not proposed last for it"
    ),
    "drafts_are_taken_only_for_the_next_position": (
        "DRAFTS: drafts were accepted of requests that cannot verify them next, or not of others"
    ),
    "nothing_behind_a_placeholder_is_unmasked": (
        "DRAFTS: the bitmask of {request} has masks behind a placeholder"
    ),
    "drafts_are_the_last_scheduled_tokens": (
        "DRAFTS: {request} runs more or fewer tokens than its known tokens and drafts"
    ),
    "placeholder_stands_for_a_draft_after_the_last_plan": (
        "DRAFTS: {request} has placeholders for drafts that nothing proposed"
    ),
    "step_runs_the_tokens_of_the_plan": "DRAFTS: the step runs other tokens than the plan",
    "model_runs_the_tokens_of_the_plan": "DRAFTS: the model runs other tokens than the plan",
    # P25 complete reset
    "reset_empties_the_cache": "RESET: blocks are still cached after a reset",
    "reset_succeeds_unless_blocks_are_held": (
        "RESET: a reset succeeded that had to fail, or the other way round"
    ),
    "forced_reset_preempts_all_running_requests": (
        "RESET: a reset did not preempt exactly the running requests"
    ),
    "refused_reset_changes_nothing": "RESET: a reset that failed changed the state",
    "attended_slot_was_written_since_the_reset": (
        "RESET: {request} reads {block} with KV from before the reset"
    ),
    "published_block_was_written_since_the_reset": (
        "RESET: {block} with KV from before the reset can still be hit"
    ),
    # P26 worker view
    "plan_names_the_finished": "WORKER: the plan does not name exactly the finished requests",
    "finished_ids_wait_for_the_next_plan": (
        "WORKER: a finished request is not kept to be named in the next plan"
    ),
    "plan_names_the_preempted": "WORKER: the plan does not name exactly the preempted requests",
    "new_row_carries_the_request_as_submitted": (
        "WORKER: the new row of {request} is not the request that was submitted"
    ),
    "cross_attention_table_holds_the_embeddings": (
        "WORKER: the cross-attention blocks of {request} are too few for its items"
    ),
    "request_has_one_row": "WORKER: {request} has two rows in one plan",
    "row_is_of_an_unfinished_request": "WORKER: {request} has a row, and has finished",
    "load_goes_into_the_table_of_its_request": (
        "WORKER: a load goes into blocks that are not at the head of its request's table"
    ),
    "saved_request_is_preempted_by_the_plan": (
        "WORKER: the plan saves blocks of {request} and does not preempt it"
    ),
    "cached_row_is_known": "WORKER: {request} has a cached row, and never had a new one",
    "new_row_is_new": "WORKER: {request} has a new row, and the worker knows it already",
    "preempted_request_was_known": (
        "WORKER: the plan preempts {request}, which the worker does not know"
    ),
    "preempted_request_returns_resumed": (
        "WORKER: {request} was preempted, and its row is not marked as resumed"
    ),
    "resumed_request_was_preempted": "WORKER: {request} is resumed, and was not preempted",
    "remapped_request_has_a_row": (
        "WORKER: the plan gives {request} another table, and it has no row"
    ),
    "running_request_is_known": (
        "WORKER: {request} runs, and the worker never had a row for that request"
    ),
    "plan_has_one_table_per_group": (
        "WORKER: the row of {request} has not one block table per KV group"
    ),
    "plan_shows_no_blocks": "WORKER: the plan names blocks of an engine that has none",
    "plan_counts_the_computed_tokens_of_the_worker": (
        "WORKER: the row of {request} begins elsewhere than the worker has computed"
    ),
    "plan_counts_the_outputs_of_the_worker": (
        "WORKER: the row of {request} counts other outputs than the worker"
    ),
    "sent_tokens_are_those_of_the_worker": (
        "WORKER: the plan sends other tokens of {request} than it has"
    ),
    "tokens_are_sent_after_a_gap": "WORKER: the plan does not send the tokens of {request}",
    "table_holds_the_scheduled_tokens": (
        "WORKER: the block table of {request} is too short for the tokens that it runs"
    ),
    "table_holds_the_slots_of_its_drafts": (
        "WORKER: the block table of {request} has no slots for its drafts"
    ),
    "plans_alone_rebuild_the_request": (
        "WORKER: the plans do not tell the worker what the state says of {request}"
    ),
    "common_prefix_is_of_every_row": "WORKER: num_common_prefix_blocks is not common to all rows",
    "block_of_a_state_is_zeroed_for_attention": (
        "WORKER: {block} held a recurrent state, and the plan does not zero it"
    ),
    "step_records_are_in_order": "TRACE: the records of the steps are out of order",
    "rows_are_of_running_or_waiting_requests": (
        "TRACE: rows are of requests that neither ran nor waited, or run no token"
    ),
    "pass_runs_the_rows_of_the_plan": "WORKER: the forward pass runs other rows than the plan",
    "token_has_a_position_of_its_request": (
        "WORKER: a token of the forward pass is at a position that its request does not run"
    ),
    "a_schedule_gives_a_plan": "PROTOCOL: a Schedule was not answered with a Plan",
    "a_plan_names_unfinished_requests": "WORKER: the plan names requests that have finished",
    **{name: text for feature in FEATURES for name, text in feature.headlines.items()},
}
"""The headline of a finding, by the name of its check."""

HIT = "HIT: request {request} begins at {seen} computed tokens, the spec at {expected}"
DECISIONS = (
    ((r"preempted_req_ids", "PREEMPTION: the plan preempts {seen}, the spec {expected}"),),
    (
        (r"cached (?P<request>.+) is absent", "ORDER: request {request} gets no token of the plan"),
        (r"cached (?P<request>.+) is there", "ORDER: request {request} gets tokens, and must wait"),
        (r"cached (?P<request>.+) num_computed_tokens", HIT),
        (
            r"cached (?P<request>.+) num_scheduled_tokens",
            "ORDER: request {request} runs {seen} tokens, the spec {expected}",
        ),
    ),
    (
        (r"new (?P<request>.+) is absent", "ADMISSION: request {request} is not admitted"),
        (r"new (?P<request>.+) is there", f"ADMISSION: request {{request}} {MUST_WAIT}"),
        (r"new (?P<request>.+) num_computed_tokens", HIT),
        (
            r"new (?P<request>.+) num_scheduled_tokens",
            "ADMISSION: request {request} runs {seen} tokens, the spec {expected}",
        ),
    ),
    (
        (
            r"rows (?P<request>.+) finish_reason",
            "OUTPUT: request {request} has finish reason {seen}, the spec has {expected}",
        ),
    ),
    (
        (r"rows (?P<request>.+) is absent", "OUTPUT: request {request} gets no output"),
        (r"rows (?P<request>.+) is there", "OUTPUT: request {request} gets an output too many"),
        (
            r"rows (?P<request>.+) new_token_ids",
            "OUTPUT: request {request} gets tokens {seen}, the spec delivers {expected}",
        ),
        (r"success", "RESET: the reset returns {seen}, the spec {expected}"),
    ),
)
"""Decisions in which two answers may differ, in the order in which a scheduler takes them. Those of
one group are taken for each request in turn. Each is a pattern of the field and the headline.
` is absent` or ` is there` follows the field of a row that one plan lacks."""
AREAS = (
    (r"(request \S+ )?(num_cached_tokens|stats .+)|rows .+ num_(cached|external)\S+", "METRICS"),
    (r"encoder .+|.*encoder_(mm_hashes|inputs).*", "ENCODER"),
    (r"kv_events.*", "EVENTS"),
    (r"kv_loads.*", "LOAD"),
    (r"transfers .+|kv_saves.*", "TRANSFER"),
    (r"rows.*|request \S+ (output_token_ids|prompt_token_ids|num_streaming_updates)", "OUTPUT"),
    (r"(request|cached|new) \S+ (spec|draft)_token_ids", "DRAFTS"),
    (r".*(grammar|structured_output|reasoning).*|bitmask.*", "GRAMMAR"),
    (r"request \S+ block_tables|.* (new_)?block_ids", "MEMORY"),
    (r"block \d+|cached .+|request \S+ num_cached_blocks", "CACHE"),
    (r"request \S+ (num_\S+|is_prefill_chunk)", "COUNTERS"),
    (r"waiting|skipped_waiting|running|free_queue", "ORDER"),
    (r"finished_req_ids|prev_scheduled_req_ids|num_common_prefix_blocks", "WORKER"),
)
"""The class of a divergence that is no decision: a pattern of its first field and the class."""
BY_ENDING = {
    MUST_WAIT: f"ADMISSION: {{request}} {MUST_WAIT}",
    CACHED_TOO_EARLY: f"CACHE: {{request}} {CACHED_TOO_EARLY}",
    EVICTED_TOO_EARLY: f"CACHE: {{block}} {EVICTED_TOO_EARLY}",
}
"""The headline of a finding whose message ends so."""
WORKER_VIEW = "plans_alone_rebuild_the_request"
"""The check that compares the worker's view of a request with the state, field by field."""


def make_headline(finding: Finding) -> str:
    """Return the headline of a finding, on one line.

    If the plan of a step in which a property is violated differs from the specification's in a
    decision, that decision comes first, and what it violates second.
    """
    is_divergence = finding.kind is FindingKind.DIVERGENCE
    decision = find_decision(finding.differences if is_divergence else finding.diverged)
    if is_divergence and decision:
        return shown(decision, CHARS_MAX)
    text = CHECK_HEADLINES.get(finding.sentence, "")
    if finding.kind in BY_MESSAGE or not text:
        return shown(find_area(finding) + " ".join(finding.message.split()), CHARS_MAX)
    special = next((it for end, it in BY_ENDING.items() if finding.message.endswith(end)), "")
    text = fill(special or text, finding.subjects)
    if finding.kind is FindingKind.LIVENESS:
        text = f"{text}: {finding.message.partition(';')[0]}"
    else:
        text = _append_rule(decision, text) if decision and decision not in text else text
        must_wait = finding.message.endswith(MUST_WAIT)
        value = "" if must_wait else _describe_value(finding, bool(decision))
        with_value = f"{text}: {value}" if value else text
        text = with_value if len(with_value) <= CHARS_MAX else text
    return shown(text, CHARS_MAX)


def _append_rule(decision: str, rule: str) -> str:
    """Return a decision and the headline of what it violates, without its class; a request that
    both begin with is named once."""
    rule = rule.partition(": ")[2]
    named = re.match(r"[A-Z]+: (request .+?) (?:is|gets|runs|begins|has) ", decision)
    if named is not None and rule.startswith(f"{named[1]} "):
        rule = f"it{rule.removeprefix(named[1])}"
    return f"{decision}: {rule}"


def _describe_value(finding: Finding, has_decision: bool) -> str:
    """Return the first field that is wrong, its value and the expected one; "" if none is known.

    If the property names no field, and the headline has no decision, it is a field of its subjects
    in which spec and engine differ, or the first such field.
    """
    if finding.differences:
        first = finding.differences[0]
        if first.expected == first.seen:  # they differ in what is not shown
            return ""
        if finding.sentence == WORKER_VIEW:
            return f"{first.field} is {first.expected} in the state, {first.seen} in the plans"
        return f"{first.field} {first.seen}, expected {first.expected}"
    if has_decision or not finding.diverged:
        return ""
    names = {f"request {name}" for name in finding.subjects.requests}
    names |= {f"block {block}" for block in finding.subjects.blocks}
    about = [it for it in finding.diverged if " ".join(it.field.split(" ")[:2]) in names]
    first = (about or finding.diverged)[0]
    expected, seen = shown_apart(first.expected, first.seen, VALUE_CHARS_MAX)
    return f"{first.field} is {seen}, the spec has {expected}"


def find_area(finding: Finding) -> str:
    """Return the class of a divergence with a colon and a space; "" if its field has none."""
    if finding.kind is not FindingKind.DIVERGENCE or not finding.differences:
        return ""
    field = finding.differences[0].field
    return next((f"{area}: " for pattern, area in AREAS if re.fullmatch(pattern, field)), "")


def find_decision(differences: Sequence[Difference]) -> str:
    """Return the headline of the first decision in which two plans differ; "" if it is none."""
    for decisions in DECISIONS:
        for it in differences:
            is_row = {it.expected, it.seen} == {"there", ABSENT}
            side = f" is {'absent' if it.seen == ABSENT else 'there'}" if is_row else ""
            for pattern, text in decisions:
                named = re.fullmatch(pattern, it.field + side)
                if named is not None:
                    return text.format(expected=it.expected, seen=it.seen, **named.groupdict())
    return ""


def fill(text: str, subjects: Subjects) -> str:
    """Return a headline with its subjects; those that it has no place for follow it."""
    names = [shown(" ".join(name.split()), NAME_CHARS_MAX) for name in subjects.requests]
    blocks = [str(block) for block in subjects.blocks]
    rest = _list_rest("request", names, "{request}" in text)
    rest += _list_rest("block", blocks, "{block}" in text)
    text = text.replace("{request}", f"request {names[0]}" if names else "a request")
    text = text.replace("{block}", f"block {blocks[0]}" if blocks else "a block")
    return f"{text} ({'; '.join(rest)})" if rest else text


def _list_rest(word: str, names: Sequence[str], is_first_named: bool) -> list[str]:
    """Return what is left to say of some subjects, if anything."""
    if is_first_named:
        others = names[1:]
        return [f"and {word}{'s' * (len(others) > 1)} {', '.join(others)}"] if others else []
    return [f"{word}{'s' * (len(names) > 1)} {', '.join(names)}"] if names else []
