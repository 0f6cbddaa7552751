"""The README is true: its example is the tool's output, and its code runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from benchmarks.findings import count_rows, make_page, read_hunts
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import get_capabilities
from blockstep.conformance.protocol.registry import load_engine

HOUSE = Path(__file__).parent.parent
README = (HOUSE / "README.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_failure_shown_is_the_output_of_the_tool() -> None:
    first = fenced("console")[0]
    command, _, shown = first.partition("\n")
    args = command.removeprefix("$ blockstep ").split()
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    assert result.stdout.strip() == shown.strip()


ROWS = {
    "several plans in flight": "async",
    "a pipeline": "pipeline",
    "aborts": "abort",
    "PRIORITY": "priority",
    "drafts": "drafts",
    "pause, reset": "reset",
    "typed rejections": "rejection",
    "grammars that": "grammar",
    "masks": "masks",
    "items": "multimodal",
    "encoder inputs": "encoder",
    "KV groups: full": "groups",
    "KV groups of every": "kinds",
    "a cap on LoRA adapters": "adapters",
    "streaming sessions": "sessions",
    "a KV store": "transfers",
    "KV events": "events",
    "forks": "forks",
    "pins": "pins",
    "tiers": "tiers",
    "prefill cadence": "cadence",
}
"""Rows of what is covered, and the capability that each stands for."""


def table_of(title: str) -> dict[str, list[str]]:
    """Return the cells after the first one, by the first one, of the table of a section."""
    section = README.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_coverage_table_matches_our_engines() -> None:
    table = table_of("What is covered")
    heads = [re.sub(r".*`(\w+)`", r"\1", cell) for cell in table.pop("")]
    assert heads[:3] == ["spec", "host", "device"]
    table.pop("---")
    rows = {title: cells for title, cells in table.items() if not title.startswith("token budget")}
    assert len(rows) == len(ROWS)
    for column, name in enumerate(heads[:3]):
        able = get_capabilities(load_engine(name))
        for title, cells in rows.items():
            (capability,) = (what for start, what in ROWS.items() if title.startswith(start))
            assert (cells[column] == "yes") is (capability in able), (name, title)


def test_the_table_has_the_recorded_findings() -> None:
    counts = count_rows(read_hunts())
    table = table_of("What it found")
    for release in ("0.19.1", "0.33.0"):
        assert table[f"vLLM {release}"][0] == str(counts[release])
    assert f"ten releases, {min(counts.values())} to {max(counts.values())} rows" in README
    index = (HOUSE / "docs/index.md").read_text()
    assert f"{counts['0.19.1']} rows in 0.19.1, {counts['0.33.0']} in 0.33.0" in index
    found, _, _ = make_page().partition("| *events played*")
    (row,) = (line.split("|")[2:-1] for line in found.splitlines() if "#43569" in line)
    lengths = dict(zip(counts, (cell.strip() for cell in row), strict=True))
    assert [release for release, length in lengths.items() if length == "-"] == ["0.11.0"]
    assert lengths["0.33.0"] == "8"


def test_the_example_runs_and_prints_its_comments() -> None:
    (code,) = fenced("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    comments = re.findall(r"^print.*# (.*)$", code, re.M)
    assert comments
    assert printed.getvalue().splitlines() == comments
