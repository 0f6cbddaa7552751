"""Contents: nodes of full blocks, and which block is found for one (P3, P4, P6)."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.pool import pop_free

NONE = tl.constexpr(layout.NONE)


@triton.jit
def find_nodes(s, slot, index, before, live, d: tl.constexpr):
    """[n] nodes of the full blocks `index` [n] of the slots [n], behind the nodes `before` [n].

    NONE where there is none yet, and what a new one needs: tokens [n, width], extras [n], hash [n].
    Hashes only narrow the search; tokens are compared, so nothing can collide.
    """
    column = tl.arange(0, d.width)[None, :]
    is_token = live[:, None] & (column < d.size)
    first = (slot * d.tokens + index * d.size)[:, None]
    token = tl.load(s.tokens + first + column, mask=is_token, other=0)
    extras = tl.load(s.extras + slot * d.table + index, mask=live, other=0)
    spread = (column * 40_503 + 30_011).to(tl.int64) * token.to(tl.int64)
    hashed = tl.sum(spread & 0x7FFFFFFF, 1) + (before + 1).to(tl.int64) * 1_000_003
    hashed = (hashed + extras.to(tl.int64) * 8_191) & 0x3FFFFFFF
    hashed = (hashed ^ (hashed >> 13)).to(tl.int32)
    node = tl.load(s.buckets + (hashed & (d.buckets - 1)), mask=live, other=NONE)
    found = tl.minimum(node, NONE)  # none so far
    walking = tl.max(node, 0)
    while walking >= 0:  # all walk their buckets together
        has_node = node >= 0
        is_token = has_node[:, None] & (column < d.size)
        other = tl.load(s.node_tokens + (node * d.size)[:, None] + column, mask=is_token, other=0)
        parent = tl.load(s.parent + node, mask=has_node, other=NONE)
        named = tl.load(s.node_extras + node, mask=has_node, other=NONE)
        differing = tl.sum((other != token).to(tl.int32), 1)
        differing += ((parent != before) | (named != extras)).to(tl.int32)
        after = tl.load(s.next_node + node, mask=has_node, other=NONE)
        found = tl.where(has_node & (differing == 0), node, found)
        node = tl.where(found >= 0, NONE, after)
        walking = tl.max(node, 0)
    return found, token, extras, hashed


@triton.jit
def make_nodes(s, found, before, token, extras, hashed, live, d: tl.constexpr):
    """[n] the nodes found, and new ones where there was none; no two of these in one bucket."""
    column = tl.arange(0, d.width)[None, :]
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
        is_token = is_new[:, None] & (column < d.size)
        tl.store(s.num_free_nodes, unused - count)
        tl.store(s.parent + new, before, mask=is_new)
        tl.store(s.node_extras + new, extras, mask=is_new)
        tl.store(s.node_hash + new, hashed, mask=is_new)
        tl.store(s.next_node + new, after, mask=is_new)
        tl.store(s.first_block + new, NONE, mask=is_new)
        tl.store(s.last_block + new, NONE, mask=is_new)
        tl.store(s.node_tokens + (new * d.size)[:, None] + column, token, mask=is_token)
        tl.store(s.buckets + bucket, new, mask=is_new)
        found = tl.where(is_new, new, found)
        tl.debug_barrier()
    return found


@triton.jit
def extend_path(s, slot, first, known, d: tl.constexpr):
    """Nodes for the full blocks of a request's known tokens, from block `first` on."""
    one = tl.arange(0, 1)
    live = one == 0
    index = first + one
    full = known // d.size
    left = full - first
    before = tl.load(s.paths + slot * d.table + (index - 1), mask=index > 0, other=NONE)
    while left > 0:
        found, token, extras, hashed = find_nodes(s, slot + one, index, before, live, d)
        before = make_nodes(s, found, before, token, extras, hashed, live, d)
        tl.store(s.paths + slot * d.table + index, before)
        index += 1
        left -= 1


@triton.jit
def count_pairs(value, live):
    """Pairs of lanes [n] that have the same value [n]: they cannot be dealt with side by side."""
    pairs = (value[:, None] == value[None, :]) & (live[:, None] & live[None, :])
    return tl.sum(tl.sum(pairs.to(tl.int32), 1), 0) - tl.sum(live.to(tl.int32), 0)


@triton.jit
def extend_listed(s, count, d: tl.constexpr):
    """The same for the slots in `scratch`, from the block that `step_first` of each says.

    Side by side where each has filled one block, and no two new nodes fall into one bucket.
    """
    at = 0
    while at < count:
        lane = at + tl.arange(0, d.chunk)
        live = lane < count
        slot = tl.load(s.scratch + lane, mask=live, other=0)
        index = tl.load(s.step_first + slot, mask=live, other=0)
        full = tl.load(s.known + slot, mask=live, other=0) // d.size
        path = slot * d.table + index
        before = tl.load(s.paths + (path - 1), mask=live & (index > 0), other=NONE)
        found, token, extras, hashed = find_nodes(s, slot, index, before, live, d)
        crowded = count_pairs(hashed & (d.buckets - 1), live & (found < 0))
        crowded += tl.sum((live & (full > index + 1)).to(tl.int32), 0)
        if crowded == 0:
            found = make_nodes(s, found, before, token, extras, hashed, live, d)
            tl.store(s.paths + path, found, mask=live)
        else:
            each = at
            while each < tl.minimum(at + d.chunk, count):
                one = tl.load(s.scratch + each)
                extend_path(s, one, tl.load(s.step_first + one), tl.load(s.known + one), d)
                each += 1
        at += d.chunk


