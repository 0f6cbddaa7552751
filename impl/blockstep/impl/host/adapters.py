"""Adapters: at most so many different ones are among the requests that run (P9)."""

from __future__ import annotations

from collections.abc import Iterable


class AdapterSeats:
    """Who may still be admitted in a step, as far as adapters go.

    Args:
        max_loras: different adapters among those who run, at most.
        running: the adapter of each who runs; None for one without.
    """

    def __init__(self, max_loras: int, running: Iterable[str | None]) -> None:
        self.max_loras = max_loras
        self.used = {name for name in running if name is not None}

    def has_seat(self, adapter: str | None) -> bool:
        """Whether a request may run with it; one without an adapter needs no seat."""
        if adapter is None or adapter in self.used:
            return True
        return len(self.used) < self.max_loras

    def take(self, adapter: str | None) -> None:
        """A request of this adapter runs from now on."""
        if adapter is not None:
            self.used.add(adapter)
