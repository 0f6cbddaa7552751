"""Command: `blockstep engines`."""

from __future__ import annotations

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.protocol.registry import (
    KNOWN_ENGINES,
    MUSEUM,
    EngineNotFoundError,
    load_engine,
)
from blockstep.spec.vocabulary import Config


def engines_command(json_path: options.Json = None) -> None:
    """List the engines known by name, whether each can be loaded, and what it implements."""
    screen = console.make_screen(json_path)
    rows = [_engine_row(name) for name in KNOWN_ENGINES]
    tables.show_rows(screen, rows)
    screen.print("any other: --engine module:attribute, a factory from Config to Engine")
    screen.print(f"planted defects: --engine {MUSEUM}NAME (see blockstep museum)")
    console.write_json(json_path, rows)


def _engine_row(name: str) -> dict[str, object]:
    known = KNOWN_ENGINES[name]
    try:
        engine = load_engine(name)(Config(num_blocks=2))
        implements = ", ".join(sorted(map(str, engine.capabilities())))
    except EngineNotFoundError as error:
        implements = f"cannot be loaded: {error}"
    return {
        "name": name,
        "summary": known.summary,
        "target": known.target,
        "implements": implements,
    }
