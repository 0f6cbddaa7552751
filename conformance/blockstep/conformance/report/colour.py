"""Colour: verdicts stand out on a terminal, and nowhere else."""

from __future__ import annotations

import re

from rich.text import Text

GOOD, BAD, OPEN = "bold green", "bold red", "bold yellow"
VERDICTS = (
    (GOOD, re.compile(r"^(?:[\w./-]+: )?(?P<word>conforms|alike)(?=:)", re.MULTILINE)),
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


def paint(text: str) -> Text:
    """The text, its verdicts coloured. A console that knows no colours shows the text."""
    painted = Text(text)
    for style, pattern in VERDICTS:
        for found in pattern.finditer(text):
            painted.stylize(style, *found.span("word"))
    return painted
