"""Command: `blockstep engines`."""

from __future__ import annotations

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.engine import get_capabilities
from blockstep.conformance.protocol.findings import describe_error
from blockstep.conformance.protocol.registry import (
    KNOWN_ENGINES,
    MUSEUM,
    EngineNotFoundError,
    list_announced,
    load_engine,
)


def engines_command(json_path: options.Json = None) -> None:
    """List the engines known by name, whether each can be loaded, and what it implements."""
    screen = console.make_screen(json_path)
    rows = [_engine_row(it.name, it.summary, it.target) for it in KNOWN_ENGINES.values()]
    for name, targets in list_announced().items():
        if name not in KNOWN_ENGINES:
            rows.append(_engine_row(name, "announced by an installed package", " ".join(targets)))
    tables.show_rows(screen, rows)
    screen.print("any other: --engine module:attribute, a factory from Config to Engine")
    screen.print(f"seeded bugs: --engine {MUSEUM}NAME (see blockstep museum)")
    console.write_json(json_path, rows)


def _engine_row(name: str, summary: str, target: str) -> dict[str, object]:
    try:
        implements = ", ".join(sorted(map(str, get_capabilities(load_engine(name)))))
    except EngineNotFoundError as error:
        implements = f"cannot be loaded: {error}"
    except Exception as error:  # an engine of an installed package may raise anything
        implements = f"cannot be built: {describe_error(error)}"
    return {"name": name, "summary": summary, "target": target, "implements": implements}
