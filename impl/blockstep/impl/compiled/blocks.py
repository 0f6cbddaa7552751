"""Blocks and contents: ref counts, the free queue and the prefix cache."""

from __future__ import annotations

from blockstep.impl.compiled.jit import compiled, entry
from blockstep.impl.compiled.state import (
    BLOCK_SIZE,
    BUCKET,
    FIRST_BLOCK,
    FREE_NODE,
    HAS_CACHE,
    HASH,
    LAST_BLOCK,
    NEXT_FREE,
    NEXT_NODE,
    NEXT_SAME,
    NODE,
    NODE_EXTRAS,
    NONE,
    NUM_FREE,
    NUM_FREE_NODES,
    NUM_HELD,
    NUM_NODES_BORN,
    NUM_PUBLISHED,
    NUM_USES,
    PARENT,
    PREVIOUS_FREE,
    PREVIOUS_SAME,
    REF_COUNT,
    SEAT,
    SERIAL,
    Int32s,
    State,
)
from blockstep.spec.vocabulary import NULL_BLOCK

# The free queue (P1, P5)


@compiled
def unlink_free(s: State, block: int) -> None:
    """Remove `block` from the free queue, wherever it is."""
    before, after = s.blocks[block, PREVIOUS_FREE], s.blocks[block, NEXT_FREE]
    s.blocks[before, NEXT_FREE] = after
    s.blocks[after, PREVIOUS_FREE] = before
    s.scalars[NUM_FREE] -= 1


@compiled
def append_free(s: State, block: int) -> None:
    """Append `block` to the free queue."""
    last = s.blocks[NULL_BLOCK, PREVIOUS_FREE]
    s.blocks[block, PREVIOUS_FREE], s.blocks[block, NEXT_FREE] = last, NULL_BLOCK
    s.blocks[last, NEXT_FREE] = s.blocks[NULL_BLOCK, PREVIOUS_FREE] = block
    s.scalars[NUM_FREE] += 1


@compiled
def take_blocks(s: State, slot: int, count: int) -> None:
    """Append `count` free blocks to a block table, and evict them from the prefix cache."""
    seat, held = s.requests[slot, SEAT], s.requests[slot, NUM_HELD]
    for index in range(held, held + count):
        block = s.blocks[NULL_BLOCK, NEXT_FREE]
        unlink_free(s, block)
        s.blocks[block, REF_COUNT] = 1
        withdraw(s, block)
        s.block_tables[seat, index] = block
    s.requests[slot, NUM_HELD] = held + count


@compiled
def touch(s: State, block: int) -> None:
    """Add a holder to `block`."""
    if s.blocks[block, REF_COUNT] == 0:
        unlink_free(s, block)
    s.blocks[block, REF_COUNT] += 1


@compiled
def free_blocks(s: State, slot: int) -> None:
    """Drop a block table, last block first, so that its prefix is evicted last."""
    seat = s.requests[slot, SEAT]
    for index in range(s.requests[slot, NUM_HELD] - 1, -1, -1):
        block = s.block_tables[seat, index]
        s.blocks[block, REF_COUNT] -= 1
        if s.blocks[block, REF_COUNT] == 0:
            append_free(s, block)
    s.requests[slot, NUM_HELD] = s.requests[slot, NUM_PUBLISHED] = 0


# The prefix cache (P3, P4)


@compiled
def publish(s: State, slot: int, tokens: int) -> None:
    """Publish the full blocks of the first `tokens` tokens of a running request."""
    first, size = s.requests[slot, NUM_PUBLISHED], s.scalars[BLOCK_SIZE]
    if tokens < (first + 1) * size or s.scalars[HAS_CACHE] == 0:
        return
    full, seat = tokens // size, s.requests[slot, SEAT]
    for index in range(first, full):
        block, node = s.block_tables[seat, index], s.node_tables[seat, index]
        last = s.nodes[node, LAST_BLOCK]
        s.blocks[block, NODE] = node
        s.blocks[block, PREVIOUS_SAME], s.blocks[block, NEXT_SAME] = last, NONE
        if last == NONE:
            s.nodes[node, FIRST_BLOCK] = block
        else:
            s.blocks[last, NEXT_SAME] = block
        s.nodes[node, LAST_BLOCK] = block
        s.nodes[node, NUM_USES] += 1
    s.requests[slot, NUM_PUBLISHED] = full


