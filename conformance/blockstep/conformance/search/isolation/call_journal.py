"""Watched: an engine whose calls are written to a journal before they are made."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from blockstep.conformance.engine import Engine, EngineFactory, build, get_traits
from blockstep.conformance.protocol.program import describe, describe_config, describe_event
from blockstep.conformance.search.engine_wrappers import Wrapped
from blockstep.spec.vocabulary import Commit, Config, Drafts, Event, Observation, Snapshot

JOURNAL_BYTES = 1 << 16
"""Initial length of a journal."""
ASIDE = "("
"""First character of a journal line that is not an event."""
IMPORTING = "(being imported)"
BUILDING = "(being built)"

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Journal:
    """Record of what the engine is doing, written before it does it.

    The file is mapped into memory, so that a line needs no system call, and the parent can read it
    even when this process is killed. The rest of the file is zeros.
    """

    def __init__(self, path: Path) -> None:
        self._owner = os.getpid()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._num_begun = 0
        self._end = 0
        self._grow(JOURNAL_BYTES)

    def begin(self, header: str = "") -> None:
        """Clear the journal for another job, or for another engine, whose config is `header`.

        A counter makes two beginnings differ.
        """
        self._map[: self._end] = bytes(self._end)
        self._end = 0
        self._num_begun += 1
        self._write(json.dumps([self._num_begun, header]) + "\n")

    def enter(self, what: str) -> None:
        """Record that the engine gets control."""
        self._write(what.replace("\n", " "))

    def leave(self) -> None:
        """Record that the engine returned control."""
        self.end_copy()
        self._write("\n")

    def end_copy(self) -> None:
        """End this process if it is a fork that the engine has made."""
        if os.getpid() != self._owner:
            os._exit(0)

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        end = self._end + len(data)
        if end > len(self._map):
            self._grow(2 * end)
        self._map[self._end : end] = data
        self._end = end

    def _grow(self, num_bytes: int) -> None:
        os.ftruncate(self._file, num_bytes)
        self._map = mmap.mmap(self._file, num_bytes)


class WatchedEngine(Wrapped):
    """Engine whose calls are in the journal before they are made.

    A call that does not return or raise an `Exception` never leaves the journal.
    """

    def __init__(self, engine: Engine, watched: WatchedFactory) -> None:
        watched.call("(naming what it judges)", super().__init__, engine)
        self._watched = watched

    def declines(self, event: Event) -> str | None:
        """Return why the engine declines an event, recorded in the journal."""
        if self._declines is None:
            return None
        return self._watched.call("(saying what it declines)", super().declines, event)

    def apply(self, event: Event) -> Observation:
        """Return the engine's answer, recorded in the journal."""
        return self._watched.call(describe_call(event), super().apply, event)

    def snapshot(self) -> Snapshot | None:
        """Return the engine's state, recorded in the journal."""
        return self._watched.call("(showing its state)", super().snapshot)

    def capabilities(self) -> frozenset[str]:
        """Return the engine's capabilities, recorded in the journal."""
        return self._watched.call("(naming its capabilities)", super().capabilities)


class SystemExitError(Exception):
    """The engine called `sys.exit`: an exception in this process, so that its program is shrunk."""


class WatchedFactory:
    """Factory of watched engines, with the traits of the engine's own factory."""

    def __init__(self, make_engine: EngineFactory, journal: Journal) -> None:
        self._make_engine = make_engine
        self.traits = get_traits(make_engine)
        self.journal = journal
        self.error: Exception | None = None
        """Last exception of the engine."""

    def __call__(self, config: Config) -> WatchedEngine:
        """Build an engine and wrap it."""
        self.journal.begin(describe_config(config))
        return WatchedEngine(self.call(BUILDING, build, self._make_engine, config), self)

    def call(self, what: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function of the engine, with a record in the journal."""
        self.journal.enter(what)
        try:
            value = function(*args)
        except (Exception, SystemExit) as error:
            self.journal.leave()
            if isinstance(error, Exception):
                self.error = error
                raise
            self.error = SystemExitError(f"sys.exit({error.code!r})")
            raise self.error.with_traceback(error.__traceback__) from None
        self.journal.leave()
        return value


def describe_call(event: Event) -> str:
    """Return one line for an event as the engine gets it, however malformed."""
    try:
        return describe_event(event) if isinstance(event, Commit | Drafts) else describe(event)
    except Exception:  # describe() trusts a request to be one
        return repr(event)[:100]
