"""Goals of a plan as a whole, of its rows, and of preemptions."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.amounts import blocks_for, share_of
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.life import Life
from blockstep.conformance.judge.properties.queue_replay import victims_of
from blockstep.conformance.judge.properties.step import PlannedRow, RowKind, Step
from blockstep.spec.vocabulary import PauseState

PLANS = {
    "chunked_prefill": "a row left known tokens for a later step",
    "chunk_ends_on_block_boundary": "a chunk of a prefill ended exactly where a block does",
    "threshold_caps_a_chunk": "the long-prefill threshold cut a row short",
    "prefill_and_decode_in_one_step": "a plan had a chunk of a prompt and a sampling row",
    "running_left_out_by_budget": "the budget was used up before all running requests had a row",
    "pool_exactly_full": "no block was free after a plan",
    "empty_plan": "a plan had no row",
    "empty_plan_with_work": "a plan had no row although requests were unfinished",
    "paused_new": "a plan was made under PAUSED_NEW while a request waited",
    "paused_all": "a plan was made under PAUSED_ALL with requests in the running list",
}
PREEMPTION = {
    "preempted": "a request was preempted for lack of blocks",
    "preempted_twice": "a request was preempted for at least the second time",
    "several_preempted_in_one_step": "one step preempted more than one request",
    "self_preempted": "a request that lacked blocks preempted itself",
    "priority_victim_already_scheduled": "a victim had a row in the same step, which was withdrawn",
    "priority_victim_not_last": "PRIORITY preempted a request that FCFS would not have",
    "preempted_then_resumed": "a preempted request was resumed",
    "resumed_with_hit": "a preempted request was resumed with a prefix hit",
    "resumed_with_outputs": "a preempted request was resumed with outputs to compute again",
}


def of_plan(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a plan as a whole."""
    after, rows = step.after, step.rows
    if not rows:
        yield "empty_plan"
        if after.requests:
            yield "empty_plan_with_work"
    if not after.free_queue:
        yield "pool_exactly_full"
    waiting = after.waiting or after.skipped_waiting
    if ledger.pause_state is PauseState.PAUSED_NEW and waiting:
        yield "paused_new"
    if ledger.pause_state is PauseState.PAUSED_ALL and step.before.running:
        yield "paused_all"
    samples = {ledger.flight_row(row).samples for row in rows}
    if len(samples) == 2:
        yield "prefill_and_decode_in_one_step"
    rest = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    if not rest and len(step.running_rows) < len(step.before.running) and not step.admitted_rows:
        yield "running_left_out_by_budget"
    if step.all_gained:
        before = step.before.block_keys
        for block in step.all_gained:
            if before[block] is not None:
                yield "eviction_of_cached_block"
    old, keys = step.before.cached, after.block_keys
    if after.cached is not old and len(keys) - keys.count(None) > len(after.cached):
        for key, blocks in after.cached.items():
            if len(blocks) > 1 and len(blocks) > len(old.get(key, ())):
                yield "duplicate_key_published"


def of_row(step: Step, life: Life, row: PlannedRow) -> Iterator[str]:
    """Yield the goals of a row, admitted or not."""
    config = step.config
    if row.end < life.num_known:
        yield "chunked_prefill"
        if row.end % config.block_size == 0:
            yield "chunk_ends_on_block_boundary"
        if row.num_scheduled == config.long_prefill_token_threshold:
            yield "threshold_caps_a_chunk"
    if row.drafts:
        yield "drafts_scheduled"
    if len(row.drafts) < len(life.drafts):
        yield "drafts_trimmed"
    if row.kind is RowKind.RUNNING and row.gained:
        held = zip(
            step.block_sizes, step.old[row.request_id].block_tables, row.gained_tables, strict=True
        )
        if any(gained and blocks_for(row.end, size) <= len(table) for size, table, gained in held):
            yield "block_for_lookahead_only"


def of_preemption(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a plan that preempts."""
    victims = victims_of(step, ledger)
    place = step.place
    last_row = max((place[row.request_id] for row in step.running_rows), default=-1)
    if len(victims) > 1:
        yield "several_preempted_in_one_step"
    if not any(row.gained for row in step.running_rows):
        # No row got a block, so the request that lacked some is a victim.
        yield "self_preempted"
    if set(victims) != set(step.before.running[-len(victims) :]):
        yield "priority_victim_not_last"
    for name in victims:
        old = step.old[name]
        yield "preempted"
        if old.num_preemptions:
            yield "preempted_twice"
        if old.spec_token_ids:
            yield "drafts_lost_by_preemption"
        if place[name] < last_row and share_of(ledger, old) > 0:
            # A later one was scheduled, so there was budget left when it was visited.
            yield "priority_victim_already_scheduled"
