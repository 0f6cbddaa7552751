"""Checks without a function of their own, with their explanations.

A check of `judge.properties` is a function whose docstring explains it. The worker, the client and
the driver report others where they find them. Each of those needs an entry here, or in the row of a
feature (`tests/conformance/report/test_explain.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from blockstep.conformance.lockstep.score import Aspect
from blockstep.conformance.protocol.features import FEATURES

_KV = {
    "holds_the_right_prefix": ("P3", "holds the KV of the token sequence for which it is read"),
    "was_written": ("P4", "was written before it can be read"),
    "was_written_since_the_reset": ("P25", "was written since the cache was reset last"),
    "is_of_the_same_adapter_salt_and_items": (
        "P6",
        "was written for the same adapter, salt, items and embeddings",
    ),
    "was_loaded": ("P19", "was loaded or computed, and not computed from KV that failed to load"),
    "is_of_the_group_that_reads_it": ("P3", "was written last by the KV group that reads it"),
}
"""Conditions on a slot, by the end of the name of the check."""

_BEFORE_SLOTS = """
engine_equals_spec
    The engine's answer to an event, or its state after it, differs from the specification's. The
    differing fields are shown. No property needs to be broken: the equivalence is `exact`, and an
    engine that decides otherwise on purpose declares a weaker one.
engine_raises_nothing
    The engine raised while it was given an event or asked for its state. An engine rejects an
    event with `Rejected`; any exception is a defect of the engine or its adapter.
engine_answers_in_the_vocabulary
    The engine's answer or state is not of the vocabulary: a value in it has a wrong type. The
    path to the value is shown.
engine_returns_from_every_call
    The engine did not return from a call: it took too long (`--event-seconds`), its process
    ended, or it could not be built.
engine_takes_model_outputs_of_its_plans
    During `score`, the engine rejected the model output of its own plan.
spec_assertions_hold
    The specification failed an assertion of its own, or raised: it is wrong, whatever the engine
    did.
checks_raise_nothing
    A check of Blockstep raised, and nothing else was wrong in the step: the finding is
    about Blockstep, not about the engine. Please report it with the program that was printed.
answer_is_of_the_kind_of_the_event P18
    Each event has one type of answer: Submit and SetPause are answered with Ack, Schedule with
    Plan, Commit with Outputs, Abort with Aborted, and so on; or the event is Rejected.
every_request_finishes_after_faults_stop P10
    Arrivals have stopped, nothing is paused and every grammar is ready, but a request does not
    finish: a plan is empty although no output, load or other event is due, a state returned
    without a token in between, or there were more steps than all token sequences need.
unfinished_requests_make_progress P10
    Steps follow one another and no request gets a token, although some are unfinished.
# answers, where nothing is compared
plan_stays_within_token_budget P9
    The rows of a plan run at most `max_num_batched_tokens` tokens together.
plan_stays_within_max_num_seqs P9
    A plan has no more rows than `max_num_seqs`.
worker_keeps_at_most_max_num_seqs_requests P9
    At most `max_num_seqs` requests are known to the worker and neither finished nor preempted
    according to its plans: it has a slot for each. Idle sessions do not count, nor requests that
    a reset or a failed load preempts, since no plan names them.
row_stays_within_max_model_len P9
    No row runs a position beyond `max_model_len`.
hit_only_with_prefix_caching P5
    A new request has no computed tokens if prefix caching is off, or if it asks to skip reading
    the cache.
computed_tokens_are_in_blocks_that_are_held P12
    In a state, the number of computed tokens of a request is at least 0, and at most what the
    blocks of its table hold.
plan_stays_within_encoder_compute_budget P9
    A plan computes at most `encoder_compute_budget` embeddings; loaded ones do not count.
items_stay_within_encoder_cache_size P9
    After the drops and computations of a plan, the worker keeps at most `encoder_cache_size`
    embeddings.
encoded_item_is_of_its_request P22
    An item that a plan encodes for a request is one of that request's items.
item_is_made_once_in_a_plan P22
    A plan encodes or loads an item once, even if several rows read it.
item_that_a_row_reads_is_there P22
    Each item of which a row reads an embedding (a draft head reads one position further) was
    encoded or loaded, and not dropped since. In an encoder-decoder model the first row of a
    request reads all of its items, and they are encoded in that plan.
row_ends_inside_of_no_whole_item P22
    With disable_chunked_mm_input no row ends inside of an item: under bidirectional attention the
    KV of its first part would be wrong.
encoder_decoder_items_are_dropped_with_the_next_plan P22
    In an encoder-decoder model a plan drops all items that the plan before encoded: they were
    read then, and are not needed again.
cross_attention_table_holds_the_embeddings P26
    The block table of cross attention has a slot for each embedding of its request's items.
scheduled_drafts_are_accepted_by_the_grammar P23
    The drafts that a row verifies are accepted by the grammar of its request.
mask_has_the_rows_that_sample_under_a_grammar P23
    The bitmask of a frame has one row for each request that samples in it under a grammar, and no
    others.
