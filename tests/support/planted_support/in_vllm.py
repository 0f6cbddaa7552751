"""Wrong decisions in the scheduler of an installed vLLM, each planted by a subclass of its class.

Imported where a vLLM is installed, and nowhere else.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.engines.adapters.vllm import VllmEngine
from blockstep.conformance.report.failure import render_first_failure
from blockstep.conformance.search.check import CheckResult, InProcess, check
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v
from planted_support import Planted, make_list
from planted_support.in_spec import PROFILE

PLANTED, planted = make_list()


def subclass(part: Any, **methods: Any) -> None:
    """Give an object a subclass of its class, with these methods.

    Each takes the method that it replaces, the object, and the arguments.
    """
    kind = type(part)

    def bind(name: str, method: Any) -> Any:
        right = getattr(kind, name)
        return lambda self, *args, **named: method(
            lambda *other, **others: right(self, *other, **others), self, *args, **named
        )

    bound = {name: bind(name, method) for name, method in methods.items()}
    part.__class__ = type(f"Wrong{kind.__name__}", (kind,), bound)


def build_factory(entry: Planted) -> EngineFactory:
    """A factory of adapters whose scheduler takes the wrong decision."""

    class Wrong(VllmEngine):
        def __init__(self, config: v.Config) -> None:
            super().__init__(config)
            entry.plant(self.scheduler)

    return Wrong


def run_check(entry: Planted) -> CheckResult:
    """Check the release with the wrong decision."""
    options = CheckOptions(
        engine="vllm", profile=PROFILE, max_events=40_000, with_features=entry.features
    )
    return check(options, place=InProcess(load=lambda _options: build_factory(entry)))


def make_first_line(entry: Planted) -> str:
    """Return the first line of the report of a check that meets the wrong decision."""
    result = run_check(entry)
    return (
        "it is not found" if result.first is None else render_first_failure(result).splitlines()[0]
    )


# Memory.


@planted("P16 (freed|preempted)_tail_is_evicted_first")
def tables_are_freed_from_their_head(scheduler: Any) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    subclass(pool, free_blocks=lambda right, _self, blocks: right(list(blocks)[::-1]))


@planted("P16 new_blocks_come_from_the_head_of_the_free_queue")
def blocks_are_taken_from_the_tail(scheduler: Any) -> None:
    def take(right: Any, self: Any, count: int) -> Any:
        queue = self.free_block_queue
        blocks = queue.get_all_free_blocks()[::-1][:count]
        for block in blocks:
            queue.remove(block)
        rest = queue.get_all_free_blocks()
        for block in rest:
            queue.remove(block)
        queue.append_n([*blocks, *rest])
        return right(count)

    subclass(scheduler.kv_cache_manager.block_pool, get_new_blocks=take)


@planted("P5 hit_is_the_longest_possible")
def hits_are_a_block_short(scheduler: Any) -> None:
    def find(right: Any, self: Any, hashes: Any, length: int) -> Any:
        return right(hashes, max(length - scheduler.block_size, 0))

    subclass(scheduler.kv_cache_manager.coordinator, find_longest_cache_hit=find)


@planted("P25 |kv_events is .*the spec has .*AllBlocksCleared")
def reset_clears_nothing(scheduler: Any) -> None:
    def reset(_right: Any, self: Any) -> bool:
        return bool(self.get_num_free_blocks() == self.num_gpu_blocks - 1)

    subclass(scheduler.kv_cache_manager.block_pool, reset_prefix_cache=reset)


@planted("P5 hit_is")
def cache_is_read_though_it_must_not_be(scheduler: Any) -> None:
    def find(right: Any, _self: Any, request: Any) -> Any:
        was, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        found = right(request)
        request.skip_reading_prefix_cache = was
        return found

    subclass(scheduler.kv_cache_manager, get_computed_blocks=find)


@planted("P8 admission_leaves_room_for_the_whole_prompt")
def gate_is_left_open(scheduler: Any) -> None:
    subclass(scheduler.kv_cache_manager, can_fit_full_sequence=lambda *_a, **_n: True)


@planted("P1 every_block_is_free_or_held|P17 every_hold|req_to_blocks")
def aborted_keep_their_blocks(scheduler: Any) -> None:
    def free(right: Any, _self: Any, request: Any) -> Any:
        return None if request.status.name == "FINISHED_ABORTED" else right(request)

    subclass(scheduler.kv_cache_manager, free=free)


# Order and budgets.


@planted("P16 queues_keep_their_order")
def preempted_wait_at_the_end(scheduler: Any) -> None:
    def preempt(right: Any, self: Any, request: Any, timestamp: float) -> None:
        right(request, timestamp)
        self.waiting.remove_request(request)
        self.waiting.add_request(request)

    subclass(scheduler, _preempt_request=preempt)


@planted("P16 preempted_priority|PREEMPTION: the plan preempts", "priority")
def most_urgent_is_preempted(scheduler: Any) -> None:
    def turn_round(requests: Any) -> None:
        for request in requests:
            request.priority = -request.priority

    def schedule(right: Any, self: Any) -> Any:
        self.turned = list(self.running)
        turn_round(self.turned)
        try:
            return right()
        finally:
            turn_round(self.turned)
            self.turned = []  # a forced reset preempts outside of a schedule

    def preempt(right: Any, self: Any, request: Any, timestamp: float) -> None:
        if request in self.turned:  # it waits by its own priority
            self.turned.remove(request)
            turn_round([request])
        right(request, timestamp)

    scheduler.turned = []
    subclass(scheduler, schedule=schedule, _preempt_request=preempt)


@planted("P9 (running_stays_within|worker_keeps_at_most)_max_num_seqs")
def one_more_request_runs(scheduler: Any) -> None:
    scheduler.max_num_running_reqs += 1


@planted("P15 (running|admitted)_request_gets_all|P15 head_of_the_queue|num_scheduled_tokens")
def budget_is_one_token_short(scheduler: Any) -> None:
    scheduler.max_num_scheduled_tokens -= scheduler.max_num_scheduled_tokens > 1


@planted("P9 row_stays_within_its_caps")
def threshold_is_forgotten(scheduler: Any) -> None:
    scheduler.scheduler_config.long_prefill_token_threshold = 0


@planted("P9 running_stays_within_max_loras", "adapters")
def adapters_are_not_counted(scheduler: Any) -> None:
    scheduler.lora_config = None


# What plans, outputs and events report.


@planted("P26 (plan_names_the_finished|finished_ids_wait)|finished_req_ids")
def aborted_are_not_reported(scheduler: Any) -> None:
    def finish(right: Any, self: Any, ids: Any, status: Any) -> Any:
        done = right(ids, status)
        self.finished_req_ids -= {ids} if isinstance(ids, str) else set(ids or ())
        return done

    subclass(scheduler, finish_requests=finish)


@planted("P20 |kv_events", "events")
def stored_blocks_are_not_reported(scheduler: Any) -> None:
    def publish(right: Any, self: Any, *args: Any, **named: Any) -> None:
        num_before = len(self.kv_event_queue)
        right(*args, **named)
        del self.kv_event_queue[num_before:]

    subclass(scheduler.kv_cache_manager.block_pool, cache_full_blocks=publish)


@planted("P21 reported_cached_tokens|num_cached_tokens")
def cached_tokens_are_always_none(scheduler: Any) -> None:
    def schedule(right: Any, self: Any) -> Any:
        output = right()
        for row in output.scheduled_new_reqs:
            self.requests[row.req_id].num_cached_tokens = 0
        return output

    subclass(scheduler, schedule=schedule)


@planted("P26 sent_tokens_are_those_of_the_worker|all_token_ids")
def resumed_are_sent_without_their_outputs(scheduler: Any) -> None:
    def make(right: Any, self: Any, running: Any, resumed: Any, *rest: Any) -> Any:
        data = right(running, resumed, *rest)
        for request in resumed:
            tokens = data.all_token_ids.get(request.request_id)
            if tokens is not None:
                data.all_token_ids[request.request_id] = tokens[: request.num_prompt_tokens]
        return data

    subclass(scheduler, _make_cached_request_data=make)


# Ends.


@planted("P13 finish_reason_is_the_one_that_holds")
def requests_end_a_token_late(scheduler: Any) -> None:
    def update(right: Any, _self: Any, request: Any, tokens: Any) -> Any:
        request.max_tokens += 1
        try:
            return right(request, tokens)
        finally:
            request.max_tokens -= 1

    subclass(scheduler, _update_request_with_output=update)


@planted("P13 finish_reason_is_the_one_that_holds")
def minimum_of_tokens_is_forgotten(scheduler: Any) -> None:
    def update(right: Any, _self: Any, request: Any, tokens: Any) -> Any:
        least, request.sampling_params.min_tokens = request.sampling_params.min_tokens, 0
        try:
            return right(request, tokens)
        finally:
            request.sampling_params.min_tokens = least

    subclass(scheduler, _update_request_with_output=update)


@planted("P14 sampling_leaves_one_token|P12 counters_stay", "drafts")
def rejected_draft_counts_as_computed(scheduler: Any) -> None:
    def update(right: Any, self: Any, output: Any, answer: Any) -> Any:
        done = right(output, answer)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            request = self.requests.get(name)
            sampled = answer.sampled_token_ids[answer.req_id_to_index[name]]
            if request is not None and 0 < len(sampled) <= len(drafts):
                request.num_computed_tokens += request.num_computed_tokens > 0
        return done

    subclass(scheduler, update_from_output=update)


@planted("P24 attached_drafts|P12 only_running_requests_hold|spec_token_ids", "drafts")
def drafts_survive_preemption(scheduler: Any) -> None:
    def preempt(right: Any, _self: Any, request: Any, timestamp: float) -> None:
        drafts = request.spec_token_ids
        right(request, timestamp)
        request.spec_token_ids = drafts

    subclass(scheduler, _preempt_request=preempt)


# A store.


@planted("P18 received_are_those|P17 every_hold|STALL", "transfers")
def end_of_a_read_is_lost(scheduler: Any) -> None:
    def take(right: Any, _self: Any, report: Any) -> None:
        report.finished_recving = None
        right(report)

    subclass(scheduler, _update_from_kv_xfer_finished=take)


@planted("P17 every_hold_has_an_owner_and_an_end", "transfers")
def end_of_a_save_is_lost(scheduler: Any) -> None:
    def take(right: Any, _self: Any, report: Any) -> None:
        report.finished_sending = None
        right(report)

    subclass(scheduler, _update_from_kv_xfer_finished=take)


@planted("P17 ", "transfers")
def blocks_are_freed_while_a_store_reads(scheduler: Any) -> None:
    def finish(right: Any, _self: Any, request: Any) -> Any:
        _, parameters = right(request)
        return False, parameters

    subclass(scheduler, _connector_finished=finish)


@planted("P19 ", "transfers")
def invalid_blocks_are_passed_over(scheduler: Any) -> None:
    subclass(scheduler, _handle_invalid_blocks=lambda *_a, **_n: set())


# Items, grammars, sessions.


@planted("P22 encoder_cache_adds_up", "encoder")
def items_are_never_let_go(scheduler: Any) -> None:
    subclass(scheduler, _free_encoder_inputs=lambda *_a, **_n: None)


@planted("P23 |bitmask", "grammar")
def mask_lacks_its_last_row(scheduler: Any) -> None:
    def ask(right: Any, self: Any, output: Any) -> Any:
        answer = right(output)
        if answer is not None:
            answer.structured_output_request_ids = answer.structured_output_request_ids[:-1]
        return answer

    subclass(scheduler, get_grammar_bitmask=ask)


@planted("P13 session_keeps_all|prompt_token_ids", "sessions")
def sessions_forget_their_outputs(scheduler: Any) -> None:
    def update(right: Any, _self: Any, session: Any, chunk: Any) -> None:
        computed = session.num_computed_tokens
        session.num_computed_tokens = min(computed, session.num_prompt_tokens)
        right(session, chunk)

    subclass(scheduler, _update_request_as_session=update)


# From some fifty variants of all parts of the scheduler, by which weak headlines were found and
# mended: the first six had one. They were not held out.


@planted("P16 queues_keep_their_order")
def skipped_are_turned_round(scheduler: Any) -> None:
    def prepend(_right: Any, self: Any, requests: Any) -> None:
        for request in list(requests):
            self.add_request(request)

    subclass(scheduler.skipped_waiting, prepend_requests=prepend)


@planted(r"P9 row_stays_within_its_caps|P15 |runs \d+ tokens, the spec")
def threshold_is_a_token_less(scheduler: Any) -> None:
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    scheduler.scheduler_config.long_prefill_token_threshold -= threshold > 1


@planted("P12 preempted_request_starts_again|P26 new_row_is_new|status is waiting")
def preempted_have_the_status_of_new_ones(scheduler: Any) -> None:
    def preempt(right: Any, _self: Any, request: Any, timestamp: float) -> None:
        right(request, timestamp)
        request.status = RequestStatus.WAITING

    subclass(scheduler, _preempt_request=preempt)


@planted("P12 only_running_requests_hold_anything|P1 every_block_is_free_or_held")
def preempted_keep_their_blocks(scheduler: Any) -> None:
    def preempt(right: Any, self: Any, request: Any, timestamp: float) -> None:
        self.kv_cache_manager.free = lambda _request: None
        right(request, timestamp)
        del self.kv_cache_manager.free

    subclass(scheduler, _preempt_request=preempt)


@planted("is evicted from the cache")
def freed_blocks_leave_the_cache(scheduler: Any) -> None:
    def free(right: Any, self: Any, blocks: Any) -> None:
        freed = list(blocks)
        right(freed)
        for block in freed:
            if block.ref_cnt == 0 and not block.is_null:
                self._maybe_evict_cached_block(block)

    subclass(scheduler.kv_cache_manager.block_pool, free_blocks=free)


@planted("P4 (only_computed|block_still)")
def blocks_are_published_a_token_early(scheduler: Any) -> None:
    def cache(right: Any, self: Any, request: Any, count: int) -> None:
        right(request, min(count + 1, len(request.block_hashes) * self.block_size))

    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        subclass(manager, cache_blocks=cache)


@planted("P16 admissions_follow_the_policy", "grammar")
def waiting_come_before_skipped(scheduler: Any) -> None:
    def select(_right: Any, self: Any) -> Any:
        return self.waiting or self.skipped_waiting or None

    subclass(scheduler, _select_waiting_queue_for_scheduling=select)


@planted("P12 preempted_request_starts_again")
def preempted_lose_their_outputs(scheduler: Any) -> None:
    def preempt(right: Any, _self: Any, request: Any, timestamp: float) -> None:
        right(request, timestamp)
        del request._all_token_ids[request.num_prompt_tokens :]
        request._output_token_ids.clear()

    subclass(scheduler, _preempt_request=preempt)


@planted("P26 plan_names_the_preempted|preempted_req_ids")
def preempted_are_not_reported(scheduler: Any) -> None:
    def schedule(right: Any, _self: Any) -> Any:
        output = right()
        output.preempted_req_ids = set()
        return output

    subclass(scheduler, schedule=schedule)


@planted("P22 only_running_requests_hold_items", "encoder")
def victims_keep_their_items(scheduler: Any) -> None:
    def preempt(right: Any, self: Any, request: Any, timestamp: float) -> None:
        self.encoder_cache_manager.free = lambda _request: None
        right(request, timestamp)
        del self.encoder_cache_manager.free

    subclass(scheduler, _preempt_request=preempt)