@triton.jit
def count_hits(s, slot, known, d: tl.constexpr):
    """Blocks of the longest prefix that is cached, leaving a token to run (upstream #30320).

    A hidden-state head needs the last hit block recomputed (seed 001, "find_longest_cache_hit").
    """
    limit = (known - 1) // d.size
    found = limit
    at = 0
    while at < found:
        index = at + tl.arange(0, d.lanes)
        node = tl.load(s.paths + slot * d.table + index, mask=index < limit, other=0)
        block = tl.load(s.first_block + node, mask=index < limit, other=0)
        found = tl.minimum(found, tl.min(tl.where(block < 0, index, limit), 0))
        at += d.lanes
    if d.drops_last_hit:
        found = tl.maximum(found - 1, 0)
    return found


@triton.jit
def link_blocks(s, block, node, last, live):
    """The blocks [n] carry the nodes [n], all different, behind the last [n] that did."""
    tl.store(s.node + block, node, mask=live)
    tl.store(s.previous_same + block, last, mask=live)
    tl.store(s.next_same + block, NONE, mask=live)
    tl.store(s.first_block + node, block, mask=live & (last < 0))
    tl.store(s.next_same + last, block, mask=live & (last >= 0))
    tl.store(s.last_block + node, block, mask=live)


@triton.jit
def publish(s, slot, tokens, d: tl.constexpr):
    """The full blocks of its first `tokens` tokens can be found from now on; it is running."""
    if d.has_cache:
        first = tl.load(s.published + slot)
        full = tokens // d.size
        if full > first:
            at = first
            while at < full:
                index = at + tl.arange(0, d.lanes)
                is_new = index < full
                block = tl.load(s.tables + slot * d.table + index, mask=is_new, other=0)
                node = tl.load(s.paths + slot * d.table + index, mask=is_new, other=0)
                last = tl.load(s.last_block + node, mask=is_new, other=NONE)
                tl.debug_barrier()
                link_blocks(s, block, node, last, is_new)
                at += d.lanes
            tl.store(s.published + slot, full)
            tl.debug_barrier()


@triton.jit
def count_filled(s, slot, live):
    """[n] tokens of the slots [n] that are known, and computed once the step has run."""
    filled = tl.load(s.computed + slot, mask=live, other=0)
    filled += tl.load(s.step_tokens + slot, mask=live, other=0)
    return tl.minimum(filled, tl.load(s.known + slot, mask=live, other=0))


@triton.jit
def publish_listed(s, count, is_committed, d: tl.constexpr):
    """What the requests fill whose slots lie in `scratch`, in this order.

    By the step that is planned, or by what was committed: then the last token may not have run yet
    (P4). Side by side where each fills one block, and no two of them the same content.
    """
    at = 0
    while at < count:
        lane = at + tl.arange(0, d.chunk)
        live = lane < count
        slot = tl.load(s.scratch + lane, mask=live, other=0)
        tokens = tl.load(s.known + slot, mask=live, other=0) - 1
        tokens = tl.where(is_committed > 0, tokens, count_filled(s, slot, live))
        index = tl.load(s.published + slot, mask=live, other=0)
        block = tl.load(s.tables + slot * d.table + index, mask=live, other=0)
        node = tl.load(s.paths + slot * d.table + index, mask=live, other=0)
        last = tl.load(s.last_block + node, mask=live, other=NONE)
        crowded = count_pairs(node, live)
        crowded += tl.sum((live & (tokens // d.size > index + 1)).to(tl.int32), 0)
        tl.debug_barrier()
        if crowded == 0:
            link_blocks(s, block, node, last, live)
            tl.store(s.published + slot, index + 1, mask=live)
        else:
            each = at
            while each < tl.minimum(at + d.chunk, count):
                one = tl.load(s.scratch + each)
                of_one = tl.max(tl.where(lane == each, tokens, 0), 0)
                publish(s, one, of_one, d)
                each += 1
        tl.debug_barrier()
        at += d.chunk


@triton.jit
def withdraw(s, block):
    """`block`, which carries a node beside others, can be found no more."""
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
def withdraw_listed(s, count, d: tl.constexpr):
    """The first `count` blocks in `scratch` can be found no more (lazy eviction).

    Those that carry a node alone go together; others stand in a list, and go one by one.
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
def take_blocks(s, slot, count, d: tl.constexpr):
    """Append `count` free blocks to a block table; they are found no more."""
    if count > 0:
        held = tl.load(s.held + slot)
        pop_free(s, count, d)
        withdraw_listed(s, count, d)
        at = 0
        while at < count:
            index = at + tl.arange(0, d.lanes)
            block = tl.load(s.scratch + index, mask=index < count, other=0)
            tl.store(s.tables + slot * d.table + held + index, block, mask=index < count)
            at += d.lanes
        tl.store(s.held + slot, held + count)
        tl.debug_barrier()
