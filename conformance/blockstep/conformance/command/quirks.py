"""Command: `blockstep quirks`."""

from __future__ import annotations

from blockstep.conformance.command import console, options, tables
from blockstep.spec.profiles import PROFILES, QUIRKS


def quirks_command(json_path: options.Json = None) -> None:
    """List the known defects of releases that break a property, and the profiles that follow
    them.
    """
    screen = console.make_screen(json_path)
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
    tables.show_rows(screen, rows)
    for profile in PROFILES:
        screen.print(f"profile {profile.name}: {', '.join(sorted(profile.quirks)) or 'none'}")
    console.write_json(json_path, rows)
