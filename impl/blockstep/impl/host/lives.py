"""Lives: the state of a request from its submission to its end."""

from __future__ import annotations

import numpy as np

from blockstep.impl.host import blocks as b
from blockstep.impl.host import state as c
from blockstep.impl.host.groups import count_blocks, find_first_read
from blockstep.impl.host.jit import compiled, entry
from blockstep.impl.host.queues import goes_before, leave_queue, prepend
from blockstep.impl.host.state import Int32s, State

# Tokens


@entry("state", "int", "int32 1", "int32 1")
def store_prompt(s: State, slot: int, tokens: Int32s, extras: Int32s) -> None:
    """Store the tokens of a new request; `extras` are those of each full block of its prompt, of
    the next block, and of all later ones."""
    size = s.scalars[c.BLOCK_SIZE]
    full = len(tokens) // size
    s.requests[slot, c.FIRST_EXTRAS], s.requests[slot, c.EXTRAS] = extras[full], extras[full + 1]
    _count_extras(s, slot, 1)
    node = c.NONE
    for index in range(full):
        node = b.find_node(s, node, extras[index], tokens[index * size : (index + 1) * size])
    if node != c.NONE:
        s.nodes[node, c.NUM_USES] += 1
    s.requests[slot, c.LAST_NODE], s.requests[slot, c.NUM_FULL] = node, full
    for index in range(full * size, len(tokens)):
        s.tails[slot, index - full * size] = tokens[index]


@compiled
def _count_extras(s: State, slot: int, change: int) -> None:
    """Count a request that begins or ceases to use the extras of its later blocks."""
    s.extras_uses[s.requests[slot, c.FIRST_EXTRAS]] += change
    s.extras_uses[s.requests[slot, c.EXTRAS]] += change


@compiled
def append_token(s: State, slot: int, token: int) -> None:
    """Append a verified output token."""
    size, index = s.scalars[c.BLOCK_SIZE], s.requests[slot, c.NUM_FULL]
    within = s.requests[slot, c.NUM_KNOWN] - index * size
    s.tails[slot, within] = token
    s.requests[slot, c.NUM_KNOWN] += 1
    if within + 1 < size:
        return
    s.requests[slot, c.NUM_FULL] = index + 1
    before = s.requests[slot, c.LAST_NODE]
    is_first = index == s.requests[slot, c.NUM_PROMPT] // size
    extras = s.requests[slot, c.FIRST_EXTRAS] if is_first else s.requests[slot, c.EXTRAS]
    node = b.find_node(s, before, extras, s.tails[slot])
    s.nodes[node, c.NUM_USES] += 1
    s.requests[slot, c.LAST_NODE] = node
    if before != c.NONE:
        s.nodes[before, c.NUM_USES] -= 1  # now used through the new node
    if s.requests[slot, c.BATCH_ROW] != c.NONE:
        s.node_tables[s.requests[slot, c.BATCH_ROW], index] = node


@entry("state", "int", makes_arrays=True)
def get_tokens(s: State, slot: int) -> Int32s:
    """Return all known tokens of a request."""
    size, known = s.scalars[c.BLOCK_SIZE], s.requests[slot, c.NUM_KNOWN]
    found = np.empty(known, np.int32)
    full, node = s.requests[slot, c.NUM_FULL], s.requests[slot, c.LAST_NODE]
    for index in range(full - 1, -1, -1):
        found[index * size : (index + 1) * size] = s.node_tokens[node]
        node = s.nodes[node, c.PARENT]
    for index in range(full * size, known):
        found[index] = s.tails[slot, index - full * size]
    return found


# Batch rows, and the running list


@compiled
def take_batch_row(s: State, slot: int) -> None:
    """Give a request a batch row, unless it has one."""
    if s.requests[slot, c.BATCH_ROW] != c.NONE:
        return
    found = s.scalars[c.FREE_BATCH_ROW]
    s.scalars[c.FREE_BATCH_ROW] = s.lines[found, c.NEXT_BATCH_ROW]
    s.requests[slot, c.BATCH_ROW] = found
    full = s.requests[slot, c.NUM_FULL]
    b.list_nodes(s, s.requests[slot, c.LAST_NODE], full, s.node_tables[found])


