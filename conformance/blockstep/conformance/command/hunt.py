"""Command: `blockstep hunt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.draw.presets import MAX_DEPTH
from blockstep.conformance.engine import get_traits
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.report.failure import show_options
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt, render_hunt_page
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.spec.profiles import STRICT


def hunt_command(
    engine: options.Engine = "host",
    profile: Annotated[
        str, typer.Option(help="Release whose quirks may account for what is found; strict: all.")
    ] = STRICT.name,
    depth: options.Depth = MAX_DEPTH,
    with_features: options.With = None,
    without_features: options.Without = None,
    seed: options.Seed = 0,
    budget: Annotated[int, typer.Option(min=1, help="Events in each scope.")] = 100_000,
    markdown: Annotated[
        Path | None, options.output("Also write a page of the documentation.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Find every distinct defect of an engine, each with a short program, and name the known ones.

    Goes on where a check stops: what was found is forgiven and the same episode played again.
    Exits 1 if anything was found.

    Example: blockstep hunt --engine vllm --profile vllm-0.19.1
    """
    options.require_profile(profile)
    wanted = CheckOptions(
        engine=engine,
        seed=seed,
        max_events=budget,
        max_depth=depth,
        profile=profile,
        with_features=options.require_features(with_features),
        without_features=options.require_features(without_features),
    )
    screen = console.make_screen(json_path)
    with console.input_errors(), console.progress(screen, f"hunting in {engine}") as advance:
        make_engine = load_engine(engine)
        result = hunt(wanted, make_engine, advance)
    workarounds = get_traits(make_engine).workarounds
    for note in get_traits(make_engine).notes:
        typer.echo(f"note: {note}", err=True)
    console.say(render_hunt(result, workarounds), json_path)
    console.write_json(json_path, hunt_to_json(result, workarounds))
    if markdown is not None:
        given = f"{show_options(wanted)} --seed {seed} --budget {budget}"
        command = f"blockstep hunt --engine {engine}{given}"
        console.write(markdown, render_hunt_page(result, workarounds, command))
    raise typer.Exit(ExitCode.FAILED if result.defects else ExitCode.CONFORMS)
