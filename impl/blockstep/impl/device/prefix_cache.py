"""Contents: nodes of full blocks, and the cached blocks of each node (P3, P4, P6)."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.pool import find_first_read, pop_free

NONE = tl.constexpr(layout.NONE)


@triton.jit
def find_nodes(s, slot, index, before, live, d):
    """Return the nodes [n] of the full blocks `index` [n] of requests `slot` [n].

    `before` [n] are the parent nodes. A result is NONE if no such node exists yet. Also returns the
    extras [n] and hashes [n] for a new node. Hashes only narrow the search: tokens are compared, so
    nothing can collide.
    """
    extras = tl.load(s.extras + slot * d.table + index, mask=live, other=0)
    first = (slot * d.tokens + index * d.size)[:, None]
    hashed = (before + 1).to(tl.int64) * 1_000_003 + extras.to(tl.int64) * 8_191
    at = 0
    while at < d.size:
        column = at + tl.arange(0, d.width)[None, :]
        is_token = live[:, None] & (column < d.size)
        token = tl.load(s.tokens + first + column, mask=is_token, other=0)
        spread = (column * 40_503 + 30_011).to(tl.int64) * token.to(tl.int64)
        hashed += tl.sum(spread & 0x7FFFFFFF, 1)
        at += d.width
    hashed = hashed & 0x3FFFFFFF
    hashed = (hashed ^ (hashed >> 13)).to(tl.int32)
    node = tl.load(s.buckets + (hashed & (d.buckets - 1)), mask=live, other=NONE)
    found = tl.minimum(node, NONE)  # none so far
    walking = tl.max(node, 0)
    while walking >= 0:  # all lanes search their buckets together
        has_node = node >= 0
        parent = tl.load(s.parent + node, mask=has_node, other=NONE)
        named = tl.load(s.node_extras + node, mask=has_node, other=NONE)
        differing = ((parent != before) | (named != extras)).to(tl.int32)
        at = 0
        while at < d.size:
            column = at + tl.arange(0, d.width)[None, :]
            is_token = has_node[:, None] & (column < d.size)
            own = tl.load(s.tokens + first + column, mask=is_token, other=0)
            of_node = (node * d.size)[:, None] + column
            other = tl.load(s.node_tokens + of_node, mask=is_token, other=0)
            differing += tl.sum((other != own).to(tl.int32), 1)
            at += d.width
        after = tl.load(s.next_node + node, mask=has_node, other=NONE)
        found = tl.where(has_node & (differing == 0), node, found)
        node = tl.where(found >= 0, NONE, after)
        walking = tl.max(node, 0)
    return found, extras, hashed


@triton.jit
def make_nodes(s, slot, index, found, before, extras, hashed, live, d):
    """Return the nodes found [n], and new nodes where none was found, all in different buckets.

    They are those of the full blocks `index` [n] of requests `slot` [n]; the other arguments are
    arguments and results of `find_nodes`.
    """
    lacks = (live & (found < 0)).to(tl.int32)
    count = tl.sum(lacks, 0)
    if count > 0:
        unused = tl.load(s.num_free_nodes)
        rank = tl.cumsum(lacks, 0)
        bucket = hashed & (d.buckets - 1)
        is_new = lacks > 0
        new = tl.load(s.free_nodes + (unused - rank), mask=is_new, other=0)
        after = tl.load(s.buckets + bucket, mask=is_new, other=NONE)
        tl.debug_barrier()
        tl.store(s.num_free_nodes, unused - count)
        tl.store(s.parent + new, before, mask=is_new)
        tl.store(s.node_extras + new, extras, mask=is_new)
        tl.store(s.node_hash + new, hashed, mask=is_new)
        tl.store(s.next_node + new, after, mask=is_new)
        tl.store(s.buckets + bucket, new, mask=is_new)
        at = 0
        while at < d.size:
            column = at + tl.arange(0, d.width)[None, :]
            is_token = is_new[:, None] & (column < d.size)
            of_slot = (slot * d.tokens + index * d.size)[:, None] + column
            token = tl.load(s.tokens + of_slot, mask=is_token, other=0)
            tl.store(s.node_tokens + (new * d.size)[:, None] + column, token, mask=is_token)
            at += d.width
        found = tl.where(is_new, new, found)
        tl.debug_barrier()
    return found


@triton.jit(noinline=True)
def extend_path(s, slot, first, known, d):
    """Find or make nodes for the full blocks of a request's known tokens, from block `first` on."""
    one = tl.arange(0, 1)
    live = one == 0
    index = first + one
    full = known // d.size
    left = full - first
    before = tl.load(s.paths + slot * d.table + (index - 1), mask=index > 0, other=NONE)
    while left > 0:
        found, extras, hashed = find_nodes(s, slot + one, index, before, live, d)
        before = make_nodes(s, slot + one, index, found, before, extras, hashed, live, d)
        tl.store(s.paths + slot * d.table + index, before)
        index += 1
        left -= 1


