"""The verdict of a check that found nothing wrong: what was run, and what it reached."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from blockstep.conformance.engine import ALL_CAPABILITIES
from blockstep.conformance.judge.witnesses import WITNESSES
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import ExitCode

COLUMNS = 2
WIDTH_MIN = 100


def render_verdict(result: CheckResult, console: Console) -> None:
    """Print the witness table and one line of verdict."""
    options = result.options
    if options.episode is None:
        if not console.is_terminal:
            console.width = max(console.width, WIDTH_MIN)  # a file has room for all counts
        console.print(witness_table(result))
    _render_lines(result, console)


def verdict_text(result: CheckResult) -> str:
    """The same without the table, as text."""
    words = StringIO()
    _render_lines(result, Console(file=words, width=WIDTH_MIN, highlight=False))
    return words.getvalue()


def _render_lines(result: CheckResult, console: Console) -> None:
    options = result.options
    if options.episode is None:
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
    if not result.has_snapshot:
        console.print("not tried   state and properties: the engine shows no snapshots")
    for name, count in sorted(result.known.items()):
        console.print(f"known       {name}: {count} findings that {options.profile} accounts for")
    for name in () if options.episode is not None else result.missing:
        console.print(f"not reached {name}: {WITNESSES[name]}")
    rate = result.num_events / result.seconds if result.seconds else 0.0
    console.print(
        f"{verdict_word(result)}: engine {options.engine}, equivalence {result.equivalence}, "
        f"profile {options.profile}, preset {options.preset}, "
        f"policy {options.policy or 'both'}, seed {options.seed}: "
        f"{result.num_events:,} events in {result.num_episodes:,} episodes, "
        f"{result.seconds:.1f} s, {rate:,.0f} events/s",
        soft_wrap=True,
    )


def verdict_word(result: CheckResult) -> str:
    """One word, or what kept the check from being one."""
    if result.exit_code is ExitCode.CONFORMS:
        return "conforms"
    if result.num_events == 0:
        return "NO VERDICT (nothing ran)"
    if result.missing:
        return "NO VERDICT (situations not reached: raise --budget or change --seed)"
    return "NO VERDICT (the canary survived)"


def witness_table(result: CheckResult) -> Table:
    """How often each situation was reached, in columns read from top to bottom."""
    names = [name for name in WITNESSES if result.weaker is None or result.witnesses[name]]
    height = -(-len(names) // COLUMNS)
    table = Table(
        title="situations reached (blockstep explain NAME says what one means)",
        title_justify="left",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    for _ in range(COLUMNS):
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=7)
    for row in range(height):
        cells: list[str] = []
        for name in names[row::height]:
            cells += [name, f"{result.witnesses.get(name, 0):,}"]
        table.add_row(*cells)
    return table
