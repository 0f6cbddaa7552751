"""Steady: a fast path for a step of plain decodes, committed and planned together.

A plan is plain if every running request has one token in it, which is sampled, and no drafts. If
the plans in flight and the one before them are plain and have the same rows, most of the next step
is known: rows are the requests in running order, all numbers grow by one, and unchanged columns are
there already. The host of a graph sees no difference. With several KV groups or windows no plan is
plain.

    slow path:  commit -> commands -> running phase -> waiting phase -> frame -> inputs
    fast path:  load what changes -> one scan, one reduction -> store it

Some columns, and nodes of filled blocks, are not needed by plain steps. They are written later, for
many steps at once, before anything else can read them (`catch_up`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.prefix_cache import link_listed, name_blocks, withdraw

NONE = tl.constexpr(layout.NONE)
FAR = tl.constexpr(layout.FAR)
FRAME_ID = tl.constexpr(layout.FRAME_ID)
PREVIOUS_ID = tl.constexpr(layout.PREVIOUS_ID)
BUDGET = tl.constexpr(layout.BUDGET)
ADMITS = tl.constexpr(layout.ADMITS)
PLACE = tl.constexpr(layout.PLACE)
COMMIT_PLACE = tl.constexpr(layout.COMMIT_PLACE)
STEADY_PLANS = tl.constexpr(layout.STEADY_PLANS)
STEADY_ROWS = tl.constexpr(layout.STEADY_ROWS)
STEPS_LEFT = tl.constexpr(layout.STEPS_LEFT)
HAS_WAITING = tl.constexpr(layout.HAS_WAITING)
MOST_STOPS = tl.constexpr(layout.MOST_STOPS)
STEPS_BEHIND = tl.constexpr(layout.STEPS_BEHIND)
NUM_PENDING = tl.constexpr(layout.NUM_PENDING)
LAST_ID = tl.constexpr(layout.LAST_ID)
ROW_COMPUTED = tl.constexpr(layout.ROW_COMPUTED)
ROW_TOKENS = tl.constexpr(layout.ROW_TOKENS)
ROW_OUTPUTS = tl.constexpr(layout.ROW_OUTPUTS)
ROW_SAMPLES = tl.constexpr(layout.ROW_SAMPLES)
ROW_DRAFTS = tl.constexpr(layout.ROW_DRAFTS)
ROW_MISSED = tl.constexpr(layout.ROW_MISSED)
ROW_COLUMNS = tl.constexpr(layout.ROW_COLUMNS)
RECORD_DELIVERED = tl.constexpr(layout.RECORD_DELIVERED)
RECORD_VERDICT = tl.constexpr(layout.RECORD_VERDICT)
RECORD_CACHED = tl.constexpr(layout.RECORD_CACHED)
FIELD = tl.constexpr(0xFFFF)
"""Mask of one of the counts that are summed together: each has 16 bits."""


@triton.jit
def count_waiting(s, d):
    """Return the number of waiting requests."""
    lane = tl.arange(0, d.lanes)
    waits = lane * 0
    at = 0
    while at < d.slots:
        waits += (tl.load(s.key + at + lane) < FAR).to(tl.int32)
        at += d.lanes
    return tl.sum(waits, 0)


@triton.jit
def count_plain_steps(s, slot, live, place, d):
    """Return the number of plain steps possible after the plan at `place`; 0 if it is not plain.

    Only lengths are considered. A step is not plain if a token ends its request by a length, or if
    the next plan has no row for a request that its placeholders will end.
    """
    row = tl.arange(0, d.rows)
    first = place * ROW_COLUMNS * d.rows + row
    known = tl.load(s.known + slot, mask=live, other=0)
    computed = tl.load(s.computed + slot, mask=live, other=0)
    promised = tl.load(s.promised + slot, mask=live, other=0)
    last = tl.load(s.end_by_max_tokens + slot, mask=live, other=0)
    held = tl.load(s.held + slot, mask=live, other=0)
    special = tl.load(s.repeats_count + slot, mask=live, other=0)
    special += tl.load(s.num_drafts + slot, mask=live, other=0)
    special += tl.load(s.plans + first + ROW_DRAFTS * d.rows, mask=live, other=0)
    special += tl.load(s.plans + first + ROW_MISSED * d.rows, mask=live, other=0)
    tokens = tl.load(s.plans + first + ROW_TOKENS * d.rows, mask=live, other=1)
    samples = tl.load(s.plans + first + ROW_SAMPLES * d.rows, mask=live, other=1)
    is_plain = (special == 0) & (tokens == 1) & (samples == 1)
    is_plain = is_plain & (held == (computed + d.size - 1) // d.size)
    left = tl.minimum(last, d.max_model_len) - known - 1
    left = tl.minimum(left, d.max_model_len - computed - 1)
    skipped = last - computed + promised - 3
    left = tl.where(promised > 1, tl.minimum(left, skipped), left)
    return tl.min(tl.where(live, tl.where(is_plain, left, 0), d.max_model_len), 0)


@triton.jit
def note_plan(s, place, d):
    """Write what `step_steadily` must know of the plan at `place`, which was just made.

    There is a barrier between what this loads and what it stores.
    """
    count = tl.load(s.num_running)
    num_rows = tl.load(s.num_rows)
    before = tl.load(s.steady + STEADY_PLANS)
    rows_before = tl.load(s.steady + STEADY_ROWS)
    may = (num_rows > 0) & (num_rows == count) & (tl.load(s.num_continued) == num_rows)
    may = may & (tl.load(s.num_preempted) == 0) & (d.num_lookahead == 0)
    may = may & (d.groups == 1) & (d.has_windows == 0)
    plans = 0
    left = 0
    most_stops = 0
    num_waiting = 0
    if may:
        row = tl.arange(0, d.rows)
        live = row < count
        slot = tl.load(s.run + row, mask=live, other=0)
        left = count_plain_steps(s, slot, live, place, d)
        if left > 0:
            most_stops = tl.max(tl.load(s.num_stops + slot, mask=live, other=0), 0)
            num_waiting = count_waiting(s, d)
            # All its rows continue rows of the plan before; so the same number means the same rows.
            plans = tl.where(num_rows == rows_before, tl.minimum(before + 1, d.frames), 1)
    tl.debug_barrier()
    tl.store(s.steady + STEADY_PLANS, plans)
    tl.store(s.steady + STEADY_ROWS, num_rows)
    tl.store(s.steady + STEPS_LEFT, left)
    tl.store(s.steady + HAS_WAITING, num_waiting)
    tl.store(s.steady + MOST_STOPS, most_stops)


@triton.jit(noinline=True)
def publish_pending(s, num_pending, is_all, d):
    """Find nodes for, and publish, the filled blocks in `pending`: all, or whole chunks only.

    A request has at most one of them, the last that its known tokens fill: `catch_up` runs at the
    latest after as many steps as a block has tokens.
    """
    at = 0
    while (at + d.chunk <= num_pending) | ((is_all > 0) & (at < num_pending)):
        lane = at + tl.arange(0, d.chunk)
        live = lane < num_pending
        slot = tl.load(s.pending + lane, mask=live, other=0)
        index = tl.load(s.known + slot, mask=live, other=d.size) // d.size - 1
        node = name_blocks(s, slot, index, live, d)
        block = tl.load(s.tables + slot * d.table + index, mask=live, other=0)
        link_listed(s, block, node, live, d)
        tl.store(s.published + slot, index + 1, mask=live)
        at += d.chunk
    lane = tl.arange(0, d.chunk)
    remains = at + lane < num_pending
    slot = tl.load(s.pending + at + lane, mask=remains, other=0)
    tl.debug_barrier()
    tl.store(s.pending + lane, slot, mask=remains)
    tl.store(s.steady + NUM_PENDING, tl.maximum(num_pending - at, 0))


@triton.jit(noinline=True)
def catch_up(s, d):
    """Write what steps on the fast path have postponed; the last of them planned `LAST_ID`."""
    steps = tl.load(s.steady + STEPS_BEHIND)
    if steps > 0:
        row = tl.arange(0, d.rows)
        live = row < tl.load(s.num_running)
        slot = tl.load(s.run + row, mask=live, other=0)
        computed = tl.load(s.seq_lens + row, mask=live, other=0)
        tl.store(s.computed + slot, computed, mask=live)
        tl.store(s.last_frame + slot, tl.load(s.steady + LAST_ID), mask=live)
        publish_pending(s, tl.load(s.steady + NUM_PENDING), 1, d)
        tl.store(s.steady + STEPS_BEHIND, 0)


@triton.jit
def is_stop(s, slot, token, live, most_stops, d):
    """Return [rows] int32: 1 if the token ends its request unless `min_tokens` forbids it."""
    eos = tl.load(s.eos + slot, mask=live, other=NONE)
    ends = (live & (eos == token)).to(tl.int32)
    if most_stops > 0:
        num_stops = tl.load(s.num_stops + slot, mask=live, other=0)
        index = 0
        while index < most_stops:
            has_stop = live & (index < num_stops)
            stop = tl.load(s.stops + slot * d.stops + index, mask=has_stop, other=NONE)
            ends = tl.where(has_stop & (stop == token), 1, ends)
            index += 1
    return ends


@triton.jit
def withdraw_taken(s, block, node, d):
    """Remove the blocks [rows] from the prefix cache; `node` [rows]: NONE if not cached."""
    row = tl.arange(0, d.rows)
    has_node = node >= 0
    before = tl.load(s.previous_same + block, mask=has_node, other=NONE)
    after = tl.load(s.next_same + block, mask=has_node, other=NONE)
    is_alone = has_node & (before < 0) & (after < 0)
    tl.store(s.first_block + node, NONE, mask=is_alone)
    tl.store(s.last_block + node, NONE, mask=is_alone)
    tl.store(s.node + block, NONE, mask=is_alone)
    others = has_node & ((before >= 0) | (after >= 0))
    left = tl.sum(others.to(tl.int32), 0)
    while left > 0:
        first = tl.min(tl.where(others, row, d.rows), 0)
        withdraw(s, tl.sum(tl.where(row == first, block, 0), 0))
        others = others & (row > first)
        left -= 1


@triton.jit
def write_record(s, slot, live, num_rows, d):
    """Write the record of a commit in which every row delivers a token and no request finishes."""
    row = tl.arange(0, d.rows)
    cached = tl.load(s.cached + slot, mask=live, other=0)
    tl.store(s.record + RECORD_DELIVERED * d.rows + row, tl.where(live, 1, NONE))
    tl.store(s.record + RECORD_VERDICT * d.rows + row, row * 0)
    tl.store(s.record + RECORD_CACHED * d.rows + row, cached)
    tl.store(s.num_record_rows, num_rows)


@triton.jit
def write_rows(s, slot, token, computed, outputs, kv_slot, needs, block, place, live, d):
    """Store the tokens committed, and the frame and the inputs of the plan; all of [rows].

    `computed` is that of the frame. What it does not store has not changed (`ROW_SLOT`,
    `query_start_loc`, `num_rows`, ...), or is left to `catch_up`.
    """
    row = tl.arange(0, d.rows)
    known = computed - d.frames + 2
    held = computed // d.size + 1
    first = place * ROW_COLUMNS * d.rows + row
    takes = needs > 0
    tl.store(s.tokens + slot * d.tokens + (known - 1), token, mask=live)
    tl.store(s.known + slot, known, mask=live)
    tl.store(s.plans + first + ROW_COMPUTED * d.rows, computed, mask=live)
    tl.store(s.plans + first + ROW_OUTPUTS * d.rows, outputs + d.frames, mask=live)
    tl.store(s.plan_blocks + place * 2 * d.rows + row, held - needs, mask=live)
    tl.store(s.plan_blocks + (place * 2 + 1) * d.rows + row, held, mask=live)
    tl.store(s.seq_lens + row, computed + 1, mask=live)
    tl.store(s.positions + row, computed.to(tl.int64), mask=live)
    written_to = tl.where(takes, block.to(tl.int64) * d.size, kv_slot + 1)
    tl.store(s.slot_mapping + row, written_to, mask=live)
    tl.store(s.tables + slot * d.table + (held - 1), block, mask=takes)
    tl.store(s.held + slot, held, mask=takes)
    tl.store(s.ref_count + block, 1, mask=takes)


@triton.jit
def write_numbers(s, place, frame_id, head, num_taken, num_pending, steps_left, d):
    """Store the numbers that a step changes; it took `num_taken` free blocks."""
    following = (place + 1) % d.frames
    tl.store(s.head, (head & (d.ring - 1)) + num_taken)
    tl.store(s.plan_ids + place, frame_id)
    tl.store(s.control + PLACE, following)
    tl.store(s.control + COMMIT_PLACE, following)
    tl.store(s.control + PREVIOUS_ID, frame_id)
    tl.store(s.control + FRAME_ID, frame_id + 1)
    tl.store(s.steady + STEPS_LEFT, steps_left - 1)
    tl.store(s.steady + NUM_PENDING, num_pending)
    tl.store(s.steady + LAST_ID, frame_id)


@triton.jit
def may_be_steady(s, count, plans, budget, d):
    """Whether only a sampled token can keep the next step of `count` requests from being plain."""
    may = (plans >= d.frames) & (tl.load(s.in_flight) == d.frames) & (budget >= count)
    may = may & (tl.load(s.command_at) == tl.load(s.command_end))
    is_closed = (tl.load(s.control + ADMITS) == 0) | (count >= d.max_num_seqs) | (budget == count)
    return may & (is_closed | (tl.load(s.steady + HAS_WAITING) == 0))


@triton.jit
def step_steadily(s, d):
    """Commit the oldest frame and plan the next one, if both are plain and there is nothing else.

    Returns 1; or 0, and then nothing was changed.

    Before the step, with `frames` plans in flight, each request has

        known tokens | a placeholder of each plan but the oldest | the oldest plan's token
        <-------------------- computed, after the last plan ------------------>
    """
    row = tl.arange(0, d.rows)
    count = tl.load(s.num_running)
    live = row < count
    plans = tl.load(s.steady + STEADY_PLANS)
    steps_left = tl.load(s.steady + STEPS_LEFT)
    most_stops = tl.load(s.steady + MOST_STOPS)
    steps_behind = tl.load(s.steady + STEPS_BEHIND) + 1
    num_pending = tl.load(s.steady + NUM_PENDING)
    budget = tl.load(s.control + BUDGET)
    place = tl.load(s.control + COMMIT_PLACE)
    frame_id = tl.load(s.control + FRAME_ID)
    head = tl.load(s.head)
    tail = tl.load(s.tail)
    free = tl.load(s.num_free)
    # All rows are loaded, so that these loads do not wait for those above.
    slot = tl.load(s.run + row)
    computed = tl.load(s.seq_lens + row)
    kv_slot = tl.load(s.slot_mapping + row, mask=row < d.batch, other=0)
    done = 0
    if (steps_left > 0) & may_be_steady(s, count, plans, budget, d):
        at_outputs = place * ROW_COLUMNS * d.rows + ROW_OUTPUTS * d.rows + row
        outputs = tl.load(s.plans + at_outputs, mask=live, other=0)
        needs = (live & (computed % d.size == 0)).to(tl.int32)
        fills = live & ((computed - d.frames + 2) % d.size == 0) & (d.has_cache > 0)
        counted = needs + (fills.to(tl.int32) << 16)
        rank = tl.cumsum(counted, 0) - counted
        taken = (head + (rank & FIELD)) & (d.ring - 1)
        block = tl.load(s.ring + taken, mask=needs > 0, other=0)
        node = tl.load(s.node + block, mask=block > 0, other=NONE)
        answer = (place * d.rows + row) * (d.drafts + 1)
        token = tl.load(s.answer_tokens + answer, mask=live, other=NONE)
        # A hole in the free queue is left to the slow path.
        stays = is_stop(s, slot, token, live, most_stops, d) + (block < 0).to(tl.int32)
        total = counted.to(tl.int64) + (stays.to(tl.int64) << 32)
        total = tl.sum(total + ((node >= 0).to(tl.int64) << 48), 0)
        num_taken = (total & FIELD).to(tl.int32)
        if (((total >> 32) & FIELD) == 0) & (num_taken <= free):
            tl.debug_barrier()
            write_rows(s, slot, token, computed, outputs, kv_slot, needs, block, place, live, d)
            tl.store(s.pending + num_pending + (rank >> 16), slot, mask=fills)
            num_pending += ((total >> 16) & FIELD).to(tl.int32)
            write_numbers(s, place, frame_id, head, num_taken, num_pending, steps_left, d)
            tl.store(s.tail, tail - (head - (head & (d.ring - 1))))
            tl.store(s.num_free, free - num_taken)
            tl.store(s.steady + STEPS_BEHIND, steps_behind)
            if (total >> 48) > 0:
                withdraw_taken(s, block, node, d)
            if plans == d.frames:
                write_record(s, slot, live, count, d)
                tl.store(s.steady + STEADY_PLANS, plans + 1)
            if (steps_behind >= d.size) | (num_pending >= d.chunk):
                tl.debug_barrier()
                if steps_behind >= d.size:
                    catch_up(s, d)
                else:
                    publish_pending(s, num_pending, 0, d)
            done = 1
    return done
