"""Adapters: running requests use at most `max_loras` different ones (P9)."""

from __future__ import annotations

from collections.abc import Iterable


class AdapterSeats:
    """The LoRA slots that are left for requests admitted in a step.

    Args:
        max_loras: the most different adapters of running requests.
        running: the adapter of each running request; None for one without.
    """

    def __init__(self, max_loras: int, running: Iterable[str | None]) -> None:
        self.max_loras = max_loras
        self.used = {name for name in running if name is not None}

    def has_seat(self, adapter: str | None) -> bool:
        """Return whether a request with this adapter may run; without an adapter it needs no
        slot."""
        if adapter is None or adapter in self.used:
            return True
        return len(self.used) < self.max_loras

    def take(self, adapter: str | None) -> None:
        """Count a request with this adapter as running."""
        if adapter is not None:
            self.used.add(adapter)
