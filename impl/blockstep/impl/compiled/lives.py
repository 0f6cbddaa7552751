"""Lives: the state of a request from its submission to its end."""

from __future__ import annotations

import numpy as np

from blockstep.impl.compiled.blocks import (
    find_node,
    free_blocks,
    list_nodes,
    publish,
    release_node,
    touch,
    withdraw,
)
from blockstep.impl.compiled.groups import count_blocks, find_first_read
from blockstep.impl.compiled.jit import compiled, entry
from blockstep.impl.compiled.queues import goes_before, leave_queue, prepend
from blockstep.impl.compiled.state import (
    ADAPTER,
    BIRTH,
    BLOCK_SIZE,
    EXTRAS,
    FIRST_EXTRAS,
    FIRST_ITEM,
    FREE_SEAT,
    HAS_LOADED,
    HELD,
    IS_LOADING,
    IS_PREEMPTED,
    IS_PRIORITY,
    IS_RESTING,
    IS_RUNNING,
    IS_STATE,
    KIND,
    LAST_NODE,
    LAST_SAMPLE,
    LEFT,
    MAY_SHARE,
    MORE_STOPS,
    NEXT_ITEM,
    NEXT_SEAT,
    NONE,
    NUM_ADAPTERS,
    NUM_BORN,
    NUM_COMPUTED,
    NUM_DRAFTS,
    NUM_FULL,
    NUM_GROUPS,
    NUM_IN_DOUBT,
    NUM_KNOWN,
    NUM_MORE_STOPS,
    NUM_PROMISED,
    NUM_PROMPT,
    NUM_RECEIVED,
    NUM_RUNNING,
    NUM_USES,
    PARENT,
    PARKED_AS,
    PASSED,
    PREEMPTIONS,
    PREVIOUS,
    PUBLISHED,
    QUEUES,
    ROW,
    RUNNING,
    SEAT,
    SIZE,
    SKIPPED,
    SPARE,
    STATUS,
    TIMES_PREEMPTED,
    UNSETTLED,
    WAITING,
    Int32s,
    State,
)

# Tokens


@entry("state", "int", "int32 1", "int32 1")
def store_prompt(s: State, slot: int, tokens: Int32s, extras: Int32s) -> None:
    """Store the tokens of a new request; `extras` are those of each full block of its prompt."""
    size = s.scalars[BLOCK_SIZE]
    full = len(tokens) // size
    node = NONE
    for index in range(full):
        node = find_node(s, node, extras[index], tokens[index * size : (index + 1) * size])
    if node != NONE:
        s.nodes[node, NUM_USES] += 1
    s.requests[slot, LAST_NODE], s.requests[slot, NUM_FULL] = node, full
    for index in range(full * size, len(tokens)):
        s.tails[slot, index - full * size] = tokens[index]


@compiled
def append_token(s: State, slot: int, token: int) -> None:
    """Append a verified output token."""
    size, index = s.scalars[BLOCK_SIZE], s.requests[slot, NUM_FULL]
    within = s.requests[slot, NUM_KNOWN] - index * size
    s.tails[slot, within] = token
    s.requests[slot, NUM_KNOWN] += 1
    if within + 1 < size:
        return
    s.requests[slot, NUM_FULL] = index + 1
    before = s.requests[slot, LAST_NODE]
    is_first = index == s.requests[slot, NUM_PROMPT] // size
    extras = s.requests[slot, FIRST_EXTRAS] if is_first else s.requests[slot, EXTRAS]
    node = find_node(s, before, extras, s.tails[slot])
    s.nodes[node, NUM_USES] += 1
    s.requests[slot, LAST_NODE] = node
    if before != NONE:
        s.nodes[before, NUM_USES] -= 1  # now used through the new node
    if s.requests[slot, SEAT] != NONE:
        s.node_tables[s.requests[slot, SEAT], index] = node


