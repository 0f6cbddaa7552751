"""The Triton kernels of a step on the device, besides the scheduler's and the model's.

With `DEPENDENT` a kernel may start before the one in front of it has ended; it waits for that one
before it reads or writes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from blockstep.impl.device import layout
from blockstep.impl.engine import journal, padded
from blockstep.impl.engine import slots as parameters
from blockstep.impl.engine.adapters import NO_ADAPTER
from blockstep.kernels.dispatch import list_launch_options, on_device_of_first

if TYPE_CHECKING:
    from blockstep.impl.engine.bursts import BurstMemory
    from blockstep.impl.engine.padded import Padded

SIZE = 128
"""Elements that a program of a row handles at once."""
END_SIZE = 1024
"""Elements that the program of a burst's end handles at once."""
NONE = tl.constexpr(NO_ADAPTER)
OF_ADAPTER = tl.constexpr(parameters.ADAPTER)
OF_SEED = tl.constexpr(parameters.SEED)
OF_TOP_K = tl.constexpr(parameters.TOP_K)
FAR = tl.constexpr(layout.FAR)
FRAME_ID = tl.constexpr(layout.FRAME_ID)
FIRST_ID = tl.constexpr(layout.FIRST_ID)
PLACE = tl.constexpr(layout.PLACE)
ROW_SLOT = tl.constexpr(layout.ROW_SLOT)
ROW_TOKENS = tl.constexpr(layout.ROW_TOKENS)
ROW_OUTPUTS = tl.constexpr(layout.ROW_OUTPUTS)
ROW_SAMPLES = tl.constexpr(layout.ROW_SAMPLES)
ROW_COLUMNS = tl.constexpr(layout.ROW_COLUMNS)
NUM_RECORD_COLUMNS = tl.constexpr(layout.NUM_RECORD_COLUMNS)
COLUMNS = tl.constexpr(journal.COLUMNS)
TOKEN_COLUMN = tl.constexpr(journal.TOKEN_COLUMN)
RECORD_COLUMN = tl.constexpr(journal.RECORD_COLUMN)
TOKEN = tl.constexpr(padded.TOKEN)
FED = tl.constexpr(padded.FED)
POSITION = tl.constexpr(padded.POSITION)
ADAPTER = tl.constexpr(padded.ADAPTER)
SLOT = tl.constexpr(padded.SLOT)
INDEX = tl.constexpr(padded.INDEX)
ROW = tl.constexpr(padded.ROW)
FEED = tl.constexpr(padded.FEED)
LINE = tl.constexpr(padded.LINE)
SEED = tl.constexpr(padded.SEED)
SLOT_MAPPING = tl.constexpr(padded.SLOT_MAPPING)
KNOWN = tl.constexpr(padded.KNOWN)
ELSEWHERE = tl.constexpr(padded.ELSEWHERE)
UNALIGNED = ["lines", "ints", "floats", "next_ints", "next_floats", "out"]
"""Parts of one memory, aligned or not: a step of another width needs no other kernel."""


@triton.jit
def find_row(plans, plan_rows, place, slot, rows, SIZE: tl.constexpr):
    """Return the row of the plan at `place` that samples for the request at `slot`."""
    first = place * ROW_COLUMNS * rows
    count = tl.load(plan_rows + place)
    found = tl.full((SIZE,), ELSEWHERE, tl.int32)
    for start in range(0, count, SIZE):
        lane = start + tl.arange(0, SIZE)
        mask = lane < count
        of = tl.load(plans + first + ROW_SLOT * rows + lane, mask=mask, other=-1)
        samples = tl.load(plans + first + ROW_SAMPLES * rows + lane, mask=mask, other=0)
        found = tl.where((of == slot) & (samples > 0), lane, found)
    return tl.max(found, 0)


