"""Command: `blockstep check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.command import console, options, programs
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.judge.properties import PROPERTIES
from blockstep.conformance.protocol.registry import MUSEUM
from blockstep.conformance.recorded.episodes import write_episode
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.report.sentences import SENTENCES
from blockstep.conformance.search.check import CheckResult, check
from blockstep.conformance.search.isolation import (
    BUILD_SECONDS,
    EVENT_SECONDS,
    Isolation,
    LostError,
)
from blockstep.conformance.search.options import CheckOptions, load
from blockstep.spec.profiles import STRICT
from blockstep.spec.vocabulary import Policy

TRUSTED = frozenset(
    {"host", "compiled", "device", "device-interpreted", "fastest", "host-kernels", "spec"}
)
"""Engines that are checked in this process, as the museum is: nothing of ours hangs or crashes."""


def is_ours(engine: str) -> bool:
    """Whether an engine of this name may run in this process."""
    return engine in TRUSTED or engine.startswith(MUSEUM)


FolderOption = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="A folder to look in first for the engine."),
]
PolicyOption = Annotated[
    Policy | None, typer.Option(help="Fix the policy; both are drawn otherwise.")
]
HideStateOption = Annotated[
    bool,
    typer.Option(
        "--hide-state", help="Judge plans and answers alone: the engine is not asked for its state."
    ),
]
SentenceOption = Annotated[
    str | None,
    typer.Option(help="Where several sentences are broken at once, show a program for this one."),
]
InProcessOption = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Run the engine in this process, one job at a time: for a debugger. It is run in "
        "processes of its own otherwise, unless it is one of ours.",
    ),
]
EventSecondsOption = Annotated[
    float,
    typer.Option(
        help="An engine that does not answer one event within so long hangs; importing and "
        f"building it may take {BUILD_SECONDS:g}."
    ),
]


def check_command(
    engine: options.Engine = "host",
    preset: Annotated[
        str, typer.Option(help=f"Scope of the runs: {', '.join(PRESETS)}.")
    ] = "small",
    policy: PolicyOption = None,
    profile: options.Profile = STRICT.name,
    depth: options.Depth = MAX_DEPTH,
    with_features: options.With = None,
    without_features: options.Without = None,
    path: FolderOption = None,
    seed: options.Seed = 0,
    budget: Annotated[
        str, typer.Option(help="How long: a number of events (repeatable), or 60s, 5m.")
    ] = "150000",
    episode: Annotated[
        int | None, typer.Option(min=0, help="Run this one episode only (to reproduce a failure).")
    ] = None,
    jobs: options.Jobs = 0,
    record: Annotated[
        Path | None, options.output("With --episode: write the run as a trace.")
    ] = None,
    program: programs.ProgramOption = None,
    corpus: programs.CorpusOption = None,
    save: programs.SaveOption = None,
    event_seconds: EventSecondsOption = EVENT_SECONDS,
    hide_state: HideStateOption = False,
    sentence: SentenceOption = None,
    in_process: InProcessOption = False,
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Drive an engine and the spec through random programs and compare after every event.

    Example: blockstep check --engine mypkg.adapter:make --preset small --budget 200000
    """
    screen = console.make_screen(json_path)
    options.require_preset(preset)
    options.require_profile(profile)
    programs.require_one(program, corpus, episode)
    _require_sense(event_seconds, record, episode)
    max_events, max_seconds = options.require_budget(budget)
    wanted = CheckOptions(
        engine=engine,
        preset=preset,
        policy=policy,
        seed=seed,
        max_events=max_events,
        max_seconds=max_seconds,
        episode=episode,
        sentence=_require_sentence(sentence, program),
        jobs=1 if in_process else options.count_jobs(jobs),
        max_depth=depth,
        profile=profile,
        path=None if path is None else str(path.resolve()),
        hide_state=hide_state,
        with_features=options.require_features(with_features),
        without_features=options.require_features(without_features),
    )
    is_trusted = in_process or is_ours(engine)
    with console.input_errors(), Isolation(event_seconds) as isolation:
        place = None if is_trusted else isolation
        if in_process:
            console.require_engine(load(wanted))
        played = programs.play(wanted, program, corpus, place, screen, brief)
        ended = [result for result in played if result.first is not None or program is not None]
        result = ended[0] if ended else _check(wanted, place, record, screen, brief)
        programs.save(save, result, isolation)
    console.write_json(json_path, check_to_json(result, played if corpus else ()))
    raise typer.Exit(result.exit_code)


def _require_sense(event_seconds: float, record: Path | None, episode: int | None) -> None:
    if record is not None and episode is None:
        console.usage("--record: needs --episode, for a trace is one run")
    if not event_seconds > 0:
        console.usage(f"--event-seconds {event_seconds:g}: must be above 0")


def _require_sentence(name: str | None, program: Path | None) -> str | None:
    if name is not None and program is not None:
        console.usage("--sentence: a program is shown as it is; leave --sentence or --program out")
    known = {check.sentence for entry in PROPERTIES for check in entry.checks} | SENTENCES.keys()
    if name is not None and name not in known:
        console.usage(f"--sentence {name}: is none; blockstep explain sentences lists them")
    return name


def _check(
    wanted: CheckOptions,
    isolation: Isolation | None,
    record: Path | None,
    screen: Console,
    brief: bool,
) -> CheckResult:
    """Check and report, in this process or in isolation; then record the run if it is wanted."""
    run_check = check if isolation is None else isolation.check
    with console.progress(screen, f"checking {wanted.engine}") as advance:
        result = run_check(wanted, lambda now: advance(*tell_progress(wanted, now)))
    programs.tell(result, screen, brief)
    if record is not None and isolation is None:
        write_episode(wanted, None, record)
    elif record is not None and isolation is not None:
        _record_isolated(isolation, wanted, record)
    return result


def _record_isolated(isolation: Isolation, wanted: CheckOptions, record: Path) -> None:
    try:
        isolation.call(write_episode, wanted, record.resolve())
    except LostError as lost:
        typer.echo(f"blockstep: --record {record}: nothing to write: {lost}", err=True)


def tell_progress(wanted: CheckOptions, now: CheckResult) -> tuple[float | None, str]:
    """How far a check is, None while it shrinks, and what it has seen."""
    done = 0.0
    if wanted.max_events:
        done = now.num_events / wanted.max_events
    elif wanted.max_seconds:
        done = now.seconds / wanted.max_seconds
    seen = f"{now.num_events:,} events, {now.num_episodes:,} episodes"
    if now.first is None:
        return min(done, 1.0), f"{seen}, nothing wrong"
    name = f"{now.first.property_id or now.first.kind} {now.first.sentence}"
    return None, f"{now.shrinking or 'found'}: {name}, in {seen}"