@compiled
def start_running(s: State, slot: int) -> None:
    """Append a request to the running list, with a batch row, unless it has one."""
    take_batch_row(s, slot)
    s.lines[s.scalars[c.NUM_RUNNING], c.RUNNING] = slot
    s.scalars[c.NUM_RUNNING] += 1
    s.requests[slot, c.STATUS] = c.IS_RUNNING
    _count_adapter(s, slot, 1)


@compiled
def _count_adapter(s: State, slot: int, change: int) -> None:
    """Count a request that begins or ceases to run for its adapter, if those are limited (P9)."""
    adapter = s.requests[slot, c.ADAPTER]
    if adapter > 0:
        before = s.adapters[adapter]
        s.adapters[adapter] = before + change
        s.scalars[c.NUM_ADAPTERS] += int(before + change > 0) - int(before > 0)


@compiled
def _leave_batch(s: State, slot: int) -> None:
    """Free the blocks and the batch row of a request."""
    b.free_blocks(s, slot)
    found = s.requests[slot, c.BATCH_ROW]
    s.lines[found, c.NEXT_BATCH_ROW] = s.scalars[c.FREE_BATCH_ROW]
    s.scalars[c.FREE_BATCH_ROW] = found
    s.requests[slot, c.BATCH_ROW], s.requests[slot, c.MAY_SHARE] = c.NONE, 0


@compiled
def close_running(s: State) -> None:
    """Remove the requests that do not run any more from the running list."""
    kept = 0
    for position in range(s.scalars[c.NUM_RUNNING]):
        slot = s.lines[position, c.RUNNING]
        if s.requests[slot, c.STATUS] == c.IS_RUNNING:
            s.lines[kept, c.RUNNING] = slot
            kept += 1
    s.scalars[c.NUM_RUNNING] = kept


@compiled
def leave_running(s: State, position: int) -> None:
    """Remove the request at `position` from the running list."""
    last = s.scalars[c.NUM_RUNNING] - 1
    _count_adapter(s, s.lines[position, c.RUNNING], -1)
    for index in range(position, last):
        s.lines[index, c.RUNNING] = s.lines[index + 1, c.RUNNING]
    s.scalars[c.NUM_RUNNING] = last


# Preemption and the end


@compiled
def preempt(s: State, slot: int) -> None:
    """Preempt a request that was removed from the running list; it will start again.

    Its verified tokens and its placeholders stay: frames in flight continue, and what they sample
    is delivered (P13). Blocks that were published for work of this step, which now does not run,
    are removed from the prefix cache (P4; upstream #43569).
    """
    found = s.requests[slot, c.BATCH_ROW]
    for group in range(s.scalars[c.NUM_GROUPS]):
        first = s.requests[slot, c.NUM_COMPUTED] // s.groups[group, c.SIZE]
        for index in range(first, s.holdings[slot, group, c.HELD]):
            b.withdraw(s, s.block_tables[group, found, index])
    _leave_batch(s, slot)
    s.requests[slot, c.NUM_COMPUTED] = s.requests[slot, c.NUM_DRAFTS] = 0
    s.requests[slot, c.NEXT_ITEM] = s.requests[slot, c.FIRST_ITEM]
    s.requests[slot, c.UNSETTLED] = 0
    s.requests[slot, c.TIMES_PREEMPTED] += 1
    s.requests[slot, c.STATUS] = c.IS_PREEMPTED
    s.scalars[c.PREEMPTIONS] += 1
    prepend(s, c.WAITING, slot)


@entry("state", "int")
def end(s: State, slot: int) -> None:
    """End an unfinished request, whether it runs or waits."""
    is_running = s.requests[slot, c.STATUS] == c.IS_RUNNING
    end_row(s, slot)
    if is_running:
        close_running(s)


