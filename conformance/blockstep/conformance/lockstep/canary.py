"""The canaries: engines that must be caught before any green is believed (architecture D9)."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.engine import Capability, EngineTraits, Renamed, Safety, SamePlans
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Event, Observation, Plan, Snapshot


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


class RenamedCanary(CanaryEngine):
    """The same block is missing whatever it is called."""

    traits = EngineTraits(equivalence=Renamed())


class SafetyCanary(SpecEngine):
    """An engine that a safety run must catch: it shows no state, and claims a hit that was none."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: Event) -> Observation:
        """The right answer, but the first newcomer of each plan leaves out a token."""
        answer = super().apply(event)
        if not isinstance(answer, Plan) or not answer.new:
            return answer
        row = answer.new[0]
        if row.num_scheduled_tokens == 1:
            return answer
        claimed = replace(
            row,
            num_computed_tokens=row.num_computed_tokens + 1,
            num_scheduled_tokens=row.num_scheduled_tokens - 1,
        )
        return replace(answer, new=(claimed, *answer.new[1:]))

    def snapshot(self) -> None:  # type: ignore[override]
        """Nothing: plans must be enough."""
        return

    def capabilities(self) -> frozenset[str]:
        """All that needs no refusal and no state."""
        return super().capabilities() - {Capability.REJECTION, Capability.SNAPSHOT}


class PlanCanary(SafetyCanary):
    """A hit that was none, and other tokens than those of the specification in that step."""

    traits = EngineTraits(equivalence=SamePlans(shows_blocks=True))
