"""Measurements of engines that decide the same, with one clock or one profiler."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.bench import measure, report
from blockstep.conformance.bench.profile import profile, to_lines
from blockstep.conformance.bench.scenarios import SCENARIOS, TRACE, Scenario, get_trace_scenario
from blockstep.conformance.bench.timed_engines import SideError, find_obstacle, get_terms, split
from blockstep.conformance.command import console, options
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import list_changes
from blockstep.conformance.search.options import ExitCode

SIZES = (1, 8, 64, 256, 1024, 4096)
TRACE_STEPS_MAX = 1 << 30

EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        help="May be given several times; else the default of check. vllm: its bare scheduler."
    ),
]
ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(help=f"May be given several times; all otherwise: {', '.join(SCENARIOS)}."),
]

bench_app = typer.Typer(
    help="Measure: how long the steps of schedulers take.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@contextmanager
def _measuring(screen: Console, title: str) -> Iterator[measure.Advance]:
    with console.input_errors(), console.progress(screen, title) as advance:
        try:
            yield advance
        except SideError as error:
            console.end(ExitCode.FAILED, str(error))


@bench_app.command("scheduler")
def scheduler_command(
    engine: EngineOption = None,
    scenario: ScenarioOption = None,
    num_running: Annotated[
        list[int] | None,
        typer.Option(
            "-n",
            min=1,
            help=f"Running requests; {', '.join(map(str, SIZES))}. Measured as often as it is "
            "given, in turn; medians count.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Play this published trace instead of scenarios.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The first N requests of the trace.")] = 2000,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each scenario.")] = 200,
    path: options.Folder = None,
    through_apply: Annotated[
        bool, typer.Option("--apply", help="Also time engines with arrays through `apply`.")
    ] = False,
    gc_on: Annotated[
        bool, typer.Option("--gc/--no-gc", help="Collect garbage while measuring.")
    ] = False,
    plot: Annotated[Path | None, options.output("Also draw it: .svg or .png.")] = None,
    markdown: Annotated[Path | None, options.output("Also write a part of a page.")] = None,
    json_path: options.Json = None,
) -> None:
    """Time schedule and commit of engines in turn, and check that they decide the same.

    Times are microseconds of processor time. Two readings of an engine with arrays: `arrays`, what
    a model runner consumes, and `materialised`, as many objects as vLLM builds; with --apply
    `protocol`, too: the events and observations of a check. Exits 1 if two engines decide
    differently. An engine that is not exact is timed alone, on its own decisions.

    Example: blockstep bench scheduler --engine host --engine vllm --scenario decode -n 64 -n 1024
    """
    screen = console.make_screen(json_path, report.WIDTH_MIN)
    if plot is not None:
        _require_plot(plot)
    conditions = {**_get_conditions(), "gc": "on" if gc_on else "off", "steps": steps}
    options.look_in(path)
    with _measuring(screen, "measuring") as advance:
        if trace is None:
            work, most = _list_work(scenario, num_running), steps
        else:
            played = get_trace_scenario(trace, limit)
            work, most = [(played, played.get_concurrency(0))], TRACE_STEPS_MAX
        names = _require_engines(engine)
        teams = split(names)
        tasks = [(*one, able) for one in work for team in teams if (able := _pick(team, *one))]
        if not tasks:
            what = find_obstacle(names[0], work[0][0].get_config(work[0][1]))
            where = f"{names[0]}, {work[0][0].name}"
            console.usage(f"{where}: the engine lacks {what}: take another --scenario")
        for team in teams:
            measure.rehearse(team, advance)
        measurements, left_out = _measure_all(tasks, most, gc_on, advance, through_apply)
    _show(measurements, screen)
    for line in (*_describe_terms(teams, work), *left_out):
        screen.print(line, soft_wrap=True)
    if plot is not None:
        report.draw_plot(plot, measurements)
    if markdown is not None:
        console.write(markdown, report.make_markdown(measurements, conditions, plot))
    console.write_json(json_path, report.to_json(measurements, conditions))


def _require_engines(engines: list[str] | None) -> list[str]:
    """Return the requested engines, each once; one that cannot be built ends the command."""
    names = list(dict.fromkeys(engines or [options.get_default_engine()]))
    for name in names:
        if name != "vllm":
            console.require_engine(load_engine(name))
    return names


def _measure_all(
    tasks: list[tuple[Scenario, int, tuple[str, ...]]],
    most: int,
    gc_on: bool,
    advance: measure.Advance,
    through_apply: bool,
) -> tuple[list[measure.Measurement], list[str]]:
    """Return the measurements, and the tasks that an engine at `safety` cannot play.

    Raises: as `measure`; UsageError if nothing is left.
    """
    found, left_out = [], []
    for task in tasks:
        try:
            found.append(measure.measure(*task, most, gc_on, advance, through_apply))
        except UsageError as error:
            if get_terms(task[2]).weaker is None or len(tasks) == 1:
                raise
            left_out.append(f"not measured  {error}")
    if not found:
        raise UsageError(left_out[0])
    return measure.merge_rounds(found), left_out


def _pick(team: tuple[str, ...], scenario: Scenario, size: int) -> tuple[str, ...]:
    """Return the engines of a team that have what a scenario needs."""
    config = scenario.get_config(size)
    return tuple(name for name in team if find_obstacle(name, config) is None)


def _describe_terms(
    teams: list[tuple[str, ...]], work: list[tuple[Scenario, int]]
) -> Iterator[str]:
    """Yield which engines were compared, and what was changed or left out for an engine."""
    scenarios = {scenario.name: scenario.get_config(size) for scenario, size in work}
    for team in teams:
        terms = get_terms(team)
        if terms.weaker is None:
            only = "one engine, compared with no other"
            yield "all decided the same" if len(team) > 1 else only
        elif terms.sees_blocks:
            what = f"equivalence {terms.equivalence}: it decides by rules of its own"
            yield f"{team[0]}: compared with no other ({what})"
        else:
            what = f"equivalence {terms.equivalence}"
            yield f"{team[0]}: decided the same, ids of blocks left out ({what})"
        for name in team:
            for scenario, config in scenarios.items():
                if lacks := find_obstacle(name, config):
                    yield f"not measured  {name}, {scenario}: the engine lacks {lacks}"
                elif changes := list_changes(config, terms.fit_config(config)):
                    yield f"config        {name}, {scenario}: {', '.join(changes)}"


def _require_plot(path: Path) -> None:
    """Check that a picture can be drawn, before the work begins."""
    if path.suffix not in (".svg", ".png"):
        console.usage(f"--plot {path}: must end in .svg or .png")
    if find_spec("matplotlib") is None:
        console.usage("--plot: needs matplotlib: pip install 'blockstep[plot]'")


def _show(measurements: list[measure.Measurement], screen: Console) -> None:
    """Print the table, the slopes, and the sums over a trace."""
    columns = report.COLUMNS if screen.width >= report.WIDTH_MIN else report.FEW_COLUMNS
    screen.print(report.make_table(measurements, columns))
    for row in report.list_slopes(measurements):
        screen.print(
            f"slope {row['scenario']} {row['engine']} {row['reading']}: "
            f"{row['nanoseconds_per_request']:,} ns per running request"
        )
    for entry in measurements:
        for found in entry.readings if entry.scenario == TRACE else ():
            seconds = report.get_seconds(entry, found)
            screen.print(f"total {found.engine} {found.reading}: {seconds:.3f} s for all steps")


@bench_app.command("profile")
def profile_command(
    engine: EngineOption = None,
    scenario: ScenarioOption = None,
    num_running: Annotated[int, typer.Option("-n", min=1, help="Running requests.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are looked at.")] = 200,
    lines: Annotated[int, typer.Option(min=1, help="Functions that are shown.")] = 12,
    path: options.Folder = None,
    json_path: options.Json = None,
) -> None:
    """Show in which functions the steps of an engine spend their time, without the filling.

    The steps are those of `blockstep bench scheduler`; objects are not built. A profiler makes
    small functions look slower than they are: shares count, not microseconds.

    Example: blockstep bench profile --scenario decode -n 1024
    """
    screen = console.make_screen(json_path, report.WIDTH_MIN)
    conditions = {**_get_conditions(), "steps": steps}
    options.look_in(path)
    profiles, left_out = [], []
    with _measuring(screen, "profiling") as advance:
        names = _require_engines(engine)
        for entry, size in _list_work(scenario, [num_running]):
            for name in names:
                if lacks := find_obstacle(name, entry.get_config(size)):
                    left_out.append(f"{name}, {entry.name}: the engine lacks {lacks}")
                    continue
                profiles.append(profile(entry, size, name, steps, lines, advance))
                screen.print(*to_lines(profiles[-1]), "", sep="\n", markup=False)
    if not profiles:
        console.usage(f"{left_out[0]}: take another --scenario")
    for line in left_out:
        screen.print(f"not measured  {line}", soft_wrap=True)
    result = {"format": "blockstep-bench-profile", "version": 1, **conditions}
    console.write_json(json_path, {**result, "profiles": [asdict(found) for found in profiles]})


def _get_conditions() -> dict[str, object]:
    """Return the conditions of a measurement, with the command that repeats it."""
    return {
        "command": shlex.join(["blockstep", *sys.argv[1:]]),
        "machine": measure.describe_machine(),
        "vllm": version("vllm") if find_spec("vllm") else None,
    }


def _list_work(scenarios: list[str] | None, sizes: list[int] | None) -> list[tuple[Scenario, int]]:
    """Return the scenarios and sizes to measure, in this order.

    They are sorted by size, so that scenarios that are compared are measured at about the same
    time.
    """
    for name in scenarios or ():
        if name not in SCENARIOS:
            console.usage(f"--scenario {name!r}: must be one of {', '.join(SCENARIOS)}")
    work = [
        (SCENARIOS[name], size)
        for size in sizes or SIZES
        for name in scenarios or SCENARIOS
        if size <= SCENARIOS[name].num_running_max
    ]
    if not work:
        console.usage(f"-n {min(sizes or SIZES):,}: more than these scenarios are made for")
    return work
