"""Watched: an engine of which every call is written down before it is made."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from blockstep.conformance.engine import Engine, EngineFactory, build, get_traits
from blockstep.conformance.protocol.program import describe, describe_config, describe_event
from blockstep.conformance.search.wrapped import Wrapped
from blockstep.spec.vocabulary import Commit, Config, Drafts, Event, Observation, Snapshot

JOURNAL_BYTES = 1 << 16
"""Length of a journal at first."""
ASIDE = "("
"""How a line of the journal begins that is not an event."""
IMPORTING = "(being imported)"
BUILDING = "(being built)"

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Journal:
    """What the engine is doing, written before it does it.

    The file is mapped into memory, so that a line costs no call of the system, and is there for
    the parent all the same when this process is killed. Behind its end are zeros.
    """

    def __init__(self, path: Path) -> None:
        self._owner = os.getpid()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._num_begun = 0
        self._end = 0
        self._grow(JOURNAL_BYTES)

    def begin(self, header: str = "") -> None:
        """Forget all there is: another job, or another engine, of which this is the config.

        The number makes two beginnings differ, however alike they are.
        """
        self._map[: self._end] = bytes(self._end)
        self._end = 0
        self._num_begun += 1
        self._write(json.dumps([self._num_begun, header]) + "\n")

    def enter(self, what: str) -> None:
        """The engine gets control."""
        self._write(what.replace("\n", " "))

    def leave(self) -> None:
        """The engine gave it back."""
        self.end_copy()
        self._write("\n")

    def end_copy(self) -> None:
        """A copy of this process that the engine has made, and that comes back to us, ends here."""
        if os.getpid() != self._owner:
            os._exit(0)

    def _write(self, text: str) -> None:
        told = text.encode(errors="replace")
        end = self._end + len(told)
        if end > len(self._map):
            self._grow(2 * end)
        self._map[self._end : end] = told
        self._end = end

    def _grow(self, num_bytes: int) -> None:
        os.ftruncate(self._file, num_bytes)
        self._map = mmap.mmap(self._file, num_bytes)


class WatchedEngine(Wrapped):
    """An engine whose every call is in the journal before it is made.

    A call that ends otherwise than by returning or raising an `Exception` never leaves.
    """

    def __init__(self, engine: Engine, watched: WatchedFactory) -> None:
        watched.call("(naming what it judges)", super().__init__, engine)
        self._watched = watched

    def declines(self, event: Event) -> str | None:
        """As the engine does."""
        if self._declines is None:
            return None
        return self._watched.call("(saying what it declines)", super().declines, event)

    def apply(self, event: Event) -> Observation:
        """As the engine does."""
        return self._watched.call(say(event), super().apply, event)

    def snapshot(self) -> Snapshot | None:
        """As the engine does."""
        return self._watched.call("(showing its state)", super().snapshot)

    def capabilities(self) -> frozenset[str]:
        """As the engine does."""
        return self._watched.call("(naming its capabilities)", super().capabilities)


class WatchedFactory:
    """A factory of watched engines; says of them what the engine's own says."""

    def __init__(self, make_engine: EngineFactory, journal: Journal) -> None:
        self._make_engine = make_engine
        self.traits = get_traits(make_engine)
        self.journal = journal
        self.error: Exception | None = None
        """What the engine raised last."""

    def __call__(self, config: Config) -> WatchedEngine:
        """Build one."""
        self.journal.begin(describe_config(config))
        return WatchedEngine(self.call(BUILDING, build, self._make_engine, config), self)

    def call(self, what: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """What a function of the engine returns, or raises."""
        self.journal.enter(what)
        try:
            value = function(*args)
        except Exception as error:
            self.error = error
            self.journal.leave()
            raise
        self.journal.leave()
        return value


def say(event: Event) -> str:
    """One line for an event as the engine gets it, however malformed."""
    try:
        return describe_event(event) if isinstance(event, Commit | Drafts) else describe(event)
    except Exception:  # describe() trusts a request to be one
        return repr(event)[:100]
