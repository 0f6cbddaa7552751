"""Seeded bugs in preemption: the choice of the victim, and what must be undone for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.admission import get_open_queue, process_waiting_phase
from blockstep.spec.core.block_pool import Pool, withdraw_blocks
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.plans import get_plan
from blockstep.spec.core.preemption import (
    get_victim_index,
    process_claim,
    process_making_room,
    process_preemption,
)
from blockstep.spec.core.queues import get_rank, process_append, select_victim
from blockstep.spec.core.requests import FrameRow, RequestState, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import process_grant
from blockstep.spec.core.slots import release_slots, revoke_slots
from blockstep.spec.core.work import Step
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.releases.block_pool import unwritten_keys_stay
from blockstep.spec.vocabulary import Config, FrameId, Plan, Policy, RequestId

PAGE = Page()


@PAGE.exhibit("the oldest request is preempted", "vLLM V1: Preemption Policy", "P16")
def oldest_preempted(rules: Rules, _config: Config) -> Rules:
    """The request that arrived first loses the most work."""
    return rules.replacing(select_victim, lambda _policy, _running, _requests: 0)


@PAGE.exhibit(
    "preempted requests go to the end of the waiting queue",
    "vLLM V1: Preemption Policy",
    "P16",
    invisible="policy: which request is admitted first",
)
@instead(process_preemption)
def preempted_to_the_tail(right: Right[RequestId], step: Step) -> RequestId:
    """New requests overtake them, and preempt them again."""
    victim_id = right()
    step.waiting.remove(victim_id)
    process_append(step.state.config.policy, step.waiting, victim_id, step.requests)
    return victim_id


@PAGE.exhibit(
    "the tokens of a withdrawn row do not return to the token budget",
    "#23347, #23713",
    "P9 P15",
    invisible="efficiency: a step schedules fewer tokens than it could",
)
@instead(Step.withdraw)
def budget_not_restored(right: Right[bool], self: Step) -> bool:
    """The step ends early although there is work."""
    budget, had_row = self.budget, right()
    self.budget = budget
    return had_row


@PAGE.exhibit("the row of a victim stays in the plan", "#23713, #28558", "P9 P26 P2 P16")
@instead(Step.withdraw)
def row_of_victim_stays(right: Right[bool], self: Step) -> bool:
    """The worker runs a request that has no blocks."""
    rows = self.rows[:]
    had_row = right()
    self.rows[:] = rows
    return had_row


@PAGE.exhibit(
    "keys of blocks that were never written stay published after a preemption",
    "#43569 (open)",
    "P4 P3",
)
def zombie_key(rules: Rules, config: Config) -> Rules:
    """The next request with this prefix reads KV that was never written."""
    return unwritten_keys_stay(rules, config)


@PAGE.exhibit(
    "a preemption withdraws all keys of the victim",
    "#43569",
    "P3",
    wrong_fix_of="zombie-key",
    invisible="efficiency: later hits are lost",
)
@instead(revoke_slots)
def all_keys_withdrawn(
    pool: Pool, request: RequestState, rules: Rules, fence: FrameId | None
) -> Pool:
    """Blocks of earlier steps are withdrawn, too, although they are written and may be shared."""
    for table in request.block_tables:
        pool = withdraw_blocks(pool, without_nulls(table))
    return release_slots(pool, request, rules, fence)


@PAGE.exhibit(
    "a preemption withdraws only the key of the victim's last block",
    "#43569",
    "P4 P3",
    wrong_fix_of="zombie-key",
)
@instead(revoke_slots)
def last_key_withdrawn(
    pool: Pool,
    request: RequestState,
    block_sizes: tuple[int, ...],
    rules: Rules,
    fence: FrameId | None,
) -> Pool:
    """A chunk can fill several blocks and begin another one."""
    for table, block_size in zip(request.block_tables, block_sizes, strict=True):
        unwritten = table[request.num_computed_tokens // block_size :]
        pool = withdraw_blocks(pool, unwritten[-1:])
    return release_slots(pool, request, rules, fence)


_RECORDS = Part("records", FrozenMap[RequestId, Any]())
"""A field of withdrawn rows, by request, until a later row of the request uses it."""


def keep_records(rules: Rules, field: str) -> Rules:
    """Return rules by which a field of withdrawn rows is kept in `_RECORDS`."""

    def withdraw(step: Step, request_id: RequestId) -> bool:
        for row in step.rows:
            if row.request_id == request_id and getattr(row, field):
                _RECORDS.set(step, _RECORDS.of(step).having(request_id, getattr(row, field)))
        return rules[Step.withdraw](step, request_id)

    return rules.replacing(Step.withdraw, withdraw)


def pop_record(step: Step, request_id: RequestId) -> Any:
    """Return the recorded field of a withdrawn row, and forget it; None if there is none."""
    records = _RECORDS.of(step)
    record = records.get(request_id)
    if record is not None:
        _RECORDS.set(step, records.without(request_id))
    return record


@PAGE.exhibit("the new blocks of a withdrawn row are sent with a later row", "#23713", "P26 P2 P3")
def blocks_of_victim_announced(rules: Rules, _config: Config) -> Rules:
    """The data of the withdrawn row is added to the request's next row."""

    def grant(
        step: Step, request: RequestState, num_new: int, granted: tuple[Pool, RequestState]
    ) -> None:
        rules[process_grant](step, request, num_new, granted)
        stale, row = pop_record(step, request.request_id), step.rows[-1]
        if stale is not None:
            tables = [old + new for old, new in zip(stale, row.new_blocks, strict=True)]
            step.rows[-1] = replace(row, new_blocks=tuple(tables))

    return keep_records(rules, "new_blocks").replacing(process_grant, grant)


