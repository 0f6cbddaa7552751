"""`--brief`: a finding takes five lines at any width."""

from __future__ import annotations

from pathlib import Path

import pytest
from episodes_support import find_failing
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.report.brief import CHARS_MAX, LINES_MAX, cut, describe_seen, join

LEAKS = "museum:leak-on-abort"
EPISODE = str(find_failing())
WORKLOAD = '{"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]}\n'


def run(*words: str, width: int = 80) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, words, env={"COLUMNS": str(width)})
    return result.exit_code, result.output.splitlines()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_finding_takes_five_lines_at_each_width(width: int, snapshot: SnapshotAssertion) -> None:
    words = ("--engine", LEAKS, "--preset", "tiny", "--episode", EPISODE, "--brief")
    code, lines = run("check", *words, width=width)
    assert code == 1
    assert len(lines) == LINES_MAX
    assert "\n".join(lines).replace(f"--episode {EPISODE}", "--episode N") == snapshot


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--engine", LEAKS, "--preset", "tiny", "--episode", EPISODE),
        ("explore", "--engine", LEAKS, "--preset", "pair", "--profile", "vllm-0.19.1"),
        ("explore", "--engine", LEAKS, "--preset", "pair", "--no-properties"),
    ],
)
def test_the_command_of_the_last_line_reproduces_the_finding(words: tuple[str, ...]) -> None:
    code, lines = run(*words, "--brief")
    label, _, *again = lines[-1].split()
    assert (code, label) == (1, "reproduce")
    code_again, whole = run(*again)
    assert code_again == code
    name = lines[1].split()[1]
    assert any(name in line for line in whole)
    if words[0] == "explore":
        assert sorted(again) == sorted(words), "as it was typed, in the order of --help"


def test_a_recorded_run_is_reported_briefly(tmp_path: Path) -> None:
    trace = tmp_path / "a trace.jsonl"
    assert run("check", "--preset", "tiny", "--episode", "0", "--record", str(trace))[0] == 0
    trace.write_text(trace.read_text().replace('"frame_id":1,"new"', '"frame_id":7,"new"'))
    code, lines = run("validate", str(trace), "--brief")
    assert code == 1
    assert len(lines) == LINES_MAX
    assert lines[0].startswith("blockstep validate: DIVERGENCE at step ")
    assert lines[-1] == f"  reproduce  blockstep validate '{trace}'"


def test_a_hunt_takes_five_lines_for_each_defect() -> None:
    words = ("--engine", LEAKS, "--preset", "tiny", "--episode", EPISODE, "--brief")
    code, lines = run("hunt", *words)
    assert code == 1
    assert len(lines) == 1 + LINES_MAX
    assert lines[1].startswith("1. ")


def test_brief_changes_nothing_without_a_finding(tmp_path: Path) -> None:
    workload = tmp_path / "workload.jsonl"
    workload.write_text(WORKLOAD)
    for words in (("check", "--preset", "tiny", "--episode", "0"), ("replay", str(workload))):
        without = [line for line in run(*words)[1] if "second" not in line and " s" not in line]
        brief = [line for line in run(*words, "--brief")[1] if "second" not in line]
        assert [line for line in brief if " s" not in line] == without


def test_long_lines_are_cut_and_the_rest_is_counted() -> None:
    program = [f"submit    {number} prompt=0" for number in range(100)]
    line = join(program)
    assert len(line) <= CHARS_MAX
    shown, _, more = line.rpartition("; ... ")
    assert more == f"{100 - len(shown.split('; '))} more"
    assert join(["x" * 1000]).endswith("...")
    assert cut("one\n two") == "one two"
    rows = tuple(Difference(f"field{n}", "1" * 500, "2") for n in range(3))
    finding = Finding(FindingKind.DIVERGENCE, "", "a_b", "they differ", rows)
    assert describe_seen(finding).startswith("they differ; field0: spec 1111")
    assert describe_seen(finding).endswith("..., engine 2 and 2 more")
