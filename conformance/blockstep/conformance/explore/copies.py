"""Copies: an engine at every state of a walk, without playing the whole way there each time.

An engine that can be pickled is kept as bytes, which takes a third of the time of a deep copy and
none of its memory; any other is built anew and driven along the shortest path.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from blockstep.conformance.engine import Engine, EngineFactory
from blockstep.spec.vocabulary import Config, Event

Kept = bytes | tuple[Event, ...]
"""A pickled engine, or the events that lead to where it stands."""


class _Pickler(pickle.Pickler):
    """Writes classes that no import finds, such as a planted defect's, as numbers."""

    def __init__(self, file: io.BytesIO, classes: list[type]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._classes = classes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value in self._classes:
            return (_Number, (self._classes.index(value),))
        return NotImplemented


class _Number:
    """Stands for a class while an engine is bytes; never built."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, classes: list[type]) -> None:
        super().__init__(file)
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if name == _Number.__name__ and module == __name__:
            return self._classes.__getitem__
        return super().find_class(module, name)


class Copies:
    """Keeps engines of one factory and brings them back.

    `trial` is what an engine is tried with: some take on what cannot be pickled only when they run.
    """

    def __init__(
        self, make_engine: EngineFactory, config: Config, trial: Sequence[Event] = ()
    ) -> None:
        self._make_engine = make_engine
        self._config = config
        first = make_engine(config)
        parts = getattr(first, "__dict__", {}).values()
        kinds = dict.fromkeys([type(first), *map(type, parts)])
        self._classes = [kind for kind in kinds if not _is_importable(kind)]
        self._pickles = self._can_pickle(first, trial)

    def start(self) -> Kept:
        """A new engine, before the first event."""
        return self._dump(self._make_engine(self._config)) if self._pickles else ()

    def revive(self, kept: Kept) -> Engine:
        """An engine that stands where the kept one stood; nobody else has it."""
        if isinstance(kept, bytes):
            engine: Engine = _Unpickler(io.BytesIO(kept), self._classes).load()
            return engine
        engine = self._make_engine(self._config)
        for event in kept:
            engine.apply(event)
        return engine

    def keep(self, engine: Engine, before: Kept, event: Event) -> Kept:
        """To come back to `engine`, which has just taken `event`."""
        return (*before, event) if isinstance(before, tuple) else self._dump(engine)

    def _dump(self, engine: Engine) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._classes).dump(engine)
        return file.getvalue()

    def _can_pickle(self, engine: Engine, trial: Sequence[Event]) -> bool:
        try:
            for event in trial:
                engine.apply(event)
            twin = self.revive(self._dump(engine))
            return twin.snapshot() == engine.snapshot()
        except Exception:
            return False  # whatever pickle says of a foreign object


def _is_importable(kind: type) -> bool:
    try:
        return pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301 - written in the same line
    except (pickle.PicklingError, AttributeError, ImportError):
        return False
