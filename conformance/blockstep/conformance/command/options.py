"""Options: what several commands take, and how a budget is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from blockstep.conformance.command import console
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.protocol.features import BY_NAME, UsageError
from blockstep.conformance.protocol.wishes import parse_features
from blockstep.conformance.search.budget import read_budget
from blockstep.conformance.search.options import find_profile, search_first
from blockstep.spec import profiles


def check_output(path: Path | None) -> Path | None:
    """The callback of an option that names an output: what can't be written is told beforehand."""
    if path is None or str(path) == "-":
        return path
    if path.is_dir():
        console.usage(f"{path}: cannot write: it is a folder; name a file")
    if not path.parent.is_dir():
        console.usage(f"{path}: cannot write: there is no folder {path.parent}; make it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        console.usage(f"{path}: cannot write: it is not allowed; name a file elsewhere")
    if path.is_char_device():
        try:
            with path.open("wb") as device:
                console.probe(device.fileno())
        except OSError as error:
            console.usage(f"{path}: cannot write: {error.strerror}")
    return path


def output(text: str, *names: str) -> Any:
    """An option that names an output."""
    return typer.Option(*names, help=text, callback=check_output)


Engine = Annotated[
    str,
    typer.Option(
        "--engine", help="host, compiled, spec, museum:NAME, or module:attribute of a factory."
    ),
]
Json = Annotated[Path | None, output("Also write the result to this file ('-': stdout).", "--json")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--path", exists=True, file_okay=False, help="A folder to look in first for the engine."
    ),
]
Profile = Annotated[
    str, typer.Option(help="Release whose known quirks are followed (blockstep quirks).")
]
Depth = Annotated[
    int,
    typer.Option(min=1, max=MAX_DEPTH, help="Plans in flight at once, at most; drawn up to this."),
]
Seed = Annotated[int, typer.Option(min=0, help="Everything random follows from it.")]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with", help=f"A feature of every run; repeatable. The features: {', '.join(BY_NAME)}."
    ),
]
Without = Annotated[
    list[str] | None, typer.Option("--without", help="A feature of no run; repeatable.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Processes side by side; 0: one per core.")]
Brief = Annotated[
    bool,
    typer.Option("--brief", help="Tell a finding in at most five lines, for a log or a CI."),
]
JOBS_PER_CORE_MAX = 4
JOBS_ALWAYS = 64
"""So many may always be asked for."""


def look_in(path: Path | None) -> None:
    """Have engines looked for in a folder first."""
    if path is not None:
        search_first(str(path.resolve()))


def count_jobs(jobs: int) -> int:
    """Processes side by side, where 0 says one per core; bad input if they would only swap."""
    cores = os.cpu_count() or 1
    most = max(JOBS_ALWAYS, JOBS_PER_CORE_MAX * cores)
    if jobs > most:
        console.usage(f"--jobs {jobs}: at most {most} on {cores} cores; 0 takes one per core")
    return jobs or cores


def require_features(names: list[str] | None) -> tuple[str, ...]:
    """Names of features that there are; bad input otherwise."""
    try:
        return parse_features(names or ())
    except UsageError as error:
        console.usage(str(error))


def require_preset(name: str) -> None:
    """A scope of runs that there is; bad input otherwise."""
    if name not in PRESETS:
        console.usage(f"--preset {name!r}: must be one of {', '.join(PRESETS)}")


def require_profile(name: str) -> profiles.Profile:
    """The profile that `--profile` names; bad input if there is none."""
    try:
        return find_profile(name)
    except ValueError as error:
        console.usage(f"--{error}")


def require_budget(text: str) -> tuple[int | None, float | None]:
    """(events, seconds) of `--budget`, one of them None; bad input if it is neither."""
    try:
        return read_budget(text)
    except ValueError as error:
        console.usage(f"--{error}")
