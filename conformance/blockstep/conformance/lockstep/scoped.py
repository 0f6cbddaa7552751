"""Scoped: runs of engines that are held to a weaker equivalence than `exact`, whatever it is.

Its factory says what such an engine can be given (`engine.Equivalence`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

from blockstep.conformance.engine import EngineFactory, Equivalence, Safety, get_traits
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action
from blockstep.spec import vocabulary as v

DECLINED = "requests that are not for this engine"
"""Counted under this name; `Equivalence.fit_request` says which."""
_NO_FEATURES = {"max_tokens", "arrival_time"}
"""Fields that every engine has: a length, and a place in the order of arrival."""


def _list_changes(one: v.Config | v.Request, other: v.Config | v.Request) -> list[str]:
    """The fields in which two of a kind differ."""
    return [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]


@dataclass(slots=True, kw_only=True)
class ScopedRun(LockStep):
    """One run of one engine, within what its equivalence says of it. Not reusable."""

    scope: Equivalence = field(default_factory=Safety)

    @classmethod
    def start(cls, config: v.Config, make_engine: EngineFactory, *args: Any, **kwargs: Any) -> Self:
        """Build the engine and all that watches it, as `LockStep.start` does.

        Raises:
            ConfigError: the engine cannot be built with this config.
        """
        scope = get_traits(make_engine).equivalence or Safety()
        fitting = scope.fit_config(config)
        for name in _list_changes(config, fitting):
            rule, fix = "is not a config of this engine", f"use {getattr(fitting, name)!r}"
            raise v.ConfigError([v.ConfigProblem(name, getattr(config, name), rule, fix)])
        run = super(ScopedRun, cls).start(config, make_engine, *args, **kwargs)
        run.equivalence, run.scope = scope.name, scope
        return run

    def fit(self, action: Action) -> Action:
        """The action that the engine understands; what it drops is counted."""
        if not isinstance(action, v.Submit):
            return action
        fitting = self.scope.fit_request(action.request, self.config)
        if fitting is None:
            return action  # and `apply` does not submit it
        kept = {*_NO_FEATURES, *_list_changes(fitting, v.Request("", ()))}
        for name in _list_changes(action.request, fitting):
            if name not in kept:
                self.skip(name)
        return LockStep.fit(self, v.Submit(fitting))

    def apply(self, event: v.Event) -> list[Finding]:
        """Give one event to both sides, unless it is a request that is not for this engine."""
        return [] if self._is_declined(event) else LockStep.apply(self, event)

    def _is_declined(self, event: v.Event) -> bool:
        """Whether the engine says that a request is not for it; counted if so."""
        if not isinstance(event, v.Submit):
            return False
        is_declined = self.scope.fit_request(event.request, self.config) is None
        if is_declined:
            self.skip(DECLINED)
        return is_declined
