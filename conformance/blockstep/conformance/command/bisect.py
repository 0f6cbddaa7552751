"""Command: `blockstep bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.command import console, options, programs
from blockstep.conformance.command.check import EventSecondsOption, describe_progress, is_ours
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program, write_program
from blockstep.conformance.report.bisect import bisection_to_json, render_bisection, render_step
from blockstep.conformance.search.bisect import Bisection, Step, bisect, name_finding
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.isolation import EVENT_SECONDS
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.profiles import STRICT


def bisect_command(
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help="A commit at which nothing is wrong.")
    ],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="A later one at which something is.")],
    engine: options.Engine,
    path: Annotated[
        Path,
        typer.Option(
            exists=True, file_okay=False, help="The repository of the engine. It is read."
        ),
    ],
    program: Annotated[
        Path | None,
        typer.Option(help="A program (of check --save) that fails at BAD. Else a check finds one."),
    ] = None,
    preset: Annotated[
        str, typer.Option(help=f"Scope of the check at BAD: {', '.join(PRESETS)}.")
    ] = "small",
    profile: options.Profile = STRICT.name,
    with_features: options.With = None,
    without_features: options.Without = None,
    seed: options.Seed = 0,
    budget: Annotated[
        str, typer.Option(help="How long the check at BAD may look: a number of events, or 60s.")
    ] = "50000",
    jobs: options.Jobs = 0,
    save: programs.SaveOption = None,
    event_seconds: EventSecondsOption = EVENT_SECONDS,
    json_path: options.Json = None,
) -> None:
    """Find the first commit at which an engine fails as it does at BAD.

    Git chooses commits in a clone of its own, and the same program runs at each. A commit that
    cannot be imported, or fails otherwise, is skipped. Exits 0 if the commit is found.

    Example: blockstep bisect --engine mypkg.adapter:make --path REPO v1.4 main
    """
    options.require_preset(preset)
    options.require_profile(profile)
    max_events, max_seconds = options.require_budget(budget)
    if is_ours(engine):
        console.usage(f"--engine {engine}: is one of ours; name one that is imported from --path")
    wanted = CheckOptions(
        engine=engine,
        preset=preset,
        profile=profile,
        seed=seed,
        max_events=max_events,
        max_seconds=max_seconds,
        jobs=options.count_jobs(jobs),
        path=str(path),
        program=None if program is None else str(program),
        with_features=options.require_features(with_features),
        without_features=options.require_features(without_features),
    )

    screen = console.make_screen(json_path)
    with console.input_errors():
        given = None if program is None else read_program(program)
        found = _bisect(wanted, (good, bad), given, event_seconds, screen)
    console.print_text(render_bisection(found), json_path)
    console.write_json(json_path, bisection_to_json(found))
    if save is not None:
        question = found.question
        note = f"{name_finding(question.finding)}: {question.finding.message}"
        console.write(save, write_program(question.program, note))
    raise typer.Exit(found.exit_code)


def _bisect(
    wanted: CheckOptions,
    names: tuple[str, str],
    program: Program | None,
    event_seconds: float,
    screen: Console,
) -> Bisection:
    """Bisect, and print each commit that was tried."""
    with console.progress(screen, f"bisecting {wanted.engine}") as advance:

        def show_step(step: Step) -> None:
            screen.print(render_step(step), markup=False, soft_wrap=True)
            advance(1.0, f"{step.commit.short} is tried: {step.mark}")

        def see(now: CheckResult) -> None:
            advance(*describe_progress(wanted, now))

        return bisect(wanted, names, program, event_seconds, see, show_step)
