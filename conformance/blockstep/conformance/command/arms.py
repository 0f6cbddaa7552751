"""Command: `blockstep arms`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from blockstep.conformance.command.console import (
    input_errors,
    make_console,
    progress,
    say,
    write_json,
)
from blockstep.conformance.command.options import (
    EngineOption,
    JsonOption,
    SeedOption,
    require_preset,
)
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.report.arms import arms_to_json, render_arms
from blockstep.conformance.search.arms import compare_arms
from blockstep.conformance.search.options import CheckOptions, ExitCode


def arms_command(
    engine: EngineOption = "host",
    preset: Annotated[
        str, typer.Option(help=f"Scope of the workloads: {', '.join(PRESETS)}.")
    ] = "small",
    seed: SeedOption = 0,
    workloads: Annotated[int, typer.Option(min=1, help="Workloads to play in every arm.")] = 1000,
    json_path: JsonOption = None,
) -> None:
    """Compare an engine with itself: configs that must not change what is said.

    Caching on or off, drafts or none, one plan in flight or several, a small pool or a large one,
    other chunks. No reference and no snapshot are needed.
    """
    require_preset(preset)
    options = CheckOptions(engine=engine, preset=preset, seed=seed)
    started = time.perf_counter()
    with input_errors(), progress(make_console(json_path), f"comparing {engine}") as advance:
        result = compare_arms(
            options,
            load_engine(engine),
            workloads,
            lambda done: advance(done / workloads, f"{done:,} workloads"),
        )
    say(render_arms(result, options, time.perf_counter() - started), json_path)
    write_json(json_path, arms_to_json(result, options))
    if result.contrast is not None:
        raise typer.Exit(ExitCode.FAILED)
    raise typer.Exit(ExitCode.CONFORMS if any(result.num_compared.values()) else ExitCode.HARNESS)
