"""The page of pairs: what is legal together, how often it is drawn together, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from benchmarks._pages import make_table

from blockstep.conformance.judge.legal import UNDRAWN, find_reason
from blockstep.conformance.judge.pairs import (
    CHUNK_FIELDS,
    MOMENTS,
    NAMES,
    SESSION_HAS,
    SETTINGS,
    SIGNALS,
    list_cells,
    name_pair,
)

INTRO = """\
Three tables show what was drawn together. A digit says in how many episodes a cell was reached: `0`
in 1 to 9, `1` in 10 to 99, `2` in 100 to 999, `3` in more. A letter is a reason, listed below the
table: what the specification answers when it is asked for both at once. `?` is legal and was not
drawn; its reason is at the end of the page. `blockstep check` counts the pairs as well and names
those that a run could have drawn and did not.
"""


class Letters:
    """The reasons of one table, each with a letter."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def get(self, reason: str) -> str:
        """The letter of a reason."""
        return self.of.setdefault(reason, ascii_lowercase[len(self.of)])

    def render(self) -> str:
        """The reasons, a line each."""
        return "".join(f"- `{letter}`: {reason}\n" for reason, letter in self.of.items())


def list_empty(counts: Mapping[str, int]) -> list[str]:
    """Legal cells that were never reached, and that have no reason for it."""
    return [
        cell
        for cell in list_cells()
        if not counts.get(cell) and not find_reason(cell) and cell not in UNDRAWN
    ]


def list_wrong(counts: Mapping[str, int]) -> list[str]:
    """Cells that were reached in spite of a reason, so that the reason is wrong."""
    return [
        cell for cell, count in counts.items() if count and (find_reason(cell) or cell in UNDRAWN)
    ]


def make_mark(cell: str, counts: Mapping[str, int], letters: Letters) -> str:
    """The mark of one cell: a digit, the letter of a reason, or `?`."""
    if counts.get(cell):
        return str(min(len(str(counts[cell])) - 1, 3))
    reason = find_reason(cell)
    if reason:
        return letters.get(reason)
    return "?"


def render_matrix(
    rows: Sequence[str],
    columns: Sequence[str],
    name: Callable[[str, str], str],
    counts: Mapping[str, int],
) -> str:
    """A table of marks, whose columns are numbered, and its reasons."""
    letters, width = Letters(), max(map(len, rows)) + 4
    lines = [" " * width + "".join(f"{number:>3}" for number in range(1, len(columns) + 1))]
    for number, row in enumerate(rows, 1):
        marks = [
            "  ." if row == column and rows == columns else f"{make_mark(cell, counts, letters):>3}"
            for column in columns
            for cell in [name(row, column)]
        ]
        lines.append(f"{number:>3} {row:<{width - 4}}{''.join(marks)}")
    legend = "" if rows == columns else _list_columns(columns)
    return "```text\n" + "\n".join(lines) + "\n```\n\n" + legend + letters.render()


def _list_columns(columns: Sequence[str]) -> str:
    numbered = ", ".join(f"{number} `{name}`" for number, name in enumerate(columns, 1))
    return f"Columns: {numbered}.\n\n"


def render_page(results: Mapping[str, Any]) -> str:
    """Return the page's tables, from the events played and the episodes that reached each cell."""
    played, counts, run = results["played"], results["episodes"], results["run"]
    campaigns = "; ".join(f"`{options}`: {events:,} events" for options, events in played.items())
    undrawn = "".join(f"- `{cell}`: {reason}\n" for cell, reason in UNDRAWN.items())
    return "\n".join(
        [
            INTRO,
            f"Run of {run['day']} at commit {run['commit']}.",
            f"Played, the specification against itself: {campaigns}.",
            "",
            "## Features and settings",
            "",
            f"A plan had a row of a request with both. Settings begin at `{next(iter(SETTINGS))}`.",
            "",
            render_matrix(NAMES, NAMES, name_pair, counts),
            "## Signals",
            "",
            "An event about a request came at a moment of the request's life.",
            "",
            make_table(("signal", "what it is"), [(f"`{key}`", SIGNALS[key]) for key in SIGNALS]),
            make_table(("moment", "when it is"), [(f"`{key}`", MOMENTS[key]) for key in MOMENTS]),
            render_matrix((*SIGNALS,), (*MOMENTS,), lambda one, at: f"{one}@{at}", counts),
            "## Chunks of sessions",
            "",
            "A chunk with the field of the row was accepted by a session with that of the column.",
            "",
            render_matrix(CHUNK_FIELDS, SESSION_HAS, lambda one, has: f"{one}>{has}", counts),
            "## Legal, and not drawn",
            "",
            undrawn or "None.\n",
        ]
    )
