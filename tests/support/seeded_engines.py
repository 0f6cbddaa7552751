"""Engines with one defect each, that answer and show their state as any other engine would.

Each is the specification with a wrong rule, and each defect is one that was reported of a real
engine, or is the plainest one against a property that `safety` asks. Each is listed
with the check that must find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from other_policies import Unlike

from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.spec import vocabulary as v
from blockstep.spec.core.admission import count_running_slots, get_num_cached_tokens
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.lifecycle import process_abort
from blockstep.spec.core.parts import Part
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.prefix_cache import compute_max_hit_blocks, find_hit, find_published
from blockstep.spec.core.requests import Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import get_num_running_tokens
from blockstep.spec.core.slots import allocate_slots
from blockstep.spec.core.speculation import can_take_drafts
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.kv_transfer import get_reported
from blockstep.spec.features.pins import process_pin_expiry
from blockstep.spec.features.sessions import RESTING, process_streaming_update
from blockstep.spec.features.structured_output import process_grammar_failed
from blockstep.spec.transition import process_event

PUT_ASIDE: Final = Part[tuple[v.KVTransfers, ...]]("put_aside", ())


def put_reports_aside(rules: Rules, _config: v.Config) -> Rules:
    def report(
        state: State, transfers: v.KVTransfers, failed: Sequence[v.RequestId]
    ) -> tuple[State, tuple[v.OutputRow, ...]]:
        state = PUT_ASIDE.put(state, (*PUT_ASIDE.of(state), transfers))
        return rules[get_reported](state, v.NO_TRANSFERS, failed)

    def apply(state: State, event: v.Event) -> tuple[State, v.Observation] | v.Rejected:
        result = rules[process_event](state, event)
        if isinstance(result, v.Rejected):
            return result
        state, observation = result
        if state.waiting or state.skipped_waiting:
            reports, state = PUT_ASIDE.of(state), PUT_ASIDE.put(state, ())
            for one in reports:
                state, _ = rules[get_reported](state, one, ())
        return state, observation

    return rules.replacing(get_reported, report).replacing(process_event, apply)


class PutsReportsAside(Unlike):
    """It handles a store's reports of finished reads only while a request waits (SGLang #20049)."""

    change = staticmethod(put_reports_aside)


def report_last_hit(rules: Rules, _config: v.Config) -> Rules:
    def count(request: RequestState, num_start: int) -> int:
        if request.num_computed_tokens:
            return rules[get_num_cached_tokens](request, num_start)
        return num_start

    return rules.replacing(get_num_cached_tokens, count)


class ReportsLastHit(Unlike):
    """It reports to clients the hit of the last admission, not of the first (LMCache #2912)."""

    change = staticmethod(report_last_hit)


def count_rows(rules: Rules, _config: v.Config) -> Rules:
    def count(step: Step, request: RequestState) -> int:
        is_last = len(step.running) > 1 and request.request_id == step.running[-1]
        if step.waiting and is_last:
            return 0
        return rules[get_num_running_tokens](step, request)

    changed = rules.replacing(count_running_slots, lambda step: len(step.rows))
    return changed.replacing(get_num_running_tokens, count)


class SlotsOfRows(Unlike):
    """It counts the rows of a step against `max_num_seqs`, and leaves out a running request."""

    change = staticmethod(count_rows)


def keep_old_drafts(rules: Rules, _config: v.Config) -> Rules:
    return rules.replacing(
        can_take_drafts,
        lambda _state, request: (
            request.status is v.Status.RUNNING and bool(request.output_token_ids)
        ),
    )


class KeepsOldDrafts(Unlike):
    """It takes drafts for a request in flight, and runs them at another position."""

    change = staticmethod(keep_old_drafts)


def report_no_aborts(rules: Rules, _config: v.Config) -> Rules:
    def abort(state: State, request_ids: tuple[v.RequestId, ...]) -> tuple[State, v.Aborted]:
        after, aborted = rules[process_abort](state, request_ids)
        return replace(after, finished_req_ids=state.finished_req_ids), aborted

    return rules.replacing(process_abort, abort)


class ReportsNoAborts(Unlike):
    """It leaves the names of aborted requests out of its plans."""

    change = staticmethod(report_no_aborts)


def ignore_failed_grammars(rules: Rules, _config: v.Config) -> Rules:
    def fail(state: State, event: v.GrammarFailed) -> tuple[State, v.Outputs] | v.Rejected:
        if event.request_id in state.requests:
            return state, v.Outputs()
        return rules[process_grammar_failed](state, event)

    return rules.replacing(process_grammar_failed, fail)


