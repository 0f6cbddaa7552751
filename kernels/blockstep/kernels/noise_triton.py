"""The random numbers of `noise`, the same bits, inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from blockstep.kernels import noise

GOLDEN = tl.constexpr(noise.GOLDEN)
MIX_1 = tl.constexpr(noise.MIX_1)
MIX_2 = tl.constexpr(noise.MIX_2)
SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)


@triton.jit
def compute_mix(words):
    """Return SplitMix64's output function of uint64 words."""
    words = (words ^ (words >> 30)) * MIX_1
    words = (words ^ (words >> 27)) * MIX_2
    return words ^ (words >> 31)


@triton.jit
def compute_key(seed, position, PURPOSE: tl.constexpr):
    """Return the start of the stream of a seed, a position and a purpose."""
    golden = tl.full((), GOLDEN, tl.uint64)
    counter = (2 * position + PURPOSE).to(tl.uint64)
    return compute_mix(compute_mix(seed.to(tl.uint64) + golden) + counter * golden)


@triton.jit
def compute_uniform(key, indices):
    """Return numbers of a stream, float64, strictly between 0 and 1."""
    golden = tl.full((), GOLDEN, tl.uint64)
    words = compute_mix(key + (indices.to(tl.uint64) + 1) * golden)
    return ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def compute_exponential(key, indices):
    """Return exponentially distributed numbers of a stream, float32, above 0."""
    golden = tl.full((), GOLDEN, tl.uint64)
    words = compute_mix(key + (indices.to(tl.uint64) + 1) * golden) >> 12
    v = words.to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    v = tl.minimum(v, 1.0 - 5.960464477539063e-08)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return tl.where(v < SERIES_BELOW, series, -tl.log(1.0 - v))
