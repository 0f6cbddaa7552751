"""Random numbers by counter: each is a pure function of a seed and of where it is used.

So a row's result does not depend on the batch that it is in, on the device, or on what was drawn
before. SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) started at a key mixed from the seed, the
position of the token and the purpose; number `index` of that stream is its `index`-th output.
"""

from __future__ import annotations

from torch import Tensor

ACCEPT = 0
"""Purpose: the uniform number that decides whether a draft is accepted."""
CHOOSE = 1
"""Purpose: one number per token of the vocabulary, to choose a token."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def to_int64(word: int) -> int:
    """The signed integer with the bits of this unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def compute_mix(words: Tensor) -> Tensor:
    """SplitMix64's output function on int64 words, whose arithmetic wraps around."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        words = (words ^ _shift_right(words, shift)) * to_int64(factor)
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, shift: int) -> Tensor:
    """The logical shift; torch's own on int64 copies the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def compute_uniform(seeds: Tensor, positions: Tensor, purpose: int, indices: Tensor) -> Tensor:
    """Uniform float64 numbers strictly between 0 and 1; int64 arguments that broadcast.

    52 bits of each word are used, at the middle of their interval: never 0, never 1.
    """
    golden = to_int64(GOLDEN)
    key = compute_mix(compute_mix(seeds + golden) + (2 * positions + purpose) * golden)
    words = compute_mix(key + (indices + 1) * golden)
    return (_shift_right(words, 12).double() + 0.5) * 2.0**-52
