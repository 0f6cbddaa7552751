"""Console: what commands say while they run, how they refuse bad input, and where results go."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from blockstep.conformance.engine import BadEngineError
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.recorded.traces import TraceError
from blockstep.conformance.report.explain import NotExplainedError
from blockstep.conformance.search.isolation import HarnessError, RefusedError
from blockstep.conformance.search.options import ExitCode
from blockstep.spec.vocabulary import ConfigError

SECONDS_BETWEEN_LINES = 10.0
_so_far: list[str] = []
"""What the command that runs is doing and has seen: title and text, if it said anything yet."""
INPUT_ERRORS = (
    BadEngineError,
    *(EngineNotFoundError, TraceError, ConfigError, RefusedError, NotExplainedError, UsageError),
)


def end(code: ExitCode, message: str) -> NoReturn:
    """End with a sentence on standard error."""
    typer.echo(f"blockstep: {message}", err=True)
    raise typer.Exit(code)


def usage(message: str) -> NoReturn:
    """End with what is wrong with the input."""
    end(ExitCode.USAGE, message)


def make_screen(json_path: Path | None, width: int | None = None) -> Console:
    """Where words for people go: standard error while the result takes standard output."""
    return Console(highlight=False, stderr=json_path == Path("-"), width=width)


def say(text: str, json_path: Path | None) -> None:
    """Plain words for people, which end as they end."""
    typer.echo(text, nl=False, err=json_path == Path("-"))


def make_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """Rows of one kind as a table, columns named by the keys."""
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            *(" ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row.values())
        )
    return table


@contextmanager
def input_errors() -> Iterator[None]:
    """Bad input ends with its own words and exit code 2, never with a traceback."""
    try:
        yield
    except INPUT_ERRORS as error:
        usage(str(error))
    except HarnessError as error:
        end(ExitCode.HARNESS, f"the check itself failed: {error}")


@contextmanager
def progress(console: Console, title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on a terminal; elsewhere a plain line now and then, so that a log shows life."""
    if not console.is_terminal:
        yield plain_progress(title)
        return
    note(title)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)

        def advance(done: float, text: str) -> None:
            note(title, text)
            bars.update(task, completed=done, description=f"{title}: {text}")

        yield advance


def plain_progress(title: str) -> Callable[[float | None, str], None]:
    """Lines on standard error, at most one in `SECONDS_BETWEEN_LINES`; None: no share is known."""
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


def note(*said: str) -> None:
    """Keep what the command is doing, and has seen."""
    _so_far[:] = said


def tell_so_far() -> str:
    """The same, for a command that is ended before its time."""
    return f"seen so far: {': '.join(_so_far)}" if len(_so_far) > 1 else "nothing was seen yet"


def write(path: Path, text: str) -> None:
    """Write a file, or standard output for '-'."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        usage(f"{path}: cannot write: {error.strerror}")


def write_json(path: Path | None, value: object) -> None:
    """Write a result for machines, if it is wanted."""
    if path is not None:
        write(path, json.dumps(value, indent=2) + "\n")
