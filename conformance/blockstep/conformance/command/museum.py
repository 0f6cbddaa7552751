"""Command: `blockstep museum`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.engine import EXACT, Safety
from blockstep.conformance.museum import EXHIBITS, SeededBug, trial
from blockstep.conformance.search.options import ExitCode

museum_app = typer.Typer(
    help="List the seeded bugs; `blockstep museum run` checks them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@museum_app.callback(invoke_without_command=True)
def museum_command(
    context: typer.Context, show_all: options.All = False, json_path: options.Json = None
) -> None:
    """List the seeded bugs; `blockstep museum run` checks them.

    Without --all it prints the number of seeded bugs in each area.
    """
    if context.invoked_subcommand is not None:
        if json_path is not None:
            example = "`blockstep museum run --json FILE`"
            console.usage(f"--json: belongs behind the command, as in {example}")
        return
    rows: list[dict[str, object]] = [
        {**trial.describe(entry), "speaks": entry.properties} for entry in EXHIBITS.values()
    ]
    screen = console.make_screen(json_path)
    if show_all:
        tables.show_rows(screen, rows)
    else:
        areas = [entry.change.__module__.rpartition(".")[2] for entry in EXHIBITS.values()]
        tables.show_rows(screen, tables.count_areas(areas, list(EXHIBITS), "seeded bugs"))
        screen.print(f"\n{len(EXHIBITS)} seeded bugs; `blockstep explain NAME` explains one,")
        screen.print("`blockstep museum --all` prints all, `blockstep museum run` checks them")
    console.write_json(json_path, rows)


@museum_app.command("run")
def museum_run_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="These seeded bugs only; all of them otherwise.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="May be given several times; 0 1 2 otherwise.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="For each seeded bug and seed: a number of events, or 60s, 5m.")
    ] = "150000",
    jobs: options.Jobs = 0,
    equivalence: Annotated[
        str, typer.Option(help="exact, or safety: held to the properties, compared with nothing.")
    ] = EXACT,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="They show no state; with --equivalence safety.")
    ] = False,
    shrink: Annotated[
        bool, typer.Option(help="Seek the shortest program of what is found: most of the time.")
    ] = True,
    markdown: Annotated[Path | None, options.output("Also write the table, as Markdown.")] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Results (--json) to add to the table."),
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Check that each seeded bug is found, and by what.

    Exits 5 if one survives.

    A bug that is invisible at safety must not be found; if it is, that is 5 as well.

    Example: blockstep museum run zombie-key full-hit --seed 7
    """
    screen = console.make_screen(json_path)
    standing = _standing(equivalence, hidden)
    others = [row for path in beside or () for row in _read_rows(path)]
    max_events, max_seconds = options.require_budget(budget)
    hunt = trial.Trial(
        seeds=tuple(seed) if seed else (0, 1, 2),
        max_events=max_events,
        max_seconds=max_seconds,
        jobs=options.count_jobs(jobs),
        standing=standing,
        shrinks=shrink,
    )
    chosen = [_exhibit(name) for name in names or EXHIBITS]
    with console.progress(screen, "hunting") as advance:
        hunted = trial.run_trial(chosen, hunt, advance)
    rows = [trial.row_of(entry) for entry in hunted]
    shown = ("exhibit", "events", "seconds", "shrunk to", "killed by")
    tables.show_rows(screen, [{name: row[name] for name in shown} for row in rows])
    screen.print(trial.summary(hunted))
    records = [trial.json_of(entry) for entry in hunted]
    console.write_json(json_path, records)
    if markdown is not None:
        console.write(markdown, trial.museum_page([*records, *others]))
    for what in dict.fromkeys(entry.problem for entry in hunted if entry.problem):
        wrong = [entry.exhibit.name for entry in hunted if entry.problem == what]
        typer.echo(f"blockstep: {what}: {', '.join(wrong)}", err=True)
    if any(entry.problem for entry in hunted):
        raise typer.Exit(ExitCode.HARNESS)


def _standing(equivalence: str, is_hidden: bool) -> trial.BugRunMode:
    known = [EXACT, Safety.name]
    if equivalence not in known:
        console.usage(f"--equivalence {equivalence!r}: must be one of {', '.join(known)}")
    if is_hidden and equivalence == EXACT:
        console.usage("--hidden: the state is compared at exact; use --equivalence safety")
    return trial.BugRunMode(equivalence, is_hidden)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        console.usage(f"--beside {path}: {error}; name a file of `blockstep museum run --json`")
    if not all({"exhibit", "equivalence", "state", "seeds"} <= row.keys() for row in rows):
        console.usage(f"--beside {path}: not a file of `blockstep museum run --json`")
    return rows


def _exhibit(name: str) -> SeededBug:
    if name not in EXHIBITS:
        console.usage(
            f"museum run {name!r}: no such seeded bug; `blockstep museum --all` lists them"
        )
    return EXHIBITS[name]
