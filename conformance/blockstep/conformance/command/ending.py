"""Ending: a signal, a closed pipe and a full disk end any command soon, whole, and with a sentence.

    signal  -> the main thread raises `Ended`, cleans up on its way out, says what was seen
            -> a thread waits `GRACE_SECONDS`; where the main thread is stuck, it does the same
    write   -> standard output and error raise `Ended` or `UnwritableError` where nothing can be
               written, which nobody on the way takes for something else

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
from blockstep.conformance.protocol.findings import tell_error
from blockstep.conformance.search.isolation import end_all
from blockstep.conformance.search.options import ExitCode

GRACE_SECONDS = 1.5
"""For tidying up after a signal; then the process ends all the same."""
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
SIGPIPE = 13
_is_listening = False


class Ended(BaseException):
    """A signal has come, or nobody reads what is written. No `except Exception` is meant."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class UnwritableError(BaseException):
    """Standard output or error cannot be written. Not for those who expect an `OSError`."""


class _Output(io.FileIO):
    """A file descriptor, of which a failure to write is no ordinary `OSError`."""

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
    """The command's exit code, everything written."""
    code: object = 0
    try:
        _require_room()
        command()
    except SystemExit as error:
        code = error.code
    except Exception as error:
        traceback.print_exc()
        typer.echo(f"blockstep: the command itself failed: {tell_error(error)}", err=True)
        code = ExitCode.HARNESS
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            file.flush()
    return code


# Output.


def _guard(file: TextIO, number: int) -> TextIO:
    """The same text file, where it is one of this process."""
    try:
        if file.fileno() != number:
            return file
    except (AttributeError, OSError, ValueError):  # closed, or a test's
        return file
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "wb", closefd=False)),
        encoding=file.encoding,
        errors=file.errors,
        line_buffering=file.isatty() or number == 2,
    )


def _require_room() -> None:
    """See before the work that standard output takes anything."""
    if sys.stdout is not None and isinstance(sys.stdout.buffer, io.BufferedWriter):
        try:
            console.probe(sys.stdout.fileno())
        except OSError as error:
            raise UnwritableError(str(error.strerror)) from None


def _give_up(message: str) -> int:
    _forget_output(1)
    _tell(message)
    return ExitCode.USAGE


def _hush() -> None:
    """What could not be written is forgotten, so that the interpreter ends in peace."""
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


def _tell(message: str) -> None:
    """One line on standard error, without its buffer: another thread may hold that."""
    with contextlib.suppress(OSError):
        os.write(2, f"blockstep: {message}\n".encode())


# Signals.


def _listen() -> None:
    """From now on a signal ends the command, in the main thread or, if that is stuck, beside it."""
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
    """Whether signals end this process as is said here. While z3 solves, it takes Ctrl-C for
    itself, so then it is not to be run in this process."""
    return _is_listening


def _pass_over(unraisable: sys.UnraisableHookArgs) -> None:
    """An `Ended` that came at a place where nothing can be raised: the other thread sees to it."""
    if not isinstance(unraisable.exc_value, Ended):
        sys.__unraisablehook__(unraisable)


def _watch(mine: socket.socket, _theirs: socket.socket) -> None:
    """End the process where the main thread does not; `_theirs` stays open meanwhile."""
    while (number := mine.recv(1)[0]) not in SIGNALS:
        pass
    time.sleep(GRACE_SECONDS)
    os._exit(_end(number))


def _end(number: int) -> int:
    """Say what was seen, end what was started; the exit code."""
    for child in multiprocessing.active_children():
        child.kill()
    end_all()
    if number == SIGPIPE:
        _forget_output(1)
    else:
        _tell(f"ended by {signal.Signals(number).name}; {console.tell_so_far()}")
    return 128 + number
