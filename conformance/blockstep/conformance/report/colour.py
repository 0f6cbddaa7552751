"""Colour: verdicts stand out on a terminal, and nowhere else; there lines break between words."""

from __future__ import annotations

import re
import textwrap

from rich.console import Console
from rich.text import Text

GOOD, BAD, OPEN = "bold green", "bold red", "bold yellow"
VERDICTS = (
    (
        GOOD,
        re.compile(
            r"^(?:[\w./-]+: )?(?P<word>conforms(?: but for known findings)?|alike)(?=:)",
            re.MULTILINE,
        ),
    ),
    (OPEN, re.compile(r"^(?:[\w./-]+: )?(?P<word>NO VERDICT|NOTHING RAN)\b", re.MULTILINE)),
    (
        BAD,
        re.compile(
            r"^(?:blockstep\b|[\w./-]+:|summary:).*?\b(?P<word>VIOLATION|DIVERGENCE|FAULT|STALL|"
            r"THE SPEC IS WRONG|IS ANSWERED DIFFERENTLY|NOT AS COMMITTED|WRONG)\b",
            re.MULTILINE,
        ),
    ),
)
"""Where the words of a verdict stand in what is said."""


COMMAND = re.compile(r"^ *reproduce\b")
"""A line that is there to be copied, and never broken."""
INDENT = 4
"""Additional indent of the second and later parts of a broken line."""


def show(console: Console, text: str) -> None:
    """Print a text that ends as it ends, painted, in lines that fit a terminal."""
    console.print(paint(fit(text, console)), soft_wrap=True, end="")


def fit(text: str, console: Console) -> str:
    """The text with lines broken between words where the terminal is narrower; a file has room."""
    if not console.is_terminal:
        return text
    width = console.width
    return "".join(
        line if len(line) <= width or COMMAND.match(line) else _break(line, width)
        for line in text.splitlines(keepends=True)
    )


def _break(line: str, width: int) -> str:
    indent = " " * min(len(line) - len(line.lstrip()) + INDENT, width // 2)
    lines = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + ("\n" if line.endswith("\n") else "")


def paint(text: str) -> Text:
    """The text, its verdicts coloured. A console that knows no colours shows the text."""
    painted = Text(text)
    for style, pattern in VERDICTS:
        for found in pattern.finditer(text):
            painted.stylize(style, *found.span("word"))
    return painted