class IgnoresFailedGrammars(Unlike):
    """A failed grammar does not end its request."""

    change = staticmethod(ignore_failed_grammars)


def leave_sessions(rules: Rules, _config: v.Config) -> Rules:
    def update(state: State, event: v.StreamingUpdate) -> Any:
        request = state.requests.get(event.request.request_id)
        if request is not None and request.status is RESTING and not event.request.resumable:
            return state, v.Ack()
        return rules[process_streaming_update](state, event)

    return rules.replacing(process_streaming_update, update)


class LeavesSessions(Unlike):
    """An idle session stays when its client ends the input."""

    change = staticmethod(leave_sessions)


def keep_pins(rules: Rules, _config: v.Config) -> Rules:
    return rules.replacing(process_pin_expiry, lambda _step: None)


class KeepsPins(Unlike):
    """It keeps pinned blocks longer than their time."""

    change = staticmethod(keep_pins)


def count_twice(rules: Rules, _config: v.Config) -> Rules:
    def preempt(step: Step, victim_index: int) -> v.RequestId:
        step.stats = replace(step.stats, preemptions=step.stats.preemptions + 1)
        return rules[process_preemption](step, victim_index)

    return rules.replacing(process_preemption, preempt)


class CountsTwice(Unlike):
    """It counts each preempted request twice."""

    change = staticmethod(count_twice)


def drop_no_hit(rules: Rules, config: v.Config) -> Rules:
    def find(config: v.Config, pool: Pool, request: RequestState) -> Hit:
        most = compute_max_hit_blocks(request.num_known_tokens, config.block_size)
        hit = find_published(pool, request.block_keys[:most])
        return Hit(len(hit) * config.block_size, (hit,))

    return rules if config.groups else rules.replacing(find_hit, find)


class DropsNoHit(Unlike):
    """It does not drop the last block of a hit for a draft head."""

    change = staticmethod(drop_no_hit)


def look_not_ahead(rules: Rules, _config: v.Config) -> Rules:
    allocate_rightly = rules[allocate_slots]

    def allocate(
        config: v.Config,
        pool: Pool,
        request: RequestState,
        num_new: int,
        _num_lookahead: int = 0,
        *others: Any,
        **named: Any,
    ) -> Any:
        return allocate_rightly(config, pool, request, num_new, 0, *others, **named)

    return rules.replacing(allocate_slots, allocate)


class LooksNotAhead(Unlike):
    """It allocates no slots for drafts."""

    change = staticmethod(look_not_ahead)


class Seeded(NamedTuple):
    """A defect, and the check that must find it."""

    engine: type[ChangedSpec]
    sentence: str
    features: tuple[str, ...] = ()
    if_hidden: str = ""
    """The check that finds it where no state is shown; "" if it cannot be found then."""


SEEDED = (
    Seeded(PutsReportsAside, "every_hold_has_an_owner_and_an_end", ("transfers",)),
    Seeded(ReportsLastHit, "first_hit_is_remembered",
        if_hidden="reported_cached_tokens_are_of_the_first_hit"),
    Seeded(SlotsOfRows, "worker_keeps_at_most_max_num_seqs_requests",
        if_hidden="worker_keeps_at_most_max_num_seqs_requests"),
    Seeded(KeepsOldDrafts, "dispatched_drafts_are_the_last_proposed_ones", ("drafts",),
        "dispatched_drafts_are_the_last_proposed_ones"),
    Seeded(ReportsNoAborts, "plan_names_the_finished", if_hidden="plan_names_the_finished"),
    Seeded(IgnoresFailedGrammars, "failed_grammar_ends_its_request", ("masks",),
        "failed_grammar_ends_its_request"),
    Seeded(LeavesSessions, "end_of_input_finishes_an_idle_session", ("sessions",),
        "end_of_input_finishes_an_idle_session"),
    Seeded(KeepsPins, "pins_end_in_time", ("pins",)),
    Seeded(CountsTwice, "counters_grow_by_what_happened"),
    Seeded(DropsNoHit, "draft_head_has_run_the_token_behind_a_hit", ("drafts",),
        "draft_head_has_run_the_token_behind_a_hit"),
    Seeded(LooksNotAhead, "table_holds_the_slots_of_its_drafts", ("drafts",),
        "table_holds_the_slots_of_its_drafts"),
)  # fmt: skip