@entry("state", "int")
def get_tokens(s: State, slot: int) -> Int32s:
    """Return all known tokens of a request."""
    size, known = s.scalars[BLOCK_SIZE], s.requests[slot, NUM_KNOWN]
    found = np.empty(known, np.int32)
    full, node = s.requests[slot, NUM_FULL], s.requests[slot, LAST_NODE]
    for index in range(full - 1, -1, -1):
        found[index * size : (index + 1) * size] = s.node_tokens[node]
        node = s.nodes[node, PARENT]
    for index in range(full * size, known):
        found[index] = s.tails[slot, index - full * size]
    return found


# Batch rows, and the running list


@compiled
def take_seat(s: State, slot: int) -> None:
    """Give a request a batch row, unless it has one."""
    if s.requests[slot, SEAT] != NONE:
        return
    found = s.scalars[FREE_SEAT]
    s.scalars[FREE_SEAT] = s.lines[found, NEXT_SEAT]
    s.requests[slot, SEAT] = found
    full = s.requests[slot, NUM_FULL]
    list_nodes(s, s.requests[slot, LAST_NODE], full, s.node_tables[found])


@compiled
def seat(s: State, slot: int) -> None:
    """Append a request to the running list, with a batch row (`seat`), unless it has one."""
    take_seat(s, slot)
    s.lines[s.scalars[NUM_RUNNING], RUNNING] = slot
    s.scalars[NUM_RUNNING] += 1
    s.requests[slot, STATUS] = IS_RUNNING
    _count_adapter(s, slot, 1)


@compiled
def _count_adapter(s: State, slot: int, change: int) -> None:
    """Count a request that begins or ceases to run for its adapter, if those are limited (P9)."""
    adapter = s.requests[slot, ADAPTER]
    if adapter > 0:
        before = s.adapters[adapter]
        s.adapters[adapter] = before + change
        s.scalars[NUM_ADAPTERS] += int(before + change > 0) - int(before > 0)


@compiled
def _unseat(s: State, slot: int) -> None:
    """Free the blocks and the batch row of a request."""
    free_blocks(s, slot)
    found = s.requests[slot, SEAT]
    s.lines[found, NEXT_SEAT] = s.scalars[FREE_SEAT]
    s.scalars[FREE_SEAT] = found
    s.requests[slot, SEAT], s.requests[slot, MAY_SHARE] = NONE, 0


@compiled
def find_position(s: State, slot: int) -> int:
    """Return its position in the running list, searched from the end."""
    position = s.scalars[NUM_RUNNING] - 1
    while s.lines[position, RUNNING] != slot:
        position -= 1
    return int(position)


@compiled
def leave_running(s: State, position: int) -> None:
    """Remove the request at `position` from the running list."""
    last = s.scalars[NUM_RUNNING] - 1
    _count_adapter(s, s.lines[position, RUNNING], -1)
    for index in range(position, last):
        s.lines[index, RUNNING] = s.lines[index + 1, RUNNING]
    s.scalars[NUM_RUNNING] = last


# Preemption and the end


@compiled
def preempt(s: State, slot: int) -> None:
    """Preempt a request that was removed from the running list; it will start again.

    Its verified tokens and its placeholders stay: frames in flight continue, and what they sample
    is delivered (P13). Blocks that were published for work of this step, which now does not run,
    are removed from the prefix cache (P4; upstream #43569).
    """
    found = s.requests[slot, SEAT]
    for group in range(s.scalars[NUM_GROUPS]):
        first = s.requests[slot, NUM_COMPUTED] // s.groups[group, SIZE]
        for index in range(first, s.holdings[slot, group, HELD]):
            withdraw(s, s.block_tables[group, found, index])
    _unseat(s, slot)
    s.requests[slot, NUM_COMPUTED] = s.requests[slot, NUM_DRAFTS] = 0
    s.requests[slot, NEXT_ITEM] = s.requests[slot, FIRST_ITEM]
    s.requests[slot, ROW], s.requests[slot, UNSETTLED] = NONE, 0
    s.requests[slot, TIMES_PREEMPTED] += 1
    s.requests[slot, STATUS] = IS_PREEMPTED
    s.scalars[PREEMPTIONS] += 1
    prepend(s, WAITING, slot)


