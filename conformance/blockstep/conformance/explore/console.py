"""Console: what the commands of this room say while they run, and how they refuse bad input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from blockstep.conformance.check import ExitCode
from blockstep.conformance.registry import EngineNotFoundError
from blockstep.conformance.traces import TraceError
from blockstep.spec.vocabulary import ConfigError

SECONDS_BETWEEN_LINES = 10.0

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file ('-': stdout).")
]
EngineOption = Annotated[
    str, typer.Option("--engine", help="host, spec, museum:NAME, or module:attribute of a factory.")
]


def usage(message: str) -> NoReturn:
    """End with what is wrong with the input."""
    typer.echo(f"blockstep: {message}", err=True)
    raise typer.Exit(ExitCode.USAGE)


@contextmanager
def input_errors() -> Iterator[None]:
    """Bad input ends with its own words and exit code 2, never with a traceback."""
    try:
        yield
    except (EngineNotFoundError, TraceError, ConfigError) as error:
        usage(str(error))


def make_progress(title: str) -> Callable[[str], None]:
    """Says how far it is on standard error, at most once in `SECONDS_BETWEEN_LINES`."""
    last = time.monotonic()

    def advance(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            typer.echo(f"{title}: {text}", err=True)

    return advance


def write(path: Path, text: str) -> None:
    """Write a file, or stdout for '-'."""
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
