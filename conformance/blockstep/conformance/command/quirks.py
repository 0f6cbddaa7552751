"""Command: `blockstep quirks`."""

from __future__ import annotations

from blockstep.conformance.command.console import make_console, make_table, write_json
from blockstep.conformance.command.options import JsonOption
from blockstep.spec.profiles import PROFILES, QUIRKS


def quirks_command(json_path: JsonOption = None) -> None:
    """List what releases are known to do against a property, and the profiles that follow them."""
    console = make_console(json_path)
    rows: list[dict[str, object]] = [
        {
            "quirk": str(story.quirk),
            "what it does": story.title,
            "breaks": story.property_ids,
            "upstream": story.upstream,
            "seen in": story.seen_in,
            "program": story.program,
        }
        for story in QUIRKS
    ]
    console.print(make_table(rows))
    for profile in PROFILES:
        console.print(f"profile {profile.name}: {', '.join(sorted(profile.quirks)) or 'none'}")
    write_json(json_path, rows)
