"""Command: `blockstep prove`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from blockstep.conformance.check import ExitCode
from blockstep.conformance.prove.law import Law
from blockstep.conformance.prove.runner import (
    NotInstalledError,
    Proof,
    UnansweredError,
    prove_laws,
    require_crosshair,
)
from blockstep.conformance.prove.table import (
    build_table,
    build_theirs_table,
    laws_page,
    list_theirs,
    proofs_to_json,
    summarize,
)

SECONDS_BETWEEN_LINES = 10.0


def prove_command(
    law: Annotated[
        list[str] | None,
        typer.Option(help="A law, or the beginning of its name: slots, slots.no_slot. Repeatable."),
    ] = None,
    prove_all: Annotated[
        bool, typer.Option("--all", help="Also the laws that take longest.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes side by side; 0: one per core.")] = 0,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the table as a page of the documentation.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the result to this file ('-': stdout)."),
    ] = None,
) -> None:
    """Prove laws of the specification for all integers, and refute the mistakes beside them.

    Needs CrossHair and z3 (pip install 'blockstep[symbolic]'). Exits 1 unless every law is
    confirmed and every mistake refuted.

    Example: blockstep prove --law slots
    """
    console = Console(highlight=False, stderr=json_path == Path("-"))
    try:
        require_crosshair()
    except NotInstalledError as error:
        _end(ExitCode.USAGE, str(error))
    # Late, because it loads the engine on the host.
    from blockstep.conformance.prove.laws import LAWS  # noqa: PLC0415

    chosen = choose_laws(list(LAWS.values()), law or [], prove_all)
    start = time.monotonic()
    try:
        proofs = prove_laws(chosen, jobs or os.cpu_count() or 1, _plain_progress())
    except UnansweredError as error:
        _end(ExitCode.HARNESS, str(error))
    seconds = time.monotonic() - start
    problems = [f"{proof.name}: {proof.problem}" for proof in proofs if proof.problem]
    code = ExitCode.FAILED if problems else ExitCode.CONFORMS
    show_proofs(console, proofs, seconds)
    if json_path is not None:
        text = json.dumps(proofs_to_json(proofs, code, seconds), indent=2) + "\n"
        _write(json_path, text)
    if markdown is not None:
        command = " ".join(
            ("blockstep prove", *(["--all"] * prove_all), *(f"--law {name}" for name in law or []))
        )
        _write(markdown, laws_page(proofs, LAWS, command))
    for problem in problems:
        typer.echo(f"blockstep: {problem}", err=True)
    raise typer.Exit(code)


def choose_laws(laws: list[Law], prefixes: list[str], prove_all: bool) -> list[Law]:
    """Those whose names begin so; without any name all, or all that do not take long."""
    for prefix in prefixes:
        if not any(law.name.startswith(prefix) for law in laws):
            rooms = ", ".join(dict.fromkeys(law.room for law in laws))
            _end(ExitCode.USAGE, f"--law {prefix!r}: no law begins so; the rooms are {rooms}")
    if prefixes:
        return [law for law in laws if law.name.startswith(tuple(prefixes))]
    return [law for law in laws if prove_all or not law.is_slow]


def show_proofs(console: Console, proofs: list[Proof], seconds: float) -> None:
    """Both tables and the line under them."""
    console.print(build_table(proofs))
    if list_theirs(proofs):
        console.print()
        console.print(build_theirs_table(proofs))
    console.print(summarize(proofs, seconds))


def _plain_progress() -> Callable[[float, str], None]:
    """Lines on standard error, at most one in `SECONDS_BETWEEN_LINES`."""
    last = time.monotonic()

    def advance(done: float, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            typer.echo(f"proving: {done:.0%}, {text}", err=True)

    return advance


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _end(ExitCode.USAGE, f"{path}: cannot write: {error.strerror}")


def _end(code: ExitCode, message: str) -> NoReturn:
    typer.echo(f"blockstep: {message}", err=True)
    raise typer.Exit(code)
