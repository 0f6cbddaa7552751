"""The runner: each mutant runs in a process of its own, forked from one with all imports done.

Starting Python and importing the tools takes a quarter of a second; most mutants are caught in a
tenth of that. So a child is forked, drops the mutated package, imports it again with the mutated
source of one module, and plays what `blockstep check` plays.

The compiled engine is played as plain Python: a child has no numba. Compiling a mutant would take
half a minute, and its machine code would be cached under the digest of the real sources.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import selectors
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import Any, TypeAlias

EPISODE_SECONDS = 2.0
"""Processor time limit of one episode with the import; an unmutated one takes a twentieth of a
second."""
MEMORY_BYTES = 4 << 30
COMPILED = "blockstep.impl.compiled"
FORGOTTEN = {
    "blockstep.impl.host": ("blockstep.impl.host",),
    COMPILED: (COMPILED,),
    "blockstep.impl": ("blockstep.impl",),
    "blockstep.spec": ("blockstep.spec", "blockstep.conformance"),
}
"""Packages that are imported again, by mutated package, the inner ones first. The tools hold
references to the rules."""
KEPT = "blockstep.spec.vocabulary"
"""The package that is never imported twice: both sides must use the same classes."""

Stage: TypeAlias = tuple[str, str, int]
"""An engine, a preset with the features of every run (`small groups`), and the least number of
events."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant."""

    killed_by: str
    """The kind of the first finding, `timeout`, `crash` or `import`; "" if it survived."""
    detail: str = ""
    """The violated property, or the exception."""
    num_events: int = 0


class MutatedLoader(SourceFileLoader):
    """Loads one module from the given source instead of its file."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002  a signature of importlib's
        """Return the code of the source, never of a cached file."""
        return compile(self.text, self.path, "exec", dont_inherit=True)


class MutatedFinder(MetaPathFinder):
    """Finds one module before all other finders."""

    def __init__(self, name: str, file: str, text: str) -> None:
        self.name, self.file, self.text = name, file, text

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  a signature of importlib's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec of the mutated module; None for any other."""
        if fullname != self.name:
            return None
        loader = MutatedLoader(fullname, self.file, self.text)
        return spec_from_file_location(fullname, self.file, loader=loader)


def forget(import_name: str) -> None:
    """Drop a package from the imported modules, and the tools too if they depend on it.

    It needs a process of its own: from now on it has no numba, so that nothing is compiled in it,
    and compiled modules are dropped, too.
    """
    sys.modules["numba"] = None  # type: ignore[assignment]  # what Python takes for "not installed"
    warnings.filterwarnings("ignore", "the compiled engine runs as plain Python", RuntimeWarning)
    package = next(name for name in FORGOTTEN if import_name.startswith(f"{name}."))
    forgotten = (*FORGOTTEN[package], COMPILED)
    for name in list(sys.modules):
        is_kept = name == KEPT or name.startswith(f"{KEPT}.")
        if not is_kept and any(f"{name}.".startswith(f"{one}.") for one in forgotten):
            del sys.modules[name]


def import_mutated(import_name: str, file: str, text: str) -> None:
    """Import a module from this source. It needs a process of its own."""
    forget(import_name)
    sys.meta_path.insert(0, MutatedFinder(import_name, file, text))
    importlib.import_module(import_name)


def play_mutant(
    import_name: str, file: str, text: str, stages: Sequence[Stage], seed: int
) -> Outcome:
    """Play with a mutated module until the first finding. It needs a process of its own."""
    try:
        import_mutated(import_name, file, text)
        check: Any = importlib.import_module("blockstep.conformance.search.check")
    except Exception as error:
        return Outcome("import", type(error).__name__)
    return play(check, stages, seed)


def play(check: Any, stages: Sequence[Stage], seed: int) -> Outcome:
    """Play episodes in their order, stage after stage, until the first finding."""
    total = 0
    for engine, drawn, num_events in stages:
        preset, *features = drawn.split()
        options = check.CheckOptions(
            engine=engine, preset=preset, seed=seed, with_features=tuple(features)
        )
        registry: Any = importlib.import_module("blockstep.conformance.protocol.registry")
        make_engine = registry.load_engine(engine)
        played, index = 0, 0
        while played < num_events:
            signal.setitimer(signal.ITIMER_PROF, EPISODE_SECONDS)
            try:
                episode = check.run_episode(options, index, make_engine)
            except Exception as error:
                return Outcome("crash", type(error).__name__, total + played)
            played += episode.num_events
            if episode.first is not None:
                found = episode.first
                detail = f"{found.property_id} {found.sentence}".strip()
                return Outcome(str(found.kind), detail, total + played)
            index += 1
        total += played
    return Outcome("", "", total)


# Processes.


def run_forked(
    works: Sequence[Callable[[], dict[str, Any]]], jobs: int, wall_seconds: int
) -> Iterator[tuple[int, dict[str, Any] | signal.Signals | None]]:
    """Run each work in a forked process, `jobs` at a time; yields (index, result) as they end.

    The result is sent as JSON. It is a signal if one ended the process, None if nothing was sent.
    """
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


@dataclass(slots=True)
class Child:
    """A forked process, and what it has sent so far."""

    index: int
    pid: int
    pipe: int
    received: bytes = b""


def _collect(child: Child) -> dict[str, Any] | signal.Signals | None:
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
        _set_limits(wall_seconds)
        data = json.dumps(work()).encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)
    raise AssertionError("unreachable")


def _set_limits(wall_seconds: int) -> None:
    """Limit time, memory and output, so that a mutant has no effect outside its process."""
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(wall_seconds)
    signal.setitimer(signal.ITIMER_PROF, EPISODE_SECONDS)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
