"""Functions that the generated pages share."""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Span: TypeAlias = tuple[str, int, int]
"""A qualified name, and the first and last line."""


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


def find_functions(text: str) -> list[Span]:
    """Return the spans of every function and class of a source, outer ones first."""
    found: list[Span] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}" if prefix else child.name
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                found.append((name, first, child.end_lineno or first))
            visit(child, name)

    visit(ast.parse(text), "")
    return found


def get_innermost(line: int, spans: Sequence[Span]) -> str:
    """Return the name of the last span that contains a line; "" if none does."""
    return next((name for name, first, last in reversed(spans) if first <= line <= last), "")


def make_parser(name: str, description: str | None, num_events: int) -> argparse.ArgumentParser:
    """Return the parser of a page that is made by playing: its options are --events and --seed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=num_events, help="of default draws")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes")
    return parser


def play_episodes(
    run_episode: Any, options: Any, make_engine: Any, num_events: int
) -> Iterator[Any]:
    """Yield episodes of `run_episode` as `check` plays them, until they have this many events.

    Raises AssertionError for an episode with a finding.
    """
    num_played = index = 0
    while num_played < num_events:
        episode = run_episode(options, index, make_engine)
        assert episode.first is None, f"episode {index} of {options}: {episode.first}"
        num_played += episode.num_events
        index += 1
        yield episode
