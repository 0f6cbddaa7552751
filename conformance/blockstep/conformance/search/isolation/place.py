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
from blockstep.conformance.search.check import CheckResult, Known, search
from blockstep.conformance.search.episodes import EpisodeResult, Loss
from blockstep.conformance.search.floor import Facts, look
from blockstep.conformance.search.isolation import jobs
from blockstep.conformance.search.isolation.process import (
    EVENT_SECONDS,
    LostError,
    Process,
    RefusedError,
)
from blockstep.conformance.search.options import CheckOptions

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Isolation:
    """A place (see `check.Place`) of children: each does one job after another.

    There are as many as there were threads that asked at once, and a new one follows where one had
    to be killed.
    """

    def __init__(self, event_seconds: float = EVENT_SECONDS, path: Sequence[str] = ()) -> None:
        """`path` is looked in first for the engine, then where this process looks."""
        self._event_seconds = event_seconds
        self._path = [*path, *sys.path]
        self._folder = tempfile.TemporaryDirectory(prefix="blockstep-")
        self._idle: list[Process] = []
        self._busy: list[Process] = []

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the children and forget everything about them."""
        while self._idle:
            self._idle.pop().stop()
        self._folder.cleanup()

    def check(
        self,
        options: CheckOptions,
        on_progress: Callable[[CheckResult], None] = lambda _result: None,
        known: Known | None = None,
    ) -> CheckResult:
        """Check an engine, as `check.check` does; whatever becomes of it is in the result.

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
            result = self._shrink(result, on_progress)
        result.seconds = time.perf_counter() - started
        return result

    def _shrink(
        self, result: CheckResult, on_progress: Callable[[CheckResult], None]
    ) -> CheckResult:
        """The result with its failure: shrunk, or else as it was, or else what is known of it."""
        try:
            return self.call(
                jobs.shrink_result,
                result.options,
                result,
                on_part=lambda now: on_progress(replace(result, shrinking=now)),
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
            told = CheckResult(options, num_episodes=1, num_events=num_events, first=first)
            return replace(told, failing_program=program, loss=lost.loss)

    def recover(self, result: CheckResult) -> Program | None:
        """The failing program; of an engine that did not live to name it, it is drawn once more.

        None: there is none, for nothing failed, or not while an event was handled.
        """
        if result.failure is not None:
            return result.failure.program
        index, loss = result.failed_episode, result.loss
        if result.failing_program is not None or loss is None or index is None or not loss.events:
            return result.failing_program
        with contextlib.suppress(LostError):
            return self.call(jobs.recover, result.options, index, len(loss.events))
        return None

    def look(self, options: CheckOptions) -> Facts:
        """What the engine says of itself."""
        return self.call(look, options)

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Some episodes in a row, stopping at the first that fails, or is not survived."""
        results: list[EpisodeResult] = []
        try:
            self.call(jobs.play, options, range(start, start + count), on_part=results.append)
        except LostError as lost:
            results.append(lose_episode(start + len(results), lost.loss))
        return results

    @contextlib.contextmanager
    def open_pool(self, num_jobs: int) -> Iterator[Executor]:
        """A thread for each child that may be busy."""
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
        """What the function comes to in a child, where it is given the watched engine.

        What it yields goes to `on_part` as it comes.

        Raises:
            LostError: if the engine did not live to the end of it.
            EngineNotFoundError, RefusedError, HarnessError: as ever.
        """
        get_target(options.engine)  # what is no name needs no process to be told
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
        return Process(Path(folder), self._path, self._event_seconds)


def lose_episode(index: int, loss: Loss) -> EpisodeResult:
    """An episode in which the engine did not live."""
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
