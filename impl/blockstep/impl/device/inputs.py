"""Inputs: positions and slots of a plan's tokens, as the forward pass reads them.

They are what `blockstep.kernels.prepare_step` writes in a launch of its own, in the order of the
rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout

ROW_SLOT = tl.constexpr(layout.ROW_SLOT)
ROW_COMPUTED = tl.constexpr(layout.ROW_COMPUTED)
ROW_TOKENS = tl.constexpr(layout.ROW_TOKENS)
ROW_COLUMNS = tl.constexpr(layout.ROW_COLUMNS)
PLACE = tl.constexpr(layout.PLACE)


@triton.jit
def write_tokens(s, slot, position, to, live, d):
    """Write positions and slots of tokens at `position` [n] of requests `slot` [n] to `to` [n]."""
    tl.store(s.positions + to, position.to(tl.int64), mask=live)
    group = 0
    while group < d.groups:
        table = (group * d.slots + slot) * d.table + position // d.size
        block = tl.load(s.tables + table, mask=live, other=0).to(tl.int64)
        at = group * d.batch + to
        tl.store(s.slot_mapping + at, block * d.size + position % d.size, mask=live)
        group += 1


@triton.jit
def write_inputs(s, d):
    """Write the inputs of the plan just made: rows of one token together, others one by one."""
    row = tl.arange(0, d.rows)
    num_rows = tl.load(s.num_rows)
    live = row < num_rows
    first = tl.load(s.control + PLACE) * ROW_COLUMNS * d.rows + row
    slot = tl.load(s.plans + first + ROW_SLOT * d.rows, mask=live, other=0)
    computed = tl.load(s.plans + first + ROW_COMPUTED * d.rows, mask=live, other=0)
    tokens = tl.load(s.plans + first + ROW_TOKENS * d.rows, mask=live, other=0)
    start = tl.cumsum(tokens, 0) - tokens
    tl.store(s.query_start_loc + row, start, mask=live)
    tl.store(s.query_start_loc + num_rows, tl.sum(tokens, 0))
    tl.store(s.seq_lens + row, computed + tokens, mask=live)
    write_tokens(s, slot, computed, start, live & (tokens == 1), d)
    longer = live & (tokens > 1)
    left = tl.sum(longer.to(tl.int32), 0)
    while left > 0:
        at = tl.min(tl.where(longer, row, d.rows), 0)
        one = tl.sum(tl.where(row == at, slot, 0), 0)
        position = tl.sum(tl.where(row == at, computed, 0), 0)
        to = tl.sum(tl.where(row == at, start, 0), 0)
        count = tl.sum(tl.where(row == at, tokens, 0), 0)
        done = 0
        while done < count:
            step = done + tl.arange(0, d.lanes)
            write_tokens(s, one, position + step, to + step, step < count, d)
            done += d.lanes
        longer = longer & (row > at)
        left -= 1
