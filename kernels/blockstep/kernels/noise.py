"""Random numbers by counter: each is a pure function of a seed and of its place of use.

So a row's result does not depend on its batch, on the device, or on earlier draws. It is SplitMix64
(Steele, Lea and Flood, OOPSLA 2014), started at a key mixed from the seed, the position of the
token and the purpose; number `index` of that stream is its `index`-th output.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCEPT = 0
"""Purpose: the uniform number that decides whether a draft is accepted."""
CHOOSE = 1
"""Purpose: one number per token of the vocabulary, to choose a token."""

SERIES_BELOW = 0.0625
"""Below this value five terms of the series of `-log(1 - v)` are as exact as float32."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def to_int64(word: int) -> int:
    """Return the signed integer with the bits of this unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def compute_mix(words: Tensor) -> Tensor:
    """Return SplitMix64's output function of int64 words, whose arithmetic wraps around."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        words = (words ^ _shift_right(words, shift)) * to_int64(factor)
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, shift: int) -> Tensor:
    """Shift logically; torch's own shift on int64 copies the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def compute_uniform(seeds: Tensor, positions: Tensor, purpose: int, indices: Tensor) -> Tensor:
    """Return uniform float64 numbers strictly between 0 and 1; int64 arguments that broadcast.

    52 bits of each word are used, at the middle of their interval: never 0, never 1.
    """
    words = _compute_words(compute_keys(seeds, positions, purpose), indices)
    return (words.double() + 0.5) * 2.0**-52


def compute_exponential(keys: Tensor, indices: Tensor) -> Tensor:
    """Return exponentially distributed float32 numbers above 0, of the streams that start at
    `keys`.

    They are `-log(1 - v)` for the uniform number `v` of the same stream and index, rounded to
    float32. Small results decide which token is drawn, so they keep all digits of float32: there
    the logarithm is a series.
    """
    v = (_compute_words(keys, indices).float() * 2.0**-52 + 2.0**-53).clamp(max=1 - 2.0**-24)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return torch.where(v < SERIES_BELOW, series, -(1 - v).log())


def compute_keys(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Return the start of the stream of each seed, position and purpose; int64 that broadcast."""
    golden = to_int64(GOLDEN)
    return compute_mix(compute_mix(seeds + golden) + (2 * positions + purpose) * golden)


def _compute_words(keys: Tensor, indices: Tensor) -> Tensor:
    """Return the upper 52 bits of the words of streams, as int64."""
    return _shift_right(compute_mix(keys + (indices + 1) * to_int64(GOLDEN)), 12)
