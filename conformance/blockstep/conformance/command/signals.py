"""A signal, a closed pipe or a full disk ends any command soon, with complete files and a message.

    signal  -> the main thread raises `Ended`, cleans up, and prints what was seen
            -> a thread waits `GRACE_SECONDS`; if the main thread is stuck, it does the same
    write   -> standard output and error raise `Ended` or `UnwritableError` where nothing can be
               written, which no handler takes for something else

Exit codes: 128 and the number of the signal; a closed pipe counts as SIGPIPE (13).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TextIO

import typer

from blockstep.conformance.command import console
from blockstep.conformance.protocol.findings import describe_error
from blockstep.conformance.search.isolation import end_all
from blockstep.conformance.search.options import ExitCode

GRACE_SECONDS = 1.5
"""Seconds for cleaning up after a signal; then the process ends in any case."""
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
SIGPIPE = 13
_is_listening = False


class Ended(BaseException):
    """A signal was received, or the reader of a pipe is gone. No `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class UnwritableError(BaseException):
    """Standard output or error cannot be written.

    It is not an `OSError`, which other code catches.
    """


class _Output(io.FileIO):
    """A file descriptor whose write errors are not an `OSError`."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise Ended(SIGPIPE) from None
        except OSError as error:
            raise UnwritableError(str(error.strerror)) from None


def run(command: Callable[[], object]) -> NoReturn:
    """Run a command to the end of this process."""
    sys.stdout, sys.stderr = _guard(sys.stdout, 1), _guard(sys.stderr, 2)
    _listen()
    code: object = ExitCode.HARNESS
    try:
        code = _run(command)
    except Ended as ended:
        code = _end(ended.number)
    except UnwritableError as error:
        code = _give_up(f"standard output: cannot write: {error}")
    finally:
        _hush()
    sys.exit(code if isinstance(code, int | str) else 0)


def _run(command: Callable[[], object]) -> object:
    """Run the command, write everything, and return its exit code."""
    code: object = 0
    try:
        _require_room()
        command()
    except SystemExit as error:
        code = error.code
    except Exception as error:
        traceback.print_exc()
        typer.echo(f"blockstep: the command itself failed: {describe_error(error)}", err=True)
        code = ExitCode.HARNESS
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            file.flush()
    return code


# Output.


def _guard(file: TextIO, number: int) -> TextIO:
    """Return the same text file with guarded writes, if it is one of this process."""
    try:
        if file.fileno() != number:
            return file
    except (AttributeError, OSError, ValueError):  # a closed file, or one of a test
        return file
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "wb", closefd=False)),
        encoding=file.encoding,
        errors=file.errors,
        line_buffering=file.isatty() or number == 2,
    )


def _require_room() -> None:
    """Check that standard output can be written, before the work begins."""
    if sys.stdout is not None and isinstance(sys.stdout.buffer, io.BufferedWriter):
        try:
            console.probe(sys.stdout.fileno())
        except OSError as error:
            raise UnwritableError(str(error.strerror)) from None


def _give_up(message: str) -> int:
    _forget_output(1)
    _print_error(message)
    return ExitCode.USAGE


def _hush() -> None:
    """Drop what could not be written, so that the interpreter ends without an error."""
    for number, file in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if file is not None:
                file.flush()
        except (Ended, UnwritableError):
            _forget_output(number)


def _forget_output(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _print_error(message: str) -> None:
    """Write one line to standard error, without its buffer, which another thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"blockstep: {message}\n".encode())


# Signals.


def _listen() -> None:
    """Make signals end the command in the main thread or, if that is stuck, in another thread."""
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    is_ending = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            raise Ended(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, end)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(mine, theirs), daemon=True).start()
    sys.unraisablehook = _pass_over
    global _is_listening  # noqa: PLW0603 - of the process
    _is_listening = True


def is_listening() -> bool:
    """Whether signals end this process as described here.

    While z3 solves, it handles Ctrl-C itself, so it must not run in this process then.
    """
    return _is_listening


def _pass_over(unraisable: sys.UnraisableHookArgs) -> None:
    """Ignore an `Ended` that cannot be raised; the other thread ends the process."""
    if not isinstance(unraisable.exc_value, Ended):
        sys.__unraisablehook__(unraisable)


def _watch(mine: socket.socket, _theirs: socket.socket) -> None:
    """End the process if the main thread does not; `_theirs` stays open meanwhile."""
    while (number := mine.recv(1)[0]) not in SIGNALS:
        pass
    time.sleep(GRACE_SECONDS)
    os._exit(_end(number))


def _end(number: int) -> int:
    """Print what was seen, end child processes, and return the exit code."""
    for child in multiprocessing.active_children():
        child.kill()
    end_all()
    if number == SIGPIPE:
        _forget_output(1)
    else:
        _print_error(f"ended by {signal.Signals(number).name}; {console.describe_so_far()}")
    return 128 + number
