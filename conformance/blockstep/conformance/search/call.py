"""Call: runs a function with the engine, in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, TypeVarTuple

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.wrapped import hide_state

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Call(Protocol):
    """Calls a function with an engine: in this process (`call_here`) or in others
    (`Isolation.call`)."""

    def __call__(
        self,
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = ...,
    ) -> T:
        """Return what the function returns; each value that it yields is given to `on_part`."""
        ...


def call_here(make_engine: EngineFactory) -> Call:
    """Return a `Call` that gives functions this engine, in this process."""

    def call(
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = lambda _part: None,
    ) -> T:
        factory = hide_state(make_engine) if options.hide_state else make_engine
        value = function(options, factory, *args)
        if isinstance(value, Iterator):
            for part in value:
                on_part(part)
        return value

    return call
