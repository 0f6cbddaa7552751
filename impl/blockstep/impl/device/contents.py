"""Contents: nodes of full blocks, and which block is found for one (P3, P4, P6)."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout
from blockstep.impl.device.pool import pop_free

NONE = tl.constexpr(layout.NONE)


@triton.jit
def find_node(s, slot, index, before, d: tl.constexpr):
    """The node of a request's full block `index`, behind node `before`; made if there is none.

    Hashes only narrow the search; tokens are compared, so nothing can collide.
    """
    column = tl.arange(0, d.width)
    is_token = column < d.size
    token = tl.load(s.tokens + slot * d.tokens + index * d.size + column, mask=is_token, other=0)
    extras = tl.load(s.extras + slot * d.table + index)
    spread = (column * 40_503 + 30_011).to(tl.int64) * token.to(tl.int64)
    hashed = tl.sum(spread & 0x7FFFFFFF, 0) + (before + 1).to(tl.int64) * 1_000_003
    hashed = (hashed + extras.to(tl.int64) * 8_191) & 0x3FFFFFFF
    hashed = (hashed ^ (hashed >> 13)).to(tl.int32)
    bucket = hashed & (d.buckets - 1)
    first = tl.load(s.buckets + bucket)
    node = first
    found = NONE
    while node >= 0:
        other = tl.load(s.node_tokens + node * d.size + column, mask=is_token, other=0)
        differing = tl.sum((other != token).to(tl.int32), 0)
        differing += (tl.load(s.parent + node) != before).to(tl.int32)
        differing += (tl.load(s.node_extras + node) != extras).to(tl.int32)
        found = tl.where(differing == 0, node, found)
        node = tl.where(differing == 0, NONE, tl.load(s.next_node + node))
    if found < 0:
        unused = tl.load(s.num_free_nodes) - 1
        found = tl.load(s.free_nodes + unused)
        tl.debug_barrier()
        tl.store(s.num_free_nodes, unused)
        tl.store(s.parent + found, before)
        tl.store(s.node_extras + found, extras)
        tl.store(s.node_hash + found, hashed)
        tl.store(s.next_node + found, first)
        tl.store(s.first_block + found, NONE)
        tl.store(s.last_block + found, NONE)
        tl.store(s.node_tokens + found * d.size + column, token, mask=is_token)
        tl.store(s.buckets + bucket, found)
        tl.debug_barrier()
    return found


@triton.jit
def extend_path(s, slot, first, known, d: tl.constexpr):
    """Nodes for the full blocks of a request's known tokens, from block `first` on."""
    index = first
    full = known // d.size
    if full > first:
        before = tl.load(s.paths + slot * d.table + (first - 1), mask=first > 0, other=NONE)
        while index < full:
            before = find_node(s, slot, index, before, d)
            tl.store(s.paths + slot * d.table + index, before)
            index += 1
        tl.debug_barrier()


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
                tl.store(s.node + block, node, mask=is_new)
                tl.store(s.previous_same + block, last, mask=is_new)
                tl.store(s.next_same + block, NONE, mask=is_new)
                tl.store(s.first_block + node, block, mask=is_new & (last < 0))
                tl.store(s.next_same + last, block, mask=is_new & (last >= 0))
                tl.store(s.last_block + node, block, mask=is_new)
                at += d.lanes
            tl.store(s.published + slot, full)
            tl.debug_barrier()


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
