"""A fifth held-out set: twenty more wrong decisions in an installed vLLM.

As in `held_out_later`, decisions, docstrings and patterns were written and committed before any of
them was run against Blockstep. Each docstring says which decision is wrong. A pattern matches what
must be read in the first line of a report for the cause to be named.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from blockstep.conformance.engines.adapters.vllm_known_crashes import FORCED_RESET
from planted_support import make_list
from planted_support.held_out_later import edit
from planted_support.in_vllm import subclass

PLANTED, planted = make_list()

# Order, budgets and limits.


@planted(r"\brunning(\[\d+\])? is |order of the running")
def admitted_run_first(scheduler: Any) -> None:
    """An admitted request is put at the head of the list of running requests, not at its end."""
    edit(scheduler, "schedule", "self.running.append(request)", "self.running.insert(0, request)")


@planted("P16 admissions_follow_the_policy|is (not admitted|admitted, and must wait)", "priority")
def lower_of_two_heads_is_tried(scheduler: Any) -> None:
    """Under priority scheduling, of the heads of the waiting and the skipped requests the one of
    lower priority is tried for admission first."""
    edit(
        scheduler,
        "_select_waiting_queue_for_scheduling",
        "if waiting_req < skipped_req",
        "if skipped_req < waiting_req",
    )


@planted(
    "P15 head_of_the_queue_is_admitted_when_it_fits"
    r"|request \S+ (is not admitted|runs \d+ tokens, the spec \d+)"
)
def hits_count_against_the_budget(scheduler: Any) -> None:
    """At admission, the tokens of a prefix hit are taken off the token budget of the step, so the
    requests behind get fewer tokens or none."""
    edit(
        scheduler,
        "schedule",
        "token_budget -= num_new_tokens\n            request.status",
        "token_budget -= min(num_computed_tokens + num_new_tokens, token_budget)\n"
        "            request.status",
    )


@planted(r"P15 head_of_the_queue_is_admitted_when_it_fits|request \S+ is not admitted")
def last_seat_is_kept_free(scheduler: Any) -> None:
    """Requests are admitted only until one fewer than max_num_seqs run (off by one)."""
    edit(
        scheduler,
        "schedule",
        "if len(self.running) == self.max_num_running_reqs:",
        "if len(self.running) >= max(self.max_num_running_reqs - 1, 1):",
    )


@planted("P9 (running|plan)_stays_within_max_loras", "adapters")
def adapters_admitted_together_are_not_counted(scheduler: Any) -> None:
    """The adapter of a request that a step admits is not counted against max_loras when the step
    admits others."""
    edit(
        scheduler,
        "schedule",
        "scheduled_loras.add(request.lora_request.lora_int_id)",
        "pass",
    )


@planted(r"P15 running_request_gets_all_it_can|request \S+ gets no token of the plan", "pause")
def pause_of_newcomers_stops_all(scheduler: Any) -> None:
    """While only new requests are paused, the running ones get no tokens either."""
    edit(
        scheduler,
        "schedule",
        "if self._pause_state == PauseState.PAUSED_ALL:",
        "if self._pause_state != PauseState.UNPAUSED:",
    )


@planted(r"P15 running_request_gets_all_it_can|request \S+ gets no token of the plan")
def victims_make_room_a_step_later(scheduler: Any) -> None:
    """A running request for which another one was preempted does not get the freed blocks and runs
    nothing in that step."""
    edit(
        scheduler,
        "schedule",
        "if preempted_req == request:",
        "if preempted_req in preempted_reqs:",
    )


# Memory.


@planted(r"P26 common_prefix_is_of_every_row|\bnum_common_prefix_blocks")
def common_prefix_is_of_any_two(scheduler: Any) -> None:
    """num_common_prefix_blocks counts the blocks that at least two requests share, not those that
    all share."""
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, FullAttentionManager):
            edit(
                manager,
                "get_num_common_prefix_blocks",
                "block.ref_cnt == len(self.req_to_blocks)",
                "block.ref_cnt >= min(2, len(self.req_to_blocks))",
            )


@planted(
    "P5 (hit_is_whole_blocks_and_leaves_a_token|draft_head_has_run_the_token_behind_a_hit)"
    r"|request \S+ begins at|num_computed_tokens is ",
    "drafts",
)
def draft_heads_keep_the_last_hit(scheduler: Any) -> None:
    """With EAGLE, a prefix hit keeps its last cached block, which must be computed again for the
    draft head."""
    scheduler.kv_cache_manager.coordinator.use_eagle = False


@planted(r"P16 new_blocks_come_from_the_head_of_the_free_queue|\bfree_queue")
def uncached_blocks_are_taken_first(scheduler: Any) -> None:
    """New blocks are taken from the free blocks that are not cached before cached ones, not from
    the head of the free queue."""

    def take(right: Any, self: Any, count: int) -> Any:
        queue = self.free_block_queue
        free = queue.get_all_free_blocks()
        chosen = sorted(free, key=lambda block: block.block_hash is not None)[:count]
        order = [*chosen, *(block for block in free if block not in chosen)]
        for block in free:
            queue.remove(block)
        queue.append_n(order)
        return right(count)

    subclass(scheduler.kv_cache_manager.block_pool, get_new_blocks=take)


@planted("P8 row_has_freed_skipped_blocks", "window")
def windows_are_a_token_long(scheduler: Any) -> None:
    """A block behind the sliding window of a request is freed one token too late, as if the window
    were one token longer."""
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            subclass(
                manager,
                get_num_skipped_tokens=lambda right, _self, count: right(max(count - 1, 0)),
            )


# Drafts, grammars, ends.


@planted("P24 (dispatched|attached)_drafts_are_the_last_proposed_ones|spec_token_ids", "drafts")
def drafts_are_verified_again(scheduler: Any) -> None:
    """The drafts of a request stay attached to it after a step has scheduled them, so the next step
    verifies them once more."""
    edit(scheduler, "schedule", "request.spec_token_ids = []", "pass")


@planted("P23 grammar_state_follows_outputs|grammar_state", "masks", "drafts")
def grammars_advance_by_one_token(scheduler: Any) -> None:
    """When a step delivers several tokens of a request, its grammar is advanced by the first
    only."""
    edit(
        scheduler,
        "update_from_output",
        "accept_tokens(req_id, new_token_ids)",
        "accept_tokens(req_id, new_token_ids[:1])",
    )


@planted(
    "num_output_placeholders"
    "|P12 (only_running_requests_hold_anything|preempted_request_starts_again)",
    "async",
    "reset",
    unseen=FORCED_RESET,
)
def placeholders_survive_a_reset(scheduler: Any) -> None:
    """With asynchronous scheduling, a forced reset does not set the output placeholders of the
    requests that it preempts to zero.

    Nothing shows it: placeholders exist only with asynchronous scheduling, and there the adapter
    keeps forced resets away from the release, which is known to go wrong."""
    edit(scheduler, "reset_prefix_cache", "request.num_output_placeholders = 0", "pass")


@planted(r"P13 finish_reason_is_the_one_that_holds|request \S+ has finish reason")
def model_length_ends_requests_early(scheduler: Any) -> None:
    """A request ends with the reason length one token before max_model_len (off by one)."""

    def update(right: Any, self: Any, request: Any, tokens: Any) -> Any:
        self.max_model_len -= 1
        try:
            return right(request, tokens)
        finally:
            self.max_model_len += 1

    subclass(scheduler, _update_request_with_output=update)


# Sessions, items, a store.


@planted("P10 loop_sleeps_without_work|has_work", "sessions")
def idle_sessions_count_as_work(scheduler: Any) -> None:
    """A session that becomes idle is not counted as idle, so the scheduler says that it has work
    while sessions only wait for input."""
    edit(scheduler, "_handle_stopped_request", "self.num_waiting_for_streaming_input += 1", "pass")


@planted(r"P22 item_that_a_row_reads_is_there|\b(num_freeable|freeable|holders)\b", "encoder")
def items_are_freed_at_their_first_token(scheduler: Any) -> None:
    """An item is freed from the encoder cache once its request has computed the first of its
    tokens, not the last."""
    edit(
        scheduler,
        "_free_encoder_inputs",
        "elif start_pos + num_tokens <= request",
        "elif start_pos < request",
    )


@planted(
    "P19 (failed_load_counts_no_further_than_it_came|attended_slot_was_loaded)"
    r"|\bnum_computed_tokens",
    "transfers",
)
def failed_loads_count_a_block_too_many(scheduler: Any) -> None:
    """After a failed load, the first block that failed still counts as computed: the computed
    tokens are cut a block too late."""
    edit(
        scheduler,
        "_update_requests_with_invalid_blocks",
        "request.num_computed_tokens = idx * self.block_size",
        "request.num_computed_tokens = min((idx + 1) * self.block_size, req_num_computed_tokens)",
    )


# What plans, outputs and events report.


@planted("P20 kv_events_rebuild_the_cache|kv_events|AllBlocksCleared", "events", "reset")
def resets_are_not_reported(scheduler: Any) -> None:
    """No KV event tells that a reset emptied the prefix cache."""

    def reset(right: Any, self: Any) -> bool:
        num_before = len(self.kv_event_queue)
        is_reset = bool(right())
        del self.kv_event_queue[num_before:]
        return is_reset

    subclass(scheduler.kv_cache_manager.block_pool, reset_prefix_cache=reset)


@planted(
    "P21 (first_hit_is_remembered|reported_cached_tokens_are_of_the_first_hit)|num_cached_tokens"
)
def resumed_recount_their_cached_tokens(scheduler: Any) -> None:
    """A request that resumes after a preemption tells the cached tokens of its latest admission,
    not of its first."""
    edit(scheduler, "schedule", "if request.num_cached_tokens < 0:", "if True:")
