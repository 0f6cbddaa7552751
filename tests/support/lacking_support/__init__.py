"""Lacking: an engine of ours that says that it cannot do some things, and breaks if it is asked to.

What an engine does not claim it must never be given. So whoever is sent an event, a request or a
config for which a capability is missing raises, and the tools that did it are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    Capability,
    EngineFactory,
    EngineFault,
    EngineTraits,
)
from blockstep.conformance.protocol.features import find_lacking
from blockstep.spec import vocabulary as v

HIDDEN = frozenset({Capability.SNAPSHOT})
"""What an engine only shows less by: nothing that it is given depends on it."""


class LackingEngine:
    """An engine that has everything but `lacks`."""

    def __init__(self, engine: Any, config: v.Config, lacks: Collection[str]) -> None:
        self._engine, self._config = engine, config
        self._has = ALL_CAPABILITIES - frozenset(lacks)
        self._features = find_lacking(self._has)
        self._given: dict[v.RequestId, v.Request] = {}
        for feature in self._features:
            if feature.is_asked_by(config):
                raise EngineFault(f"given {feature.name} in {config}")

    def capabilities(self) -> frozenset[str]:
        """All but what it lacks."""
        return self._has

    def snapshot(self) -> v.Snapshot | None:
        """The state, if it can show it."""
        return self._engine.snapshot() if Capability.SNAPSHOT in self._has else None

    def apply(self, event: v.Event) -> v.Observation:
        """As the engine does. Raises EngineFault at what it should not have been given."""
        self._look_at(event)
        answer: v.Observation = self._engine.apply(event)
        if isinstance(answer, v.Rejected) and Capability.REJECTION not in self._has:
            raise EngineFault(f"given what only a rejection answers: {event}: {answer.detail}")
        if isinstance(event, v.Drafts) and isinstance(answer, v.DraftsTaken):
            self._look_at_drafts(event, answer)
        return answer

    def _look_at(self, event: v.Event) -> None:
        for feature in self._features:
            if isinstance(event, feature.actions) or (
                isinstance(event, v.Submit) and feature.is_asked_by(event.request)
            ):
                raise EngineFault(f"given {feature.name}: {event}")

    def _look_at_drafts(self, event: v.Drafts, answer: v.DraftsTaken) -> None:
        """Without REJECTION and LATE_DRAFTS no drafts may come too late; those of a chunk of a
        prompt are not late."""
        if {Capability.REJECTION, Capability.LATE_DRAFTS} & self._has:
            return
        shown = {request.request_id: request for request in self._engine.snapshot().requests}
        left = {row.request_id for row in event.drafts} - {*answer.request_ids}
        if not all(name in shown and shown[name].is_prefill_chunk for name in left):
            raise EngineFault(f"given late drafts: {event}, took {answer.request_ids}")


def make_lacking(
    make_engine: EngineFactory, lacks: Collection[str], traits: EngineTraits | None = None
) -> Callable[[v.Config], LackingEngine]:
    """A factory of such engines."""

    class Lacking(LackingEngine):
        def __init__(self, config: v.Config) -> None:
            super().__init__(make_engine(config), config, lacks)

    if traits is not None:
        Lacking.traits = traits  # type: ignore[attr-defined]
    return Lacking
