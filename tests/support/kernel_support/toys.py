"""Small kernels of integers: between them everything that numpied takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

FAR = tl.constexpr(1 << 40)
NONE = tl.constexpr(-1)


class Toys(NamedTuple):
    """Tensors of the toys."""

    ints: Any
    """[lanes] int32"""
    longs: Any
    """[lanes] int64"""
    table: Any
    """[lanes, 4] int32"""
    out: Any
    """[16, lanes] int32"""
    wide: Any
    """[8, lanes] int64"""


class Sizes(NamedTuple):
    """Constants of the toys."""

    lanes: int


@triton.jit
def hash_of(value, seed):
    """Arithmetic that overflows 32 bits, as a scalar or a vector."""
    mixed = value * 1_000_003 + seed
    mixed ^= mixed >> 7
    return mixed * 40_503 - (mixed << 3)


@triton.jit
def arithmetic(t, d: tl.constexpr):
    """Types, rounding, wrapping; on lanes and on scalars."""
    lane = tl.arange(0, d.lanes)
    x = tl.load(t.ints + lane)
    y = tl.load(t.longs + lane)
    first = tl.load(t.ints)
    second = tl.load(t.ints + 1)
    long = tl.load(t.longs)
    tl.store(t.out + lane, hash_of(x, 17))
    tl.store(t.out + d.lanes, hash_of(first, second))
    tl.store(t.out + d.lanes + 1, (first + second) // 7)
    tl.store(t.out + d.lanes + 2, first % 5)
    tl.store(t.out + 2 * d.lanes + lane, x // 7)
    tl.store(t.out + 3 * d.lanes + lane, x % 7)
    tl.store(t.out + 4 * d.lanes + lane, (x < 0).to(tl.int32) + (~(x > 3)).to(tl.int32))
    tl.store(t.out + 5 * d.lanes + lane, tl.maximum(tl.minimum(x, 9), first))
    tl.store(t.out + 6 * d.lanes + lane, y.to(tl.int32))
    tl.store(t.wide + lane, y * x + (first.to(tl.int64) << 20))
    tl.store(t.wide + d.lanes + lane, tl.where(x > 0, y, FAR))
    tl.store(t.wide + 2 * d.lanes + lane, tl.where(x > 0, 1, -1) * y)
    tl.store(t.wide + 3 * d.lanes, tl.where(first > 0, long, NONE) * 3)
    tl.store(t.wide + 3 * d.lanes + 1, tl.minimum(long, first) >> 2)


@triton.jit
def reductions(t, d: tl.constexpr):
    """Sums, extremes, scans, two dimensions."""
    lane = tl.arange(0, d.lanes)
    x = tl.load(t.ints + lane)
    small = x & 15
    is_even = (x & 1) == 0
    tl.store(t.out + lane, tl.cumsum(small, 0))
    tl.store(t.out + d.lanes + lane, tl.cumsum(is_even.to(tl.int32), 0))
    tl.store(t.out + 2 * d.lanes, tl.sum(x, 0))
    tl.store(t.out + 2 * d.lanes + 1, tl.max(x, 0))
    tl.store(t.out + 2 * d.lanes + 2, tl.min(tl.where(is_even, x, 99), 0))
    tl.store(t.out + 2 * d.lanes + 3, tl.argmin(small, 0))
    tl.store(t.out + 2 * d.lanes + 4, tl.argmax(small, 0))
    column = tl.arange(0, 4)
    at = lane[:, None] * 4 + column[None, :]
    rows = tl.load(t.table + at, mask=(column < 3)[None, :] & is_even[:, None], other=-2)
    tl.store(t.out + 3 * d.lanes + lane, tl.sum(rows, 1))
    tl.store(t.out + 4 * d.lanes + lane, tl.max(rows, 1))
    tl.store(t.wide + lane, tl.cumsum(tl.load(t.longs + lane), 0))


@triton.jit
def allocate(t, d: tl.constexpr):
    """Loops, branches, barriers: what each lane wants, packed, until the room is gone."""
    lane = tl.arange(0, d.lanes)
    want = tl.load(t.ints + lane) & 3
    room = tl.full((), 20, tl.int32)
    given = tl.zeros((d.lanes,), tl.int32)
    at = 0
    while (room > 0) & (at < 3):
        start = tl.cumsum(want, 0) - want
        fits = start + want <= room
        given += tl.where(fits, want, 0)
        room -= tl.sum(tl.where(fits, want, 0), 0)
        if room > 5:
            tl.store(t.out + at * d.lanes + lane, start, mask=fits)
        else:
            tl.store(t.out + at * d.lanes + start, lane, mask=fits & (want > 0))
        at += 1
    tl.debug_barrier()
    for again in tl.static_range(2):
        tl.store(t.out + (4 + again) * d.lanes + lane, given, mask=given > again)
    tl.debug_barrier()
    taken = tl.load(t.out + 4 * d.lanes + lane, mask=given > 0, other=-7)
    tl.store(t.out + 6 * d.lanes + lane, taken)
    tl.store(t.out + 7 * d.lanes, room, mask=room > 0)


@triton.jit
def atomics(t, d: tl.constexpr):
    """Counts and claims, several lanes at one place."""
    lane = tl.arange(0, d.lanes)
    x = tl.load(t.ints + lane)
    place = x & 3
    tl.atomic_add(t.out + place, x, mask=x > 0)
    tl.atomic_min(t.out + d.lanes + place, x)
    tl.atomic_max(t.out + 2 * d.lanes + place, x, mask=lane > 1)
    tl.atomic_or(t.out + 3 * d.lanes, 5)
    tl.atomic_add(t.wide + place, x.to(tl.int64) * 3)
    tl.atomic_xchg(t.out + 4 * d.lanes, 77)
    tl.atomic_cas(t.out + 5 * d.lanes, 0, 9)
