"""The verdict of a check that found nothing wrong: what was run, and what it reached."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from blockstep.conformance.engine import ALL_CAPABILITIES, Safety, SamePlans
from blockstep.conformance.judge.witnesses import WITNESSES
from blockstep.conformance.lockstep.quirks import tell_goal
from blockstep.conformance.protocol.features import BY_NAME, LATE
from blockstep.conformance.report.colour import paint
from blockstep.conformance.report.wording import tell_settings, tell_stale
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import ExitCode, get_wish

COLUMNS = 2
WIDTH_MIN = 100
"""Of a screen that has room for so many columns; a narrower one has one."""
NAMES_SHOWN = 4
"""Pairs that were not met, at most, which are named; a program reads all of them from the JSON."""

TITLE = "situations reached (blockstep explain NAME says what one means)"


def render_verdict(result: CheckResult, console: Console) -> None:
    """Print the witness table and one line of verdict."""
    options = result.options
    if not options.is_single:
        if not console.is_terminal:
            console.width = max(console.width, WIDTH_MIN)  # a file has room for all counts
        console.print(TITLE, style="bold", soft_wrap=True)
        console.print(witness_table(result, COLUMNS if console.width >= WIDTH_MIN else 1))
    _render_lines(result, console)


def verdict_text(result: CheckResult) -> str:
    """The same without the table, as text."""
    words = StringIO()
    _render_lines(result, Console(file=words, width=WIDTH_MIN, highlight=False))
    return words.getvalue()


def _render_lines(result: CheckResult, console: Console) -> None:
    options = result.options
    if not options.is_single:
        canary = result.canary_killed_after
        console.print(
            f"canary      caught after {canary} events"
            if canary
            else "canary      ALIVE: a broken engine was not noticed, so no verdict is worth much"
        )
    for note in result.notes:
        console.print(f"note        {note}", soft_wrap=True, markup=False)
    for name, count in sorted(result.skipped.items()):
        lacks = f"not tried   {name}: the engine lacks it ({count} actions left out)"
        left_out = f"left out    {name}: {count} times"
        console.print(lacks if name in ALL_CAPABILITIES else left_out, soft_wrap=True)
    for words in result.not_asked:
        console.print(f"not asked   {words}: equivalence {result.equivalence}")
    if not result.has_snapshot and result.equivalence != SamePlans.name:
        console.print("not tried   state and properties: the engine shows no snapshots")
    for name, count in sorted(result.known.items()):
        console.print(f"known       {name}: {count} findings that {options.profile} accounts for")
    for name, summary in sorted(result.deviations.items()):
        told = f"known       {name}: {result.excused[name]} findings that the adapter declares"
        console.print(f"{told}: {summary}", soft_wrap=True)
    for name in result.stale:
        console.print(f"stale       {tell_stale(name, result.excused[name])}", soft_wrap=True)
    for name in () if options.is_single else result.missing:
        console.print(f"not reached {name}: {WITNESSES.get(name) or tell_goal(name)}")
    pairs = f"{result.num_legal_pairs:,} pairs that are legal together"
    sides = f"{result.num_quirk_sides:,} sides of the quirks of {options.profile}"
    for names, whole in ((result.apart, pairs), (result.unseen_sides, sides)):
        if names:
            words = f"not met     {len(names):,} of {whole}: {_name_some(names)}"
            console.print(words, soft_wrap=True, markup=False)
    for one in result.settings:
        told = f"setting     {one.name}: {one.knob} is {one.checked}, by default {one.default}"
        console.print(f"{told}; {one.reason}", soft_wrap=True, markup=False)
    if options.program is not None:
        verdict = (
            f"{verdict_word(result)}: engine {options.engine}, equivalence {result.equivalence}, "
            f"profile {options.profile}, program {options.program}: {result.num_events:,} events"
        )
        console.print(paint(verdict), soft_wrap=True)
        _render_settings(result, console)
        return
    rate = result.num_events / result.seconds if result.seconds else 0.0
    word = verdict_word(result)
    verdict = (
        f"{word}: engine {options.engine}, equivalence {result.equivalence}, "
        f"profile {options.profile}, preset {options.preset}, "
        f"policy {options.policy or 'both'}, seed {options.seed}: "
        f"{result.num_events:,} events in {result.num_episodes:,} episodes, "
        f"{result.seconds:.1f} s, {rate:,.0f} events/s"
    )
    console.print(paint(verdict), soft_wrap=True)
    _render_settings(result, console)


def _render_settings(result: CheckResult, console: Console) -> None:
    """Print in one line where the engine was not at its defaults, behind the verdict."""
    if result.settings:
        word = "conforms" if result.exit_code is ExitCode.CONFORMS else "run"
        console.print(tell_settings(word, result.settings), soft_wrap=True, markup=False)


def _name_some(names: Sequence[str]) -> str:
    """The first of some names, and how many there are besides."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more (see --json)" if more > 0 else "")


def verdict_word(result: CheckResult) -> str:
    """One word, or what kept the check from being one."""
    if result.exit_code is ExitCode.CONFORMS:
        return "conforms"
    if result.num_events == 0:
        return "NO VERDICT (nothing ran)"
    if result.missing:
        or_else = "".join([f", or leave out: --without {name}" for name in list_unasked(result)])
        if result.equivalence == Safety.name:
            or_else = ", or name in out_of_reach of its traits what cannot come up"
        return f"NO VERDICT (situations not reached: raise --budget or change --seed{or_else})"
    return "NO VERDICT (the canary survived)"


def list_unasked(result: CheckResult) -> list[str]:
    """Features that nobody asked for, where all that was not reached is of theirs.

    Beside a feature that was asked for an adapter may have to leave out their configs.
    """
    asked, unasked = get_wish(result.options).always, list[str]()
    for situation in result.missing if asked else ():
        found = [name for name in LATE if situation.startswith(BY_NAME[name].situations)]
        if not found or found[0] in asked:
            return []
        unasked += found
    return list(dict.fromkeys(unasked))


def witness_table(result: CheckResult, num_columns: int = COLUMNS) -> Table:
    """How often each situation was reached, in columns read from top to bottom."""
    is_floor = result.equivalence != Safety.name
    names = [name for name in WITNESSES if is_floor or result.witnesses[name]]
    height = -(-len(names) // num_columns)
    table = Table(
        box=None,
        pad_edge=False,
        show_header=False,
    )
    for _ in range(num_columns):
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=7)
    for row in range(height):
        cells: list[str] = []
        for name in names[row::height]:
            cells += [name, f"{result.witnesses.get(name, 0):,}"]
        table.add_row(*cells)
    return table
