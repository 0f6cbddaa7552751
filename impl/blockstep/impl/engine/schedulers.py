"""Schedulers: the engines that decide for `LLM`, by the names that settings use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from blockstep.impl.capabilities import DEVICE, HOST
from blockstep.spec.vocabulary import Config, Event, Observation, Snapshot


class Scheduler(Protocol):
    """The interface of our engines."""

    def apply(self, event: Event) -> Observation:
        """Apply one event; return its observation."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the canonical state."""
        ...

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements."""
        ...


MakeScheduler: TypeAlias = Callable[[Config], Scheduler]
SCHEDULERS: Final = {"host": HOST, "device": DEVICE}
"""Names of schedulers in settings, with their capabilities."""
