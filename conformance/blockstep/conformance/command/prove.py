"""Command: `blockstep prove`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blockstep.conformance.command import console, options, signals, tables
from blockstep.conformance.prove.law import Law
from blockstep.conformance.prove.runner import (
    NotInstalledError,
    Proof,
    UnansweredError,
    prove_laws,
    require_crosshair,
)
from blockstep.conformance.prove.table import (
    laws_page,
    list_rows,
    list_their_rows,
    proofs_to_json,
    summarize,
)
from blockstep.conformance.search.options import ExitCode


def prove_command(
    law: Annotated[
        list[str] | None,
        typer.Option(help="A law, or the beginning of its name: slots, slots.no_slot. Repeatable."),
    ] = None,
    prove_all: Annotated[
        bool, typer.Option("--all", help="Also the laws that take longest.")
    ] = False,
    jobs: options.Jobs = 0,
    markdown: Annotated[Path | None, options.output("Also write the tables, as Markdown.")] = None,
    json_path: options.Json = None,
) -> None:
    """Prove laws of the specification for all integers, and show that each can fail.

    Needs CrossHair and z3 (pip install 'blockstep[symbolic]'). Exits 1 unless every law is
    confirmed and refutes the mistakes written for it or, if it has none, a mutant.

    Example: blockstep prove --law slots
    """
    screen = console.make_screen(json_path)
    try:
        require_crosshair()
    except NotInstalledError as error:
        console.end(ExitCode.USAGE, str(error))
    # Imported late, because it loads the host engine.
    from blockstep.conformance.prove.laws import LAWS  # noqa: PLC0415

    chosen = choose_laws(list(LAWS.values()), law or [], prove_all)
    start = time.monotonic()
    try:
        proofs = prove_laws(
            chosen,
            options.count_jobs(jobs),
            console.plain_progress("proving"),
            is_apart=signals.is_listening(),
        )
    except UnansweredError as error:
        console.end(ExitCode.HARNESS, str(error))
    seconds = time.monotonic() - start
    problems = [f"{proof.name}: {proof.problem}" for proof in proofs if proof.problem]
    code = ExitCode.FAILED if problems else ExitCode.CONFORMS
    show_proofs(screen, proofs)
    for problem in problems:
        typer.echo(f"blockstep: {problem}", err=True)
    screen.print(summarize(proofs, seconds))
    data = proofs_to_json(proofs, code, seconds)
    console.write_json(json_path, data)
    if markdown is not None:
        console.write(markdown, laws_page(data, LAWS))
    raise typer.Exit(code)


def choose_laws(laws: list[Law], prefixes: list[str], prove_all: bool) -> list[Law]:
    """Return the laws whose names begin with a prefix; without prefixes all, or all but slow
    ones.
    """
    for prefix in prefixes:
        if not prefix or not any(law.name.startswith(prefix) for law in laws):
            rooms = ", ".join(dict.fromkeys(law.room for law in laws))
            console.usage(f"--law {prefix!r}: no law begins with this; the themes are {rooms}")
    if prefixes:
        return [law for law in laws if law.name.startswith(tuple(prefixes))]
    return [law for law in laws if prove_all or not law.is_slow]


def show_proofs(screen: Console, proofs: list[Proof]) -> None:
    """Print both tables."""
    tables.show_rows(screen, list_rows(proofs))
    if theirs := list_their_rows(proofs):
        screen.print()
        tables.show_rows(screen, theirs)
