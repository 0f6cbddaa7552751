"""Jobs: work that a process of its own does with an engine, and the main loop of that process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from blockstep.conformance.engine import BadEngineError, EngineFactory
from blockstep.conformance.protocol.findings import describe_error
from blockstep.conformance.protocol.link import share_group
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.protocol.trace_lines import TraceError
from blockstep.conformance.search.check import (
    CheckResult,
    play_program,
    see_again,
    shrink_first,
)
from blockstep.conformance.search.engine_wrappers import stop_before
from blockstep.conformance.search.episodes import EpisodeResult, run_episode
from blockstep.conformance.search.isolation.call_journal import IMPORTING, Journal, WatchedFactory
from blockstep.conformance.search.options import CheckOptions, load
from blockstep.spec.vocabulary import ConfigError

OUR_FOLDER = Path(__file__).parent
FRAMES_MAX = 5
"""Most frames of an exception that are shown: the innermost ones."""
Job: TypeAlias = tuple[Callable[..., object], CheckOptions, tuple[object, ...]]
"""Function to be run in a child, its options, and its arguments after the engine factory."""
Answer: TypeAlias = tuple[str, Any]
"""`done` and a value, or the kind of an error and its message."""


def play(
    options: CheckOptions, make_engine: EngineFactory, indices: Sequence[int]
) -> Iterator[EpisodeResult]:
    """Yield these episodes, up to the first that fails."""
    for index in indices:
        episode = run_episode(options, index, make_engine)
        yield replace(episode, skipped=plain(episode.skipped))
        if episode.first is not None:
            return


def plain(skipped: Mapping[str, int]) -> dict[str, int]:
    """Return the counts with plain text as names: an engine may use a type of its own."""
    return {str(name): count for name, count in skipped.items()}


def shrink_result(
    _options: CheckOptions, make_engine: EngineFactory, result: CheckResult, looks_on: bool
) -> CheckResult:
    """Return the result with its first failure shrunk; `looks_on` as in `shrink_first`."""
    shrink_first(result, make_engine, lambda now: _send(("part", now)), looks_on)
    return result


def show_result(
    _options: CheckOptions, make_engine: EngineFactory, result: CheckResult
) -> CheckResult:
    """Return the result with its first failure as it was."""
    see_again(result, make_engine)
    return result


def recover(
    options: CheckOptions, make_engine: EngineFactory, index: int, at: int
) -> Program | None:
    """Return the program of an episode in which the engine's process dies, up to event number
    `at`."""
    return run_episode(options, index, stop_before(make_engine, at)).program


def run(options: CheckOptions, make_engine: EngineFactory, program: Program) -> CheckResult:
    """Run a program, and return the result."""
    result = play_program(options, program, make_engine)
    return replace(result, skipped=Counter(plain(result.skipped)))


# The process.


_answers: BinaryIO | None = None
"""Stream for the answers of this process."""


def _send(answer: Answer) -> None:
    assert _answers is not None, "called in the child"
    _answers.write(pickle.dumps(answer))
    _answers.flush()


def serve(folder: str) -> None:
    """Do jobs from standard input until it ends. Called in the child only; never returns.

    The engine's own output goes to standard error, and its standard input is empty.
    """
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    source = os.fdopen(os.dup(0), "rb")
    global _answers  # noqa: PLW0603 - the process has one
    _answers = os.fdopen(os.dup(1), "wb")
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 - until the end
    os.dup2(sys.stdin.fileno(), 0)
    os.dup2(2, 1)
    share_group()  # so that engines in processes of their own end with this one
    faulthandler.enable(all_threads=False)
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_take_jobs, args=(source, jobs), daemon=True).start()
    journal = Journal(Path(folder) / "journal")
    gc.freeze()  # what was imported stays
    try:
        while True:
            for answer in _do(jobs.get(), journal):
                journal.end_copy()
                _send(answer)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        _show_frames(error)
        os._exit(1)


def _show_frames(error: BaseException) -> None:
    """Print the engine's frames of an exception on standard error, without those of this
    package."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [n for n, frame in enumerate(frames, 1) if Path(frame.filename).parent == OUR_FOLDER]
    theirs = frames[max(calls, default=0) :] or frames[-1:]
    sys.stderr.write("".join(traceback.format_list(theirs[-FRAMES_MAX:])))
    sys.stderr.flush()


def _take_jobs(source: BinaryIO, jobs: queue.SimpleQueue[Job]) -> None:
    """Read jobs in a thread, so that the child ends with its parent even while its engine hangs."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(pickle.load(source))  # noqa: S301 - written by our own parent
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)  # with all that the engine has started
    os._exit(0)


def _do(job: Job, journal: Journal) -> Iterator[Answer]:
    """Yield the answers to a job; all but the last one are of kind `part`."""
    function, options, args = job
    os.ftruncate(2, 0)
    journal.begin()
    watched: WatchedFactory | None = None
    try:
        journal.enter(IMPORTING)
        make_engine = load(options)
        journal.leave()
        watched = WatchedFactory(make_engine, journal)
        value = function(options, watched, *args)
        if isinstance(value, Iterator):
            for part in value:
                yield "part", part
            value = None
        yield "done", value
    except EngineNotFoundError as error:
        yield "not found", str(error)
    except (BadEngineError, ConfigError, TraceError) as error:
        yield "refused", str(error)
    except Exception as error:
        if watched is None or error is watched.error:
            _show_frames(error)
            yield "raised", describe_error(error)
        else:
            yield "harness", traceback.format_exc()
