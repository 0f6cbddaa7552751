"""The command line. Each command ends with a documented exit code (see `ExitCode`)."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blockstep.conformance.command.bench import bench_app
from blockstep.conformance.command.console import (
    EngineOption,
    JsonOption,
    check_output,
    input_errors,
    progress,
    require_profile,
    usage,
    write,
    write_json,
)
from blockstep.conformance.command.explore import explore_command, vectors_app
from blockstep.conformance.command.generate import generate_command
from blockstep.conformance.command.prove import prove_command
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.draw.workloads import load
from blockstep.conformance.judge.properties import PROPERTIES
from blockstep.conformance.museum import EXHIBITS, Exhibit
from blockstep.conformance.museum import trial as hunting
from blockstep.conformance.protocol.registry import (
    KNOWN_ENGINES,
    MUSEUM,
    EngineNotFoundError,
    load_engine,
)
from blockstep.conformance.recorded.pace import REPLAY_PRESETS
from blockstep.conformance.recorded.replay import replay
from blockstep.conformance.recorded.traces import write_trace
from blockstep.conformance.recorded.validate import render_validation, validate, validation_to_json
from blockstep.conformance.report.arms import arms_to_json, render_arms
from blockstep.conformance.report.explain import explain_moment, explain_name
from blockstep.conformance.report.failure import tell_failure
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt, render_hunt_page
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.report.replay import render_replay, replay_to_json
from blockstep.conformance.report.verdict import render_verdict
from blockstep.conformance.search.arms import compare_arms
from blockstep.conformance.search.check import (
    CheckOptions,
    CheckResult,
    ExitCode,
    check,
    exit_code_of,
    record_episode,
)
from blockstep.conformance.search.hunt import get_workarounds, hunt
from blockstep.conformance.search.isolation import (
    BUILD_SECONDS,
    EVENT_SECONDS,
    Isolation,
    LostError,
)
from blockstep.spec.profiles import PROFILES, QUIRKS, STRICT
from blockstep.spec.vocabulary import Config, ConfigError, Policy, config_problems

app = typer.Typer(
    name="blockstep",
    help="Hold an LLM-inference scheduler to its executable specification, step by step.",
    epilog="Exit codes: 0 conforms, 1 divergence or violated property, 2 usage or input error, "
    "3 the spec failed an assertion, 4 liveness, 5 harness (nothing ran, witness missing, "
    "canary alive).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("prove")(prove_command)
app.command("explore")(explore_command)
app.command("generate")(generate_command)
app.add_typer(vectors_app, name="vectors")

TRUSTED = frozenset({"host", "compiled", "fastest", "host-kernels", "spec"})
"""Engines that are checked in this process, as the museum is: nothing of ours hangs or crashes."""

DepthOption = Annotated[
    int, typer.Option(min=1, help="Plans in flight at once, at most; drawn up to this.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="A folder to look in first for the engine."),
]
EventSecondsOption = Annotated[
    float,
    typer.Option(
        help="An engine that does not answer one event within so long hangs; importing and "
        f"building it may take {BUILD_SECONDS:g}."
    ),
]


@app.command("check")
def check_command(
    engine: EngineOption = "host",
    preset: Annotated[
        str, typer.Option(help=f"Scope of the runs: {', '.join(PRESETS)}.")
    ] = "small",
    policy: Annotated[
        Policy | None, typer.Option(help="Fix the policy; both are drawn otherwise.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Release whose known quirks are followed (blockstep quirks).")
    ] = STRICT.name,
    depth: DepthOption = MAX_DEPTH,
    path: FolderOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    budget: Annotated[
        str, typer.Option(help="How long: a number of events (repeatable), or 60s, 5m.")
    ] = "150000",
    episode: Annotated[
        int | None, typer.Option(min=0, help="Run this one episode only (to reproduce a failure).")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes side by side; 0: one per core.")] = 0,
    record: Annotated[
        Path | None,
        typer.Option(help="With --episode: write the run as a trace.", callback=check_output),
    ] = None,
    event_seconds: EventSecondsOption = EVENT_SECONDS,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Run the engine in this process, one job at a time: for a debugger. It is run in "
            "processes of its own otherwise, unless it is one of ours.",
        ),
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Drive an engine and the spec through random programs and compare after every event.

    Example: blockstep check --engine mypkg.adapter:make --preset small --budget 200000
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    if preset not in PRESETS:
        usage(f"--preset {preset!r}: must be one of {', '.join(PRESETS)}")
    require_profile(profile)
    if record is not None and episode is None:
        usage("--record: needs --episode, for a trace is one run")
    if not event_seconds > 0:
        usage(f"--event-seconds {event_seconds:g}: must be above 0")
    max_events, max_seconds = parse_budget(budget)
    options = CheckOptions(
        engine=engine,
        preset=preset,
        policy=policy,
        seed=seed,
        max_events=max_events,
        max_seconds=max_seconds,
        episode=episode,
        jobs=1 if in_process else jobs or os.cpu_count() or 1,
        max_depth=depth,
        profile=profile,
        path=None if path is None else str(path.resolve()),
    )
    is_trusted = in_process or engine in TRUSTED or engine.startswith(MUSEUM)
    with input_errors(), Isolation(event_seconds) as isolation:
        result = _check(options, None if is_trusted else isolation, record, console)
    write_json(json_path, check_to_json(result))
    raise typer.Exit(result.exit_code)


def _check(
    options: CheckOptions, isolation: Isolation | None, record: Path | None, console: Console
) -> CheckResult:
    """Check and report, in this process or in isolation; then record the run if it is wanted."""
    run_check = check if isolation is None else isolation.check
    with progress(console, f"checking {options.engine}") as advance:
        result = run_check(options, lambda now: advance(*_check_progress(options, now)))
    report_check(result, console)
    if record is not None and isolation is None:
        write_trace(record, *record_episode(options))
    elif record is not None and isolation is not None:
        _record_isolated(isolation, options, record)
    return result


def report_check(result: CheckResult, console: Console) -> None:
    """The failure, or the verdict."""
    if result.first is None:
        render_verdict(result, console)
    else:
        console.print(tell_failure(result), markup=False, soft_wrap=True, end="")


def _record_isolated(isolation: Isolation, options: CheckOptions, record: Path) -> None:
    try:
        isolation.record(options, record)
    except LostError as lost:
        typer.echo(f"blockstep: --record {record}: nothing to write: {lost}", err=True)


def parse_budget(text: str) -> tuple[int | None, float | None]:
    """(events, seconds), one of them None, of `60s`, `5m`, `200000` or `200000events`."""
    match = re.fullmatch(r"\s*([\d_,]+(?:\.\d+)?)\s*(s|m|h|events?|)\s*", text)
    number = float(match[1].replace("_", "").replace(",", "")) if match else 0.0
    if match is None or number <= 0:
        usage(f"--budget {text!r}: must be a time (60s, 5m) or a number of events (200000)")
    unit = match[2]
    if unit in {"s", "m", "h"}:
        return None, number * {"s": 1, "m": 60, "h": 3600}[unit]
    return int(number), None


@app.command("arms")
def arms_command(
    engine: EngineOption = "host",
    preset: Annotated[
        str, typer.Option(help=f"Scope of the workloads: {', '.join(PRESETS)}.")
    ] = "small",
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    workloads: Annotated[int, typer.Option(min=1, help="Workloads to play in every arm.")] = 1000,
    json_path: JsonOption = None,
) -> None:
    """Compare an engine with itself: configs that must not change what is said.

    Caching on or off, drafts or none, one plan in flight or several, a small pool or a large one,
    other chunks. No reference and no snapshot are needed.
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    if preset not in PRESETS:
        usage(f"--preset {preset!r}: must be one of {', '.join(PRESETS)}")
    options = CheckOptions(engine=engine, preset=preset, seed=seed)
    started = time.perf_counter()
    with input_errors(), progress(console, f"comparing {engine}") as advance:
        result = compare_arms(
            options,
            load_engine(engine),
            workloads,
            lambda done: advance(done / workloads, f"{done:,} workloads"),
        )
    seconds = time.perf_counter() - started
    console.print(render_arms(result, options, seconds), markup=False, soft_wrap=True, end="")
    write_json(json_path, arms_to_json(result, options))
    if result.contrast is not None:
        raise typer.Exit(ExitCode.FAILED)
    raise typer.Exit(ExitCode.CONFORMS if any(result.num_compared.values()) else ExitCode.HARNESS)


