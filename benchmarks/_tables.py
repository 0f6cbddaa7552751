"""Markdown of the pages that are made here."""

from __future__ import annotations

from collections.abc import Iterable


def make_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table, a line for each row."""
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quote_code(text: str) -> str:
    """One line of code inside a table."""
    return f"`` {text} ``".replace("|", "\\|")
