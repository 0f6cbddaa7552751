"""Command: `blockstep score`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from blockstep.conformance.command import console, options
from blockstep.conformance.command.check import (
    EventSecondsOption,
    PolicyOption,
    is_ours,
)
from blockstep.conformance.draw.presets import MAX_DEPTH, PRESETS
from blockstep.conformance.protocol.program_file import write_program
from blockstep.conformance.report.score import make_score_page, render_score, score_to_json
from blockstep.conformance.search.isolation import EVENT_SECONDS, Isolation
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.score import ScoreResult, score
from blockstep.spec.profiles import RELEASES, STRICT

COMPARED = (STRICT.name, *(profile.name for profile in RELEASES))
"""Profiles among which the nearest one is named."""

PresetOption = Annotated[str, typer.Option(help=f"Scope of the runs: {', '.join(PRESETS)}.")]
ProfileOption = Annotated[
    str, typer.Option(help="Release that the engine is measured against (blockstep quirks).")
]
BudgetOption = Annotated[
    str, typer.Option(help="How long: a number of events (repeatable), or 60s, 5m.")
]
EpisodeOption = Annotated[
    int | None, typer.Option(min=0, help="Score this one episode only (to reproduce).")
]
LeastOption = Annotated[
    float, typer.Option(min=0, max=100, help="Exit 1 if less than N per cent agree.")
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        help="A folder for the first difference of each kind, as programs (check --program).",
        callback=options.check_output_folder,
    ),
]
NearestOption = Annotated[
    bool,
    typer.Option("--nearest", help="Name the release whose steps the engine's agree with most."),
]
HtmlOption = Annotated[
    Path | None, options.output("Write the report as a page of HTML; names the nearest release.")
]


def score_command(
    engine: options.Engine,
    preset: PresetOption = "small",
    policy: PolicyOption = None,
    profile: ProfileOption = STRICT.name,
    depth: options.Depth = MAX_DEPTH,
    with_features: options.With = None,
    without_features: options.Without = None,
    path: options.Folder = None,
    seed: options.Seed = 0,
    budget: BudgetOption = "20000",
    episode: EpisodeOption = None,
    least: LeastOption = 0.0,
    save: SaveOption = None,
    nearest: NearestOption = False,
    html: HtmlOption = None,
    event_seconds: EventSecondsOption = EVENT_SECONDS,
    json_path: options.Json = None,
) -> None:
    """Count how far an engine does the same as the spec, past every difference.

    Both play the same programs, each on its own; steps, admissions, prefix hits, preemptions and
    endings that agree are counted, and the first difference of each kind is shrunk.

    Example: blockstep score --engine mypkg.simulator:make --profile vllm-0.19.1
    """
    screen = console.make_screen(json_path)
    options.require_preset(preset)
    options.require_profile(profile)
    if not event_seconds > 0:
        console.usage(f"--event-seconds {event_seconds:g}: must be above 0")
    max_events, max_seconds = options.require_budget(budget)
    wanted = CheckOptions(
        engine=engine,
        preset=preset,
        policy=policy,
        seed=seed,
        max_events=max_events,
        max_seconds=max_seconds,
        episode=episode,
        max_depth=depth,
        profile=profile,
        path=None if path is None else str(path.resolve()),
        with_features=options.require_features(with_features),
        without_features=options.require_features(without_features),
    )
    with console.input_errors(), Isolation(event_seconds) as isolation:
        call = None if is_ours(engine) else isolation.call
        with console.progress(screen, f"scoring {engine}") as advance:
            profiles = COMPARED if nearest or html is not None else ()
            result = score(wanted, call, lambda now: advance(*_progress(wanted, now)), profiles)
    console.print_text(render_score(result, least / 100), json_path)
    _save(save, result)
    if html is not None:
        console.write(html, make_score_page(result))
    console.write_json(json_path, score_to_json(result, least / 100))
    raise typer.Exit(result.exit_code(least / 100))


def _save(folder: Path | None, result: ScoreResult) -> None:
    counts: Counter[str] = Counter()
    for first in result.list_firsts():
        if folder is not None and first.shrunk is not None:
            found = first.shrunk.findings[0].differences[0]
            note = f"{first.kind.aspect}: {found.field}: spec {found.expected}, engine {found.seen}"
            counts[first.kind.aspect] += 1
            number = f"-{counts[first.kind.aspect]}" * (counts[first.kind.aspect] > 1)
            file = folder / f"{first.kind.aspect}{number}.json"
            console.write(file, write_program(first.shrunk.program, note))


def _progress(wanted: CheckOptions, now: ScoreResult) -> tuple[float, str]:
    if now.shrinking is not None:
        return 1.0, f"shrinking the first difference: {now.shrinking}"
    done = 1.0
    if wanted.max_events:
        done = now.num_events / wanted.max_events
    elif wanted.max_seconds:
        done = now.seconds / wanted.max_seconds
    return min(done, 1.0), f"{now.num_events:,} events, {now.num_episodes:,} episodes"
