"""Output of commands while they run, errors for bad input, and writing of results."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blockstep.conformance.engine import BadEngineError, EngineFactory, get_capabilities
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.findings import describe_error
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.recorded.traces import TraceError
from blockstep.conformance.report.colour import show
from blockstep.conformance.report.explain import NotExplainedError
from blockstep.conformance.search.isolation import HarnessError, RefusedError
from blockstep.conformance.search.options import ExitCode
from blockstep.spec.vocabulary import ConfigError

SECONDS_BETWEEN_LINES = 10.0
FILE_WIDTH_MIN = 100
"""Least width of output that is not a terminal."""
OUTPUT_PARAMS = frozenset({"brief", "json_path"})
"""Parameters of commands that say how a result is printed."""
CHECK_IT = "`blockstep check` shows where"
_so_far: list[str] = []
"""The current action of the running command: title and text, if it has any."""
INPUT_ERRORS = (
    BadEngineError,
    *(EngineNotFoundError, TraceError, ConfigError, RefusedError, NotExplainedError, UsageError),
)


def end(code: ExitCode, message: str) -> NoReturn:
    """End with a message on standard error."""
    typer.echo(f"blockstep: {message}", err=True)
    raise typer.Exit(code)


def usage(message: str) -> NoReturn:
    """End with a message about bad input."""
    end(ExitCode.USAGE, message)


def make_screen(json_path: Path | None, file_width_min: int = FILE_WIDTH_MIN) -> Console:
    """Return the console for output to people: standard error if the result takes standard
    output.
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    if not console.is_terminal:
        console.width = max(console.width, file_width_min)
    return console


def get_errors(screen: Console) -> Console:
    """Return the console for output before the result: standard error, or the terminal."""
    return screen if screen.is_terminal else make_screen(Path("-"))


def print_text(text: str, json_path: Path | None) -> None:
    """Print a text for people, as `show` does."""
    show(make_screen(json_path), text)


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn bad input into a message and exit code 2, never a traceback."""
    try:
        yield
    except INPUT_ERRORS as error:
        usage(str(error))
    except HarnessError as error:
        end(ExitCode.HARNESS, f"the check itself failed: {error}")
    except SystemExit as error:  # ours are `typer.Exit`
        end(ExitCode.FAILED, f"the engine ended the process: {describe_error(error)}; {CHECK_IT}")


def require_engine(make_engine: EngineFactory) -> EngineFactory:
    """Return the same factory, after its engines could say what they implement.

    It is for engines in this process: their exceptions then end the command with a message.

    Raises:
        BadEngineError, ConfigError: as it raises them.
    """
    try:
        get_capabilities(make_engine)
    except (BadEngineError, ConfigError):
        raise
    except (Exception, SystemExit) as error:
        end(ExitCode.FAILED, f"the engine raised {describe_error(error)} while built; {CHECK_IT}")
    return make_engine


@contextmanager
def progress(console: Console, title: str) -> Iterator[Callable[[float | None, str], None]]:
    """Show a bar on a terminal, elsewhere a plain line now and then, so that a log grows.

    The callback gets the share that is done; None leaves it as it was.
    """
    if not console.is_terminal:
        yield plain_progress(title)
        return
    note(title)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(16),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)

        def advance(done: float | None, text: str) -> None:
            note(title, text)
            bars.update(task, completed=done, description=f"{title}: {text}")

        yield advance


def plain_progress(title: str) -> Callable[[float | None, str], None]:
    """Print lines on standard error, at most one per `SECONDS_BETWEEN_LINES`; None: share
    unknown.
    """
    last = time.monotonic()
    note(title)

    def advance(done: float | None, text: str) -> None:
        nonlocal last
        note(title, text)
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            share = "" if done is None else f"{done:.0%}, "
            typer.echo(f"{title}: {share}{text}", err=True)

    return advance


def note(*words: str) -> None:
    """Record what the command is doing, and has seen."""
    _so_far[:] = words


def describe_so_far() -> str:
    """Return the record for a command that is ended early."""
    return f"seen so far: {': '.join(_so_far)}" if len(_so_far) > 1 else "nothing was seen yet"


def probe(number: int) -> None:
    """Write an empty line to a device that is not a terminal. Raises OSError if it is full."""
    if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
        os.write(number, b"\n")


def format_command_line(context: typer.Context) -> str:
    """Return the command line that was typed, without options of its output."""
    words = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if source is None or source.name != "COMMANDLINE" or param.name in OUTPUT_PARAMS:
            continue
        value = context.params[param.name or ""]
        given = value if isinstance(value, list | tuple) else (value,)
        name = param.opts[:1] if param.param_type_name == "option" else []
        if isinstance(value, bool):
            words += name if value else param.secondary_opts[:1]
        else:
            words += [word for one in given for word in (*name, shlex.quote(str(one)))]
    return " ".join([context.command_path, *words])


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all, in a folder that is made if need be, or standard output
    for '-'."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()  # it is incomplete
        usage(f"{path}: cannot write: {error.strerror}")


def write_json(path: Path | None, value: object) -> None:
    """Write a result as JSON, if requested."""
    if path is not None:
        write(path, json.dumps(value, indent=2) + "\n")
