"""Goals that need several KV groups, or one of another kind than full attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm

from blockstep.conformance.judge.attention_ranges import count_across, count_unattended, slots_of
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History, RequestHistory
from blockstep.conformance.judge.properties.hits import longest_hit, may_ask_the_cache
from blockstep.conformance.judge.properties.observed_step import PlannedRow, RowKind, Step
from blockstep.conformance.judge.properties.queue_replay import preempted_in_order
from blockstep.conformance.judge.properties.token_amounts import blocks_for
from blockstep.conformance.judge.worker.prefix_names import Name
from blockstep.spec import vocabulary as v

TEXTS = {
    "groups_of_three_kinds": "a plan had a row, with groups of three kinds or more",
    "groups_larger_block_filled": "a block of more tokens than the smallest was published",
    "groups_window_slid": "a sliding window moved, and a block was skipped",
    "groups_chunk_left": (
        "a request began a new attention chunk, and skipped a block of an earlier one"
    ),
    "groups_state_left": "a recurrent layer freed the block of an earlier state",
    "groups_block_in_doubt": "a block was kept because drafts in flight may be rejected",
    "groups_hit_behind_nulls": "a hit began with null blocks",
    "groups_hit_in_several": "a hit shared blocks of several groups",
    "groups_hit_of_a_state": "a request continued from a cached state of a recurrent layer",
    "groups_hit_cut_by_a_window": "full attention alone could have hit more than was hit",
    "groups_hit_cut_by_full_attention": "a window or chunks alone could have hit more",
    "groups_free_hit_beside_new_blocks": "one group hit a free block while another took new ones",
    "groups_evicted_by_another": "a group took a block that could still have been hit in another",
    "groups_last_block_to_another": "a group but the first took blocks, and then none was free",
    "groups_admitted_past_its_room": (
        "a request was admitted whose tokens do not fit at the same time"
    ),
    "groups_preempted_with_nulls": "a request with skipped blocks was preempted",
    "groups_preempted_about_to_slide": "a request was preempted that held blocks to be skipped",
    "groups_resumed_behind_nulls": "a preempted request was resumed with null blocks in front",
    "groups_ended_with_nulls": "a request with skipped blocks ended",
}
LEFT = {
    v.GroupKind.SLIDING_WINDOW: "groups_window_slid",
    v.GroupKind.CHUNKED_LOCAL: "groups_chunk_left",
    v.GroupKind.RECURRENT: "groups_state_left",
}
"""The goal of a freed block, by kind of group."""


def of_groups(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with several groups."""
    config = step.config
    if step.rows and len({group.kind for group in config.groups}) > 2:
        yield "groups_of_three_kinds"
    before, after = step.before.cached, step.after.cached
    for key in after.keys() - before.keys() if after is not before else ():
        if step.block_sizes[key.group] > config.block_size:
            yield "groups_larger_block_filled"
    yield from _of_sliding(step, history)
    for row in step.rows:
        yield from _of_gains(step, row)
    for row in step.admitted_rows:
        yield from _of_admission(step, history, row)
    for name in preempted_in_order(step, history) if step.plan.preempted_req_ids else ():
        old = step.old[name]
        if count_nulls(old.block_tables):
            yield "groups_preempted_with_nulls"
        if any(_list_done_with(config, old, history.count_drafts_in_flight().get(name, 0))):
            yield "groups_preempted_about_to_slide"


def of_ends(step: Step, _history: History) -> Iterator[str]:
    """Yield the goals of requests that end with null blocks in a table."""
    for name in step.ended:
        if name in step.old and count_nulls(step.old[name].block_tables):
            yield "groups_ended_with_nulls"


def count_nulls(tables: v.BlockTables) -> int:
    """Number of null blocks of a request, in all groups."""
    return sum([table.count(v.NULL_BLOCK) for table in tables])


def _list_done_with(
    config: v.Config, request: v.RequestSnapshot, num_unverified: int
) -> Iterator[int]:
    """Yield, per group, the number of held blocks that a running request no longer attends to."""
    certain = request.num_computed_tokens - num_unverified
    for group, table in zip(config.groups, request.block_tables, strict=True):
        yield min(count_unattended(group, certain), len(table)) - table.count(v.NULL_BLOCK)


