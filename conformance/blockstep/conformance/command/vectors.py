"""Command: `blockstep vectors`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.command.explore import make_progress, require_worlds
from blockstep.conformance.engine import EXACT
from blockstep.conformance.engines.process import VERSION, Hello
from blockstep.conformance.explore.consume import consume
from blockstep.conformance.explore.package import pack
from blockstep.conformance.explore.vectors import fill, read_vectors
from blockstep.conformance.explore.worlds import WORLDS
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.protocol.schema import build_schema
from blockstep.conformance.report.brief import brief_consumed
from blockstep.conformance.report.finding_text import HEADLINES, render_finding
from blockstep.conformance.search.options import ExitCode, exit_code_of

vectors_app = typer.Typer(
    help="Portable test vectors: programs with the right observations.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@vectors_app.command("fill")
def fill_command(
    out: Annotated[
        Path,
        typer.Argument(
            help="The file to write; '.gz' at its end gzips it.", callback=options.check_output
        ),
    ],
    preset: Annotated[str, typer.Option(help=f"A world: {', '.join(WORLDS)}.")] = "pair",
    max_states: Annotated[int, typer.Option(min=1, help="Walk at most this many states.")] = 20_000,
    json_path: options.Json = None,
) -> None:
    """Write a few programs that together do all that the specification does in a world.

    Example: blockstep vectors fill pair.jsonl --preset pair
    """
    world = require_worlds([preset])[0]
    with console.input_errors():
        filled = fill(out, world, max_states, make_progress(world))
    manifest = filled.manifest
    console.print_text(
        f"{out}: {manifest.programs} programs, {filled.num_events} events, for all "
        f"{filled.num_deeds} branches, coverage goals and observations of "
        f"{'all' if filled.is_complete else 'the first'} {filled.num_states:,} states\n",
        json_path,
    )
    console.write_json(
        json_path,
        {
            "path": str(out),
            "preset": preset,
            "programs": manifest.programs,
            "events": filled.num_events,
            "deeds": filled.num_deeds,
            "states": filled.num_states,
            "is_complete": filled.is_complete,
            "sha256": manifest.sha256,
        },
    )


@vectors_app.command("pack")
def pack_command(
    folder: Annotated[Path, typer.Argument(help="The folder to write; it is made.")],
    preset: Annotated[
        list[str] | None, typer.Option(help="A world (repeatable); without it, all.")
    ] = None,
    max_states: Annotated[int, typer.Option(min=1, help="Walk at most this many states.")] = 3000,
    json_path: options.Json = None,
) -> None:
    """Write a package of vectors that any language can use without Blockstep.

    It has a file for each world, an index with digests, the JSON Schema, a README, and check.py,
    which plays the vectors on an engine.

    Example: blockstep vectors pack vectors-package
    """
    worlds = require_worlds(preset or [*WORLDS])
    with console.input_errors():
        schema = build_schema(Hello, VERSION)
        files = pack(folder, worlds, max_states, schema, make_progress)
    programs, events = (sum(getattr(it, name) for it in files) for name in ("programs", "events"))
    console.print_text(
        f"{folder}: {len(files)} files, {programs} programs, {events} events\n", json_path
    )
    console.write_json(json_path, {"path": str(folder), "files": [asdict(it) for it in files]})


@vectors_app.command("consume")
def consume_command(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="Files of vectors.")],
    engine: options.Engine,
    path: options.Folder = None,
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Play vectors on an engine and compare every observation and state.

    The comparison follows the engine's equivalence: at safety it gets the events of the clients,
    and is checked by properties.

    Example: blockstep vectors consume pair.jsonl --engine mypkg.adapter:make
    """
    rows = []
    code = ExitCode.CONFORMS
    options.look_in(path)
    for file in files:
        with console.input_errors():
            result = consume(read_vectors(file), console.require_engine(load_engine(engine)))
        summary = f"{result.num_programs} programs, {result.num_events} events"
        skipped = ", ".join(f"{count} for {why}" for why, count in result.skipped.items())
        summary += f"; not tried: {skipped}" if skipped else ""
        declared = ", ".join(f"{name} {count}" for name, count in result.excused.items())
        summary += f"; findings that the adapter declares: {declared}" if declared else ""
        if not result.conforms:
            code = ExitCode.FAILED if result.finding is None else exit_code_of(result.finding)
            where = f"program {result.program}, step {result.step}"
            kind = FindingKind.DIVERGENCE if result.finding is None else result.finding.kind
            lines = [f"{file}: {HEADLINES[kind]} in {where}", f"  event  {result.event}"]
            lines += [
                f"  {r.field}: expected {r.expected}, seen {r.seen}" for r in result.differences
            ]
            lines += [] if result.finding is None else render_finding(result.finding)
            text = "\n".join(lines) + "\n"
            if brief:
                text = brief_consumed(file, result, console.format_command_line(context))
            console.print_text(text, json_path)
        elif not result.num_events:
            code = max(code, ExitCode.HARNESS)
            console.print_text(f"{file}: NOTHING RAN: {summary}\n", json_path)
        else:
            scope = "" if result.equivalence == EXACT else f" (equivalence {result.equivalence})"
            console.print_text(f"{file}: conforms{scope}: {summary}\n", json_path)
        rows.append({"path": str(file), "conforms": result.conforms, **asdict(result)})
    console.write_json(json_path, rows)
    raise typer.Exit(code)
