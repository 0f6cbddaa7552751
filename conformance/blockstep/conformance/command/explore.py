"""Command: `blockstep explore`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options, tables
from blockstep.conformance.engine import Safety, get_traits
from blockstep.conformance.explore import pictures
from blockstep.conformance.explore.engine_walk import walk_alone
from blockstep.conformance.explore.shard import MAX_STATES, Task
from blockstep.conformance.explore.tables import (
    find_shortest,
    format_program,
    join_worlds,
    list_worlds,
    museum_rows,
    quirk_rows,
    render_table,
)
from blockstep.conformance.explore.transition_checks import JUDGED_WITNESSES, OF_THE_PAST
from blockstep.conformance.explore.walk import LostShardError, Walked, get_obstacle, walk
from blockstep.conformance.explore.world import World
from blockstep.conformance.explore.worlds import WORLDS
from blockstep.conformance.protocol.features import BY_NAME
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.report.brief import brief_walked
from blockstep.conformance.report.explore import (
    get_exit_code,
    render_shortest,
    render_walked,
    summarize_walks,
    walked_to_json,
)
from blockstep.conformance.search.options import ExitCode
from blockstep.spec.profiles import QUIRKS, STRICT, Profile

OnlyWithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help=f"Worlds with this feature only; repeatable. The features: {', '.join(BY_NAME)}.",
    ),
]
OnlyWithoutOption = Annotated[
    list[str] | None,
    typer.Option("--without", help="Worlds without this feature only; repeatable."),
]
MarkdownOption = Annotated[
    Path | None, options.output("With a table or --list: also write it for the documentation.")
]
NameOption = Annotated[
    list[str] | None, typer.Option(help="With a table: these quirks or defects only.")
]


def explore_command(
    context: typer.Context,
    preset: Annotated[
        list[str] | None, typer.Option(help="A world; may be given several times. Default: all.")
    ] = None,
    with_features: OnlyWithOption = None,
    without_features: OnlyWithoutOption = None,
    list_presets: Annotated[bool, typer.Option("--list", help="List the worlds.")] = False,
    engine: Annotated[
        str, typer.Option(help="Also hold this engine to every transition: host, museum:NAME ...")
    ] = "",
    profile: options.Profile = STRICT.name,
    properties: Annotated[
        bool, typer.Option("--properties/--no-properties", help="Judge every transition by them.")
    ] = True,
    stalls: Annotated[
        bool, typer.Option("--stalls", help="Look for cycles without progress, and judge no more.")
    ] = False,
    witness: Annotated[
        str,
        typer.Option(help="Show the shortest program to a coverage goal (blockstep explain NAME)."),
    ] = "",
    quirks: Annotated[
        bool, typer.Option("--quirks", help="The shortest program of each quirk, as a table.")
    ] = False,
    museum: Annotated[
        bool, typer.Option("--museum", help="The shortest program of each seeded bug.")
    ] = False,
    name: NameOption = None,
    max_states: Annotated[
        int, typer.Option(min=1, help="Stop before there are more; 250 bytes each.")
    ] = MAX_STATES,
    jobs: options.Jobs = 1,
    path: options.Folder = None,
    dot: Annotated[Path | None, options.output("Write the graph of one small world.")] = None,
    svg: Annotated[Path | None, options.output("Draw the graph of one small world.")] = None,
    markdown: MarkdownOption = None,
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Visit every state of small worlds, check every transition, and compare an engine.

    An engine at equivalence safety walks its own states.

    Example: blockstep explore --preset pair --engine host
    """
    jobs = options.count_jobs(jobs)
    options.look_in(path)
    worlds = require_worlds(preset, with_features, without_features)
    follows = options.require_profile(profile)
    _require_table(name or [], quirks, museum)
    if list_presets:
        rows = list_worlds(worlds)
        _show_rows(rows, markdown, json_path, rows)
    elif quirks or museum:
        make_rows = quirk_rows if quirks else museum_rows
        advance = console.plain_progress("exploring")
        with console.input_errors():
            rows = make_rows(worlds, max_states, jobs, name or (), lambda text: advance(None, text))
        _show_rows(rows, markdown, json_path, join_worlds(rows) if museum else rows)
    elif witness:
        _show_witness(witness, worlds, max_states, jobs, json_path)
    elif dot is not None or svg is not None:
        _draw(worlds, follows, dot, svg, json_path)
    else:
        judges = properties and not stalls
        task = Task(worlds[0], follows, judges, stalls, engine=engine, max_states=max_states)
        again = console.format_command_line(context) if brief else ""
        _explore([replace(task, world=world) for world in worlds], jobs, json_path, again)


def _require_table(names: Sequence[str], quirks: bool, museum: bool) -> None:
    """Check that at most one table is requested, with names that it has."""
    if quirks and museum:
        console.usage("--quirks and --museum: each is a table; ask for one")
    if names and not (quirks or museum):
        console.usage("--name: needs --quirks or --museum")
    for name in names if quirks else ():
        if name not in {story.quirk for story in QUIRKS}:
            console.usage(f"--name {name!r}: no such quirk; `blockstep quirks --all` lists them")


