"""Wrapped engines: an engine with a layer of the tool around it, checked like the engine itself."""

from __future__ import annotations

from collections.abc import Callable

from blockstep.conformance.engine import (
    Capability,
    Engine,
    EngineFactory,
    EngineFault,
    get_declines,
    get_judged,
    get_traits,
)
from blockstep.spec.vocabulary import Config, Event, Observation, Snapshot


class Wrapped:
    """Engine that forwards every call to the engine inside."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.judges = get_judged(engine)
        self._declines = get_declines(engine)

    def capabilities(self) -> frozenset[str]:
        """Return the capabilities of the engine, with its current flags."""
        return self.engine.capabilities()

    def apply(self, event: Event) -> Observation:
        """Return the engine's answer."""
        return self.engine.apply(event)

    def snapshot(self) -> Snapshot | None:
        """Return the engine's state."""
        return self.engine.snapshot()

    def declines(self, event: Event) -> str | None:
        """Return why the engine declines an event, or None."""
        return None if self._declines is None else self._declines(event)


class Wrapping:
    """Factory of wrapped engines, with the traits of the engine's own factory."""

    def __init__(
        self, make_engine: EngineFactory, wrap: Callable[[Engine, Config], Engine]
    ) -> None:
        self.make_engine, self.wrap = make_engine, wrap
        self.traits = get_traits(make_engine)

    def __call__(self, config: Config) -> Engine:
        """Build an engine and wrap it."""
        return self.wrap(self.make_engine(config), config)


def unwrapped(engine: object) -> object:
    """Return the engine as its own factory made it."""
    while isinstance(engine, Wrapped):
        engine = engine.engine
    return engine


class StateHidden(Wrapped):
    """Engine whose state is hidden, so that only its answers are judged.

    A wrong state is found at once and ends the run. Without the state the run continues until its
    consequences show in answers, and other defects are found.
    """

    def capabilities(self) -> frozenset[str]:
        """Return the capabilities of the engine without snapshots."""
        return super().capabilities() - {Capability.SNAPSHOT}

    def snapshot(self) -> None:
        """Return None."""


class Stopped(Wrapped):
    """Engine that is not given one event, at which its process would die, nor any later one."""

    def __init__(self, engine: Engine, at: int) -> None:
        """Wrap `engine`; `at` counts events from 1."""
        super().__init__(engine)
        self.num_left = at

    def apply(self, event: Event) -> Observation:
        """Return the engine's answer before that event. Raises EngineFault at it."""
        self.num_left -= 1
        if self.num_left <= 0:
            raise EngineFault("the run is to end here")
        return super().apply(event)


def stop_before(make_engine: EngineFactory, at: int) -> EngineFactory:
    """Return a factory of the same engines, each of which stops before its event number `at`."""
    return Wrapping(make_engine, lambda engine, _config: Stopped(engine, at))


def hide_state(make_engine: EngineFactory) -> EngineFactory:
    """Return a factory of the same engines without their states."""
    return Wrapping(make_engine, lambda engine, _config: StateHidden(engine))
