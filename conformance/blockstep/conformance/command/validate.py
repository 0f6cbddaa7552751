"""Command: `blockstep validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command.console import input_errors, say, write_json
from blockstep.conformance.command.options import JsonOption
from blockstep.conformance.recorded.validate import validate
from blockstep.conformance.report.validate import render_validation, validation_to_json
from blockstep.conformance.search.options import ExitCode


def validate_command(
    trace: Annotated[Path, typer.Argument(help="A recorded run (blockstep check --record).")],
    json_path: JsonOption = None,
) -> None:
    """Hold a recorded run to the spec: does the spec give every recorded answer?"""
    with input_errors():
        result = validate(trace)
    say(render_validation(trace, result), json_path)
    write_json(json_path, validation_to_json(result))
    raise typer.Exit(ExitCode.CONFORMS if result.conforms else ExitCode.FAILED)
