"""Command: `blockstep properties`."""

from __future__ import annotations

from blockstep.conformance.command.console import make_console, make_table, write_json
from blockstep.conformance.command.options import JsonOption
from blockstep.conformance.judge.properties import PROPERTIES


def properties_command(json_path: JsonOption = None) -> None:
    """List the properties that are checked on every step, with the checks behind each."""
    told, rows = [], []
    for entry in PROPERTIES:
        checks = [check.sentence for check in entry.checks]
        row = {"id": entry.id, "name": entry.name}
        told.append({**row, "what holds": "\n  ".join([entry.statement, *checks])})
        rows.append({**row, "statement": entry.statement, "checks": checks})
    make_console(json_path).print(make_table(told))
    write_json(json_path, rows)
