"""More wrong decisions in an installed vLLM, to measure headlines that were not made for them.

Each set was written and committed, patterns included, before any of its decisions was run. What a
set showed was mended in the code that makes headlines; no pattern changed afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import RequestStatus

from planted_support import make_list
from planted_support.in_vllm import subclass

PLANTED, planted = make_list()

# The first set: twenty.


@planted("P9 prompt_is_not_cut_without_chunking")
def prompts_are_always_cut(scheduler: Any) -> None:
    scheduler.scheduler_config.enable_chunked_prefill = True


@planted("P9 paused_scheduler_admits_no_request", "pause")
def pause_lets_newcomers_in(scheduler: Any) -> None:
    def schedule(right: Any, self: Any) -> Any:
        state = self._pause_state
        if state is PauseState.PAUSED_NEW:
            self._pause_state = PauseState.UNPAUSED
        try:
            return right()
        finally:
            self._pause_state = state

    subclass(scheduler, schedule=schedule)


@planted("P12 (only_running_requests_hold_anything|preempted_request_starts_again)")
def preempted_keep_their_computed_tokens(scheduler: Any) -> None:
    def preempt(right: Any, _self: Any, request: Any, timestamp: float) -> None:
        computed = request.num_computed_tokens
        right(request, timestamp)
        request.num_computed_tokens = computed

    subclass(scheduler, _preempt_request=preempt)


@planted("P16 hit_takes_the_oldest_copy")
def newest_copy_is_hit(scheduler: Any) -> None:
    def newest(right: Any, self: Any, key: Any) -> Any:
        copies = self._cache.get(key)
        return [*copies.values()][-1] if isinstance(copies, dict) else right(key)

    def get(right: Any, self: Any, *args: Any) -> Any:
        if "Wrong" not in type(self.cached_block_hash_to_block).__name__:  # new after a reset
            subclass(self.cached_block_hash_to_block, get_one_block=newest)
        return right(*args)

    subclass(scheduler.kv_cache_manager.block_pool, get_cached_block=get)


@planted("P6 ", "keys")
def adapters_share_blocks(scheduler: Any) -> None:
    def hash_without(right: Any, self: Any) -> None:
        adapter, self.lora_request = self.lora_request, None
        right()
        self.lora_request = adapter

    def add(right: Any, _self: Any, request: Any) -> None:
        subclass(request, update_block_hashes=hash_without)
        request.block_hashes = []
        request.update_block_hashes()
        right(request)

    subclass(scheduler, add_request=add)


@planted("P3 |P4 (block_still_to_be_written_is_not|only_computed_blocks_are)_published")
def evicted_blocks_can_still_be_hit(scheduler: Any) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    subclass(pool, _maybe_evict_cached_block=lambda *_: False)


@planted("P1 every_block_is_free_or_held")
def hits_stay_in_the_free_queue(scheduler: Any) -> None:
    def touch(_right: Any, _self: Any, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    subclass(scheduler.kv_cache_manager.block_pool, touch=touch)


@planted(r"P8 |Cannot get \d+ free blocks")
def hits_cost_nothing(scheduler: Any) -> None:
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        subclass(manager, _get_num_evictable_blocks=lambda *_: 0)


@planted("P24 ", "drafts")
def drafts_are_turned_round(scheduler: Any) -> None:
    def update(right: Any, self: Any, drafts: Any) -> None:
        right(drafts)
        for name in drafts.req_ids:
            if name in self.requests:
                request = self.requests[name]
                request.spec_token_ids = request.spec_token_ids[::-1]

    subclass(scheduler, update_draft_token_ids=update)


@planted("P26 table_holds_the_slots_of_its_drafts|P8 row_gains_exactly", "drafts")
def drafts_have_no_slots(scheduler: Any) -> None:
    scheduler.num_lookahead_tokens = 0


@planted(r"P23 |request \w+ is admitted, and must wait", "grammar")
def grammars_are_not_waited_for(scheduler: Any) -> None:
    def promote(right: Any, _self: Any, request: Any) -> bool:
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            request.status = RequestStatus.WAITING
            return True
        return bool(right(request))

    subclass(scheduler, _try_promote_blocked_waiting_request=promote)


@planted("P23 ", "grammar", "drafts")
def drafts_are_not_held_to_the_grammar(scheduler: Any) -> None:
    manager = scheduler.structured_output_manager

    def update(right: Any, _self: Any, *args: Any) -> None:
        manager.should_advance = lambda _request: False
        right(*args)
        del manager.should_advance

    subclass(scheduler, update_draft_token_ids=update, update_draft_token_ids_in_output=update)


@planted("P22 |free_encoder_mm_hashes", "encoder")
def evicted_items_are_not_reported(scheduler: Any) -> None:
    def forget(right: Any, _self: Any) -> list[str]:
        right()
        return []

    subclass(scheduler.encoder_cache_manager, get_freed_mm_hashes=forget)


@planted("P22 |P16 |free_encoder_mm_hashes|encoder .*free", "encoder")
def youngest_item_is_evicted_first(scheduler: Any) -> None:
    def ask(right: Any, self: Any, *args: Any) -> bool:
        self.freeable = OrderedDict(reversed(self.freeable.items()))
        can = bool(right(*args))
        self.freeable = OrderedDict(reversed(self.freeable.items()))
        return can

    if hasattr(scheduler.encoder_cache_manager, "freeable"):
        subclass(scheduler.encoder_cache_manager, can_allocate=ask)


@planted("P19 ", "transfers")
def loads_are_published_at_once(scheduler: Any) -> None:
    def allocate(right: Any, _self: Any, *args: Any, **named: Any) -> Any:
        return right(*args, **{**named, "delay_cache_blocks": False})

    subclass(scheduler.kv_cache_manager, allocate_slots=allocate)


@planted("P17 |connector still (reads|writes|loads)", "transfers")
def aborted_loads_give_their_blocks_back(scheduler: Any) -> None:
    def free(right: Any, _self: Any, request: Any, **_named: Any) -> Any:
        return right(request)

    subclass(scheduler, _free_request=free)


@planted("P16 ", "priority")
def ties_go_to_the_youngest(scheduler: Any) -> None:
    def is_less(right: Any, self: Any, other: Any) -> bool:
        if self.priority == other.priority and self.arrival_time != other.arrival_time:
            return bool(self.arrival_time > other.arrival_time)
        return bool(right(other))

    def add(right: Any, _self: Any, request: Any) -> None:
        subclass(request, __lt__=is_less)
        right(request)

    subclass(scheduler, add_request=add)


@planted("P13 delivered_tokens_are_the_sampled_ones_until_the_stop", "drafts")
def tokens_behind_the_stop_are_delivered(scheduler: Any) -> None:
    def update(right: Any, _self: Any, request: Any, tokens: Any) -> Any:
        every = [*tokens]
        kept, stopped = right(request, tokens)
        return (every if stopped else kept), stopped

    subclass(scheduler, _update_request_with_output=update)


@planted("P20 |parent", "events")
def parents_of_blocks_are_not_reported(scheduler: Any) -> None:
    def publish(right: Any, self: Any, *args: Any, **named: Any) -> None:
        num_before = len(self.kv_event_queue)
        right(*args, **named)
        for event in self.kv_event_queue[num_before:]:
            event.parent_block_hash = None

    subclass(scheduler.kv_cache_manager.block_pool, cache_full_blocks=publish)


@planted("P5 attended_(blocks_are_held|position_has_a_block)", "window")
def windows_are_a_token_short(scheduler: Any) -> None:
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            subclass(manager, get_num_skipped_tokens=lambda right, _self, count: right(count + 1))


# The second set: ten.


@planted("P8 row_has_freed_skipped_blocks", "window")
def windows_are_never_left(scheduler: Any) -> None:
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            subclass(manager, remove_skipped_blocks=lambda *_: None)


@planted("P21 counters_grow_by_what_happened")
def queries_are_counted_twice(scheduler: Any) -> None:
    def get(right: Any, self: Any, request: Any) -> Any:
        found = right(request)
        self.prefix_cache_stats.queries *= 2
        return found

    subclass(scheduler.kv_cache_manager, get_computed_blocks=get)


@planted("P26 |block table that plans told")
def new_blocks_are_not_reported(scheduler: Any) -> None:
    def make(right: Any, _self: Any, running: Any, *rest: Any) -> Any:
        data = right(running, *rest)
        data.new_block_ids[: len(running)] = [None] * len(running)
        return data

    subclass(scheduler, _make_cached_request_data=make)


@planted("P25 ", "reset")
def reset_ignores_blocks_that_are_held(scheduler: Any) -> None:
    def reset(right: Any, self: Any) -> bool:
        if right():
            return True
        self.cached_block_hash_to_block = type(self.cached_block_hash_to_block)()
        for block in self.blocks:
            block.reset_hash()
        return True

    subclass(scheduler.kv_cache_manager.block_pool, reset_prefix_cache=reset)


@planted("P13 session_keeps_all|prompt_token_ids", "sessions")
def last_input_of_a_session_comes_first(scheduler: Any) -> None:
    def stop(right: Any, _self: Any, request: Any) -> bool:
        if request.resumable and request.streaming_queue:
            request.streaming_queue.rotate(1)
        return bool(right(request))

    subclass(scheduler, _handle_stopped_request=stop)


@planted("P10 loop_runs_while_there_is_work")
def loop_sleeps_while_requests_wait(scheduler: Any) -> None:
    subclass(scheduler, get_num_unfinished_requests=lambda _right, self: len(self.running))


@planted("P3 (computed|verified)_full_blocks_are_published")
def blocks_are_published_a_token_late(scheduler: Any) -> None:
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        subclass(
            manager, cache_blocks=lambda right, _self, request, count: right(request, count - 1)
        )


@planted("P13 finish_reason_is_the_one_that_holds", "stops")
def stop_tokens_are_ignored(scheduler: Any) -> None:
    def update(right: Any, _self: Any, request: Any, tokens: Any) -> Any:
        stops, request.sampling_params.stop_token_ids = request.sampling_params.stop_token_ids, []
        try:
            return right(request, tokens)
        finally:
            request.sampling_params.stop_token_ids = stops

    subclass(scheduler, _update_request_with_output=update)


@planted("P9 plan_stays_within_encoder_compute_budget", "encoder")
def encoder_budget_is_of_each_request(scheduler: Any) -> None:
    def ask(
        right: Any, _self: Any, request: Any, done: Any, new: Any, left: Any, **named: Any
    ) -> Any:
        items, new, _, loaded = right(request, done, new, left, **named)
        return items, new, left, loaded

    subclass(scheduler, _try_schedule_encoder_inputs=ask)


@planted("P19 ", "transfers")
def failed_loads_are_always_computed(scheduler: Any) -> None:
    scheduler.recompute_kv_load_failures = True
