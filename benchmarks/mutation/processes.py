"""Processes of mutants, and the journal of their results.

Each mutant is played in a process that is forked from one with all imports done and all tests
collected, since both take longer than most mutants. A journal keeps each result in a line, so that
a campaign can continue after an interruption.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Result: TypeAlias = dict[str, Any] | signal.Signals | None
"""The result of a process; a signal if one ended it, None if it sent nothing."""


class Journal:
    """Results by key, in a file of JSON lines; without a file nothing is kept."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.known: dict[str, dict[str, Any]] = {}
        if file is not None and file.exists():
            lines = file.read_text(encoding="utf-8").splitlines()
            self.known = dict(json.loads(line) for line in lines)

    def note(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result."""
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([key, result]) + "\n")


def make_key(*parts: object) -> str:
    """Return a short key for the parameters of a run."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@dataclass(slots=True)
class Child:
    """A forked process, and what it has sent so far."""

    index: int
    pid: int
    pipe: int
    received: bytes = b""


def run_forked(
    works: Sequence[Callable[[], dict[str, Any]]], jobs: int, wall_seconds: int
) -> Iterator[tuple[int, Result]]:
    """Run each work in a forked process, `jobs` at a time; yields (index, result) as they end."""
    gc.collect()
    gc.freeze()  # pages that a collection would touch stay shared
    waiting = list(range(len(works)))[::-1]
    running: dict[int, Child] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    child = _fork(works[waiting[-1]], waiting.pop(), wall_seconds)
                    running[child.pid] = child
                    selector.register(child.pipe, selectors.EVENT_READ, child)
                for key, _ in selector.select():
                    child = key.data
                    chunk = os.read(child.pipe, 1 << 16)
                    child.received += chunk
                    if not chunk:
                        selector.unregister(child.pipe)
                        del running[child.pid]
                        yield child.index, _collect(child)
        finally:
            for child in running.values():
                os.kill(child.pid, signal.SIGKILL)
                _collect(child)


def _collect(child: Child) -> Result:
    """Wait for the end of a child; return its result, or the signal that ended it."""
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status))
    result: dict[str, Any] | None = json.loads(child.received) if child.received else None
    return result


def _fork(work: Callable[[], dict[str, Any]], index: int, wall_seconds: int) -> Child:
    """Return a child that runs `work` and writes its result."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(index, pid, reader)
    try:
        os.close(reader)
        for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(wall_seconds)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        data = json.dumps(work()).encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)
    raise AssertionError("unreachable")