@triton.jit
def count_earlier(value, live, d):
    """Return [chunk]: the number of live lanes before each lane that have the same value."""
    lane = tl.arange(0, d.chunk)
    same = (value[:, None] == value[None, :]) & (lane[:, None] > lane[None, :])
    return tl.sum((same & live[None, :]).to(tl.int32), 1)


@triton.jit
def name_blocks(s, slot, index, live, d):
    """Return the nodes [chunk] of the full blocks `index` [chunk] of different requests [chunk].

    New nodes of one bucket are made one per round, in the order of lanes: the second of them may
    have the content of the first.
    """
    path = slot * d.table + index
    before = tl.load(s.paths + (path - 1), mask=live & (index > 0), other=NONE)
    named = path * 0
    left = live.to(tl.int32)
    num_left = 1
    while num_left > 0:
        found, extras, hashed = find_nodes(s, slot, index, before, left > 0, d)
        lacks = (left > 0) & (found < 0)
        waits = lacks & (count_earlier(hashed & (d.buckets - 1), lacks, d) > 0)
        done = (left > 0) & ~waits
        found = make_nodes(s, slot, index, found, before, extras, hashed, done, d)
        named = tl.where(done, found, named)
        left = waits.to(tl.int32)
        num_left = tl.sum(left, 0)
    tl.store(s.paths + path, named, mask=live)
    return named


@triton.jit
def extend_listed(s, count, d):
    """Do `extend_path` for the requests in `scratch`, from block `step_first` of each.

    They are handled together if each has filled one block.
    """
    at = 0
    while at < count:
        lane = at + tl.arange(0, d.chunk)
        live = lane < count
        slot = tl.load(s.scratch + lane, mask=live, other=0)
        index = tl.load(s.step_first + slot, mask=live, other=0)
        full = tl.load(s.known + slot, mask=live, other=0) // d.size
        if tl.sum((live & (full > index + 1)).to(tl.int32), 0) == 0:
            name_blocks(s, slot, index, live, d)
        else:
            each = at
            while each < tl.minimum(at + d.chunk, count):
                one = tl.load(s.scratch + each)
                extend_path(s, one, tl.load(s.step_first + one), tl.load(s.known + one), d)
                each += 1
        at += d.chunk


@triton.jit
def count_hits(s, slot, known, d):
    """Return the length in blocks of the longest prefix cached in every group; one token is left.

    If the whole prompt is cached, its last block is computed again (upstream #30320). An EAGLE head
    needs the last hit block computed again (seed 001, "find_longest_cache_hit").
    """
    limit = (known - 1) // d.size
    found = limit
    group = 0
    while group < d.groups:
        window = 0
        if d.has_windows:
            window = tl.load(s.windows + group)
        at = 0
        while (at < found) & (window == 0):
            index = at + tl.arange(0, d.lanes)
            node = tl.load(s.paths + slot * d.table + index, mask=index < limit, other=0)
            carried = group * d.nodes + node
            block = tl.load(s.first_block + carried, mask=index < limit, other=0)
            found = tl.minimum(found, tl.min(tl.where(block < 0, index, limit), 0))
            at += d.lanes
        group += 1
    if d.drops_last_hit:
        found = tl.maximum(found - 1, 0)
    if d.has_windows:
        found = shorten_hits(s, slot, found, d)
    return found


