"""Copies: a state or an engine as bytes, without what all of them share.

An engine that can be pickled is kept as bytes, which takes a third of the time of a deep copy and
none of its memory; any other is built anew and driven along the shortest path.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

from blockstep.conformance.engine import Engine, EngineFactory
from blockstep.conformance.explore.world import World
from blockstep.spec import vocabulary as v

Kept = bytes | tuple[v.Event, ...]
"""A pickled engine, or the events that lead to where it stands."""


class Packer:
    """Pickles what shares constants with its like: they are written as numbers.

    So a planted class that no import finds can be written, and what every copy has anyway, such as
    the config, is neither written nor read again.
    """

    def __init__(self, constants: Iterable[object]) -> None:
        self._constants = tuple(constants)
        self._numbers = {id(value): number for number, value in enumerate(self._constants)}

    def pack(self, value: object) -> bytes:
        """The value as bytes, for a packer with the same constants."""
        file = io.BytesIO()
        _Pickler(file, self._numbers).dump(value)
        return file.getvalue()

    def unpack(self, packed: bytes) -> Any:
        """A value that nobody else has, but for the constants in it."""
        return _Unpickler(io.BytesIO(packed), self._constants).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def reducer_override(self, value: Any) -> Any:
        number = self._numbers.get(id(value))
        return NotImplemented if number is None else (_constant, (number,))


def _constant(_number: int) -> object:
    """Stands for the table of constants while a value is bytes."""
    raise AssertionError("found by the unpickler under this name, and never called")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, constants: tuple[object, ...]) -> None:
        super().__init__(file)
        self._constants = constants

    def find_class(self, module: str, name: str) -> Any:
        if name == _constant.__name__ and module == __name__:
            return self._constants.__getitem__
        return super().find_class(module, name)


def get_constants(world: World) -> list[object]:
    """What every state of a world and every engine in it have in common."""
    members = (*v.Status, *v.PauseState, *v.Policy, *v.SpecMethod)
    return [world.config, *world.requests, *members]


class Copies:
    """Keeps engines of one factory and brings them back, in one world."""

    def __init__(self, make_engine: EngineFactory, world: World) -> None:
        self._make_engine = make_engine
        self._config = world.config
        first = make_engine(world.config)
        parts = getattr(first, "__dict__", {}).values()
        kinds = dict.fromkeys([type(first), *map(type, parts)])
        self._packer = Packer([*get_constants(world), *kinds])
        self._pickles = self._can_pickle(first, world)

    def start(self) -> Kept:
        """A new engine, before the first event."""
        return self._packer.pack(self._make_engine(self._config)) if self._pickles else ()

    def revive(self, kept: Kept) -> Engine:
        """An engine that stands where the kept one stood; nobody else has it."""
        if isinstance(kept, bytes):
            engine: Engine = self._packer.unpack(kept)
            return engine
        engine = self._make_engine(self._config)
        for event in kept:
            engine.apply(event)
        return engine

    def keep(self, engine: Engine, before: Kept, event: v.Event) -> Kept:
        """To come back to `engine`, which has just taken `event`."""
        return (*before, event) if isinstance(before, tuple) else self._packer.pack(engine)

    def _can_pickle(self, engine: Engine, world: World) -> bool:
        """Tried after a few events: some take on what cannot be pickled only when they run."""
        try:
            for request in world.requests:
                engine.apply(v.Submit(request))
            engine.apply(v.Schedule())
            twin = self._packer.unpack(self._packer.pack(engine))
            return bool(twin.snapshot() == engine.snapshot())
        except Exception:
            return False  # whatever pickle says of a foreign object
