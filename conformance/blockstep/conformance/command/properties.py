"""Command: `blockstep properties`."""

from __future__ import annotations

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.judge.properties import PROPERTIES


def properties_command(json_path: options.Json = None) -> None:
    """List the properties that are checked on every step, with the checks behind each."""
    told, rows = [], []
    for entry in PROPERTIES:
        checks = [check.sentence for check in entry.checks]
        row = {"id": entry.id, "name": entry.name}
        told.append({**row, "what holds": "\n  ".join([entry.statement, *checks])})
        rows.append({**row, "statement": entry.statement, "checks": checks})
    tables.show_rows(console.make_screen(json_path), told)
    console.write_json(json_path, rows)
