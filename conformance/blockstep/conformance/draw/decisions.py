"""Decisions: the interface through which everything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Draw(Protocol):
    """Source of decisions: a seeded generator, or Hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """Return an int between `low` and `high`, both included."""
        ...

    def choice(self, options: Sequence[T]) -> T:
        """Return one of `options`, which are not empty."""
        ...

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` in a hundred."""
        ...

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """Return `count` token ids below `vocabulary_size`."""
        ...
