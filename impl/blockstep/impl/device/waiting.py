"""The waiting phase: requests are admitted while budget, running slots and blocks last."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.pool import count_unheld, find_first_read, touch_hits
from blockstep.impl.device.prefix_cache import count_hits, publish, take_blocks
from blockstep.impl.device.queues import QUEUE_SPAN, leave_queue

FAR = tl.constexpr(layout.FAR)
IS_WAITING = tl.constexpr(layout.IS_WAITING)
AWAITS_GRAMMAR = tl.constexpr(layout.AWAITS_GRAMMAR)
IS_RUNNING = tl.constexpr(layout.IS_RUNNING)
SKIPPED = tl.constexpr(layout.SKIPPED)
PASSED = tl.constexpr(layout.PASSED)
OLDEST_ID = tl.constexpr(layout.OLDEST_ID)


@triton.jit
def find_head(s, d):
    """Return the slot and key of the first waiting request; the key is FAR if there is none."""
    lane = tl.arange(0, d.lanes)
    best = tl.full((d.lanes,), FAR, tl.int64)
    slot = lane
    at = 0
    while at < d.slots:
        key = tl.load(s.key + at + lane)
        slot = tl.where(key < best, at + lane, slot)
        best = tl.minimum(best, key)
        at += d.lanes
    key = tl.min(best, 0)
    return tl.min(tl.where(best == key, slot, d.slots), 0), key


@triton.jit
def is_ready(s, slot):
    """Whether the request may be admitted; if its grammar is ready, its status becomes waiting.

    A preempted request for which a frame in flight samples may not: the position after its known
    tokens would be sampled twice (ours, P13; upstream #48245). A row that samples has no chunk
    after it, so it is enough to look at the last row.
    """
    awaits = tl.load(s.status + slot) == AWAITS_GRAMMAR
    has_grammar = tl.load(s.grammar_ready + slot) > 0
    oldest = tl.load(s.control + OLDEST_ID)
    is_in_flight = tl.load(s.last_frame + slot) >= oldest
    is_in_flight = is_in_flight & (tl.load(s.is_prefill + slot) == 0)
    tl.debug_barrier()
    tl.store(s.status + slot, IS_WAITING, mask=awaits & has_grammar)
    return ((awaits == 0) | has_grammar) & (is_in_flight == 0)


@triton.jit
def pass_over(s, slot):
    """Skip a request that cannot be admitted in this step, while others may be."""
    passed = tl.load(s.num_passed)
    tl.debug_barrier()
    tl.store(s.key + slot, FAR)
    tl.store(s.queue + slot, PASSED)
    tl.store(s.step_first + slot, passed)
    tl.store(s.num_passed, passed + 1)
    tl.debug_barrier()


@triton.jit
def return_passed(s, d):
    """Put the requests skipped in this step first in the skipped queue, in the same order."""
    count = tl.load(s.num_passed)
    front = tl.load(s.front)
    if count > 0:
        at = 0
        while at < d.slots:
            slot = at + tl.arange(0, d.lanes)
            is_passed = tl.load(s.queue + slot) == PASSED
            place = front - count + tl.load(s.step_first + slot)
            key = tl.full((d.lanes,), SKIPPED, tl.int64) * QUEUE_SPAN + QUEUE_SPAN // 2 + place
            if d.is_priority:
                key = tl.load(s.ranks + slot)
            tl.debug_barrier()
            tl.store(s.key + slot, key, mask=is_passed)
            tl.store(s.queue + slot, SKIPPED, mask=is_passed)
            at += d.lanes
        tl.store(s.front, front - count)
        tl.store(s.num_passed, 0)


@triton.jit(noinline=True)
def try_admit(s, slot, budget, d):
    """Admit the request, or change nothing (P7); return its tokens, 0 if it was not admitted."""
    known = tl.load(s.known + slot)
    asks = (tl.load(s.skips_cache + slot) == 0) & (d.has_cache > 0)
    hits = 0
    if asks:
        hits = count_hits(s, slot, known, d)
    computed = hits * d.size
    tokens = tl.minimum(known - computed, d.max_tokens_per_row)
    fits = (tokens <= budget) | (d.has_chunks > 0)
    tokens = tl.minimum(tokens, budget)
    unheld, whole = count_admission(s, slot, known, hits, d)
    free = tl.load(s.num_free)
    needed = (computed + tokens + d.size - 1) // d.size - hits
    fits = fits & (needed * d.groups + unheld <= free)
    fits = fits & ((whole <= free) | (d.reserves_whole == 0))
    admitted = tl.where(fits, tokens, 0)
    if fits:
        queries = tl.load(s.queries)
        total = tl.load(s.hits)
        admit(s, slot, hits, needed, tokens, d)
        tl.store(s.queries, queries + known, mask=asks)
        tl.store(s.hits, total + computed, mask=asks)
    return admitted


@triton.jit
def count_admission(s, slot, known, hits, d):
    """Return the free blocks that hits take, and the blocks of all known tokens, including hits.

    In a windowed group, no more is charged than is held at once (upstream #39734).
    """
    unheld = 0
    whole = 0
    group = 0
    while group < d.groups:
        first = 0
        if d.has_windows:
            first = find_first_read(s, group, hits * d.size, d)
        of_group = count_unheld(s, slot, group, first, hits, d)
        unheld += of_group
        of_group += (known + d.size - 1) // d.size - hits
        if d.has_windows:
            most = tl.minimum(tl.load(s.spans + group), known)
            most = (most + d.size - 1) // d.size
            of_group = tl.where(most > 0, tl.minimum(of_group, most), of_group)
        whole += of_group
        group += 1
    return unheld, whole


@triton.jit
def admit(s, slot, hits, needed, tokens, d):
    """Append the request to the running list, with its hits and new blocks.

    Hits of all groups get their holder before new blocks are taken: the head of the free queue
    could be a hit (upstream #33775).
    """
    leave_queue(s, slot)
    count = tl.load(s.num_running)
    free = tl.load(s.num_free)
    is_first = tl.load(s.cached + slot) < 0
    computed = hits * d.size
    group = 0
    while group < d.groups:
        first = 0
        if d.has_windows:
            first = find_first_read(s, group, computed, d)
        free -= touch_hits(s, slot, group, first, hits, d)
        line = group * d.slots + slot
        tl.store(s.held + line, hits)
        tl.store(s.published + line, hits)
        tl.store(s.left + line, first)
        tl.store(s.step_first + line, 0)
        group += 1
    tl.debug_barrier()
    tl.store(s.num_free, free)
    tl.store(s.run + count, slot)
    tl.store(s.num_running, count + 1)
    tl.store(s.status + slot, IS_RUNNING)
    tl.store(s.computed + slot, computed)
    tl.store(s.cached + slot, computed, mask=is_first)
    tl.store(s.step_tokens + slot, tokens)
    tl.store(s.step_drafts + slot, 0)
    tl.debug_barrier()
    group = 0
    while group < d.groups:
        take_blocks(s, group * d.slots + slot, needed, d)
        group += 1
    publish(s, slot, tl.minimum(computed + tokens, tl.load(s.known + slot)), d)


@triton.jit
def schedule_waiting(s, budget, d):
    """Admit waiting requests, the first one first, until one does not fit."""
    goes = ((budget > 0) & (tl.load(s.num_running) < d.max_num_seqs)).to(tl.int32)
    while goes > 0:
        slot, key = find_head(s, d)
        goes = (key < FAR).to(tl.int32)
        if goes > 0:
            if is_ready(s, slot):
                tokens = try_admit(s, slot, budget, d)
                budget -= tokens
                goes = (tokens > 0).to(tl.int32)
            else:
                pass_over(s, slot)
            if (budget == 0) | (tl.load(s.num_running) >= d.max_num_seqs):
                goes = 0
    return_passed(s, d)
