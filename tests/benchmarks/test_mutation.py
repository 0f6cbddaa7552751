"""Mutation testing: mutants are drawn, run against trials, noticed or listed as survivors."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutation.__main__ import main
from benchmarks.mutation.campaign import Campaign, Plan, draw, get_score, to_json
from benchmarks.mutation.page import render_page
from benchmarks.mutation.processes import Journal, make_key, run_forked
from benchmarks.mutation.targets import (
    TARGETS,
    Mutant,
    Source,
    find_mutants,
    list_test_files,
    read_sources,
)
from benchmarks.mutation.trials import Reach, Trial, choose, find_bug, play, play_mutant

from blockstep.conformance.prove.changes import KINDS, find_changes

HOUSE = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are played in forked processes"),
]


def make_mutants(*functions: str) -> list[Mutant]:
    text = "\n\n".join(f"def {name}(a):\n    return a + 1" for name in functions)
    source = Source("spec/module.py", Path("module.py"), f"{text}\n")
    return find_mutants([source])


# Modules, mutants and trials.


@pytest.mark.parametrize("name", TARGETS)
def test_each_target_has_modules_mutants_and_tests(name: str) -> None:
    target = TARGETS[name]
    sources = read_sources(target)
    mutants = find_mutants(sources[:8])
    assert {one.change.kind for one in mutants} == {*KINDS}
    assert len({one.title for one in mutants}) == len(mutants)
    assert not [one for one in sources if one.module.startswith(tuple(target.left_out))]
    for place in target.left_out:
        assert (HOUSE / target.folder / place).exists(), place
    files = list_test_files(target)
    assert files
    assert all((HOUSE / file).is_file() for file in files)


def test_an_unknown_module_is_rejected() -> None:
    with pytest.raises(LookupError, match=r"host/blocks\.py"):
        read_sources(TARGETS["host"], ["host/tool.py"])


def test_a_sample_keeps_the_mutants_that_still_exist() -> None:
    mutants = make_mutants("f", "g", "h", "i")
    drawn = draw(mutants, 4, seed=3)
    assert drawn == draw(mutants, 4, seed=3)
    assert draw(mutants, None, seed=3) == mutants
    gone = [one for one in mutants if one is not drawn[0]]
    assert set(drawn[1:]) <= set(draw(gone, 4, seed=3))
    assert any(draw(mutants, 4, seed) != drawn for seed in range(3))


def test_a_mutant_runs_the_trials_that_execute_it_quick_ones_first() -> None:
    mutant = make_mutants("f")[0]
    line = frozenset(mutant.change.lines)
    module = mutant.source.module
    trials = {
        name: Trial(name, seconds, {module: lines})
        for name, seconds, lines in [
            ("slow", 2.0, line),
            ("quick", 0.1, line),
            ("elsewhere", 0.1, frozenset({7})),
            ("beyond the time", 30.0, line),
        ]
    }
    assert [trial.name for trial in choose(mutant, trials)] == ["quick", "slow"]


def halve(number: int) -> int:
    if number % 2:
        return -1
    return number // 2


def test_executed_lines_are_recorded() -> None:
    first = halve.__code__.co_firstlineno
    with Reach([Path(__file__)]) as reach:
        halve(4)
        halve(2)
    assert reach.lines[__file__] == {first + 1, first + 3}
    assert sys.gettrace() is None


def test_a_mutant_is_noticed_by_the_first_trial_with_another_result() -> None:
    def find(function: str, kind: str) -> Mutant:
        (source,) = read_sources(TARGETS["spec"], ["spec/core/block_pool.py"])
        changes = [one for one in find_changes(source.text) if one.function == function]
        return Mutant(source, next(one for one in changes if one.kind == kind))

    def loop() -> bool:
        while True:
            pass

    runs: dict[str, Callable[[], bool]] = {
        "play": lambda: play(("host", "tiny", 300)),
        "right": lambda: True,
        "error": lambda: bool(int("no number")),
    }
    trials = [Trial(name, 0.1, {}) for name in runs]
    mutant = find("free_blocks", "constant")
    works = [
        lambda: play_mutant(mutant, trials, runs),
        lambda: play_mutant(mutant, trials[1:2], runs),
        lambda: play_mutant(mutant, trials[1:], runs),
    ]
    assert runs["play"]()  # machine code of the host is made here, not in a mutant's time
    results: Any = dict(run_forked(works, 1, 120))
    assert [results[number]["killed_by"] for number in range(3)] == ["play", "", "error"]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_seeded_bug_is_found_at_safety(is_hidden: bool) -> None:
    assert find_bug("full-hit", is_hidden)


# Processes.


def test_a_process_that_ends_without_a_result_is_recognized() -> None:
    def leave() -> dict[str, Any]:
        os._exit(3)

    def end() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    works: list[Any] = [lambda: {"number": 0}, leave, end]
    assert dict(run_forked(works, 2, 60)) == {0: {"number": 0}, 1: None, 2: signal.SIGTERM}


def test_a_journal_keeps_results_between_runs(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    Journal(file).note(make_key("text", 1), {"killed_by": "x"})
    again = Journal(file)
    assert again.known == {make_key("text", 1): {"killed_by": "x"}}
    assert make_key("text", 2) not in again.known


# A sample of each commit, and the page.

RESULTS = HOUSE / "benchmarks" / "results"


def read_last() -> dict[str, dict[str, Any]]:
    """Return, by target, the last results that ran all mutants of some modules."""
    files = [max(RESULTS.glob(f"*-mutation-{target}.json"), default=None) for target in TARGETS]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file is not None]
    return {one["target"]: one for one in results if one["drawn"] == one["found"]}


LAST = read_last()


def list_survivors(results: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["function"], one["change"]) for one in results["survivors"]}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("target", LAST)
def test_a_sample_drawn_by_the_commit_is_noticed(target: str, tmp_path: Path) -> None:
    last, file = LAST[target], tmp_path / "results.json"
    commit = subprocess.run(
        ("git", "-C", str(HOUSE), "rev-parse", "HEAD"), capture_output=True, text=True, check=False
    ).stdout
    seed = int(sha256(commit.encode()).hexdigest()[:6], 16)
    words = shlex.split(last["command"])[3:]
    command = [sys.executable, "-m", "benchmarks.mutation", *words]
    command += ["--sample", "4", "--seed", str(seed), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HOUSE, check=False)
    message = f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    assert f"seed {seed}" in done.stdout, message
    assert file.exists(), message
    assert list_survivors(json.loads(file.read_text())) <= list_survivors(last), message


def test_modules_sampled_for_commits_have_few_survivors() -> None:
    assert "spec" in LAST
    for target, results in LAST.items():
        modules = {source.module for source in read_sources(TARGETS[target])}
        assert {*results["modules"]} <= modules, "a module has moved: play its mutants again"
        assert results["not_made"] < results["found"] / 4
        assert get_score(results) >= 0.8


def make_results() -> dict[str, Any]:
    mutants = make_mutants("f", "g")
    campaign = Campaign(Plan("spec", seed=5), mutants, 90, [("spec/module.py", 3, "it is equal")])
    campaign.results = {
        one.title: {"killed_by": "test a/test_b.py::test_c", "num_trials": 2} for one in mutants
    }
    campaign.results[mutants[0].title] = {"killed_by": "", "num_trials": 7}
    campaign.results[mutants[1].title] = {"killed_by": "not made", "num_trials": 2}
    return to_json(campaign, "a command")


def test_results_count_mutants_and_name_each_survivor() -> None:
    results = make_results()
    assert (results["found"], results["drawn"], results["not_made"]) == (90, 4, 1)
    assert results["modules"] == {"spec/module.py": [3, 2]}
    assert results["killed_by"] == {"test_b.py": 2}
    assert results["survivors"] == [
        {
            "module": "spec/module.py",
            "line": 2,
            "function": "f",
            "change": "return {a + 1 => (a - 1)}",
            "trials": 7,
        }
    ]
    assert get_score(results) == pytest.approx(2 / 3)


def test_the_page_has_scores_survivors_and_reasons() -> None:
    page = render_page([make_results()])
    assert "| the specification | 90 | 3 | 66.7% |" in page
    assert "| `f` of `spec/module.py` | `` return {a + 1 => (a - 1)} `` | 7 |" in page
    assert "| it is equal | 1 |" in page


def test_a_module_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", "--only", "spec/no.py"]) == 2
    assert "spec/core/block_pool.py" in capsys.readouterr().err


@pytest.mark.parametrize("trials", ["test tests/spec/nothing.py", "law nothing", "nothing"])
def test_a_trial_that_does_not_exist_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], trials: str
) -> None:
    given = ["spec", "--only", "spec/core/slots.py", "--sample", "1", "--trials", "law slots"]
    assert main([*given, "--trials", trials]) == 2
    assert f"--trials {trials!r}: no trial begins so" in capsys.readouterr().err
