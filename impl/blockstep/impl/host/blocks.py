"""Blocks and contents: ref counts, the free queue and the prefix cache."""

from __future__ import annotations

from blockstep.impl.host import state as c
from blockstep.impl.host.jit import compiled, entry
from blockstep.impl.host.state import Int32s, State
from blockstep.spec.vocabulary import NULL_BLOCK

# The free queue (P1, P5)


@compiled
def unlink_free(s: State, block: int) -> None:
    """Remove `block` from the free queue, wherever it is."""
    before, after = s.blocks[block, c.PREVIOUS_FREE], s.blocks[block, c.NEXT_FREE]
    s.blocks[before, c.NEXT_FREE] = after
    s.blocks[after, c.PREVIOUS_FREE] = before
    s.scalars[c.NUM_FREE] -= 1


@compiled
def append_free(s: State, block: int) -> None:
    """Append `block` to the free queue, or put it before the head."""
    is_lifo = s.scalars[c.IS_LIFO] != 0
    before = NULL_BLOCK if is_lifo else s.blocks[NULL_BLOCK, c.PREVIOUS_FREE]
    after = s.blocks[before, c.NEXT_FREE]
    s.blocks[block, c.PREVIOUS_FREE], s.blocks[block, c.NEXT_FREE] = before, after
    s.blocks[before, c.NEXT_FREE] = s.blocks[after, c.PREVIOUS_FREE] = block
    s.scalars[c.NUM_FREE] += 1


@compiled
def take_block(s: State) -> int:
    """Take the first free block, and evict it from the prefix cache."""
    block = s.blocks[NULL_BLOCK, c.NEXT_FREE]
    unlink_free(s, block)
    s.blocks[block, c.REF_COUNT] = 1
    withdraw(s, block)
    return int(block)


@compiled
def touch(s: State, block: int) -> None:
    """Add a holder to `block`."""
    if s.blocks[block, c.REF_COUNT] == 0:
        unlink_free(s, block)
    s.blocks[block, c.REF_COUNT] += 1
    s.scalars[c.NUM_MOVES] += 1


@compiled
def free_range(s: State, group: int, batch_row: int, begin: int, end: int) -> None:
    """Free blocks of a table, last block first, so that its prefix is evicted last."""
    for place in range(begin, end):
        index = place if s.scalars[c.IS_LIFO] != 0 else end - 1 - (place - begin)
        block = s.block_tables[group, batch_row, index]
        if block != NULL_BLOCK:
            drop_hold(s, block)


@compiled
def free_blocks(s: State, slot: int) -> None:
    """Drop the block tables of a request, group by group."""
    batch_row, is_first, has_fence = s.requests[slot, c.BATCH_ROW], True, is_fenced(s, slot)
    s.scalars[c.NUM_MOVES] += 1
    s.requests[slot, c.QUIET] = 0
    for group in range(s.scalars[c.NUM_GROUPS]):
        begin, end = s.holdings[slot, group, c.LEFT], s.holdings[slot, group, c.HELD]
        if has_fence:
            is_first = defer_range(s, slot, group, begin, end, is_first)
        else:
            free_range(s, group, batch_row, begin, end)
        for column in range(c.HOLDING_COLUMNS):
            s.holdings[slot, group, column] = 0


@compiled
def is_fenced(s: State, slot: int) -> bool:
    """Whether blocks that a request frees become free only with the commit of a frame (P17).

    A later frame runs after that one, but a store does not: it could load into the blocks while the
    frame reads or writes them (upstream #45357, #48481).
    """
    is_later = s.requests[slot, c.LAST_FRAME] > s.scalars[c.LAST_ANSWERED]
    return bool(s.scalars[c.HAS_FENCES] != 0 and is_later)


@compiled
def defer_range(s: State, slot: int, group: int, begin: int, end: int, is_first: bool) -> bool:
    """Free blocks of a table with the commit of the request's last frame; return whether none has
    been listed yet. The caller reserves room."""
    batch_row = s.requests[slot, c.BATCH_ROW]
    for index in range(begin, end):
        block = s.block_tables[group, batch_row, index]
        if block != NULL_BLOCK:
            at = s.scalars[c.NUM_DEFERRED]
            s.copies[at, 0], s.copies[at, 1] = s.requests[slot, c.LAST_FRAME], block
            s.copies[at, 2] = is_first
            s.scalars[c.NUM_DEFERRED] = at + 1
            is_first = False
    return is_first


