"""Command: `blockstep campaign`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from blockstep.conformance.campaign.executor import run_workers
from blockstep.conformance.campaign.folder import get_one, open_store
from blockstep.conformance.campaign.leases import Store
from blockstep.conformance.campaign.metrics import Metrics
from blockstep.conformance.campaign.plan import Plan, Target, read_plan
from blockstep.conformance.campaign.records import Found, decode
from blockstep.conformance.campaign.summary import Summary, summarize, summary_to_json
from blockstep.conformance.campaign.worker import Campaign
from blockstep.conformance.command import console, options
from blockstep.conformance.command.check import is_ours
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.program_file import parse_program
from blockstep.conformance.report.campaign import make_progress_line, render_campaign, render_page
from blockstep.conformance.report.failure import render_outcome
from blockstep.conformance.search.check import CheckResult, play_program
from blockstep.conformance.search.isolation import Isolation
from blockstep.conformance.search.options import load

campaign_app = typer.Typer(
    help="Search several engines for weeks, on one machine or on many, with one store.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
PlanArgument = Annotated[
    Path, typer.Argument(help="The plan, a TOML file.", exists=True, dir_okay=False)
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        help="A folder, or redis://..., rediss://... or unix://...; else a folder by the plan.",
        envvar="BLOCKSTEP_STORE",
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option(help="Another budget than the plan's: events in all, or 60s, 5m.")
]


@campaign_app.command("run")
def run_command(
    plan_path: PlanArgument,
    store: StoreOption = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster, or local; else processes of this machine."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Workers; 0: one per core (of the Ray cluster).")
    ] = 0,
    budget: BudgetOption = None,
    metrics: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for Prometheus metrics.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Play a campaign until its budget is spent, and continue one that was stopped.

    The same command on another machine with the same store joins the campaign. Exits 1 if a defect
    was found that is not known.

    Example: blockstep campaign run nightly.toml --store redis://10.0.0.1
    """
    screen = console.make_screen(json_path)
    with console.input_errors():
        plan, place = _open(plan_path, store, budget)
        deadline = None if plan.max_seconds is None else time.time() + plan.max_seconds
        number = jobs if ray is not None and not jobs else options.count_jobs(jobs)
        gauges = None if metrics is None else Metrics(metrics)
        with console.progress(screen, f"campaign {plan.key}") as advance:
            held = open_store(place, plan.key)

            def tick() -> None:
                if gauges is not None:
                    gauges.set(summarize(plan, held))
                past = Campaign(plan, held).get_past()
                share = past.events / plan.max_events if plan.max_events else None
                advance(None if share is None else min(share, 1.0), make_progress_line(past))

            def runs_here(target: Target) -> bool:
                return number == 1 and target.python is None and is_ours(target.engine)

            run_workers(plan, place, number, ray, deadline, runs_here, tick)
        _end(summarize(plan, held), json_path)


@campaign_app.command("status")
def status_command(
    plan_path: PlanArgument,
    store: StoreOption = None,
    watch: Annotated[
        float | None, typer.Option(min=0.5, help="Show it again every N seconds until Ctrl-C.")
    ] = None,
    json_path: options.Json = None,
) -> None:
    """Show the state of a campaign: targets, defects, coverage.

    Exits with the code that the campaign has now.
    """
    with console.input_errors():
        plan, place = _open(plan_path, store)
        held = open_store(place, plan.key)
        if watch is not None:
            _watch(plan, held, watch, console.make_screen(json_path))
        _end(summarize(plan, held), json_path)


@campaign_app.command("report")
def report_command(
    plan_path: PlanArgument,
    output: Annotated[Path, options.output("The page.", "--output", "-o")] = Path("campaign.html"),
    store: StoreOption = None,
) -> None:
    """Write one HTML page: defects over targets, coverage over time, and all programs."""
    with console.input_errors():
        plan, place = _open(plan_path, store)
        page = render_page(summarize(plan, open_store(place, plan.key), with_course=True))
    console.write(output, page)


@campaign_app.command("replay")
def replay_command(
    plan_path: PlanArgument,
    digest: Annotated[str, typer.Argument(help="Digest of a finding, as status prints it.")],
    target: Annotated[
        str | None, typer.Option(help="Target of the plan; else the one where it was found.")
    ] = None,
    store: StoreOption = None,
    save: Annotated[
        Path | None, options.output("Write the program to this file.", "--save")
    ] = None,
) -> None:
    """Play the program of a finding again.

    Exits as `check --program` does.
    """
    with console.input_errors():
        plan, place = _open(plan_path, store)
        found = _get_found(open_store(place, plan.key), digest)
        wanted = target or found.target
        number = next((n for n, it in enumerate(plan.targets) if it.name == wanted), None)
        if number is None:
            names = ", ".join(it.name for it in plan.targets)
            raise UsageError(f"target {wanted!r}: the plan has {names}")
        if save is not None:
            console.write(save, found.program)
        result = _replay(plan, found, number)
    if result.first is None:
        typer.echo(f"blockstep campaign replay: {digest} passes in {wanted}")
    else:
        console.print_text(render_outcome(result, wanted), None)
    raise typer.Exit(result.exit_code)


def _replay(plan: Plan, found: Found, number: int) -> CheckResult:
    """Play the program of a finding."""
    if not found.program:
        raise UsageError(f"finding {found.digest}: the engine died; it has no program")
    cell = next(it for it in plan.cells if it.target == number)
    wanted = replace(plan.make_options(cell), program=found.digest)
    program = parse_program(found.program, Path(found.digest))
    python = plan.targets[number].python
    if python is None and is_ours(wanted.engine):
        return play_program(wanted, program, load(wanted))
    with Isolation(plan.file.event_seconds, python=python) as place:
        return place.run(wanted, program)


def _get_found(store: Store, digest: str) -> Found:
    if not digest.isalnum() or not digest.isascii() or digest != digest.lower():
        raise UsageError(f"digest {digest!r}: must be one that `campaign status` prints")
    data = get_one(store, f"finding/{digest}")
    if data is None:
        raise UsageError(f"digest {digest!r}: the store has no such finding")
    return decode(data, Found)


def _open(path: Path, store: str | None, budget: str | None = None) -> tuple[Plan, str]:
    """Return the plan and the address of its store: by default a folder next to the plan."""
    return read_plan(path, budget), store or str(path.with_suffix(".campaign"))


def _end(summary: Summary, json_path: Path | None) -> None:
    console.print_text(render_campaign(summary), json_path)
    console.write_json(json_path, summary_to_json(summary))
    raise typer.Exit(summary.exit_code)


def _watch(plan: Plan, store: Store, seconds: float, screen: Console) -> None:
    """Show the state until the campaign is finished."""
    with Live(console=screen, auto_refresh=False) as live:
        while not (now := summarize(plan, store)).is_finished:
            live.update(Text(render_campaign(now)), refresh=True)
            time.sleep(seconds)
