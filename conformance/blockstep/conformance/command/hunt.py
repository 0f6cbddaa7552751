"""Command: `blockstep hunt`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.command import console, options, sections
from blockstep.conformance.command.check import (
    EventSecondsOption,
    HideStateOption,
    InProcessOption,
    PolicyOption,
    is_ours,
)
from blockstep.conformance.command.programs import KnownOption, StandaloneOption, save_script
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.conformance.report.brief import brief_hunt, brief_hunted
from blockstep.conformance.report.colour import show
from blockstep.conformance.report.failure import show_options
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt, render_hunt_page
from blockstep.conformance.search.call import Call, call_here
from blockstep.conformance.search.defects import Defect, HuntResult, name_of
from blockstep.conformance.search.hunt import SCOPES, hunt
from blockstep.conformance.search.isolation import EVENT_SECONDS, Isolation
from blockstep.conformance.search.known import read_known
from blockstep.conformance.search.options import CheckOptions, load
from blockstep.conformance.search.suppressions import KnownCause, read_cause
from blockstep.spec.profiles import STRICT

PresetOption = Annotated[
    str | None, sections.runs(f"One scope of the runs only, of {', '.join(PRESETS)}; else two.")
]
ForgiveOption = Annotated[
    list[str] | None,
    sections.programs("Suppress a known defect from the start; repeatable (of reproduce)."),
]
SaveOption = Annotated[
    Path | None,
    sections.programs(
        "A folder for the programs that were found, for check --corpus.",
        callback=options.check_output_folder,
    ),
]

ProfileOption = Annotated[
    str, sections.engine("Release whose known quirks are not reported; strict: report all.")
]
BudgetOption = Annotated[int, sections.runs("Events in each scope.", min=1)]
EpisodeOption = Annotated[
    int | None, sections.runs("Play this one episode only (to reproduce a defect).", min=0)
]
MarkdownOption = Annotated[
    Path | None, options.output("Also write a page of the documentation.", panel=sections.OUTPUT)
]


def hunt_command(
    context: typer.Context,
    engine: options.Engine,
    preset: PresetOption = None,
    policy: PolicyOption = None,
    profile: ProfileOption = STRICT.name,
    depth: options.Depth = MAX_DEPTH,
    with_features: options.With = None,
    without_features: options.Without = None,
    path: options.Folder = None,
    seed: options.Seed = 0,
    budget: BudgetOption = 100_000,
    episode: EpisodeOption = None,
    jobs: options.Jobs = 0,
    forgive: ForgiveOption = None,
    known: KnownOption = None,
    save: SaveOption = None,
    standalone: StandaloneOption = False,
    markdown: MarkdownOption = None,
    event_seconds: EventSecondsOption = EVENT_SECONDS,
    hide_state: HideStateOption = False,
    in_process: InProcessOption = False,
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Find every distinct defect of an engine, each with a short program, and name the known ones.

    After a finding the hunt suppresses its defect, plays the same episode again and continues.
    Exits 1 if anything was found that is not --known, 2 if a known program passes.

    Example: blockstep hunt --engine nano_vllm --path nano-vllm
    """
    profile = options.choose_profile(context, profile, episode)
    options.require_preset(preset or SCOPES[-1])
    options.require_profile(profile)
    known = known if episode is None or options.is_given(context, "known") else None
    if standalone and save is None:
        console.usage("--standalone: needs --save FOLDER, for the scripts")
    if not event_seconds > 0:
        console.usage(f"--event-seconds {event_seconds:g}: must be above 0")
    wanted = CheckOptions(
        engine=engine,
        preset=preset or SCOPES[-1],
        policy=policy,
        seed=seed,
        max_events=budget,
        episode=episode,
        jobs=1 if in_process else options.count_jobs(jobs),
        max_depth=depth,
        profile=profile,
        path=None if path is None else str(path.resolve()),
        hide_state=hide_state,
        with_features=options.require_features(with_features),
        without_features=options.require_features(without_features),
    )
    is_here = in_process or (is_ours(engine) and wanted.jobs == 1)
    scopes = SCOPES if preset is None else (preset,)
    screen = console.make_screen(json_path)
    with console.input_errors():
        forgiven = frozenset(map(read_cause, forgive or ()))
        with Isolation(event_seconds) as place:
            programs = {} if known is None else read_known(known)
            print_result = partial(_print_result, wanted, brief, json_path, markdown)
            on = _make_printer(screen, brief), partial(_print_early, print_result, save)
            result = _hunt(wanted, place, is_here, screen, scopes, forgiven, programs, *on)
            print_result(result)  # first, because a file may not be writable
            call = call_here(load(wanted)) if standalone and is_here else place.call
            _save(save, result, call if standalone else None)
    raise typer.Exit(result.exit_code)


def _make_printer(screen: Console, brief: bool) -> Callable[[Defect], None]:
    """Return a callback that shows a failure when it is found, or nothing with `brief`."""
    errors = console.get_errors(screen)
    return lambda defect: None if brief else show(errors, brief_hunted(defect))


def _hunt(
    wanted: CheckOptions,
    place: Isolation,
    is_here: bool,
    screen: Console,
    scopes: Sequence[str],
    forgiven: frozenset[KnownCause],
    programs: Mapping[str, Program],
    on_found: Callable[[Defect], None],
    on_interrupted: Callable[[HuntResult], None],
) -> HuntResult:
    """Hunt in this process, or in `jobs` others."""
    call = call_here(console.require_engine(load(wanted))) if is_here else place.call
    with (
        console.progress(screen, f"hunting in {wanted.engine}") as advance,
        place.open_pool(wanted.jobs) as pool,
    ):
        pool_used = pool if wanted.jobs > 1 else None
        callbacks = on_found, on_interrupted
        return hunt(wanted, call, advance, scopes, forgiven, pool_used, programs, *callbacks)


def _print_result(
    wanted: CheckOptions, brief: bool, json_path: Path | None, page: Path | None, result: HuntResult
) -> None:
    """Print the report, and write it as JSON and as a page of Markdown, if requested."""
    console.print_text(brief_hunt(result) if brief else render_hunt(result), json_path)
    console.write_json(json_path, hunt_to_json(result))
    if page is not None:
        given = f"{show_options(wanted)} --seed {wanted.seed} --budget {wanted.max_events}"
        command = f"blockstep hunt --engine {shlex.quote(result.options.engine)}{given}"
        console.write(page, render_hunt_page(result, command))


def _print_early(
    print_result: Callable[[HuntResult], None], save: Path | None, result: HuntResult
) -> None:
    """Print and save what an interrupted hunt has found. It writes no scripts, which call the
    engine."""
    print_result(result)
    _save(save, result, None)


def _save(folder: Path | None, result: HuntResult, script_by: Call | None) -> None:
    """Write the program of each defect that has one, if requested, and a script of the engine alone
    if `script_by` is given, which calls the engine."""
    if folder is None:
        return
    for number, defect in enumerate(result.defects, 1):
        if defect.shrunk is not None:
            note = f"{name_of(defect.first)}: {defect.first.message}"
            file = folder / f"defect-{number}.json"
            program = defect.shrunk.program
            console.write(file, write_program(program, note))
            if script_by is not None:
                options, first = defect.options, defect.first
                script = file.with_suffix(".py")
                save_script(script, script_by, options, program, first, defect.forgiven)
