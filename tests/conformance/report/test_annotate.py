"""Annotations and job summaries of GitHub Actions, made from results as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from episodes_support import find_failing
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.report.annotate import Place, find_place, list_annotations, make_summary

HOSTILE = "x`y</pre><script>alert(1)</script>\n::error::%0A, [a](b) ~~~~~~ | *z*"


def blockstep(*args: object, **env: str) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100", **env})


def make_record(message: str = "it leaks", **changes: Any) -> dict[str, Any]:
    """Return the record of a failed check, with the fields that are read."""
    finding = {
        "kind": "fault",
        "property": "",
        "sentence": "engine_raises_nothing",
        "message": message,
        "frames": ["outer (adapter.py:2): self.inner()", "inner (<string>:1)"],
    }
    failure = {
        "findings": [finding],
        "config": "num_blocks=2",
        "program": [f"submit {message}"],
        "reproduce": f"blockstep check --engine {message}",
    }
    record = {
        "format": "blockstep-check",
        "engine": "pkg.adapter:make",
        "exit_code": 1,
        "equivalence": "exact",
        "num_events": 12,
        "witnesses_missing": [],
        "known_programs": {},
        "failure": failure,
        "corpus": [],
    }
    return {**record, **changes}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "adapter.py").write_text(
        "def outer(self):\n    self.inner()\n\nmake = outer\n"
    )
    return tmp_path


def test_an_annotation_is_placed_where_the_engine_raised(project: Path) -> None:
    (line,) = list_annotations(make_record(), project)
    assert line == (
        "::error file=pkg/adapter.py,line=2,title=Blockstep%3A fault engine_raises_nothing::"
        "it leaks%0Ablockstep check --engine it leaks"
    )


@pytest.mark.parametrize(
    ("frames", "engine", "place"),
    [
        (["outer (adapter.py:2): self.other()"], "pkg.adapter:make", Place("pkg/adapter.py", 4)),
        (["outer (adapter.py:99): x"], "pkg.adapter:outer@plan", Place("pkg/adapter.py", 1)),
        ([], "pkg.adapter:nothing", Place("pkg/adapter.py", 1)),
        ([], "elsewhere.adapter:make", None),
        ([], "host", None),
    ],
)
def test_an_annotation_without_a_stack_is_placed_at_the_factory(
    project: Path, frames: list[str], engine: str, place: Place | None
) -> None:
    assert find_place(frames, engine, project) == place


def test_an_ambiguous_file_name_is_not_used(project: Path) -> None:
    (project / "old").mkdir()
    (project / "old" / "adapter.py").write_text((project / "pkg" / "adapter.py").read_text())
    frame = "outer (adapter.py:2): self.inner()"
    assert find_place([frame], "elsewhere:make", project) is None
    assert find_place([frame], "pkg.adapter:make", project) == Place("pkg/adapter.py", 4)


def test_a_message_of_an_engine_is_escaped(project: Path) -> None:
    record = make_record(HOSTILE)
    (line,) = list_annotations(record, project)
    assert "\n" not in line
    assert line.count("::") == 2 + 2 * HOSTILE.count("::"), "its own, and those that it quotes"
    assert "%250A" in line
    summary = make_summary(record)
    before, program, after = summary.split("~~~~~~\n")
    assert "<script>" not in before.replace("\\<script\\>", "")
    assert "[a]" not in before
    assert "~~~~~~" not in program
    assert after.strip().count("`") == 2, "one line of code"


def test_a_run_without_a_verdict_is_annotated(project: Path) -> None:
    record = make_record(failure=None, exit_code=5, witnesses_missing=["preempted"])
    (line,) = list_annotations(record, project)
    assert line.startswith("::error title=Blockstep::no verdict in 12 events")
    assert list_annotations(make_record(failure=None, exit_code=0), project) == []


def test_a_known_finding_that_is_gone_is_annotated(project: Path) -> None:
    record = make_record(failure=None, exit_code=2, known_programs={"a.json": 3, "b.json": None})
    (line,) = list_annotations(record, project)
    assert line.endswith("but known findings are gone: b.json")


def test_an_engine_in_a_src_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "src" / "mill").mkdir(parents=True)
    (tmp_path / "src" / "mill" / "adapter.py").write_text("\nmake = print\n")
    place = find_place((), "mill.adapter:make", tmp_path)
    assert place == Place("src/mill/adapter.py", 2)


def test_failures_of_a_corpus_and_known_programs_are_annotated(project: Path) -> None:
    failure = make_record()["failure"]
    other = {**failure, "reproduce": "blockstep check --program b.json"}
    record = make_record(
        corpus=[{"failure": failure}, {"failure": other}, {"failure": None}],
        known_programs={"a.json": 3, "b.json": None},
    )
    assert len(list_annotations(record, project)) == 2
    summary = make_summary(record)
    assert "`a.json`: known, 3 times" in summary
    assert "`b.json`: gone" in summary


def test_annotate_reads_results_of_check_hunt_and_pytest(tmp_path: Path) -> None:
    """The results are those of a check, of a hunt, and of pytest, which contain checks."""
    engine = ("--engine", "museum:leak-on-abort", "--preset", "tiny", "--episode", find_failing())
    summary, results = tmp_path / "summary.md", []
    for command in ("check", "hunt"):
        results.append(tmp_path / f"{command}.json")
        blockstep(command, *engine, "--json", results[-1])
    runs = [{"preset": "tiny", "check": json.loads(results[0].read_text())}]
    results.append(tmp_path / "pytest.json")
    results[-1].write_text(json.dumps({"format": "blockstep-pytest", "version": 1, "runs": runs}))
    for number, result in enumerate(results, 1):
        answer = blockstep("annotate", result, GITHUB_STEP_SUMMARY=str(summary))
        assert answer.exit_code == 0
        title = "::error title=Blockstep%3A P1 every_block_is_free_or_held::"
        head = "MEMORY: ref count, free queue and holders of block 1 disagree: ref_counts[1] 1, "
        assert answer.stdout.startswith(title + head)
        assert summary.read_text().count("## Blockstep\n") == number
    assert "submit    A prompt=0 max_tokens=1" in summary.read_text()
    assert summary.read_text().count("MEMORY: ref count, free queue and holders of block 1") == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "blockstep-program"}', None])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    result = blockstep("annotate", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"blockstep: {path}: ")
