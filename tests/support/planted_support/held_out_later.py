"""A third held-out set: twenty more wrong decisions in an installed vLLM.

Decisions, docstrings and patterns were written and committed before any of them was run against
Blockstep. Each docstring says which decision is wrong, for a reader who has only the first line of
a report and says what is wrong. A pattern matches what must be read there, whether it is the name
of a check or the headline of a decision.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import RequestStatus

from planted_support import make_list
from planted_support.in_vllm import subclass

PLANTED, planted = make_list()


def edit(part: Any, name: str, old: str, new: str) -> None:
    """Give an object a subclass of its class, whose method `name` is the one that it replaces with
    an expression exchanged: for a decision in the middle of a long method.

    The method must not use `super()`.
    """
    right = getattr(type(part), name)
    source = textwrap.dedent(inspect.getsource(right))
    assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
    scope: dict[str, Any] = {}
    exec(source.replace(old, new), right.__globals__, scope)
    subclass(part, **{name: lambda _right, self, *args, **named: scope[name](self, *args, **named)})


# Order and budgets.


@planted(r"P16 admissions_follow_the_policy|request \S+ is (not admitted|admitted, and must wait)")
def new_requests_overtake_the_skipped(scheduler: Any) -> None:
    """Under FCFS, requests that an earlier step skipped are tried for admission after new ones."""

    def select(right: Any, self: Any) -> Any:
        if self.policy is SchedulingPolicy.FCFS:
            return self.waiting or self.skipped_waiting or None
        return right()

    subclass(scheduler, _select_waiting_queue_for_scheduling=select)


@planted(r"\brunning(\[\d+\])? is |order of the running")
def last_runner_moves_up_where_one_ends(scheduler: Any) -> None:
    """When a running request ends, the last one of the running list takes its place, so the running
    list is no longer in the order of admission."""

    def update(right: Any, self: Any, *args: Any) -> Any:
        order = [*self.running]
        done = right(*args)
        for ended in [it for it in order if it not in self.running]:
            last = order.pop()
            if last is not ended:
                order[order.index(ended)] = last
        self.running = order
        return done

    subclass(scheduler, update_from_output=update)


@planted("P15 tokens_of_a_preempted_row_are_given_back", "priority")
def tokens_of_a_victim_are_lost(scheduler: Any) -> None:
    """The tokens of a row that is withdrawn by a preemption are not given back to the token budget
    of the step."""
    edit(
        scheduler,
        "schedule",
        "token_budget += num_scheduled_tokens.pop(",
        "num_scheduled_tokens.pop(",
    )


@planted(r"request \S+ runs \d+ tokens, the spec \d+")
def hits_count_against_the_threshold(scheduler: Any) -> None:
    """Cached tokens count against the long-prefill threshold at admission: a request with a prefix
    hit gets fewer tokens than the threshold allows."""
    edit(
        scheduler,
        "schedule",
        "num_new_tokens = threshold",
        "num_new_tokens = max(threshold - num_computed_tokens, 1)",
    )


@planted(
    r"P15 head_of_the_queue|P16 admissions_follow_the_policy|request \S+ is not admitted",
    "adapters",
)
def seated_adapters_are_refused(scheduler: Any) -> None:
    """While as many adapters run as max_loras, a waiting request is skipped even if its own adapter
    is one of those that run."""
    edit(scheduler, "schedule", "and request.lora_request.lora_int_id not in scheduled_loras", "")


@planted("P16 preempted_fcfs_are_the_youngest|PREEMPTION: the plan preempts")
def needy_are_preempted_themselves(scheduler: Any) -> None:
    """Under FCFS, a running request that gets no block is preempted itself, instead of the youngest
    running one."""
    edit(scheduler, "schedule", "self.running.pop()", "self.running.pop(req_index)")


@planted(r"P15 no_row_after_the_last_token|request \S+ gets tokens, and must wait", "async")
def one_step_too_many_is_planned(scheduler: Any) -> None:
    """With asynchronous scheduling, a request whose last output token is already in flight gets one
    more row (off by one)."""
    edit(
        scheduler,
        "schedule",
        "request.num_computed_tokens + 2 - request",
        "request.num_computed_tokens + 1 - request",
    )


# Memory.


@planted("P16 (freed|preempted)_tail_is_evicted_first|free_queue")
def plain_blocks_are_freed_to_the_front(scheduler: Any) -> None:
    """A freed block that is not cached goes to the head of the free queue, not to its tail."""

    def free(right: Any, self: Any, blocks: Any) -> None:
        blocks, queue = [*blocks], self.free_block_queue
        right(blocks)
        plain = [it for it in blocks if not (it.ref_cnt or it.is_null or it.block_hash)]
        rest = [it for it in queue.get_all_free_blocks() if it not in plain]
        for block in [*plain, *rest]:
            queue.remove(block)
        queue.append_n([*plain, *rest])

    subclass(scheduler.kv_cache_manager.block_pool, free_blocks=free)


@planted("P3 (computed|verified)_full_blocks_are_published")
def requests_that_skip_reading_do_not_publish(scheduler: Any) -> None:
    """The blocks of a request that must not read the prefix cache are not put into it either."""

    def publish(right: Any, _self: Any, request: Any, count: int) -> None:
        if not request.skip_reading_prefix_cache:
            right(request, count)

    subclass(scheduler.kv_cache_manager.coordinator, cache_blocks=publish)


@planted(
    r"P5 (attended_(blocks_are_held|position_has_a_block)|hit_is_whole_blocks)"
    r"|request \S+ begins at",
    "window",
)
def window_hits_need_a_block_less(scheduler: Any) -> None:
    """A prefix hit in a sliding-window group is accepted with one cached block fewer than the
    window needs, so a block that the next token attends to is missing."""

    def wrong(kind: Any) -> Any:
        def find(_cls: Any, /, **named: Any) -> Any:
            spec = named["kv_cache_spec"]
            less = max(spec.sliding_window - spec.block_size, 1)
            return kind.find_longest_cache_hit(
                **{**named, "kv_cache_spec": replace(spec, sliding_window=less)}
            )

        return type("WrongManager", (kind,), {"find_longest_cache_hit": classmethod(find)})

    coordinator = scheduler.kv_cache_manager.coordinator
    for manager in coordinator.single_type_managers:
        if isinstance(manager, SlidingWindowManager):
            manager.__class__ = wrong(type(manager))
    coordinator.attention_groups = [
        (spec, ids, wrong(kind) if issubclass(kind, SlidingWindowManager) else kind)
        for spec, ids, kind in getattr(coordinator, "attention_groups", ())
    ]


@planted(r"P16 queues_keep_their_order|\bwaiting(\[\d+\])? is ", "reset")
def reset_turns_the_queue_round(scheduler: Any) -> None:
    """Under FCFS, a forced reset puts the running requests back into the waiting queue in reverse
    order, the youngest first."""

    def reset(right: Any, self: Any, reset_running_requests: bool = False, **named: Any) -> bool:
        if reset_running_requests and self.policy is SchedulingPolicy.FCFS:
            self.running.reverse()
        return bool(right(reset_running_requests, **named))

    subclass(scheduler, reset_prefix_cache=reset)


# Drafts, grammars, ends.


@planted("P24 dispatched_drafts_are_the_last_proposed_ones|draft_token_ids", "drafts")
def cut_rows_keep_their_last_drafts(scheduler: Any) -> None:
    """A row that has room for some of its drafts only verifies the last ones instead of the
    first."""
    edit(
        scheduler,
        "schedule",
        "spec_token_ids[:num_scheduled_spec_tokens]",
        "spec_token_ids[-num_scheduled_spec_tokens:]",
    )


@planted("P23 grammar_state_follows_outputs|grammar_state", "masks", "drafts")
def masks_leave_the_grammar_advanced(scheduler: Any) -> None:
    """Building the bitmask of a row with one draft leaves its grammar advanced by that draft: it is
    rolled back from two on."""
    manager = scheduler.structured_output_manager
    edit(manager, "grammar_bitmask", "if state_advancements > 0", "if state_advancements > 1")


@planted(r"P13 finish_reason_is_the_one_that_holds|request \S+ has finish reason", "stops")
def repetitions_begin_in_the_prompt(scheduler: Any) -> None:
    """Repetition detection looks at the tokens of the prompt as well as at the outputs, so a
    request ends for a repetition that its outputs alone do not have."""

    def update(right: Any, _self: Any, request: Any, tokens: Any) -> Any:
        outputs, request.output_token_ids = request.output_token_ids, request.all_token_ids
        try:
            return right(request, tokens)
        finally:
            request.output_token_ids = outputs

    subclass(scheduler, _update_request_with_output=update)


# Sessions, items, a store.


@planted("P13 end_of_input_finishes_an_idle_session", "sessions")
def end_of_an_idle_session_is_ignored(scheduler: Any) -> None:
    """The end of the input of a session is ignored if the session is idle, so the session does not
    end."""

    def add(right: Any, self: Any, request: Any) -> None:
        session = self.requests.get(request.request_id)
        is_idle = session and session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        if request.resumable or not is_idle:
            right(request)

    subclass(scheduler, add_request=add)


@planted("P22 only_running_requests_hold_items", "encoder")
def preempted_keep_their_items(scheduler: Any) -> None:
    """A preempted request keeps its references to items in the encoder cache."""
    manager = scheduler.encoder_cache_manager

    def free(right: Any, _self: Any, request: Any) -> None:
        if request.status is not RequestStatus.RUNNING:
            right(request)

    if not scheduler.is_encoder_decoder:  # such a model has no items in a cache
        subclass(manager, free=free)


@planted(
    r"P16 admissions_follow_the_policy|P19 load_is_what_the_store_offers"
    r"|request \S+ is admitted, and must wait",
    "transfers",
)
def undecided_stores_are_not_waited_for(scheduler: Any) -> None:
    """A request is admitted without a load while the store cannot say yet how many of its tokens it
    has."""
    edit(
        scheduler, "schedule", "if ext_tokens is None", "if (ext_tokens := ext_tokens or 0) is None"
    )


# What plans, outputs and events report.


@planted("P10 loop_sleeps_without_work", "pause")
def paused_loop_never_sleeps(scheduler: Any) -> None:
    """While new requests are paused, the scheduler says that it has work if requests only wait, so
    its loop spins."""

    def count(right: Any, self: Any) -> int:
        state = self._pause_state
        if state is PauseState.PAUSED_NEW:
            self._pause_state = PauseState.UNPAUSED
        try:
            return int(right())
        finally:
            self._pause_state = state

    subclass(scheduler, get_num_unfinished_requests=count)


@planted("P20 kv_events_rebuild_the_cache|kv_events", "events")
def evictions_are_not_reported(scheduler: Any) -> None:
    """No KV event tells that a cached block was evicted when it was given to another request."""

    def evict(right: Any, self: Any, block: Any) -> bool:
        num_before = len(self.kv_event_queue)
        is_evicted = bool(right(block))
        del self.kv_event_queue[num_before:]
        return is_evicted

    subclass(scheduler.kv_cache_manager.block_pool, _maybe_evict_cached_block=evict)


@planted("kv_cache_usage")
def usage_counts_the_null_block(scheduler: Any) -> None:
    """The reported usage of the KV cache counts the null block as a block that requests could
    use."""
    subclass(
        scheduler.kv_cache_manager.block_pool,
        get_usage=lambda _right, self: 1 - self.get_num_free_blocks() / self.num_gpu_blocks,
    )
