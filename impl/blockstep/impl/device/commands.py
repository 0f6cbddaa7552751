"""Commands: events that the host writes into a ring between two steps."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.prefix_cache import extend_path, withdraw_listed
from blockstep.impl.device.queues import append, end, preempt

NONE = tl.constexpr(layout.NONE)
IS_WAITING = tl.constexpr(layout.IS_WAITING)
AWAITS_GRAMMAR = tl.constexpr(layout.AWAITS_GRAMMAR)
IS_RUNNING = tl.constexpr(layout.IS_RUNNING)
SKIPPED = tl.constexpr(layout.SKIPPED)
WAITING = tl.constexpr(layout.WAITING)
SUBMIT = tl.constexpr(layout.SUBMIT)
ABORT = tl.constexpr(layout.ABORT)
GRAMMAR = tl.constexpr(layout.GRAMMAR)
DRAFT = tl.constexpr(layout.DRAFT)
RESET = tl.constexpr(layout.RESET)
COMMAND_COLUMNS = tl.constexpr(layout.COMMAND_COLUMNS)
STEADY_PLANS = tl.constexpr(layout.STEADY_PLANS)
INBOX_COLUMNS = tl.constexpr(layout.INBOX_COLUMNS)
IN_PROMPT = tl.constexpr(layout.IN_PROMPT)
IN_MAX_TOKENS = tl.constexpr(layout.IN_MAX_TOKENS)
IN_MIN_TOKENS = tl.constexpr(layout.IN_MIN_TOKENS)
IN_EOS = tl.constexpr(layout.IN_EOS)
IN_NUM_STOPS = tl.constexpr(layout.IN_NUM_STOPS)
IN_SKIPS_CACHE = tl.constexpr(layout.IN_SKIPS_CACHE)
IN_REPEATS_MIN = tl.constexpr(layout.IN_REPEATS_MIN)
IN_REPEATS_MAX = tl.constexpr(layout.IN_REPEATS_MAX)
IN_REPEATS_COUNT = tl.constexpr(layout.IN_REPEATS_COUNT)
IN_GRAMMAR = tl.constexpr(layout.IN_GRAMMAR)


@triton.jit
def take_commands(s, d):
    """Execute all commands that the host has written, in order.

    A command may change anything that plain steps rely on.
    """
    at = tl.load(s.command_at)
    last = tl.load(s.command_end)
    tl.debug_barrier()
    tl.store(s.steady + STEADY_PLANS, 0, mask=at < last)
    while at < last:
        first = (at & (d.commands - 1)) * COMMAND_COLUMNS
        opcode = tl.load(s.commands + first)
        slot = tl.load(s.commands + first + 1)
        birth = tl.load(s.commands + first + 2)
        argument = tl.load(s.commands + first + 3)
        if opcode == SUBMIT:
            submit(s, slot, birth, d)
        elif opcode == RESET:
            reset(s, argument, d)
        elif tl.load(s.birth + slot) == birth:
            if opcode == ABORT:
                end(s, slot, d)
            if opcode == GRAMMAR:
                tl.store(s.grammar_ready + slot, 1)
            if opcode == DRAFT:
                take_drafts(s, slot, argument, d)
        tl.debug_barrier()
        at += 1
    tl.store(s.command_at, at)


@triton.jit
def submit(s, slot, birth, d):
    """Append a new request to its queue: waiting, or skipped if it has a grammar."""
    row = slot * INBOX_COLUMNS
    prompt = tl.load(s.inbox + row + IN_PROMPT)
    has_grammar = tl.load(s.inbox + row + IN_GRAMMAR)
    tl.store(s.birth + slot, birth)
    tl.store(s.status + slot, tl.where(has_grammar > 0, AWAITS_GRAMMAR, IS_WAITING))
    tl.store(s.known + slot, prompt)
    tl.store(s.prompt + slot, prompt)
    tl.store(s.end_by_max_tokens + slot, prompt + tl.load(s.inbox + row + IN_MAX_TOKENS))
    tl.store(s.min_tokens + slot, tl.load(s.inbox + row + IN_MIN_TOKENS))
    tl.store(s.eos + slot, tl.load(s.inbox + row + IN_EOS))
    tl.store(s.num_stops + slot, tl.load(s.inbox + row + IN_NUM_STOPS))
    tl.store(s.skips_cache + slot, tl.load(s.inbox + row + IN_SKIPS_CACHE))
    tl.store(s.repeats_min + slot, tl.load(s.inbox + row + IN_REPEATS_MIN))
    tl.store(s.repeats_max + slot, tl.load(s.inbox + row + IN_REPEATS_MAX))
    tl.store(s.repeats_count + slot, tl.load(s.inbox + row + IN_REPEATS_COUNT))
    tl.store(s.computed + slot, 0)
    tl.store(s.num_drafts + slot, 0)
    tl.store(s.promised + slot, 0)
    tl.store(s.last_frame + slot, NONE)
    tl.store(s.is_prefill + slot, 0)
    tl.store(s.cached + slot, NONE)
    tl.store(s.preempted + slot, 0)
    tl.store(s.grammar_ready + slot, 0)
    tl.store(s.step_tokens + slot, 0)
    tl.store(s.doubt + slot, 0)
    if d.has_cache:
        extend_path(s, slot, 0, prompt, d)
    append(s, slot, tl.where(has_grammar > 0, SKIPPED, WAITING), d)


@triton.jit
def take_drafts(s, slot, count, d):
    """Store drafts for the next step, if they continue the request's known tokens (P24)."""
    fits = (tl.load(s.status + slot) == IS_RUNNING) & (tl.load(s.is_prefill + slot) == 0)
    fits = fits & (tl.load(s.computed + slot) == tl.load(s.known + slot) - 1)
    if fits:
        at = 0
        while at < count:
            index = at + tl.arange(0, d.lanes)
            token = tl.load(s.offered + slot * d.drafts + index, mask=index < count, other=0)
            tl.store(s.drafts + slot * d.drafts + index, token, mask=index < count)
            at += d.lanes
        tl.store(s.num_drafts + slot, count)
    tl.store(s.taken + slot, fits.to(tl.int32))


@triton.jit
def reset(s, preempts, d):
    """Forget every cached block, if none is held or running requests may be preempted (P25)."""
    if preempts > 0:
        running = tl.load(s.num_running)
        while running > 0:
            preempt(s, tl.load(s.run + (running - 1)), d)
            running -= 1
    is_possible = (preempts > 0) | (tl.load(s.num_free) == d.num_blocks - 1)
    if is_possible:
        at = 0
        while at < d.num_blocks:
            block = at + tl.arange(0, d.lanes)
            tl.store(s.scratch + block, block, mask=block < d.num_blocks)
            at += d.lanes
        tl.debug_barrier()
        withdraw_listed(s, d.num_blocks, d)
    tl.store(s.reset_done, is_possible.to(tl.int32))
