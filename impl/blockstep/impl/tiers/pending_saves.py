"""Announced: block names that a request has announced to save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Announced:
    """Block names with the number of announcements of each that are still open."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, names: Iterable[bytes], is_coming: bool) -> None:
        """Add one announcement for each name; take one back if `is_coming` is False."""
        for name in names:
            count = self._counts.get(name, 0) + (1 if is_coming else -1)
            if count > 0:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)

    def has_any(self, names: Sequence[bytes]) -> bool:
        """Return whether one of `names` has an open announcement."""
        return any(name in self._counts for name in names)
