"""Command: `blockstep hunt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command.console import (
    input_errors,
    make_console,
    progress,
    say,
    write,
    write_json,
)
from blockstep.conformance.command.options import (
    DepthOption,
    EngineOption,
    JsonOption,
    SeedOption,
    WithOption,
    WithoutOption,
    output,
    require_features,
    require_profile,
)
from blockstep.conformance.draw.presets import MAX_DEPTH
from blockstep.conformance.engine import get_traits
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.report.failure import show_options
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt, render_hunt_page
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.spec.profiles import STRICT


def hunt_command(
    engine: EngineOption = "host",
    profile: Annotated[
        str, typer.Option(help="Release whose quirks may account for what is found; strict: all.")
    ] = STRICT.name,
    depth: DepthOption = MAX_DEPTH,
    with_features: WithOption = None,
    without_features: WithoutOption = None,
    seed: SeedOption = 0,
    budget: Annotated[int, typer.Option(min=1, help="Events in each scope.")] = 100_000,
    markdown: Annotated[
        Path | None,
        output("Also write a page of the documentation."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Find every distinct defect of an engine, each with a short program, and name the known ones.

    Goes on where a check stops: what was found is forgiven and the same episode played again.
    Exits 1 if anything was found.

    Example: blockstep hunt --engine vllm --profile vllm-0.19.1
    """
    require_profile(profile)
    options = CheckOptions(
        engine=engine,
        seed=seed,
        max_events=budget,
        max_depth=depth,
        profile=profile,
        with_features=require_features(with_features),
        without_features=require_features(without_features),
    )
    with input_errors(), progress(make_console(json_path), f"hunting in {engine}") as advance:
        make_engine = load_engine(engine)
        result = hunt(options, make_engine, advance)
    workarounds = get_traits(make_engine).workarounds
    say(render_hunt(result, workarounds), json_path)
    write_json(json_path, hunt_to_json(result, workarounds))
    if markdown is not None:
        command = f"blockstep hunt --engine {engine}{show_options(options)} --seed {seed}"
        write(markdown, render_hunt_page(result, workarounds, f"{command} --budget {budget}"))
    raise typer.Exit(ExitCode.FAILED if result.defects else ExitCode.CONFORMS)