@PAGE.exhibit("the drafts of a withdrawn row are dispatched with a later row", "#28558", "P24 P26")
def drafts_of_victim_dispatched(rules: Rules, _config: Config) -> Rules:
    """They are sent with the first chunk after the preemption and verified at another position."""

    def make_plan(step: Step, frame_rows: Sequence[FrameRow]) -> Plan:
        plan = rules[get_plan](step, frame_rows)
        rows = [
            replace(row, draft_token_ids=pop_record(step, row.request_id) or ())
            if row.resumed
            else row
            for row in plan.cached
        ]
        return replace(plan, cached=tuple(rows))

    return keep_records(rules, "drafts").replacing(get_plan, make_plan)


@PAGE.exhibit(
    "the index into the running list is not corrected after a preemption",
    "#23713",
    "P15 P9",
    invisible="efficiency: a request misses a step",
)
@instead(process_making_room)
def place_not_corrected(right: Right[int], index: int) -> int:
    """The list has become shorter, so the next request is left out of this step."""
    right()
    return index


@PAGE.exhibit(
    "a waiting request preempts a running one for a running slot",
    "#40004, #45561",
    "P16 P15",
    invisible="policy: upstream itself is undecided",
)
def seat_preemption(rules: Rules, _config: Config) -> Rules:
    """Upstream is undecided; here requests are preempted for blocks, never for a running slot."""

    def admit(step: Step) -> None:
        config, queue = step.state.config, rules[get_open_queue](step)
        is_full = len(step.running) >= config.max_num_seqs
        if config.policy is Policy.PRIORITY and step.budget > 0 and queue and is_full:
            victim_index = rules[get_victim_index](step)
            head, victim = step.requests[queue[0]], step.requests[step.running[victim_index]]
            if get_rank(head) < get_rank(victim):
                rules[process_preemption](step, victim_index)
        rules[process_waiting_phase](step)

    return rules.replacing(process_waiting_phase, admit)


_NEEDY = Note[RequestId]("needy", "")


@PAGE.exhibit("a request that lacks a block preempts itself", "inference-sim #373", "P16 P10")
def needy_preempts_itself(rules: Rules, _config: Config) -> Rules:
    """It is resumed first, lacks the block again and preempts itself again; the others never do."""

    def claim(step: Step, index: int, num_new: int) -> Any:
        _NEEDY.set(step, step.running[index])
        return rules[process_claim](step, index, num_new)

    changed = rules.replacing(process_claim, claim)
    return changed.replacing(get_victim_index, lambda step: step.running.index(_NEEDY.of(step)))


@PAGE.exhibit("a preempted request keeps its blocks", "inference-sim #963, #1061", "P1 P12")
def preempted_keeps_blocks(rules: Rules, _config: Config) -> Rules:
    """The pool fills up: no request runs, no block is free, and nothing can be admitted."""
    return rules.replacing(revoke_slots, lambda pool, *_: pool)