@compiled
def withdraw(s: State, block: int) -> None:
    """Remove `block` from the prefix cache, if it is cached."""
    node = s.blocks[block, NODE]
    if node == NONE:
        return
    before, after = s.blocks[block, PREVIOUS_SAME], s.blocks[block, NEXT_SAME]
    if before == NONE:
        s.nodes[node, FIRST_BLOCK] = after
    else:
        s.blocks[before, NEXT_SAME] = after
    if after == NONE:
        s.nodes[node, LAST_BLOCK] = before
    else:
        s.blocks[after, PREVIOUS_SAME] = before
    s.blocks[block, NODE] = NONE
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
    node = int(s.nodes[bucket, BUCKET])
    while node != NONE:
        if (
            s.nodes[node, HASH] == hashed
            and s.nodes[node, PARENT] == parent
            and s.nodes[node, NODE_EXTRAS] == extras
            and _are_equal(s.node_tokens[node], tokens)
        ):
            return node
        node = int(s.nodes[node, NEXT_NODE])
    node = int(s.scalars[FREE_NODE])
    s.scalars[FREE_NODE] = s.nodes[node, NEXT_NODE]
    s.scalars[NUM_FREE_NODES] -= 1
    s.scalars[NUM_NODES_BORN] += 1
    s.nodes[node, PARENT], s.nodes[node, NODE_EXTRAS] = parent, extras
    s.nodes[node, HASH], s.nodes[node, NEXT_NODE] = hashed, s.nodes[bucket, BUCKET]
    s.nodes[node, NUM_USES] = 0
    s.nodes[node, FIRST_BLOCK] = s.nodes[node, LAST_BLOCK] = NONE
    s.nodes[node, SERIAL] = s.scalars[NUM_NODES_BORN] & 0x7FFFFFFF
    for index in range(len(tokens)):
        s.node_tokens[node, index] = tokens[index]
    s.nodes[bucket, BUCKET] = node
    s.extras_uses[extras] += 1
    if parent != NONE:
        s.nodes[parent, NUM_USES] += 1
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
    while node != NONE:
        s.nodes[node, NUM_USES] -= 1
        if s.nodes[node, NUM_USES] > 0:
            return
        bucket = s.nodes[node, HASH] & (len(s.nodes) - 1)
        after = s.nodes[node, NEXT_NODE]
        other = s.nodes[bucket, BUCKET]
        if other == node:
            s.nodes[bucket, BUCKET] = after
        else:
            while s.nodes[other, NEXT_NODE] != node:
                other = s.nodes[other, NEXT_NODE]
            s.nodes[other, NEXT_NODE] = after
        s.extras_uses[s.nodes[node, NODE_EXTRAS]] -= 1
        s.nodes[node, NEXT_NODE] = s.scalars[FREE_NODE]
        s.scalars[FREE_NODE] = node
        s.scalars[NUM_FREE_NODES] += 1
        node = s.nodes[node, PARENT]


@compiled
def list_nodes(s: State, last: int, count: int, found: Int32s) -> None:
    """Write the path of `count` nodes that ends with `last` into `found`, first node first."""
    node = last
    for index in range(count - 1, -1, -1):
        found[index] = node
        node = s.nodes[node, PARENT]


@entry("state")
def withdraw_all(s: State) -> None:
    """Empty the prefix cache (P25)."""
    for block in range(len(s.blocks)):
        withdraw(s, block)