@entry("state", "int")
def free_deferred(s: State, frame_id: int) -> None:
    """Free the blocks that waited for a frame: it is committed and accesses no block any more."""
    s.scalars[c.LAST_ANSWERED] = frame_id
    at, kept, count = 0, 0, s.scalars[c.NUM_DEFERRED]
    while at < count:
        end = at + 1
        while end < count and s.copies[end, 2] == 0:
            end += 1
        is_due = s.copies[at, 0] == frame_id
        for index in range(end - at):
            if is_due:
                last = at + index if s.scalars[c.IS_LIFO] != 0 else end - 1 - index
                drop_hold(s, s.copies[last, 1])
            else:
                for column in range(3):
                    s.copies[kept, column] = s.copies[at + index, column]
                kept += 1
        at = end
    s.scalars[c.NUM_DEFERRED] = kept


@compiled
def drop_hold(s: State, block: int) -> None:
    """Remove a holder from `block`."""
    s.blocks[block, c.REF_COUNT] -= 1
    if s.blocks[block, c.REF_COUNT] == 0:
        append_free(s, block)


@entry("state", "int32 1")
def free_list(s: State, found: Int32s) -> None:
    """Free the blocks of a list, last block first; null blocks are left out."""
    s.scalars[c.NUM_MOVES] += 1
    for at in range(len(found)):
        block = found[at] if s.scalars[c.IS_LIFO] != 0 else found[len(found) - 1 - at]
        if block != NULL_BLOCK:
            drop_hold(s, block)


@entry("state", "int32 1")
def touch_list(s: State, found: Int32s) -> None:
    """Add a holder to each block of a list; null blocks are left out."""
    for block in found:
        if block != NULL_BLOCK:
            touch(s, block)


# The prefix cache (P3, P4)


