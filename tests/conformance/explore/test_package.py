"""A package of vectors: its files, and its checker, which runs without Blockstep."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.explore.vectors import read_vectors
from blockstep.spec import vocabulary as v

ROOT = Path(__file__).resolve().parents[3]
SERVE = ROOT / "tests" / "support" / "process_support" / "serve.py"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "made" / "here"
    given = ("vectors", "pack", str(folder), "--preset", "free", "--preset", "whole", "--json", "-")
    result = CliRunner().invoke(app, [*given, "--max-states", "200"])
    assert result.exit_code == 0, result.output
    assert [one["preset"] for one in json.loads(result.stdout)["files"]] == ["free", "whole"]
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the package's checker, with `-I` so that it cannot import Blockstep."""
    line = [sys.executable, "-I", str(folder / "check.py"), *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_a_package_has_vectors_schema_defaults_and_a_readme(package: Path) -> None:
    index = json.loads((package / "index.json").read_text())
    assert (index["format"], index["version"]) == ("blockstep-vectors-package", 1)
    assert [file["needs"] for file in index["files"]] == [["adapters"], []]
    for file in index["files"]:
        vectors = read_vectors(package / file["path"])
        assert vectors.manifest.programs == file["programs"]
        assert sum(map(len, vectors.programs)) == file["events"]
    defaults = index["defaults"]["state"]
    state = v.RequestSnapshot("A", v.Status.WAITING, (), 0)
    assert defaults["num_cached_tokens"] == state.num_cached_tokens
    assert index["defaults"]["answer"]["stop_token_id"] is None
    schema = json.loads((package / "schema.json").read_text())
    assert {"asked", "answered", "$defs"} <= set(schema)
    named = set(re.findall(r"`([a-z]+\.(?:json|py))`", (package / "README.md").read_text()))
    assert named == {file.name for file in package.glob("*.*")} - {"README.md"}
    assert run(package).stdout == "2 files are as index.json says\n"


def test_the_checker_plays_the_vectors_on_an_engine(package: Path) -> None:
    result = run(package, sys.executable, str(SERVE), "spec")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r": conforms: \d+ events", result.stdout) != []
    assert "not tried" not in result.stdout


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ("decision", 1, "frame_id expected 0, seen 7"),
        ("no-json", 1, "the engine gave no answer: JSONDecodeError"),
        ("unknown-field", 1, "num_steps expected null, seen 1"),
        ("exit", 1, "the engine gave no answer"),
        ("banner", 2, "JSONDecodeError"),
    ],
)
def test_the_checker_finds_a_wrong_engine(package: Path, wrong: str, code: int, words: str) -> None:
    result = run(package, sys.executable, str(SERVE), "spec", wrong)
    assert (result.returncode, words in result.stdout + result.stderr) == (code, True), result


def test_a_changed_package_is_refused(package: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(package, tmp_path / "copy")
    file = folder / "vectors" / "whole.jsonl"
    file.write_text(file.read_text().replace('"max_tokens":', '"max_tokens": ', 1))
    result = run(folder)
    assert (result.returncode, result.stderr) == (2, "vectors/whole.jsonl: was changed\n")
    (folder / "index.json").write_text('{"format": "blockstep-vectors-package", "version": 2}')
    assert run(folder).returncode == 2
    assert run(package, "./no-such-engine").returncode == 2


def test_a_package_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = ("vectors", "pack", str(tmp_path / "file" / "x"), "--preset", "free")
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "cannot be written" in " ".join(result.output.split())
