"""Verdict of a check without findings: its scope, and the coverage goals that it reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from blockstep.conformance.engine import ALL_CAPABILITIES, Safety, SamePlans
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.lockstep.quirks import get_quirk_title
from blockstep.conformance.protocol.features import BY_NAME, LATE
from blockstep.conformance.report.colour import show
from blockstep.conformance.report.finding_text import (
    make_known_lines,
    make_settings_line,
    make_stale_line,
)
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import ExitCode, get_wish

COLUMNS = 2
WIDTH_MIN = 100
"""Least width of a screen for two columns; a narrower one has one."""
NAMES_SHOWN = 4
"""Most pairs that are named of those not met; the JSON has all."""

TITLE = "coverage goals reached (blockstep explain NAME explains one)"
MISSING_MAX = 8
"""Most coverage goals that are named in a verdict of those not reached."""
BUDGET_ENOUGH = 150_000
"""Events within which runs of our engines reach all required goals, at every preset."""


def render_verdict(result: CheckResult, console: Console, shows_coverage: bool = False) -> None:
    """Print the verdict and its grounds, after a table of coverage goals if wanted."""
    options = result.options
    if shows_coverage and not options.is_single:
        if not console.is_terminal:
            console.width = max(console.width, WIDTH_MIN)  # a file has room for all counts
        console.print(TITLE, style="bold", soft_wrap=True)
        console.print(witness_table(result, COLUMNS if console.width >= WIDTH_MIN else 1))
    show(console, verdict_text(result))


def verdict_text(result: CheckResult) -> str:
    """Return the verdict in short, its grounds and the whole verdict, as text."""
    lines = [*_list_grounds(result), *_list_known(result), *_list_missing(result)]
    if result.exit_code is ExitCode.CONFORMS and not result.options.is_single:
        lines.insert(0, f"{verdict_word(result)}: {result.num_events:,} events, on these grounds:")
    return "\n".join([*lines, _conclude(result)]) + "\n"


def _list_grounds(result: CheckResult) -> Iterator[str]:
    """Yield lines about coverage, the canary, and everything that was left out."""
    options = result.options
    if not options.is_single:
        reached = sum(result.witnesses[name] > 0 for name in WITNESSES)
        all_required = "" if result.missing else ", all that are required"
        yield f"reached     {reached} coverage goals{all_required} (--coverage counts each)"
        canary = result.canary_killed_after
        yield (
            f"canary      caught after {canary} events"
            if canary
            else "canary      ALIVE: a broken engine was not caught, so there is no verdict"
        )
    for note in result.notes:
        yield f"note        {note}"
    for name, count in sorted(result.skipped.items()):
        lacks = f"not tried   {name}: the engine lacks it ({count} actions left out)"
        left_out = f"left out    {name}: {count} times"
        yield lacks if name in ALL_CAPABILITIES else left_out
    for words in result.not_asked:
        yield f"not asked   {words}: equivalence {result.equivalence}"
    if not result.has_snapshot and result.equivalence != SamePlans.name:
        yield "not tried   state and properties: the engine shows no snapshots"


def _list_known(result: CheckResult) -> Iterator[str]:
    """Yield lines about findings that quirks, deviations or known programs explain."""
    for name, count in sorted(result.known.items()):
        yield f"known       {name}: {count} findings that {result.options.profile} accounts for"
    for name, summary in sorted(result.deviations.items()):
        line = f"known       {name}: {result.excused[name]} findings that the adapter declares"
        yield f"{line}: {summary}"
    for name in result.stale:
        yield f"stale       {make_stale_line(name, result.excused[name])}"
    yield from make_known_lines(result.known_programs)


def _list_missing(result: CheckResult) -> Iterator[str]:
    """Yield lines about coverage goals that were not reached, some by name, and about settings."""
    missing = () if result.options.is_single else result.missing
    for name in missing[:MISSING_MAX]:
        yield f"not reached {name}: {WITNESSES.get(name) or get_quirk_title(name)}"
    if len(missing) > MISSING_MAX:
        yield f"not reached {len(missing) - MISSING_MAX} more (--json FILE names all)"
    pairs = f"{result.num_legal_pairs:,} pairs that can be combined"
    sides = f"{result.num_quirk_sides:,} sides of the quirks of {result.options.profile}"
    for names, whole in ((result.apart, pairs), (result.unseen_sides, sides)):
        if names:
            yield f"not met     {len(names):,} of {whole}: {_name_some(names)}"
    for one in result.settings:
        line = f"setting     {one.name}: {one.knob} is {one.checked}, by default {one.default}"
        yield f"{line}; {one.reason}"


def _conclude(result: CheckResult) -> str:
    """Return the line of the verdict, and one with the settings that differ from the engine's
    defaults."""
    if not result.settings:
        return _make_verdict_line(result)
    word = "conforms" if result.exit_code is ExitCode.CONFORMS else "run"
    return f"{_make_verdict_line(result)}\n{make_settings_line(word, result.settings)}"


def _name_some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more (see --json)" if more > 0 else "")


def _make_verdict_line(result: CheckResult) -> str:
    """Return the line of the verdict."""
    options, word = result.options, verdict_word(result)
    held = f"{word}: engine {options.engine}, equivalence {result.equivalence}, "
    if options.program is not None:
        where = f"profile {options.profile}, program {options.program}"
        return f"{held}{where}: {result.num_events:,} events"
    rate = result.num_events / result.seconds if result.seconds else 0.0
    return (
        f"{held}profile {options.profile}, preset {options.preset}, "
        f"policy {options.policy or 'both'}, seed {options.seed}: "
        f"{result.num_events:,} events in {result.num_episodes:,} episodes, "
        f"{result.seconds:.1f} s, {rate:,.0f} events/s"
    )


def verdict_word(result: CheckResult) -> str:
    """Return the verdict in a word, or the reason why there is none."""
    if result.exit_code is ExitCode.CONFORMS:
        return (
            "conforms but for known findings" if any(result.known_programs.values()) else "conforms"
        )
    if result.exit_code is ExitCode.USAGE:
        return "NOTHING WRONG, BUT KNOWN FINDINGS ARE GONE (remove their programs)"
    if result.num_events == 0:
        return "NO VERDICT (nothing ran)"
    if result.has_missed_something:
        or_else = "".join([f", or leave out: --without {name}" for name in list_unasked(result)])
        if result.equivalence == Safety.name:
            or_else = ", or declare unreachable goals in out_of_reach of its traits"
        return f"NO VERDICT (coverage goals not reached: {suggest_budget(result)}{or_else})"
    return "NO VERDICT (the canary survived)"


def suggest_budget(result: CheckResult) -> str:
    """Return the budget to use if coverage goals were not reached."""
    if result.num_events < BUDGET_ENOUGH:
        return f"raise --budget to {BUDGET_ENOUGH}"
    return f"try --budget {2 * result.num_events} or another --seed"


def list_unasked(result: CheckResult) -> list[str]:
    """Return features that were not asked for and have all the goals that were not reached.

    With a feature that was asked for an adapter may have to leave out configs with them.
    """
    asked, unasked = get_wish(result.options).always, list[str]()
    for situation in result.missing if asked else ():
        found = [name for name in LATE if situation.startswith(BY_NAME[name].situations)]
        if not found or found[0] in asked:
            return []
        unasked += found
    return list(dict.fromkeys(unasked))


def witness_table(result: CheckResult, num_columns: int = COLUMNS) -> Table:
    """Return the table of how often each goal was reached, in columns read from top to bottom."""
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
