"""Followers: our engines, given each event that a test plays on the specification.

A scene is written once, as a test of `tests/spec` whose expectations are written by hand. Each of
our engines that has what the config asks for gets the same events, and after each event its answer
and its state are compared with those of the specification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

from plain_engine import PlainEngine

from blockstep.conformance.engine import Engine, EngineFactory
from blockstep.conformance.protocol.compare import observation_differences, snapshot_differences
from blockstep.conformance.protocol.features import find_lacking, fit, get_missing
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec.core.state import State
from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.vocabulary import (
    Config,
    ConfigError,
    Event,
    Observation,
    Rejected,
    Request,
    Submit,
)

ENGINES: Mapping[str, EngineFactory] = {
    "host": HostEngine,
    "plain": PlainEngine,
    "device": DeviceEngine,
}


class Followers:
    """The engines that follow one specification, and why the others do not."""

    def __init__(self, config: Config, engines: Mapping[str, EngineFactory] = ENGINES) -> None:
        self.engines: dict[str, Engine] = {}
        self.declined: dict[str, str] = {}
        """Why an engine does not follow, or follows no longer."""
        self.state: State | None = None
        """The state of the specification after the last event that the engines were given."""
        self.num_compared = 0
        for name, make_engine in engines.items():
            try:
                self.engines[name] = make_engine(config)
            except ConfigError as error:
                self.declined[name] = str(error)

    def apply(self, event: Event, expected: Observation, oracle: Oracle) -> None:
        """Give the event to each engine and compare.

        Raises:
            AssertionError: an engine's answer or state differs from the specification's.
        """
        state = oracle.snapshot()
        for name, engine in [*self.engines.items()]:
            capabilities = engine.capabilities()
            lacking = find_lacking(capabilities)
            missing = get_missing(event, lacking)
            if missing is None and isinstance(event, Submit) and isinstance(event.request, Request):
                missing = next(iter(fit(event.request, lacking)[1]), None)
            if missing is not None:
                del self.engines[name]
                self.declined[name] = f"{missing} is needed for {event}"
                continue
            with_hints = "common prefix" in capabilities
            seen, after = engine.apply(event), engine.snapshot()
            assert after is not None, f"{name} shows no state"
            differences = observation_differences(expected, seen, with_hints)
            differences += snapshot_differences(state, after)
            assert not differences, f"{name} differs after {event}: {differences}"
            has_reason = not isinstance(seen, Rejected) or seen.detail
            assert has_reason, f"{name} rejects {event} without a reason"
            self.num_compared += 1
        self.state = oracle.state


@contextmanager
def following(engines: Mapping[str, EngineFactory] = ENGINES) -> Iterator[list[Followers]]:
    """Let engines follow each specification without quirks that is built meanwhile.

    Where a test replaces the state of a specification, its engines follow no longer.
    """
    build, apply = Oracle.__init__, Oracle.apply
    found: list[Followers] = []
    by_oracle: dict[int, tuple[Oracle, Followers]] = {}

    def build_followed(self: Oracle, config: Config, profile: Profile = STRICT) -> None:
        build(self, config, profile)
        if not profile.quirks:
            followers = Followers(config, engines)
            followers.state = self.state
            by_oracle[id(self)] = self, followers
            found.append(followers)

    def apply_followed(self: Oracle, event: Event) -> Observation:
        followers = by_oracle.get(id(self), (None, None))[1]
        is_followed = followers is not None and followers.state is self.state
        answer = apply(self, event)
        if followers is not None and is_followed:
            followers.apply(event, answer, self)
        return answer

    with (
        patch.object(Oracle, "__init__", build_followed),
        patch.object(Oracle, "apply", apply_followed),
    ):
        yield found
