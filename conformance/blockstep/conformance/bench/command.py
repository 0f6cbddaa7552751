"""`blockstep bench scheduler`: engines side by side, deciding the same, under one clock."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.bench.measure import (
    Measurement,
    NotEqualError,
    describe_machine,
    measure,
)
from blockstep.conformance.bench.report import (
    draw_plot,
    list_slopes,
    make_markdown,
    make_rows,
    make_table,
    to_json,
)
from blockstep.conformance.bench.scenarios import SCENARIOS, Scenario, get_trace_scenario
from blockstep.conformance.check import ExitCode
from blockstep.conformance.console import (
    JsonOption,
    end,
    input_errors,
    progress,
    usage,
    write,
    write_json,
)

SIZES = (1, 8, 64, 256, 1024, 4096)
TRACE_STEPS_MAX = 1 << 30

bench_app = typer.Typer(
    help="Measure: how long the steps of schedulers take.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


@bench_app.callback()
def bench_command() -> None:
    """Measure: how long the steps of schedulers take."""


@bench_app.command("scheduler")
def scheduler_command(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="May be given several times; host otherwise. vllm: its bare scheduler."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help=f"May be given several times; all otherwise: {', '.join(SCENARIOS)}."),
    ] = None,
    num_running: Annotated[
        list[int] | None,
        typer.Option("-n", min=1, help=f"Running requests; {', '.join(map(str, SIZES))}."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Play this published trace instead of scenarios.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The first N requests of the trace.")] = 2000,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each scenario.")] = 200,
    gc_on: Annotated[
        bool, typer.Option("--gc/--no-gc", help="Collect garbage while measuring.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: .svg or .png.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write a part of a page.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Time schedule and commit of engines in turn, and demand that they decide the same.

    Times are microseconds of processor time. Two readings of an engine with arrays: `arrays`, what
    a model runner consumes, and `materialised`, as many objects as vLLM builds. Exits 1 if two
    engines decide differently.

    Example: blockstep bench scheduler --engine host --engine vllm --scenario decode -n 64 -n 1024
    """
    console = Console(highlight=False, stderr=json_path == Path("-"), width=150)
    names = list(dict.fromkeys(engine or ["host"]))
    # The command is taken before anything runs: what was typed is what makes the figures again.
    command = shlex.join(["blockstep", *sys.argv[1:]])
    conditions = {
        "command": command,
        "machine": describe_machine(),
        "gc": "on" if gc_on else "off",
        "steps": steps,
    }
    measurements: list[Measurement] = []
    with input_errors(), progress(console, "measuring") as advance:
        for entry, size in _list_work(scenario, num_running, trace, limit):
            most = steps if trace is None else TRACE_STEPS_MAX
            try:
                measurements.append(measure(entry, size, names, most, gc_on, advance))
            except NotEqualError as error:
                end(ExitCode.FAILED, str(error))
    console.print(make_table(make_rows(measurements)))
    for row in list_slopes(measurements):
        console.print(
            f"slope {row['scenario']} {row['engine']} {row['reading']}: "
            f"{row['nanoseconds_per_request']:,} ns per running request"
        )
    if trace is not None:
        _print_totals(console, measurements[0])
    console.print("all decided the same" if len(names) > 1 else "one engine, compared with nobody")
    if plot is not None:
        try:
            draw_plot(plot, measurements)
        except ImportError:
            usage("--plot: needs matplotlib: pip install 'blockstep[plot]'")
    if markdown is not None:
        write(markdown, make_markdown(measurements, conditions, plot))
    write_json(json_path, to_json(measurements, conditions))


def _list_work(
    scenarios: list[str] | None, sizes: list[int] | None, trace: Path | None, limit: int
) -> list[tuple[Scenario, int]]:
    """What is to be measured, in this order."""
    if trace is not None:
        found = get_trace_scenario(trace, limit)
        return [(found, found.get_concurrency(0))]
    for name in scenarios or ():
        if name not in SCENARIOS:
            usage(f"--scenario {name!r}: must be one of {', '.join(SCENARIOS)}")
    return [
        (SCENARIOS[name], size)
        for name in scenarios or SCENARIOS
        for size in sizes or SIZES
        if size <= SCENARIOS[name].num_running_max
    ]


def _print_totals(console: Console, entry: Measurement) -> None:
    """A trace is played once from end to end, so its steps add up."""
    for found in entry.readings:
        seconds = found.step.mean * entry.num_steps / 1e6
        console.print(f"total {found.engine} {found.reading}: {seconds:.3f} s for all steps")
