"""Announced: of which blocks somebody has said that they will come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Announced:
    """Names, and how often each was announced."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, names: Iterable[bytes], is_coming: bool) -> None:
        """They will come; or will not, whatever was said before."""
        for name in names:
            count = self._counts.get(name, 0) + (1 if is_coming else -1)
            if count > 0:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)

    def has_any(self, names: Sequence[bytes]) -> bool:
        """Whether one of them is awaited."""
        return any(name in self._counts for name in names)
