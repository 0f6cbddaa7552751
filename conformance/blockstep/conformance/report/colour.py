"""Colour: verdicts are coloured and long lines broken between words, on a terminal only."""

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
"""Patterns of the words of a verdict, by style."""


COMMAND = re.compile(r"^ *reproduce\b")
"""Pattern of a line that is to be copied, and never broken."""
INDENT = 4
"""Additional indent of the second and later parts of a broken line."""


def show(console: Console, text: str) -> None:
    """Print a text without an additional newline, coloured, in lines that fit the terminal."""
    console.print(paint(fit(text, console)), soft_wrap=True, end="")


def fit(text: str, console: Console) -> str:
    """Return the text with lines broken between words to fit a terminal; unchanged for a file."""
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
    """Return the text with its verdicts coloured."""
    painted = Text(text)
    for style, pattern in VERDICTS:
        for found in pattern.finditer(text):
            painted.stylize(style, *found.span("word"))
    return painted
