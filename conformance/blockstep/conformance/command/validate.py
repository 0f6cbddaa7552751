"""Command: `blockstep validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.recorded.validate import validate
from blockstep.conformance.report.brief import brief_validation
from blockstep.conformance.report.replay import render_validation, validation_to_json
from blockstep.conformance.search.options import ExitCode, exit_code_of


def validate_command(
    context: typer.Context,
    trace: Annotated[
        Path, typer.Argument(help="A recorded run (blockstep check --record), or records of steps.")
    ],
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Compare a recorded run with the spec: does the spec give every recorded observation?

    A run of an engine that is not exact is checked at the equivalence that the trace names. Records
    of steps (step_snapshot, prefix_cache_event, step_decision) are compared with each other.
    """
    with console.input_errors():
        result = validate(trace)
    text = render_validation(trace, result)
    if brief and result.finding is not None:
        text = brief_validation(trace, result, console.format_command_line(context))
    console.print_text(text, json_path)
    console.write_json(json_path, validation_to_json(result))
    raise typer.Exit(exit_code_of(result.finding) if result.num_steps else ExitCode.HARNESS)
