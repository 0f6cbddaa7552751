"""The token function, which gives the next token of a token sequence.

It replaces a model.

It depends on the sequence alone, so a request gets the same tokens however it was batched,
preempted or served from the cache; any other token that is delivered is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

FEW_TOKENS = 3


def token_function(seed: int, vocabulary_size: int) -> Callable[[Sequence[int]], int]:
    """Return a function from a non-empty token sequence to its next token, below
    `vocabulary_size`.
    """

    def next_token(text: Sequence[int]) -> int:
        # Only the last tokens count, and with a small vocabulary not even the length, so that
        # sequences soon repeat themselves and each other.
        last = text[-1]
        before = text[-2] if len(text) > 1 else -1
        length = len(text) if vocabulary_size > FEW_TOKENS else 0
        mixed = (seed ^ (last * 0x9E3779B1) ^ (before * 0x85EBCA6B) ^ length * 0xC2B2AE35) + seed
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 12)) % vocabulary_size

    return next_token
