"""Process: a child process in which an engine does one job after another, seen from the parent."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.isolation import jobs
from blockstep.conformance.search.isolation.call_journal import ASIDE, BUILDING, IMPORTING

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock between all processes of this machine, named by a path, which ends with this
    process.

    Yields whether the lock is held; with `wait` it always is.
    """
    with path.open("ab") as file:
        while not (is_held := _lock(file.fileno())) and wait:
            time.sleep(0.1)
        yield is_held


def _lock(file: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


EVENT_SECONDS = 10.0
"""Default time limit of an event."""
BUILD_SECONDS = 120.0
"""Time limit of an import or a build, which may load half of a framework.

It also limits the time between two calls, in which something that the engine left may hang.
"""
ERRORS_BYTES_MAX = 1 << 26
"""Most bytes that an engine may print in one job; beyond them the output is deleted."""
LAST_WORDS_BYTES = 1 << 16
"""Bytes of the last output that are read."""
LAST_WORDS_MAX = 12
"""Most lines of the child's standard error that are shown."""
OUR_FOLDER = Path(__file__).parent
LOOKS_PER_SECOND = 5.0
"""Least rate at which a journal is read."""
DUMPS = ("Fatal Python error", "Windows fatal exception", "Current thread", "Stack (most")
"""First words of a traceback of faulthandler."""


_living: set[Process] = set()


def end_all() -> None:
    """End every process at once."""
    for process in tuple(_living):
        process.kill()


class HarnessError(Exception):
    """The child failed for a reason that is not the engine's."""


class RefusedError(ValueError):
    """Bad input, with the message of the child that rejected it."""


class LostError(Exception):
    """The child has died, or its engine hangs or cannot be used."""

    def __init__(self, loss: Loss, is_imported: bool = True) -> None:
        super().__init__(loss.message)
        self.loss = loss
        self.is_imported = is_imported


class Process:
    """Process that does one job after another, until it is lost."""

    def __init__(
        self, folder: Path, path: Sequence[str], event_seconds: float, python: str | None = None
    ) -> None:
        """Start a fresh interpreter, not a fork, so that nothing of this process affects the
        engine.

        `path` is the path of modules; in another interpreter, `python`, it is searched before that
        interpreter's own.
        """
        self.is_killed = False
        self._event_seconds = event_seconds
        self._journal = folder / "journal"
        self._errors = folder / "stderr"
        code = (
            f"import sys; sys.path[:{'' if python is None else 0}] = {list(path)!r}; "
            f"from blockstep.conformance.search.isolation.jobs import serve; serve({str(folder)!r})"
        )
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own code
                [python or sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        _living.add(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs = self._process.stdin
        self._output = self._process.stdout
        self._answers: queue.SimpleQueue[jobs.Answer | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def ask(self, job: jobs.Job, on_part: Callable[[Any], None]) -> object:
        """Send a job, and return its result.

        Raises:
            LostError: if there will be no result; the child must then be stopped.
            EngineNotFoundError, RefusedError, HarnessError: raised in the child.
        """
        with contextlib.suppress(OSError):  # a dead child answers nothing, and that is noticed
            pickle.dump(job, self._jobs)
            self._jobs.flush()
        while (answer := self._wait_for_answer())[0] == "part":
            on_part(answer[1])
        kind, value = answer
        match kind:
            case "not found":
                raise EngineNotFoundError(value)
            case "refused":
                raise RefusedError(value)
            case "harness":
                raise HarnessError(value)
            case "raised":
                self._lose(f"the engine raised {value}", has_raised=True)
        return cast("object", value)

    def _read_answers(self) -> None:
        try:
            while True:
                self._answers.put(_Unpickler(self._output).load())
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # it ended, or was stopped
            self._answers.put(None)
        except Exception as error:
            self._answers.put(("harness", f"the answer of the child cannot be read: {error}"))

    def _wait_for_answer(self) -> jobs.Answer:
        """Return the next answer. Raises `LostError` if there will be none."""
        since, before = time.monotonic(), None
        while True:
            has_ended = self._process.poll() is not None
            with contextlib.suppress(queue.Empty):
                seconds = min(1 / LOOKS_PER_SECOND, self._event_seconds / 10)
                answer = self._answers.get(timeout=seconds)
                if answer is not None:
                    return answer
                has_ended = True
            if has_ended:
                self._lose(self._describe_end())
            self._bound_errors()
            if (now := self._look()) != before:
                since, before = time.monotonic(), now
                continue
            seconds = self._get_limit(now.rpartition("\n")[2])
            if time.monotonic() - since > seconds:
                self._ask_where()
                self._lose(f"the engine gave no answer within {seconds:g} s")

    def _look(self) -> str:
        """Return the journal; "" before there is one."""
        if not self._journal.is_file():
            return ""
        return self._journal.read_bytes().rstrip(b"\0").decode(errors="replace")

    def _get_limit(self, doing: str) -> float:
        """Return the time limit for what the engine does, or for the time between calls if that is
        ""."""
        is_slow = doing in {"", IMPORTING, BUILDING}
        return max(self._event_seconds, BUILD_SECONDS) if is_slow else self._event_seconds

    def _ask_where(self) -> None:
        """Make a hanging child write its stack to its standard error."""
        if sys.platform != "win32":
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def _lose(self, how: str, has_raised: bool = False) -> NoReturn:
        header, *lines = self._look().split("\n")
        if has_raised:
            while lines and not lines[-1]:
                lines.pop()
        where = lines[-1] if lines else ""
        events = tuple(line for line in lines if line and not line.startswith(ASIDE))
        last_words = _find_last_words(self._read_errors())
        config = json.loads(header)[1] if header else ""
        seconds = None if self._event_seconds == EVENT_SECONDS else self._event_seconds
        loss = Loss(f"{how}{_format_location(where)}", config, events, last_words, seconds)
        raise LostError(loss, is_imported=where != IMPORTING)

    def _bound_errors(self) -> None:
        """Delete the output if it is too long; the file is opened for appending."""
        with contextlib.suppress(OSError):
            if self._errors.stat().st_size > ERRORS_BYTES_MAX:
                os.truncate(self._errors, 0)

    def _read_errors(self) -> str:
        with self._errors.open("rb") as errors:
            errors.seek(max(errors.seek(0, os.SEEK_END) - LAST_WORDS_BYTES, 0))
            return errors.read().decode(errors="replace")

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the engine closed the files of its process"
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the engine's process was ended by {name}"

    def kill(self) -> None:
        """End the process with all that it has started, at once."""
        self.is_killed = True
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        self._process.wait()
        _living.discard(self)
        with contextlib.suppress(OSError):
            self._jobs.close()
        self._reader.join(timeout=1.0)
        if not self._reader.is_alive():  # else a process that got away holds the other end
            self._output.close()


class _Unpickler(pickle.Unpickler):
    """Reads the output of a child without imports, which could import the engine."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class whose module is imported already."""
        if module not in sys.modules:
            raise HarnessError(f"{module}.{name} is of no module of ours")
        return super().find_class(module, name)


def _find_last_words(errors: str) -> tuple[str, ...]:
    """Return the part of standard error about the end: the engine's own frames, or the last
    lines."""
    lines = [line for line in errors.splitlines() if line.strip()]
    dumps = [number for number, line in enumerate(lines) if line.startswith(DUMPS)]
    if not dumps:
        return tuple(lines[-LAST_WORDS_MAX:])
    words = lines[dumps[0] :]
    ours = [number for number, line in enumerate(words) if f'"{OUR_FOLDER}' in line]
    return tuple(words[: min([LAST_WORDS_MAX, *ours])])


def _format_location(line: str) -> str:
    if not line:
        return " between two calls"
    if line.startswith(ASIDE):
        return f" while {line[1:-1]}"
    return f" at: {' '.join(line.split())}"
