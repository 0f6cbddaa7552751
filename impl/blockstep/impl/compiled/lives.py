"""Lives: the state of a request from its submission to its end."""

from __future__ import annotations

import numpy as np

from blockstep.impl.compiled.blocks import (
    find_node,
    free_blocks,
    list_nodes,
    release_node,
    withdraw,
)
from blockstep.impl.compiled.jit import compiled, entry
from blockstep.impl.compiled.queues import leave_queue, prepend
from blockstep.impl.compiled.state import (
    BIRTH,
    BLOCK_SIZE,
    EXTRAS,
    FIRST_EXTRAS,
    FREE_SEAT,
    IS_PREEMPTED,
    IS_RUNNING,
    LAST_NODE,
    MORE_STOPS,
    NEXT_SEAT,
    NONE,
    NUM_COMPUTED,
    NUM_DRAFTS,
    NUM_FULL,
    NUM_HELD,
    NUM_KNOWN,
    NUM_MORE_STOPS,
    NUM_PROMPT,
    NUM_RUNNING,
    NUM_USES,
    PARENT,
    PREEMPTIONS,
    ROW,
    RUNNING,
    SEAT,
    STATUS,
    TIMES_PREEMPTED,
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
def seat(s: State, slot: int) -> None:
    """Append a request to the running list, with a batch row (`seat`)."""
    found = s.scalars[FREE_SEAT]
    s.scalars[FREE_SEAT] = s.lines[found, NEXT_SEAT]
    s.requests[slot, SEAT] = found
    full = s.requests[slot, NUM_FULL]
    list_nodes(s, s.requests[slot, LAST_NODE], full, s.node_tables[found])
    s.lines[s.scalars[NUM_RUNNING], RUNNING] = slot
    s.scalars[NUM_RUNNING] += 1
    s.requests[slot, STATUS] = IS_RUNNING


@compiled
def _unseat(s: State, slot: int) -> None:
    """Free the blocks and the batch row of a request."""
    free_blocks(s, slot)
    found = s.requests[slot, SEAT]
    s.lines[found, NEXT_SEAT] = s.scalars[FREE_SEAT]
    s.scalars[FREE_SEAT] = found
    s.requests[slot, SEAT] = NONE


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
    size, found = s.scalars[BLOCK_SIZE], s.requests[slot, SEAT]
    for index in range(s.requests[slot, NUM_COMPUTED] // size, s.requests[slot, NUM_HELD]):
        withdraw(s, s.block_tables[found, index])
    _unseat(s, slot)
    s.requests[slot, NUM_COMPUTED] = s.requests[slot, NUM_DRAFTS] = 0
    s.requests[slot, ROW] = NONE
    s.requests[slot, TIMES_PREEMPTED] += 1
    s.requests[slot, STATUS] = IS_PREEMPTED
    s.scalars[PREEMPTIONS] += 1
    prepend(s, WAITING, slot)


@entry("state", "int")
def end(s: State, slot: int) -> None:
    """End an unfinished request, whether it runs or waits."""
    if s.requests[slot, STATUS] == IS_RUNNING:
        leave_running(s, find_position(s, slot))
        _unseat(s, slot)
    else:
        leave_queue(s, slot)
    release_node(s, s.requests[slot, LAST_NODE])
    s.scalars[NUM_MORE_STOPS] -= s.requests[slot, MORE_STOPS]
    s.requests[slot, BIRTH] = 0


@entry("state")
def preempt_all(s: State) -> None:
    """Preempt all running requests, the last first (P25)."""
    while s.scalars[NUM_RUNNING] > 0:
        last = s.scalars[NUM_RUNNING] - 1
        s.scalars[NUM_RUNNING] = last
        preempt(s, s.lines[last, RUNNING])
