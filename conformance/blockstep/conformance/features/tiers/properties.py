"""Tiers: the KV of preempted requests that a store gets, and the thresholds of admission.

free blocks    0 .. low .. high .. admission      |close| keep  |open|      between the thresholds
it stays as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import lcm

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    differing,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.queue_replay import preempted_in_order
from blockstep.conformance.protocol.findings import Subjects
from blockstep.spec import vocabulary as v


def count_settled_tokens(step: Step, history: History, name: v.RequestId) -> int:
    """Tokens of a preempted request that a store can keep under keys: known tokens whose KV is
    written once earlier plans have run, in full blocks of every group."""
    old = step.old[name]
    if name in history.store.unsettled:
        return 0
    unit = lcm(*step.block_sizes)
    return min(old.num_computed_tokens, history.lives[name].num_known) // unit * unit


@sentence(
    "P15", v.Schedule, needs="swap_min_tokens", fixes="which KV of a preempted request is saved"
)
def victims_are_saved_up_to_confirmed_blocks(step: Step, history: History) -> Complaints:
    """A store gets the saved tokens of each victim that has at least `swap_min_tokens`, in the
    order of preemption, and nothing of other requests."""
    expected = []
    for name in preempted_in_order(step, history):
        count = count_settled_tokens(step, history, name)
        if count >= step.config.swap_min_tokens:
            expected.append((name, count))
    seen = [(save.request_id, save.num_tokens) for save in step.plan.kv_saves]
    return differing("saved tokens", expected, seen)


@sentence(
    "P10", v.Schedule, needs="admission_high_blocks", fixes="which request is admitted, and when"
)
def no_admission_while_closed(step: Step, _history: History) -> Complaints:
    """While admission is closed no request is admitted or loaded."""
    names = [row.request_id for row in (*step.admitted_rows, *step.parked)]
    if step.after.admission_closed and names:
        what = f"admission is closed, and {names} were admitted"
        yield Complaint(what, subjects=Subjects(tuple(names)))


@sentence(
    "P10", v.Schedule, needs="admission_high_blocks", fixes="which request is admitted, and when"
)
def admission_closes_and_opens_at_its_thresholds(step: Step, _history: History) -> Complaints:
    """Admission closes with fewer free blocks than the low threshold or after a preemption, and
    opens with as many as the high one or when no request runs.

    Free blocks are those after the step, or these and the blocks that admitted requests took in it.
    """
    config, is_closed = step.config, step.after.admission_closed
    ran_on = [name for name in step.before.running if name not in step.preempted]
    if not ran_on:
        yield from differing("admission_closed", expected=False, seen=is_closed)
        return
    was_closed = step.before.admission_closed
    enough = config.admission_high_blocks if was_closed else config.admission_low_blocks
    num_free, num_given = len(step.after.free_queue), len(_list_given(step))
    if step.preempted or not num_given:
        must_close = bool(step.preempted) or num_free < enough
        yield from differing("admission_closed", must_close, is_closed)
    elif num_free + num_given < enough:
        what = f"a request was admitted while {ran_on} run"
        yield unequal(what, "free blocks before", f">= {enough}", num_free + num_given)


def _list_given(step: Step) -> set[v.BlockId]:
    """Blocks that may have been free before admitted requests took them."""
    names = [row.request_id for row in (*step.admitted_rows, *step.parked)]
    held: Sequence[v.BlockTables] = [step.new[name].block_tables for name in names]
    return {block for tables in held for block in chain(*tables) if block}
