"""Planning: the tokens and blocks that each request gets in a step."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from blockstep.impl.compiled.blocks import list_nodes, publish, take_blocks, touch
from blockstep.impl.compiled.jit import compiled, entry, making_arrays
from blockstep.impl.compiled.lives import leave_running, preempt, seat
from blockstep.impl.compiled.queues import (
    get_head,
    goes_before,
    leave_queue,
    pass_over,
    return_passed,
    select_queue,
)
from blockstep.impl.compiled.state import (
    AWAITS_GRAMMAR,
    BIRTH,
    BLOCK_SIZE,
    BUDGET,
    DROPS_LAST_HIT,
    END_BY_MAX_TOKENS,
    FIRST_BLOCK,
    GRAMMAR_READY,
    HAS_CACHE,
    HAS_CHUNKS,
    HITS,
    IS_ASYNC,
    IS_PREFILL,
    IS_PRIORITY,
    IS_WAITING,
    LAST_FRAME,
    LAST_NODE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MAX_TOKENS_PER_ROW,
    NEXT_SEAT,
    NONE,
    NUM_CACHED_TOKENS,
    NUM_COMPUTED,
    NUM_DRAFTS,
    NUM_FREE,
    NUM_FULL,
    NUM_HELD,
    NUM_KNOWN,
    NUM_LOOKAHEAD,
    NUM_PLACEHOLDERS,
    NUM_PREEMPTED,
    NUM_PROMISED,
    NUM_PROMPT,
    NUM_PUBLISHED,
    NUM_ROWS,
    NUM_RUNNING,
    QUERIES,
    REF_COUNT,
    RESERVES_WHOLE,
    ROW,
    ROW_DRAFTS,
    ROW_FIRST_BLOCK,
    ROW_LAST_BLOCK,
    ROW_SLOT,
    ROW_TOKENS,
    RUNNING,
    SEAT,
    SKIPS_CACHE,
    STATUS,
    TOLD_COLUMNS,
    TOLD_COMPUTED,
    TOLD_DRAFTS,
    TOLD_OUTPUTS,
    TOLD_SAMPLES,
    TOLD_SCHEDULED,
    Int32s,
    Int64s,
    State,
)
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER

# The running phase: each running request gets its next tokens, and blocks to write them in


@compiled
def _schedule_running(s: State) -> None:
    position = 0
    while position < s.scalars[NUM_RUNNING] and s.scalars[BUDGET] > 0:
        slot = s.lines[position, RUNNING]
        tokens = _tokens_to_run(s, slot)
        if tokens <= 0:
            position += 1
            continue
        needed = _blocks_needed(s, slot, tokens)
        if needed > s.scalars[NUM_FREE]:
            position = _make_room(s, slot, needed, position)
            if position < 0:
                return
        held = s.requests[slot, NUM_HELD]
        if needed > 0:
            take_blocks(s, slot, needed)
        computed, known = s.requests[slot, NUM_COMPUTED], s.requests[slot, NUM_KNOWN]
        publish(s, slot, min(computed + tokens, known))
        drafts = 0
        if s.requests[slot, NUM_DRAFTS] > 0:  # drafts that do not fit are dropped (P24)
            drafts = computed + tokens - known - s.requests[slot, NUM_PROMISED]
            s.requests[slot, NUM_DRAFTS] = 0
        _add_row(s, slot, tokens, held, drafts)
        position += 1


@compiled
def _add_row(s: State, slot: int, tokens: int, first_block: int, drafts: int) -> None:
    row = s.scalars[NUM_ROWS]
    s.lines[row, ROW_SLOT], s.lines[row, ROW_TOKENS] = slot, tokens
    s.lines[row, ROW_FIRST_BLOCK], s.lines[row, ROW_DRAFTS] = first_block, drafts
    s.lines[row, ROW_LAST_BLOCK] = s.requests[slot, NUM_HELD]
    s.requests[slot, ROW] = row
    s.scalars[NUM_ROWS] = row + 1
    s.scalars[BUDGET] -= tokens


@compiled
def _tokens_to_run(s: State, slot: int) -> int:
    """Return the tokens of a running request in this step, including drafts; none if not positive.

    computed | ... known, placeholders | drafts |   one slot below max_model_len stays free
             <------ gap ----------------------->    for the token to be sampled

    A request that its placeholders will end by `max_tokens` has no row (seed 001, "Async scheduling
    skip-ahead"): one of them is certain, the others may be rejected drafts.
    """
    computed, promised = s.requests[slot, NUM_COMPUTED], s.requests[slot, NUM_PROMISED]
    if promised > 0 and computed + 2 - promised >= s.requests[slot, END_BY_MAX_TOKENS]:
        return 0
    gap = s.requests[slot, NUM_KNOWN] + promised + s.requests[slot, NUM_DRAFTS] - computed
    most = min(s.scalars[MAX_TOKENS_PER_ROW], s.scalars[BUDGET])
    return int(min(gap, most, s.scalars[MAX_MODEL_LEN] - 1 - computed))


@compiled
def _blocks_needed(s: State, slot: int, tokens: int) -> int:
    """Return the number of new blocks for the scheduled tokens and the lookahead after them
    (P8)."""
    end = s.requests[slot, NUM_COMPUTED] + tokens + s.scalars[NUM_LOOKAHEAD]
    end = min(end, s.scalars[MAX_MODEL_LEN])
    size, held = s.scalars[BLOCK_SIZE], s.requests[slot, NUM_HELD]
    if end <= held * size:
        return 0
    return int((end + size - 1) // size - held)


@compiled
def _make_room(s: State, slot: int, needed: int, position: int) -> int:
    """Preempt until `needed` blocks are free for `slot`, at `position` of the running list.

    Returns its new position; -1 if it was preempted itself, which ends the phase.
    """
    while needed > s.scalars[NUM_FREE]:
        at = _select_victim(s)
        victim = s.lines[at, RUNNING]
        leave_running(s, at)
        if at < position:
            position -= 1
        row = s.requests[victim, ROW]
        if row != NONE:  # its tokens return to the budget
            s.scalars[BUDGET] += s.lines[row, ROW_TOKENS]
            s.lines[row, ROW_SLOT] = NONE
        preempt(s, victim)
        s.scratch[s.scalars[NUM_PREEMPTED]] = victim
        s.scalars[NUM_PREEMPTED] += 1
        if victim == slot:
            return -1
    return position


@compiled
def _select_victim(s: State) -> int:
    """Return the position of the request to preempt (P16).

    FCFS: the last. Priority: the one that would wait longest, in the order of the queues; any other
    choice among equals lets two requests preempt each other for ever (P10).
    """
    found = s.scalars[NUM_RUNNING] - 1
    if s.scalars[IS_PRIORITY]:
        for position in range(found - 1, -1, -1):
            if goes_before(s, s.lines[found, RUNNING], s.lines[position, RUNNING]):
                found = position
    return int(found)


# The waiting phase: requests are admitted while budget, running slots and blocks last


@compiled
def _schedule_waiting(s: State, oldest_id: int) -> None:
    while s.scalars[BUDGET] > 0 and s.scalars[NUM_RUNNING] < s.scalars[MAX_NUM_SEQS]:
        slot = get_head(s, select_queue(s))
        if slot == NONE:
            break
        if not _is_ready(s, slot) or _awaits_token(s, slot, oldest_id):
            pass_over(s, slot)
        elif not _try_admit(s, slot):
            break
    return_passed(s)


@compiled
def _is_ready(s: State, slot: int) -> bool:
    """Whether the request may be admitted; if its grammar is ready, its status becomes waiting."""
    if s.requests[slot, STATUS] != AWAITS_GRAMMAR:
        return True
    if not s.requests[slot, GRAMMAR_READY]:
        return False
    s.requests[slot, STATUS] = IS_WAITING
    return True


@compiled
def _awaits_token(s: State, slot: int, oldest_id: int) -> bool:
    """Whether it was preempted, and a frame in flight samples for it.

    If it were admitted now, the position after its known tokens would be sampled twice (ours, P13;
    upstream #48245). A row that samples has no chunk after it, so it is enough to look at the last
    row.
    """
    return bool(s.requests[slot, LAST_FRAME] >= oldest_id and s.requests[slot, IS_PREFILL] == 0)


@compiled
def _try_admit(s: State, slot: int) -> bool:
    """Admit the request, or change nothing and return False (P7)."""
    known, size = s.requests[slot, NUM_KNOWN], s.scalars[BLOCK_SIZE]
    asks = s.scalars[HAS_CACHE] != 0 and s.requests[slot, SKIPS_CACHE] == 0
    num_hits = _find_hits(s, slot) if asks else 0
    computed = num_hits * size
    tokens = min(known - computed, s.scalars[MAX_TOKENS_PER_ROW])
    if tokens > s.scalars[BUDGET]:
        if not s.scalars[HAS_CHUNKS]:
            return False
        tokens = s.scalars[BUDGET]
    free = s.scalars[NUM_FREE]
    for index in range(num_hits):
        if s.blocks[s.scratch[index], REF_COUNT] == 0:
            free -= 1
    whole = (known + size - 1) // size - num_hits
    needed = (computed + tokens + size - 1) // size - num_hits
    if needed > free or (s.scalars[RESERVES_WHOLE] != 0 and whole > free):
        return False
    leave_queue(s, slot)
    _admit(s, slot, num_hits, needed, tokens)
    if s.requests[slot, NUM_CACHED_TOKENS] < 0:
        s.requests[slot, NUM_CACHED_TOKENS] = computed
    if asks:
        s.scalars[QUERIES] += known
        s.scalars[HITS] += computed
    return True


@compiled
def _find_hits(s: State, slot: int) -> int:
    """Return the blocks of the longest cached prefix, at least one token left (upstream #30320).

    The blocks are written to `scratch`; their number is returned. An EAGLE head needs the last hit
    block computed again (seed 001, "find_longest_cache_hit").
    """
    known, size = s.requests[slot, NUM_KNOWN], s.scalars[BLOCK_SIZE]
    list_nodes(s, s.requests[slot, LAST_NODE], s.requests[slot, NUM_FULL], s.scratch)
    found = 0
    for index in range((known - 1) // size):
        block = s.nodes[s.scratch[index], FIRST_BLOCK]
        if block == NONE:
            break
        s.scratch[index] = block
        found += 1
    if found > 0 and s.scalars[DROPS_LAST_HIT] != 0:
        found -= 1
    return found


@compiled
def _admit(s: State, slot: int, num_hits: int, needed: int, tokens: int) -> None:
    seat(s, slot)
    # Hits get their holder before new blocks are taken: the head of the queue could be a hit
    # (upstream #33775).
    for index in range(num_hits):
        touch(s, s.scratch[index])
        s.block_tables[s.requests[slot, SEAT], index] = s.scratch[index]
    s.requests[slot, NUM_HELD] = s.requests[slot, NUM_PUBLISHED] = num_hits
    take_blocks(s, slot, needed)
    size = s.scalars[BLOCK_SIZE]
    computed = num_hits * size
    s.requests[slot, NUM_COMPUTED] = computed
    publish(s, slot, min(computed + tokens, s.requests[slot, NUM_KNOWN]))
    _add_row(s, slot, tokens, 0, 0)


# The plan

PlanArrays: TypeAlias = tuple[Int64s, Int32s, Int32s, int, int, int, int, int]
"""Slots and births [2, rows]; data of the rows [TOLD_COLUMNS, rows]; rows of new blocks, their ids,
and ids of drafts, all in one array; the number of new blocks, of rows that sample, of rows that
were running before, of those that the previous plan lacked, and of preempted requests (both are
listed in `scratch`, preempted first)."""


@entry("state", "int", "int", "int", "int", "bool")
def plan_step(
    s: State, frame_id: int, previous_id: int, oldest_id: int, budget: int, admits: bool
) -> PlanArrays:
    """Plan one step; the caller has made all arrays long enough.

    Args:
        s: the state.
        frame_id: id of this plan.
        previous_id: id of the plan before.
        oldest_id: id of the oldest frame in flight; of this one if there is none.
        budget: tokens.
        admits: whether to run the waiting phase, unless a request is preempted.
    """
    s.scalars[BUDGET] = budget
    s.scalars[NUM_ROWS] = s.scalars[NUM_PREEMPTED] = 0
    _schedule_running(s)
    if s.scalars[NUM_PREEMPTED] > 0:
        _close_gaps(s)
    num_running = int(s.scalars[NUM_ROWS])
    if admits and s.scalars[NUM_PREEMPTED] == 0:
        _schedule_waiting(s, oldest_id)
    return _issue(s, frame_id, previous_id, num_running)


@compiled
def _close_gaps(s: State) -> None:
    """Remove the rows of preempted requests."""
    kept = 0
    for row in range(s.scalars[NUM_ROWS]):
        if s.lines[row, ROW_SLOT] == NONE:
            continue
        for column in range(ROW_SLOT, NEXT_SEAT):
            s.lines[kept, column] = s.lines[row, column]
        kept += 1
    s.scalars[NUM_ROWS] = kept


@making_arrays
def _issue(s: State, frame_id: int, previous_id: int, num_running: int) -> PlanArrays:
    """Write the plan's differences (P26), and count scheduled tokens as computed."""
    rows, num_blocks, num_drafts = s.scalars[NUM_ROWS], 0, 0
    for row in range(rows):
        num_blocks += s.lines[row, ROW_LAST_BLOCK] - s.lines[row, ROW_FIRST_BLOCK]
        num_drafts += s.lines[row, ROW_DRAFTS]
    who, told = np.empty((2, rows), np.int64), np.empty((TOLD_COLUMNS, rows), np.int32)
    ids = np.empty(2 * num_blocks + num_drafts, np.int32)
    num_samples, num_missed = _fill_plan(
        s, frame_id, previous_id, num_running, who, told, ids, num_blocks
    )
    if s.scalars[NUM_PLACEHOLDERS] > 0:
        _drop_unused_placeholders(s, frame_id)
    return (
        who, told, ids, num_blocks, num_samples, num_running, num_missed,
        int(s.scalars[NUM_PREEMPTED]),
    )  # fmt: skip


@compiled
def _fill_plan(
    s: State,
    frame_id: int,
    previous_id: int,
    num_running: int,
    who: Int64s,
    told: Int32s,
    ids: Int32s,
    num_blocks: int,
) -> tuple[int, int]:
    """Return the number of rows that sample, and of running ones that the previous plan lacked."""
    rows = s.scalars[NUM_ROWS]
    at_block, at_draft, num_samples, at_missed = 0, 2 * num_blocks, 0, s.scalars[NUM_PREEMPTED]
    for row in range(rows):
        slot, drafts = s.lines[row, ROW_SLOT], s.lines[row, ROW_DRAFTS]
        seated = s.requests[slot, SEAT]
        who[0, row], who[1, row] = slot, s.requests[slot, BIRTH]
        for index in range(s.lines[row, ROW_FIRST_BLOCK], s.lines[row, ROW_LAST_BLOCK]):
            ids[at_block], ids[num_blocks + at_block] = row, s.block_tables[seated, index]
            at_block += 1
        is_known = s.scalars[IS_ASYNC] == 0
        for index in range(drafts):
            ids[at_draft] = s.drafts[seated, index] if is_known else DRAFT_PLACEHOLDER
            at_draft += 1
        if row < num_running and s.requests[slot, LAST_FRAME] != previous_id:
            s.scratch[at_missed] = row
            at_missed += 1
        num_samples += _advance(s, slot, row, told)
        s.requests[slot, LAST_FRAME] = frame_id
        s.requests[slot, ROW] = NONE
    return num_samples, at_missed - s.scalars[NUM_PREEMPTED]


@compiled
def _advance(s: State, slot: int, row: int, told: Int32s) -> int:
    """Write a row's data, and advance its request; return whether the row samples."""
    computed, tokens = s.requests[slot, NUM_COMPUTED], s.lines[row, ROW_TOKENS]
    known = s.requests[slot, NUM_KNOWN] + s.requests[slot, NUM_PROMISED]
    drafts = s.lines[row, ROW_DRAFTS]
    samples = int(computed + tokens >= known)
    told[TOLD_COMPUTED, row], told[TOLD_SCHEDULED, row] = computed, tokens
    told[TOLD_OUTPUTS, row] = known - s.requests[slot, NUM_PROMPT]
    told[TOLD_SAMPLES, row], told[TOLD_DRAFTS, row] = samples, drafts
    s.requests[slot, NUM_COMPUTED] = computed + tokens
    s.requests[slot, IS_PREFILL] = 1 - samples
    if samples and s.scalars[IS_ASYNC] != 0:  # placeholders (P12)
        s.requests[slot, NUM_PROMISED] += 1 + drafts
        s.requests[slot, NUM_DRAFTS] = s.scalars[NUM_PLACEHOLDERS]
    return samples


@compiled
def _drop_unused_placeholders(s: State, frame_id: int) -> None:
    """Drop the placeholder drafts of running requests without a row in this plan (ours, P24).

    They are what the worker proposed after the previous plan, and the worker proposes nothing for a
    request that it does not run (upstream #46899).
    """
    for position in range(s.scalars[NUM_RUNNING]):
        slot = s.lines[position, RUNNING]
        if s.requests[slot, LAST_FRAME] != frame_id:
            s.requests[slot, NUM_DRAFTS] = 0
