"""A sixth held-out set: twenty more wrong decisions in an installed vLLM.

As in `held_out_later`, decisions, docstrings and patterns were written and committed before any of
them was run against Blockstep. Each docstring says which decision is wrong. A pattern matches what
must be read in the first line of a report for the cause to be named.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import PriorityRequestQueue

from planted_support import make_list
from planted_support.held_out_later import edit
from planted_support.in_vllm import subclass

PLANTED, planted = make_list()

# Order, budgets and limits.


@planted(
    r"P16 (admissions_follow_the_policy|every_request_is_in_one_queue)"
    r"|request \S+ is admitted, and must wait|\b(skipped_)?waiting(\[\d+\])? is "
)
def one_that_does_not_fit_is_overtaken(scheduler: Any) -> None:
    """A waiting request whose known tokens do not all fit the free blocks is put among the skipped
    ones, and those behind it are tried for admission."""
    edit(
        scheduler,
        "schedule",
        "break\n\n            new_blocks = self.kv_cache_manager.allocate_slots(",
        "request_queue.pop_request()\n"
        "                step_skipped_waiting.prepend_request(request)\n"
        "                continue\n\n"
        "            new_blocks = self.kv_cache_manager.allocate_slots(",
    )


@planted(
    r"P15 head_of_the_queue_is_admitted_when_it_fits"
    r"|P16 (admissions_follow_the_policy|every_request_is_in_one_queue)"
    r"|request \S+ is not admitted|\b(skipped_)?waiting(\[\d+\])? is ",
    "adapters",
)
def requests_without_adapter_wait_for_one(scheduler: Any) -> None:
    """While max_loras adapters run, a waiting request without any adapter is skipped, too."""
    edit(
        scheduler,
        "schedule",
        "and request.lora_request\n"
        "                and (\n"
        "                    len(scheduled_loras) == self.lora_config.max_loras\n"
        "                    and request.lora_request.lora_int_id not in scheduled_loras",
        "and (\n"
        "                    len(scheduled_loras) == self.lora_config.max_loras\n"
        "                    and getattr(request.lora_request, 'lora_int_id', 0)"
        " not in scheduled_loras",
    )


@planted("P16 preempted_priority|PREEMPTION: the plan preempts", "priority")
def needy_are_never_their_own_victims(scheduler: Any) -> None:
    """Under priority scheduling, a running request that gets no block preempts another one even if
    it has the lowest priority itself."""
    edit(
        scheduler,
        "schedule",
        "max(\n                        self.running,",
        "max(\n                        [r for r in self.running if r is not request]"
        " or self.running,",
    )


@planted(
    r"P16 (admissions_follow_the_policy|queues_keep_their_order)"
    r"|request \S+ is (not admitted|admitted, and must wait)|\b(skipped_)?waiting(\[\d+\])? is ",
    "priority",
)
def aborts_leave_the_queue_out_of_order(scheduler: Any) -> None:
    """Under priority scheduling, the abort of a waiting request leaves the others out of the order
    of their priorities (the heap is not restored)."""
    for queue in (scheduler.waiting, scheduler.skipped_waiting):
        if isinstance(queue, PriorityRequestQueue):
            edit(queue, "remove_requests", "heapq.heapify(self._heap)", "pass")


@planted(r"P15 running_request_gets_all_it_can|request \S+ gets no token of the plan", "pipeline")
def one_without_tokens_stops_those_behind(scheduler: Any) -> None:
    """A running request that has nothing to run in a step stops those behind it: they get no tokens
    either."""
    edit(
        scheduler,
        "schedule",
        "requests to be scheduled.\n            req_index += 1\n            continue",
        "requests to be scheduled.\n            break",
    )


# Memory.


@planted(r"P1 every_block_is_free_or_held|\bref_counts?\b")
def hits_on_held_blocks_are_not_counted(scheduler: Any) -> None:
    """A prefix hit on a block that another request holds does not increase its ref count: only a
    hit on a free block does."""
    edit(
        scheduler.kv_cache_manager.block_pool,
        "touch",
        "self.free_block_queue.remove(block)\n        block.ref_cnt += 1",
        "self.free_block_queue.remove(block)\n            block.ref_cnt += 1",
    )


@planted(r"P16 (freed|preempted)_tail_is_evicted_first|\bfree_queue", "groups")
def last_group_is_freed_first(scheduler: Any) -> None:
    """The block tables of a request go into the free queue from the last KV group to the first, not
    from the first to the last."""
    edit(
        scheduler.kv_cache_manager.coordinator,
        "free",
        "in self.single_type_managers",
        "in reversed(self.single_type_managers)",
    )


@planted(
    r"P8 row_gains_exactly|\b(new_)?block_ids\b|\bblock.tables?\b|\blookahead\b|\bslots\b", "drafts"
)
def newcomers_get_slots_for_drafts(scheduler: Any) -> None:
    """A request that is admitted gets lookahead slots for drafts at once, though none can be
    proposed for it before its first step."""
    edit(
        scheduler,
        "schedule",
        "0 if request.num_computed_tokens == 0 else self.num_lookahead_tokens",
        "self.num_lookahead_tokens",
    )


@planted(r"P6 |\b\w*embed", "embeds")
def embeddings_do_not_name_blocks(scheduler: Any) -> None:
    """The key of a block does not contain the prompt embeddings, so requests with equal token ids
    and different embeddings share blocks."""

    def hash_without(right: Any, self: Any) -> None:
        embeds, self.prompt_embeds = self.prompt_embeds, None
        right()
        self.prompt_embeds = embeds

    def add(right: Any, _self: Any, request: Any) -> None:
        subclass(request, update_block_hashes=hash_without)
        request.block_hashes = []
        request.update_block_hashes()
        right(request)

    subclass(scheduler, add_request=add)


# Drafts and grammars.


@planted(r"P14 \S+|P12 counters_stay_within_what_is_known|\bnum_computed_tokens", "drafts")
def accepted_drafts_are_taken_back(scheduler: Any) -> None:
    """When a step is committed, the computed tokens are reduced by all of its drafts, not only by
    the rejected ones, so accepted drafts are computed again."""
    edit(
        scheduler,
        "update_from_output",
        "request.num_computed_tokens -= num_rejected",
        "request.num_computed_tokens -= num_draft_tokens",
    )


@planted(
    r"\bnum_output_placeholders|P12 (\S*placeholders\S*|counters_stay_within_what_is_known)",
    "async",
    "drafts",
)
def drafts_have_no_output_placeholders(scheduler: Any) -> None:
    """With asynchronous scheduling, a row counts one output placeholder for the token that it
    samples, and none for its drafts."""

    def update(right: Any, self: Any, output: Any) -> None:
        drafts = output.scheduled_spec_decode_tokens
        before = {name: self.requests[name].num_output_placeholders for name in drafts}
        right(output)
        for name, token_ids in drafts.items():
            request = self.requests[name]
            if request.num_output_placeholders > before[name]:
                request.num_output_placeholders -= len(token_ids)

    subclass(scheduler, _update_after_schedule=update)


@planted(r"P23 mask_allows_what_the_grammar_does|\ballow(s|ed)\b|\breasoning", "masks")
def reasoning_is_masked(scheduler: Any) -> None:
    """The bitmask forbids what the grammar forbids although the request still reasons, where every
    token is allowed."""
    subclass(scheduler.structured_output_manager, should_fill_bitmask=lambda *_: True)


# Sessions, items, a store, resets.


@planted(
    r"P13 finish_reason_is_the_one_that_holds|request \S+ has finish reason|\bstop_token_id\b",
    "sessions",
    "stops",
)
def sessions_keep_their_first_stop_conditions(scheduler: Any) -> None:
    """Further input does not change the stop conditions of a session: min_tokens, stop tokens and
    repetition detection of its first input stay."""
    edit(
        scheduler,
        "_update_request_as_session",
        "session.sampling_params = update.sampling_params",
        "pass",
    )


@planted(
    r"encoder_inputs\b|\bis encoded\b"
    r"|P22 (?!encoder_cache_adds_up)\S*(encoded|again|twice|once)\S*",
    "encoder",
)
def cached_items_are_encoded_again(scheduler: Any) -> None:
    """An item that is in the encoder cache is encoded again for each request that does not hold it
    yet."""

    def check(right: Any, self: Any, request: Any, index: int) -> bool:
        holders = self.cached.get(request.mm_features[index].identifier, ())
        return request.request_id in holders and bool(right(request, index))

    if hasattr(scheduler.encoder_cache_manager, "freeable"):
        subclass(scheduler.encoder_cache_manager, check_and_update_cache=check)


@planted(r"P17 every_hold_has_an_owner_and_an_end|\bheld\b", "transfers")
def ended_loads_hold_blocks_after_an_abort(scheduler: Any) -> None:
    """When a waiting request is aborted whose asynchronous load has already ended, its blocks are
    held for the end of that load, which is never reported again."""
    edit(
        scheduler,
        "finish_requests",
        "request.request_id not in self.finished_recving_kv_req_ids",
        "True",
    )


@planted(
    r"P19 \S*(publish|shared|cached|loaded)\S*|P4 \S*publish\S*|\bcached\b|\bblock_keys\b"
    r"|\bis published\b",
    "transfers",
)
def blocks_behind_a_failed_one_stay_cached(scheduler: Any) -> None:
    """Only the first invalid block of a failed load is taken out of the prefix cache when the
    request fails: the later blocks of the request can still be hit."""
    edit(
        scheduler,
        "_update_requests_with_invalid_blocks",
        "blocks_to_evict.update(req_block_ids[idx:])",
        "blocks_to_evict.add(block_id)",
    )


@planted(r"\bprev_(step_)?scheduled", "reset")
def reset_keeps_the_rows_of_the_last_plan(scheduler: Any) -> None:
    """A forced reset does not forget which requests the last plan had, so they still count as known
    to the worker when they are admitted again."""
    edit(
        scheduler,
        "reset_prefix_cache",
        "self.prev_step_scheduled_req_ids.clear()",
        "pass",
    )


# What plans, outputs and events report.


@planted(
    r"P20 stored_events_match_their_blocks|kv_events|\bBlockStored\b|\btoken_ids\b"
    r"|\bevents?\b.*\btokens\b",
    "events",
)
def events_begin_at_the_first_token(scheduler: Any) -> None:
    """A KV event about blocks that are stored behind others of a request has the token ids from the
    beginning of the request, not those of the new blocks only."""
    edit(
        scheduler.kv_cache_manager.block_pool,
        "cache_full_blocks",
        "start_token_idx = num_cached_blocks * block_size",
        "start_token_idx = 0",
    )


@planted(r"P26 (plan_names_the_finished|finished_ids_wait)|\bfinished_req_ids")
def finished_are_reported_in_every_plan(scheduler: Any) -> None:
    """The requests that have finished are kept after a plan has named them, so every later
    plan names them again."""

    def update(right: Any, self: Any, output: Any) -> None:
        right(output)
        self.finished_req_ids = set(output.finished_req_ids)

    subclass(scheduler, _update_after_schedule=update)


@planted(r"P26 \S*tokens\S*|\ball_token_ids")
def only_resumed_get_their_tokens(scheduler: Any) -> None:
    """The tokens of a running request that the last plan left out are not sent when it runs
    again: all_token_ids is sent for resumed requests only."""
    edit(
        scheduler,
        "_make_cached_request_data",
        "if not scheduled_in_prev_step:",
        "if idx >= num_running_reqs:",
    )
