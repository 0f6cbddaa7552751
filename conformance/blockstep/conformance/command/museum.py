"""Command: `blockstep museum`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.museum import EXHIBITS, Exhibit
from blockstep.conformance.museum import trial as hunting
from blockstep.conformance.search.options import ExitCode

museum_app = typer.Typer(
    help="List the planted defects; `blockstep museum run` kills them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@museum_app.callback(invoke_without_command=True)
def museum_command(context: typer.Context, json_path: options.Json = None) -> None:
    """List the planted defects; `blockstep museum run` kills them."""
    if context.invoked_subcommand is not None:
        if json_path is not None:
            example = "`blockstep museum run --json FILE`"
            console.usage(f"--json: belongs behind the command, as in {example}")
        return
    rows: list[dict[str, object]] = [
        {**hunting.describe(entry), "speaks": entry.properties} for entry in EXHIBITS.values()
    ]
    tables.show_rows(console.make_screen(json_path), rows)
    console.write_json(json_path, rows)


@museum_app.command("run")
def museum_run_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="These exhibits only; all of them otherwise.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="May be given several times; 0 1 2 otherwise.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="For each exhibit and seed: a number of events, or 60s, 5m.")
    ] = "150000",
    jobs: options.Jobs = 0,
    markdown: Annotated[
        Path | None, options.output("Also write the table as a page of the documentation.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Kill the planted defects, and say how each one fell. Exits 5 if one survives.

    Example: blockstep museum run zombie-key full-hit --seed 7
    """
    screen = console.make_screen(json_path)
    max_events, max_seconds = options.require_budget(budget)
    hunt = hunting.Trial(
        seeds=tuple(seed) if seed else (0, 1, 2),
        max_events=max_events,
        max_seconds=max_seconds,
        jobs=options.count_jobs(jobs),
    )
    chosen = [_exhibit(name) for name in names or EXHIBITS]
    with console.progress(screen, "hunting") as advance:
        hunted = hunting.run_trial(chosen, hunt, advance)
    rows = [hunting.row_of(entry) for entry in hunted]
    shown = ("exhibit", "events", "seconds", "shrunk to", "killed by")
    tables.show_rows(screen, [{name: row[name] for name in shown} for row in rows])
    screen.print(hunting.summary(hunted))
    console.write_json(json_path, [hunting.json_of(entry) for entry in hunted])
    if markdown is not None:
        given = " ".join([*(names or ()), *(f"--seed {number}" for number in hunt.seeds)])
        command = f"blockstep museum run {given} --budget {budget}"
        console.write(markdown, hunting.museum_page(rows, command, hunt.seeds))
    survivors = [entry.exhibit.name for entry in hunted if entry.survived]
    if survivors:
        typer.echo(f"blockstep: survived: {', '.join(survivors)}", err=True)
        raise typer.Exit(ExitCode.HARNESS)


def _exhibit(name: str) -> Exhibit:
    if name not in EXHIBITS:
        console.usage(f"museum run {name!r}: no such exhibit; `blockstep museum` lists them")
    return EXHIBITS[name]
