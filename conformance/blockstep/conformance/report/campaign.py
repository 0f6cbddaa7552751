"""Reports of `campaign`: text for people, and one page of HTML without scripts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from blockstep.conformance.campaign.records import Past
from blockstep.conformance.campaign.summary import Row, Summary
from blockstep.conformance.protocol.program import describe, describe_config
from blockstep.conformance.protocol.program_file import parse_program
from blockstep.conformance.report.headlines import make_headline
from blockstep.conformance.search.options import ExitCode

MISSING_MAX = 5
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 75rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
td, th { border: 1px solid #8886; padding: .15rem .4rem; text-align: left }
td.n { text-align: right }
pre { overflow-x: auto; font-size: 13px }
svg { width: 100%; height: 9rem }
polyline { fill: none; stroke: #38c; stroke-width: 2 }
text { font-size: 11px; fill: #888 }
"""


def make_summary_line(summary: Summary) -> str:
    """Return one line about the state of a campaign."""
    totals = summary.totals
    defects, leased = len(summary.new), sum(bool(it.owner) for it in summary.leases)
    text = f"{defects} defect{'s' * (defects != 1)} in {totals.events:,} events"
    return f"{text}, {totals.episodes:,} episodes, {summary.num_rounds} rounds, {leased} leases"


def make_progress_line(past: Past) -> str:
    """Return one line about the course of a campaign, for its progress."""
    found = f"{past.findings} finding{'s' * (past.findings != 1)} in {past.events:,} events"
    return f"{found}, {past.goals:,} goals"


def render_campaign(summary: Summary) -> str:
    """Return the state of a campaign for a terminal, with a trailing newline."""
    state = "finished" if summary.is_finished else "not finished"
    lines = [f"blockstep campaign {summary.plan.key}: {make_summary_line(summary)} ({state})", ""]
    lines += _align(list_targets(summary), "  ")
    for number, row in enumerate(summary.rows, 1):
        lines += ["", *_list_defect(number, row)]
    lines += _list_remarks(summary)
    return "\n".join(lines) + "\n"


def list_targets(summary: Summary) -> list[tuple[str, ...]]:
    """Return the table of the targets, its head included."""
    rows: list[tuple[str, ...]]
    rows = [("target", "version", "episodes", "events", "goals", "lines", "failures", "defects")]
    for target, total in zip(summary.plan.targets, summary.totals.targets, strict=True):
        version = "" if total.look is None else total.look.version
        reached = f"{len(total.goals):,}", f"{len(total.lines):,}" if target.lines else "-"
        played, failures = (total.episodes, total.events), sum(total.sayings.values())
        defects = sum(target.name in row.seen for row in summary.new)
        counts = (*(f"{it:,}" for it in played), *reached, f"{failures:,}", str(defects))
        rows.append((target.name, version, *counts))
    return rows


def list_cells(summary: Summary) -> list[tuple[str, ...]]:
    """Return the table of the cells, its head included."""
    rows: list[tuple[str, ...]]
    rows = [("target", "preset", "features", "units", "episodes", "events")]
    for cell, total in zip(summary.plan.cells, summary.totals.cells, strict=True):
        name = summary.plan.targets[cell.target].name
        counts = (f"{it:,}" for it in (total.units, total.episodes, total.events))
        rows.append((name, cell.preset or "mutants", " ".join(cell.features), *counts))
    return rows


