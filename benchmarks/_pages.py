"""Functions that the generated pages share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path


def make_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table, a line for each row."""
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quote_code(text: str) -> str:
    """Return one line of code inside a table."""
    return f"`` {text} ``".replace("|", "\\|")


def get_commit() -> str:
    """Return the commit of the measured sources; "" if git does not know it."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
