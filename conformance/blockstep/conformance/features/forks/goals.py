"""Goals that need branches: blocks shared, copied, and left by the watermark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from blockstep.conformance.features.forks.properties import count_in_common, count_settled
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import RowKind, Step
from blockstep.conformance.judge.properties.property_check import ENDINGS
from blockstep.conformance.judge.properties.queue_replay import admits_no_request
from blockstep.spec import vocabulary as v

TEXTS = {
    "forks_within_a_block": "a branch shares a block that is not full",
    "forks_at_a_block_end": "a branch shares full blocks, and begins a new one",
    "forks_of_the_preempted": "a branch of a preempted request began, with nothing",
    "forks_cut_short": "a branch shares fewer tokens than it has in common with its parent",
    "forks_before_an_output": "a branch began of a request without outputs",
    "forks_named_what_is_full": "a full block was published because a branch shares it",
    "forks_three_holders": "a block that is not full has three or more holders",
    "forks_with_other_outputs": "a branch began with outputs that its parent does not have",
    "forks_copied_by_who_runs": "a running request got a copy of a block that a branch holds",
    "forks_copied_by_a_branch": "a branch got a copy of a block with its first row",
    "forks_several_copies": "a plan copied several blocks",
    "forks_last_holder_writes": "the last holder of a shared block wrote to it",
    "forks_copied_with_drafts": "a row with a copied block had drafts",
    "forks_parent_ended_first": "a parent ended while a branch of it had not run",
    "forks_gave_way": "a branch that had not run had its blocks reclaimed",
    "forks_began_anew": "a branch ran first with nothing of its parent, and computed it again",
    "forks_branch_preempted": "a branch was preempted",
    "forks_preempted_beside_sharers": "a request was preempted whose blocks have other holders",
    "forks_watermark_holds_up": "a request waited although it fits, because of the watermark",
    "forks_watermark_for_nobody": (
        "a request was admitted while none ran, and left fewer blocks than the watermark"
    ),
    "forks_stack_reused": "a block was taken before others that were free for longer",
}


def of_plan(step: Step, history: History) -> list[str]:
    """Return the goals of a plan of a run with forks, not of one with a watermark alone."""
    if not step.config.enable_forks:
        return []
    return [*of_branches(step, history), *of_pool(step, history)]


def of_fork(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a new branch."""
    fork = step.event
    assert isinstance(fork, v.Fork)
    parent, child = step.old[fork.request_id], step.new[fork.child_id]
    count, tables = child.num_computed_tokens, child.block_tables
    outputs, of_parent = fork.output_token_ids, parent.output_token_ids
    for table, size in zip(tables, step.block_sizes, strict=True):
        if count and count % size == 0:
            yield "forks_at_a_block_end"
        if count % size:
            yield "forks_within_a_block"
            if step.after.ref_counts[table[-1]] > 2:
                yield "forks_three_holders"
    if parent.status is v.Status.PREEMPTED:
        yield "forks_of_the_preempted"
    elif count < count_in_common(step, history, fork):
        yield "forks_cut_short"
    if not of_parent:
        yield "forks_before_an_output"
    if count_settled(step, history, parent) != parent.num_cached_blocks:
        yield "forks_named_what_is_full"
    if outputs != of_parent[: len(outputs)]:
        yield "forks_with_other_outputs"


def of_branches(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with branches and shared blocks."""
    copied = [row for row in step.rows if any(row.copies)]
    for row in copied:
        is_first = row.kind is RowKind.CONTINUED
        yield "forks_copied_by_a_branch" if is_first else "forks_copied_by_who_runs"
        if row.drafts:
            yield "forks_copied_with_drafts"
    if len(step.plan.block_copies) > 1:
        yield "forks_several_copies"
    if _goes_on_in_what_was_shared(step):
        yield "forks_last_holder_writes"
    for name in step.giving:
        if history.lives[name].is_branch:
            yield "forks_gave_way"
    for new in step.plan.new:
        if new.output_token_ids and step.old[new.request_id].num_computed_tokens == 0:
            yield "forks_began_anew"
    for name in step.preempted:
        if history.lives[name].is_branch:
            yield "forks_branch_preempted"
        held = chain(*step.old[name].block_tables)
        if any(step.before.ref_counts[block] > 1 for block in held if block):
            yield "forks_preempted_beside_sharers"


def _goes_on_in_what_was_shared(step: Step) -> bool:
    """Whether a row writes, without a copy, to a block that had two holders before the step."""
    for row in step.rows:
        if row.kind not in (RowKind.RUNNING, RowKind.CONTINUED) or any(row.copies):
            continue
        tables = step.old[row.request_id].block_tables
        for table, size in zip(tables, step.block_sizes, strict=True):
            index = row.first // size
            if row.first % size and step.before.ref_counts[table[index]] > 1:
                return True
    return False


def of_pool(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of the watermark and of the order of the pool."""
    num_free, watermark = len(step.after.free_queue), step.config.watermark_blocks
    rows, running = step.admitted_rows, step.after.running
    if rows and len(running) == 1 and num_free < watermark:
        yield "forks_watermark_for_nobody"
    is_stopped = (step.after.waiting or step.after.skipped_waiting) and not admits_no_request(
        step, history
    )
    if is_stopped and running and 0 < num_free <= watermark:
        yield "forks_watermark_holds_up"
    is_stack = step.config.pool_order is v.PoolOrder.LIFO
    left = step.all_gained.intersection(step.before.free_queue)
    if is_stack and left and max(left) < max(step.before.free_queue):
        yield "forks_stack_reused"


def of_parents(step: Step, history: History) -> Iterator[str]:
    """Yield a goal for each request that ends while branches that have not run share its blocks."""
    if not (step.ended and step.config.enable_forks):
        return
    branches = [
        new
        for new in step.new.values()
        if new.status is v.Status.WAITING and history.lives[new.request_id].is_branch
    ]
    shared = {block for new in branches for block in chain(*new.block_tables) if block}
    for name in step.ended:
        if name in step.old and shared.intersection(chain(*step.old[name].block_tables)):
            yield "forks_parent_ended_first"


GOALS = Goals(
    TEXTS,
    {
        v.Schedule: of_plan,
        v.Fork: of_fork,
        **dict.fromkeys((*ENDINGS, v.StreamingUpdate), of_parents),
    },
)
