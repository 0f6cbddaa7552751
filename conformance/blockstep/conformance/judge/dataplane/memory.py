"""Memory: a paged KV cache of real tensors in which every slot shows the name of its content.

A slot holds a name (see `worker.names`), spelled in digits small enough for any cache type down to
fp8, once as a key and differently as a value, and differently in each head. So a slot can be read
back: a shifted slot has another name, and swapped keys and values, mixed heads or half a copy have
none.

Blocks of all KV groups are equally large. A group with fewer slots in a block has wider ones:

    block_size 2, 4 heads   | slot 0            | slot 1            |
    block_size 4, 2 heads   | slot 0  | slot 1  | slot 2  | slot 3  |       the same bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from blockstep.conformance.judge.worker.prefix_names import GARBLED, NEVER_WRITTEN, Name

Array: TypeAlias = npt.NDArray[np.float32]

NUM_KV_HEADS = 2
HEAD_SIZE = 16
DIGITS = 6
BASE = 16
"""Every whole number below it is exact in every type, float8_e4m3fn included."""
OFFSET = 8
"""Added to a name before it is spelled, since the special ones are negative."""

_PLACES = np.arange(HEAD_SIZE - 1)[None, :]


def count_heads(block_sizes: Sequence[int]) -> list[int]:
    """Number of KV heads of each group, so that a block of each has the same size."""
    return [NUM_KV_HEADS * lcm(*block_sizes) // size for size in block_sizes]


def spell(names: Sequence[Name], num_heads: int = NUM_KV_HEADS) -> tuple[Array, Array]:
    """Key and value of each name, `[len(names), num_heads, HEAD_SIZE]` each.

    Raises:
        OverflowError: a run with more names than digits can spell.
    """
    numbers = np.asarray(names, dtype=np.int64) + OFFSET
    if numbers.size and int(numbers.max()) >= BASE**DIGITS:
        raise OverflowError(f"{int(numbers.max())} names in one run; {BASE**DIGITS} can be spelled")
    return _spell(numbers, 1, num_heads), _spell(numbers, 1 + num_heads, num_heads)


def _spell(numbers: npt.NDArray[np.int64], kind: int, num_heads: int) -> Array:
    """Return a mark of kind and head, the digits, and the digits again in another order."""
    digits = numbers[:, None] // BASE ** np.arange(DIGITS) % BASE
    heads = kind + np.arange(num_heads)
    vectors: Array = np.zeros((len(numbers), num_heads, HEAD_SIZE), dtype=np.float32)
    vectors[:, :, 0] = heads
    again = (digits[:, _PLACES % DIGITS] + heads[:, None] * (_PLACES // DIGITS)) % BASE
    vectors[:, :, 1:] = again
    vectors[numbers == NEVER_WRITTEN + OFFSET] = 0
    return vectors


def read(keys: Array, values: Array) -> list[Name]:
    """The names in some slots, `[slots, num_heads, HEAD_SIZE]` each; `GARBLED` where there is none.

    A slot of zeros was never written.
    """
    digits = np.nan_to_num(keys[:, 0, 1 : 1 + DIGITS], nan=-1, posinf=-1, neginf=-1)
    numbers = (np.clip(digits, 0, BASE - 1).astype(np.int64) * BASE ** np.arange(DIGITS)).sum(1)
    names = numbers - OFFSET
    is_blank = ~keys.any(axis=(1, 2)) & ~values.any(axis=(1, 2))
    names[is_blank] = NEVER_WRITTEN
    expected_keys, expected_values = spell(names, keys.shape[1])
    is_right = (keys == expected_keys).all(axis=(1, 2)) & (values == expected_values).all(
        axis=(1, 2)
    )
    names[~is_right] = GARBLED
    return [int(name) for name in names]