def _of_sliding(step: Step, history: History) -> Iterator[str]:
    in_doubt = history.count_drafts_in_flight()
    running: dict[v.RequestId, int] = {row.request_id: row.first for row in step.running_rows}
    for name, first in running.items():
        tables = zip(step.old[name].block_tables, step.new[name].block_tables, strict=True)
        for group, (old, new) in zip(step.config.groups, tables, strict=True):
            if v.NULL_BLOCK not in new and name not in in_doubt:
                continue
            num_null = new.count(v.NULL_BLOCK)
            if num_null > old.count(v.NULL_BLOCK):
                yield LEFT[group.kind]
            if group.kind is v.GroupKind.RECURRENT:
                continue  # its state blocks of drafts move
            if name in in_doubt and num_null < min(count_unattended(group, first), len(old)):
                yield "groups_block_in_doubt"


def _of_gains(step: Step, row: PlannedRow) -> Iterator[str]:
    before = step.before.block_keys
    for index, gained in enumerate(row.gained_tables):
        keys = [before[block] for block in gained]
        if any(key is not None and key.group != index for key in keys):
            yield "groups_evicted_by_another"
    if any(row.gained_tables[1:]) and not step.after.free_queue:
        yield "groups_last_block_to_another"


def _of_admission(step: Step, history: History, row: PlannedRow) -> Iterator[str]:
    life, config = history.lives[row.request_id], step.config
    shared = [[block for block in table if block] for table in row.hit_tables]
    has_nulls = count_nulls(row.hit_tables) > 0
    if has_nulls:
        yield "groups_hit_behind_nulls"
    if has_nulls and row.kind is RowKind.RESUMED:
        yield "groups_resumed_behind_nulls"
    pairs = zip(config.groups, shared, strict=True)
    if any(table and group.kind is v.GroupKind.RECURRENT for group, table in pairs):
        yield "groups_hit_of_a_state"
    if sum(map(bool, shared)) > 1:
        yield "groups_hit_in_several"
    references = step.before.ref_counts
    for index, table in enumerate(shared):
        others = (*row.gained_tables[:index], *row.gained_tables[index + 1 :])
        if any(not references[block] for block in table) and any(others):
            yield "groups_free_hit_beside_new_blocks"
    if may_ask_the_cache(step, life):
        yield from _of_cuts(step, history, life, row.first)
    num_across = count_across(config, life.request)
    num_all = sum(
        [
            blocks_for(slots_of(group, life.num_known, num_across), group.block_size)
            for group in config.groups
        ]
    )
    num_left = num_all - sum(map(len, row.hit_tables))
    num_past = num_left - len(step.before.free_queue)
    if config.scheduler_reserve_full_isl and num_past > 0:
        slid = sum([count_nulls(step.new[name].block_tables) for name in step.before.running])
        if num_past > slid:
            yield "groups_admitted_past_its_room"


def _of_cuts(step: Step, history: History, life: RequestHistory, num_hit: int) -> Iterator[str]:
    """Yield a goal for each kind of group that could have hit more than all together."""
    unit, cut = lcm(*step.config.block_sizes), set()
    if num_hit + unit >= life.num_known:
        return  # no longer hit exists
    for index, group in enumerate(step.config.groups):
        named = history.named_blocks(step.before, index)

        def find(
            name: Name, _group: int, named: dict[Name, tuple[v.BlockId, ...]] = named
        ) -> Sequence[v.BlockId]:
            return named.get(name, ())

        if named and longest_hit(_alone(step.config, index), life, find)[0] >= num_hit + unit:
            cut.add(group.kind is v.GroupKind.FULL)
    if True in cut:
        yield "groups_hit_cut_by_a_window"
    if False in cut:
        yield "groups_hit_cut_by_full_attention"


@lru_cache(maxsize=32)
def _alone(config: v.Config, index: int) -> v.Config:
    """The config with one of its groups."""
    return replace(config, groups=config.groups[index : index + 1])


GOALS = Goals(TEXTS, {v.Schedule: of_groups, v.Commit: of_ends})
