"""Sentences: those that no function is named after, with what they mean.

A sentence of `judge.properties` is a function, and explains itself. The worker, the client and the
driver speak others, each at the place where it sees that one does not hold. Whoever adds one there
says here what it means (`tests/conformance/test_explain.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from blockstep.conformance.lockstep.score import Aspect

_KV = {
    "holds_the_right_prefix": ("P3", "holds the KV of the text that it is read for"),
    "was_written": ("P4", "was written before it can be read"),
    "was_written_since_the_reset": ("P25", "was written since the cache was reset last"),
    "is_of_the_same_adapter_salt_and_items": (
        "P6",
        "was written for the same adapter, salt, items and embeddings",
    ),
    "was_loaded": (
        "P19",
        "was loaded, or computed again, and is not computed on what could not be loaded",
    ),
    "is_of_the_group_that_reads_it": ("P3", "was written last by the KV group that reads it"),
}
"""What is true of a slot, by the end of the sentence."""

SENTENCES: Mapping[str, tuple[str, str]] = {
    # the driver
    "engine_equals_spec": (
        "",
        (
            "The engine answered an event, or stood after it, otherwise than the "
            "specification. Which fields differ is shown. No property needs to be broken: "
            "the equivalence is `exact`, and an engine that decides otherwise on purpose "
            "names a weaker one."
        ),
    ),
    "engine_raises_nothing": (
        "",
        (
            "The engine raised while it was given an event or asked for its state. What "
            "it refuses it refuses with `Rejected`; whatever else it raises is a defect "
            "of the engine or its adapter."
        ),
    ),
    "engine_answers_in_the_vocabulary": (
        "",
        (
            "What the engine returned is not of the vocabulary: a value in it has a wrong type. "
            "The path to the value is shown."
        ),
    ),
    "engine_answers_every_call": (
        "",
        (
            "The engine did not come back from a call: it took too long (`--event- "
            "seconds`), ended its process, or could not be built."
        ),
    ),
    "engine_takes_answers_to_its_plans": (
        "",
        "While it is scored, an engine refused the worker's answer to a plan of its own.",
    ),
    "spec_asserts_nothing_false": (
        "",
        ("The specification failed an assertion of its own: it is wrong, whatever the engine did."),
    ),
    "answer_is_of_the_kind_of_the_event": (
        "P18",
        (
            "Each event has one kind of answer: Submit and SetPause are taken with Ack, "
            "Schedule with Plan, Commit with Outputs, Abort with Aborted, and so on; or "
            "it is Rejected."
        ),
    ),
    "every_request_ends_once_all_is_healed": (
        "P10",
        (
            "Arrivals have stopped, nothing is paused and every grammar is ready, and "
            "still a request does not end: a plan is empty although nothing is due from "
            "outside, a state has come back without a token in between, or there were "
            "more steps than all texts need."
        ),
    ),
    "unfinished_requests_make_progress": (
        "P10",
        ("Steps follow one another and no request gets a token, although some are unfinished."),
    ),
    # answers, where nothing is compared
    "plan_stays_within_token_budget": (
        "P9",
        ("The rows of a plan run no more tokens together than `max_num_batched_tokens`."),
    ),
    "plan_stays_within_max_num_seqs": ("P9", "A plan has no more rows than `max_num_seqs`."),
    "worker_keeps_at_most_max_num_seqs_requests": (
        "P9",
        (
            "Requests that a worker was told of, and not that they ended or were preempted, are no "
            "more than `max_num_seqs`: a worker has a slot for each. Sessions that rest do not "
            "count, nor what a reset or a failed load preempts, of which no plan tells."
        ),
    ),
    "plan_stays_within_max_loras": (
        "P9",
        "The rows of a plan have no more different adapters together than `max_loras`.",
    ),
    "row_stays_within_max_model_len": ("P9", "No row runs a position beyond `max_model_len`."),
    "hit_is_taken_only_where_one_may_be": (
        "P5",
        (
            "A new request has nothing computed with prefix caching off, nor if it asks to skip "
            "reading the cache."
        ),
    ),
    "computed_tokens_are_in_blocks_that_are_held": (
        "P12",
        (
            "In a state, what counts as computed of a request is no less than nothing, and no more "
            "than the blocks of its table hold."
        ),
    ),
    "plan_stays_within_encoder_compute_budget": (
        "P9",
        "A plan has no more embeddings made than `encoder_compute_budget`; loaded ones are none.",
    ),
    "items_stay_within_encoder_cache_size": (
        "P9",
        (
            "Once a plan has dropped and made what it names, the worker keeps no more embeddings "
            "than `encoder_cache_size`."
        ),
    ),
    "encoded_item_is_of_its_request": (
        "P22",
        "What a plan has encoded for a request is one of that request's items.",
    ),
    "item_is_made_once_in_a_plan": (
        "P22",
        "A plan has an item encoded or loaded once, whoever of its rows reads it.",
    ),
    "item_that_a_row_reads_is_there": (
        "P22",
        (
            "Each item of which a row reads an embedding, a draft head one position further, was "
            "encoded or loaded, and not dropped since. Beside the prompt the first row of a "
            "request reads all, and they are encoded for it in that plan."
        ),
    ),
    "row_ends_inside_of_no_whole_item": (
        "P22",
        (
            "With disable_chunked_mm_input no row ends inside of an item: under bidirectional "
            "attention the KV of its first part would be wrong."
        ),
    ),
    "items_beside_are_dropped_with_the_next_plan": (
        "P22",
        (
            "In an encoder-decoder model a plan drops all that the plan before had encoded: it was "
            "read then, and nobody looks for it again."
        ),
    ),
    "table_across_holds_the_embeddings": (
        "P26",
        "The block table across has a slot for each embedding of its request's items.",
    ),
    "scheduled_drafts_are_accepted_by_the_grammar": (
        "P23",
        "The drafts that a row verifies are ones that the grammar of its request accepts.",
    ),
    "mask_has_the_rows_that_sample_under_a_grammar": (
        "P23",
        (
            "The mask of a frame has one row for each request that samples in it and has a "
            "grammar, and none for anybody else."
        ),
    ),
    "mask_keeps_the_drafts_that_are_accepted": (
        "P23",
        (
            "Of the drafts of a row a mask keeps those that the grammar accepts one behind the "
            "other, and puts placeholders for the rest."
        ),
    ),
    "mask_allows_what_the_grammar_does": (
        "P23",
        (
            "At the place of each draft, and behind those that are kept, a mask allows exactly "
            "the tokens that the grammar allows there; any where it is terminated, or still waits "
            "for the end of reasoning."
        ),
    ),
    "nothing_behind_a_placeholder_is_unmasked": (
        "P24",
        (
            "Behind a draft that is a placeholder no token can be known to follow: what is masked "
            "before it is masked behind it."
        ),
    ),
    "request_has_one_row": ("P26", "No request has two rows in one plan."),
    "row_is_of_an_unfinished_request": (
        "P26",
        ("A row is of a request that was submitted and has not ended, by its stop or an abort."),
    ),
    "new_row_carries_the_request_as_submitted": (
        "P26",
        ("The worker learns a request from its NewRow, so that is what the client submitted."),
    ),
    "delivered_rows_are_those_that_sampled": (
        "P13",
        ("Outputs have a row for each unfinished request that sampled, and for nobody else."),
    ),
    "delivered_tokens_are_the_sampled_ones_until_the_stop": (
        "P13",
        (
            "A client gets each sampled token once, in order, and nothing after the one "
            "that ends it."
        ),
    ),
    "finish_reason_is_the_one_that_holds": (
        "P13",
        (
            "A request ends when its text says so (a stop, its length), with that reason, "
            "and goes on otherwise."
        ),
    ),
    "abort_ends_exactly_the_unfinished_it_names": (
        "P18",
        (
            "An abort ends the unfinished requests that it names; ids that are not known, "
            "or ended, change nothing."
        ),
    ),
    # the worker, which knows the plans alone
    "load_goes_into_the_table_of_its_request": (
        "P26",
        (
            "What a plan has loaded goes into blocks that there are, at the head of the block "
            "tables of a request. One that is to be there at once has a row in the plan, which "
            "begins behind it."
        ),
    ),
    "loaded_block_is_of_no_plan_in_flight": (
        "P17",
        (
            "A plan has a store load only into blocks that no row of an unanswered plan reads or "
            "writes: a worker may run such a row at any time before its answer, and nothing orders "
            "the store behind it."
        ),
    ),
    "block_in_transfer_is_not_written": (
        "P17",
        (
            "Nobody writes a block that a store writes, or that it reads for a request that has "
            "ended, until it was reported that the transfer has come to its end."
        ),
    ),
    "block_under_way_is_not_read": (
        "P17",
        "Nobody reads a block into which a load is under way, its own request included.",
    ),
    "block_is_shared_once_its_load_has_come": (
        "P19",
        (
            "What is loaded for a plan in flight may turn out not to have come: until the plan is "
            "answered nobody reads it but the request for which it is loaded."
        ),
    ),
    "load_ends_where_the_store_has_the_states": (
        "P19",
        (
            "With recurrent groups a load ends where the offer of the store ends, in every group: "
            "the store has one state for an offer, after its last token."
        ),
    ),
    "saved_request_is_preempted_by_the_plan": (
        "P26",
        "What a plan has saved is of requests that it preempts, and that hold blocks until then.",
    ),
    "saved_slot_holds_the_text_of_its_request": (
        "P3",
        (
            "What is saved of a request is the KV of its text, as far as it says: a store keeps it "
            "by the name of that text, for whoever asks for it later."
        ),
    ),
    "plan_names_real_blocks": (
        "P1",
        ("Block ids in a plan are from 1 to `num_blocks` - 1; 0 is the null block, and nobody's."),
    ),
    "copy_names_real_blocks": (
        "P1",
        "What a plan has copied are blocks from 1 to `num_blocks` - 1, to others of these.",
    ),
    "written_block_is_in_one_place": (
        "P2",
        (
            "A block that a row writes in this step is in no other place of any table "
            "that is read or written in it, but for a prefix that is shared at the same "
            "position, and for a block that several rows fill with the same known tokens."
        ),
    ),
    "row_runs_a_token": ("P12", "A row runs one token at least."),
    "row_waits_for_the_token_of_its_request": (
        "P13",
        ("Without asynchronous scheduling a request has no row while its own token is in flight."),
    ),
    "resumed_request_has_no_token_in_flight": (
        "P13",
        (
            "A preempted request is resumed only when every token that it sampled has "
            "been committed. An engine that drops such tokens, and runs their positions again, "
            "says so: `EngineTraits(drops_tokens_in_flight=True)`."
        ),
    ),
    "dropped_position_runs_again": (
        "P13",
        (
            "Where an engine drops the tokens in flight of a request that it preempts "
            "(`drops_tokens_in_flight`), the request is resumed before their positions, and runs "
            "them again."
        ),
    ),
    "drafts_are_the_last_scheduled_tokens": (
        "P24",
        ("What a row runs past the text that is known are its drafts, neither more nor fewer."),
    ),
    "placeholder_stands_for_a_draft_after_the_last_plan": (
        "P24",
        ("A plan has a placeholder for a draft only where the worker has proposed one since."),
    ),
    "step_runs_the_tokens_of_the_plan": (
        "P24",
        ("The tokens that a step runs are those of the text, and the drafts that were proposed."),
    ),
    "cached_row_is_known": ("P26", "A CachedRow is of a request that has had a NewRow."),
    "new_row_is_new": (
        "P26",
        (
            "A NewRow is of a request that the worker does not know: its first row, or "
            "the first since its end was told in `finished_req_ids`."
        ),
    ),
    "preempted_request_was_known": (
        "P26",
        "`preempted_req_ids` name requests that the worker knows.",
    ),
    "preempted_request_returns_resumed": (
        "P26",
        ("A preempted request holds no blocks, so its next row is `resumed`, with a whole table."),
    ),
    "resumed_request_was_preempted": (
        "P26",
        "A `resumed` row is of a request that an earlier plan named as preempted.",
    ),
    "remapped_request_has_a_row": (
        "P26",
        "Who is in `remapped_req_ids` has a row in the plan, which tells its new table.",
    ),
    "running_request_is_known": (
        "P26",
        ("A request that runs, by the engine's state, has had a row, so that the worker knows it."),
    ),
    "plan_has_one_table_per_group": (
        "P26",
        "A row has a block table for each KV group; where there is one, it is `((3, 1),)`.",
    ),
    "plan_shows_no_blocks": (
        "P26",
        ("An engine that says that it has no blocks (`SamePlans(shows_blocks=False)`) names none."),
    ),
    "plan_counts_the_computed_tokens_of_the_worker": (
        "P26",
        ("`num_computed_tokens` of a row is what the worker has computed of the request."),
    ),
    "plan_counts_the_outputs_of_the_worker": (
        "P26",
        ("`num_output_tokens` of a row are the outputs that are known, and those promised."),
    ),
    "sent_tokens_are_those_of_the_worker": (
        "P26",
        "`all_token_ids` of a row are the prompt and what was sampled since.",
    ),
    "tokens_are_sent_after_a_gap": (
        "P26",
        ("A request that had no row in the plan before, or is resumed, is sent its tokens."),
    ),
    "table_holds_the_scheduled_tokens": (
        "P26",
        "The block table has a slot for each position that a row runs.",
    ),
    "drafter_reads_no_draft_of_another": (
        "P3",
        (
            "A draft model keeps KV in the blocks of a request, too, and runs its drafts in the "
            "slots behind the text: nobody else's KV is in those, and nobody reads a draft there."
        ),
    ),
    "draft_head_has_run_the_token_behind_a_hit": (
        "P5",
        (
            "A draft head computes the KV at a position from the token behind it. So the token "
            "behind a hit was computed behind the same text before: the block with it is given "
            "back, and computed again. Not asked of sessions, nor beside a store or branches."
        ),
    ),
    "table_holds_the_slots_of_its_drafts": (
        "P26",
        (
            "With a proposer that keeps KV a running request that samples has a slot for each "
            "draft behind its text, up to the model's length."
        ),
    ),
    "plans_alone_rebuild_the_request": (
        "P26",
        (
            "What the engine's state says of a running request (outputs, table, computed "
            "tokens) is what the worker knows from the plans."
        ),
    ),
    # several KV groups
    "attended_position_has_a_block": (
        "P5",
        (
            "Each position that a row attends to in a KV group has a block in its table there, no "
            "null block: what it goes on from is valid for every group."
        ),
    ),
    "common_prefix_is_of_every_row": (
        "P26",
        (
            "The blocks that `num_common_prefix_blocks` counts begin the table of each row, in a "
            "KV group where all is attended to: a worker attends to them once for all rows."
        ),
    ),
    "block_of_a_state_is_zeroed_for_attention": (
        "P26",
        (
            "A block that held a recurrent state is in `new_block_ids_to_zero` before a KV group "
            "with attention writes there: what a state leaves may read as NaN."
        ),
    ),
    # records of steps
    "step_is_told_in_order": (
        "P26",
        "Steps are told one after the other, each by a snapshot, its hits and its decision.",
    ),
    "running_follows_from_decisions": (
        "P16",
        "Before a step nobody runs who was not left running, or admitted, by the step before.",
    ),
    "rows_are_of_who_ran_or_waited": (
        "P26",
        (
            "A row is of one who ran and was not preempted, or who waited and is admitted; each "
            "runs a token or more, and has one row."
        ),
    ),
    # real memory
    "attention_reads_the_slots_of_the_block_table": (
        "P3",
        ("What attention reads are the slots that the block table names, in their order."),
    ),
    "slot_holds_what_the_plan_writes": (
        "P3",
        ("After a step each slot that it writes holds the new KV, and no other slot has changed."),
    ),
    "moved_block_is_the_one_meant": ("P3", "A block that is copied arrives as it was."),
    "token_is_written_to_its_slot": (
        "P3",
        "The model writes the KV of a token to the slot of its position.",
    ),
    "pass_runs_the_rows_of_the_plan": ("P26", "A forward pass runs the rows of the plan."),
    "token_runs_with_the_adapter_of_its_request": (
        "P6",
        "The model runs each token with the adapter of its request, and no other.",
    ),
    "token_has_a_position_of_its_request": (
        "P26",
        ("Each token of a forward pass is at a position that its request runs in this step."),
    ),
    "model_runs_the_tokens_of_the_plan": (
        "P24",
        ("The token that the model runs at a position is the one of the text, or its draft."),
    ),
    **{
        f"{slot}_{end}": (number, f"Each slot {where} {right}.")
        for slot, where in (
            ("attended_slot", "that a row attends to"),
            ("published_block", "of a block that can be found in the prefix cache"),
        )
        for end, (number, right) in _KV.items()
    },
    # `blockstep replay`, where a workload is played to an engine without a specification beside it
    "a_submit_is_taken_or_refused": ("P11", "`Submit` is answered with `Ack` or `Rejected`."),
    "a_schedule_gives_a_plan": ("P26", "`Schedule` is answered with a `Plan`."),
    "a_plan_names_unfinished_requests": (
        "P26",
        "A plan has rows of, and preempts, only requests that were submitted and are unfinished.",
    ),
    "a_plan_schedules_known_tokens": (
        "P12",
        "A row ends at the latest with the last token that its request has.",
    ),
    "a_commit_gives_outputs": ("P13", "`Commit` is answered with `Outputs`."),
    "every_sampled_token_is_delivered_once": (
        "P13",
        "`Outputs` has one row for each row that sampled, with the token that was sampled.",
    ),
    "a_request_ends_at_its_length_cap": (
        "P13",
        "A request of a workload finishes exactly when it reaches `max_tokens` or `max_model_len`.",
    ),
    # `blockstep score`
    **{
        f"{aspect}_agree": ("", f"The port and the specification have the same {aspect}.")
        for aspect in Aspect
    },
}
