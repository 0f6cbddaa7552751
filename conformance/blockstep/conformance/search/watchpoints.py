"""Watchpoints: decisions that break nothing but may surprise.

An engine that is compared with the specification takes them too, or would differ; so a report names
them. For an engine that decides by its own policy they mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from blockstep.conformance.engine import Capability, Engine, EngineFactory, Safety
from blockstep.conformance.search.engine_wrappers import Wrapped, Wrapping
from blockstep.spec import vocabulary as v


@dataclass(frozen=True, slots=True)
class Watchpoint:
    """Decision that may surprise, and the condition under which it shows."""

    name: str
    title: str
    upstream: str
    capability: Capability
    """Capability that an engine needs for it."""
    is_seen: Callable[[v.Config, Mapping[v.RequestId, v.Request], v.Snapshot], bool]
    """Returns whether it shows in the state after a plan."""


def urgent_request_waits(
    config: v.Config, requests: Mapping[v.RequestId, v.Request], after: v.Snapshot
) -> bool:
    """Return whether all running slots are taken, and a running request is less urgent than a
    waiting one."""
    if config.policy is not v.Policy.PRIORITY or len(after.running) < config.max_num_seqs:
        return False
    least_urgent = max(requests[name].priority for name in after.running)
    return any(requests[name].priority < least_urgent for name in after.waiting)


WATCHPOINTS = (
    Watchpoint(
        "urgent_waits_for_a_seat",
        "however urgent a request is, it waits until one of max_num_seqs running slots is free",
        "#40004, #45561 (open)",
        Capability.PRIORITY,
        urgent_request_waits,
    ),
)


class PolicySeenError(Exception):
    """A watchpoint was reached."""


class WatchedEngine(Wrapped):
    """Engine that raises as soon as a watchpoint is reached."""

    def __init__(self, engine: Engine, config: v.Config, watchpoint: Watchpoint) -> None:
        super().__init__(engine)
        self.config, self.watchpoint = config, watchpoint
        self.requests: dict[v.RequestId, v.Request] = {}

    def apply(self, event: v.Event) -> v.Observation:
        """Apply an event and test the state after it. Raises PolicySeenError."""
        seen = super().apply(event)
        if isinstance(event, v.Submit):
            self.requests[event.request.request_id] = event.request
        after = self.engine.snapshot() if isinstance(event, v.Schedule) else None
        if after is not None and self.watchpoint.is_seen(self.config, self.requests, after):
            raise PolicySeenError(self.watchpoint.name)
        return seen


def watch_engine(make_engine: EngineFactory, watchpoint: Watchpoint) -> EngineFactory:
    """Return a factory of engines that raise at a watchpoint."""
    return Wrapping(make_engine, lambda engine, config: WatchedEngine(engine, config, watchpoint))


def can_take(watchpoint: Watchpoint, capabilities: Collection[str], weaker: str | None) -> bool:
    """Return whether the watchpoint is meaningful for an engine."""
    needed = {Capability.SNAPSHOT, watchpoint.capability}
    return weaker != Safety().name and needed.issubset(capabilities)
