"""Place: where engines are checked, recorded and run in processes of their own."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.registry import EngineNotFoundError, get_target
from blockstep.conformance.search.check import CheckResult, Known, search, shrink_unknown
from blockstep.conformance.search.episodes import EpisodeResult, Loss
from blockstep.conformance.search.isolation import jobs
from blockstep.conformance.search.isolation.process import (
    EVENT_SECONDS,
    LostError,
    Process,
    RefusedError,
)
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import EngineFacts, read_engine_facts

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Isolation:
    """Place (see `check.Place`) of child processes, each of which does one job after another.

    There are as many as there were threads that asked at once. A child that had to be killed is
    replaced.
    """

    def __init__(
        self,
        event_seconds: float = EVENT_SECONDS,
        path: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        """Create the place; `path` is searched first for the engine, then the path of this
        process.

        With `python`, another interpreter with this package, its own path takes the place of the
        latter.
        """
        self._event_seconds = event_seconds
        self._python = python
        self._path = [*path, *sys.path] if python is None else [*path]
        self._folder = tempfile.TemporaryDirectory(prefix="blockstep-")
        self._idle: list[Process] = []
        self._busy: list[Process] = []

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the children and delete their files."""
        while self._idle:
            self._idle.pop().stop()
        self._folder.cleanup()

    def check(
        self,
        options: CheckOptions,
        on_progress: Callable[[CheckResult], None] = lambda _result: None,
        known: Known | None = None,
    ) -> CheckResult:
        """Check an engine, as `check.check` does; a crash or hang of the engine is part of the
        result.

        Raises:
            EngineNotFoundError: if the engine cannot be loaded.
            RefusedError: if the engine cannot be built with a config that was drawn.
            HarnessError: if the check itself failed.
        """
        started = time.perf_counter()
        try:
            result = search(options, self, on_progress, known)
        except LostError as lost:  # nobody could even be asked
            episode = options.episode or 0
            first = lost.loss.finding
            result = CheckResult(options, first=first, failed_episode=episode, loss=lost.loss)
        if result.first is not None and result.loss is None:
            result = shrink_unknown(
                result, lambda it, looks_on: self._shrink(it, looks_on, on_progress), known
            )
        result.seconds = time.perf_counter() - started
        return result

    def _shrink(
        self, result: CheckResult, looks_on: bool, on_progress: Callable[[CheckResult], None]
    ) -> CheckResult:
        """Return the result with its failure shrunk, or as it was, or with the loss of the
        process."""
        try:
            return self.call(
                jobs.shrink_result,
                result.options,
                result,
                looks_on,
                on_part=on_progress,
            )
        except LostError as lost:
            loss = lost.loss
        try:
            return replace(self.call(jobs.show_result, result.options, result), loss=loss)
        except LostError as lost:
            return replace(result, loss=lost.loss)

    def run(self, options: CheckOptions, program: Program) -> CheckResult:
        """Run one program, as `check.play_program` does.

        Raises:
            EngineNotFoundError: if the engine cannot be loaded.
            RefusedError: if the engine cannot be built with the config of the program.
            HarnessError: if the run itself failed.
        """
        try:
            return self.call(jobs.run, options, program)
        except LostError as lost:
            first, num_events = lost.loss.finding, len(lost.loss.events)
            result = CheckResult(options, num_episodes=1, num_events=num_events, first=first)
            return replace(result, failing_program=program, loss=lost.loss)

    def recover(self, result: CheckResult) -> Program | None:
        """Return the failing program; if the engine's process died, it is drawn again.

        None: nothing failed, or not while an event was handled.
        """
        if result.failure is not None:
            return result.failure.program
        index, loss = result.failed_episode, result.loss
        if result.failing_program is not None or loss is None or index is None or not loss.events:
            return result.failing_program
        with contextlib.suppress(LostError):
            return self.call(jobs.recover, result.options, index, len(loss.events))
        return None

    def read_engine_facts(self, options: CheckOptions) -> EngineFacts:
        """Return the facts about the engine that a check needs."""
        return self.call(read_engine_facts, options)

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Run some consecutive episodes, up to the first that fails or at which the process
        dies."""
        results: list[EpisodeResult] = []
        try:
            self.call(jobs.play, options, range(start, start + count), on_part=results.append)
        except LostError as lost:
            results.append(lose_episode(start + len(results), lost.loss))
        return results

    @contextlib.contextmanager
    def open_pool(self, num_jobs: int) -> Iterator[Executor]:
        """Open a pool with a thread for each child that may be busy."""
        with ThreadPoolExecutor(num_jobs) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in tuple(self._busy):
                    child.kill()

    def call(
        self,
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = lambda _part: None,
    ) -> T:
        """Call `function` in a child with the watched engine, and return its result.

        Values that it yields are passed to `on_part` as they arrive.

        Raises:
            LostError: if the engine's process died or hung.
            EngineNotFoundError, RefusedError, HarnessError: as in `check`.
        """
        if self._python is None:
            get_target(options.engine)  # a bad name is reported without a process
        child = self._take_child()
        self._busy.append(child)
        try:
            value = child.ask((function, options, args), on_part)
        except (EngineNotFoundError, RefusedError):
            self._idle.append(child)
            raise
        except LostError as lost:
            child.stop()
            if not lost.is_imported:
                raise EngineNotFoundError(f"engine {options.engine!r}: {lost}") from lost
            raise
        except BaseException:
            child.stop()
            raise
        else:
            self._idle.append(child)
            return cast("T", value)
        finally:
            self._busy.remove(child)

    def _take_child(self) -> Process:
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if not child.is_killed:
                    return child
                child.stop()
        folder = tempfile.mkdtemp(dir=self._folder.name)
        return Process(Path(folder), self._path, self._event_seconds, self._python)


def lose_episode(index: int, loss: Loss) -> EpisodeResult:
    """Return the result of an episode in which the engine's process died or hung."""
    return EpisodeResult(
        index=index,
        num_events=len(loss.events),
        witnesses={},
        skipped={},
        known={},
        deviations={},
        has_snapshot=True,
        first=loss.finding,
        loss=loss,
    )
