"""Command: `blockstep explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.report.explain import explain_moment, explain_name


def explain_command(
    what: Annotated[
        str, typer.Argument(help="P4, a rule such as slots.revoke_slots, a witness, or a trace.")
    ],
    at: Annotated[
        int | None, typer.Option(min=0, help="In a trace: after this many events.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Say in words what a property demands, what a rule does, or what a recorded state means."""
    if at is not None and not Path(what).is_file():
        console.usage(f"--at {at}: needs a trace, and {what} is no file")
    with console.input_errors():
        text = explain_moment(Path(what), at) if Path(what).is_file() else explain_name(what)
    console.say(text, json_path)
    console.write_json(json_path, {"what": what, "at": at, "text": text})
