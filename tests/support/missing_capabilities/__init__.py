"""An engine of ours without some capabilities, which raises if a tool uses one of them.

An engine must never get what it does not claim. So an engine that is sent an event, a request or a
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
"""Capabilities that change only what an engine shows, not what it is given."""


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
        """Return all capabilities but the missing ones."""
        return self._has

    def snapshot(self) -> v.Snapshot | None:
        """The state, if it can show it."""
        return self._engine.snapshot() if Capability.SNAPSHOT in self._has else None

    def apply(self, event: v.Event) -> v.Observation:
        """Apply an event. Raises EngineFault if the event needs a capability that is missing."""
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
        """Raise for drafts that are too late, without REJECTION and LATE_DRAFTS.

        Drafts for a chunk of a prompt are not late.
        """
        if {Capability.REJECTION, Capability.LATE_DRAFTS} & self._has:
            return
        shown = {request.request_id: request for request in self._engine.snapshot().requests}
        left = {row.request_id for row in event.drafts} - {*answer.request_ids}
        if not all(name in shown and shown[name].is_prefill_chunk for name in left):
            raise EngineFault(f"given late drafts: {event}, took {answer.request_ids}")


def make_lacking(
    make_engine: EngineFactory, lacks: Collection[str], traits: EngineTraits | None = None
) -> Callable[[v.Config], LackingEngine]:
    """Return a factory of such engines."""

    class Lacking(LackingEngine):
        def __init__(self, config: v.Config) -> None:
            super().__init__(make_engine(config), config, lacks)

    if traits is not None:
        Lacking.traits = traits  # type: ignore[attr-defined]
    return Lacking
