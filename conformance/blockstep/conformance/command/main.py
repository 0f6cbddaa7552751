"""The command line. Each command ends with a documented exit code (see `ExitCode`)."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from blockstep.conformance.command import sections, signals
from blockstep.conformance.command.annotate import annotate_command
from blockstep.conformance.command.bench import bench_app
from blockstep.conformance.command.bisect import bisect_command
from blockstep.conformance.command.campaign import campaign_app
from blockstep.conformance.command.check import check_command
from blockstep.conformance.command.engines import engines_command
from blockstep.conformance.command.events import events_command
from blockstep.conformance.command.explain import explain_command
from blockstep.conformance.command.explore import explore_command
from blockstep.conformance.command.generate import generate_command
from blockstep.conformance.command.hunt import hunt_command
from blockstep.conformance.command.metamorphic import arms_command
from blockstep.conformance.command.museum import museum_app
from blockstep.conformance.command.new_adapter import new_adapter_command
from blockstep.conformance.command.properties import properties_command
from blockstep.conformance.command.prove import prove_command
from blockstep.conformance.command.quirks import quirks_command
from blockstep.conformance.command.replay import replay_command
from blockstep.conformance.command.schema import schema_command
from blockstep.conformance.command.score import score_command
from blockstep.conformance.command.validate import validate_command
from blockstep.conformance.command.vectors import vectors_app


def print_version(is_wanted: bool) -> None:
    """Print the version: the callback of `--version`."""
    if is_wanted:
        try:
            number = metadata.version("blockstep")
        except metadata.PackageNotFoundError:
            number = "of a checkout that is not installed"
        typer.echo(f"blockstep {number} (Python {platform.python_version()})")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=print_version, help="Show the version.")
]

GROUPS: Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]] = {
    "Hold an engine": {
        "check": check_command,
        "hunt": hunt_command,
        "new-adapter": new_adapter_command,
        "engines": engines_command,
        "schema": schema_command,
        "arms": arms_command,
        "score": score_command,
        "replay": replay_command,
        "campaign": campaign_app,
    },
    "Understand a finding": {
        "explain": explain_command,
        "properties": properties_command,
        "quirks": quirks_command,
    },
    "In CI": {
        "annotate": annotate_command,
        "bisect": bisect_command,
        "validate": validate_command,
        "events": events_command,
        "vectors": vectors_app,
    },
    "Models and worlds": {"explore": explore_command, "prove": prove_command, "museum": museum_app},
    "Our own engines": {"generate": generate_command, "bench": bench_app},
}
"""Every command, in the groups and the order of `blockstep --help`."""

app = typer.Typer(
    name="blockstep",
    cls=sections.Group,
    help="Hold an LLM-inference scheduler to its executable specification, step by step.",
    epilog="Exit codes: 0 conforms, 1 divergence or violated property, 2 usage or input error, "
    "3 the spec failed an assertion, 4 liveness, 5 harness (nothing ran, witness missing, "
    "canary alive), 130 ended by Ctrl-C, 141 output closed, 143 terminated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for group, commands in GROUPS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, cls=sections.Group, rich_help_panel=group)
        else:
            app.command(name, cls=sections.Command, rich_help_panel=group)(command)


@app.callback()
def _take_options(version: Version = False) -> None:
    """Hold an LLM-inference scheduler to its executable specification, step by step."""


def main() -> NoReturn:
    """Entry point of the console script."""
    gc.freeze()  # what was imported stays: a run need not be searched for garbage through it
    sys.path.insert(0, str(Path.cwd()))  # so that `--engine mymodule:make` finds a local file
    signals.run(app)
