"""Console: what commands say while they run, how they refuse bad input, and where results go."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.recorded.traces import TraceError
from blockstep.conformance.report.explain import NotExplainedError
from blockstep.conformance.search.isolation import HarnessError, RefusedError
from blockstep.conformance.search.options import ExitCode, find_profile
from blockstep.spec.profiles import Profile
from blockstep.spec.vocabulary import ConfigError

SECONDS_BETWEEN_LINES = 10.0
INPUT_ERRORS = (EngineNotFoundError, TraceError, ConfigError, RefusedError, NotExplainedError)

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", help="host, compiled, spec, museum:NAME, or module:attribute of a factory."
    ),
]


def end(code: ExitCode, message: str) -> NoReturn:
    """End with a sentence on standard error."""
    typer.echo(f"blockstep: {message}", err=True)
    raise typer.Exit(code)


def usage(message: str) -> NoReturn:
    """End with what is wrong with the input."""
    end(ExitCode.USAGE, message)


def check_output(path: Path | None) -> Path | None:
    """The callback of an option that names an output: what can't be written is told beforehand."""
    if path is None or str(path) == "-":
        return path
    if path.is_dir():
        usage(f"{path}: cannot write: it is a folder; name a file")
    if not path.parent.is_dir():
        usage(f"{path}: cannot write: there is no folder {path.parent}; make it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        usage(f"{path}: cannot write: it is not allowed; name a file elsewhere")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Also write the result to this file ('-': stdout).",
        callback=check_output,
    ),
]


def require_profile(name: str) -> Profile:
    """The profile that `--profile` names; bad input if there is none."""
    try:
        return find_profile(name)
    except ValueError as error:
        usage(f"--{error}")


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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done, text: bars.update(task, completed=done, description=f"{title}: {text}")


def plain_progress(title: str) -> Callable[[float | None, str], None]:
    """Lines on standard error, at most one in `SECONDS_BETWEEN_LINES`; None: no share is known."""
    last = time.monotonic()

    def advance(done: float | None, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            share = "" if done is None else f"{done:.0%}, "
            typer.echo(f"{title}: {share}{text}", err=True)

    return advance


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
