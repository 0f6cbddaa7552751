"""Scoped: runs of engines under any equivalence weaker than `exact`.

The factory says which configs and requests such an engine can be given (`engine.Equivalence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from blockstep.conformance.engine import (
    EngineFactory,
    EngineFault,
    Equivalence,
    Safety,
    get_traits,
)
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.exchange import ask_adapter
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.features import fit
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action
from blockstep.conformance.protocol.renaming import LoadPairs
from blockstep.spec import vocabulary as v

DECLINED = "requests that are not for this engine"
"""Name under which they are counted; `Equivalence.fit_request` decides which."""
_NO_FEATURES = {"max_tokens", "arrival_time"}
"""Fields that every engine has: a length, and a place in the order of arrival."""


def _list_changes(one: v.Config | v.Request, other: v.Config | v.Request) -> list[str]:
    """Return the fields in which two objects of the same type differ."""
    return [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]


def require_fitting(config: v.Config, scope: Equivalence) -> None:
    """Raise ConfigError if an engine cannot be built with a config."""
    fitting = scope.fit_config(config)
    for name in _list_changes(config, fitting):
        rule, fix = "is not a config of this engine", f"use {getattr(fitting, name)!r}"
        raise v.ConfigError([v.ConfigProblem(name, getattr(config, name), rule, fix)])


def fit_submit(
    action: v.Submit,
    scope: Equivalence,
    config: v.Config,
    lacking: Iterable[Feature],
    skip: Callable[[str], None],
) -> v.Submit | None:
    """Return the submission that an engine understands, or None; what is left out is passed to
    `skip`. Raises EngineFault as `ask_adapter`."""
    fitting = ask_adapter("fit_request", scope.fit_request, action.request, config)
    if fitting is None:
        return None
    kept = {*_NO_FEATURES, *_list_changes(fitting, v.Request("", ()))}
    for name in _list_changes(action.request, fitting):
        if name not in kept:
            skip(name)
    request, missing = fit(fitting, lacking)
    for capability in missing:
        skip(capability)
    return v.Submit(request)


@dataclass(slots=True, kw_only=True)
class ScopedRun(LockStep):
    """One run of one engine under its equivalence. Not reusable."""

    scope: Equivalence = field(default_factory=Safety)
    loads: LoadPairs = field(init=False)

    def __post_init__(self) -> None:
        self.loads = LoadPairs(self.config.num_blocks)

    def _translate(self, event: v.Event) -> v.Event:
        """Return the event with the engine's ids of blocks that could not be loaded."""
        if not isinstance(event, v.Commit | v.TransfersReported):
            return event
        if not event.transfers.invalid_block_ids:
            return event
        invalid = self.loads.to_engine(event.transfers.invalid_block_ids)
        return replace(event, transfers=replace(event.transfers, invalid_block_ids=invalid))

    @classmethod
    def start(cls, config: v.Config, make_engine: EngineFactory, *args: Any, **kwargs: Any) -> Self:
        """Build the engine, its worker and its checks, as `LockStep.start` does.

        Raises:
            ConfigError: the engine cannot be built with this config.
        """
        scope = get_traits(make_engine).equivalence or Safety()
        require_fitting(config, scope)
        run = super(ScopedRun, cls).start(config, make_engine, *args, **kwargs)
        run.equivalence, run.scope = scope.name, scope
        return run

    def fit(self, action: Action) -> Action:
        """Return the action that the engine understands; what is left out is counted."""
        if not isinstance(action, v.Submit):
            return action
        try:
            fitting = fit_submit(action, self.scope, self.config, self.lacking, self.skip)
        except EngineFault:
            return action  # `apply` reports it
        return fitting or action  # `apply` does not submit it

    def _apply(self, event: v.Event) -> list[Finding]:
        """Give one event to both sides, unless the engine declines it or must do another one
        first."""
        if self._is_declined(event) or self._is_early(event):
            return []
        return LockStep._apply(self, event)

    def _is_declined(self, event: v.Event) -> bool:
        """Return whether the engine declines a request; counted if so."""
        if not isinstance(event, v.Submit):
            return False
        is_declined = self._fit_request(event.request) is None
        if is_declined:
            self.skip(DECLINED)
        return is_declined

    def _fit_request(self, request: v.Request) -> v.Request | None:
        """Return the nearest request that the engine takes. Raises EngineFault as `ask_adapter`."""
        return ask_adapter("fit_request", self.scope.fit_request, request, self.config)

    def _is_early(self, event: v.Event) -> bool:
        """Return whether an engine that plans ahead must plan or commit before this event."""
        if not (self.scope.plans_ahead and self.plans):
            return False
        return isinstance(event, v.Schedule if self._must_answer() else v.Commit)

    def _must_answer(self) -> bool:
        """Return whether an engine that plans ahead commits next: it is full, or has nothing to
        plan."""
        is_full = len(self.plans) == self.config.max_frames_in_flight
        is_idle = self.last_plan is not None and not self.last_plan.rows
        return is_full or is_idle

    def _answer_all(self) -> list[Finding]:
        """Commit all plans in flight; an engine that plans ahead begins a turn for it."""
        findings: list[Finding] = []
        if self.scope.plans_ahead and self.plans and not self._must_answer():
            findings = self.apply(v.Schedule())
        return findings or LockStep._answer_all(self)
