"""Groups: the blocks of a request in each of several KV groups.

A request has a block table in each group. A *line* is the index of one: `group * slots + slot`.
Under a sliding window, leading blocks that no later token reads are freed: their places in the
table are null, and they return to the free queue. Configs with one group under full attention, the
most common ones, do not use this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device.pool import find_first_read, let_go, make_ring_room
from blockstep.impl.device.prefix_cache import take_blocks


@triton.jit
def find_new_left(s, group, slot, live, d):
    """Return [n] for requests `slot` [n] in a group: leading blocks that the next token does not
    read.

    Drafts in flight may be rejected, and then the first of them is the next token (P14).
    """
    computed = tl.load(s.computed + slot, mask=live, other=0)
    certain = tl.maximum(computed - tl.load(s.doubt + slot, mask=live, other=0), 0)
    first = find_first_read(s, group, certain, d)
    return tl.minimum(first, tl.load(s.held + group * d.slots + slot, mask=live, other=0))


@triton.jit(noinline=True)
def leave_blocks(s, slot, d):
    """Free a running request's blocks that no later token reads, per group, last block first."""
    one = tl.arange(0, 1)
    most = 0
    group = 0
    while group < d.groups:
        last = tl.max(find_new_left(s, group, slot + one, one == 0, d), 0)
        most += tl.maximum(last - tl.load(s.left + group * d.slots + slot), 0)
        group += 1
    make_ring_room(s, most, d)
    before = tl.load(s.tail)
    free = tl.load(s.num_free)
    tail = before
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        first = tl.load(s.left + line)
        last = tl.max(find_new_left(s, group, slot + one, one == 0, d), 0)
        if last > first:
            tail = let_go(s, line, first, last, tail, d)
            tl.store(s.left + line, last)
            at = first
            while at < last:
                index = at + tl.arange(0, d.lanes)
                tl.store(s.tables + line * d.table + index, 0, mask=index < last)
                at += d.lanes
        group += 1
    tl.debug_barrier()
    tl.store(s.tail, tail)
    tl.store(s.num_free, free + tail - before)
    tl.debug_barrier()


@triton.jit
def count_lacking(s, line, end, live, d):
    """Return [n] for lines [n]: the blocks that their tables lack for `end` [n] slots."""
    held = tl.load(s.held + line, mask=live, other=0)
    return tl.maximum((end + d.size - 1) // d.size - held, 0)


@triton.jit
def count_in_groups(s, slot, end, live, d):
    """Return [n] for requests `slot` [n]: blocks lacking in all groups for `end` [n] slots."""
    lacking = tl.where(live, count_lacking(s, slot, end, live, d), 0)
    group = 1
    while group < d.groups:
        more = count_lacking(s, group * d.slots + slot, end, live, d)
        lacking += tl.where(live, more, 0)
        group += 1
    return lacking


@triton.jit(noinline=True)
def take_in_groups(s, slot, end, d):
    """Append to the tables of a request what they lack for `end` slots, group by group."""
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        held = tl.load(s.held + line)
        tl.store(s.step_first + line, held)
        take_blocks(s, line, tl.maximum((end + d.size - 1) // d.size - held, 0), d)
        group += 1


@triton.jit
def append_in_groups(s, slot, start, end, live, d):
    """Append blocks in `scratch` to the tables of requests `slot` [n], in all groups.

    Each table gets what it lacks for `end` [n] slots. The blocks of a request begin at `start` [n],
    and follow each other group by group.
    """
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        held = tl.load(s.held + line, mask=live, other=0)
        lacking = tl.where(live, count_lacking(s, line, end, live, d), 0)
        most = tl.max(lacking, 0)
        index = 0
        while index < most:
            gets = index < lacking
            block = tl.load(s.scratch + (start + index), mask=gets, other=0)
            tl.store(s.tables + line * d.table + held + index, block, mask=gets)
            index += 1
        tl.debug_barrier()
        tl.store(s.held + line, held + lacking, mask=live)
        tl.store(s.step_first + line, held, mask=live)
        start += lacking
        group += 1
    tl.debug_barrier()


@triton.jit
def count_leaving(s, slot, live, d):
    """Return [n] for requests `slot` [n]: blocks that skipping frees; and how many are shared.

    A block with several holders becomes free when the last of them drops it.
    """
    position = tl.arange(0, d.rows)
    freed = position - position
    shared = position - position
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        last = find_new_left(s, group, slot, live, d)
        leaving = tl.where(live, last - tl.load(s.left + line, mask=live, other=0), 0)
        most = tl.max(leaving, 0)
        index = 0
        while index < most:
            leaves = index < leaving
            block = tl.load(s.tables + line * d.table + (last - 1 - index), mask=leaves, other=0)
            refs = tl.load(s.ref_count + block, mask=leaves, other=0)
            freed += (refs == 1).to(tl.int32)
            shared += (refs > 1).to(tl.int32)
            index += 1
        group += 1
    return freed, tl.sum(shared, 0)


@triton.jit
def leave_together(s, slot, freed, live, d):
    """Do `leave_blocks` for all requests `slot` [n] at once, in their order.

    `freed` [n]: the number of each request's blocks that become free.
    """
    total = tl.sum(freed, 0)
    make_ring_room(s, total, d)
    tail = tl.load(s.tail)
    free = tl.load(s.num_free)
    to = tail + tl.cumsum(freed, 0) - freed
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        first = tl.load(s.left + line, mask=live, other=0)
        last = tl.where(live, find_new_left(s, group, slot, live, d), first)
        most = tl.max(last - first, 0)
        index = 0
        while index < most:
            leaves = index < last - first
            at = line * d.table + (last - 1 - index)
            block = tl.load(s.tables + at, mask=leaves, other=0)
            refs = tl.load(s.ref_count + block, mask=leaves, other=0)
            tl.debug_barrier()
            is_freed = leaves & (refs == 1)
            tl.store(s.tables + at, 0, mask=leaves)
            tl.store(s.ref_count + block, refs - 1, mask=leaves)
            tl.store(s.ring + (to & (d.ring - 1)), block, mask=is_freed)
            tl.store(s.place + block, to & (d.ring - 1), mask=is_freed)
            to += is_freed.to(tl.int32)
            index += 1
        tl.debug_barrier()
        tl.store(s.left + line, tl.maximum(first, last), mask=live)
        group += 1
    tl.store(s.tail, tail + total)
    tl.store(s.num_free, free + total)
    tl.debug_barrier()


@triton.jit
def add_doubt(s, slot, drafts, live):
    """Add to the number of drafts in flight of requests `slot` [n]."""
    doubt = tl.load(s.doubt + slot, mask=live, other=0)
    tl.debug_barrier()
    tl.store(s.doubt + slot, doubt + drafts, mask=live)


@triton.jit
def write_plan_blocks(s, slot, row, frame, live, d):
    """Write the lengths of the requests' tables before and after the step into a frame."""
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        before = tl.load(s.step_first + line, mask=live, other=0)
        after = tl.load(s.held + line, mask=live, other=0)
        at = (frame * d.groups + group) * 2 * d.rows + row
        tl.store(s.plan_blocks + at, before, mask=live)
        tl.store(s.plan_blocks + at + d.rows, after, mask=live)
        group += 1
