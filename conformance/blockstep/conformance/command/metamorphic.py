"""Command: `blockstep arms`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.report.brief import brief_metamorphic
from blockstep.conformance.report.metamorphic import arms_to_json, render_arms
from blockstep.conformance.search.metamorphic import compare_pair
from blockstep.conformance.search.options import CheckOptions, ExitCode, load


def arms_command(
    engine: options.Engine,
    preset: Annotated[
        str, typer.Option(help=f"Scope of the workloads: {', '.join(PRESETS)}.")
    ] = "small",
    seed: options.Seed = 0,
    workloads: Annotated[
        int, typer.Option(min=1, help="Workloads to play under every config.")
    ] = 1000,
    path: options.Folder = None,
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Compare an engine with itself: configs that must not change the tokens.

    Caching on or off, drafts or none, one plan in flight or several, a small pool or a large one,
    other chunks. No reference and no snapshot are needed.
    """
    options.require_preset(preset)
    folder = None if path is None else str(path.resolve())
    wanted = CheckOptions(engine=engine, preset=preset, seed=seed, path=folder)
    started = time.perf_counter()
    screen = console.make_screen(json_path)
    with console.input_errors(), console.progress(screen, f"comparing {engine}") as advance:
        result = compare_pair(
            wanted,
            console.require_engine(load(wanted)),
            workloads,
            lambda done: advance(done / workloads, f"{done:,} workloads"),
        )
    is_found = result.contrast is not None or result.fault is not None
    text = render_arms(result, wanted, time.perf_counter() - started)
    console.print_text(brief_metamorphic(result, wanted) if brief and is_found else text, json_path)
    console.write_json(json_path, arms_to_json(result, wanted))
    if is_found:
        raise typer.Exit(ExitCode.FAILED)
    raise typer.Exit(ExitCode.CONFORMS if any(result.num_compared.values()) else ExitCode.HARNESS)
