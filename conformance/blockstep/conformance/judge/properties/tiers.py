"""Tiers: what a store is given of those who are preempted, and when nobody is admitted.

free blocks    0 .. low .. high ..
admission      |close| stays |open|      it stays as it is between two thresholds
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import lcm

from blockstep.conformance.judge.attended import without_given_back
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import victims_of
from blockstep.conformance.judge.properties.sentence import (
    Complaint,
    Complaints,
    differing,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.protocol.findings import Subjects, of_request
from blockstep.spec import vocabulary as v


def count_settled_tokens(step: Step, ledger: Ledger, name: v.RequestId) -> int:
    """Tokens of one who is preempted that could be found by name in a store: known ones whose KV is
    written once earlier plans have run, in full blocks of every group."""
    old = step.old[name]
    if name in ledger.store.unsettled:
        return 0
    unit = lcm(*step.block_sizes)
    return min(old.num_computed_tokens, ledger.lives[name].num_known) // unit * unit


@sentence("P15", v.Schedule, needs="swap_min_tokens", fixes="what is saved of a preempted request")
def victims_are_saved_as_far_as_they_are_settled(step: Step, ledger: Ledger) -> Complaints:
    """A store is given what is settled of each victim that has enough of it, in the order in which
    they were preempted; and nothing of anybody else."""
    expected = []
    for name in victims_of(step, ledger):
        count = count_settled_tokens(step, ledger, name)
        if count >= step.config.swap_min_tokens:
            expected.append((name, count))
    seen = [(save.request_id, save.num_tokens) for save in step.plan.kv_saves]
    return differing("saved tokens", expected, seen)


@sentence(
    "P26",
    v.Schedule,
    needs="swap_min_tokens",
    of="preempted",
    said_by="saved_slot_holds_the_text_of_its_request",
)
def save_names_the_blocks_that_its_request_had(step: Step, _ledger: Ledger) -> Complaints:
    """Per KV group: its table before the step, as far as it is saved. What is not attended to any
    more may be null."""
    for save in step.plan.kv_saves:
        if save.request_id not in step.old:
            continue  # said of it elsewhere
        held = zip(step.old[save.request_id].block_tables, step.block_sizes, strict=True)
        tables = [table[: save.num_tokens // size] for table, size in held]
        pairs = zip(tables, save.block_ids, strict=False)
        expected = tuple([without_given_back(*pair) for pair in pairs])
        if len(save.block_ids) != len(tables) or expected != save.block_ids:
            what = f"{save.request_id!r} is saved up to {save.num_tokens}"
            yield unequal(
                what,
                "block_ids",
                tuple(tables),
                save.block_ids,
                subjects=of_request(save.request_id),
            )


@sentence(
    "P10", v.Schedule, needs="admission_high_blocks", fixes="which request is admitted, and when"
)
def nobody_is_admitted_while_admission_is_closed(step: Step, _ledger: Ledger) -> Complaints:
    """Neither to run, nor to be loaded."""
    names = [row.request_id for row in (*step.admitted_rows, *step.parked)]
    if step.after.admission_closed and names:
        what = f"admission is closed, and {names} were admitted"
        yield Complaint(what, subjects=Subjects(tuple(names)))


@sentence(
    "P10", v.Schedule, needs="admission_high_blocks", fixes="which request is admitted, and when"
)
def admission_closes_and_opens_at_its_thresholds(step: Step, _ledger: Ledger) -> Complaints:
    """It closes with fewer free blocks than the low threshold, or where somebody is preempted, and
    opens with as many as the high one, or where nobody runs.

    Of free blocks there are, where it is asked, those that there are behind the step, and those
    that were given to who was admitted in it.
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
        what = f"somebody was admitted beside {ran_on}"
        yield unequal(what, "free blocks before", f">= {enough}", num_free + num_given)


def _list_given(step: Step) -> set[v.BlockId]:
    """Blocks that may have been free before whoever was admitted was given them."""
    names = [row.request_id for row in (*step.admitted_rows, *step.parked)]
    held: Sequence[v.BlockTables] = [step.new[name].block_tables for name in names]
    return {block for tables in held for block in chain(*tables) if block}


_OTHERS = [kind for kind in v.EVENT_TYPES if kind is not v.Schedule]
"""Events but plans."""


@sentence(
    "P7", *_OTHERS, needs="admission_high_blocks", fixes="which request is admitted, and when"
)
def plans_alone_close_and_open_admission(step: Step, _ledger: Ledger) -> Complaints:
    """Whatever else happens, it stays as the last plan has left it."""
    return differing("admission_closed", step.before.admission_closed, step.after.admission_closed)
