"""Command: `blockstep replay`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.command import console, options
from blockstep.conformance.draw.texts import load_tokenizer
from blockstep.conformance.draw.workloads import WorkloadFormat, load
from blockstep.conformance.engine import EngineFactory, get_capabilities, get_traits
from blockstep.conformance.protocol.feature_selection import make_wish
from blockstep.conformance.protocol.features import (
    BY_NAME,
    CACHING,
    PRIORITY,
    UsageError,
    find_lacking,
    get_missing,
)
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.recorded.arrival_rate import REPLAY_PRESETS
from blockstep.conformance.recorded.replay import replay
from blockstep.conformance.recorded.replay_counts import ReplayReport
from blockstep.conformance.report.brief import brief_replay
from blockstep.conformance.report.replay import render_replay, replay_to_json
from blockstep.conformance.search.episodes import list_changes
from blockstep.conformance.search.options import ExitCode, exit_code_of
from blockstep.spec.vocabulary import Config, ConfigError, Policy, config_problems

REPLAYED: Mapping[str, Mapping[str, object]] = {
    CACHING.name: {"enable_prefix_caching": True},
    PRIORITY.name: {"policy": Policy.PRIORITY},
}
"""Features that a replay can be asked for, and their fields of a config."""
ENDINGS = {
    "exact": "conforms: engine {engine}, in lock-step with the spec",
    "renamed": "conforms: engine {engine}, in lock-step up to ids of blocks (equivalence renamed)",
    "plan": "conforms: engine {engine}, in lock-step by its plans (equivalence plan)",
    "safety": "conforms: engine {engine}, judged by properties alone (equivalence safety)",
    "none": "done: engine {engine}, alone (--spec compares it with the spec)",
}

AsFormat = Annotated[
    WorkloadFormat | None,
    typer.Option("--format", help="Of the file; without it, recognized by its first line."),
]
IdBlockSize = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of one block id, where not the format's own number."),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="The tokenizer.json of the model, for a file with texts."),
]
OutputLength = Annotated[
    int | None, typer.Option(min=1, help="Output tokens of a request, where the file has none.")
]
WithSpec = Annotated[
    bool, typer.Option("--spec/--no-spec", help="In lock-step with the spec, or alone.")
]
Caching = Annotated[bool | None, typer.Option("--caching/--no-caching", help="Prefix caching.")]
Cadence = Annotated[
    int | None,
    typer.Option(min=0, help="Events between two comparisons of whole states; 0: never."),
]


def replay_command(
    context: typer.Context,
    trace: Annotated[
        Path, typer.Argument(help="A workload in one of the formats of --format; gz or plain.")
    ],
    engine: options.Engine,
    as_format: AsFormat = None,
    id_block_size: IdBlockSize = None,
    tokenizer: TokenizerFile = None,
    output_length: OutputLength = None,
    spec: WithSpec = True,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N requests only.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=2)] = None,
    block_size: Annotated[int | None, typer.Option(min=1)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2)] = None,
    policy: Annotated[Policy | None, typer.Option()] = None,
    caching: Caching = None,
    with_features: options.With = None,
    without_features: options.Without = None,
    snapshot_every: Cadence = None,
    path: options.Folder = None,
    brief: options.Brief = False,
    json_path: options.Json = None,
) -> None:
    """Replay a real workload on an engine, in lock-step with the spec or alone.

    Example: blockstep replay mooncake_conversation.jsonl.gz --limit 300 --block-size 16
    """
    screen = console.make_screen(json_path)
    wanted: dict[str, object] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_prefix_caching": caching,
    }
    with console.input_errors():
        tokenize = None if tokenizer is None else load_tokenizer(tokenizer)
        workload = load(
            trace,
            as_format=as_format,
            limit=limit,
            id_block_size=id_block_size,
            tokenize=tokenize,
            output_length=output_length,
        )
        preset = REPLAY_PRESETS[workload.format]
        add_features(wanted, with_features, without_features)
        config = replay_config(preset.config, wanted)
        cadence = default_cadence(config, spec) if snapshot_every is None else snapshot_every
        options.look_in(path)
        make_engine = console.require_engine(load_engine(engine))
        require_config(engine, make_engine, config, wanted)
        with console.progress(screen, f"replaying {trace.name}") as advance:
            report = replay(
                workload,
                config,
                make_engine,
                with_spec=spec,
                pace=preset.pace,
                snapshot_every=cadence,
                on_progress=lambda now: advance(*describe_progress(now, len(workload))),
                follows=workload.follows,
            )
    again = console.format_command_line(context) if brief and report.finding is not None else None
    raise typer.Exit(print_report(report, engine, config, again, json_path))


def print_report(
    report: ReplayReport, engine: str, config: Config, again: str | None, json_path: Path | None
) -> ExitCode:
    """Print a report, in a few lines if `again` is the command to show with them.

    Returns the exit code.
    """
    console.write_json(json_path, replay_to_json(report))
    if again is not None:
        console.print_text(brief_replay(report, engine, again), json_path)
    else:
        screen = console.make_screen(json_path)
        render_replay(report, screen)
        show_ending(engine, config, report, screen)
    is_idle = report.finding is None and not report.requests_finished
    return ExitCode.HARNESS if is_idle else exit_code_of(report.finding)


def describe_progress(now: ReplayReport, num_requests: int) -> tuple[float, str]:
    """Return how far a replay is, and what it has done."""
    done = now.requests_finished / max(num_requests, 1)
    return done, f"{now.requests_finished:,} requests, {now.steps:,} steps"


def show_ending(engine: str, config: Config, report: ReplayReport, screen: Console) -> None:
    """Print the changes of the config for the engine, and the verdict if there is one."""
    for change in list_changes(config, report.config):
        screen.print(f"config    {change}: the engine takes no other", soft_wrap=True)
    for name, count in report.excused.items():
        screen.print(
            f"known     {name}: {count} findings that the adapter declares", soft_wrap=True
        )
    if report.finding is None and not report.requests_finished:
        screen.print(f"NO VERDICT (no request finished): engine {engine}", soft_wrap=True)
    elif report.finding is None:
        ending = ENDINGS.get(report.equivalence, ENDINGS["exact"])
        screen.print(ending.format(engine=engine), soft_wrap=True)


def require_config(
    engine: str, make_engine: EngineFactory, config: Config, wanted: Mapping[str, object]
) -> None:
    """Check that an engine can take the config as far as options asked for it.

    Raises:
        UsageError: it lacks a capability, or changes an option.
    """
    missing = get_missing(config, find_lacking(get_capabilities(make_engine)))
    if missing is not None:
        raise UsageError(f"engine {engine!r} lacks {missing}: leave --policy or --with out")
    scope = get_traits(make_engine).equivalence
    fitting = config if scope is None else scope.fit_config(config)
    for name, value in wanted.items():
        if value is not None and getattr(fitting, name) != value:
            raise UsageError(
                f"{name} {value}: engine {engine!r} is built with {getattr(fitting, name)} only; "
                "leave the option out"
            )


def add_features(
    wanted: dict[str, object], with_features: list[str] | None, without_features: list[str] | None
) -> None:
    """Add the fields of a config that the features stand for.

    Raises:
        UsageError: the feature cannot be used in a replay.
    """
    wish = make_wish(with_features or (), without_features or ())
    for name in sorted(wish.always - REPLAYED.keys()):
        raise UsageError(
            f"--with {name}: not in a replay: requests are those of the workload, and each plan "
            f"is committed before the next; possible are {', '.join(REPLAYED)}"
        )
    asked = [REPLAYED[name] for name in wish.always]
    for fields in (*asked, *(BY_NAME[name].config for name in wish.never)):
        for field, value in fields.items():
            if wanted.get(field) not in (None, value):
                raise UsageError(f"--with and --without: {field} is to be {wanted[field]}")
            wanted[field] = value


def replay_config(config: Config, wanted: Mapping[str, object]) -> Config:
    """Return `config` with the options that were given. Raises ConfigError."""
    given = {name: value for name, value in wanted.items() if value is not None}
    changed = replace(config, **given)  # type: ignore[arg-type]
    problems = config_problems(changed)
    if problems:
        raise ConfigError(problems)
    return changed


def default_cadence(config: Config, with_spec: bool = True) -> int:
    """Return the events between two snapshots in a replay: 1 for a small pool; 0 means none."""
    return max(config.num_blocks // 256, 1) if with_spec else 0
