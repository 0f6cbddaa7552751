"""Properties: what holds for every correct engine, judged without a reference (D5).

Data flows through the modules in this order: `step` is one event with the states around it,
`ledger` what was known before it, `sentence` what must hold of both, `amounts` and `queue_replay`
what several sentences need; then one module for each family of sentences.

A property that speaks of contents (P2, P3, P4, P6, P25) or of what the plans tell (P26) is judged
by the `Worker` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.conformance.judge.properties import (
    admission,
    budgets,
    hits,
    messages,
    order,
    output,
    pool,
    progress,
    refusals,
    statistics,
    stillness,
)
from blockstep.conformance.judge.properties.ledger import FlightRow, Ledger, Life
from blockstep.conformance.judge.properties.sentence import Complaint, Sentence
from blockstep.conformance.judge.properties.step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.spec.vocabulary import (
    EVENT_TYPES,
    Abort,
    Aborted,
    Ack,
    Commit,
    Drafts,
    DraftsTaken,
    GrammarReady,
    Outputs,
    Plan,
    Rejected,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    Submit,
)

__all__ = [
    "ANSWER_TYPES",
    "CHECKS_OF",
    "PROPERTIES",
    "Complaint",
    "FlightRow",
    "Ledger",
    "Life",
    "PlannedRow",
    "Property",
    "RowKind",
    "Sentence",
    "Step",
    "check_step",
]


@dataclass(frozen=True, slots=True)
class Property:
    """One line of `properties.md`, and the sentences by which a step is held to it."""

    id: str
    name: str
    statement: str
    checks: tuple[Sentence, ...]


PROPERTIES: tuple[Property, ...] = (
    Property(
        "P1",
        "pool conservation",
        "each non-null block is either in the free queue exactly once with ref 0, or absent from "
        "it with ref = number of holders; the null block is never queued or freed",
        (
            pool.pool_keeps_its_size,
            pool.every_block_is_free_or_held,
            pool.null_block_is_nobodys,
        ),
    ),
    Property(
        "P2",
        "exclusive writing",
        "a block that somebody may still write occupies one position of one block table",
        (
            pool.no_table_names_a_block_twice,
            pool.block_still_to_be_written_has_one_holder,
        ),
    ),
    Property(
        "P3",
        "sound cache map",
        "map[h] = b iff b carries h, and b's content is what h names",
        (
            pool.cache_map_and_blocks_agree,
            pool.nothing_is_cached_without_caching,
            pool.computed_full_blocks_are_published,
            pool.verified_full_blocks_are_published,
            pool.held_block_carries_the_name_of_its_tokens,
        ),
    ),
    Property(
        "P4",
        "publish after write",
        "a hit reads only KV already written, or certainly written earlier in the same dispatch; "
        "a hash published for work that then did not run is withdrawn",
        (
            pool.block_still_to_be_written_is_not_published,
            pool.only_computed_blocks_are_published,
            pool.only_verified_blocks_are_published,
        ),
    ),
    Property(
        "P5",
        "boundary valid for all groups",
        "a hit length is valid for every KV group, and is the largest such",
        (
            hits.hit_is_whole_blocks_and_leaves_a_token,
            hits.hit_is_the_longest_there_is,
        ),
    ),
    Property(
        "P6",
        "key partition",
        "requests that differ in adapter, salt, multimodal item or its offset never share a block",
        (pool.held_block_carries_the_extra_keys_of_its_request,),
    ),
    Property(
        "P7",
        "failed admission is a no-op",
        "after a refused admission the state equals the state before it, statistics included",
        (
            refusals.rejected_event_changes_nothing,
            admission.request_without_a_row_stays_the_same,
            admission.plan_for_nobody_leaves_no_trace,
        ),
    ),
    Property(
        "P8",
        "estimate = consumption",
        "the capacity check and the allocation that follows agree exactly",
        (
            admission.row_gains_exactly_the_blocks_it_needs,
            admission.admission_leaves_room_for_the_whole_prompt,
        ),
    ),
    Property(
        "P9",
        "budgets",
        "tokens per step and running requests: never exceeded, also not after a rollback",
        (
            budgets.plan_stays_within_token_budget,
            budgets.running_stays_within_max_num_seqs,
            budgets.row_stays_within_its_caps,
            budgets.row_stays_within_max_model_len,
            budgets.paused_scheduler_admits_nobody,
            budgets.prompt_is_not_cut_without_chunking,
        ),
    ),
    Property(
        "P10",
        "progress",
        "no cycle of states without progress while unfinished requests exist and no external "
        "event is due; preemptions per newly computed block are bounded",
        (
            progress.preemption_leaves_somebody_running,
            progress.nobody_is_preempted_again_without_progress,
        ),
    ),
    Property(
        "P11",
        "servability",
        "what cannot fit into an empty pool is refused with a reason; everything else is served",
        (
            refusals.accepted_request_fits_an_empty_pool,
            refusals.request_is_refused_for_its_size_only_if_it_never_fits,
        ),
    ),
    Property(
        "P12",
        "token accounting",
        "0 <= placeholders = output tokens still owed by frames in flight; "
        "0 <= computed < known + owed; scheduled spec tokens <= drafts",
        (
            budgets.counters_stay_within_what_is_known,
            budgets.only_running_requests_hold_anything,
            budgets.row_advances_by_what_it_runs,
            budgets.preempted_request_starts_again,
            budgets.submitted_request_starts_from_nothing,
        ),
    ),
    Property(
        "P13",
        "exact output",
        "per request: no token lost, repeated or delivered after its stop; every request "
        "terminates with one reason",
        (
            output.delivered_rows_are_those_that_sampled,
            output.delivered_tokens_are_the_sampled_ones_until_the_stop,
            output.finish_reason_is_the_one_that_holds,
            output.finished_request_is_forgotten_and_others_stay,
            output.outputs_in_the_state_are_those_delivered,
            admission.nobody_is_admitted_while_its_tokens_are_in_flight,
            admission.row_waits_for_the_token_of_its_request,
        ),
    ),
    Property(
        "P14",
        "exact rollback",
        "rejecting k drafts restores exactly the counters of having never scheduled those k",
        (
            output.sampling_leaves_one_token_to_compute,
            output.commit_changes_only_outputs_and_computed_tokens,
        ),
    ),
    Property(
        "P15",
        "work conservation",
        "a schedulable request is not skipped while budget and blocks for it remain",
        (
            admission.running_request_gets_all_it_can,
            admission.nobody_runs_past_its_last_token,
            admission.tokens_of_a_preempted_row_are_given_back,
            admission.admitted_request_gets_all_it_can,
            admission.head_of_the_queue_is_admitted_when_it_fits,
            admission.nobody_is_preempted_while_blocks_suffice,
        ),
    ),
    Property(
        "P16",
        "policy order",
        "FCFS, priority and eviction order are as documented, ties included",
        (
            order.every_request_stands_in_one_queue,
            order.newcomer_goes_to_the_end_of_its_queue,
            order.admissions_follow_the_policy,
            order.running_keeps_its_order,
            order.queues_keep_their_order,
            order.queues_lose_exactly_the_ended,
            order.preempted_fcfs_are_the_youngest,
            order.preempted_priority_never_outrank_survivors,
            order.nobody_is_admitted_after_a_preemption,
            order.new_blocks_come_from_the_head_of_the_free_queue,
            order.preempted_tail_is_evicted_first,
            order.freed_tail_is_evicted_first,
            hits.hit_takes_the_oldest_copy,
        ),
    ),
    Property(
        "P18",
        "idempotent signals",
        "late, duplicate or unknown completions change nothing and kill nothing",
        (
            refusals.refusal_names_what_is_wrong,
            refusals.stale_or_wrong_event_is_refused,
            stillness.event_leaves_alone_what_it_is_not_about,
            stillness.event_leaves_other_requests_alone,
            stillness.signal_is_remembered,
            stillness.abort_ends_exactly_the_unfinished_it_names,
        ),
    ),
    Property(
        "P21",
        "statistics",
        "counters equal what happened, once each",
        (
            statistics.counters_grow_by_what_happened,
            statistics.first_hit_is_remembered,
            output.told_cached_tokens_are_those_of_the_first_hit,
        ),
    ),
    Property(
        "P24",
        "real drafts",
        "a dispatched draft is a draft proposed for exactly this position of this request",
        (
            output.dispatched_drafts_are_the_last_proposed_ones,
            output.attached_drafts_are_the_last_proposed_ones,
            output.drafts_are_taken_only_for_the_next_position,
        ),
    ),
    Property(
        "P25",
        "complete reset",
        "after a reset nothing computed before it can be hit",
        (
            stillness.reset_empties_the_cache,
            stillness.answer_from_before_a_reset_publishes_nothing,
            stillness.reset_succeeds_unless_blocks_are_held,
            stillness.forced_reset_preempts_all_who_run,
            stillness.refused_reset_changes_nothing,
        ),
    ),
    Property(
        "P26",
        "worker view",
        "the plans alone rebuild each request's tokens and block table at the worker",
        (
            messages.plan_tells_who_ended,
            messages.ended_are_kept_for_the_next_plan,
            messages.plan_tells_who_was_preempted,
            messages.plan_has_its_place_in_the_sequence,
            messages.committed_frame_leaves_flight,
            messages.rows_stand_in_the_order_of_the_running_list,
            messages.new_row_carries_the_request_as_submitted,
            messages.table_in_the_plan_is_the_table_in_the_state,
            admission.admitted_row_kind_follows_its_status,
        ),
    ),
)

CHECKS_OF: dict[type, tuple[Sentence, ...]] = {
    kind: tuple(
        sentence
        for one_property in PROPERTIES
        for sentence in one_property.checks
        if kind in sentence.kinds
    )
    for kind in (*EVENT_TYPES, Rejected)
}
"""The checks that judge an accepted event, by its type; under `Rejected` those of a refusal."""

ANSWER_TYPES: dict[type, type] = {
    Submit: Ack,
    Schedule: Plan,
    Commit: Outputs,
    Drafts: DraftsTaken,
    Abort: Aborted,
    GrammarReady: Ack,
    SetPause: Ack,
    Reset: ResetDone,
}
"""What an accepted event is answered with."""


def check_step(step: Step, ledger: Ledger, worker: Worker | None = None) -> list[Finding]:
    """Everything that is wrong with a step.

    `ledger` knows all steps before this one; `Ledger.record(step)` comes after. A worker is told
    of the step here: of plans (unless `Worker.execute` was called already), commits and resets.
    """
    if isinstance(step.observation, Rejected):
        kind: type = Rejected
    else:
        kind = type(step.event)
        due = ANSWER_TYPES.get(kind)
        if due is None or type(step.observation) is not due:
            return [_wrong_answer(step)]
    findings = [] if worker is None else _tell(step, worker)
    for sentence in CHECKS_OF[kind]:
        try:
            for complaint in sentence.judge(step, ledger) or ():
                findings.append(sentence.finding(*complaint))
        except Exception as error:
            # Plan and states contradict each other so much that the sentence has no meaning.
            what = f"the step makes no sense: {type(error).__name__}: {error}"
            findings.append(sentence.finding(what))
    return findings


def _tell(step: Step, worker: Worker) -> list[Finding]:
    findings = worker.observe(step.event, step.observation)
    if isinstance(step.event, Schedule) or (
        isinstance(step.event, Commit) and step.config.async_scheduling
    ):
        findings = [*findings, *worker.check_published(step.after)]
    if isinstance(step.event, Schedule | Commit):
        findings = [*findings, *worker.check_view(step.after)]
    return findings


def _wrong_answer(step: Step) -> Finding:
    answer, event = type(step.observation).__name__, type(step.event).__name__
    return Finding(
        FindingKind.PROPERTY,
        "P18",
        "answer_is_of_the_kind_of_the_event",
        f"{event} was answered with {answer}",
    )
