"""The running phase: each running request gets its next tokens, and blocks to write them in."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.groups import (
    append_in_groups,
    count_in_groups,
    count_lacking,
    count_leaving,
    leave_blocks,
    leave_together,
    take_in_groups,
)
from blockstep.impl.device.pool import pop_free
from blockstep.impl.device.prefix_cache import (
    count_filled,
    publish,
    publish_listed,
    withdraw_listed,
)
from blockstep.impl.device.queues import preempt

FAR = tl.constexpr(layout.FAR)


@triton.jit
def count_tokens(s, slot, live, d):
    """Return [n] for requests `slot` [n]: tokens to schedule without a budget, including drafts.

    computed | ... known, placeholders | drafts |   one slot below max_model_len stays free
             <------ gap ----------------------->    for the token to be sampled

    A request that its placeholders will end by `max_tokens` has no row (seed 001, "Async scheduling
    skip-ahead"): one of them is certain, the others may be rejected drafts.
    """
    computed = tl.load(s.computed + slot, mask=live, other=0)
    promised = tl.load(s.promised + slot, mask=live, other=0)
    drafts = tl.load(s.num_drafts + slot, mask=live, other=0)
    gap = tl.load(s.known + slot, mask=live, other=0) + promised + drafts - computed
    wanted = tl.minimum(gap, d.max_tokens_per_row)
    wanted = tl.minimum(wanted, d.max_model_len - 1 - computed)
    last = tl.load(s.end_by_max_tokens + slot, mask=live, other=0)
    ends = (promised > 0) & (computed + 2 - promised >= last)
    return tl.where(live & (wanted > 0) & (ends == 0), wanted, 0)


@triton.jit
def find_end(s, slot, tokens, live, d):
    """Return [n] for requests `slot` [n]: the slots of paged memory for `tokens` and lookahead
    (P8)."""
    end = tl.load(s.computed + slot, mask=live, other=0) + tokens + d.num_lookahead
    return tl.minimum(end, d.max_model_len)


@triton.jit
def count_blocks(s, slot, tokens, live, d):
    """Return [n] for requests `slot` [n]: new blocks of the first group for `tokens` (P8)."""
    end = find_end(s, slot, tokens, live, d)
    return tl.where(live & (tokens > 0), count_lacking(s, slot, end, live, d), 0)


@triton.jit
def add_rows(s, slot, tokens, first_block, live):
    """Set the tokens of requests `slot` [n] in the step; drafts beyond them are dropped (P24).

    `first_block` [n]: the number of blocks that they held before it.
    """
    drafts = tl.load(s.num_drafts + slot, mask=live, other=0)
    scheduled = tl.load(s.computed + slot, mask=live, other=0) + tokens
    scheduled -= tl.load(s.known + slot, mask=live, other=0)
    scheduled -= tl.load(s.promised + slot, mask=live, other=0)
    tl.debug_barrier()
    tl.store(s.step_tokens + slot, tokens, mask=live)
    tl.store(s.step_drafts + slot, tl.where(drafts > 0, scheduled, 0), mask=live)
    tl.store(s.step_first + slot, first_block, mask=live)
    tl.store(s.num_drafts + slot, 0, mask=live)
    tl.debug_barrier()


@triton.jit
def publish_rows(s, end, d):
    """Publish, in order, the blocks that the rows of the first `end` running requests fill.

    Groups are done one after the other: a content has a separate entry in each.
    """
    position = tl.arange(0, d.rows)
    live = position < end
    slot = tl.load(s.run + position, mask=live, other=0)
    tokens = tl.load(s.step_tokens + slot, mask=live, other=0)
    filled = count_filled(s, slot, live) // d.size
    group = 0
    while group < d.groups:
        published = tl.load(s.published + group * d.slots + slot, mask=live, other=0)
        fills = (live & (tokens > 0) & (filled > published)).to(tl.int32)
        place = tl.cumsum(fills, 0) - fills
        tl.store(s.scratch + place, slot, mask=fills > 0)
        tl.debug_barrier()
        publish_listed(s, tl.sum(fills, 0), group, 0, d)
        group += 1


@triton.jit
def schedule_together(s, budget, d):
    """Schedule all running requests before the first that lacks blocks, at once.

    Returns the position of that request, and the remaining budget.
    """
    position = tl.arange(0, d.rows)
    count = tl.load(s.num_running)
    live = position < count
    slot = tl.load(s.run + position, mask=live, other=0)
    wanted = count_tokens(s, slot, live, d)
    before = tl.cumsum(wanted, 0) - wanted
    tokens = tl.minimum(tl.maximum(budget - before, 0), wanted)
    needed = count_blocks(s, slot, tokens, live, d)
    ends = tl.cumsum(needed, 0)
    is_short = live & (tokens > 0) & (ends > tl.load(s.num_free))
    first = tl.min(tl.where(is_short, position, count), 0)
    fits = (position < first) & (tokens > 0)
    held = tl.load(s.held + slot, mask=live, other=0)
    needed = tl.where(fits, needed, 0)
    total = tl.sum(needed, 0)
    if total > 0:
        pop_free(s, total, d)
        withdraw_listed(s, total, d)
        most = tl.max(needed, 0)
        index = 0
        while index < most:
            gets = index < needed
            block = tl.load(s.scratch + (ends - needed + index), mask=gets, other=0)
            tl.store(s.tables + slot * d.table + held + index, block, mask=gets)
            index += 1
        tl.store(s.held + slot, held + needed, mask=fits)
    add_rows(s, slot, tokens, held, fits)
    if d.has_cache:
        publish_rows(s, first, d)
    return first, budget - tl.sum(tl.where(fits, tokens, 0), 0)


@triton.jit
def select_victim(s, d):
    """Return the slot to preempt (P16).

    FCFS: the last. Priority: the one that would wait longest, in the order of the queues; any other
    choice among equals lets two requests preempt each other for ever (P10).
    """
    count = tl.load(s.num_running)
    found = tl.load(s.run + (count - 1))
    if d.is_priority:
        position = tl.arange(0, d.rows)
        slot = tl.load(s.run + position, mask=position < count, other=0)
        rank = tl.load(s.ranks + slot, mask=position < count, other=-1)
        at = tl.max(tl.where(rank == tl.max(rank, 0), position, 0), 0)
        found = tl.load(s.run + at)
    return found


@triton.jit
def find_position(s, slot, d):
    """Return its position in the running list; the number of running requests if it is not
    there."""
    position = tl.arange(0, d.rows)
    count = tl.load(s.num_running)
    other = tl.load(s.run + position, mask=position < count, other=-1)
    return tl.min(tl.where(other == slot, position, count), 0)


@triton.jit
def make_room(s, slot, needed, budget, d):
    """Preempt until `needed` blocks are free; return the budget, and whether `slot` still runs.

    A victim's tokens of this step return to the budget.
    """
    runs = 1
    free = tl.load(s.num_free)
    while (needed > free) & (runs > 0):
        victim = select_victim(s, d)
        at = tl.load(s.num_preempted)
        budget += tl.load(s.step_tokens + victim)
        tl.debug_barrier()
        tl.store(s.victims + at, victim)
        tl.store(s.num_preempted, at + 1)
        preempt(s, victim, d)
        runs = (victim != slot).to(tl.int32)
        free = tl.load(s.num_free)
    return budget, runs


@triton.jit(noinline=True)
def schedule_in_groups(s, budget, d):
    """Do what `schedule_together` does, with several groups or windows.

    A request frees skipped blocks before it takes new ones: group by group, before all later
    requests. Blocks are taken at one end of the free queue and return at the other, so all requests
    may free theirs first; blocks that a later request frees are not counted for an earlier one.
    Requests that drop a shared block are scheduled one by one.
    """
    position = tl.arange(0, d.rows)
    count = tl.load(s.num_running)
    live = position < count
    slot = tl.load(s.run + position, mask=live, other=0)
    wanted = count_tokens(s, slot, live, d)
    before = tl.cumsum(wanted, 0) - wanted
    tokens = tl.minimum(tl.maximum(budget - before, 0), wanted)
    live = live & (tokens > 0)
    end = find_end(s, slot, tokens, live, d)
    needed = count_in_groups(s, slot, end, live, d)
    ends = tl.cumsum(needed, 0)
    freed, shared = count_leaving(s, slot, live, d)
    is_short = ends > tl.load(s.num_free) + tl.cumsum(freed, 0)
    first = tl.min(tl.where(live & (is_short | (shared > 0)), position, count), 0)
    fits = live & (position < first)
    leave_together(s, slot, tl.where(fits, freed, 0), fits, d)
    total = tl.sum(tl.where(fits, needed, 0), 0)
    if total > 0:
        pop_free(s, total, d)
        withdraw_listed(s, total, d)
    append_in_groups(s, slot, ends - needed, end, fits, d)
    add_rows(s, slot, tokens, tl.load(s.step_first + slot, mask=fits, other=0), fits)
    if d.has_cache:
        publish_rows(s, first, d)
    return first, budget - tl.sum(tl.where(fits, tokens, 0), 0)


@triton.jit(noinline=True)
def schedule_singly(s, position, budget, d):
    """Schedule running requests from `position` on, one by one; return the remaining budget."""
    one = tl.arange(0, 1)
    goes = 1
    while (position < tl.load(s.num_running)) & (budget > 0) & (goes > 0):
        slot = tl.load(s.run + position)
        live = one == 0
        tokens = tl.minimum(tl.max(count_tokens(s, slot + one, live, d), 0), budget)
        if (d.has_windows > 0) & (tokens > 0):
            leave_blocks(s, slot, d)
        end = find_end(s, slot + one, tokens + one, live & (tokens > 0), d)
        needed = tl.max(count_in_groups(s, slot + one, end, live & (tokens > 0), d), 0)
        budget, goes = make_room(s, slot, needed, budget, d)
        if goes > 0:
            position = find_position(s, slot, d) + 1
            if tokens > 0:
                held = tl.load(s.held + slot)
                take_in_groups(s, slot, tl.max(end, 0), d)
                filled = tl.load(s.computed + slot) + tokens
                publish(s, slot, tl.minimum(filled, tl.load(s.known + slot)), d)
                add_rows(s, slot + one, tokens + one, held + one, live)
                budget -= tokens
    return budget


@triton.jit
def schedule_running(s, budget, d):
    """Run the whole phase; return the remaining budget."""
    if (d.groups > 1) | (d.has_windows > 0):
        position, left = schedule_in_groups(s, budget, d)
    else:
        position, left = schedule_together(s, budget, d)
    if position < tl.load(s.num_running):
        left = schedule_singly(s, position, left, d)
    return left
