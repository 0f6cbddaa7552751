"""A fourth held-out set: twenty more wrong decisions in an installed vLLM.

As in `held_out_later`, decisions, docstrings and patterns were written and committed before any of
them was run against Blockstep. Each docstring says which decision is wrong. A pattern matches what
must be read in the first line of a report for the cause to be named.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import RequestStatus

from planted_support import make_list
from planted_support.held_out_later import edit
from planted_support.in_vllm import subclass

PLANTED, planted = make_list()

# Order, budgets and limits.


@planted(r"P16 new_request_joins_the_end_of_its_queue|\bwaiting(\[\d+\])? is ")
def newcomers_go_to_the_front(scheduler: Any) -> None:
    """Under FCFS, a new request goes to the front of the waiting queue, not to its end."""

    def enqueue(right: Any, self: Any, request: Any) -> None:
        if self._is_blocked_waiting_status(request.status):
            right(request)
        else:
            self.waiting.prepend_request(request)

    subclass(scheduler, _enqueue_waiting_request=enqueue)


@planted(r"request \S+ runs \d+ tokens, the spec \d+|num_scheduled_tokens")
def chunks_are_cut_to_whole_blocks(scheduler: Any) -> None:
    """At admission, the first chunk of a prompt that is cut is rounded down to whole blocks, so a
    part of the token budget is not used."""
    edit(
        scheduler,
        "schedule",
        "assert num_new_tokens > 0",
        "num_new_tokens = num_new_tokens if num_new_tokens == request.num_tokens"
        " - num_computed_tokens else num_new_tokens // self.block_size * self.block_size"
        " or num_new_tokens",
    )


@planted(
    r"P16 preempted_priority_never_outrank_survivors|PREEMPTION: the plan preempts", "priority"
)
def arrival_of_a_victim_is_ignored(scheduler: Any) -> None:
    """Under priority scheduling, the first of the running requests of lowest priority is preempted,
    not the one that arrived last."""
    edit(
        scheduler,
        "schedule",
        "key=lambda r: (r.priority, r.arrival_time)",
        "key=lambda r: r.priority",
    )


@planted(
    r"P15 head_of_the_queue_is_admitted_when_it_fits|P16 every_request_is_in_one_queue"
    r"|request \S+ is not admitted|\b(skipped_)?waiting(\[\d+\])? is ",
    "adapters",
)
def max_loras_blocks_the_queue(scheduler: Any) -> None:
    """A waiting request that max_loras keeps out is not put among the skipped ones: it stays at the
    head of its queue, and no request behind it is tried."""
    edit(scheduler, "schedule", "# Scheduling would exceed max_loras, skip.", "break")


@planted(r"P9 paused_scheduler_admits_no_request|request \S+ gets tokens, and must wait", "pause")
def running_go_on_while_all_is_paused(scheduler: Any) -> None:
    """While all requests are paused, the running ones still get tokens: the pause only keeps
    waiting requests from being admitted."""
    edit(scheduler, "schedule", "token_budget = 0", "pass")


# Memory.


@planted(r"P15 head_of_the_queue_is_admitted_when_it_fits|request \S+ is not admitted")
def last_free_block_is_kept_back(scheduler: Any) -> None:
    """A waiting request whose whole prompt would take the last free block is not admitted (off by
    one)."""
    edit(
        scheduler.kv_cache_manager,
        "can_fit_full_sequence",
        "num_blocks_to_allocate <= self",
        "num_blocks_to_allocate < self",
    )


@planted(r"\bfree_queue|P16 freed_tail_is_evicted_first", "window")
def blocks_behind_a_window_are_freed_from_the_first(scheduler: Any) -> None:
    """The blocks that a request leaves behind its sliding window go into the free queue from the
    first to the last, not from the last to the first."""
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            edit(
                manager,
                "remove_skipped_blocks",
                "free_blocks(removed_blocks)",
                "free_blocks(removed_blocks[::-1])",
            )


@planted(r"P5 hit_is_the_longest_possible|request \S+ begins at|num_computed_tokens is ")
def outputs_are_not_looked_up(scheduler: Any) -> None:
    """A request that resumes after a preemption looks up the prefix cache for its prompt only, not
    for its outputs."""
    edit(
        scheduler.kv_cache_manager,
        "get_computed_blocks",
        "request.num_tokens - 1",
        "request.num_prompt_tokens - 1",
    )


@planted("P3 (computed|verified)_full_blocks_are_published")
def outputs_are_not_published(scheduler: Any) -> None:
    """Blocks are put into the prefix cache only as far as the prompt of a request goes: full blocks
    with outputs are not cached."""

    def publish(right: Any, _self: Any, request: Any, count: int) -> None:
        right(request, min(count, request.num_prompt_tokens))

    subclass(scheduler.kv_cache_manager.coordinator, cache_blocks=publish)


@planted(r"P3 cache_map_and_blocks_agree|\bcached #.* is absent")
def copies_are_evicted_together(scheduler: Any) -> None:
    """When one of several blocks that are cached under the same key is evicted, the others cannot
    be hit any more either."""

    def evict(right: Any, self: Any, block: Any) -> bool:
        key = block.block_hash
        is_evicted = bool(right(block))
        if is_evicted:
            self.cached_block_hash_to_block._cache.pop(key, None)
        return is_evicted

    subclass(scheduler.kv_cache_manager.block_pool, _maybe_evict_cached_block=evict)


@planted(r"P25 reset_succeeds_unless_blocks_are_held|success is True", "reset")
def refused_resets_report_success(scheduler: Any) -> None:
    """A reset of the prefix cache that is refused because requests hold blocks reports success."""
    edit(
        scheduler,
        "reset_prefix_cache",
        "= self.kv_cache_manager.reset_prefix_cache()",
        "= self.kv_cache_manager.reset_prefix_cache() or True",
    )


# Drafts, grammars, ends.


@planted("P24 drafts_are_taken_only_for_the_next_position|spec_token_ids", "drafts")
def drafts_come_before_the_prompt_ends(scheduler: Any) -> None:
    """Drafts are accepted for a request of whose prompt only a chunk has been scheduled."""
    edit(scheduler, "update_draft_token_ids", "if request.is_prefill_chunk:", "if False:")


@planted("P12 counters_stay_within_what_is_known|num_output_placeholders", "async", "drafts")
def placeholders_of_rejected_drafts_stay(scheduler: Any) -> None:
    """With asynchronous scheduling, the output placeholders of rejected drafts stay when their
    step is committed."""
    edit(
        scheduler,
        "update_from_output",
        "request.num_output_placeholders -= num_rejected",
        "pass",
    )


@planted("P23 mask_allows_what_the_grammar_does|allowed", "masks", "drafts")
def position_behind_the_drafts_is_unmasked(scheduler: Any) -> None:
    """The bitmask of a row with drafts allows every token at the position behind its last draft,
    whatever the grammar forbids."""
    edit(
        scheduler.structured_output_manager,
        "grammar_bitmask",
        "self._fill_bitmasks(((grammar, cumulative_index, apply_bitmask),))",
        "self._fill_bitmasks(((grammar, cumulative_index,"
        " apply_bitmask and (token != -1 or not req_tokens)),))",
    )


@planted(r"P13 finish_reason_is_the_one_that_holds|request \S+ has finish reason", "stops")
def length_wins_over_a_stop_token(scheduler: Any) -> None:
    """A request whose last allowed token is a stop token ends with the reason length, not stop."""

    def update(right: Any, _self: Any, request: Any, tokens: Any) -> Any:
        done = right(request, tokens)
        is_last = request.num_output_tokens >= request.max_tokens
        if request.status is RequestStatus.FINISHED_STOPPED and is_last:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            request.stop_reason = None
        return done

    subclass(scheduler, _update_request_with_output=update)


# Sessions, items, a store.


@planted("P10 loop_runs_while_there_is_work|has_work", "sessions")
def ended_sessions_stay_counted_as_idle(scheduler: Any) -> None:
    """An idle session that is ended is still counted as idle, so the scheduler says that it has no
    work while one other request is unfinished."""
    edit(scheduler, "finish_requests", "self.num_waiting_for_streaming_input -= 1", "pass")


@planted(r"P22 encoder_cache_adds_up|\bfreeable", "encoder")
def items_in_use_stay_freeable(scheduler: Any) -> None:
    """An item of the encoder cache that no request held stays among those that can be evicted when
    a request takes it again."""
    manager = scheduler.encoder_cache_manager
    if hasattr(manager, "freeable"):
        edit(
            manager,
            "check_and_update_cache",
            "self.freeable.pop(mm_hash)",
            "self.freeable[mm_hash]",
        )


@planted(
    r"P17 block_under_way_is_not_read|P19 block_is_shared_once_its_load_has_come"
    r"|is admitted, and must wait|the scheduler does not wait for that",
    "transfers",
)
def asynchronous_loads_are_not_waited_for(scheduler: Any) -> None:
    """A request whose load from the store is asynchronous is admitted and runs at once, before the
    load has ended."""
    edit(
        scheduler,
        "schedule",
        "request.num_external_computed_tokens = ext_tokens",
        "request.num_external_computed_tokens, load_kv_async = ext_tokens, False",
    )


# What plans, outputs and events report.


@planted("P20 stored_events_match_their_blocks|kv_events", "events", "keys")
def events_do_not_name_the_adapter(scheduler: Any) -> None:
    """KV events tell the stored blocks of a request with a LoRA adapter as if it had none."""

    def publish(right: Any, self: Any, *args: Any, **named: Any) -> None:
        num_before = len(self.kv_event_queue)
        right(*args, **named)
        for event in self.kv_event_queue[num_before:]:
            event.lora_id = event.lora_name = None

    subclass(scheduler.kv_cache_manager.block_pool, cache_full_blocks=publish)


@planted("P21 counters_grow_by_what_happened|drafts_scheduled", "drafts")
def rejected_drafts_are_not_counted(scheduler: Any) -> None:
    """The counter of scheduled drafts leaves out the drafts of a row of which none is accepted."""
    edit(
        scheduler,
        "make_spec_decoding_stats",
        "or not num_draft_tokens",
        "or not num_accepted_tokens",
    )
