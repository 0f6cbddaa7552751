"""Command: `blockstep explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.report.explain import explain_name
from blockstep.conformance.report.explain_file import explain_file


def explain_command(
    what: Annotated[
        str,
        typer.Argument(
            help="Any name in a report: a term of the glossary, property (P4), check, "
            "coverage goal, seeded bug, quirk, reject code, capability, feature, word, field or "
            "value of the vocabulary, rule of the spec; or a file: a recorded run, or a program. "
            "They are listed by `glossary`, `capabilities`, `features`, `situations`, `sentences`, "
            "`codes` and `vocabulary`."
        ),
    ],
    at: Annotated[
        int | None, typer.Option(min=0, help="In a trace: after this many events.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Explain a name in a report, or the state of a recorded run.

    Example: blockstep explain attended_slot_was_written
    """
    if at is not None and not Path(what).is_file():
        console.usage(f"--at {at}: needs a trace, and {what} is no file")
    with console.input_errors():
        text = explain_file(Path(what), at) if Path(what).is_file() else explain_name(what)
    console.print_text(text, json_path)
    console.write_json(json_path, {"what": what, "at": at, "text": text})