mask_keeps_the_drafts_that_are_accepted P23
    A bitmask keeps the leading drafts of a row that the grammar accepts in sequence, and replaces
    the rest by placeholders.
mask_allows_what_the_grammar_does P23
    At the position of each draft, and after the kept drafts, a bitmask allows exactly the tokens
    that the grammar allows; all tokens if the grammar is terminated, or waits for the end of
    reasoning.
nothing_behind_a_placeholder_is_unmasked P24
    After a draft that is a placeholder the next allowed tokens are unknown: if the position
    before it is masked, so is the one after it.
request_has_one_row P26
    No request has two rows in one plan.
row_is_of_an_unfinished_request P26
    A row is of a request that was submitted and has neither finished nor been aborted.
new_row_carries_the_request_as_submitted P26
    A NewRow has the fields of the request as the client submitted it: the worker learns them
    there.
delivered_rows_are_those_that_sampled P13
    Outputs have a row for each unfinished request that sampled, and no others.
delivered_tokens_are_the_sampled_ones_until_the_stop P13
    A client gets each sampled token once, in order, and nothing after the token that finishes the
    request.
finish_reason_is_the_one_that_holds P13
    A request finishes when its tokens or its length require it, with that reason, and continues
    otherwise.
abort_finishes_exactly_the_named_requests P18
    An abort ends the unfinished requests that it names; unknown or finished ids change nothing.
# the worker, which knows the plans alone
load_goes_into_the_table_of_its_request P26
    A load of a plan writes existing blocks, at the head of the block tables of a request. A
    request with a synchronous load has a row in the plan, which begins after the loaded tokens.
loaded_block_is_of_no_plan_in_flight P17
    A plan lets a store load only into blocks that no row of a plan in flight reads or writes: a
    worker may run such a row at any time before its commit, and the store does not wait for it.
block_in_transfer_is_not_written P17
    No row writes a block that a store writes, or reads for a finished request, until the end of
    the transfer is reported.
block_under_way_is_not_read P17
    No row reads a block into which a load is under way, not even one of its own request.
block_is_shared_once_its_load_has_come P19
    A load of a plan in flight may still fail: until the commit of that plan only the request for
    which it is loaded reads the block.
load_ends_where_the_store_has_the_states P19
    With recurrent groups a load ends where the offer of the store ends, in every group: the store
    has one state for an offer, after its last token.
saved_request_is_preempted_by_the_plan P26
    A plan saves blocks only of requests that it preempts, and that hold blocks until then.
saved_slot_holds_the_text_of_its_request P3
    The slots that a plan saves hold the KV of the request's token sequence, since the store keeps
    them under that sequence for later requests.
plan_names_real_blocks P1
    Block ids in a plan are from 1 to `num_blocks` - 1; 0 is the null block.
copy_names_real_blocks P1
    A plan copies blocks from 1 to `num_blocks` - 1 to other such blocks.
written_block_is_in_one_place P2
    A block that a row writes in this step is at one place of the tables that are read or written
    in it. Exceptions: a prefix that is shared at the same position, and a block that several rows
    fill with the same known tokens.
row_runs_a_token P12
    A row runs at least one token.
row_waits_for_the_token_of_its_request P13
    Without asynchronous scheduling a request has no row while its own token is in flight.
resumed_request_has_no_token_in_flight P13
    A preempted request is resumed only when all tokens that it sampled have been committed. An
    engine that drops such tokens, and runs their positions again, declares
    `EngineTraits(drops_tokens_in_flight=True)`.
dropped_position_runs_again P13
    If an engine drops the tokens in flight of a request that it preempts
    (`drops_tokens_in_flight`), the request is resumed before their positions, and runs them
    again.
drafts_are_the_last_scheduled_tokens P24
    The tokens that a row runs after the known ones are all its drafts and no others.
placeholder_stands_for_a_draft_after_the_last_plan P24
    A plan has a placeholder for a draft only if the worker has proposed one since the last plan.
step_runs_the_tokens_of_the_plan P24
    The tokens that a step runs are the known tokens of the request, and the proposed drafts.
cached_row_is_known P26
    A CachedRow is of a request that has had a NewRow.
new_row_is_new P26
    A NewRow is of a request that the worker does not know: its first row, or the first since
    `finished_req_ids` named it.
preempted_request_was_known P26
    `preempted_req_ids` name requests that the worker knows.
preempted_request_returns_resumed P26
    A preempted request holds no blocks, so its next row is `resumed`, with a whole block table.
resumed_request_was_preempted P26
    A `resumed` row is of a request that an earlier plan named as preempted.
remapped_request_has_a_row P26
    A request in `remapped_req_ids` has a row in the plan with its new block table.
running_request_is_known P26
    A request that runs according to the engine's state has had a row, so that the worker knows
    it.
plan_has_one_table_per_group P26
    A row has a block table for each KV group; with one group it is `((3, 1),)`.
plan_shows_no_blocks P26
    An engine that declares that it has no blocks (`SamePlans(shows_blocks=False)`) names none in
    plans.