@entry("state", "int")
def end(s: State, slot: int) -> None:
    """End an unfinished request, whether it runs or waits."""
    if s.requests[slot, STATUS] == IS_RUNNING:
        leave_running(s, find_position(s, slot))
    else:
        leave_queue(s, slot)
    if s.requests[slot, SEAT] != NONE:
        _unseat(s, slot)
    s.scalars[NUM_RECEIVED] -= int(s.requests[slot, STATUS] == HAS_LOADED)
    release_node(s, s.requests[slot, LAST_NODE])
    s.scalars[NUM_MORE_STOPS] -= s.requests[slot, MORE_STOPS]
    s.requests[slot, BIRTH] = 0


@entry("state", "int")
def preempt_one(s: State, slot: int) -> None:
    """Preempt a running request."""
    leave_running(s, find_position(s, slot))
    preempt(s, slot)


@entry("state", "int")
def publish_computed(s: State, slot: int) -> None:
    """Publish the full blocks of the computed tokens of a request, once their load is confirmed."""
    computed = s.requests[slot, NUM_COMPUTED]
    publish(s, slot, computed, min(computed, s.requests[slot, NUM_KNOWN]))


@entry("state")
def preempt_all(s: State) -> None:
    """Preempt all running requests, the last first (P25)."""
    while s.scalars[NUM_RUNNING] > 0:
        last = s.scalars[NUM_RUNNING] - 1
        slot = s.lines[last, RUNNING]
        leave_running(s, last)
        preempt(s, slot)


# Sessions: at a stop they rest, and keep their blocks


@compiled
def rest(s: State, slot: int) -> None:
    """Stop a session, which is in no queue then; rows of later frames are of a life before.

    All tokens from the last one on are uncomputed, even those that frames in flight compute.
    """
    if s.requests[slot, STATUS] == IS_RUNNING:
        leave_running(s, find_position(s, slot))
        computed = s.requests[slot, NUM_KNOWN] - 1
        has_run_ahead = s.requests[slot, NUM_COMPUTED] > computed
        s.requests[slot, NUM_COMPUTED] = computed
        if not _can_go_back(s, slot, computed, has_run_ahead):
            take_back(s, slot)
    else:
        leave_queue(s, slot)
    s.scalars[NUM_BORN] += 1
    s.requests[slot, BIRTH] = s.scalars[NUM_BORN]
    s.requests[slot, LAST_SAMPLE] = NONE
    s.requests[slot, NUM_PROMISED] = s.requests[slot, NUM_IN_DOUBT] = 0
    s.requests[slot, NUM_DRAFTS] = 0
    s.requests[slot, STATUS] = IS_RESTING


@compiled
def _can_go_back(s: State, slot: int, computed: int, has_run_ahead: bool) -> bool:
    """Whether all that is read after `computed` tokens is still held and unchanged.

    Steps may have run ahead: then windows have moved on, and a state is that of later tokens. With
    spare blocks, only the worker that verified the last drafts knows which block has the state.
    """
    for group in range(s.scalars[NUM_GROUPS]):
        if s.holdings[slot, group, LEFT] > find_first_read(s, group, computed):
            return False
        if s.groups[group, KIND] >= IS_STATE and (has_run_ahead or s.groups[group, SPARE] > 0):
            return False
    return True


@entry("state", "int")
def take_back(s: State, slot: int) -> None:
    """Take the blocks from a request that does not run; it computes its tokens again later."""
    _unseat(s, slot)
    s.requests[slot, NUM_COMPUTED] = 0
    s.requests[slot, NEXT_ITEM] = s.requests[slot, FIRST_ITEM]
    if s.requests[slot, STATUS] == HAS_LOADED:
        unpark(s, slot)


@compiled
def unpark(s: State, slot: int) -> None:
    """Restore the status that a request had before its load, which has finished."""
    s.requests[slot, STATUS] = s.requests[slot, PARKED_AS]
    s.scalars[NUM_RECEIVED] -= 1


@entry("state", "int")
def drop_blocks(s: State, slot: int) -> None:
    """Free the blocks of a request after an empty load; it keeps its batch row."""
    free_blocks(s, slot)
    s.requests[slot, NEXT_ITEM] = s.requests[slot, FIRST_ITEM]
    unpark(s, slot)


