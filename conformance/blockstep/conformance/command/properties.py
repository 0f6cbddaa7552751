"""Command: `blockstep properties`."""

from __future__ import annotations

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.judge.checks import PROPERTIES


def properties_command(show_all: options.All = False, json_path: options.Json = None) -> None:
    """List the properties that are checked on every step; with --all the checks of each.

    A check that is not made at safety says why: which policy it would fix, or which check covers
    it.
    """
    screen = console.make_screen(json_path)
    shown, rows = [], []
    for entry in PROPERTIES:
        checks = [check.sentence for check in entry.checks]
        reasons = {it.sentence: it.why_not_at_safety for it in entry.checks}
        row = {"id": entry.id, "name": entry.name}
        lines = [f"{name} (not at safety: {why})" if why else name for name, why in reasons.items()]
        shown.append({**row, "what holds": "\n  ".join([entry.statement, *lines])})
        not_asked = {name: why for name, why in reasons.items() if why}
        rows.append(
            {**row, "statement": entry.statement, "checks": checks, "not_at_safety": not_asked}
        )
    if show_all:
        tables.show_rows(screen, shown)
    else:
        counts = [
            {
                "id": entry.id,
                "name": entry.name,
                "checks": len(entry.checks),
                "at safety": sum(not check.why_not_at_safety for check in entry.checks),
            }
            for entry in PROPERTIES
        ]
        tables.show_rows(screen, counts)
        screen.print(
            "\n`blockstep explain P1` explains one, `blockstep properties --all` prints all"
        )
    console.write_json(json_path, rows)
