"""Options that several commands have, and reading of a budget."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from blockstep.conformance.command import console, sections
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.protocol.feature_selection import parse_features
from blockstep.conformance.protocol.features import BY_NAME, UsageError
from blockstep.conformance.protocol.settings import Settings, SettingsError, find_settings
from blockstep.conformance.search.options import (
    check_settings,
    find_profile,
    read_budget,
    search_first,
)
from blockstep.spec import profiles


def check_output(path: Path | None) -> Path | None:
    """Check an option's output path before the work: bad input if it cannot be written."""
    if path is None or str(path) == "-":
        return path
    if path.is_dir():
        console.usage(f"{path}: cannot write: it is a folder; name a file")
    _require_writable(path, "file")
    if path.is_char_device():
        try:
            with path.open("wb") as device:
                console.probe(device.fileno())
        except OSError as error:
            console.usage(f"{path}: cannot write: {error.strerror}")
    return path


def check_output_folder(path: Path | None) -> Path | None:
    """Check an option's output folder before the work: bad input if no file can be written to it.

    It is made with its first file (`console.write`).
    """
    if path is None:
        return None
    if path.exists() and not path.is_dir():
        console.usage(f"{path}: cannot write: it is a file; name a folder")
    _require_writable(path, "folder")
    return path


def _require_writable(path: Path, kind: str) -> None:
    """Check that a file or folder can be made, or written to if it exists."""
    if not path.parent.is_dir():
        console.usage(f"{path}: cannot write: there is no folder {path.parent}; make it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        console.usage(f"{path}: cannot write: it is not allowed; name a {kind} elsewhere")


def output(text: str, *names: str, panel: str | None = None) -> Any:
    """Return an option that names an output."""
    return typer.Option(*names, help=text, callback=check_output, rich_help_panel=panel)


def read_settings() -> Settings | None:
    """Return the settings of the project that contains the working folder; bad input if they are
    wrong.

    Engines are then searched in the project's folder, too.
    """
    try:
        settings = find_settings(Path.cwd())
        if settings is not None:
            check_settings(settings)
    except (SettingsError, UsageError) as error:
        console.usage(str(error))
    if settings is not None and str(settings.folder) not in sys.path:
        sys.path.insert(1, str(settings.folder))  # after the working folder
    return settings


def get_default_engine() -> str:
    """Return the default engine: that of the project, else `host`."""
    settings = read_settings()
    return "host" if settings is None else settings.engine


def adopt_settings(context: typer.Context, engine: str) -> str:
    """Use the project's settings for options that are not given: the callback of `--engine`."""
    settings = None if context.resilient_parsing else read_settings()
    if settings is None or not settings.is_about(engine):
        return engine
    values: dict[str, object] = {"known": settings.known}
    if context.info_name in ("check", "hunt"):
        values["profile"] = settings.profile
    if context.info_name == "check":  # as the pytest plugin does
        values |= {"preset": settings.preset, "budget": settings.budget, "corpus": settings.corpus}
    context.default_map = {name: value for name, value in values.items() if value is not None}
    return settings.engine


def choose_profile(context: typer.Context, profile: str, episode: int | None) -> str:
    """Return the profile, or `strict` with `--episode` and a profile of pyproject.toml: a command
    that reproduces a finding names its own."""
    source = context.get_parameter_source("profile")
    is_of_project = source is not None and source.name == "DEFAULT_MAP"
    return profiles.STRICT.name if is_of_project and episode is not None else profile


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


Engine = Annotated[
    str,
    sections.engine(
        "host, spec, museum:NAME, or module:attribute of a factory.",
        "--engine",
        default_factory=get_default_engine,
        show_default="that of pyproject.toml, else host",
        is_eager=True,
        callback=adopt_settings,
    ),
]
Json = Annotated[
    Path | None,
    output("Also write the result to this file ('-': stdout).", "--json", panel=sections.OUTPUT),
]
All = Annotated[bool, sections.output("Print every entry, not an overview.", "--all")]
Folder = Annotated[
    Path | None,
    sections.engine(
        "A folder to look in first for the engine.", "--path", exists=True, file_okay=False
    ),
]
Profile = Annotated[
    str, sections.engine("Release whose known quirks are followed (blockstep quirks).")
]
Depth = Annotated[
    int, sections.runs("Plans in flight at once, at most; drawn up to this.", min=1, max=MAX_DEPTH)
]
Seed = Annotated[int, sections.runs("Seed of all random choices.", min=0)]
With = Annotated[
    list[str] | None,
    sections.runs(
        f"A feature of every run; repeatable. The features: {', '.join(BY_NAME)}.", "--with"
    ),
]
Without = Annotated[
    list[str] | None, sections.runs("A feature of no run; repeatable.", "--without")
]
Jobs = Annotated[int, sections.runs("Parallel processes; 0: one per core.", min=0)]
Brief = Annotated[
    bool, sections.output("Print a finding in at most five lines, for a log or a CI.", "--brief")
]
JOBS_PER_CORE_MAX = 4
JOBS_ALWAYS = 64
"""This number of jobs is always allowed."""


def look_in(path: Path | None) -> None:
    """Search a folder first for engines."""
    if path is not None:
        search_first(str(path.resolve()))


def count_jobs(jobs: int) -> int:
    """Return the number of processes, where 0 means one per core; bad input if there are too
    many.
    """
    cores = os.cpu_count() or 1
    most = max(JOBS_ALWAYS, JOBS_PER_CORE_MAX * cores)
    if jobs > most:
        console.usage(f"--jobs {jobs}: at most {most} on {cores} cores; 0 takes one per core")
    return jobs or cores


def require_features(names: list[str] | None) -> tuple[str, ...]:
    """Return names of existing features; bad input otherwise."""
    try:
        return parse_features(names or ())
    except UsageError as error:
        console.usage(str(error))


def require_preset(name: str) -> None:
    """Check that a preset exists; bad input otherwise."""
    if name not in PRESETS:
        console.usage(f"--preset {name!r}: must be one of {', '.join(PRESETS)}")


def require_profile(name: str) -> profiles.Profile:
    """Return the profile that `--profile` names; bad input if there is none."""
    try:
        return find_profile(name)
    except ValueError as error:
        console.usage(f"--{error}")


def require_budget(text: str) -> tuple[int | None, float | None]:
    """Return (events, seconds) of `--budget`, one of them None; bad input if it is neither."""
    try:
        return read_budget(text)
    except ValueError as error:
        console.usage(f"--{error}")
