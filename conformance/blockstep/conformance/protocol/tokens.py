"""The token function: which token truly follows a text. It stands in for a model.

Deterministic in the text alone, so a request gets the same tokens however it was batched,
preempted or served from the cache: whatever else is delivered is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

FEW_TOKENS = 3


def token_function(seed: int, vocabulary_size: int) -> Callable[[Sequence[int]], int]:
    """A function from a text (at least one token) to the token after it, below the given size."""

    def next_token(text: Sequence[int]) -> int:
        # The end of the text decides, and with few tokens nothing else, so that texts soon go
        # round in circles: outputs then repeat themselves, and each other.
        last = text[-1]
        before = text[-2] if len(text) > 1 else -1
        length = len(text) if vocabulary_size > FEW_TOKENS else 0
        mixed = (seed ^ (last * 0x9E3779B1) ^ (before * 0x85EBCA6B) ^ length * 0xC2B2AE35) + seed
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        return (mixed ^ (mixed >> 12)) % vocabulary_size

    return next_token
