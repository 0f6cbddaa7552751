"""Step: the kernels that the host launches, each as one program, and the end of a plan."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.commands import take_commands
from blockstep.impl.device.groups import add_doubt, write_plan_blocks
from blockstep.impl.device.inputs import write_inputs
from blockstep.impl.device.node_gc import sweep
from blockstep.impl.device.results import commit
from blockstep.impl.device.running import schedule_running
from blockstep.impl.device.steady import catch_up, note_plan, step_steadily
from blockstep.impl.device.waiting import schedule_waiting

FRAME_ID = tl.constexpr(layout.FRAME_ID)
PREVIOUS_ID = tl.constexpr(layout.PREVIOUS_ID)
PLACE = tl.constexpr(layout.PLACE)
BUDGET = tl.constexpr(layout.BUDGET)
OLDEST_ID = tl.constexpr(layout.OLDEST_ID)
COMMIT_PLACE = tl.constexpr(layout.COMMIT_PLACE)
ADMITS = tl.constexpr(layout.ADMITS)
ROW_SLOT = tl.constexpr(layout.ROW_SLOT)
ROW_BIRTH = tl.constexpr(layout.ROW_BIRTH)
ROW_COMPUTED = tl.constexpr(layout.ROW_COMPUTED)
ROW_TOKENS = tl.constexpr(layout.ROW_TOKENS)
ROW_OUTPUTS = tl.constexpr(layout.ROW_OUTPUTS)
ROW_SAMPLES = tl.constexpr(layout.ROW_SAMPLES)
ROW_DRAFTS = tl.constexpr(layout.ROW_DRAFTS)
ROW_MISSED = tl.constexpr(layout.ROW_MISSED)
ROW_COLUMNS = tl.constexpr(layout.ROW_COLUMNS)


@triton.jit
def count_rows(s, d):
    """Return the number of running requests that have tokens in the step."""
    position = tl.arange(0, d.rows)
    live = position < tl.load(s.num_running)
    slot = tl.load(s.run + position, mask=live, other=0)
    tokens = tl.load(s.step_tokens + slot, mask=live, other=0)
    return tl.sum((tokens > 0).to(tl.int32), 0)


@triton.jit
def issue(s, num_continued, d):
    """Write the frame (P26), and count scheduled tokens as computed; rows are in running order.

    A row that samples under asynchronous scheduling adds placeholders (P12). A running request
    without a row has no drafts in the next plan (ours, P24): its placeholder drafts are what the
    worker proposed after the previous plan, and the worker proposes nothing for a request that it
    does not run (upstream #46899).
    """
    position = tl.arange(0, d.rows)
    runs = position < tl.load(s.num_running)
    slot = tl.load(s.run + position, mask=runs, other=0)
    tokens = tl.load(s.step_tokens + slot, mask=runs, other=0)
    live = runs & (tokens > 0)
    row = tl.cumsum(live.to(tl.int32), 0) - live.to(tl.int32)
    frame_id = tl.load(s.control + FRAME_ID)
    computed = tl.load(s.computed + slot, mask=live, other=0)
    promised = tl.load(s.promised + slot, mask=live, other=0)
    known = tl.load(s.known + slot, mask=live, other=0) + promised
    drafts = tl.load(s.step_drafts + slot, mask=live, other=0)
    last = tl.load(s.last_frame + slot, mask=live, other=0)
    samples = (computed + tokens >= known).to(tl.int32)
    missed = (row < num_continued) & (last != tl.load(s.control + PREVIOUS_ID))
    outputs = known - tl.load(s.prompt + slot, mask=live, other=0)
    birth = tl.load(s.birth + slot, mask=live, other=0)
    tl.debug_barrier()
    frame = tl.load(s.control + PLACE)
    at = frame * ROW_COLUMNS * d.rows + row
    tl.store(s.plans + at + ROW_SLOT * d.rows, slot, mask=live)
    tl.store(s.plans + at + ROW_BIRTH * d.rows, birth, mask=live)
    tl.store(s.plans + at + ROW_COMPUTED * d.rows, computed, mask=live)
    tl.store(s.plans + at + ROW_TOKENS * d.rows, tokens, mask=live)
    tl.store(s.plans + at + ROW_OUTPUTS * d.rows, outputs, mask=live)
    tl.store(s.plans + at + ROW_SAMPLES * d.rows, samples, mask=live)
    tl.store(s.plans + at + ROW_DRAFTS * d.rows, drafts, mask=live)
    tl.store(s.plans + at + ROW_MISSED * d.rows, missed.to(tl.int32), mask=live)
    tl.store(s.computed + slot, computed + tokens, mask=live)
    tl.store(s.is_prefill + slot, 1 - samples, mask=live)
    tl.store(s.last_frame + slot, frame_id, mask=live)
    tl.store(s.step_tokens + slot, 0, mask=live)
    write_plan_blocks(s, slot, row, frame, live, d)
    if d.is_async:
        if d.has_windows:
            add_doubt(s, slot, drafts, live)
        tl.store(s.promised + slot, promised + 1 + drafts, mask=live & (samples > 0))
        tl.store(s.num_drafts + slot, d.num_placeholders, mask=live & (samples > 0))
        if d.num_placeholders > 0:
            tl.store(s.num_drafts + slot, 0, mask=runs & (tokens == 0))
    num_rows = tl.sum(live.to(tl.int32), 0)
    tl.store(s.num_rows, num_rows)
    tl.store(s.num_continued, num_continued)
    tl.store(s.plan_rows + frame, num_rows)
    tl.debug_barrier()


@triton.jit
def settle_ring(s, d):
    """Reduce the ever-growing places of the ring, and reset the number of preemptions."""
    head = tl.load(s.head)
    tail = tl.load(s.tail)
    tl.debug_barrier()
    shift = head - (head & (d.ring - 1))
    tl.store(s.head, head - shift)
    tl.store(s.tail, tail - shift)
    tl.store(s.num_preempted, 0)
    tl.debug_barrier()


@triton.jit
def plan(s, d):
    """Plan one step. No request is admitted after a preemption."""
    settle_ring(s, d)
    budget = schedule_running(s, tl.load(s.control + BUDGET), d)
    num_continued = count_rows(s, d)
    if (tl.load(s.control + ADMITS) > 0) & (tl.load(s.num_preempted) == 0):
        schedule_waiting(s, budget, d)
    issue(s, num_continued, d)
    write_inputs(s, d)


@triton.jit
def commit_oldest(s, has_no_next, d):
    """Commit the oldest frame in flight, if it is due.

    It is due if no more frames may be in flight, if the last plan was empty, or if there is no next
    plan (`has_no_next`).
    """
    count = tl.load(s.in_flight)
    is_last = (tl.load(s.num_rows) == 0) | (has_no_next > 0)
    is_due = (count == d.frames) | ((count > 0) & is_last)
    if is_due:
        commit(s, d)
        place = tl.load(s.control + COMMIT_PLACE)
        tl.debug_barrier()
        tl.store(s.control + COMMIT_PLACE, (place + 1) % d.frames)
        tl.store(s.in_flight, count - 1)


@triton.jit
def plan_next(s, d):
    """Plan the next frame, in the next place; an empty one has an id and no place."""
    frame_id = tl.load(s.control + FRAME_ID)
    place = tl.load(s.control + PLACE)
    count = tl.load(s.in_flight)
    oldest = tl.load(s.plan_ids + tl.load(s.control + COMMIT_PLACE))
    tl.store(s.control + OLDEST_ID, tl.where(count > 0, oldest, frame_id))
    plan(s, d)
    has_rows = (tl.load(s.num_rows) > 0).to(tl.int32)
    note_plan(s, place, d)
    tl.store(s.plan_ids + place, frame_id, mask=has_rows > 0)
    tl.store(s.control + PLACE, (place + has_rows) % d.frames)
    tl.store(s.control + PREVIOUS_ID, frame_id)
    tl.store(s.control + FRAME_ID, frame_id + 1)
    tl.store(s.in_flight, count + has_rows)


@triton.jit
def loop_kernel(s, d):
    """One program: a whole step of a loop without a host, which a graph can replay.

    It commits what the sampler has written to `answer_tokens`, executes commands of the host, and
    plans. The host wrote the budget once, and NONE as the id of the plan before the first.

    Steps on the fast path postpone some of the state, so the host reads it after a launch of any
    other kernel.
    """
    if step_steadily(s, d) == 0:
        catch_up(s, d)
        commit_oldest(s, 0, d)
        take_commands(s, d)
        plan_next(s, d)


@triton.jit
def settle_kernel(s, d):
    """One program: commit the oldest frame in flight, if there is one, and execute commands.

    It plans nothing. Launched for each frame after the last plan of a loop without a host, and
    before the first if the host must know the state.
    """
    catch_up(s, d)
    commit_oldest(s, 1, d)
    take_commands(s, d)


@triton.jit
def commands_kernel(s, d):
    """One program: execute the host's commands."""
    catch_up(s, d)
    take_commands(s, d)


@triton.jit
def plan_kernel(s, d):
    """One program: execute the host's commands, and plan."""
    catch_up(s, d)
    take_commands(s, d)
    plan(s, d)


@triton.jit
def commit_kernel(s, d):
    """One program: commit a frame."""
    catch_up(s, d)
    commit(s, d)


@triton.jit
def step_kernel(s, d):
    """One program: commit a frame, execute the host's commands, and plan."""
    catch_up(s, d)
    commit(s, d)
    take_commands(s, d)
    plan(s, d)


@triton.jit
def sweep_kernel(s, d):
    """One program, between two steps: free the nodes that are no longer needed."""
    sweep(s, d)
