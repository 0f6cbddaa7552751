"""Sweep: frees nodes that no block carries, no request's path has, and no needed node continues.

It runs between two steps, when unused nodes run short, so nodes need no reference counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.impl.device import layout

NONE = tl.constexpr(layout.NONE)


@triton.jit
def mark_needed(s, d):
    """Mark the nodes that blocks carry, and the paths of all unfinished requests."""
    lane = tl.arange(0, d.lanes)
    at = 0
    while at < d.nodes:
        carried = tl.full((d.lanes,), 0, tl.int32)
        group = 0
        while group < d.groups:
            block = tl.load(s.first_block + group * d.nodes + at + lane)
            carried = tl.maximum(carried, (block >= 0).to(tl.int32))
            group += 1
        tl.store(s.mark + at + lane, carried)
        at += d.lanes
    tl.debug_barrier()
    slot = 0
    while slot < d.slots:
        full = tl.load(s.known + slot) // d.size
        if tl.load(s.birth + slot) == 0:
            full = 0
        at = 0
        while at < full:
            node = tl.load(s.paths + slot * d.table + at + lane, mask=at + lane < full, other=0)
            tl.store(s.mark + node, 1, mask=at + lane < full)
            at += d.lanes
        slot += 1
    tl.debug_barrier()


@triton.jit
def mark_parents(s, d):
    """Mark the parents of marked nodes, until nothing changes."""
    lane = tl.arange(0, d.chunk)
    changed = 1
    while changed > 0:
        changed = 0
        at = 0
        while at < d.nodes:
            is_marked = tl.load(s.mark + at + lane) > 0
            parent = tl.load(s.parent + at + lane, mask=is_marked, other=NONE)
            lacks = (parent >= 0) & (tl.load(s.mark + parent, mask=parent >= 0, other=1) == 0)
            same = (parent[:, None] == parent[None, :]) & (lane[:, None] > lane[None, :])
            is_first = tl.sum(same.to(tl.int32), 1) == 0
            tl.debug_barrier()
            tl.store(s.mark + parent, 1, mask=lacks & is_first)
            changed += tl.sum(lacks.to(tl.int32), 0)
            tl.debug_barrier()
            at += d.chunk


@triton.jit
def rebuild(s, d):
    """Rebuild the buckets from the marked nodes, one by one; all other nodes are unused."""
    lane = tl.arange(0, d.lanes)
    at = 0
    while at < d.buckets:
        tl.store(s.buckets + at + lane, NONE, mask=at + lane < d.buckets)
        at += d.lanes
    tl.debug_barrier()
    unused = 0
    node = 0
    while node < d.nodes:
        if tl.load(s.mark + node) > 0:
            bucket = tl.load(s.node_hash + node) & (d.buckets - 1)
            first = tl.load(s.buckets + bucket)
            tl.debug_barrier()
            tl.store(s.next_node + node, first)
            tl.store(s.buckets + bucket, node)
            tl.debug_barrier()
        else:
            tl.store(s.free_nodes + unused, node)
            unused += 1
        node += 1
    tl.store(s.num_free_nodes, unused)


@triton.jit
def sweep(s, d):
    """Free all nodes that are not needed."""
    mark_needed(s, d)
    mark_parents(s, d)
    rebuild(s, d)