@compiled
def end_row(s: State, slot: int) -> None:
    """End a request; the caller removes it from the running list."""
    if s.requests[slot, c.STATUS] == c.IS_RUNNING:
        _count_adapter(s, slot, -1)
    else:
        leave_queue(s, slot)
    if s.requests[slot, c.BATCH_ROW] != c.NONE:
        _leave_batch(s, slot)
    s.scalars[c.NUM_RECEIVED] -= int(s.requests[slot, c.STATUS] == c.HAS_LOADED)
    b.release_node(s, s.requests[slot, c.LAST_NODE])
    _count_extras(s, slot, -1)
    s.requests[slot, c.BIRTH], s.requests[slot, c.STATUS] = 0, c.HAS_ENDED


@entry("state", "int")
def preempt_one(s: State, slot: int) -> None:
    """Preempt a running request."""
    _count_adapter(s, slot, -1)
    preempt(s, slot)
    close_running(s)


@entry("state", "int")
def publish_computed(s: State, slot: int) -> None:
    """Publish the full blocks of the computed tokens of a request, once their load is confirmed."""
    computed = s.requests[slot, c.NUM_COMPUTED]
    b.publish(s, slot, computed, min(computed, s.requests[slot, c.NUM_KNOWN]))


# Sessions: at a stop they rest, and keep their blocks


@compiled
def rest(s: State, slot: int) -> None:
    """Stop a session, which is in no queue then; rows of later frames are of a life before. The
    caller removes it from the running list.

    All tokens from the last one on are uncomputed, even those that frames in flight compute.
    """
    if s.requests[slot, c.STATUS] == c.IS_RUNNING:
        _count_adapter(s, slot, -1)
        computed = s.requests[slot, c.NUM_KNOWN] - 1
        has_run_ahead = s.requests[slot, c.NUM_COMPUTED] > computed
        s.requests[slot, c.NUM_COMPUTED] = computed
        if not _can_go_back(s, slot, computed, has_run_ahead):
            take_back(s, slot)
    else:
        leave_queue(s, slot)
    s.scalars[c.NUM_BORN] += 1
    s.requests[slot, c.BIRTH] = s.scalars[c.NUM_BORN]
    s.requests[slot, c.LAST_SAMPLE] = c.NONE
    s.requests[slot, c.NUM_PROMISED] = s.requests[slot, c.NUM_IN_DOUBT] = 0
    s.requests[slot, c.NUM_DRAFTS] = 0
    s.requests[slot, c.STATUS] = c.IS_RESTING


@compiled
def _can_go_back(s: State, slot: int, computed: int, has_run_ahead: bool) -> bool:
    """Whether all that is read after `computed` tokens is still held and unchanged.

    Steps may have run ahead: then windows have moved on, and a state is that of later tokens. With
    spare blocks, only the worker that verified the last drafts knows which block has the state.
    """
    for group in range(s.scalars[c.NUM_GROUPS]):
        if s.holdings[slot, group, c.LEFT] > find_first_read(s, group, computed):
            return False
        if s.groups[group, c.KIND] >= c.IS_STATE and (
            has_run_ahead or s.groups[group, c.SPARE] > 0
        ):
            return False
    return True


@entry("state", "int")
def take_back(s: State, slot: int) -> None:
    """Take the blocks from a request that does not run; it computes its tokens again later."""
    _leave_batch(s, slot)
    s.requests[slot, c.NUM_COMPUTED] = 0
    s.requests[slot, c.NEXT_ITEM] = s.requests[slot, c.FIRST_ITEM]
    if s.requests[slot, c.STATUS] == c.HAS_LOADED:
        unpark(s, slot)


@compiled
def unpark(s: State, slot: int) -> None:
    """Restore the status that a request had before its load, which has finished."""
    s.requests[slot, c.STATUS] = s.requests[slot, c.PARKED_AS]
    s.scalars[c.NUM_RECEIVED] -= 1


@entry("state", "int")
def drop_blocks(s: State, slot: int) -> None:
    """Free the blocks of a request after an empty load; it keeps its batch row."""
    b.free_blocks(s, slot)
    s.requests[slot, c.NEXT_ITEM] = s.requests[slot, c.FIRST_ITEM]
    unpark(s, slot)


@compiled
def _may_give(s: State, slot: int) -> bool:
    """Whether a request that does not run holds blocks that can be taken from it; a load that has
    not finished keeps its blocks (P17)."""
    status = s.requests[slot, c.STATUS]
    has_computed = status != c.IS_LOADING and s.requests[slot, c.NUM_COMPUTED] > 0
    return bool(status == c.HAS_LOADED or has_computed)


