"""Tables for people at any width.

No name and no word is broken, so that it can be copied.

If a table of whole words does not fit, each row is a paragraph under its name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between two columns."""
COMFORT = 16
"""A column is not made narrower than this while it has longer cells."""


def show_rows(screen: Console, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows of one kind, with the keys as columns; the first column is the name."""
    if not rows:
        screen.print("nothing to show")
        return
    cells = [list(rows[0]), *([_format_cell(value) for value in row.values()] for row in rows)]
    widths = fit_widths(cells, screen.width)
    if widths is None:
        for row in cells[1:]:
            screen.print(Text(format_paragraph(cells[0], row, screen.width)), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for name, width in zip(cells[0], widths, strict=True):
        table.add_column(name, width=width)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    screen.print(table)


def count_areas(areas: Sequence[str], names: Sequence[str], title: str) -> list[dict[str, object]]:
    """Return the rows of an overview: each area with its number of entries and its first ones.

    `areas` has the area of each entry, and `names` its name.
    """
    found: dict[str, list[str]] = {}
    for area, name in zip(areas, names, strict=True):
        found.setdefault(area, []).append(name)
    return [
        {"area": area, title: len(found[area]), "for example": found[area][0]}
        for area in sorted(found)
    ]


def _format_cell(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def fit_widths(cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return widths of columns that fit side by side and break no word; None if there are none.

    The first column is as wide as its longest cell.
    """
    columns = list(zip(*cells, strict=True))
    lines = [[line for cell in column for line in cell.split("\n")] for column in columns]
    natural = [max(map(len, column_lines)) for column_lines in lines]
    words = [max(map(_get_longest_word, column_lines)) for column_lines in lines]
    least = [max(word, min(COMFORT, most)) for word, most in zip(words, natural, strict=True)]
    least[0] = natural[0]
    room = width - GAP * (len(columns) - 1)
    if sum(least) > room:
        return None
    widths = list(natural)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[widest] -= 1
    return widths


def _get_longest_word(line: str) -> int:
    """Return the length of the longest word, with the indent of its line."""
    return len(line) - len(line.lstrip()) + max(map(len, line.split()), default=0)


def format_paragraph(columns: Sequence[str], row: Sequence[str], width: int) -> str:
    """Return one row as a paragraph under its name."""
    label = max(map(len, columns[1:]), default=0) + GAP
    lines = [row[0]]
    for name, cell in zip(columns[1:], row[1:], strict=True):
        for number, text in enumerate(cell.split("\n")):
            lead = " " * GAP + (name if number == 0 else "").ljust(label)
            indent = lead + " " * (len(text) - len(text.lstrip()))
            lines += textwrap.wrap(
                text.strip(),
                max(width, len(indent) + 1),
                initial_indent=indent,
                subsequent_indent=" " * len(indent),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(line.rstrip() for line in lines)
