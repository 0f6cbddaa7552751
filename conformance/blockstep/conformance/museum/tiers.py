"""Seeded bugs in the swap-out of victims and in the two admission thresholds.

The defects in the block manager's listings on swapping and on its two signals of memory pressure
are reproduced here. The others are mistakes that suggest themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Final

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.requests import FrameRow, RequestState, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.admission_control import (
    ADMISSION_CLOSED,
    is_admission_closed,
    process_admission_control,
)
from blockstep.spec.features.offload import SAVES, add_saves, get_save, process_saving
from blockstep.spec.features.resets import process_forced_preemption
from blockstep.spec.vocabulary import Config, KVSave, Plan, RequestId

PAGE = Page(takes="tiers")
GROUPS = Page(takes_groups=True, takes="tiers")
SWAP, PREEMPTION, PRESSURE = (
    f"the block manager: {where}, breaks its rule"
    for where in ("Multi-Tier Offloading", "Preemption Strategies", "Memory Pressure Signals")
)
LESS = "efficiency: the store has fewer blocks, and more is computed again"
CLOSED = "policy: when admission closes and opens again"


def change_save(rules: Rules, change: Callable[[RequestState, KVSave], KVSave]) -> Rules:
    """Return rules by which the swap-out of a victim is changed."""

    def get(config: Config, victim: RequestState) -> KVSave | None:
        save = rules[get_save](config, victim)
        return None if save is None else change(victim, save)

    return rules.replacing(get_save, get)


# How many tokens of a victim are swapped out.


@PAGE.exhibit("a victim's whole block table is swapped out", SWAP, "P15 P3")
def whole_table_is_saved(rules: Rules, config: Config) -> Rules:
    """The last block is filled in part or not at all, but is stored under the key of a full one."""
    sizes = config.block_sizes

    def add_blocks(victim: RequestState, save: KVSave) -> KVSave:
        tables, num_tokens = victim.block_tables, save.num_tokens + lcm(*sizes)
        pairs = [*zip(tables, sizes, strict=True)]
        if any(len(table) * size < num_tokens for table, size in pairs):
            return save
        block_ids = tuple([table[: num_tokens // size] for table, size in pairs])
        return replace(save, num_tokens=num_tokens, block_ids=block_ids)

    return change_save(rules, add_blocks)


_NUM_WITHDRAWN: Final = Note("num_withdrawn", 0)


@PAGE.exhibit(
    "tokens of a withdrawn row are swapped out as computed", "by the rule of P15", "P15 P3"
)
def withdrawn_row_is_saved(rules: Rules, _config: Config) -> Rules:
    """The row was taken out of the plan, so the worker does not compute it."""

    def withdraw(step: Step, request_id: RequestId) -> bool:
        rows = [row.num_scheduled for row in step.rows if row.request_id == request_id]
        _NUM_WITHDRAWN.set(step, sum(rows))
        return rules[Step.withdraw](step, request_id)

    def save(step: Step, victim: RequestState, had_row: bool) -> None:
        num_computed = victim.num_computed_tokens + _NUM_WITHDRAWN.of(step)
        victim = replace(victim, num_computed_tokens=num_computed)
        rules[process_saving](step, victim, had_row)

    return rules.replacing(Step.withdraw, withdraw).replacing(process_saving, save)


# Which victims are swapped out, and when.


@PAGE.exhibit(
    "only the first victim of a step is swapped out",
    "the block manager: in the Scheduling Loop, breaks its rule",
    "P15",
    invisible=LESS,
)
@instead(process_saving)
def one_victim_is_saved(right: Right[None], step: Step) -> None:
    """If a request needs several victims, the KV of the others is lost."""
    if not SAVES.of(step):
        right()


@PAGE.exhibit("a victim's block table is read after it was freed", SWAP, "P26 P3")
def table_read_once_free(rules: Rules, _config: Config) -> Rules:
    """Two calls are in the wrong order, so the table is empty."""
    return change_save(
        rules, lambda _victim, save: replace(save, block_ids=((),) * len(save.block_ids))
    )


_LATE: Final = Part[tuple[KVSave, ...]]("late_saves", ())
"""The swap-outs to be sent with the next plan."""


@PAGE.exhibit("a victim's swap-out is sent with the next plan", SWAP, "P26 P15 P3")
@instead(add_saves)
def saved_with_the_plan_behind(right: Right[Plan], step: Step, plan: Plan) -> Plan:
    """The blocks are free by then, and other requests may have written to them."""
    plan, late = right(), _LATE.of(step)
    _LATE.set(step, plan.kv_saves)
    return replace(plan, kv_saves=late)


@PAGE.exhibit("a swap-out frees blocks that other requests hold", SWAP, "P1 P2 P3")
@instead(process_saving)
def swap_frees_what_others_hold(right: Right[None], step: Step, victim: RequestState) -> None:
    """Reference counts are ignored when blocks are swapped out."""
    num_saves = len(SAVES.of(step))
    right()
    if len(SAVES.of(step)) > num_saves:
        counts = [*step.pool.ref_counts]
        for block_id in without_nulls(sum(victim.block_tables, ())):
            counts[block_id] = 1
        step.pool = replace(step.pool, ref_counts=tuple(counts))


@PAGE.exhibit("requests that a reset preempts are swapped out", "by the rule of P25", "P15 P25 P26")
def saved_by_a_reset(rules: Rules, _config: Config) -> Rules:
    """Their KV is void after the reset, which is what a reset is for."""

    def preempt(state: State) -> State:
        victims = [state.requests[name] for name in reversed(state.running)]
        saves = [rules[get_save](state.config, victim) for victim in victims]
        state = rules[process_forced_preemption](state)
        return _LATE.put(state, tuple([save for save in saves if save is not None]))

    def add_late_saves(step: Step, rows: Sequence[FrameRow], plan: Plan) -> Plan:
        plan, late = rules[add_saves](step, rows, plan), _LATE.of(step)
        _LATE.set(step, ())
        return replace(plan, kv_saves=late + plan.kv_saves)

    return rules.replacing(process_forced_preemption, preempt).replacing(add_saves, add_late_saves)


# Several KV groups.


@GROUPS.exhibit("a swap-out has the blocks of the first KV group only", SWAP, "P26 P3")
def first_group_is_saved(rules: Rules, _config: Config) -> Rules:
    """A victim has a block table in each group."""
    return change_save(rules, lambda _victim, save: replace(save, block_ids=save.block_ids[:1]))


# When admission is closed.


@PAGE.exhibit("admission opens again at the low threshold", PRESSURE, "P10", invisible=CLOSED)
def one_threshold(rules: Rules, _config: Config) -> Rules:
    """Each admitted request is preempted in the next step."""
    is_closed_rightly = rules[is_admission_closed]
    return rules.replacing(
        is_admission_closed, lambda _was_closed, *others: is_closed_rightly(False, *others)
    )


@PAGE.exhibit(
    "admission closes at the high threshold",
    PRESSURE,
    "P10",
    wrong_fix_of="one-threshold",
    invisible=CLOSED,
)
def high_threshold_alone(rules: Rules, _config: Config) -> Rules:
    """Admission has one threshold again, and running slots stay unused."""
    is_closed_rightly = rules[is_admission_closed]
    return rules.replacing(
        is_admission_closed, lambda _was_closed, *others: is_closed_rightly(True, *others)
    )


@PAGE.exhibit("admission stays closed although nothing runs", PRESSURE, "P10")
def closed_for_nobody(rules: Rules, _config: Config) -> Rules:
    """No running request is left that could free a block."""
    is_closed_rightly = rules[is_admission_closed]
    return rules.replacing(
        is_admission_closed,
        lambda was_closed, num_running, *others: (
            is_closed_rightly(was_closed, num_running, *others) if num_running else was_closed
        ),
    )


@PAGE.exhibit(
    "admission opens when no request has a row",
    PRESSURE,
    "P10",
    wrong_fix_of="closed-for-nobody",
    invisible=CLOSED,
)
@instead(process_admission_control)
def open_without_rows(right: Right[bool], step: Step) -> bool:
    """Running requests may only wait for a commit, and continue after it."""
    closed = right() and bool(step.rows)
    ADMISSION_CLOSED.set(step, closed)
    return closed


@PAGE.exhibit(
    "the free blocks are counted before running requests get theirs",
    PRESSURE,
    "P10",
    invisible=CLOSED,
)
@instead(process_admission_control)
def counted_as_the_step_begins(right: Right[bool], step: Step) -> bool:
    """Running requests have not taken the blocks of this step yet."""
    pool, step.pool = step.pool, step.state.pool
    closed = right()
    step.pool = pool
    return closed