@entry("state", "int")
def find_giver(s: State, needy: int) -> int:
    """Return the first request, other than `needy`, to lose its blocks; NONE if there is none.

    It does not run. Sessions that rest come before those with input, and the last in the order of
    the queues before the others.
    """
    found, is_found_resting = c.NONE, False
    for queue in (c.WAITING, c.SKIPPED, c.PASSED):
        slot = s.scalars[c.QUEUES + 2 * queue + 1]
        while slot != c.NONE:
            is_resting = s.requests[slot, c.STATUS] == c.IS_RESTING
            is_later = (
                s.scalars[c.IS_PRIORITY] != 0 and found != c.NONE and goes_before(s, found, slot)
            )
            is_sooner = is_resting and not is_found_resting
            if is_resting == is_found_resting:
                is_sooner = is_later
            if slot != needy and _may_give(s, slot) and (found == c.NONE or is_sooner):
                found, is_found_resting = slot, is_resting
            slot = s.requests[slot, c.PREVIOUS]
    return int(found)


@entry("state", "int", "int32 1", "int32 1")
def store_input(s: State, slot: int, tokens: Int32s, extras: Int32s) -> None:
    """Replace the tokens of a session by those that it keeps and its next input."""
    before = s.requests[slot, c.LAST_NODE]
    _count_extras(s, slot, -1)
    store_prompt(s, slot, tokens, extras)
    b.release_node(s, before)
    batch_row = s.requests[slot, c.BATCH_ROW]
    if batch_row != c.NONE:
        full = s.requests[slot, c.NUM_FULL]
        b.list_nodes(s, s.requests[slot, c.LAST_NODE], full, s.node_tables[batch_row])


# Branches: they hold the blocks of their parent


@entry("state", "int", "int", "int")
def branch(s: State, parent: int, child: int, common: int) -> None:
    """Let a branch hold the blocks of the common tokens that its parent has computed.

    First the parent's full blocks are published, so that each shared full block is in the prefix
    cache, and is not published again by the branch.
    """
    computed = s.requests[parent, c.NUM_COMPUTED]
    if computed == 0:
        return
    b.publish(s, parent, computed, min(computed, s.requests[parent, c.NUM_KNOWN]))
    tokens = _find_branch_point(
        s, parent, min(computed, common, s.requests[child, c.NUM_KNOWN] - 1)
    )
    if tokens == 0:
        return
    take_batch_row(s, child)
    own, other = s.requests[child, c.BATCH_ROW], s.requests[parent, c.BATCH_ROW]
    for group in range(s.scalars[c.NUM_GROUPS]):
        held = min(count_blocks(s, group, tokens), s.holdings[parent, group, c.HELD])
        left = min(s.holdings[parent, group, c.LEFT], held)
        published = min(s.holdings[parent, group, c.PUBLISHED], tokens // s.groups[group, c.SIZE])
        s.holdings[child, group, c.HELD], s.holdings[child, group, c.LEFT] = held, left
        s.holdings[child, group, c.PUBLISHED] = published
        for index in range(held):
            block = s.block_tables[group, other, index]
            s.block_tables[group, own, index] = block
            if index >= left:
                b.touch(s, block)
    s.requests[child, c.NUM_COMPUTED] = tokens
    s.requests[child, c.MAY_SHARE] = s.requests[parent, c.MAY_SHARE] = 1


@compiled
def _find_branch_point(s: State, parent: int, most: int) -> int:
    """Return the largest number of tokens, at most `most`, that a branch can start from.

    The blocks that the branch reads must be held, and the block that it writes next must not be
    published: a published block is not written again.
    """
    length, lower = most, -1
    while length != lower:
        lower = length
        for group in range(s.scalars[c.NUM_GROUPS]):
            size, left = s.groups[group, c.SIZE], s.holdings[parent, group, c.LEFT]
            index = length // size
            if length % size != 0 and index < s.holdings[parent, group, c.PUBLISHED]:
                length = index * size
            elif find_first_read(s, group, length) < min(left, count_blocks(s, group, length)):
                length -= 1
    return int(length)
