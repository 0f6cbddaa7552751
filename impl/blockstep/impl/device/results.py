"""Results: the commit; it stores sampled tokens, checks stop conditions and records outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.groups import add_doubt
from blockstep.impl.device.prefix_cache import extend_listed, publish_listed
from blockstep.impl.device.queues import end

NONE = tl.constexpr(layout.NONE)
IS_RUNNING = tl.constexpr(layout.IS_RUNNING)
COMMIT_PLACE = tl.constexpr(layout.COMMIT_PLACE)
GOES_ON = tl.constexpr(layout.GOES_ON)
BY_EOS = tl.constexpr(layout.BY_EOS)
BY_STOP_TOKEN = tl.constexpr(layout.BY_STOP_TOKEN)
BY_LENGTH = tl.constexpr(layout.BY_LENGTH)
BY_REPETITION = tl.constexpr(layout.BY_REPETITION)
ROW_SLOT = tl.constexpr(layout.ROW_SLOT)
ROW_BIRTH = tl.constexpr(layout.ROW_BIRTH)
ROW_SAMPLES = tl.constexpr(layout.ROW_SAMPLES)
ROW_DRAFTS = tl.constexpr(layout.ROW_DRAFTS)
ROW_COLUMNS = tl.constexpr(layout.ROW_COLUMNS)
RECORD_DELIVERED = tl.constexpr(layout.RECORD_DELIVERED)
RECORD_VERDICT = tl.constexpr(layout.RECORD_VERDICT)
RECORD_CACHED = tl.constexpr(layout.RECORD_CACHED)


@triton.jit
def roll_back(s, slot, drafts, counts, live, d):
    """Remove the placeholders of all rows (P12) and uncompute the rejected drafts (P14).

    computed before | known | accepted | rejected |
                                       ^ computed now
    """
    promised = tl.load(s.promised + slot, mask=live, other=0)
    computed = tl.load(s.computed + slot, mask=live, other=0)
    runs = tl.load(s.status + slot, mask=live, other=0) == IS_RUNNING
    scheduled = tl.load(s.drafts_scheduled)
    accepted = tl.load(s.drafts_accepted)
    tl.debug_barrier()
    if d.is_async:
        tl.store(s.promised + slot, promised - 1 - drafts, mask=live)
        if d.has_windows:
            add_doubt(s, slot, 0 - drafts, live)
    # If it was preempted meanwhile, nothing is computed anyway.
    has_drafts = live & (drafts > 0)
    tl.store(s.computed + slot, computed - drafts + counts - 1, mask=has_drafts & runs)
    tl.store(s.drafts_scheduled, scheduled + tl.sum(tl.where(has_drafts, drafts, 0), 0))
    tl.store(s.drafts_accepted, accepted + tl.sum(tl.where(has_drafts, counts - 1, 0), 0))


@triton.jit
def judge(s, slot, token, known, live, d):
    """Return the finish reason, if any, after the token just stored, for all rows; repetition
    aside.

    Before `min_tokens` only the length limits count (ours; 0.19.1 masks them as well).
    """
    prompt = tl.load(s.prompt + slot, mask=live, other=0)
    has_min = live & (known - prompt >= tl.load(s.min_tokens + slot, mask=live, other=0))
    limit = tl.minimum(tl.load(s.end_by_max_tokens + slot, mask=live, other=0), d.max_model_len)
    verdict = tl.where(live & (known >= limit), BY_LENGTH, GOES_ON)
    num_stops = tl.load(s.num_stops + slot, mask=has_min, other=0)
    most = tl.max(num_stops, 0)
    index = 0
    while index < most:
        stop = tl.load(s.stops + slot * d.stops + index, mask=index < num_stops, other=NONE)
        verdict = tl.where(stop == token, BY_STOP_TOKEN, verdict)
        index += 1
    eos = tl.load(s.eos + slot, mask=has_min, other=NONE)
    return tl.where(has_min & (eos == token), BY_EOS, verdict)


@triton.jit
def repeats(s, slot, known, d):
    """Whether the outputs end with `repeats_count` copies of one pattern."""
    count = tl.load(s.repeats_count + slot)
    outputs = known - tl.load(s.prompt + slot)
    found = 0
    if (count > 0) & (outputs >= tl.load(s.min_tokens + slot)):
        pattern = tl.load(s.repeats_min + slot)
        longest = tl.minimum(tl.load(s.repeats_max + slot), outputs // count)
        while (pattern <= longest) & (found == 0):
            # Copies of a pattern: each token equals the one a pattern's length before it.
            length = pattern * (count - 1)
            differing = 0
            at = 0
            while at < length:
                back = at + tl.arange(0, d.lanes)
                last = slot * d.tokens + known - 1 - back
                here = tl.load(s.tokens + last, mask=back < length, other=0)
                before = tl.load(s.tokens + (last - pattern), mask=back < length, other=0)
                differing += tl.sum((here != before).to(tl.int32), 0)
                at += d.lanes
            found = tl.where(differing == 0, 1, 0)
            pattern += 1
    return found


@triton.jit
def judge_repetition(s, slot, known, goes_on, verdict, d):
    """Return the verdicts [rows], with repetition checked for the few requests that ask for it."""
    row = tl.arange(0, d.rows)
    asks = goes_on & (tl.load(s.repeats_count + slot, mask=goes_on, other=0) > 0)
    left = tl.sum(asks.to(tl.int32), 0)
    while left > 0:
        first = tl.min(tl.where(asks, row, d.rows), 0)
        is_first = row == first
        one = tl.sum(tl.where(is_first, slot, 0), 0)
        length = tl.sum(tl.where(is_first, known, 0), 0)
        ends = repeats(s, one, length, d)
        verdict = tl.where(is_first & (ends > 0), BY_REPETITION, verdict)
        asks = asks & (row > first)
        left -= 1
    return verdict


@triton.jit
def store_tokens(s, slot, answer, counts, live, d):
    """Store tokens up to the one that ends each request; return the counts [rows] and the verdicts.

    `answer` [rows] are the rows of `answer_tokens`.
    """
    known = tl.load(s.known + slot, mask=live, other=0)
    verdict = tl.full((d.rows,), 0, tl.int32)
    delivered = tl.full((d.rows,), 0, tl.int32)
    most = tl.max(tl.where(live, counts, 0), 0)
    index = 0
    while index < most:
        goes_on = live & (index < counts) & (verdict == GOES_ON)
        token = tl.load(s.answer_tokens + answer * (d.drafts + 1) + index, mask=goes_on, other=NONE)
        tl.store(s.tokens + slot * d.tokens + known, token, mask=goes_on)
        tl.debug_barrier()
        known += goes_on.to(tl.int32)
        delivered += goes_on.to(tl.int32)
        found = judge(s, slot, token, known, goes_on, d)
        found = judge_repetition(s, slot, known, goes_on & (found == GOES_ON), found, d)
        verdict = tl.where(goes_on, found, verdict)
        index += 1
    tl.store(s.known + slot, known, mask=live)
    tl.debug_barrier()
    return delivered, verdict


@triton.jit
def name_filled(s, slot, delivered, live, d):
    """Find or make nodes of the blocks that the tokens just stored have filled, row after row."""
    known = tl.load(s.known + slot, mask=live, other=0)
    filled = (known - delivered) // d.size
    fills = (live & (known // d.size > filled)).to(tl.int32)
    place = tl.cumsum(fills, 0) - fills
    tl.store(s.scratch + place, slot, mask=fills > 0)
    tl.store(s.step_first + slot, filled, mask=fills > 0)
    tl.debug_barrier()
    extend_listed(s, tl.sum(fills, 0), d)


@triton.jit
def publish_verified(s, slot, live, d):
    """Publish verified blocks: asynchronously, the plan could not, since tokens were unknown.

    The last token may not be computed yet (P4); a request preempted since has no blocks (P3).
    """
    runs = live & (tl.load(s.status + slot, mask=live, other=0) == IS_RUNNING)
    full = (tl.load(s.known + slot, mask=live, other=0) - 1) // d.size
    group = 0
    while group < d.groups:
        published = tl.load(s.published + group * d.slots + slot, mask=live, other=0)
        fills = (runs & (full > published)).to(tl.int32)
        place = tl.cumsum(fills, 0) - fills
        tl.debug_barrier()
        tl.store(s.scratch + place, slot, mask=fills > 0)
        tl.debug_barrier()
        publish_listed(s, tl.sum(fills, 0), group, 1, d)
        group += 1


@triton.jit
def end_rows(s, slot, verdict, d):
    """End the requests that have a finish reason, in the order of their rows."""
    row = tl.arange(0, d.rows)
    ends = verdict != GOES_ON
    left = tl.sum(ends.to(tl.int32), 0)
    while left > 0:
        first = tl.min(tl.where(ends, row, d.rows), 0)
        end(s, tl.sum(tl.where(row == first, slot, 0), 0), d)
        ends = ends & (row > first)
        left -= 1


@triton.jit
def commit(s, d):
    """Commit a frame with a model output that fits it."""
    row = tl.arange(0, d.rows)
    frame = tl.load(s.control + COMMIT_PLACE)
    num_rows = tl.load(s.plan_rows + frame)
    in_frame = row < num_rows
    first = frame * ROW_COLUMNS * d.rows + row
    slot = tl.load(s.plans + first + ROW_SLOT * d.rows, mask=in_frame, other=0)
    birth = tl.load(s.plans + first + ROW_BIRTH * d.rows, mask=in_frame, other=-1)
    samples = tl.load(s.plans + first + ROW_SAMPLES * d.rows, mask=in_frame, other=0)
    drafts = tl.load(s.plans + first + ROW_DRAFTS * d.rows, mask=in_frame, other=0)
    answer = frame * d.rows + row
    counts = tl.load(s.answer_counts + answer, mask=in_frame, other=0)
    # Other requests were aborted meanwhile, or are still in prefill.
    live = in_frame & (samples > 0) & (tl.load(s.birth + slot, mask=in_frame, other=0) == birth)
    roll_back(s, slot, drafts, counts, live, d)
    delivered, verdict = store_tokens(s, slot, answer, counts, live, d)
    cached = tl.load(s.cached + slot, mask=live, other=0)
    tl.store(s.record + RECORD_DELIVERED * d.rows + row, tl.where(live, delivered, NONE))
    tl.store(s.record + RECORD_VERDICT * d.rows + row, verdict)
    tl.store(s.record + RECORD_CACHED * d.rows + row, cached)
    tl.store(s.num_record_rows, num_rows)
    if d.has_cache:
        name_filled(s, slot, delivered, live, d)
        if d.is_async:
            publish_verified(s, slot, live, d)
    end_rows(s, slot, verdict, d)
