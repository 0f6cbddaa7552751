"""Bisect: the first commit at which a program fails, in a repository made for the purpose."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.findings import Finding, FindingKind, violated
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.program_file import read_program, write_program
from blockstep.conformance.search.bisect import Clone, Mark, Question
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config, Request, Schedule, Submit

GOOD = """
from blockstep.conformance.protocol.registry import SpecEngine


class Engine(SpecEngine):
    pass
"""
BAD = """
from dataclasses import replace

from blockstep.conformance.protocol.registry import SpecEngine


class Engine(SpecEngine):
    def apply(self, event):
        seen = super().apply(event)
        return replace(seen, rows=()) if type(event).__name__ == "Commit" else seen
"""
# As long as BAD, and committed in the same second: its bytecode would do for it.
OTHERWISE = BAD.replace('"Commit"', '"Submit"').replace("rows=()", "x   =()")
BROKEN = "import there_is_no_such_module\n"
PROGRAM = Program(
    Config(num_blocks=4, block_size=2, max_model_len=6),
    (Submit(Request("A", (1, 2), 2)), Schedule(), Answer()),
)


def git(repository: Path, *arguments: str) -> str:
    env = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    done = subprocess.run(
        command, cwd=repository, env=env, check=True, capture_output=True, text=True
    )
    return done.stdout


def make_repository(folder: Path, *texts: str) -> list[str]:
    """A repository with one commit for each text of its engine; returns the commits."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    commits = []
    for number, text in enumerate(texts):
        (folder / "bisected_engine.py").write_text(text)
        (folder / "number").write_text(str(number))
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"Commit {number}")
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    return commits


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bisect", *arguments])
    return result.exit_code, result.output


def look_at(repository: Path) -> tuple[str, ...]:
    """Everything that a bisection could have changed."""
    names = sorted(str(path) for path in repository.rglob("*"))
    looks = (("status", "--porcelain"), ("worktree", "list"), ("for-each-ref",))
    return (*(git(repository, *look) for look in looks), *names)


def test_the_first_bad_commit_is_found(tmp_path: Path) -> None:
    repository = tmp_path / "engine"
    texts = (GOOD, GOOD, BROKEN, OTHERWISE, BAD, BAD)
    commits = make_repository(repository, *texts)
    (repository / "bisected_engine.py").write_text("work in progress (")
    before = look_at(repository)
    saved, out = tmp_path / "program.json", tmp_path / "result.json"
    code, text = run(
        *(commits[0], "HEAD", "--engine", "bisected_engine:Engine", "--path", str(repository)),
        *("--preset", "tiny", "--budget", "200", "--jobs", "1"),
        *("--save", str(saved), "--json", str(out)),
    )
    assert code == 5, text  # the two before the first bad one cannot be tried
    result = json.loads(out.read_text())
    assert [suspect["commit"] for suspect in result["suspects"]] == [*commits[2:4], commits[4]]
    marks = {step["commit"]: (step["mark"], step["why"]) for step in result["steps"]}
    assert marks[commits[2]][0] == "skip"
    assert "no_such_module" in marks[commits[2]][1]
    assert marks[commits[3]] == ("skip", "it fails otherwise: fault engine_raises_nothing")
    assert result["finding"]["property"] == "P13"
    assert "ONE OF 3 COMMITS" in text
    assert look_at(repository) == before
    assert read_program(saved).actions


def test_a_given_program_is_bisected_in_a_history_with_a_merge(tmp_path: Path) -> None:
    repository = tmp_path / "engine"
    commits = make_repository(repository, GOOD, GOOD, BAD)
    git(repository, "checkout", "--quiet", "-b", "side", commits[0])
    (repository / "aside").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "Aside")
    git(repository, "merge", "--quiet", "-m", "Both", commits[2])
    program = tmp_path / "program.json"
    program.write_text(write_program(PROGRAM))
    code, text = run(
        *(commits[0], "side", "--engine", "bisected_engine:Engine", "--path", str(repository)),
        *("--program", str(program)),
    )
    assert code == 0, text
    assert "FIRST BAD COMMIT" in text
    assert commits[2] in text
    assert "Commit 2" in text
    command = f"blockstep bisect --engine bisected_engine:Engine --path {repository}"
    again = f"{command} --program {program} {commits[0][:10]}"
    side = git(repository, "rev-parse", "side")[:10]
    assert text.splitlines()[-1].split() == ["reproduce", *again.split(), side]


def test_a_bad_first_commit_or_a_good_last_one_is_rejected(tmp_path: Path) -> None:
    repository = tmp_path / "engine"
    commits = make_repository(repository, BAD, BAD, GOOD)
    program = tmp_path / "program.json"
    program.write_text(write_program(PROGRAM))
    given = ("--engine", "bisected_engine:Engine", "--path", str(repository))
    code, text = run(commits[0], commits[1], *given, "--program", str(program))
    assert (code, "it is bad already: P13" in text) == (2, True), text
    code, text = run(commits[1], commits[2], *given, "--program", str(program))
    assert (code, "nothing is wrong there" in text) == (2, True), text


def test_unknown_commits_and_commits_in_wrong_order_are_rejected(tmp_path: Path) -> None:
    first, last = make_repository(tmp_path / "engine", GOOD, GOOD)
    given = ("--engine", "bisected_engine:Engine", "--path", str(tmp_path / "engine"))
    for names, words in (
        ((first, "nowhere"), "commit 'nowhere': must be a commit of"),
        (("--", "-x", last), "commit '-x': must be a commit of"),
        ((last, first), "must come before the bad one"),
        ((first, first), "must come before the bad one"),
    ):
        code, text = run(*given, *names)
        assert (code, words in text) == (2, True), text
    code, text = run(first, last, "--engine", "host", "--path", str(tmp_path))
    assert (code, "is one of ours" in text) == (2, True), text
    with pytest.raises(UsageError, match="git rev-parse says: fatal: not a git repository"):
        Clone(tmp_path, tmp_path / "clone")


def test_a_commit_is_bad_only_if_the_same_check_fails() -> None:
    looked_for = violated("P1", "every_block_is_free_or_held", "1 and 2")
    question, options = Question(PROGRAM, looked_for), CheckOptions()

    def mark(first: Finding | None, **more: object) -> Mark:
        result = CheckResult(options, first=first, num_events=1)
        for name, value in more.items():
            setattr(result, name, value)
        return question.mark(result)[0]

    assert mark(None) is Mark.GOOD
    assert mark(None, num_events=0) is Mark.SKIP
    assert mark(violated("P1", "every_block_is_free_or_held", "3 and 4")) is Mark.BAD
    assert mark(violated("P1", "pool_keeps_its_size", "1 and 2")) is Mark.SKIP
    lost = Finding(FindingKind.FAULT, "", "engine_returns_from_every_call", "hangs")
    assert mark(lost, loss=Loss("hangs")) is Mark.SKIP
