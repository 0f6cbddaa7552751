"""The README tells the truth: its example is the tool's output, its code runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from typer.testing import CliRunner

from blockstep.conformance.command.main import app

README = (Path(__file__).parent.parent / "README.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_failure_shown_is_what_the_tool_prints() -> None:
    first = fenced("console")[0]
    command, _, shown = first.partition("\n")
    args = command.removeprefix("$ blockstep ").split()
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    assert result.stdout.strip() == shown.strip()


def test_the_example_runs_and_prints_its_comments() -> None:
    (code,) = fenced("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    comments = re.findall(r"^print.*# (.*)$", code, re.M)
    assert comments
    assert printed.getvalue().splitlines() == comments
