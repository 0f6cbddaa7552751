"""Wrong decisions in an engine that follows vLLM 0.19.1, planted in a copy of the specification.

The engine is the specification under the release's profile, with one rule replaced or one signal
lost, and without the counters that the release does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blockstep.conformance.engine import ALL_CAPABILITIES, Capability, EngineFactory
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.core.admission import (
    count_running_slots,
    get_num_cached_tokens,
    process_passed_over,
)
from blockstep.spec.core.block_pool import free_blocks
from blockstep.spec.core.endings import compute_stop
from blockstep.spec.core.preemption import get_preempted
from blockstep.spec.core.queues import select_victim
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.token_budget import get_threshold
from blockstep.spec.features.encoder.cache import free_items
from blockstep.spec.features.full_isl import can_finish
from blockstep.spec.features.identity import get_item_keys
from blockstep.spec.features.kv_events import get_stored
from blockstep.spec.features.kv_transfer.transfers import compute_num_external
from blockstep.spec.features.mamba import is_zeroed
from blockstep.spec.features.sessions import get_num_kept
from blockstep.spec.features.structured_output import list_masked
from blockstep.spec.profiles import get_profile
from planted_support import Planted, make_list

PROFILE = "vllm-0.19.1"
PLANTED, planted = make_list()


class Release(SpecEngine):
    """The specification as the release decides."""

    def __init__(self, config: v.Config) -> None:
        profile = get_profile(PROFILE)
        assert profile is not None
        super().__init__(config, profile)

    def capabilities(self) -> frozenset[str]:
        """Return the capabilities of a release, which has no counter of preemptions."""
        return ALL_CAPABILITIES - {Capability.STATISTICS, Capability.CACHE_STATISTICS}

    @property
    def rules(self) -> Rules:
        """The rules by which it decides."""
        return self.state.rules

    def plant(self, function: Callable[..., Any], by: Callable[..., Any]) -> None:
        """Call `by` instead of a function of the specification from now on."""
        self.state = replace(self.state, rules=self.rules.replacing(function, by))


def build_factory(entry: Planted) -> EngineFactory:
    """A factory of engines that take the wrong decision."""

    class Wrong(Release):
        def __init__(self, config: v.Config) -> None:
            super().__init__(config)
            entry.plant(self)

    return Wrong


# Memory.


@planted("evicted_first")
def tables_are_freed_from_their_head(engine: Release) -> None:
    right = engine.rules[free_blocks]
    engine.plant(free_blocks, lambda pool, table: right(pool, tuple(table)[::-1]))


@planted("P8 admission_leaves_room_for_the_whole_prompt")
def gate_is_left_open(engine: Release) -> None:
    engine.plant(can_finish, lambda *_: True)


@planted("P12 .*num_computed_tokens")
def preempted_keep_a_computed_token(engine: Release) -> None:
    right = engine.rules[get_preempted]
    engine.plant(get_preempted, lambda one: replace(right(one), num_computed_tokens=1))


@planted("P6 |items")
def items_do_not_name_blocks(engine: Release) -> None:
    engine.plant(get_item_keys, lambda *_: ())


# Order and budgets.


@planted("P16 preempted_priority|PREEMPTION: the plan preempts")
def most_urgent_is_preempted(engine: Release) -> None:
    def select(policy: v.Policy, running: Any, requests: Any) -> int:
        if policy is not v.Policy.PRIORITY:
            return right(policy, running, requests)
        asked = [requests[name].request for name in running]
        ranks = [(-one.priority, -one.arrival_time) for one in asked]
        return ranks.index(max(ranks))

    right = engine.rules[select_victim]
    engine.plant(select_victim, select)


@planted("P9 row_stays_within_its_caps")
def threshold_is_forgotten(engine: Release) -> None:
    engine.plant(get_threshold, lambda _step: 0)


@planted("P9 running_stays_within_max_num_seqs")
def one_more_request_runs(engine: Release) -> None:
    engine.plant(count_running_slots, lambda step: max(len(step.running) - 1, 0))


@planted("P16 queues_keep_their_order|waiting")
def skipped_requests_return_reversed(engine: Release) -> None:
    def put_back(step: Any) -> None:
        step.passed_over.reverse()
        right(step)

    right = engine.rules[process_passed_over]
    engine.plant(process_passed_over, put_back)


# What plans, outputs and events report.


@planted("num_cached_tokens|cached")
def cached_tokens_are_always_none(engine: Release) -> None:
    engine.plant(get_num_cached_tokens, lambda *_: 0)


@planted("P20 |kv_events", "events")
def stored_blocks_are_not_reported(engine: Release) -> None:
    engine.plant(get_stored, lambda *_: ())


@planted("finished_req_ids|plan_names_the_finished|finished_ids_wait")
def aborted_are_not_reported(engine: Release) -> None:
    right = engine.apply

    def apply(event: v.Event) -> v.Observation:
        before = engine.state.finished_req_ids
        answer = right(event)
        if isinstance(event, v.Abort):
            engine.state = replace(engine.state, finished_req_ids=before)
        return answer

    engine.apply = apply  # type: ignore[method-assign]


@planted("new_block_ids_to_zero|zero", "groups")
def new_blocks_are_not_zeroed(engine: Release) -> None:
    engine.plant(is_zeroed, lambda _group: False)


# Ends.


@planted("P13 finish_reason_is_the_one_that_holds")
def requests_end_a_token_late(engine: Release) -> None:
    right = engine.rules[compute_stop]

    def stop(request: Any, outputs: Any, known: int, most: int) -> Any:
        later = replace(request.request, max_tokens=request.request.max_tokens + 1)
        return right(replace(request, request=later), outputs, known, most)

    engine.plant(compute_stop, stop)


@planted("P24 |spec_token_ids", "drafts")
def drafts_survive_preemption(engine: Release) -> None:
    right = engine.rules[get_preempted]
    engine.plant(get_preempted, lambda one: replace(right(one), spec_token_ids=one.spec_token_ids))


# A store.


def lose(engine: Release, **lost: Any) -> None:
    """Have the engine not hear a part of each report of transfers."""
    right = engine.apply

    def apply(event: v.Event) -> v.Observation:
        if isinstance(event, v.Commit | v.TransfersReported):
            event = replace(event, transfers=replace(event.transfers, **lost))
        return right(event)

    engine.apply = apply  # type: ignore[method-assign]


@planted("P17 |P18 |P10 ", "transfers")
def end_of_a_read_is_lost(engine: Release) -> None:
    lose(engine, finished_recving=())


@planted("P17 |P18 ", "transfers")
def end_of_a_save_is_lost(engine: Release) -> None:
    lose(engine, finished_sending=())


@planted("P19 |invalid|load", "transfers")
def invalid_blocks_are_passed_over(engine: Release) -> None:
    lose(engine, invalid_block_ids=())


@planted("load|external|P18 ", "transfers")
def a_token_less_is_loaded(engine: Release) -> None:
    right = engine.rules[compute_num_external]
    engine.plant(compute_num_external, lambda *args: max(right(*args) - 1, 0))


# Items, grammars, sessions.


@planted("P22 |encoder|item", "encoder")
def items_are_never_let_go(engine: Release) -> None:
    engine.plant(free_items, lambda encoder, *_: encoder)


@planted("P23 |mask|grammar", "grammar")
def mask_has_no_rows(engine: Release) -> None:
    engine.plant(list_masked, lambda *_: [])


@planted("session|kept|prompt_token_ids|outputs|P13 |P12 ", "sessions")
def sessions_forget_their_outputs(engine: Release) -> None:
    right = engine.rules[get_num_kept]
    engine.plant(get_num_kept, lambda one: min(right(one), len(one.request.prompt_token_ids)))
