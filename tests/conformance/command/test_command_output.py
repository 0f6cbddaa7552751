"""Output of the command line: its help, and a finding before its program is shrunk."""

from __future__ import annotations

import io
import re

import pytest
import typer
from rich.console import Console
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import GROUPS, app
from blockstep.conformance.command.sections import first_sentence
from blockstep.conformance.report.colour import fit, show
from blockstep.conformance.report.verdict import MISSING_MAX, verdict_text
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import required_goals


def blockstep(*args: object, width: int = 80) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(width)})


def test_help_begins_with_check_and_cuts_no_sentence() -> None:
    shown = blockstep("--help").output
    titles = re.findall(r"^(\S[^:\n]*):\n", shown, re.MULTILINE)
    assert titles == ["Options", *GROUPS]
    commands = re.findall(r"^  ([a-z][a-z-]*)  ", shown, re.MULTILINE)
    assert commands == [name for group in GROUPS.values() for name in group]
    assert commands[0] == "check"
    assert "..." not in shown.partition("\n")[2]
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert "4 liveness" in words
    for group in GROUPS.values():
        for command in group.values():
            if not isinstance(command, typer.Typer):
                assert first_sentence(command.__doc__ or "") in words


@pytest.mark.parametrize("command", ["check", "hunt"])
def test_options_are_in_sections(command: str) -> None:
    shown = blockstep(command, "--help").output
    titles = re.findall(r"^(\S[^:\n]*):\n", shown, re.MULTILINE)
    assert titles == ["Engine", "Runs", "Programs", "Output"]
    assert shown.index("--engine") < shown.index("--preset") < shown.index("--known <")
    assert shown.rindex("--help") > shown.index("Output:")


# A finding.


def test_a_check_prints_a_finding_before_shrinking_it(
    snapshot: SnapshotAssertion,
) -> None:
    args = ("check", "--engine", "museum:leak-on-abort", "--preset", "tiny", "--jobs", 1)
    result = blockstep(*args)
    assert result.stdout == snapshot
    head, finding, *_, again = result.stderr.splitlines()[:5]
    assert head.startswith("blockstep check: found in episode ")
    assert head.endswith("(engine museum:leak-on-abort, preset tiny, seed 0); it is being shrunk")
    assert finding == "  finding    P1 every_block_is_free_or_held"
    assert again.startswith(
        "  reproduce  blockstep check --engine museum:leak-on-abort --preset tiny"
    )
    episode = again.rpartition(" ")[2]
    assert blockstep(*args[:5], "--episode", episode, "--brief").exit_code == 1


def test_a_hunt_prints_each_kind_of_failure_when_it_is_found() -> None:
    result = blockstep(
        "hunt", "--engine", "museum:leak-on-abort", "--preset", "tiny", "--budget", 900
    )
    found = [
        line for line in result.stderr.splitlines() if line.startswith("blockstep hunt: found")
    ]
    assert found
    assert found[0].endswith("; it is being shrunk")
    assert "every_block_is_free_or_held" in result.stderr
    assert "1 defect in" in result.stdout


# A verdict.


def make_result(num_events: int, num_missing: int) -> CheckResult:
    missing = required_goals(CheckOptions())[:num_missing]
    assert len(missing) == num_missing
    return CheckResult(CheckOptions(), 9, num_events, 1.0, missing=missing, canary_killed_after=47)


@pytest.mark.parametrize(
    ("num_events", "advice"),
    [(300, "raise --budget to 150000"), (150_010, "try --budget 300020 or another --seed")],
)
def test_a_verdict_without_all_goals_suggests_a_larger_budget(num_events: int, advice: str) -> None:
    text = verdict_text(make_result(num_events, 1))
    assert f"NO VERDICT (coverage goals not reached: {advice})" in text


def test_a_verdict_lists_only_some_of_many_missing_goals() -> None:
    lines = verdict_text(make_result(300, MISSING_MAX + 5)).splitlines()
    assert len(lines) == MISSING_MAX + 4
    assert lines[-2] == "not reached 5 more (--json FILE names all)"


def test_lines_are_wrapped_at_words_on_a_terminal_only() -> None:
    text = f"  seen  {'word ' * 30}\n  reproduce  blockstep check --engine {'x' * 90} --seed 1\nend"
    terminal = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    lines = fit(text, terminal).splitlines()
    assert all(len(line) <= 60 for line in lines if "reproduce" not in line)
    assert lines[1].startswith(" " * 6 + "word")
    assert text.splitlines()[1] in lines, "a line to copy stays whole"
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    file = io.StringIO()
    show(Console(file=file, width=60), text)
    assert file.getvalue() == text
