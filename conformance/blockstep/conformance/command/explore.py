"""The commands `blockstep explore` and `blockstep vectors`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command.console import (
    EngineOption,
    JsonOption,
    check_output,
    end,
    input_errors,
    plain_progress,
    require_profile,
    usage,
    write,
    write_json,
)
from blockstep.conformance.explore import pictures
from blockstep.conformance.explore.fill import fill
from blockstep.conformance.explore.presets import WORLDS
from blockstep.conformance.explore.probe import JUDGED_WITNESSES, OF_THE_PAST
from blockstep.conformance.explore.tables import (
    Shortest,
    find_shortest,
    join_worlds,
    museum_rows,
    quirk_rows,
    render_table,
    tell_program,
)
from blockstep.conformance.explore.vectors import consume, read_vectors
from blockstep.conformance.explore.walk import (
    MAX_STATES,
    SPEC_IS_WRONG,
    LostShardError,
    Task,
    Walked,
    walk,
)
from blockstep.conformance.explore.world import World
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.check import ExitCode
from blockstep.spec.profiles import STRICT, Profile

JobsOption = Annotated[int, typer.Option(min=0, help="Processes side by side; 0: one per core.")]
MarkdownOption = Annotated[
    Path | None,
    typer.Option(
        help="With a table or --list: also write it for the documentation.", callback=check_output
    ),
]


def explore_command(
    preset: Annotated[
        list[str] | None, typer.Option(help="A world; may be given several times. Default: all.")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list", help="List the worlds.")] = False,
    engine: Annotated[
        str, typer.Option(help="Also hold this engine to every transition: host, museum:NAME ...")
    ] = "",
    profile: Annotated[
        str, typer.Option(help="Release whose known quirks are followed (blockstep quirks).")
    ] = STRICT.name,
    properties: Annotated[
        bool, typer.Option("--properties/--no-properties", help="Judge every transition by them.")
    ] = True,
    witness: Annotated[
        str, typer.Option(help="Show the shortest way to a situation (blockstep explain NAME).")
    ] = "",
    quirks: Annotated[
        bool, typer.Option("--quirks", help="The shortest program of each quirk, as a table.")
    ] = False,
    museum: Annotated[
        bool, typer.Option("--museum", help="The shortest program of each planted defect.")
    ] = False,
    name: Annotated[
        list[str] | None, typer.Option(help="With a table: these quirks or defects only.")
    ] = None,
    max_states: Annotated[
        int, typer.Option(min=1, help="Stop before there are more; 250 bytes each.")
    ] = MAX_STATES,
    jobs: JobsOption = 1,
    dot: Annotated[
        Path | None, typer.Option(help="Write the graph of one small world.", callback=check_output)
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the graph of one small world.", callback=check_output)
    ] = None,
    markdown: MarkdownOption = None,
    json_path: JsonOption = None,
) -> None:
    """Visit every state of small worlds; judge every transition, and hold an engine to it.

    Example: blockstep explore --preset pair --engine host
    """
    jobs = jobs or os.cpu_count() or 1
    worlds = _worlds(preset)
    follows = require_profile(profile)
    if list_presets:
        _list_worlds(json_path, markdown)
    elif quirks or museum:
        make_rows = quirk_rows if quirks else museum_rows
        advance = plain_progress("exploring")
        with input_errors():
            rows = make_rows(worlds, max_states, jobs, name or (), lambda text: advance(None, text))
        _echo(render_table(rows), json_path)
        write_json(json_path, rows)
        if markdown is not None:
            write(markdown, render_table(join_worlds(rows) if museum else rows, markdown=True))
    elif witness:
        _show_witness(witness, worlds, max_states, jobs, json_path)
    elif dot is not None or svg is not None:
        _draw(worlds, follows, dot, svg, json_path)
    else:
        tasks = [
            Task(world, follows, properties, engine=engine, max_states=max_states)
            for world in worlds
        ]
        _explore(tasks, jobs, json_path)


def _worlds(names: list[str] | None) -> list[World]:
    for name in names or ():
        if name not in WORLDS:
            usage(f"--preset {name!r}: must be one of {', '.join(WORLDS)}")
    return [WORLDS[name] for name in names or WORLDS]


def _list_worlds(json_path: Path | None, markdown: Path | None) -> None:
    rows: list[dict[str, object]] = []
    for world in WORLDS.values():
        counts = None if world.expected is None else asdict(world.expected)
        fields = ("states", "transitions", "refused", "depth")
        shown = {name: f"{counts[name]:,}" if counts else "not counted" for name in fields}
        rows.append({"world": world.name, **shown, "what": world.summary})
    _echo(render_table(rows), json_path)
    write_json(json_path, rows)
    if markdown is not None:
        write(markdown, render_table(rows, markdown=True))


def _echo(text: str, json_path: Path | None) -> None:
    typer.echo(text, nl=False, err=json_path == Path("-"))


def _progress_of(world: World) -> Callable[[int, int, int], None]:
    advance = plain_progress(f"exploring {world.name}")
    whole = "" if world.expected is None else f" of {world.expected.states:,}"

    def tell(states: int, transitions: int, depth: int) -> None:
        advance(None, f"{states:,}{whole} states, {transitions:,} transitions, depth {depth}")

    return tell


def _explore(tasks: Sequence[Task], jobs: int, json_path: Path | None) -> None:
    results = []
    code = ExitCode.CONFORMS
    for task in tasks:
        try:
            with input_errors():
                walked = walk(task, jobs, _progress_of(task.world))
        except LostShardError as lost:
            end(ExitCode.HARNESS, str(lost))
        _echo(render_walked(walked), json_path)
        results.append(walked_to_json(walked))
        now = exit_code_of(walked)
        code = code if now is ExitCode.CONFORMS else now
        if code not in (ExitCode.CONFORMS, ExitCode.HARNESS):
            break
    write_json(json_path, results)
    raise typer.Exit(code)


def exit_code_of(walked: Walked) -> ExitCode:
    """How a command with this result ends."""
    if walked.cycle:
        return ExitCode.LIVENESS
    if walked.found:
        is_spec = any(line.startswith(SPEC_IS_WRONG) for line in walked.found)
        return ExitCode.SPEC if is_spec else ExitCode.FAILED
    if not walked.is_complete:
        return ExitCode.HARNESS
    return ExitCode.CONFORMS if is_as_expected(walked) else ExitCode.FAILED


def is_as_expected(walked: Walked) -> bool:
    """Whether the counts are those committed, where there are any for this task."""
    task = walked.task
    expected = task.world.expected
    return task.profile.quirks != frozenset() or expected is None or walked.counts == expected


def render_walked(walked: Walked) -> str:
    """The verdict, or the shortest program to what is wrong."""
    task, counts = walked.task, walked.counts
    name = task.world.name
    size = (
        f"{counts.states:,} states, {counts.transitions:,} transitions, "
        f"{counts.refused:,} refusals, depth {counts.depth}, {walked.seconds:.0f} s"
    )
    if walked.found:
        lines = [f"blockstep explore: {name}: found after {len(walked.path)} events ({size})"]
        lines += [f"  {line}" for line in walked.found]
        lines += ["  program", *_numbered(walked.path)]
        if walked.cycle:
            lines += ["  and then for ever", *_numbered(walked.cycle)]
        return "\n".join(lines) + "\n"
    if not walked.is_complete:
        return (
            f"{name}: stopped after {size}: the next level would pass --max-states "
            f"{task.max_states:,}; raise it if the memory allows (250 bytes a state)\n"
        )
    said = ["every property holds in every state, no cycle without progress"]
    said = said if task.properties else []
    said += [f"{task.engine} agrees on every event in every state"] if task.engine else []
    if not is_as_expected(walked):
        said.append(f"NOT AS COMMITTED: {task.world.expected}")
    return "; ".join([f"{name}: {size}", *said]) + "\n"


def _numbered(path: Sequence[object]) -> list[str]:
    return [f"    {n:2}  {line}" for n, line in enumerate(tell_program(path), 1)]  # type: ignore[arg-type]


def walked_to_json(walked: Walked) -> dict[str, object]:
    """For machines (docs/reference/json.md)."""
    task = walked.task
    return {
        "format": "blockstep-explore",
        "version": 1,
        "preset": task.world.name,
        "engine": task.engine or None,
        "profile": task.profile.name,
        "exit_code": int(exit_code_of(walked)),
        "is_complete": walked.is_complete,
        "counts": asdict(walked.counts),
        "expected": None if task.world.expected is None else asdict(task.world.expected),
        "seconds": walked.seconds,
        "found": list(walked.found),
        "program": tell_program(walked.path),
        "cycle": tell_program(walked.cycle),
    }


def _show_witness(
    witness: str, worlds: Sequence[World], max_states: int, jobs: int, json_path: Path | None
) -> None:
    if witness in OF_THE_PAST:
        usage(f"--witness {witness!r}: no single step shows it, for it depends on what was before")
    if witness not in JUDGED_WITNESSES:
        usage(f"--witness {witness!r}: must be one of {', '.join(sorted(JUDGED_WITNESSES))}")
    tasks = [
        Task(world, properties=False, witness=witness, max_states=max_states) for world in worlds
    ]
    shortest = find_shortest(witness, tasks, jobs)
    _echo(_render_shortest(shortest), json_path)
    write_json(
        json_path,
        {
            "witness": witness,
            "preset": shortest.world if shortest.found else None,
            "program": tell_program(shortest.path),
        },
    )
    raise typer.Exit(ExitCode.CONFORMS if shortest.found else ExitCode.HARNESS)


def _render_shortest(shortest: Shortest) -> str:
    if not shortest.found:
        return f"{shortest.name}: not reached in these worlds\n"
    head = f"{shortest.name}: after {len(shortest.path)} events (preset {shortest.world})"
    return "\n".join([head, *_numbered(shortest.path)]) + "\n"


def _draw(
    worlds: Sequence[World],
    profile: Profile,
    dot: Path | None,
    svg: Path | None,
    json_path: Path | None,
) -> None:
    if len(worlds) != 1:
        usage("--dot, --svg: name one world with --preset")
    walked = walk(
        Task(worlds[0], profile, properties=False, edges=True, max_states=pictures.STATES_MAX)
    )
    if not walked.is_complete:
        usage(
            f"--preset {worlds[0].name}: more than {pictures.STATES_MAX} states are no picture; "
            "take a smaller world"
        )
    graph = pictures.get_graph(walked)
    if dot is not None:
        write(dot, pictures.to_dot(graph))
    if svg is not None:
        write(svg, pictures.to_svg(graph))
    write_json(json_path, pictures.to_json(graph))


vectors_app = typer.Typer(
    help="Portable test vectors: programs with the right answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@vectors_app.command("fill")
def fill_command(
    out: Annotated[Path, typer.Argument(help="The file to write; '.gz' at its end gzips it.")],
    preset: Annotated[str, typer.Option(help=f"A world: {', '.join(WORLDS)}.")] = "pair",
    max_states: Annotated[int, typer.Option(min=1, help="Walk no more than these.")] = 20_000,
    json_path: JsonOption = None,
) -> None:
    """Write few programs that together do all that the specification does in a world.

    Example: blockstep vectors fill pair.jsonl --preset pair
    """
    world = _worlds([preset])[0]
    with input_errors():
        filled = fill(out, world, max_states, _progress_of(world))
    manifest = filled.manifest
    _echo(
        f"{out}: {manifest.programs} programs, {filled.num_events} events, for all "
        f"{filled.num_deeds} branches, situations and answers of "
        f"{'all' if filled.is_complete else 'the first'} {filled.num_states:,} states\n",
        json_path,
    )
    write_json(
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


@vectors_app.command("consume")
def consume_command(
    files: Annotated[list[Path], typer.Argument(help="Files of vectors.")],
    engine: EngineOption = "host",
    json_path: JsonOption = None,
) -> None:
    """Play vectors on an engine and compare every answer and state.

    Example: blockstep vectors consume pair.jsonl --engine mypkg.adapter:make
    """
    rows = []
    code = ExitCode.CONFORMS
    for path in files:
        with input_errors():
            result = consume(read_vectors(path), load_engine(engine))
        said = f"{result.num_programs} programs, {result.num_events} events"
        skipped = ", ".join(f"{count} for {why}" for why, count in result.skipped.items())
        said += f"; not tried: {skipped}" if skipped else ""
        if not result.conforms:
            code = ExitCode.FAILED
            _echo(
                f"{path}: DIVERGENCE in program {result.program}, step {result.step}\n", json_path
            )
            _echo(f"  event  {result.event}\n", json_path)
            for row in result.differences:
                _echo(f"  {row.field}: expected {row.expected}, seen {row.seen}\n", json_path)
        elif not result.num_events:
            code = max(code, ExitCode.HARNESS)
            _echo(f"{path}: NOTHING RAN: {said}\n", json_path)
        else:
            _echo(f"{path}: conforms: {said}\n", json_path)
        rows.append({"path": str(path), "conforms": result.conforms, **asdict(result)})
    write_json(json_path, rows)
    raise typer.Exit(code)