@triton.jit(noinline=True)
def shorten_hits(s, slot, length, d):
    """Return the longest prefix, of at most `length` blocks, that is cached in all groups.

    In a group with a window only the blocks count that the token after the prefix reads. A missing
    block among them is read after every shorter prefix that includes it, so the next candidate ends
    before it. An EAGLE head needs one block more (see `count_hits`).
    """
    found = length
    goes = (length > 0).to(tl.int32)
    while goes > 0:
        length = found
        group = 0
        while group < d.groups:
            last = length + d.drops_last_hit
            first = find_first_read(s, group, length * d.size, d)
            if tl.load(s.windows + group) == 0:
                first = last
            missed = NONE
            while (last > first) & (missed < 0):
                index = last - 1 - tl.arange(0, d.lanes)
                is_read = index >= first
                node = tl.load(s.paths + slot * d.table + index, mask=is_read, other=0)
                carried = group * d.nodes + node
                block = tl.load(s.first_block + carried, mask=is_read, other=0)
                missed = tl.max(tl.where(block < 0, index, NONE), 0)
                last -= d.lanes
            if missed >= 0:
                found = tl.minimum(found, tl.maximum(missed - d.drops_last_hit, 0))
            group += 1
        goes = ((found < length) & (found > 0)).to(tl.int32)
    return found


@triton.jit
def link_blocks(s, block, node, last, live):
    """Cache the blocks [n] under the nodes [n], all different, in a group.

    `last` [n] are the last blocks cached under these nodes so far. Here, in `withdraw` and in
    `withdraw_listed` a node is `group * nodes + node`, as in `s.node`.
    """
    tl.store(s.node + block, node, mask=live)
    tl.store(s.previous_same + block, last, mask=live)
    tl.store(s.next_same + block, NONE, mask=live)
    tl.store(s.first_block + node, block, mask=live & (last < 0))
    tl.store(s.next_same + last, block, mask=live & (last >= 0))
    tl.store(s.last_block + node, block, mask=live)


@triton.jit
def publish(s, slot, tokens, d):
    """Publish the full blocks of the first `tokens` tokens of a running request."""
    if d.has_cache:
        group = 0
        while group < d.groups:
            publish_in(s, slot, group, tokens, d)
            group += 1


@triton.jit
def publish_in(s, slot, group, tokens, d):
    """Publish full blocks in one group; blocks that a window has left behind are skipped."""
    line = group * d.slots + slot
    first = tl.load(s.published + line)
    full = tokens // d.size
    if full > first:
        at = first
        if d.has_windows:
            at = tl.maximum(first, tl.load(s.left + line))
            tl.debug_barrier()
        while at < full:
            index = at + tl.arange(0, d.lanes)
            is_new = index < full
            block = tl.load(s.tables + line * d.table + index, mask=is_new, other=0)
            node = tl.load(s.paths + slot * d.table + index, mask=is_new, other=0)
            node += group * d.nodes
            last = tl.load(s.last_block + node, mask=is_new, other=NONE)
            tl.debug_barrier()
            link_blocks(s, block, node, last, is_new)
            at += d.lanes
        tl.store(s.published + line, full)
        tl.debug_barrier()


@triton.jit
def count_filled(s, slot, live):
    """Return [n] for requests `slot` [n]: tokens that are known, and computed after the step."""
    filled = tl.load(s.computed + slot, mask=live, other=0)
    filled += tl.load(s.step_tokens + slot, mask=live, other=0)
    return tl.minimum(filled, tl.load(s.known + slot, mask=live, other=0))


@triton.jit
def link_listed(s, block, node, live, d):
    """Cache the blocks [chunk] under the nodes [chunk], each after those of earlier lanes.

    Blocks of one node are linked one per round.
    """
    left = live.to(tl.int32)
    num_left = 1
    while num_left > 0:
        last = tl.load(s.last_block + node, mask=left > 0, other=NONE)
        waits = (left > 0) & (count_earlier(node, left > 0, d) > 0)
        tl.debug_barrier()
        link_blocks(s, block, node, last, (left > 0) & ~waits)
        left = waits.to(tl.int32)
        num_left = tl.sum(left, 0)
        tl.debug_barrier()


