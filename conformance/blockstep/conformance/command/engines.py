"""Command: `blockstep engines`."""

from __future__ import annotations

from blockstep.conformance.command.console import make_console, make_table, write_json
from blockstep.conformance.command.options import JsonOption
from blockstep.conformance.protocol.registry import (
    KNOWN_ENGINES,
    MUSEUM,
    EngineNotFoundError,
    load_engine,
)
from blockstep.spec.vocabulary import Config


def engines_command(json_path: JsonOption = None) -> None:
    """List the engines known by name, whether each can be loaded, and what it implements."""
    console = make_console(json_path)
    rows = [_engine_row(name) for name in KNOWN_ENGINES]
    console.print(make_table(rows))
    console.print("any other: --engine module:attribute, a factory from Config to Engine")
    console.print(f"planted defects: --engine {MUSEUM}NAME (see blockstep museum)")
    write_json(json_path, rows)


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
