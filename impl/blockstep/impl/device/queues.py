"""Lives: queues, running list, preemption and the end of a request."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.pool import free_blocks
from blockstep.impl.device.prefix_cache import withdraw_listed

NONE = tl.constexpr(layout.NONE)
FAR = tl.constexpr(layout.FAR)
IS_RUNNING = tl.constexpr(layout.IS_RUNNING)
IS_PREEMPTED = tl.constexpr(layout.IS_PREEMPTED)
NOWHERE = tl.constexpr(layout.NOWHERE)
WAITING = tl.constexpr(layout.WAITING)
QUEUE_SPAN = tl.constexpr(1 << 60)
"""Keys of one queue: half of them before its first place, and half after it."""


@triton.jit
def append(s, slot, queue, d):
    """Append the request to `queue`; under PRIORITY its place follows from its rank."""
    if d.is_priority:
        key = tl.load(s.ranks + slot)
    else:
        place = tl.load(s.back) + 1
        tl.debug_barrier()
        tl.store(s.back, place)
        key = tl.cast(queue, tl.int64) * QUEUE_SPAN + QUEUE_SPAN // 2 + place
    tl.store(s.key + slot, key)
    tl.store(s.queue + slot, queue)


@triton.jit
def prepend(s, slot, queue, d):
    """Prepend the request to `queue`; under PRIORITY its place follows from its rank."""
    if d.is_priority:
        key = tl.load(s.ranks + slot)
    else:
        place = tl.load(s.front) - 1
        tl.debug_barrier()
        tl.store(s.front, place)
        key = tl.cast(queue, tl.int64) * QUEUE_SPAN + QUEUE_SPAN // 2 + place
    tl.store(s.key + slot, key)
    tl.store(s.queue + slot, queue)


@triton.jit
def leave_queue(s, slot):
    """Remove the request from the queue that it is in."""
    tl.store(s.key + slot, FAR)
    tl.store(s.queue + slot, NOWHERE)
    tl.debug_barrier()


@triton.jit
def leave_running(s, slot, d):
    """Remove the request from the running list."""
    position = tl.arange(0, d.rows)
    count = tl.load(s.num_running)
    other = tl.load(s.run + position, mask=position < count, other=NONE)
    tl.debug_barrier()
    stays = ((position < count) & (other != slot)).to(tl.int32)
    tl.store(s.run + (tl.cumsum(stays, 0) - stays), other, mask=stays > 0)
    tl.store(s.num_running, tl.sum(stays, 0))


@triton.jit(noinline=True)
def preempt(s, slot, d):
    """Take all blocks from a running request; it will start again.

    Its verified tokens and its placeholders stay: frames in flight continue, and what they sample
    is delivered (P13). Blocks that were published for work of this step, which now does not run,
    are removed from the prefix cache (P4; upstream #43569).
    """
    leave_running(s, slot, d)
    if d.has_cache:
        first = tl.load(s.computed + slot) // d.size
        count = 0
        group = 0
        while group < d.groups:
            line = group * d.slots + slot
            held = tl.load(s.held + line)
            begin = first
            if d.has_windows:
                begin = tl.maximum(first, tl.load(s.left + line))
            at = begin
            while at < held:
                index = at + tl.arange(0, d.lanes)
                block = tl.load(s.tables + line * d.table + index, mask=index < held, other=0)
                tl.store(s.scratch + (count + index - begin), block, mask=index < held)
                at += d.lanes
            count += tl.maximum(held - begin, 0)
            group += 1
        tl.debug_barrier()
        withdraw_listed(s, count, d)
    free_blocks(s, slot, d)
    times = tl.load(s.preempted + slot) + 1
    total = tl.load(s.preemptions) + 1
    tl.debug_barrier()
    tl.store(s.computed + slot, 0)
    tl.store(s.num_drafts + slot, 0)
    tl.store(s.step_tokens + slot, 0)
    tl.store(s.preempted + slot, times)
    tl.store(s.preemptions, total)
    tl.store(s.status + slot, IS_PREEMPTED)
    prepend(s, slot, WAITING, d)


@triton.jit
def end(s, slot, d):
    """End an unfinished request, whether it runs or waits."""
    if tl.load(s.status + slot) == IS_RUNNING:
        leave_running(s, slot, d)
        free_blocks(s, slot, d)
    else:
        leave_queue(s, slot)
    tl.store(s.birth + slot, 0)
