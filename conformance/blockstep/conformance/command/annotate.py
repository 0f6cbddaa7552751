"""Command: `blockstep annotate`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from blockstep.conformance.command import console
from blockstep.conformance.report.annotate import FORMATS, list_annotations, make_summary

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def annotate_command(
    result: Annotated[
        Path, typer.Argument(help="A result of check, hunt or pytest (--json, --blockstep-json).")
    ],
) -> None:
    """Print a result as annotations of GitHub Actions, and add it to the summary of the job.

    The summary goes to the file that GITHUB_STEP_SUMMARY names. Always exits 0: the command that
    made the result has failed already.
    """
    data = _read(result)
    for line in list_annotations(data, Path.cwd()):
        typer.echo(line)
    path = os.environ.get(SUMMARY_VARIABLE)
    if path:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(make_summary(data))
        except OSError as error:
            console.usage(f"{path}: cannot write: {error.strerror}")


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON of a result; bad input if it is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        console.usage(f"{path}: cannot be read: {error}")
    if not isinstance(data, dict) or data.get("format") not in FORMATS:
        console.usage(f"{path}: is not a JSON result of check, hunt or pytest")
    return data
