"""Command: `blockstep quirks`."""

from __future__ import annotations

from blockstep.conformance.command import console, options, tables
from blockstep.spec.profiles import PROFILES, QUIRKS


def quirks_command(show_all: options.All = False, json_path: options.Json = None) -> None:
    """List the known defects of releases, which break a property, and the profiles with them.

    Without --all it prints the number of quirks in each area.
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
    if show_all:
        tables.show_rows(screen, rows)
        for profile in PROFILES:
            screen.print(f"profile {profile.name}: {', '.join(sorted(profile.quirks)) or 'none'}")
    else:
        areas = [story.change.__module__.rpartition(".")[2] for story in QUIRKS]
        names = [str(story.quirk) for story in QUIRKS]
        tables.show_rows(screen, tables.count_areas(areas, names, "quirks"))
        counts = [f"{it.name} {len(it.quirks)}" for it in PROFILES if it.quirks]
        screen.print(f"\n{len(QUIRKS)} quirks; by profile: {', '.join(counts)}")
        screen.print("`blockstep explain NAME` explains one, `blockstep quirks --all` prints all")
    console.write_json(json_path, rows)
