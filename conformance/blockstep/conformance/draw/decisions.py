"""Decisions: what a draw asks for, wherever it is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Draw(Protocol):
    """Where decisions come from: a seeded generator, or Hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """An int between `low` and `high`, both included."""
        ...

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`, of which there is at least one."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases."""
        ...

    def tokens(self, count: int, vocabulary_size: int) -> tuple[int, ...]:
        """So many token ids below `vocabulary_size`."""
        ...
