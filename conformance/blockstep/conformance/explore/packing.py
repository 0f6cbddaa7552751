"""Copies of states and engines as bytes, without the constants that all of them share.

An engine that can be pickled is kept as bytes, which takes a third of the time of a deep copy and
none of its memory; any other is built again and given the events of the shortest path.
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
"""A pickled engine, or the events that lead to its state."""


class Packer:
    """Pickles values that share constants; each constant is written as a number.

    So a class without an importable name can be written, and what all copies share, such as the
    config, is neither written nor read again.
    """

    def __init__(self, constants: Iterable[object]) -> None:
        self._constants = tuple(constants)
        self._numbers = {id(value): number for number, value in enumerate(self._constants)}

    def pack(self, value: object) -> bytes:
        """Return the value as bytes, for a packer with the same constants."""
        file = io.BytesIO()
        _Pickler(file, self._numbers).dump(value)
        return file.getvalue()

    def unpack(self, packed: bytes) -> Any:
        """Return a new value; only its constants are shared."""
        return _Unpickler(io.BytesIO(packed), self._constants).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def reducer_override(self, value: Any) -> Any:
        number = self._numbers.get(id(value))
        return NotImplemented if number is None else (_constant, (number,))


def _constant(_number: int) -> object:
    """Stand in for the table of constants in pickled bytes; never called."""
    raise AssertionError("only the unpickler looks this name up")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, constants: tuple[object, ...]) -> None:
        super().__init__(file)
        self._constants = constants

    def find_class(self, module: str, name: str) -> Any:
        if name == _constant.__name__ and module == __name__:
            return self._constants.__getitem__
        return super().find_class(module, name)


def get_constants(world: World) -> list[object]:
    """Return what every state of a world and every engine in it share."""
    members = (*v.Status, *v.PauseState, *v.Policy, *v.SpecMethod)
    return [world.config, *world.requests, *members]


class Copies:
    """Keeps and restores engines of one factory in one world."""

    def __init__(self, make_engine: EngineFactory, world: World) -> None:
        self._make_engine = make_engine
        self._config = world.config
        first = make_engine(world.config)
        parts = getattr(first, "__dict__", {}).values()
        kinds = dict.fromkeys([type(first), *map(type, parts)])
        self._packer = Packer([*get_constants(world), *kinds])
        self._pickles = self._can_pickle(first, world)

    def start(self) -> Kept:
        """Return a new engine, before the first event, in its kept form."""
        return self._packer.pack(self._make_engine(self._config)) if self._pickles else ()

    def revive(self, kept: Kept) -> Engine:
        """Return a new engine in the state of the kept one."""
        if isinstance(kept, bytes):
            engine: Engine = self._packer.unpack(kept)
            return engine
        engine = self._make_engine(self._config)
        for event in kept:
            engine.apply(event)
        return engine

    def keep(self, engine: Engine, before: Kept, event: v.Event) -> Kept:
        """Return the kept form of `engine`, which has just taken `event`."""
        return (*before, event) if isinstance(before, tuple) else self._packer.pack(engine)

    def _can_pickle(self, engine: Engine, world: World) -> bool:
        """Whether the engine can be pickled, tried after a few events, since some change when they
        run.
        """
        try:
            for request in world.requests:
                engine.apply(v.Submit(request))
            engine.apply(v.Schedule())
            twin = self._packer.unpack(self._packer.pack(engine))
            return bool(twin.snapshot() == engine.snapshot())
        except Exception:
            return False  # whatever pickle raises for a foreign object
