"""Fastest: the engine that one takes who does not care which, chosen by the config."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol, TypeAlias, cast

from blockstep.impl.capabilities import COMPILED, DEVICE, HOST, list_needed
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import Config, Event, Observation, Snapshot


class Scheduler(Protocol):
    """Any of our engines."""

    def apply(self, event: Event) -> Observation:
        """Take one event."""
        ...

    def snapshot(self) -> Snapshot:
        """The canonical state."""
        ...

    def capabilities(self) -> frozenset[str]:
        """What it implements."""
        ...


MakeScheduler: TypeAlias = Callable[[Config], Scheduler]
NAMED: Final = {"fastest": HOST, "host": HOST, "device": DEVICE}
"""Who wants one by name: what it is capable of, at most."""


def get_named(name: str, config: Config, also: frozenset[str] = frozenset()) -> MakeScheduler:
    """The factory of the engine of a name in `NAMED`; "fastest": as `get_fastest`."""
    if name == "host":
        return HostEngine
    if name == "device":
        device: Any = import_module("blockstep.impl.device.engine")
        return cast("MakeScheduler", device.DeviceEngine)
    return get_fastest(config, also)


def get_fastest(config: Config, also: frozenset[str] = frozenset()) -> MakeScheduler:
    """The factory of the fastest engine that can take this config here.

    The compiled one if numba is there and its capabilities cover what the config asks for, and what
    requests ask for `also`; the host engine, which can do everything, otherwise. Imported only
    then: its import compiles.
    """
    if find_spec("numba") is not None and list_needed(config) | also <= COMPILED:
        compiled: Any = import_module("blockstep.impl.compiled")
        if compiled.IS_COMPILED:
            return cast("MakeScheduler", compiled.CompiledEngine)
    return HostEngine


def make_engine(config: Config) -> Scheduler:
    """An engine that `get_fastest` chose.

    Raises:
        ConfigError: `config_problems` has something against the config.
    """
    return get_fastest(config)(config)