def _align(rows: Sequence[Sequence[str]], indent: str) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (it.ljust(width) for it, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()


def _list_defect(number: int, row: Row) -> Iterator[str]:
    known = f" (known: {row.known})" if row.known else ""
    yield f"{number}. {make_headline(row.found.first)}{known}"
    yield f"   found by   {row.found.name}, {row.found.length} actions, digest {row.found.digest}"
    for name, seen in row.seen.items():
        when = f"first {format_time(seen.first_at)}, last {format_time(seen.last_at)}"
        yield f"   seen in    {name}: {seen.count} shrunk failures, {when}"
    if row.found.causes:
        yield f"   because    {', '.join(row.found.causes)} (blockstep quirks)"
    if not row.known:
        yield f"   reproduce  blockstep campaign replay PLAN {row.found.digest}"


def _list_remarks(summary: Summary) -> Iterator[str]:
    yield ""
    for name in summary.gone:
        yield f"gone        {name}: it passes now; remove it from the known programs"
    for target, total in zip(summary.plan.targets, summary.totals.targets, strict=True):
        missing = summary.missing[target.name]
        if missing:
            more = f" and {len(missing) - MISSING_MAX} more" * (len(missing) > MISSING_MAX)
            yield f"not reached {target.name}: {', '.join(missing[:MISSING_MAX])}{more}"
        if total.num_spurious:
            yield f"not again   {target.name}: {total.num_spurious} crashes happened only once"
        if total.look is None:
            yield f"not asked   {target.name}: no worker has asked its engine yet"
        elif not total.look.canary:
            yield f"no canary   {target.name}: the canary was not caught"
    verdicts = {
        ExitCode.CONFORMS: "conforms but for known findings" if summary.rows else "conforms",
        ExitCode.SPEC: "the specification failed an assertion",
        ExitCode.HARNESS: "no verdict: too few events, goals not reached, or a check that raised",
    }
    if summary.exit_code in verdicts:
        yield verdicts[summary.exit_code]


def format_time(at: float) -> str:
    """Return a time of the store as date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


# The page.


def render_page(summary: Summary) -> str:
    """Return the page: defects over targets, coverage over time, cells, and all programs."""
    title = f"Campaign {summary.plan.key}"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1><p>{escape(make_summary_line(summary))}</p>",
            *_make_table(list_targets(summary)),
            "<h2>Defects</h2>",
            *_make_table(_list_over_targets(summary)),
            "<h2>Goals and pairs reached, over events</h2>",
            _make_chart([(float(it.events), float(it.goals)) for it in summary.course]),
            *_draw_lines(summary),
            "<h2>Findings, over events</h2>",
            _make_chart([(float(it.events), float(it.findings)) for it in summary.course]),
            "<h2>Cells</h2>",
            *_make_table(list_cells(summary)),
            *(
                line
                for number, row in enumerate(summary.rows, 1)
                for line in _make_section(number, row)
            ),
            "</body></html>\n",
        ]
    )


def _draw_lines(summary: Summary) -> list[str]:
    """Return the chart of lines that were reached, if a target of the plan records any."""
    if not any(target.lines for target in summary.plan.targets):
        return []
    points = [(float(it.events), float(it.lines)) for it in summary.course]
    return ["<h2>Lines of engines reached, over events</h2>", _make_chart(points)]


def _list_over_targets(summary: Summary) -> list[tuple[str, ...]]:
    names = [target.name for target in summary.plan.targets]
    rows: list[tuple[str, ...]]
    rows = [("", "defect", "digest", "known", *names)]
    for number, row in enumerate(summary.rows, 1):
        counts = (str(row.seen[name].count) if name in row.seen else "" for name in names)
        headline = make_headline(row.found.first)
        rows.append((str(number), headline, row.found.digest, row.known, *counts))
    return rows


def _make_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide"><table><thead>'
    yield f"<tr>{''.join(f'<th>{escape(it)}</th>' for it in rows[0])}</tr></thead><tbody>"
    for row in rows[1:]:
        cells = (f"<td{' class=n' * _is_number(it)}>{escape(it)}</td>" for it in row)
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _is_number(text: str) -> bool:
    return text.replace(",", "").isdigit()


def _make_chart(points: Sequence[tuple[float, float]]) -> str:
    """Return a line chart, scaled to its largest values."""
    if not points:
        return "<p>no rounds yet</p>"
    most_x, most_y = (max(1.0, *values) for values in zip(*points, strict=True))
    line = " ".join(f"{40 + 950 * x / most_x:.1f},{130 - 115 * y / most_y:.1f}" for x, y in points)
    texts = f'<text x="0" y="20">{most_y:,.0f}</text><text x="900" y="148">{most_x:,.0f}</text>'
    return f'<svg viewBox="0 0 1000 150"><polyline points="{line}"/>{texts}</svg>'


def _make_section(number: int, row: Row) -> Iterable[str]:
    """Yield the section of one defect: its message, its timeline, and its program."""
    found = row.found
    yield f"<h2>{number}. {escape(make_headline(found.first))}</h2>"
    yield f"<p>{escape(found.name)}: {escape(found.first.message)}</p>"
    yield f"<p>{escape(', '.join(found.causes))}</p>"
    times = [("target", "times", "first seen", "unit", "last seen", "unit")]
    for name, it in row.seen.items():
        first, last = format_time(it.first_at), format_time(it.last_at)
        times.append((name, str(it.count), first, it.first_unit, last, it.last_unit))
    yield from _make_table(times)
    if found.program:
        program = parse_program(found.program, Path(found.digest))
        lines = [describe_config(program.config), *map(describe, program.actions)]
        yield f"<pre>{escape(chr(10).join(lines))}</pre>"
    elif found.loss is not None:
        yield f"<pre>{escape(chr(10).join((found.loss.config, *found.loss.events)))}</pre>"