@triton.jit
def publish_listed(s, count, group, is_committed, d):
    """Publish the blocks that requests fill in a group, in the order of their slots in `scratch`.

    They are filled by the step that is planned, or by committed tokens (`is_committed`): then the
    last token may not be computed yet (P4). Requests that fill one block each are handled together.
    """
    at = 0
    while at < count:
        lane = at + tl.arange(0, d.chunk)
        live = lane < count
        slot = tl.load(s.scratch + lane, mask=live, other=0)
        tokens = tl.load(s.known + slot, mask=live, other=0) - 1
        tokens = tl.where(is_committed > 0, tokens, count_filled(s, slot, live))
        line = group * d.slots + slot
        index = tl.load(s.published + line, mask=live, other=0)
        left = index
        if d.has_windows:
            left = tl.load(s.left + line, mask=live, other=0)
        crowded = (tokens // d.size > index + 1) | (index < left)
        if tl.sum((live & crowded).to(tl.int32), 0) == 0:
            block = tl.load(s.tables + line * d.table + index, mask=live, other=0)
            node = tl.load(s.paths + slot * d.table + index, mask=live, other=0)
            link_listed(s, block, node + group * d.nodes, live, d)
            tl.store(s.published + line, index + 1, mask=live)
        else:
            each = at
            while each < tl.minimum(at + d.chunk, count):
                one = tl.load(s.scratch + each)
                of_one = tl.max(tl.where(lane == each, tokens, 0), 0)
                publish_in(s, one, group, of_one, d)
                each += 1
        at += d.chunk


@triton.jit
def withdraw(s, block):
    """Remove `block` from the prefix cache; other blocks may be cached under its node."""
    node = tl.load(s.node + block)
    if node >= 0:
        before = tl.load(s.previous_same + block)
        after = tl.load(s.next_same + block)
        tl.debug_barrier()
        tl.store(s.first_block + node, after, mask=before < 0)
        tl.store(s.next_same + before, after, mask=before >= 0)
        tl.store(s.last_block + node, before, mask=after < 0)
        tl.store(s.previous_same + after, before, mask=after >= 0)
        tl.store(s.node + block, NONE)
        tl.debug_barrier()


@triton.jit
def withdraw_listed(s, count, d):
    """Remove the first `count` blocks in `scratch` from the prefix cache (lazy eviction).

    Blocks that are alone under their nodes are removed together; others, which are in a list, one
    by one.
    """
    at = 0
    while at < count:
        index = at + tl.arange(0, d.lanes)
        block = tl.load(s.scratch + index, mask=index < count, other=0)
        node = tl.load(s.node + block, mask=index < count, other=NONE)
        has_node = node >= 0
        others = tl.load(s.previous_same + block, mask=has_node, other=NONE) + 1
        others += tl.load(s.next_same + block, mask=has_node, other=NONE) + 1
        tl.debug_barrier()
        is_alone = has_node & (others == 0)
        tl.store(s.first_block + node, NONE, mask=is_alone)
        tl.store(s.last_block + node, NONE, mask=is_alone)
        tl.store(s.node + block, NONE, mask=is_alone)
        tl.debug_barrier()
        if tl.sum((others > 0).to(tl.int32), 0) > 0:
            each = at
            while each < tl.minimum(at + d.lanes, count):
                withdraw(s, tl.load(s.scratch + each))
                each += 1
        at += d.lanes


@triton.jit
def take_blocks(s, line, count, d):
    """Append `count` free blocks to the table of a line, and evict them from the prefix cache."""
    if count > 0:
        held = tl.load(s.held + line)
        pop_free(s, count, d)
        withdraw_listed(s, count, d)
        at = 0
        while at < count:
            index = at + tl.arange(0, d.lanes)
            block = tl.load(s.scratch + index, mask=index < count, other=0)
            tl.store(s.tables + line * d.table + held + index, block, mask=index < count)
            at += d.lanes
        tl.store(s.held + line, held + count)
        tl.debug_barrier()
