"""Canaries: broken engines that every run must catch before it may pass (architecture D9)."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.engine import Capability, EngineTraits, Renamed, Safety, SamePlans
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Event, Observation, Plan, Snapshot


class CanaryEngine(SpecEngine):
    """The specification with one block missing from the free queue while half of the pool is in
    use.

    A run that does not catch it compares nothing.
    """

    def snapshot(self) -> Snapshot:
        """Return the state without the first free block, if more than half of the pool is in
        use."""
        snapshot = super().snapshot()
        if 2 * len(snapshot.free_queue) >= self.state.config.num_usable_blocks:
            return snapshot
        return replace(snapshot, free_queue=snapshot.free_queue[1:])


class RenamedCanary(CanaryEngine):
    """The canary of `Renamed`: the missing block shows under any renaming."""

    traits = EngineTraits(equivalence=Renamed())


class SafetyCanary(SpecEngine):
    """The canary of `Safety`: it shows no state, and claims a prefix hit that is not cached."""

    traits = EngineTraits(equivalence=Safety())

    def apply(self, event: Event) -> Observation:
        """Return the specification's answer, but the first new row of a plan counts one more token
        as hit."""
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
        """Return None: the plans must be enough."""
        return

    def capabilities(self) -> frozenset[str]:
        """Return all capabilities except rejection and snapshots."""
        return super().capabilities() - {Capability.REJECTION, Capability.SNAPSHOT}


class PlanCanary(SafetyCanary):
    """The canary of `SamePlans`: a false hit, and so fewer tokens scheduled than by the
    specification."""

    traits = EngineTraits(equivalence=SamePlans(shows_blocks=True))