@triton.jit
def copy_tables(
    to, tables, row, slot, to_group, table_group, table, length, live, groups, block_size,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Copy the blocks of `length` tokens of a request in each KV group; null blocks if not live."""
    num_blocks = tl.minimum((length + block_size - 1) // block_size, table)
    for group in range(groups):
        first = (tl.cast(group, tl.int64) * table_group + slot) * table
        first_to = (tl.cast(group, tl.int64) * to_group + row) * table
        for start in range(0, num_blocks, SIZE):
            index = start + tl.arange(0, SIZE)
            mask = index < num_blocks
            block = tl.load(tables + first + index, mask=mask & live, other=0)
            tl.store(to + first_to + index, block, mask=mask)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=UNALIGNED)
def rows_kernel(
    numbers, to_tables, ints, floats, lines, answer_counts,
    control, num_rows, plans, plan_rows, record, tokens, known, positions, slot_mapping, tables,
    seq_lens, floats_of, ints_of,
    width, rows, slots, table, longest, batch, frames, groups, block_size,
    SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row): write a row of the plan just made, or padding, and its column of the line."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    count = tl.load(num_rows)
    live = row < count
    place = (tl.load(control + PLACE) + frames - (count > 0).to(tl.int32)) % frames
    line = tl.load(control + FRAME_ID) - 1 - tl.load(control + FIRST_ID)
    position = tl.load(positions + row, mask=live, other=0)
    length = tl.load(seq_lens + row, mask=live, other=1)
    plan = plans + place * ROW_COLUMNS * rows + row
    slot = tl.load(plan + ROW_SLOT * rows, mask=live, other=0)
    num_tokens = tl.load(plan + ROW_TOKENS * rows, mask=live, other=0)
    outputs = tl.load(plan + ROW_OUTPUTS * rows, mask=live, other=0)
    samples = tl.load(plan + ROW_SAMPLES * rows, mask=live, other=0)
    # the journal, and the model output
    at = lines + line * COLUMNS * width + row
    tl.store(at, slot)
    tl.store(at + width, num_tokens)
    tl.store(at + 2 * width, samples)
    for column in tl.static_range(NUM_RECORD_COLUMNS):
        value = tl.load(record + column * rows + row)
        tl.store(at + (RECORD_COLUMN + column) * width, value)
    answer = place * rows + row
    tl.store(answer_counts + answer, samples)
    # the token
    is_known = position < tl.load(known + slot, mask=live, other=1)
    token = tl.load(tokens + slot.to(tl.int64) * longest + position, mask=live & is_known, other=0)
    fed = tl.full((), KNOWN, tl.int32)
    if live & (is_known == 0):
        fed = find_row(plans, plan_rows, (place + frames - 1) % frames, slot, rows, SIZE)
    # the numbers
    to = numbers + row
    tl.store(to + TOKEN * width, token.to(tl.int64))
    tl.store(to + FED * width, fed.to(tl.int64))
    tl.store(to + POSITION * width, position)
    tl.store(
        to + ADAPTER * width, tl.load(ints_of + OF_ADAPTER * slots + slot, mask=live, other=NONE)
    )
    tl.store(to + SLOT * width, slot.to(tl.int64))
    tl.store(to + INDEX * width, outputs.to(tl.int64))
    tl.store(to + ROW * width, answer.to(tl.int64))
    tl.store(to + FEED * width, tl.where(samples > 0, slot, slots).to(tl.int64))
    tl.store(to + LINE * width, line.to(tl.int64))
    tl.store(to + SEED * width, tl.load(ints_of + OF_SEED * slots + slot, mask=live, other=0))
    for group in range(groups):
        kv_slot = tl.load(slot_mapping + group * batch + row, mask=live, other=-1)
        tl.store(to + (SLOT_MAPPING + group) * width, kv_slot)
    top_k = tl.load(ints_of + OF_TOP_K * slots + slot, mask=live, other=0)
    tl.store(ints + row, length)
    tl.store(ints + width + row, top_k.to(tl.int32))
    for parameter in tl.static_range(3):  # temperature, top-p, min-p
        value = tl.load(floats_of + parameter * slots + slot, mask=live, other=0.0)
        tl.store(floats + parameter * width + row, value)
    copy_tables(
        to_tables, tables, row, slot, width, slots, table, length, live, groups, block_size, SIZE
    )


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=UNALIGNED)
def tokens_kernel(
    chosen, numbers, to_tables, ints, floats, next_numbers, next_tables, next_ints, next_floats,
    answer_tokens, sampled, lines,
    width, slots, table, drafts, groups, block_size,
    HAS_NEXT: tl.constexpr, NUMBERS: tl.constexpr, SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row): write the token that it sampled; copy the following plan's row into its place.

    Tokens of the following plan that no program of this launch writes are read from `sampled`.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    token = tl.load(chosen + row)
    answer = tl.load(numbers + ROW * width + row)
    feed = tl.load(numbers + FEED * width + row)
    line = tl.load(numbers + LINE * width + row)
    tl.store(answer_tokens + answer * (drafts + 1), token.to(tl.int32))
    tl.store(sampled + feed, token, mask=feed < slots)
    tl.store(lines + (line * COLUMNS + TOKEN_COLUMN) * width + row, token.to(tl.int32))
    if HAS_NEXT:
        number = tl.arange(0, NUMBERS)
        mask = number < SLOT_MAPPING + groups
        values = tl.load(next_numbers + number * width + row, mask=mask, other=0)
        fed = tl.load(next_numbers + FED * width + row)
        slot = tl.load(next_numbers + SLOT * width + row)
        last = tl.load(chosen + fed, mask=fed >= 0, other=0)
        last += tl.load(sampled + slot, mask=fed == ELSEWHERE, other=0)
        is_token = (number == TOKEN) & (fed != KNOWN)
        values = tl.where(is_token, tl.maximum(last, 0), values)
        length = tl.load(next_ints + row)
        top_k = tl.load(next_ints + width + row)
        tl.debug_barrier()  # this row's numbers were read
        tl.store(numbers + number * width + row, values, mask=mask)
        tl.store(ints + row, length)
        tl.store(ints + width + row, top_k)
        for parameter in tl.static_range(3):
            value = tl.load(next_floats + parameter * width + row)
            tl.store(floats + parameter * width + row, value)
        copy_tables(
            to_tables, next_tables, row, row, width, width, table, length, row >= 0, groups,
            block_size, SIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width", "number"], do_not_specialize_on_alignment=UNALIGNED)
def end_kernel(
    out, lines, record, control, num_rows, query_start_loc, key, run, is_prefill, known,
    end_by_max_tokens, num_running, num_free, num_free_nodes, num_preempted,
    width, rows, slots, max_model_len, number,
    HAS_LINE: tl.constexpr, IS_LAST: tl.constexpr, SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: write the record of a commit, or the numbers of a `Summary`, or both."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HAS_LINE:
        line = tl.load(control + FRAME_ID) - tl.load(control + FIRST_ID) + number
        at = lines + (line * COLUMNS + RECORD_COLUMN) * width
        for start in range(0, width, SIZE):
            row = start + tl.arange(0, SIZE)
            for column in tl.static_range(NUM_RECORD_COLUMNS):
                value = tl.load(record + column * rows + row, mask=row < width, other=0)
                tl.store(at + column * width + row, value, mask=row < width)
    if IS_LAST:
        waiting = tl.zeros((SIZE,), tl.int32)
        for start in range(0, slots, SIZE):
            slot = start + tl.arange(0, SIZE)
            waiting += (tl.load(key + slot, mask=slot < slots, other=FAR) != FAR).to(tl.int32)
        count = tl.load(num_running)
        in_prefill = tl.zeros((SIZE,), tl.int32)
        left = tl.zeros((SIZE,), tl.int32)
        for start in range(0, count, SIZE):
            row = start + tl.arange(0, SIZE)
            live = row < count
            slot = tl.load(run + row, mask=live, other=0)
            in_prefill += (tl.load(is_prefill + slot, mask=live, other=0) > 0).to(tl.int32)
            end = tl.load(end_by_max_tokens + slot, mask=live, other=0)
            end = tl.minimum(end, max_model_len) - tl.load(known + slot, mask=live, other=0)
            left = tl.maximum(left, tl.where(live, end, 0))
        num_planned = tl.load(num_rows)
        tl.store(out, num_planned)
        tl.store(out + 1, tl.load(query_start_loc + num_planned))
        tl.store(out + 2, tl.sum(waiting, 0))
        tl.store(out + 3, tl.sum(in_prefill, 0))
        tl.store(out + 4, count)
        tl.store(out + 5, tl.load(num_free))
        tl.store(out + 6, tl.load(num_free_nodes))
        tl.store(out + 7, tl.load(num_preempted))
        tl.store(out + 8, tl.max(left, 0))


@on_device_of_first
def launch_write_rows(out: Tensor, memory: BurstMemory, rows: Padded) -> None:
    """Launch one program per row; `out` is the memory's."""
    s, d, params, width = memory.state, memory.dims, memory.params, rows.ints.shape[1]
    rows_kernel[(width,)](
        rows.numbers, rows.tables, rows.ints, rows.floats, memory.get_lines(width), s.answer_counts,
        s.control, s.num_rows, s.plans, s.plan_rows, s.record, s.tokens, s.known, s.positions,
        s.slot_mapping, s.tables, s.seq_lens, params.floats, params.ints,
        width, d.rows, d.slots, d.table, d.tokens, d.batch, d.frames, d.groups, d.size,
        SIZE=SIZE, num_warps=1, **list_launch_options(out.device),
    )  # fmt: skip


@on_device_of_first
def launch_take_tokens(
    tokens: Tensor, memory: BurstMemory, now: Padded, following: Padded | None, is_alone: bool
) -> None:
    """Launch one program per row; `is_alone`: see `BurstMemory.take_rows_tokens`."""
    s, d, width = memory.state, memory.dims, len(tokens)
    after = now if following is None else following
    options = list_launch_options(tokens.device) if is_alone else {"DEPENDENT": False}
    tokens_kernel[(width,)](
        tokens, now.numbers, now.tables, now.ints, now.floats, after.numbers, after.tables,
        after.ints, after.floats, s.answer_tokens, memory.sampled, memory.get_lines(width),
        width, d.slots, d.table, d.drafts, d.groups, d.size,
        HAS_NEXT=following is not None, NUMBERS=triton.next_power_of_2(len(now.numbers)),
        SIZE=SIZE, num_warps=1, **options,
    )  # fmt: skip


@on_device_of_first
def launch_note_end(
    out: Tensor, memory: BurstMemory, lines: Tensor | None, number: int, is_last: bool
) -> None:
    """Launch one program; `out` is the memory's. Without `lines` it writes the summary only."""
    s, d = memory.state, memory.dims
    end_kernel[(1,)](
        out, out if lines is None else lines, s.record, s.control, s.num_rows, s.query_start_loc,
        s.key, s.run, s.is_prefill, s.known, s.end_by_max_tokens, s.num_running, s.num_free,
        s.num_free_nodes, s.num_preempted,
        0 if lines is None else lines.shape[2], d.rows, d.slots, memory.max_model_len, number,
        HAS_LINE=lines is not None, IS_LAST=is_last, SIZE=END_SIZE, num_warps=4,
        **list_launch_options(out.device),
    )  # fmt: skip
