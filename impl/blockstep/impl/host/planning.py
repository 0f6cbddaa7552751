"""Planning: the tokens and blocks that each request gets in a step."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from blockstep.impl.host import groups as g
from blockstep.impl.host import lives
from blockstep.impl.host import queues as q
from blockstep.impl.host import state as c
from blockstep.impl.host.blocks import is_fenced, publish
from blockstep.impl.host.jit import compiled, entry, making_arrays, rarely
from blockstep.impl.host.state import Int32s, Int64s, State
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER

# What became of a try to admit a request.
REFUSED, ADMITTED, DUE, PARKED = range(4)

# Parts of `plan_step`.
BEGIN, ROWS, ONE, WAITING, ISSUE = range(5)

# The running phase: each running request gets its next tokens, and blocks to write them in


@compiled
def run_rows(s: State, position: int, given: int) -> int:
    """Schedule the running requests from `position` on; return the position of the first that needs
    Python, NONE if there is none.

    `given`: NONE, or tokens of the request at `position`; then only that is scheduled, and the next
    position is returned.
    """
    s.scalars[c.STOPPED] = c.GOES_ON
    while 0 <= position < s.scalars[c.NUM_RUNNING] and s.scalars[c.BUDGET] > 0:
        after = _run_plain_rows(s, position) if given == c.NONE else position
        if after > position:
            position = after
            continue
        slot = s.lines[position, c.RUNNING]
        tokens = _tokens_to_run(s, slot) if given == c.NONE else given
        if s.scalars[c.HOLDS_PREFILLS] != 0 and s.requests[slot, c.IS_PREFILL] != 0:
            tokens = 0
        is_asked = s.scalars[c.HAS_ITEMS] != 0 and given == c.NONE
        end = s.requests[slot, c.NUM_COMPUTED] + tokens
        if is_asked and tokens > 0 and end > s.requests[slot, c.NEXT_ITEM]:
            s.scalars[c.STOPPED], s.scalars[c.STOP_TOKENS] = c.IS_DUE, tokens
            return position
        position = _run_row(s, slot, tokens, position)
        if given != c.NONE:
            return position
    return int(s.scalars[c.STOP_POSITION]) if s.scalars[c.STOPPED] == c.IS_SHORT else c.NONE


@compiled
def _run_plain_rows(s: State, position: int) -> int:
    """Schedule running requests that get one token and change no block, from `position` on, up to
    the first other one; return its position. It does what the loop around it does, with fewer
    variables, so that they fit into registers."""
    while position < s.scalars[c.NUM_RUNNING] and s.scalars[c.BUDGET] > 0:
        slot = s.lines[position, c.RUNNING]
        computed, promised = s.requests[slot, c.NUM_COMPUTED], s.requests[slot, c.NUM_PROMISED]
        end = computed + 1
        if (
            s.requests[slot, c.NUM_KNOWN] + promised != end
            or s.requests[slot, c.NUM_DRAFTS] != 0
            or end + s.scalars[c.NUM_LOOKAHEAD] > s.requests[slot, c.QUIET]
            or end >= s.scalars[c.MAX_MODEL_LEN]
            or (promised > 0 and end + 1 - promised >= s.requests[slot, c.END_BY_MAX_TOKENS])
            or (s.scalars[c.HAS_ITEMS] != 0 and end > s.requests[slot, c.NEXT_ITEM])
            or (s.scalars[c.HAS_FORKS] != 0 and s.requests[slot, c.MAY_SHARE] != 0)
            or (s.scalars[c.HOLDS_PREFILLS] != 0 and s.requests[slot, c.IS_PREFILL] != 0)
        ):
            break
        s.lines[s.scalars[c.NUM_ROWS], c.ROW_LOOKS] = 0
        _add_row(s, slot, 1, 0)
        position += 1
    return position


@compiled
def _run_row(s: State, slot: int, tokens: int, position: int) -> int:
    """Schedule a running request, with up to `tokens` tokens; return the next position, or NONE."""
    if tokens > 0 and s.scalars[c.HAS_ALIGNED] != 0:
        tokens = g.align(s, slot, s.requests[slot, c.NUM_COMPUTED], tokens)
    if tokens <= 0:
        return position + 1
    slots = s.requests[slot, c.NUM_COMPUTED] + tokens + s.scalars[c.NUM_LOOKAHEAD]
    may_copy = s.scalars[c.HAS_FORKS] != 0 and s.requests[slot, c.MAY_SHARE] != 0
    if slots > s.requests[slot, c.QUIET] or may_copy:
        position = _look(s, slot, tokens, position)
        if position < 0:
            s.scalars[c.STOP_TOKENS] = tokens
            return c.NONE
    else:
        s.lines[s.scalars[c.NUM_ROWS], c.ROW_LOOKS] = 0
    drafts = 0
    if s.requests[slot, c.NUM_DRAFTS] > 0:  # drafts that do not fit are dropped (P24)
        before = s.requests[slot, c.NUM_KNOWN] + s.requests[slot, c.NUM_PROMISED]
        drafts = s.requests[slot, c.NUM_COMPUTED] + tokens - before
        s.requests[slot, c.NUM_DRAFTS] = 0
    _add_row(s, slot, tokens, drafts)
    return position + 1


@compiled
def _look(s: State, slot: int, tokens: int, position: int) -> int:
    """Leave, take and publish the blocks that a running request leaves, needs and fills with
    `tokens` tokens; return its position then, or -1 as `_make_room` does."""
    if s.scalars[c.SKIPS_BLOCKS] != 0:
        g.leave_blocks(s, slot)
    needed = g.count_needed(s, slot, tokens) + g.count_copies(s, slot)
    if needed > s.scalars[c.NUM_FREE]:
        position = _make_room(s, slot, needed, position)
        if position < 0:
            return -1
    g.mark_known(s, slot)
    computed, known = s.requests[slot, c.NUM_COMPUTED], s.requests[slot, c.NUM_KNOWN]
    if needed > 0:
        slots = min(computed + tokens + s.scalars[c.NUM_LOOKAHEAD], s.scalars[c.MAX_MODEL_LEN])
        num_copies = s.scalars[c.NUM_COPIES]
        g.take_needed(s, slot, computed + tokens, slots, 0)
        if s.scalars[c.NUM_COPIES] > num_copies:
            g.list_all_blocks(s)
    if s.scalars[c.HAS_FORKS] != 0:
        s.requests[slot, c.MAY_SHARE] = 0
    publish(s, slot, computed, min(computed + tokens, known))
    s.requests[slot, c.QUIET] = g.find_quiet(s, slot)
    return position


@compiled
def _add_row(s: State, slot: int, tokens: int, drafts: int) -> None:
    row = s.scalars[c.NUM_ROWS]
    s.lines[row, c.ROW_SLOT], s.lines[row, c.ROW_TOKENS] = slot, tokens
    s.lines[row, c.ROW_DRAFTS] = drafts
    s.scalars[c.NUM_ROWS] = row + 1
    s.scalars[c.BUDGET] -= tokens


@compiled
def _tokens_to_run(s: State, slot: int) -> int:
    """Return the tokens of a running request in this step, including drafts; none if not positive.

    computed | ... known, placeholders | drafts |   one slot below max_model_len stays free
             <------ gap ----------------------->    for the token to be sampled

    A request that its placeholders will end by `max_tokens` has no row (seed 001, "Async scheduling
    skip-ahead"): one of them is certain, the others may be rejected drafts.
    """
    computed, promised = s.requests[slot, c.NUM_COMPUTED], s.requests[slot, c.NUM_PROMISED]
    if promised > 0 and computed + 2 - promised >= s.requests[slot, c.END_BY_MAX_TOKENS]:
        return 0
    gap = s.requests[slot, c.NUM_KNOWN] + promised + s.requests[slot, c.NUM_DRAFTS] - computed
    most = min(s.scalars[c.MAX_TOKENS_PER_ROW], s.scalars[c.BUDGET])
    return int(min(gap, most, s.scalars[c.MAX_MODEL_LEN] - 1 - computed))


@rarely
def _make_room(s: State, slot: int, needed: int, position: int) -> int:
    """Preempt until `needed` blocks are free for `slot`, at `position` of the running list.

    Returns its new position; -1 ends the phase: it was preempted itself, a turn that has ended must
    give up blocks first, or the next blocks become free only when a frame is committed. A block
    needs no copy once no other request holds it.
    """
    needed -= g.count_copies(s, slot)
    while needed + g.count_copies(s, slot) > s.scalars[c.NUM_FREE]:
        if s.scalars[c.NUM_RUNNING] == 1:
            if s.scalars[c.NUM_HOLDERS] > 0:
                s.scalars[c.STOPPED], s.scalars[c.STOP_POSITION] = c.IS_SHORT, position
                return -1
            if take_back_one(s, slot):
                continue
        at = _select_victim(s)
        victim = s.lines[at, c.RUNNING]
        if s.scalars[c.HAS_FENCES] != 0 and _gains_nothing(s, victim):
            s.scalars[c.AWAITS_ANSWER] = 1
            return -1
        lives.leave_running(s, at)
        if at < position:
            position -= 1
        row = _find_row(s, victim)
        if row != c.NONE:  # its tokens return to the budget
            s.scalars[c.BUDGET] += s.lines[row, c.ROW_TOKENS]
            s.lines[row, c.ROW_SLOT] = c.NONE
            for at in range(s.scalars[c.NUM_COPIES]):
                if s.copies[at, 0] == victim:
                    s.copies[at, 0] = c.NONE
        if s.scalars[c.SWAP_MIN] > 0:
            _save(s, victim)
        lives.preempt(s, victim)
        s.scratch[s.scalars[c.NUM_PREEMPTED]] = victim
        s.scalars[c.NUM_PREEMPTED] += 1
        if victim == slot:
            return -1
    return position


@compiled
def _find_row(s: State, slot: int) -> int:
    """Return the row of a request in this step; NONE if it has none yet."""
    for row in range(s.scalars[c.NUM_ROWS]):
        if s.lines[row, c.ROW_SLOT] == slot:
            return int(row)
    return c.NONE


@compiled
def _save(s: State, victim: int) -> None:
    """Have a store save a victim's KV if there is enough of it (seed 002, "Swap-Out").

    Its row of this step was removed. Drafts and placeholders are not saved, as their tokens are not
    known. A victim with an unconfirmed load saves nothing (P19).
    """
    settled = min(s.requests[victim, c.NUM_COMPUTED], s.requests[victim, c.NUM_KNOWN])
    tokens, at = settled // s.scalars[c.UNIT] * s.scalars[c.UNIT], s.scalars[c.NUM_SAVES]
    if tokens < s.scalars[c.SWAP_MIN] or s.requests[victim, c.UNSETTLED] != 0:
        return
    s.loads[at, 0], s.loads[at, 1], s.loads[at, 2] = victim, s.requests[victim, c.BATCH_ROW], tokens
    s.scalars[c.NUM_SAVES] = at + 1


@compiled
def _gains_nothing(s: State, victim: int) -> bool:
    """Whether the victim's blocks, or those of a request that would give up its blocks first, are
    not free at once, as they wait for the commit of a frame (P17)."""
    if s.scalars[c.NUM_RUNNING] == 1:
        giver = lives.find_giver(s, c.NONE)
        if giver != c.NONE and is_fenced(s, giver):
            return True
    return is_fenced(s, victim)


@compiled
def _select_victim(s: State) -> int:
    """Return the position of the request to preempt (P16).

    FCFS: the last whose job's previous turn holds no blocks, or else the last. Priority: the one
    that would wait longest, in the order of the queues; any other choice among equals lets two
    requests preempt each other for ever (P10).
    """
    found = s.scalars[c.NUM_RUNNING] - 1
    if s.scalars[c.NUM_HOLDERS] > 0:
        for position in range(found, -1, -1):
            if s.requests[s.lines[position, c.RUNNING], c.IS_WARM] == 0:
                return int(position)
    if s.scalars[c.IS_PRIORITY]:
        for position in range(found - 1, -1, -1):
            if q.goes_before(s, s.lines[found, c.RUNNING], s.lines[position, c.RUNNING]):
                found = position
    return int(found)


# The waiting phase: requests are admitted while budget, running slots and blocks last


@compiled
def admit_rows(s: State, oldest_id: int) -> int:
    """Admit waiting requests; return the first that needs Python, NONE if there is none."""
    s.scalars[c.STOPPED] = c.GOES_ON
    while s.scalars[c.BUDGET] > 0 and s.scalars[c.NUM_RUNNING] < s.scalars[c.MAX_NUM_SEQS]:
        slot = q.select_head(s)
        if slot == c.NONE:
            break
        if is_passed_over(s, slot, oldest_id):
            q.pass_over(s, slot)
            continue
        if s.requests[slot, c.STATUS] == c.HAS_LOADED and s.requests[slot, c.NUM_COMPUTED] == 0:
            s.scalars[c.STOPPED] = c.BEGINS_ANEW
            return slot
        found = REFUSED
        while found == REFUSED:
            found = try_admit(s, slot, c.NONE)
            if found == REFUSED and not may_try_again(s, slot):
                if s.scalars[c.STOPPED] == c.GOES_ON and s.scalars[c.NUM_RECEIVED] > 0:
                    s.scalars[c.STOPPED] = c.IS_REFUSED
                return slot if s.scalars[c.STOPPED] != c.GOES_ON else c.NONE
        if found == DUE:
            s.scalars[c.STOPPED] = c.IS_DUE
            return slot
        if found == PARKED:
            q.pass_over(s, slot)
    return c.NONE


@entry("state", "int", "int")
def is_passed_over(s: State, slot: int, oldest_id: int) -> bool:
    """Whether a request cannot be admitted now, and the next one is tried."""
    # While a frame in flight samples for it, the position after its known tokens would be sampled
    # twice if it was admitted again (ours, P13; upstream #48245).
    if not _is_ready(s, slot) or s.requests[slot, c.LAST_SAMPLE] >= oldest_id:
        return True
    if s.requests[slot, c.OFFERED] == c.NONE and s.requests[slot, c.NUM_COMPUTED] == 0:
        return True
    return bool(s.scalars[c.MAX_LORAS] > 0 and not _has_lora_slot(s, slot))


@entry("state", "int")
def may_try_again(s: State, slot: int) -> bool:
    """Whether blocks were freed for a request that does not fit although no request runs; machine
    code stops if a turn that has ended has to give up blocks."""
    if s.scalars[c.NUM_RUNNING] > 0:
        return False
    if s.scalars[c.NUM_HOLDERS] > 0:
        s.scalars[c.STOPPED] = c.IS_SHORT
        return False
    return take_back_one(s, slot)


@compiled
def take_back_one(s: State, needy: int) -> bool:
    """Free the blocks of a request other than `needy` that does not run, if there is one."""
    if s.scalars[c.NUM_SESSIONS] + s.scalars[c.HAS_FORKS] + s.scalars[c.NUM_RECEIVED] == 0:
        return False
    giver = lives.find_giver(s, needy)
    if giver == c.NONE or is_fenced(s, giver):
        return False
    lives.take_back(s, giver)
    return True


@compiled
def _is_ready(s: State, slot: int) -> bool:
    """Whether the request may be admitted; if its grammar is ready, its status becomes waiting."""
    if s.requests[slot, c.STATUS] == c.IS_RESTING or s.requests[slot, c.STATUS] == c.IS_LOADING:
        return False
    if s.requests[slot, c.STATUS] != c.AWAITS_GRAMMAR:
        return True
    if not s.requests[slot, c.GRAMMAR_READY]:
        return False
    s.requests[slot, c.STATUS] = c.IS_WAITING
    return True


@compiled
def _has_lora_slot(s: State, slot: int) -> bool:
    """Whether the request may run, as its adapter is one of few running adapters (P9)."""
    adapter = s.requests[slot, c.ADAPTER]
    if adapter == 0 or s.adapters[adapter] > 0:
        return True
    return bool(s.scalars[c.NUM_ADAPTERS] < s.scalars[c.MAX_LORAS])


@entry("state", "int", "int")
def try_admit(s: State, slot: int, given: int) -> int:
    """Admit the request, or change nothing and return why not (P7).

    A request with blocks continues after its computed tokens; any other one after its hits and what
    a store loads. `given`: the most tokens; NONE: as many as possible, unless its next item is due.
    """
    known, hit = s.requests[slot, c.NUM_KNOWN], s.requests[slot, c.NUM_COMPUTED]
    has_blocks = hit > 0
    asks = s.scalars[c.HAS_CACHE] != 0 and s.requests[slot, c.SKIPS_CACHE] == 0 and not has_blocks
    if asks:
        hit = g.find_hits(s, slot)
    start = hit
    if s.scalars[c.HAS_STORE] != 0 and not has_blocks:
        start += _find_load(s, slot, hit)
        if start > hit and s.requests[slot, c.IS_OFFER_ASYNC] != 0:
            return _try_park(s, slot, hit, start, asks)
    if s.scalars[c.HOLDS_PREFILLS] != 0 and start < known - 1:
        return REFUSED
    tokens = given
    if given == c.NONE:
        tokens = min(known - start, s.scalars[c.MAX_TOKENS_PER_ROW])
        if tokens > s.scalars[c.BUDGET]:
            if not s.scalars[c.HAS_CHUNKS]:
                return REFUSED
            tokens = s.scalars[c.BUDGET]
        if start + tokens > s.requests[slot, c.NEXT_ITEM]:
            s.scalars[c.STOP_START], s.scalars[c.STOP_TOKENS] = start, tokens
            return DUE
    if s.scalars[c.HAS_ALIGNED] != 0 and tokens > 0:
        tokens = g.align(s, slot, start, tokens)
    if tokens <= 0:
        return REFUSED
    if not (g.fits_behind(s, slot, tokens) if has_blocks else g.fits(s, slot, hit, start, tokens)):
        return REFUSED
    q.leave_queue(s, slot)
    has_loaded = s.requests[slot, c.STATUS] == c.HAS_LOADED
    if has_loaded:
        lives.unpark(s, slot)
    s.requests[slot, c.WAS_PREEMPTED] = s.requests[slot, c.STATUS] == c.IS_PREEMPTED
    lives.start_running(s, slot)
    if has_blocks:
        if has_loaded:
            publish(s, slot, start, min(start, known))
        g.leave_blocks(s, slot)
        g.mark_known(s, slot)
        g.list_all_blocks(s)  # the worker has forgotten it
    else:
        g.adopt(s, slot, hit, start)
        _count_hits(s, slot, hit, start, asks)
        if start > hit:
            s.requests[slot, c.UNSETTLED] = s.scalars[c.STEP] + 1
            _note_load(s, slot, hit, start, 0)
    loaded = start if start > hit else 0
    g.take_needed(s, slot, start + tokens, start + tokens, loaded)  # there is no lookahead yet
    s.requests[slot, c.NUM_COMPUTED], s.requests[slot, c.MAY_SHARE] = start, 0
    publish(s, slot, start, min(start + tokens, known))
    _add_row(s, slot, tokens, 0)
    if s.requests[slot, c.NUM_CACHED_TOKENS] < 0:
        s.requests[slot, c.NUM_CACHED_TOKENS] = start
    return ADMITTED


# A store


@compiled
def _find_load(s: State, slot: int, hit: int) -> int:
    """Return the tokens that a store loads after a hit.

    The last known token is always computed, as the next token is sampled from it. A state is that
    after the last token of an offer, so with states a longer offer cannot be used (P3).
    """
    offered, known = s.requests[slot, c.OFFERED], s.requests[slot, c.NUM_KNOWN]
    if s.scalars[c.HAS_STATES] != 0 and offered >= known:
        return 0
    return int(max(min(offered, known - 1) - hit, 0))


@compiled
def _try_park(s: State, slot: int, hit: int, start: int, asks: bool) -> int:
    """Let a request wait for a load over several steps, or change nothing: hold the hits, and take
    the blocks to load into. The request stays in its queue."""
    if not g.fits(s, slot, hit, start, 0):
        return REFUSED
    lives.take_batch_row(s, slot)
    g.adopt(s, slot, hit, start)
    g.take_needed(s, slot, start, start, start)
    _count_hits(s, slot, hit, start, asks)
    s.requests[slot, c.NUM_COMPUTED] = start
    s.requests[slot, c.PARKED_AS], s.requests[slot, c.STATUS] = (
        s.requests[slot, c.STATUS],
        c.IS_LOADING,
    )
    _note_load(s, slot, hit, start, 1)
    return PARKED


@compiled
def _note_load(s: State, slot: int, hit: int, start: int, is_async: int) -> None:
    at = s.scalars[c.NUM_LOADS]
    s.loads[at, 0], s.loads[at, 1] = slot, hit
    s.loads[at, 2], s.loads[at, 3] = start - hit, is_async
    s.scalars[c.NUM_LOADS] = at + 1


@compiled
def _count_hits(s: State, slot: int, hit: int, start: int, asks: bool) -> None:
    """Count the queries and hits of the caches for a request that was given blocks (P21)."""
    known = s.requests[slot, c.NUM_KNOWN]
    if asks:
        s.scalars[c.QUERIES] += known
        s.scalars[c.HITS] += hit
    if s.scalars[c.HAS_STORE] != 0 and s.requests[slot, c.SKIPS_CACHE] == 0:
        s.scalars[c.EXTERNAL_QUERIES] += known - hit
        s.scalars[c.EXTERNAL_HITS] += start - hit


# The plan

PlanArrays: TypeAlias = tuple[Int64s, Int32s, Int32s, int, int, int, int, int, int, int]
"""Slots and births [2, rows]; data of the rows [PLAN_COLUMNS, rows]; in one array the rows of new
blocks, their ids, their groups if there are several, blocks to be zeroed, and ids of drafts; the
number of new blocks, of those to be zeroed, of rows that sample, of rows that were running before,
of those that the previous plan lacked, and of preempted requests (both are listed in `scratch`,
preempted first); the leading blocks that all running requests share in the first group."""


@compiled
def _holds_prefills(s: State) -> bool:
    """Whether prompts wait in this step: one was computed too few steps before (upstream #54627),
    and some running request decodes now, so that the step is not empty (P10)."""
    if s.scalars[c.PREFILL_WAIT] == 0:
        return False
    for position in range(s.scalars[c.NUM_RUNNING]):
        slot = s.lines[position, c.RUNNING]
        if s.requests[slot, c.IS_PREFILL] == 0 and _tokens_to_run(s, slot) > 0:
            return True
    return False


@compiled
def _count_wait(s: State, num_running: int) -> None:
    """Count a planned step, whose first `num_running` rows are of the running phase; one with a
    prompt makes later prompts wait. The last token of an admitted request is none."""
    wait = max(s.scalars[c.PREFILL_WAIT] - min(s.scalars[c.NUM_ROWS], 1), 0)
    for row in range(s.scalars[c.NUM_ROWS]):
        slot = s.lines[row, c.ROW_SLOT]
        lacking = s.requests[slot, c.NUM_KNOWN] - s.requests[slot, c.NUM_COMPUTED]
        if s.requests[slot, c.IS_PREFILL] != 0 if row < num_running else lacking > 1:
            wait = s.scalars[c.PREFILL_INTERVAL] - 1
    s.scalars[c.PREFILL_WAIT] = wait


@compiled
def end_running(s: State) -> int:
    """End the running phase; return the number of its rows."""
    if s.scalars[c.NUM_PREEMPTED] > 0:
        _close_gaps(s)
    if s.scalars[c.HIGH_FREE] > 0:
        s.scalars[c.IS_CLOSED] = _is_closed_behind(s)
    return int(s.scalars[c.NUM_ROWS])


@compiled
def _is_closed_behind(s: State) -> bool:
    """Whether admission is closed in this step, behind its running phase.

    With a single threshold, the request admitted last would be preempted next, again and again
    (seed 002, "Memory Pressure Signals"). Running requests finish, and with none admission is open
    (P10).
    """
    enough = s.scalars[c.HIGH_FREE] if s.scalars[c.IS_CLOSED] != 0 else s.scalars[c.LOW_FREE]
    is_short = s.scalars[c.NUM_PREEMPTED] > 0 or s.scalars[c.NUM_FREE] < enough
    return bool(s.scalars[c.NUM_RUNNING] > 0 and is_short)


@compiled
def may_admit(s: State) -> bool:
    """Whether requests are admitted behind the running phase."""
    held_off = s.scalars[c.NUM_PREEMPTED] + s.scalars[c.AWAITS_ANSWER] + s.scalars[c.IS_CLOSED]
    return bool(held_off == 0)


@compiled
def _close_gaps(s: State) -> None:
    """Remove the rows of preempted requests."""
    kept = 0
    for row in range(s.scalars[c.NUM_ROWS]):
        if s.lines[row, c.ROW_SLOT] == c.NONE:
            continue
        for column in range(c.ROW_SLOT, s.lines.shape[1]):
            s.lines[kept, column] = s.lines[row, column]
        kept += 1
    s.scalars[c.NUM_ROWS] = kept


@making_arrays
def issue(s: State, frame_id: int, previous_id: int, num_running: int) -> PlanArrays:
    """Write the plan's differences (P26), and count scheduled tokens as computed."""
    q.return_passed(s)
    if s.scalars[c.PREFILL_INTERVAL] > 1:
        _count_wait(s, num_running)
    rows, num_blocks, num_zeroed, num_drafts = s.scalars[c.NUM_ROWS], 0, 0, 0
    groups = s.scalars[c.NUM_GROUPS]
    for row in range(rows):
        for group in range(groups if s.lines[row, c.ROW_LOOKS] != 0 else 0):
            at = c.ROW_BLOCKS + c.ROW_NUMBERS * group
            num_blocks += s.lines[row, at + 1] - s.lines[row, at]
            if s.scalars[c.HAS_STATES] != 0 and s.groups[group, c.KIND] < c.IS_STATE:
                num_zeroed += s.lines[row, at + 1] - s.lines[row, at + 2]
        num_drafts += s.lines[row, c.ROW_DRAFTS]
    owners, planned = np.empty((2, rows), np.int64), np.empty((c.PLAN_COLUMNS, rows), np.int32)
    sections = 2 if groups == 1 else 3
    ids = np.empty(sections * num_blocks + num_zeroed + num_drafts, np.int32)
    if num_zeroed > 0:
        _list_zeroed(s, ids, sections * num_blocks)
    num_samples, num_missed = _fill_plan(
        s, frame_id, previous_id, num_running, owners, planned, ids, num_blocks,
        len(ids) - num_drafts,
    )  # fmt: skip
    if s.scalars[c.NUM_PLACEHOLDERS] > 0:
        _drop_unused_placeholders(s, frame_id)
    return (
        owners, planned, ids, num_blocks, num_zeroed, num_samples, num_running, num_missed,
        int(s.scalars[c.NUM_PREEMPTED]), g.count_common(s, 0),
    )  # fmt: skip


@compiled
def _list_zeroed(s: State, ids: Int32s, at: int) -> None:
    """List the blocks that attention groups take in this step, group by group, as the bits of a
    state left in one may read as NaN."""
    for group in range(s.scalars[c.NUM_GROUPS]):
        if s.groups[group, c.KIND] >= c.IS_STATE:
            continue
        for row in range(s.scalars[c.NUM_ROWS]):
            if s.lines[row, c.ROW_LOOKS] == 0:
                continue
            slot = s.lines[row, c.ROW_SLOT]
            found, last = s.requests[slot, c.BATCH_ROW], c.ROW_BLOCKS + c.ROW_NUMBERS * group + 1
            for index in range(s.lines[row, last + 1], s.lines[row, last]):
                ids[at] = s.block_tables[group, found, index]
                at += 1


@compiled
def _fill_plan(
    s: State,
    frame_id: int,
    previous_id: int,
    num_running: int,
    owners: Int64s,
    planned: Int32s,
    ids: Int32s,
    num_blocks: int,
    at_draft: int,
) -> tuple[int, int]:
    """Return the number of rows that sample, and of running ones that the previous plan lacked."""
    rows, groups = s.scalars[c.NUM_ROWS], s.scalars[c.NUM_GROUPS]
    at_block, num_samples, at_missed, row = 0, 0, s.scalars[c.NUM_PREEMPTED], -1
    while row + 1 < rows:
        first = row + 1
        row, more = _fill_plain_rows(s, frame_id, previous_id, num_running, owners, planned, first)
        num_samples += more
        if row == rows:
            break
        slot, drafts = s.lines[row, c.ROW_SLOT], s.lines[row, c.ROW_DRAFTS]
        found = s.requests[slot, c.BATCH_ROW]
        owners[0, row], owners[1, row] = slot, s.requests[slot, c.BIRTH]
        for group in range(groups if s.lines[row, c.ROW_LOOKS] != 0 else 0):
            first = c.ROW_BLOCKS + c.ROW_NUMBERS * group
            for index in range(s.lines[row, first], s.lines[row, first + 1]):
                ids[at_block] = row
                ids[num_blocks + at_block] = s.block_tables[group, found, index]
                if groups > 1:
                    ids[2 * num_blocks + at_block] = group
                at_block += 1
        is_known = s.scalars[c.IS_ASYNC] == 0
        for index in range(drafts):
            ids[at_draft] = s.drafts[found, index] if is_known else DRAFT_PLACEHOLDER
            at_draft += 1
        if row < num_running and s.requests[slot, c.LAST_FRAME] != previous_id:
            s.scratch[at_missed] = row
            at_missed += 1
        num_samples += _advance(s, slot, row, planned)
        s.requests[slot, c.LAST_FRAME] = frame_id
    return num_samples, at_missed - s.scalars[c.NUM_PREEMPTED]


@compiled
def _fill_plain_rows(
    s: State, frame_id: int, previous_id: int, num_running: int, owners: Int64s, planned: Int32s,
    row: int,
) -> tuple[int, int]:  # fmt: skip
    """Write rows without new blocks and drafts of requests that the worker knows, from `row` on;
    return the first other row, and the number of those that sample."""
    num_samples = 0
    while row < num_running:
        slot = s.lines[row, c.ROW_SLOT]
        has_more = s.lines[row, c.ROW_LOOKS] + s.lines[row, c.ROW_DRAFTS] != 0
        if has_more or s.requests[slot, c.LAST_FRAME] != previous_id:
            break
        owners[0, row], owners[1, row] = slot, s.requests[slot, c.BIRTH]
        num_samples += _advance(s, slot, row, planned)
        s.requests[slot, c.LAST_FRAME] = frame_id
        row += 1
    return row, num_samples


@compiled
def _advance(s: State, slot: int, row: int, planned: Int32s) -> int:
    """Write a row's data, and advance its request; return whether the row samples."""
    computed, tokens = s.requests[slot, c.NUM_COMPUTED], s.lines[row, c.ROW_TOKENS]
    known = s.requests[slot, c.NUM_KNOWN] + s.requests[slot, c.NUM_PROMISED]
    drafts = s.lines[row, c.ROW_DRAFTS]
    samples = int(computed + tokens >= known)
    planned[c.PLAN_COMPUTED, row], planned[c.PLAN_SCHEDULED, row] = computed, tokens
    planned[c.PLAN_OUTPUTS, row] = known - s.requests[slot, c.NUM_PROMPT]
    planned[c.PLAN_SAMPLES, row], planned[c.PLAN_DRAFTS, row] = samples, drafts
    s.requests[slot, c.NUM_COMPUTED] = computed + tokens
    s.requests[slot, c.IS_PREFILL] = 1 - samples
    if samples:
        s.requests[slot, c.LAST_SAMPLE] = s.scalars[c.STEP]
    if samples and s.scalars[c.IS_ASYNC] != 0:  # placeholders (P12)
        s.requests[slot, c.NUM_PROMISED] += 1 + drafts
        s.requests[slot, c.NUM_IN_DOUBT] += drafts
        s.requests[slot, c.NUM_DRAFTS] = s.scalars[c.NUM_PLACEHOLDERS]
    return samples


@compiled
def _drop_unused_placeholders(s: State, frame_id: int) -> None:
    """Drop the placeholder drafts of running requests without a row in this plan (ours, P24).

    They are what the worker proposed after the previous plan, and the worker proposes nothing for a
    request that it does not run (upstream #46899).
    """
    for position in range(s.scalars[c.NUM_RUNNING]):
        slot = s.lines[position, c.RUNNING]
        if s.requests[slot, c.LAST_FRAME] != frame_id:
            s.requests[slot, c.NUM_DRAFTS] = 0


@entry("state", *("int",) * 7, "bool", makes_arrays=True)
def plan_step(
    s: State, part: int, at: int, given: int, frame_id: int, previous_id: int, oldest_id: int,
    budget: int, admits: bool,
) -> PlanArrays:  # fmt: skip
    """Plan one step from a part on, unless machine code stops, which `STOPPED` tells; the caller
    has made all arrays long enough. One function, since what it calls takes long to compile.

    Args:
        part: BEGIN; after a stop ROWS or WAITING, to continue a phase, or ISSUE. ONE schedules the
            running request at `at` only, and returns the next position in place of `num_running`.
        at: position in the running phase; behind that `num_running`, which a stop there returns.
        given: tokens of ONE; otherwise NONE.
        frame_id: id of this plan.
        previous_id: id of the plan before.
        oldest_id: id of the oldest frame in flight; of this one if there is none.
        budget: tokens, for BEGIN.
        admits: whether to run the waiting phase, unless a request is preempted.
    """
    if part == BEGIN:
        s.scalars[c.BUDGET], s.scalars[c.STEP], part = budget, frame_id, ROWS
        s.scalars[c.NUM_ROWS] = s.scalars[c.NUM_PREEMPTED] = s.scalars[c.NUM_COPIES] = 0
        s.scalars[c.NUM_LOADS] = s.scalars[c.NUM_SAVES] = s.scalars[c.AWAITS_ANSWER] = 0
        s.scalars[c.HOLDS_PREFILLS] = _holds_prefills(s)
    if part <= ONE:
        at = run_rows(s, at, given)
    if part == ROWS:
        s.scalars[c.STOP_POSITION] = at
        if at == c.NONE:
            at = end_running(s)
            part = WAITING if admits and may_admit(s) else ISSUE
    if part == WAITING:
        s.scalars[c.STOP_SLOT], part = admit_rows(s, oldest_id), ISSUE
    if part == ISSUE and s.scalars[c.STOPPED] == c.GOES_ON:
        return issue(s, frame_id, previous_id, at)
    owners, planned = np.empty((2, 0), np.int64), np.empty((c.PLAN_COLUMNS, 0), np.int32)
    return owners, planned, np.empty(0, np.int32), 0, 0, 0, at, 0, 0, 0
