"""The canary: an engine that must be caught before any green is believed (architecture D9)."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Snapshot


class CanaryEngine(SpecEngine):
    """The specification, but a block is lost from the free queue whenever the pool is half used.

    A check that lets it pass looks at nothing.
    """

    def snapshot(self) -> Snapshot:
        """The state with a leak in it."""
        snapshot = super().snapshot()
        if 2 * len(snapshot.free_queue) >= self.state.config.num_usable_blocks:
            return snapshot
        return replace(snapshot, free_queue=snapshot.free_queue[1:])
