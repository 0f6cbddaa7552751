"""Options of `blockstep check` that play programs from files, or write one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from blockstep.conformance.command import console, options, sections
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program, write_program
from blockstep.conformance.report.as_test import write_test
from blockstep.conformance.report.brief import brief_check
from blockstep.conformance.report.colour import show
from blockstep.conformance.report.failure import render_first_failure
from blockstep.conformance.report.headlines import make_headline
from blockstep.conformance.report.itf import make_itf
from blockstep.conformance.report.verdict import render_verdict
from blockstep.conformance.report.view import make_page
from blockstep.conformance.search.call import Call
from blockstep.conformance.search.check import CheckResult, play_program
from blockstep.conformance.search.film import Picture, make_film
from blockstep.conformance.search.isolation import Isolation, LostError, RefusedError
from blockstep.conformance.search.known import find_programs
from blockstep.conformance.search.options import CheckOptions, find_profile, load
from blockstep.conformance.search.standalone import make_script, verify
from blockstep.conformance.search.suppressions import KnownCause
from blockstep.spec.vocabulary import ConfigError

ProgramOption = Annotated[
    Path | None, sections.programs("Play this program (of --save) only; nothing is drawn.")
]
CorpusOption = Annotated[
    Path | None, sections.programs("A folder of programs, all played before any is drawn.")
]
KnownOption = Annotated[
    Path | None,
    sections.programs(
        "A program (of --save) or a folder of programs: failures like theirs are suppressed.",
        exists=True,
    ),
]
SaveOption = Annotated[
    Path | None,
    options.output(
        "Write the failing program to this file ('-': stdout): as JSON, or as a pytest test if it "
        "ends in .py.",
        panel=sections.PROGRAMS,
    ),
]

StandaloneOption = Annotated[
    bool,
    sections.programs(
        "With --save: write a script of the engine alone, without Blockstep, for an issue.",
        "--standalone",
    ),
]


def require_one(program: Path | None, corpus: Path | None, episode: int | None) -> None:
    """Check that at most one option chooses the programs to play."""
    names = {"--program": program, "--corpus": corpus, "--episode": episode}
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        console.usage(f"{' and '.join(given)}: each chooses what is played; give only one")


def play(
    options: CheckOptions,
    program: Path | None,
    corpus: Path | None,
    isolation: Isolation | None,
    screen: Console,
    brief: bool = False,
    known: Collection[str] = (),
) -> list[CheckResult]:
    """Play the programs of the options and print the results. Raises as `play_file`."""
    if program is not None:
        result = play_file(options, program, isolation)
        print_result(result, screen, brief)
        return [result]
    return [] if corpus is None else play_corpus(options, corpus, isolation, screen, brief, known)


def print_result(
    result: CheckResult, screen: Console, brief: bool = False, shows_coverage: bool = False
) -> None:
    """Print the result of a check."""
    if result.first is None:
        render_verdict(result, screen, shows_coverage)
    else:
        show(screen, brief_check(result) if brief else render_first_failure(result))


def play_file(options: CheckOptions, path: Path, isolation: Isolation | None) -> CheckResult:
    """Return the result of the program in a file; without `isolation` it runs in this process.

    Raises:
        TraceError: the file is not a program.
        ConfigError, RefusedError: the engine cannot be built with its config.
        EngineNotFoundError, HarnessError: as in every check.
    """
    program, options = read_program(path), replace(options, program=str(path))
    if isolation is None:
        return play_program(options, program, load(options))
    return isolation.run(options, program)


def play_corpus(
    options: CheckOptions,
    folder: Path,
    isolation: Isolation | None,
    screen: Console,
    brief: bool = False,
    known: Collection[str] = (),
) -> list[CheckResult]:
    """Play the programs of a folder and print each result, in a line or in full.

    The files in `known` are left out.

    Raises:
        TraceError: a file is not a program, or the folder is empty.
        EngineNotFoundError, HarnessError: as in every check.
    """
    results = []
    left_out = {Path(name).resolve() for name in known}
    for path in find_programs(folder):
        if path.resolve() in left_out:
            continue
        try:
            result = play_file(options, path, isolation)
        except (ConfigError, RefusedError) as error:
            result = CheckResult(replace(options, program=str(path)))
            result.skipped[str(error)] = 1
        results.append(result)
        if result.first is not None:
            print_result(result, screen, brief)
    failed = sum(result.first is not None for result in results)
    idle = [result for result in results if result.first is None and not result.num_events]
    for result in idle:
        reasons = "; ".join(result.skipped)
        screen.print(f"not tried   {result.options.program}: {reasons}", soft_wrap=True)
    summary = f"corpus      {folder}: {failed} of {len(results)} programs failed"
    screen.print(f"{summary}, {len(idle)} not tried", soft_wrap=True)
    return results


ViewOption = Annotated[
    Path | None,
    options.output(
        "Write the finding as a page of HTML: the holders of each block after each action.",
        panel=sections.OUTPUT,
    ),
]


ItfOption = Annotated[
    Path | None,
    options.output(
        "With --program: write the specification's states in its run as an ITF trace, for tools of "
        "TLA+ and Quint.",
        panel=sections.OUTPUT,
    ),
]


class Outputs(NamedTuple):
    """Files to be written about a result."""

    save: Path | None
    standalone: bool
    view: Path | None
    itf: Path | None


def write_outputs(
    outputs: Outputs, result: CheckResult, isolation: Isolation, call: Call, program: Path | None
) -> None:
    """Write the requested files about a result; `program` is the file of its program, if any."""
    save(outputs.save, result, isolation, call if outputs.standalone else None)
    view(outputs.view, result, call, isolation)
    if outputs.itf is not None and program is not None:
        profile = find_profile(result.options.profile)
        console.write(outputs.itf, make_itf(read_program(program), profile))


def view(path: Path | None, result: CheckResult, call: Call, isolation: Isolation) -> None:
    """Write the finding as a page, if requested and if there is one."""
    if path is None:
        return
    program = isolation.recover(result)
    if result.first is None:
        typer.echo(f"blockstep: --view {path}: nothing to write: nothing failed", err=True)
        return
    film: list[Picture] = []
    if program is not None and result.loss is None:
        with contextlib.suppress(LostError):
            film = call(make_film, replace(result.options, sentence=None), program)
    console.write(path, make_page(render_first_failure(result), film))


def require_outputs(
    path: Path | None, standalone: bool, itf: Path | None, program: Path | None
) -> None:
    """Check that a standalone script has a file to go to, and that a trace is of a program."""
    if standalone and (path is None or path.suffix != ".py"):
        console.usage("--standalone: needs --save FILE.py, the file of the script")
    if itf is not None and program is None:
        console.usage("--itf: needs --program, the run to write")


def save(
    path: Path | None, result: CheckResult, isolation: Isolation, script_by: Call | None = None
) -> None:
    """Write the program that failed, if requested and if there is one: as a script of the engine
    alone if `script_by` is given, which calls the engine."""
    if path is None:
        return
    first, program = result.first, isolation.recover(result)
    if first is None or program is None:
        why = "nothing failed" if first is None else "the engine failed before any event"
        typer.echo(f"blockstep: --save {path}: nothing to write: {why}", err=True)
        return
    if result.failure is not None and result.failure.findings:
        first = result.failure.findings[0]  # the finding of the shrunk program, which is written
    if script_by is not None:
        save_script(path, script_by, result.options, program, first)
        return
    note = " ".join(filter(None, (first.property_id, f"{first.sentence}:", first.message)))
    write = write_test if path.suffix == ".py" else write_program
    try:
        console.write(path, write(program, note))
    except ValueError as error:
        console.usage(f"--save {path}: {error}")


def save_script(
    path: Path,
    call: Call,
    options: CheckOptions,
    program: Program,
    first: Finding,
    forgiven: frozenset[KnownCause] | None = None,
) -> None:
    """Write a program as a script of the engine alone, once it has shown the finding without us."""
    try:
        script = call(make_script, options, program, make_headline(first), forgiven)
    except LostError as lost:
        script = lost.loss.message
    why = script if isinstance(script, str) else verify(script, options.path)
    if isinstance(script, str) or why:
        typer.echo(f"blockstep: {path}: no script: {why}", err=True)
        return
    console.write(path, script.source)