@compiled
def publish(s: State, slot: int, computed: int, tokens: int) -> None:
    """Publish the full blocks of the first `tokens` tokens of a running request.

    The tokens after the first `computed` ones are written in this step.
    """
    if s.scalars[c.HAS_CACHE] == 0:
        return
    for group in range(s.scalars[c.NUM_GROUPS]):
        is_full = tokens >= (s.holdings[slot, group, c.PUBLISHED] + 1) * s.groups[group, c.SIZE]
        if is_full and s.requests[slot, c.UNSETTLED] == 0:
            _publish_group(s, slot, group, computed, tokens // s.groups[group, c.SIZE])


@compiled
def _publish_group(s: State, slot: int, group: int, computed: int, full: int) -> None:
    batch_row, links = s.requests[slot, c.BATCH_ROW], s.groups[group, c.LINKS]
    first, kind = s.holdings[slot, group, c.PUBLISHED], c.STORED
    is_state = s.groups[group, c.KIND] >= c.IS_STATE
    computed_blocks = computed // s.groups[group, c.SIZE]
    for index in range(max(first, s.holdings[slot, group, c.LEFT]), full):
        block = s.block_tables[group, batch_row, index]
        if block == NULL_BLOCK:
            kind = c.STORED
            continue
        node = s.node_tables[batch_row, (index + 1) * links - 1]
        last = s.carriers[node, group, c.LAST_BLOCK]
        s.blocks[block, c.NODE], s.blocks[block, c.GROUP] = node, group
        s.blocks[block, c.PREVIOUS_SAME], s.blocks[block, c.NEXT_SAME] = last, c.NONE
        if last == c.NONE:
            s.carriers[node, group, c.FIRST_BLOCK] = block
        else:
            s.blocks[last, c.NEXT_SAME] = block
        s.carriers[node, group, c.LAST_BLOCK] = block
        s.nodes[node, c.NUM_USES] += 1
        if is_state:
            s.blocks[block, c.STATE_STEP] = (
                s.scalars[c.STEP] if index >= computed_blocks else c.NONE
            )
        if s.scalars[c.HAS_EVENTS] != 0:
            log(s, kind, node, group)
            kind = c.STORED_NEXT
    s.holdings[slot, group, c.PUBLISHED] = full


@compiled
def log(s: State, kind: int, node: int, group: int) -> None:
    """Log a KV event; its node stays until the log is emptied. The caller reserves room."""
    at = s.scalars[c.NUM_LOGGED]
    s.log[at, 0], s.log[at, 1], s.log[at, 2] = kind, node, group
    if node != c.NONE:
        s.nodes[node, c.NUM_USES] += 1
    s.scalars[c.NUM_LOGGED] = at + 1


@entry("state")
def forget_log(s: State) -> None:
    """Empty the log, and release its nodes."""
    for at in range(s.scalars[c.NUM_LOGGED]):
        release_node(s, s.log[at, 1])
    s.scalars[c.NUM_LOGGED] = 0


@compiled
def withdraw(s: State, block: int) -> None:
    """Remove `block` from the prefix cache, if it is cached."""
    node = s.blocks[block, c.NODE]
    if node == c.NONE:
        return
    if s.scalars[c.HAS_EVENTS] != 0:
        log(s, c.REMOVED, node, s.blocks[block, c.GROUP])
    _withdraw(s, block)


@compiled
def _withdraw(s: State, block: int) -> None:
    node, group = s.blocks[block, c.NODE], s.blocks[block, c.GROUP]
    before, after = s.blocks[block, c.PREVIOUS_SAME], s.blocks[block, c.NEXT_SAME]
    if before == c.NONE:
        s.carriers[node, group, c.FIRST_BLOCK] = after
    else:
        s.blocks[before, c.NEXT_SAME] = after
    if after == c.NONE:
        s.carriers[node, group, c.LAST_BLOCK] = before
    else:
        s.blocks[after, c.PREVIOUS_SAME] = before
    s.blocks[block, c.NODE] = c.NONE
    release_node(s, node)


# Nodes


@compiled
def _hash_content(parent: int, extras: int, tokens: Int32s) -> int:
    """Return a hash below 2**30; no intermediate value may overflow, in Python or in C."""
    found = (parent * 1_000_003 + extras * 8_191 + 12_345) & 0x3FFFFFFF
    for token in tokens:
        found = (found * 1_664_525 + int(token) * 22_695 + 1) & 0x3FFFFFFF
        found ^= found >> 13
    return found


@compiled
def find_node(s: State, parent: int, extras: int, tokens: Int32s) -> int:
    """Return the node of a full block's content, made if there is none; the caller reserves
    room."""
    hashed = _hash_content(int(parent), int(extras), tokens)
    bucket = hashed & (len(s.nodes) - 1)
    node = int(s.nodes[bucket, c.BUCKET])
    while node != c.NONE:
        if (
            s.nodes[node, c.HASH] == hashed
            and s.nodes[node, c.PARENT] == parent
            and s.nodes[node, c.NODE_EXTRAS] == extras
            and _are_equal(s.node_tokens[node], tokens)
        ):
            return node
        node = int(s.nodes[node, c.NEXT_NODE])
    node = int(s.scalars[c.FREE_NODE])
    s.scalars[c.FREE_NODE] = s.nodes[node, c.NEXT_NODE]
    s.scalars[c.NUM_FREE_NODES] -= 1
    s.scalars[c.NUM_NODES_BORN] += 1
    s.nodes[node, c.PARENT], s.nodes[node, c.NODE_EXTRAS] = parent, extras
    s.nodes[node, c.HASH], s.nodes[node, c.NEXT_NODE] = hashed, s.nodes[bucket, c.BUCKET]
    s.nodes[node, c.NUM_USES] = 0
    for group in range(s.scalars[c.NUM_GROUPS]):
        s.carriers[node, group, c.FIRST_BLOCK] = s.carriers[node, group, c.LAST_BLOCK] = c.NONE
    s.nodes[node, c.SERIAL] = s.scalars[c.NUM_NODES_BORN] & 0x7FFFFFFF
    for index in range(len(tokens)):
        s.node_tokens[node, index] = tokens[index]
    s.nodes[bucket, c.BUCKET] = node
    s.extras_uses[extras] += 1
    if parent != c.NONE:
        s.nodes[parent, c.NUM_USES] += 1
    return node


@compiled
def _are_equal(some: Int32s, others: Int32s) -> bool:
    for index in range(len(some)):  # noqa: SIM110 - compiled
        if some[index] != others[index]:
            return False
    return True


@compiled
def release_node(s: State, node: int) -> None:
    """Remove one use of a node; free it if it has none left, and then continue with its parent."""
    while node != c.NONE:
        s.nodes[node, c.NUM_USES] -= 1
        if s.nodes[node, c.NUM_USES] > 0:
            return
        bucket = s.nodes[node, c.HASH] & (len(s.nodes) - 1)
        after = s.nodes[node, c.NEXT_NODE]
        other = s.nodes[bucket, c.BUCKET]
        if other == node:
            s.nodes[bucket, c.BUCKET] = after
        else:
            while s.nodes[other, c.NEXT_NODE] != node:
                other = s.nodes[other, c.NEXT_NODE]
            s.nodes[other, c.NEXT_NODE] = after
        s.extras_uses[s.nodes[node, c.NODE_EXTRAS]] -= 1
        s.nodes[node, c.NEXT_NODE] = s.scalars[c.FREE_NODE]
        s.scalars[c.FREE_NODE] = node
        s.scalars[c.NUM_FREE_NODES] += 1
        node = s.nodes[node, c.PARENT]


@compiled
def list_nodes(s: State, last: int, count: int, found: Int32s) -> None:
    """Write the path of `count` nodes that ends with `last` into `found`, first node first."""
    node = last
    for index in range(count - 1, -1, -1):
        found[index] = node
        node = s.nodes[node, c.PARENT]


@entry("state")
def withdraw_all(s: State) -> None:
    """Empty the prefix cache (P25)."""
    for block in range(len(s.blocks)):
        if s.blocks[block, c.NODE] != c.NONE:
            _withdraw(s, block)
    if s.scalars[c.HAS_EVENTS] != 0:
        log(s, c.CLEARED, c.NONE, 0)