def require_worlds(
    names: list[str] | None,
    with_features: list[str] | None = None,
    without_features: list[str] | None = None,
) -> list[World]:
    """Return the worlds of these names, or all, that have and lack these features.

    It is bad input if there are none.
    """
    for name in names or ():
        if name not in WORLDS:
            console.usage(f"--preset {name!r}: must be one of {', '.join(WORLDS)}")
    wanted = options.require_features(with_features)
    unwanted = options.require_features(without_features)
    worlds = [
        WORLDS[name]
        for name in names or WORLDS
        if WORLDS[name].features.issuperset(wanted) and WORLDS[name].features.isdisjoint(unwanted)
    ]
    if not worlds:
        console.usage("--with, --without: no world has these features (explore --list)")
    return worlds


def _show_rows(
    rows: list[dict[str, object]],
    markdown: Path | None,
    json_path: Path | None,
    on_page: list[dict[str, object]],
) -> None:
    screen = console.make_screen(json_path)
    if screen.is_terminal:
        tables.show_rows(screen, [{k: v for k, v in row.items() if k != "program"} for row in rows])
    else:
        console.print_text(render_table(rows), json_path)
    console.write_json(json_path, rows)
    if markdown is not None:
        console.write(markdown, render_table(on_page, markdown=True))


def make_progress(world: World) -> Callable[[int, int, int], None]:
    """Return the callback for the progress of a walk."""
    advance = console.plain_progress(f"exploring {world.name}")
    whole = "" if world.expected is None else f" of {world.expected.states:,}"

    def on_progress(states: int, transitions: int, depth: int) -> None:
        advance(None, f"{states:,}{whole} states, {transitions:,} transitions, depth {depth}")

    return on_progress


def _explore(tasks: Sequence[Task], jobs: int, json_path: Path | None, again: str) -> None:
    """Walk the worlds up to the first finding; print it briefly if `again`, the command, is
    given.
    """
    results: list[Walked] = []
    code = ExitCode.CONFORMS
    if engine := tasks[0].engine:
        with console.input_errors():
            console.require_engine(load_engine(engine))
    for task in tasks:
        try:
            with console.input_errors():
                obstacle = get_obstacle(task)
                if obstacle is not None:
                    what = f"{task.world.name}: not walked: {task.engine} {obstacle}"
                    console.print_text(f"{what}\n", json_path)
                    continue
                if task.engine and is_alone(task.engine):
                    walked = walk_alone(task, make_progress(task.world))
                else:
                    walked = walk(task, jobs, make_progress(task.world))
        except LostShardError as lost:
            console.end(ExitCode.HARNESS, str(lost))
        is_brief = bool(again and walked.found)
        text = brief_walked(walked, again) if is_brief else render_walked(walked)
        console.print_text(text, json_path)
        results.append(walked)
        now = get_exit_code(walked)
        code = code if now is ExitCode.CONFORMS else now
        if code not in (ExitCode.CONFORMS, ExitCode.HARNESS):
            break
    if len(tasks) > 1:
        console.print_text(summarize_walks(results, len(tasks)), json_path)
    console.write_json(json_path, [walked_to_json(walked) for walked in results])
    raise typer.Exit(code if results else ExitCode.HARNESS)


def is_alone(engine: str) -> bool:
    """Whether an engine walks its own states, and is not compared with the specification."""
    return isinstance(get_traits(load_engine(engine)).equivalence, Safety)


def _show_witness(
    witness: str, worlds: Sequence[World], max_states: int, jobs: int, json_path: Path | None
) -> None:
    if witness in OF_THE_PAST:
        why = "no single step shows it, since it depends on earlier ones"
        console.usage(f"--witness {witness!r}: {why}")
    if witness not in JUDGED_WITNESSES:
        known = ", ".join(sorted(JUDGED_WITNESSES))
        console.usage(f"--witness {witness!r}: must be one of {known}")
    tasks = [
        Task(world, properties=False, witness=witness, max_states=max_states) for world in worlds
    ]
    shortest = find_shortest(witness, tasks, jobs)
    console.print_text(render_shortest(shortest), json_path)
    console.write_json(
        json_path,
        {
            "witness": witness,
            "preset": shortest.world if shortest.found else None,
            "program": format_program(shortest.path),
        },
    )
    raise typer.Exit(ExitCode.CONFORMS if shortest.found else ExitCode.HARNESS)


def _draw(
    worlds: Sequence[World],
    profile: Profile,
    dot: Path | None,
    svg: Path | None,
    json_path: Path | None,
) -> None:
    if len(worlds) != 1:
        console.usage("--dot, --svg: name one world with --preset")
    walked = walk(
        Task(worlds[0], profile, properties=False, edges=True, max_states=pictures.STATES_MAX)
    )
    if not walked.is_complete:
        console.usage(
            f"--preset {worlds[0].name}: more than {pictures.STATES_MAX} states, too many to draw; "
            "take a smaller world"
        )
    graph = pictures.get_graph(walked)
    if dot is not None:
        console.write(dot, pictures.to_dot(graph))
    if svg is not None:
        console.write(svg, pictures.to_svg(graph))
    console.write_json(json_path, pictures.to_json(graph))