plan_counts_the_computed_tokens_of_the_worker P26
    `num_computed_tokens` of a row is the number of tokens that the worker has computed of the
    request.
plan_counts_the_outputs_of_the_worker P26
    `num_output_tokens` of a row counts the known output tokens and the placeholders.
sent_tokens_are_those_of_the_worker P26
    `all_token_ids` of a row are the prompt and the tokens sampled since.
tokens_are_sent_after_a_gap P26
    A row has all tokens of its request if it is resumed or had no row in the plan before.
table_holds_the_scheduled_tokens P26
    The block table has a slot for each position that a row runs.
drafter_reads_no_draft_of_another P3
    A draft model keeps KV in the blocks of a request, too, and runs its drafts in the slots after
    the known tokens: these slots hold no KV of another request, and no other request reads a
    draft there.
draft_head_has_run_the_token_behind_a_hit P5
    A draft head computes the KV at a position from the next token. So the token after a hit must
    have been computed after the same tokens before; the last block of the hit is dropped and
    computed again. Not checked for sessions, nor with a store or forks.
table_holds_the_slots_of_its_drafts P26
    With a proposer that keeps KV a running request that samples has a slot for each draft after
    its known tokens, up to the model's length.
plans_alone_rebuild_the_request P26
    The engine's state of a running request (outputs, table, computed tokens) equals what the
    worker knows from the plans.
# several KV groups
attended_position_has_a_block P5
    Each position to which a row attends in a KV group has a block in its table there, and no null
    block: the prefix must be valid in every group.
common_prefix_is_of_every_row P26
    The blocks that `num_common_prefix_blocks` counts are the first of the table of each row, in a
    KV group with full attention: a worker attends to them once for all rows.
block_of_a_state_is_zeroed_for_attention P26
    A block that held a recurrent state is in `new_block_ids_to_zero` before a KV group with
    attention writes there: the rest of a state may read as NaN.
# records of steps
step_records_are_in_order P26
    Steps are recorded one after the other, each with a snapshot, its hits and its decision.
running_follows_from_decisions P16
    A request that runs before a step was left running, or was admitted, by the step before.
rows_are_of_running_or_waiting_requests P26
    A row is of a request that ran and was not preempted, or that waited and is admitted; each
    runs at least one token, and has one row.
# real memory
attention_reads_the_slots_of_the_block_table P3
    Attention reads the slots that the block table names, in their order.
slot_holds_what_the_plan_writes P3
    After a step each slot that it writes holds the new KV, and no other slot has changed.
copied_block_arrives_unchanged P3
    A copied block has the content of its source.
token_is_written_to_its_slot P3
    The model writes the KV of a token to the slot of its position.
pass_runs_the_rows_of_the_plan P26
    A forward pass runs the rows of the plan.
token_runs_with_the_adapter_of_its_request P6
    The model runs each token with the adapter of its request, and no other.
token_has_a_position_of_its_request P26
    Each token of a forward pass is at a position that its request runs in this step.
model_runs_the_tokens_of_the_plan P24
    The token that the model runs at a position is the known one, or its draft.
"""
_AFTER_SLOTS = """
# `blockstep replay`, which plays a workload to an engine alone
a_submit_is_taken_or_refused P11
    `Submit` is answered with `Ack` or `Rejected`.
a_schedule_gives_a_plan P26
    `Schedule` is answered with a `Plan`.
a_plan_names_unfinished_requests P26
    A plan has rows of, and preempts, only requests that were submitted and are unfinished.
a_plan_schedules_known_tokens P12
    A row ends at or before the last known token of its request.
a_commit_gives_outputs P13
    `Commit` is answered with `Outputs`.
every_sampled_token_is_delivered_once P13
    `Outputs` has one row for each row that sampled, with the sampled token.
a_request_ends_at_its_length_cap P13
    A request of a workload finishes exactly when it reaches `max_tokens` or `max_model_len`.
# `blockstep score`
"""


def _read(text: str) -> dict[str, tuple[str, str]]:
    """Return property and explanation by check. Each entry of `text` begins with the name of the
    check and its property; lines of explanation are indented, and comments begin with `#`."""
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name, _, body = entry.partition("\n")
        if body:
            name, _, number = name.partition(" ")
            found[name] = number, " ".join(body.split())
    return found


SENTENCES: Mapping[str, tuple[str, str]] = {
    **_read(_BEFORE_SLOTS),
    **{
        f"{slot}_{end}": (number, f"Each slot {where} {right}.")
        for slot, where in (
            ("attended_slot", "that a row attends to"),
            ("published_block", "of a block that is published in the prefix cache"),
        )
        for end, (number, right) in _KV.items()
    },
    **_read(_AFTER_SLOTS),
    **{name: check for feature in FEATURES for name, check in feature.checks.items()},
    # `blockstep score`
    **{
        f"{aspect}_agree": ("", f"The port and the specification have the same {aspect}.")
        for aspect in Aspect
    },
}
