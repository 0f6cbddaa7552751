"""Pool: free blocks, who holds a block, and which is taken next (P1, P5).

The free queue is a ring of block ids between two places that count on and on. A block that is hit
leaves a hole in it, so its order stays without a list being walked.

Warps go at their own speed, so a barrier stands between two accesses of one place, one of them a
store, here and in the modules beside it. Where a function does not end with one, its caller's next
barrier is what orders it. `benchmarks/barriers.py` shows for each barrier what it orders alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout

NONE = tl.constexpr(layout.NONE)


@triton.jit(noinline=True)
def close_holes(s, d):
    """Move free blocks together, so that the ring has room for all blocks again."""
    head = tl.load(s.head)
    tail = tl.load(s.tail)
    at = head
    end = head
    while at < tail:  # once at least: it is called where the ring is nearly full
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
    """Take the first `count` free blocks, which exist, into `scratch`: each is held once then."""
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
    """The first block of a group that a token behind the `computed` ones reads.

    `computed` is a number or [n].
    """
    window = tl.load(s.windows + group)
    first = tl.maximum(computed - window + 1, 0) // d.size
    return tl.where(window > 0, first, 0)


@triton.jit
def count_unheld(s, slot, group, first, count, d):
    """How many hits of a request in a group are free, of the blocks from `first` to `count`."""
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
    """Hold the hits of a request in a group, which become its block table; how many were free.

    The blocks before `first` are null: none of their tokens is read any more.
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
    """Let go of the blocks from `first` to `last` of a line's table, the last one first.

    Returns the end of the free queue then; before, it was `tail`.
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
    """Let go of all tables of a request, group by group; their prefixes are evicted last.

    Under full attention a running request holds a block at least, so the loop of `let_go` runs, and
    its barrier stands between what is loaded before it and stored behind it.
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
