"""Call: runs a function with the engine, in this process or in another one, or work in several
processes that end with their parent.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar, TypeVarTuple

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.search.engine_wrappers import hide_state
from blockstep.conformance.search.options import CheckOptions

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


@contextmanager
def open_processes(num_jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Open `num_jobs` fresh processes, not forks. Work not finished at the end is dropped."""
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=follow_parent) as pool:
        try:
            yield pool
        except BaseException:
            _drop(pool)
            for child in multiprocessing.active_children():
                if child not in others:
                    child.kill()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _drop(pool: ProcessPoolExecutor) -> None:
    """Drop work that has not begun: the pool must not run it while its processes are killed."""
    with suppress(RuntimeError):  # it is broken already
        last = pool.submit(os.getpid)
        pool.shutdown(wait=False, cancel_futures=True)
        while not last.running() and not last.done():
            time.sleep(0.01)


def follow_parent() -> None:
    """End this process with its parent, and leave Ctrl-C to the parent."""
    gc.freeze()  # what was imported stays
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
