"""Wrapped: an engine with something of ours around it, which is held to what it was held to."""

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
    """An engine that says and does what the one inside of it says and does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.judges = get_judged(engine)
        self._declines = get_declines(engine)

    def capabilities(self) -> frozenset[str]:
        """Those of the engine, as its flags stand now."""
        return self.engine.capabilities()

    def apply(self, event: Event) -> Observation:
        """As the engine does."""
        return self.engine.apply(event)

    def snapshot(self) -> Snapshot | None:
        """As the engine does."""
        return self.engine.snapshot()

    def declines(self, event: Event) -> str | None:
        """As the engine does."""
        return None if self._declines is None else self._declines(event)


class Wrapping:
    """A factory of wrapped engines; says of them what the engine's own says."""

    def __init__(
        self, make_engine: EngineFactory, wrap: Callable[[Engine, Config], Engine]
    ) -> None:
        self.make_engine, self.wrap = make_engine, wrap
        self.traits = get_traits(make_engine)

    def __call__(self, config: Config) -> Engine:
        """Build one."""
        return self.wrap(self.make_engine(config), config)


def unwrapped(engine: object) -> object:
    """The engine as its own factory made it."""
    while isinstance(engine, Wrapped):
        engine = engine.engine
    return engine


class StateHidden(Wrapped):
    """An engine whose state is not asked for, so that its answers alone are judged.

    What is wrong with a state is found at once, and a run ends there. Without the state it goes on
    to what comes of it, and to what is wrong beside it.
    """

    def capabilities(self) -> frozenset[str]:
        """Those of the engine, without its state."""
        return super().capabilities() - {Capability.SNAPSHOT}

    def snapshot(self) -> None:
        """Nothing."""


class Stopped(Wrapped):
    """An engine that is not given one event, which it would not live through, nor any after it."""

    def __init__(self, engine: Engine, at: int) -> None:
        """`at` counts events from 1."""
        super().__init__(engine)
        self.num_left = at

    def apply(self, event: Event) -> Observation:
        """As the engine does, before that event."""
        self.num_left -= 1
        if self.num_left <= 0:
            raise EngineFault("the run is to end here")
        return super().apply(event)


def stop_before(make_engine: EngineFactory, at: int) -> EngineFactory:
    """The factory of the same engines, each of which stops before its event number `at`."""
    return Wrapping(make_engine, lambda engine, _config: Stopped(engine, at))


def hide_state(make_engine: EngineFactory) -> EngineFactory:
    """The factory of the same engines that keep their states to themselves."""
    return Wrapping(make_engine, lambda engine, _config: StateHidden(engine))
