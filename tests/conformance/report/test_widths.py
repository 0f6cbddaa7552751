"""Verdicts and tables fit terminals of 60, 80 and 140 columns, with colours and without."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from blockstep.conformance.bench import report as bench_report
from blockstep.conformance.command.tables import fit_widths, show_rows
from blockstep.conformance.judge.checks import PROPERTIES
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.museum.trial import describe
from blockstep.conformance.protocol.registry import KNOWN_ENGINES
from blockstep.conformance.report.colour import paint
from blockstep.conformance.report.verdict import render_verdict
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.profiles import QUIRKS

WIDTHS = (60, 80, 140)
REACHED = (
    *("admitted", "prefix_hit", "full_prompt_hit_recomputes_last_block", "preempted"),
    "reset_forced_with_two_frames_in_flight",
)
ROWS = [
    {"exhibit": name, "what is wrong": what, "upstream": upstream}
    for name, what, upstream in (
        (
            "forward-frees",
            "a table is freed from its head",
            "llm-d-inference-sim #704; section 2.2",
        ),
        ("leak-on-abort", "an aborted request keeps its blocks", "#46283"),
        ("zombie-key", "keys of work that never ran stay published", "#43569 (open)"),
    )
]


def make_terminal(width: int, **options: object) -> Console:
    """A terminal without colours that keeps what it shows."""
    wanted = {"color_system": None, "highlight": False, **options}
    return Console(file=io.StringIO(), width=width, force_terminal=True, **wanted)  # type: ignore[arg-type]


def get_shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def make_result(names: Sequence[str] = tuple(WITNESSES), equivalence: str = "exact") -> CheckResult:
    return CheckResult(
        CheckOptions(engine="host"),
        num_episodes=1234,
        num_events=150_000,
        seconds=10.0,
        witnesses=Counter({name: 7 * number for number, name in enumerate(names, 1)}),
        equivalence=equivalence,
        skipped=Counter({"grammar": 12}),
        canary_killed_after=74,
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_a_verdict_fits_each_width(width: int, snapshot: SnapshotAssertion) -> None:
    console = make_terminal(width)
    render_verdict(make_result(REACHED, "safety"), console, shows_coverage=True)
    assert get_shown(console) == snapshot


@pytest.mark.parametrize("width", WIDTHS)
def test_every_coverage_goal_and_its_count_are_shown(width: int) -> None:
    console, result = make_terminal(width), make_result()
    render_verdict(result, console, shows_coverage=True)
    words = get_shown(console).split()
    for name, count in result.witnesses.items():
        assert words[words.index(name) + 1] == f"{count:,}"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_fits_each_width(width: int, snapshot: SnapshotAssertion) -> None:
    console = make_terminal(width)
    show_rows(console, ROWS)
    assert get_shown(console) == snapshot


def rows_of(table: str) -> list[dict[str, object]]:
    """Return the rows of a listing, as its command has them."""
    if table == "museum":
        return [{**describe(it), "speaks": it.properties} for it in EXHIBITS.values()]
    if table == "engines":
        return [
            {"name": it.name, "summary": it.summary, "target": it.target}
            for it in KNOWN_ENGINES.values()
        ]
    if table == "quirks":
        return [
            {"quirk": it.quirk, "what": it.title, "breaks": it.property_ids, "program": it.program}
            for it in QUIRKS
        ]
    return [
        {
            "id": it.id,
            "name": it.name,
            "what holds": "\n  ".join([it.statement, *(check.sentence for check in it.checks)]),
        }
        for it in PROPERTIES
    ]


@pytest.mark.parametrize("width", [40, *WIDTHS])
@pytest.mark.parametrize("table", ["museum", "engines", "quirks", "properties"])
def test_no_table_breaks_a_word(table: str, width: int) -> None:
    console, rows = make_terminal(width), rows_of(table)
    show_rows(console, rows)
    shown = get_shown(console)
    words = set(shown.split())
    for row in rows:
        for value in row.values():
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert words.issuperset(text.split())
    lines = shown.splitlines()
    names = [str(next(iter(row.values()))) for row in rows]
    assert [line for line in lines if any(line.startswith(name) for name in names)], "whole names"
    assert all(len(line) <= width or len(line.split()) <= 2 for line in lines)


@pytest.mark.parametrize(
    ("cells", "width", "widths"),
    [
        ([["a", "b"], ["name", "some words"]], 20, [4, 10]),
        ([["a", "b"], ["name", "one two three four five"]], 22, [4, 16]),
        ([["a", "b"], ["name", "one two three four five"]], 21, None),
        ([["a", "b"], ["a-name-of-twenty-chars", "x"]], 20, None),
        ([["a"], ["two words"]], 9, [9]),
        ([["a"], ["two words"]], 8, None),
    ],
)
def test_columns_shrink_to_their_longest_word(
    cells: Sequence[Sequence[str]], width: int, widths: list[int] | None
) -> None:
    assert fit_widths(cells, width) == widths


def test_a_narrow_screen_has_a_subset_of_the_columns() -> None:
    assert set(bench_report.FEW_COLUMNS) < set(bench_report.COLUMNS)
    narrow = bench_report.make_table([], bench_report.FEW_COLUMNS)
    assert [column.header for column in narrow.columns] == list(bench_report.FEW_COLUMNS)


@pytest.mark.parametrize(
    ("text", "word", "style"),
    [
        ("conforms: engine host", "conforms", "green"),
        ("pair.jsonl: conforms: 3 programs", "conforms", "green"),
        ("alike: engine host", "alike", "green"),
        ("NO VERDICT (nothing ran): engine host", "NO VERDICT", "yellow"),
        ("blockstep check: VIOLATION at event 3 (engine x)", "VIOLATION", "red"),
        ("blockstep validate: DIVERGENCE at step 3", "DIVERGENCE", "red"),
        ("blockstep arms: A IS ANSWERED DIFFERENTLY (x)", "IS ANSWERED DIFFERENTLY", "red"),
    ],
)
def test_each_verdict_has_its_colour(text: str, word: str, style: str) -> None:
    (span,) = paint(text).spans
    assert text[span.start : span.end] == word
    assert span.style == f"bold {style}"


def test_prose_and_terminals_without_colour_have_no_colour() -> None:
    assert not paint("  a FAULT of an engine conforms: to nothing").spans
    for options, has_colour in (({"color_system": "standard"}, True), ({"no_color": True}, False)):
        console = make_terminal(80, **options)
        render_verdict(make_result(), console)
        assert ("\x1b[1;32m" in get_shown(console)) is has_colour