@app.command("replay")
def replay_command(
    trace: Annotated[
        Path, typer.Argument(help="A workload: mooncake, azure or agent; gz or plain.")
    ],
    engine: EngineOption = "host",
    spec: Annotated[
        bool, typer.Option("--spec/--no-spec", help="In lock-step with the spec, or alone.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N requests only.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=2)] = None,
    block_size: Annotated[int | None, typer.Option(min=1)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2)] = None,
    policy: Annotated[Policy | None, typer.Option()] = None,
    caching: Annotated[
        bool | None, typer.Option("--caching/--no-caching", help="Prefix caching.")
    ] = None,
    snapshot_every: Annotated[
        int | None,
        typer.Option(min=0, help="Events between two comparisons of whole states; 0: never."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Drive real traffic through an engine, in lock-step with the spec or alone.

    Example: blockstep replay mooncake_conversation.jsonl.gz --limit 300 --block-size 16
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    wanted = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_prefix_caching": caching,
    }
    with input_errors():
        workload = load(trace, limit=limit)
        preset = REPLAY_PRESETS[workload.format]
        config = replay_config(preset.config, wanted)
        cadence = snapshot_every
        if cadence is None:
            cadence = default_cadence(config) if spec else 0
        make_engine = load_engine(engine)
        with progress(console, f"replaying {trace.name}") as advance:
            report = replay(
                workload,
                config,
                make_engine,
                with_spec=spec,
                pace=preset.pace,
                snapshot_every=cadence,
                on_progress=lambda now: advance(
                    now.requests_finished / max(len(workload), 1),
                    f"{now.requests_finished:,} requests, {now.steps:,} steps",
                ),
            )
    render_replay(report, console)
    write_json(json_path, replay_to_json(report))
    if report.finding is None:
        console.print(
            f"conforms: engine {engine}, in lock-step with the spec"
            if spec
            else f"done: engine {engine}, alone (--spec holds it to the spec)"
        )
    raise typer.Exit(exit_code_of(report.finding))


def replay_config(config: Config, wanted: Mapping[str, object]) -> Config:
    """`config` with the options that were given. Raises ConfigError."""
    given = {name: value for name, value in wanted.items() if value is not None}
    changed = replace(config, **given)  # type: ignore[arg-type]
    problems = config_problems(changed)
    if problems:
        raise ConfigError(problems)
    return changed


def default_cadence(config: Config) -> int:
    """Events between two snapshots in a replay: each one while the pool is small."""
    return max(config.num_blocks // 256, 1)


@app.command("validate")
def validate_command(
    trace: Annotated[Path, typer.Argument(help="A recorded run (blockstep check --record).")],
    json_path: JsonOption = None,
) -> None:
    """Hold a recorded run to the spec: does the spec give every recorded answer?"""
    console = Console(highlight=False, stderr=json_path == Path("-"))
    with input_errors():
        result = validate(trace)
    console.print(render_validation(trace, result), markup=False, soft_wrap=True, end="")
    write_json(json_path, validation_to_json(result))
    raise typer.Exit(ExitCode.CONFORMS if result.conforms else ExitCode.FAILED)


@app.command("properties")
def properties_command(json_path: JsonOption = None) -> None:
    """List the properties that are checked on every step, with the checks behind each."""
    console = Console(highlight=False, stderr=json_path == Path("-"))
    table = Table(box=None, pad_edge=False)
    for column in ("id", "name", "what holds"):
        table.add_column(column, overflow="fold")
    for entry in PROPERTIES:
        checks = "\n".join(f"  {check.sentence}" for check in entry.checks)
        table.add_row(
            entry.id, entry.name, f"{entry.statement}\n{checks}" if checks else entry.statement
        )
    console.print(table)
    write_json(
        json_path,
        [
            {
                "id": entry.id,
                "name": entry.name,
                "statement": entry.statement,
                "checks": [check.sentence for check in entry.checks],
            }
            for entry in PROPERTIES
        ],
    )


@app.command("engines")
def engines_command(json_path: JsonOption = None) -> None:
    """List the engines known by name, whether each can be loaded, and what it implements."""
    console = Console(highlight=False, stderr=json_path == Path("-"))
    rows = [_engine_row(name) for name in KNOWN_ENGINES]
    console.print(_table(rows))
    console.print("any other: --engine module:attribute, a factory from Config to Engine")
    console.print(f"planted defects: --engine {MUSEUM}NAME (see blockstep museum)")
    write_json(json_path, rows)


def _engine_row(name: str) -> dict[str, object]:
    known = KNOWN_ENGINES[name]
    try:
        engine = load_engine(name)(Config(num_blocks=2))
        implements = ", ".join(sorted(map(str, engine.capabilities())))
    except EngineNotFoundError as error:
        implements = f"cannot be loaded: {error}"
    return {
        "name": name,
        "summary": known.summary,
        "target": known.target,
        "implements": implements,
    }


@app.command("explain")
def explain_command(
    what: Annotated[
        str, typer.Argument(help="P4, a rule such as slots.revoke_slots, a witness, or a trace.")
    ],
    at: Annotated[
        int | None, typer.Option(min=0, help="In a trace: after this many events.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Say in words what a property demands, what a rule does, or what a recorded state means."""
    console = Console(highlight=False, stderr=json_path == Path("-"))
    with input_errors():
        text = explain_moment(Path(what), at) if Path(what).is_file() else explain_name(what)
    console.print(text, markup=False, soft_wrap=True, end="")
    write_json(json_path, {"what": what, "at": at, "text": text})


@app.command("quirks")
def quirks_command(json_path: JsonOption = None) -> None:
    """List what releases are known to do against a property, and the profiles that follow them."""
    console = Console(highlight=False, stderr=json_path == Path("-"))
    rows: list[dict[str, object]] = [
        {
            "quirk": str(story.quirk),
            "what it does": story.title,
            "breaks": story.property_ids,
            "upstream": story.upstream,
            "seen in": story.seen_in,
            "program": story.program,
        }
        for story in QUIRKS
    ]
    console.print(_table(rows))
    for profile in PROFILES:
        console.print(f"profile {profile.name}: {', '.join(sorted(profile.quirks)) or 'none'}")
    write_json(json_path, rows)


@app.command("hunt")
def hunt_command(
    engine: EngineOption = "host",
    profile: Annotated[
        str, typer.Option(help="Release whose quirks may account for what is found; strict: all.")
    ] = STRICT.name,
    depth: DepthOption = MAX_DEPTH,
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.")] = 0,
    budget: Annotated[int, typer.Option(min=1, help="Events in each scope.")] = 100_000,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Also write a page of the documentation.", callback=check_output),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Find every distinct defect of an engine, each with a short program, and name the known ones.

    Goes on where a check stops: what was found is forgiven and the same episode played again.
    Exits 1 if anything was found.

    Example: blockstep hunt --engine vllm --profile vllm-0.19.1
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    require_profile(profile)
    options = CheckOptions(
        engine=engine, seed=seed, max_events=budget, max_depth=depth, profile=profile
    )
    with input_errors(), progress(console, f"hunting in {engine}") as advance:
        make_engine = load_engine(engine)
        result = hunt(options, make_engine, advance)
    workarounds = get_workarounds(make_engine)
    console.print(render_hunt(result, workarounds), markup=False, soft_wrap=True, end="")
    write_json(json_path, hunt_to_json(result, workarounds))
    if markdown is not None:
        follows = "" if profile == STRICT.name else f" --profile {profile}"
        deep = "" if depth == MAX_DEPTH else f" --depth {depth}"
        command = f"blockstep hunt --engine {engine}{follows}{deep} --seed {seed} --budget {budget}"
        write(markdown, render_hunt_page(result, workarounds, command))
    raise typer.Exit(ExitCode.FAILED if result.defects else ExitCode.CONFORMS)


museum_app = typer.Typer(
    help="List the planted defects; `blockstep museum run` kills them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(museum_app, name="museum")
app.add_typer(bench_app, name="bench")


@museum_app.callback(invoke_without_command=True)
def museum_command(context: typer.Context, json_path: JsonOption = None) -> None:
    """List the planted defects; `blockstep museum run` kills them."""
    if context.invoked_subcommand is not None:
        if json_path is not None:
            usage("--json: belongs behind the command, as in `blockstep museum run --json FILE`")
        return
    console = Console(highlight=False, stderr=json_path == Path("-"))
    rows: list[dict[str, object]] = [
        {**hunting.describe(entry), "speaks": entry.properties} for entry in EXHIBITS.values()
    ]
    console.print(_table(rows))
    write_json(json_path, rows)


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
    jobs: Annotated[int, typer.Option(min=0, help="Processes side by side; 0: one per core.")] = 0,
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Also write the table as a page of the documentation.", callback=check_output
        ),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Kill the planted defects, and say how each one fell. Exits 5 if one survives.

    Example: blockstep museum run zombie-key full-hit --seed 7
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    max_events, max_seconds = parse_budget(budget)
    hunt = hunting.Trial(
        seeds=tuple(seed) if seed else (0, 1, 2),
        max_events=max_events,
        max_seconds=max_seconds,
        jobs=jobs or os.cpu_count() or 1,
    )
    chosen = [_exhibit(name) for name in names or EXHIBITS]
    with progress(console, "hunting") as advance:
        hunted = hunting.run_trial(chosen, hunt, advance)
    rows = [hunting.row_of(entry) for entry in hunted]
    shown = ("exhibit", "events", "seconds", "shrunk to", "killed by")
    console.print(_table([{name: row[name] for name in shown} for row in rows]))
    console.print(hunting.summary(hunted))
    write_json(json_path, [hunting.json_of(entry) for entry in hunted])
    if markdown is not None:
        given = " ".join([*(names or ()), *(f"--seed {number}" for number in hunt.seeds)])
        command = f"blockstep museum run {given} --budget {budget}"
        write(markdown, hunting.museum_page(rows, command, hunt.seeds))
    survivors = [entry.exhibit.name for entry in hunted if entry.survived]
    if survivors:
        typer.echo(f"blockstep: survived: {', '.join(survivors)}", err=True)
        raise typer.Exit(ExitCode.HARNESS)


def _exhibit(name: str) -> Exhibit:
    if name not in EXHIBITS:
        usage(f"museum run {name!r}: no such exhibit; `blockstep museum` lists them")
    return EXHIBITS[name]


def _cell(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _table(rows: list[dict[str, object]]) -> Table:
    """Rows of one kind as a table, columns named by the keys."""
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _check_progress(options: CheckOptions, now: CheckResult) -> tuple[float, str]:
    done = 0.0
    if options.max_events:
        done = now.num_events / options.max_events
    elif options.max_seconds:
        done = now.seconds / options.max_seconds
    return min(done, 1.0), f"{now.num_events:,} events, {now.num_episodes:,} episodes"


def main() -> None:
    """Entry point of the console script."""
    sys.path.insert(0, str(Path.cwd()))  # so that `--engine mymodule:make` finds a local file
    app()
