"""`blockstep prove`: every law is confirmed, its mutants are refuted, and verdicts are right."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from blockstep.conformance.command.prove import prove_command
from blockstep.conformance.prove import laws as all_laws
from blockstep.conformance.prove import runner
from blockstep.conformance.prove.counterexamples import Outcome, find_smallest, try_law
from blockstep.conformance.prove.law import Law, LawModule
from blockstep.conformance.prove.laws import LAWS
from blockstep.conformance.prove.mutants import try_mutants
from blockstep.conformance.prove.runner import (
    MutantProof,
    Proof,
    Verdict,
    prove_law,
    prove_laws,
)
from blockstep.conformance.prove.table import laws_page

HOUSE = Path(__file__).resolve().parents[3]
NEEDS = "needs the extra [symbolic]: python -m pip install -e '.[symbolic]' (make test does it)"
solver = pytest.mark.skipif(importlib.util.find_spec("crosshair") is None, reason=NEEDS)


def load_toys() -> ModuleType:
    """The toy laws, loaded so that pytest leaves their asserts alone."""
    file = Path(__file__).with_name("toy_laws.py")
    spec = importlib.util.spec_from_file_location("toy_laws", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_laws"] = module
    spec.loader.exec_module(module)
    return module


toys = load_toys()
TOYS: dict[str, Law] = {law.name.removeprefix("toys."): law for law in toys.ROOM.laws}


# The laws.


LAW_SECONDS_MAX = 60.0
"""CPU time in which a law must be confirmed: one that takes longer is split, or was made slow."""


@pytest.mark.sampled(one_in=8)
@solver
@pytest.mark.parametrize("name", [law.name for law in LAWS.values() if not law.is_slow])
def test_a_law_is_confirmed_and_its_mutants_are_refuted(name: str) -> None:
    assert prove_law(LAWS[name], LAW_SECONDS_MAX).problem == ""


@pytest.mark.soak
@solver
@pytest.mark.parametrize("name", [law.name for law in LAWS.values() if law.is_slow])
def test_a_slow_law_is_confirmed_and_its_mutants_are_refuted(name: str) -> None:
    assert prove_law(LAWS[name], LAW_SECONDS_MAX).problem == ""


def test_each_law_has_a_property_and_a_witness() -> None:
    for name, law in LAWS.items():
        assert law.property_ids, name
        assert all(re.fullmatch(r"P\d+", one) for one in law.property_ids), name
        assert law.check.__doc__, name
        assert runner.get_shape_problem(law.check) == "", name
        assert try_law(law.check, law.witness) is Outcome.HOLDS, name


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("name", [law.name for law in LAWS.values() if not law.twins])
def test_a_law_is_broken_by_a_mutant_of_a_function_it_calls(name: str) -> None:
    assert try_mutants(LAWS[name]).refuted


def test_laws_are_many_and_their_names_are_unique() -> None:
    laws = [law for room in all_laws.ROOMS for law in room.laws]
    assert len(laws) == len(LAWS) >= 60


def test_every_check_function_of_a_module_is_a_law() -> None:
    for room in all_laws.ROOMS:
        module = sys.modules[room.laws[0].check.__module__]
        checks = [name for name in vars(module) if name.startswith("check_")]
        assert [law.check.__name__ for law in room.laws] == checks


def test_a_mutant_takes_only_parameters_of_the_function_it_replaces() -> None:
    for twin in (twin for law in LAWS.values() for twin in law.twins):
        right: Any = twin.right
        wrong: Any = twin.wrong
        given = {"right", *inspect.signature(right).parameters}
        assert given.issuperset(inspect.signature(wrong).parameters), twin.name


def test_a_planted_mutant_is_undone() -> None:
    law = TOYS["confirmed"]
    (twin,) = law.twins
    with twin.planted():
        assert try_law(law.check, (3,)) is Outcome.FAILS
    assert try_law(law.check, (3,)) is Outcome.HOLDS


# The verdicts.


def prove_toy(name: str, **changes: Any) -> Proof:
    seconds = 0.5 if name == "unknown" else 3.0  # an unknown law takes all the time it gets
    return prove_law(replace(TOYS[name], **changes), seconds_max=seconds)


@solver
@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("confirmed", Verdict.CONFIRMED, ""),
        ("refuted", Verdict.REFUTED, "broken by number=1"),
        ("vacuous", Verdict.VACUOUS, "witness number=1"),
        ("unknown", Verdict.UNKNOWN, ""),
        ("spurious", Verdict.SPURIOUS, "does not fail in Python"),
        ("broken_all_leading", Verdict.BROKEN, "no guarantee"),
        ("broken_nothing_leading", Verdict.BROKEN, "start with its assumptions"),
        ("broken_early_return", Verdict.BROKEN, "return before its end"),
        ("broken_with_a_result", Verdict.BROKEN, "no guarantee"),
        ("broken_engine", Verdict.BROKEN, "CrossHair failed"),
    ],
)
def test_each_verdict_is_given_to_a_law_of_its_kind(
    name: str, verdict: Verdict, words: str
) -> None:
    answer = prove_toy(name).answer
    assert answer.verdict is verdict
    assert words in answer.detail


def test_a_law_that_its_witness_breaks_is_refuted_by_it() -> None:
    assert prove_toy("refuted", witness=(3,)).problem == "REFUTED: broken by number=3"


@solver
def test_only_a_confirmed_law_with_refuted_mutants_has_no_problem() -> None:
    assert prove_toy("confirmed").problem == ""
    alone = prove_toy("confirmed", twins=())
    assert "no mutant was tried" in alone.problem
    assert "no mutant breaks it" in replace(alone, mutants=MutantProof(num_tried=8)).problem
    assert "CONFIRMED" in prove_toy("confirmed", twins=(toys.half_is_half,)).problem
    no_run = prove_toy("confirmed", twins=(toys.half_is_shown_in_an_error,))
    assert "BROKEN: CrossHair failed" in no_run.problem
    assert prove_toy("refuted").problem.startswith("REFUTED")


@solver
def test_a_mutant_that_raises_inside_the_function_is_refuted() -> None:
    twins = (toys.half_is_asserted_to_be_small, toys.half_is_not_to_be_had)
    proof = prove_toy("confirmed", twins=twins)
    assert proof.problem == ""
    assert [twin.answer.arguments for twin in proof.twins] == [(10,), (0,)]


def test_a_law_in_a_module_that_pytest_rewrites_is_broken() -> None:
    room = LawModule("here")

    @room.law("P1", (1,))
    def check_here(number: int) -> None:
        assert number > 0
        more = number + 1
        assert more > number

    proof = prove_law(room.laws[0])
    assert proof.answer.verdict is Verdict.BROKEN
    assert "rewritten" in proof.answer.detail


@solver
def test_a_law_that_is_asked_twice_is_an_error() -> None:
    with pytest.raises(runner.UnansweredError):
        prove_laws([TOYS["confirmed"], TOYS["confirmed"]])


@solver
def test_several_processes_prove_all_laws_in_order() -> None:
    laws = [law for law in LAWS.values() if law.name.startswith("slots.no_")]
    assert len(laws) >= 2
    progress: list[float] = []
    proofs = prove_laws(laws, jobs=2, on_progress=lambda done, _: progress.append(done))
    assert [proof.name for proof in proofs] == [law.name for law in laws]
    assert all(proof.problem == "" for proof in proofs)
    assert progress[-1] == 1.0


@solver
def test_laws_are_broken_if_their_process_fails() -> None:
    # The toy laws are known in this process only.
    proofs = prove_laws([TOYS["confirmed"], TOYS["refuted"]], jobs=2)
    assert {proof.answer.verdict for proof in proofs} == {Verdict.BROKEN}
    assert all("process failed" in proof.answer.detail for proof in proofs)


# Small counterexamples.


def test_smallest_arguments_are_found() -> None:
    assert find_smallest(TOYS["refuted"].check, (1235,)) == (1,)


def test_dependent_numbers_are_lowered_together() -> None:
    """Lowering one number at a time would take two billion steps."""

    def check(small: int, large: int) -> None:
        assert 0 <= small < large
        gap = large - small
        assert gap != 2

    assert find_smallest(check, (2_147_483_643, 2_147_483_645)) == (0, 2)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("AssertionError:  when calling check_unknown(1, 2)", (1, 2)),
        ("when calling check_unknown(1, whole=-2) (which returns True)", (1, -2)),
        ("when calling check_unknown(1, int())", None),
        ("when calling check_unknown(1)", None),
        ("when calling (", None),
        ("it went wrong", None),
    ],
)
def test_arguments_are_read_from_a_counterexample(
    message: str, arguments: tuple[int, ...] | None
) -> None:
    assert runner.parse_arguments(TOYS["unknown"].check, message) == arguments


# The command.


def prove(*args: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(prove_command)
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


@solver
def test_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file, page = tmp_path / "laws.json", tmp_path / "laws.md"
    result = prove("--law", "allocation.longest_hit", "--json", file, "--markdown", page)
    assert result.exit_code == 0
    summary = "1 of 1 laws confirmed, 1 of 1 mistakes and 3 of 3 mutants refuted"
    assert summary in result.stdout
    assert "#30320" in result.stdout
    written = json.loads(file.read_text())
    head = (written["format"], written["version"], written["exit_code"])
    assert head == ("blockstep-prove", 1, 0)
    (law,) = written["laws"]
    assert [twin["broken_by"] for twin in law["twins"]] == [[1, 1]]
    assert (law["mutants"]["tried"], law["mutants"]["refuted"]) == (3, 3)
    assert law["mutants"]["first"]["name"].startswith("`compute_max_hit_blocks`: return ")
    row = "| full hit leaves nothing to compute | #30320 (hits of a connector) |"
    assert row in page.read_text()


@solver
def test_json_goes_to_stdout_alone() -> None:
    result = prove("--law", "slots.no_slot", "--json", "-", "--jobs", "1")
    assert json.loads(result.stdout)["laws"][0]["verdict"] == "CONFIRMED"


@solver
def test_command_fails_when_a_law_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_laws, "LAWS", {"toys.refuted": TOYS["refuted"]})
    result = prove("--jobs", "1")
    assert result.exit_code == 1
    assert "toys.refuted: REFUTED: broken by number=1" in result.stderr


@solver
def test_an_unanswered_law_is_a_fault_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_proofs", lambda laws, jobs, is_apart: iter(()))
    assert prove("--law", "slots.no_slot").exit_code == 5


def test_missing_solver_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    result = prove()
    assert result.exit_code == 2
    assert "pip install 'blockstep[symbolic]'" in result.stderr


def test_tests_run_with_the_pinned_solvers() -> None:
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())
    pinned = project["project"]["optional-dependencies"]["symbolic"]
    assert all("==" in line for line in pinned)
    assert all(line in project["dependency-groups"]["test"] for line in pinned)


def test_page_in_the_docs_has_every_law() -> None:
    kept = max((HOUSE / "benchmarks" / "results").glob("*-prove.json"))
    page = laws_page(json.loads(kept.read_text()), LAWS)
    listed = re.findall(r"^\| \*\*(.*?)\.\*\*", page, flags=re.MULTILINE)
    assert listed == [law.sentence for law in LAWS.values()]