@compiled
def _may_give(s: State, slot: int) -> bool:
    """Whether a request that does not run holds blocks that can be taken from it; a load that has
    not finished keeps its blocks (P17)."""
    status = s.requests[slot, STATUS]
    has_computed = status != IS_LOADING and s.requests[slot, NUM_COMPUTED] > 0
    return bool(status == HAS_LOADED or has_computed)


@entry("state", "int")
def find_giver(s: State, needy: int) -> int:
    """Return the first request, other than `needy`, to lose its blocks; NONE if there is none.

    It does not run. Sessions that rest come before those with input, and the last in the order of
    the queues before the others.
    """
    found, is_found_resting = NONE, False
    for queue in (WAITING, SKIPPED, PASSED):
        slot = s.scalars[QUEUES + 2 * queue + 1]
        while slot != NONE:
            is_resting = s.requests[slot, STATUS] == IS_RESTING
            is_later = s.scalars[IS_PRIORITY] != 0 and found != NONE and goes_before(s, found, slot)
            is_sooner = is_resting and not is_found_resting
            if is_resting == is_found_resting:
                is_sooner = is_later
            if slot != needy and _may_give(s, slot) and (found == NONE or is_sooner):
                found, is_found_resting = slot, is_resting
            slot = s.requests[slot, PREVIOUS]
    return int(found)


@entry("state", "int", "int32 1", "int32 1")
def store_input(s: State, slot: int, tokens: Int32s, extras: Int32s) -> None:
    """Replace the tokens of a session by those that it keeps and its next input."""
    before = s.requests[slot, LAST_NODE]
    store_prompt(s, slot, tokens, extras)
    release_node(s, before)
    seated = s.requests[slot, SEAT]
    if seated != NONE:
        full = s.requests[slot, NUM_FULL]
        list_nodes(s, s.requests[slot, LAST_NODE], full, s.node_tables[seated])


# Branches: they hold the blocks of their parent


@entry("state", "int", "int", "int")
def branch(s: State, parent: int, child: int, common: int) -> None:
    """Let a branch hold the blocks of the common tokens that its parent has computed.

    First the parent's full blocks are published, so that each shared full block is in the prefix
    cache, and is not published again by the branch.
    """
    computed = s.requests[parent, NUM_COMPUTED]
    if computed == 0:
        return
    publish(s, parent, computed, min(computed, s.requests[parent, NUM_KNOWN]))
    tokens = _find_branch_point(s, parent, min(computed, common, s.requests[child, NUM_KNOWN] - 1))
    if tokens == 0:
        return
    take_seat(s, child)
    own, other = s.requests[child, SEAT], s.requests[parent, SEAT]
    for group in range(s.scalars[NUM_GROUPS]):
        held = min(count_blocks(s, group, tokens), s.holdings[parent, group, HELD])
        left = min(s.holdings[parent, group, LEFT], held)
        published = min(s.holdings[parent, group, PUBLISHED], tokens // s.groups[group, SIZE])
        s.holdings[child, group, HELD], s.holdings[child, group, LEFT] = held, left
        s.holdings[child, group, PUBLISHED] = published
        for index in range(held):
            block = s.block_tables[group, other, index]
            s.block_tables[group, own, index] = block
            if index >= left:
                touch(s, block)
    s.requests[child, NUM_COMPUTED] = tokens
    s.requests[child, MAY_SHARE] = s.requests[parent, MAY_SHARE] = 1


@compiled
def _find_branch_point(s: State, parent: int, most: int) -> int:
    """Return the largest number of tokens, at most `most`, that a branch can start from.

    The blocks that the branch reads must be held, and the block that it writes next must not be
    published: a published block is not written again.
    """
    length, lower = most, -1
    while length != lower:
        lower = length
        for group in range(s.scalars[NUM_GROUPS]):
            size, left = s.groups[group, SIZE], s.holdings[parent, group, LEFT]
            index = length // size
            if length % size != 0 and index < s.holdings[parent, group, PUBLISHED]:
                length = index * size
            elif find_first_read(s, group, length) < min(left, count_blocks(s, group, length)):
                length -= 1
    return int(length)
