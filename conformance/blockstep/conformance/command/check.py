"""Command: `blockstep check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.command import console, options, programs, sections
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.judge.checks import PROPERTIES
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.registry import MUSEUM
from blockstep.conformance.recorded.episodes import write_episode
from blockstep.conformance.report.brief import brief_found
from blockstep.conformance.report.check_texts import SENTENCES
from blockstep.conformance.report.colour import show
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.search.call import Call, call_here
from blockstep.conformance.search.check import CheckResult, check, show_unshrunk
from blockstep.conformance.search.isolation import (
    BUILD_SECONDS,
    EVENT_SECONDS,
    Isolation,
    LostError,
)
from blockstep.conformance.search.known import KnownFindings, read_known
from blockstep.conformance.search.options import CheckOptions, load
from blockstep.spec.profiles import STRICT
from blockstep.spec.vocabulary import Policy

TRUSTED = frozenset({"host", "device", "device-interpreted", "host-kernels", "spec"})
"""Engines that are checked in this process, like seeded bugs: our own code does not hang or crash.
"""


def is_ours(engine: str) -> bool:
    """Whether an engine of this name may run in this process."""
    return engine in TRUSTED or engine.startswith(MUSEUM)


PolicyOption = Annotated[Policy | None, sections.runs("Fix the policy; both are drawn otherwise.")]
HideStateOption = Annotated[
    bool,
    sections.engine(
        "Judge plans and answers alone: the engine is not asked for its state.", "--hide-state"
    ),
]
SentenceOption = Annotated[
    str | None, sections.runs("If several checks fail at once, show a program for this one.")
]
InProcessOption = Annotated[
    bool,
    sections.engine(
        "Run the engine in this process, one job at a time: for a debugger. It is run in "
        "processes of its own otherwise, unless it is one of ours.",
        "--in-process",
    ),
]
EventSecondsOption = Annotated[
    float,
    sections.engine(
        "Seconds for one event, beyond which an engine hangs; importing and "
        f"building it may take {BUILD_SECONDS:g}."
    ),
]

PresetOption = Annotated[str, sections.runs(f"Scope of the runs: {', '.join(PRESETS)}.")]
BudgetOption = Annotated[
    str, sections.runs("How long: a number of events (repeatable), or 60s, 5m.")
]
EpisodeOption = Annotated[
    int | None, sections.runs("Run this one episode only (to reproduce a failure).", min=0)
]
RecordOption = Annotated[
    Path | None,
    options.output("With --episode: write the run as a trace.", panel=sections.PROGRAMS),
]
CoverageOption = Annotated[
    bool, sections.output("Show how often each coverage goal was reached.", "--coverage")
]


def check_command(
    context: typer.Context,
    engine: options.Engine,
    preset: PresetOption = "small",
    policy: PolicyOption = None,
    profile: options.Profile = STRICT.name,
    depth: options.Depth = MAX_DEPTH,
    with_features: options.With = None,
    without_features: options.Without = None,
    path: options.Folder = None,
    seed: options.Seed = 0,
    budget: BudgetOption = "150000",
    episode: EpisodeOption = None,
    jobs: options.Jobs = 0,
    record: RecordOption = None,
    program: programs.ProgramOption = None,
    corpus: programs.CorpusOption = None,
    known: programs.KnownOption = None,
    save: programs.SaveOption = None,
    standalone: programs.StandaloneOption = False,
    view: programs.ViewOption = None,
    itf: programs.ItfOption = None,
    event_seconds: EventSecondsOption = EVENT_SECONDS,
    hide_state: HideStateOption = False,
    sentence: SentenceOption = None,
    in_process: InProcessOption = False,
    brief: options.Brief = False,
    coverage: CoverageOption = False,
    json_path: options.Json = None,
) -> None:
    """Drive an engine and the spec through random programs and compare after every event.

    Example: blockstep check --engine mypkg.adapter:make --preset small --budget 200000
    """
    screen = console.make_screen(json_path)
    if program is not None or episode is not None:  # not meant by the settings of pyproject.toml
        corpus = corpus if options.is_given(context, "corpus") else None
        known = known if options.is_given(context, "known") else None
    profile = options.choose_profile(context, profile, episode)
    files = programs.Outputs(save, standalone, view, itf)
    _require_sense(event_seconds, record, episode, program, corpus, preset, profile, files)
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
    with console.input_errors(), Isolation(event_seconds) as isolation:
        place = None if in_process or is_ours(engine) else isolation
        _ = console.require_engine(load(wanted)) if in_process else None
        passed_over = read_known(known) if known else {}
        played = programs.play(wanted, program, corpus, place, screen, brief, passed_over)
        result = next((it for it in played if it.first is not None or program is not None), None)
        on = partial(_print_early, isolation, screen, brief, json_path, save)
        result = result or _check(wanted, place, record, screen, passed_over, brief, coverage, on)
        programs.write_outputs(files, result, isolation, _get_call(wanted, place), program)
    console.write_json(json_path, check_to_json(result, played if corpus else ()))
    raise typer.Exit(result.exit_code)


def _require_names(preset: str, profile: str) -> None:
    """Check that there are a preset and a profile of these names."""
    options.require_preset(preset)
    options.require_profile(profile)


def _get_call(wanted: CheckOptions, isolation: Isolation | None) -> Call:
    """Return a function that calls work with the engine, in this process or in isolation."""
    return call_here(load(wanted)) if isolation is None else isolation.call


def _require_sense(
    event_seconds: float,
    record: Path | None,
    episode: int | None,
    program: Path | None,
    corpus: Path | None,
    preset: str,
    profile: str,
    files: programs.Outputs,
) -> None:
    _require_names(preset, profile)
    programs.require_outputs(files.save, files.standalone, files.itf, program)
    programs.require_one(program, corpus, episode)
    if record is not None and episode is None:
        console.usage("--record: needs --episode, for a trace is one run")
    if not event_seconds > 0:
        console.usage(f"--event-seconds {event_seconds:g}: must be above 0")


def _require_sentence(name: str | None, program: Path | None) -> str | None:
    if name is not None and program is not None:
        console.usage("--sentence: a program is shown as it is; leave --sentence or --program out")
    known = {check.sentence for entry in PROPERTIES for check in entry.checks} | SENTENCES.keys()
    if name is not None and name not in known:
        console.usage(f"--sentence {name}: is no check; blockstep explain sentences lists them")
    return name


def _check(
    wanted: CheckOptions,
    isolation: Isolation | None,
    record: Path | None,
    screen: Console,
    programs_known: Mapping[str, Program],
    brief: bool,
    shows_coverage: bool,
    on_interrupted: Callable[[CheckResult], None],
) -> CheckResult:
    """Check and report, in this process or in isolation; then record the run if requested.

    If a signal or an error ends the check while it shrinks, `on_interrupted` is given the result so
    far.
    """
    last: CheckResult | None = None
    with console.progress(screen, f"checking {wanted.engine}") as advance:
        is_shown = brief  # a brief finding takes five lines, and no more

        def on_progress(now: CheckResult) -> None:
            nonlocal is_shown, last
            last = now
            if now.first is not None and now.loss is None and not is_shown:
                is_shown = True  # shrinking may take a while
                show(console.get_errors(screen), brief_found(now))
            advance(*describe_progress(wanted, now))

        known = (
            KnownFindings(wanted, _get_call(wanted, isolation), programs_known)
            if programs_known
            else None
        )
        try:
            if isolation is None:
                result = check(wanted, on_progress, known=known)
            else:
                result = isolation.check(wanted, on_progress, known)
        except BaseException:
            if last is not None and last.failing_program is not None:
                on_interrupted(last)
            raise
    programs.print_result(result, screen, brief, shows_coverage)
    if record is not None and isolation is None:
        write_episode(wanted, None, record)
    elif record is not None and isolation is not None:
        _record_isolated(isolation, wanted, record)
    return result


def _print_early(
    isolation: Isolation,
    screen: Console,
    brief: bool,
    json_path: Path | None,
    path: Path | None,
    result: CheckResult,
) -> None:
    """Print and save the failure as far as it was shrunk. No script is written, for which the
    engine would be called."""
    note = "it was interrupted before the program was as short as it gets"
    result = replace(show_unshrunk(result), notes=(*result.notes, note))
    programs.print_result(result, screen, brief)
    console.write_json(json_path, check_to_json(result))
    programs.save(path, result, isolation)


def _record_isolated(isolation: Isolation, wanted: CheckOptions, record: Path) -> None:
    try:
        isolation.call(write_episode, wanted, record.resolve())
    except LostError as lost:
        typer.echo(f"blockstep: --record {record}: nothing to write: {lost}", err=True)


def describe_progress(wanted: CheckOptions, now: CheckResult) -> tuple[float | None, str]:
    """Return how far a check is (None while it shrinks), and what it has seen."""
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
