"""Pool: free blocks, holders of blocks, and the order of reuse (P1, P5).

The free queue is a ring of block ids between two ever-growing places. A block that is hit leaves a
hole in it, so its order is kept without walking a list.

Warps run at their own speed, so there is a barrier between two accesses to one place if one of them
is a store, here and in the other modules. If a function does not end with one, its caller's next
barrier orders its accesses. `benchmarks/barriers.py` shows for each barrier what only it orders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout

NONE = tl.constexpr(layout.NONE)


@triton.jit(noinline=True)
def close_holes(s, d):
    """Compact the ring, so that it has room for all blocks again."""
    head = tl.load(s.head)
    tail = tl.load(s.tail)
    at = head
    end = head
    while at < tail:  # runs at least once: it is called when the ring is nearly full
        place = at + tl.arange(0, d.lanes)
        block = tl.load(s.ring + (place & (d.ring - 1)), mask=place < tail, other=NONE)
        tl.debug_barrier()
        is_there = block >= 0
        rank = tl.cumsum(is_there.to(tl.int32), 0)
        to = (end + rank - 1) & (d.ring - 1)
        tl.store(s.ring + to, block, mask=is_there)
        tl.store(s.place + block, to, mask=is_there)
        end += tl.sum(is_there.to(tl.int32), 0)
        at += d.lanes
    shift = head - (head & (d.ring - 1))
    tl.store(s.head, head - shift)
    tl.store(s.tail, end - shift)
    tl.debug_barrier()


@triton.jit
def pop_free(s, count, d):
    """Move the first `count` free blocks, which must exist, into `scratch`, with one holder
    each."""
    at = tl.load(s.head)
    tail = tl.load(s.tail)
    free = tl.load(s.num_free)
    tl.debug_barrier()
    got = 0
    while got < count:
        place = at + tl.arange(0, d.lanes)
        block = tl.load(s.ring + (place & (d.ring - 1)), mask=place < tail, other=NONE)
        is_there = (block >= 0).to(tl.int32)
        rank = got + tl.cumsum(is_there, 0) - is_there
        is_taken = (block >= 0) & (rank < count)
        tl.store(s.scratch + rank, block, mask=is_taken)
        tl.store(s.ref_count + block, 1, mask=is_taken)
        taken = tl.sum(is_taken.to(tl.int32), 0)
        after = tl.max(tl.where(is_taken, place + 1, at), 0)
        whole = tl.minimum(at + d.lanes, tail)
        at = tl.where(taken == tl.sum(is_there, 0), whole, after)
        got += taken
    tl.store(s.head, at)
    tl.store(s.num_free, free - count)
    tl.debug_barrier()


@triton.jit
def find_first_read(s, group, computed, d):
    """Return the first block of a group that a token after the `computed` ones reads.

    `computed` is a number or [n].
    """
    window = tl.load(s.windows + group)
    first = tl.maximum(computed - window + 1, 0) // d.size
    return tl.where(window > 0, first, 0)


@triton.jit
def count_unheld(s, slot, group, first, count, d):
    """Return how many of a request's hits in a group, from `first` to `count`, are free blocks."""
    unheld = 0
    at = first
    while at < count:
        index = at + tl.arange(0, d.lanes)
        is_hit = index < count
        node = tl.load(s.paths + slot * d.table + index, mask=is_hit, other=0)
        block = tl.load(s.first_block + group * d.nodes + node, mask=is_hit, other=0)
        refs = tl.load(s.ref_count + block, mask=is_hit, other=1)
        unheld += tl.sum((refs == 0).to(tl.int32), 0)
        at += d.lanes
    return unheld


@triton.jit
def touch_hits(s, slot, group, first, count, d):
    """Add a holder to a request's hits in a group, and make them its block table.

    Returns how many were free. The blocks before `first` are null: no later token reads them.
    """
    line = group * d.slots + slot
    touched = 0
    at = 0
    while at < count:
        index = at + tl.arange(0, d.lanes)
        is_hit = index < count
        is_read = is_hit & (index >= first)
        node = tl.load(s.paths + slot * d.table + index, mask=is_read, other=0)
        block = tl.load(s.first_block + group * d.nodes + node, mask=is_read, other=0)
        refs = tl.load(s.ref_count + block, mask=is_read, other=1)
        place = tl.load(s.place + block, mask=is_read, other=0)
        tl.debug_barrier()
        tl.store(s.tables + line * d.table + index, block, mask=is_hit)
        tl.store(s.ref_count + block, refs + 1, mask=is_read)
        tl.store(s.ring + place, NONE, mask=is_read & (refs == 0))
        touched += tl.sum((refs == 0).to(tl.int32), 0)
        at += d.lanes
    return touched


@triton.jit
def make_ring_room(s, count, d):
    """Compact the ring if fewer than `count` blocks can be appended to the free queue."""
    if tl.load(s.tail) - tl.load(s.head) + count > d.ring:
        close_holes(s, d)


@triton.jit
def let_go(s, line, first, last, tail, d):
    """Drop the blocks from `first` to `last` of a line's table, the last one first.

    `tail` is the end of the free queue; returns the new one.
    """
    held = last - first
    at = 0
    while at < held:
        step = at + tl.arange(0, d.lanes)
        is_held = step < held
        block = tl.load(s.tables + line * d.table + (last - 1 - step), mask=is_held, other=0)
        refs = tl.load(s.ref_count + block, mask=is_held, other=2) - 1
        tl.debug_barrier()
        tl.store(s.ref_count + block, refs, mask=is_held)
        is_freed = (is_held & (refs == 0)).to(tl.int32)
        place = (tail + tl.cumsum(is_freed, 0) - is_freed) & (d.ring - 1)
        tl.store(s.ring + place, block, mask=is_freed > 0)
        tl.store(s.place + block, place, mask=is_freed > 0)
        tail += tl.sum(is_freed, 0)
        at += d.lanes
    return tail


@triton.jit
def free_blocks(s, slot, d):
    """Drop all blocks of a request, group by group; their prefixes are evicted last.

    Under full attention a running request holds at least one block, so the loop of `let_go` runs,
    and its barrier orders the loads before it and the stores after it.
    """
    most = 0
    group = 0
    while group < d.groups:
        most += tl.load(s.held + group * d.slots + slot)
        group += 1
    make_ring_room(s, most, d)
    before = tl.load(s.tail)
    free = tl.load(s.num_free)
    tail = before
    group = 0
    while group < d.groups:
        line = group * d.slots + slot
        held = tl.load(s.held + line)
        left = 0
        if d.has_windows:
            left = tl.load(s.left + line)
            tl.debug_barrier()
        tail = let_go(s, line, left, held, tail, d)
        tl.store(s.held + line, 0)
        tl.store(s.published + line, 0)
        tl.store(s.left + line, 0)
        group += 1
    tl.store(s.tail, tail)
    tl.store(s.num_free, free + tail - before)
