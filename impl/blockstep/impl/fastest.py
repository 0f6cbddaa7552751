"""Fastest: chooses the fastest of our engines for a config."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol, TypeAlias, cast

from blockstep.impl.capabilities import COMPILED, DEVICE, HOST, list_needed
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import Config, Event, Observation, Snapshot


class Scheduler(Protocol):
    """The interface of our engines."""

    def apply(self, event: Event) -> Observation:
        """Apply one event; return its observation."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the canonical state."""
        ...

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements."""
        ...


MakeScheduler: TypeAlias = Callable[[Config], Scheduler]
NAMED: Final = {"fastest": HOST, "host": HOST, "device": DEVICE}
"""Names of engines in settings, with the most that each is capable of."""


def get_named(name: str, config: Config, also: frozenset[str] = frozenset()) -> MakeScheduler:
    """Return the factory of the engine of this name; "fastest": see `get_fastest`."""
    if name == "host":
        return HostEngine
    if name == "device":
        device: Any = import_module("blockstep.impl.device.engine")
        return cast("MakeScheduler", device.DeviceEngine)
    return get_fastest(config, also)


def get_fastest(config: Config, also: frozenset[str] = frozenset()) -> MakeScheduler:
    """Return the factory of the fastest engine here that supports this config.

    It is the compiled engine if numba is installed and its capabilities cover what the config needs
    and what requests need (`also`); otherwise the host engine, which supports everything. The
    compiled engine is imported only then, because its import compiles.
    """
    if find_spec("numba") is not None and list_needed(config) | also <= COMPILED:
        compiled: Any = import_module("blockstep.impl.compiled")
        if compiled.IS_COMPILED:
            return cast("MakeScheduler", compiled.CompiledEngine)
    return HostEngine


def make_engine(config: Config) -> Scheduler:
    """Return an engine chosen by `get_fastest`.

    Raises:
        ConfigError: `config_problems` finds a problem in the config.
    """
    return get_fastest(config)(config)
