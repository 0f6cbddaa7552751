"""A check that raises is a defect of Blockstep, unless the engine's answer is what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from blockstep.conformance.engine import (
    Deviation,
    EngineFactory,
    EngineTraits,
    Safety,
    SamePlans,
)
from blockstep.conformance.judge.checks import Asked, check_step
from blockstep.conformance.judge.properties import pool
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep import driver
from blockstep.conformance.lockstep.score import score_program
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.recorded.replay import replay
from blockstep.conformance.report.failure import render_first_failure
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.check import InProcess, check
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.options import CheckOptions, ExitCode, exit_code_of_all
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import SPARING

PROGRAM = Program(
    v.Config(8, 1), (v.Submit(v.Request("A", (0, 1), max_tokens=2)), v.Schedule(), Answer())
)
CHECK = pool.every_block_is_free_or_held
LEAK = "museum:leak-on-abort"
ABORTED = replace(PROGRAM, actions=(*PROGRAM.actions[:2], v.Abort(("A",))))


def fail(*_args: Any, **_named: Any) -> Any:
    raise KeyError("no such row")


def at_safety(make_engine: EngineFactory) -> EngineFactory:
    def make(config: v.Config) -> Any:
        return make_engine(config)

    make.traits = EngineTraits(equivalence=Safety())  # type: ignore[attr-defined]
    return make


@pytest.fixture
def broken_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A check of every state that raises at every state."""
    judge = CHECK.judge
    object.__setattr__(CHECK, "judge", fail)
    yield
    object.__setattr__(CHECK, "judge", judge)


def require_ours(findings: list[Finding], name: str) -> None:
    assert [it.kind for it in findings] == [FindingKind.HARNESS]
    assert name in findings[0].message
    assert "KeyError: 'no such row'" in findings[0].message
    assert "report it" in findings[0].message
    assert not findings[0].property_id
    assert "fail (test_raised_checks.py" in findings[0].frames[-1]


@pytest.mark.usefixtures("broken_check")
def test_a_check_that_raises_at_a_right_step_accuses_no_engine() -> None:
    _, findings = run_program(PROGRAM, at_safety(SpecEngine))
    require_ours(findings, f"the check {CHECK.sentence} raised")


@pytest.mark.usefixtures("broken_check")
def test_a_check_that_raises_hides_no_finding_about_the_engine() -> None:
    _, findings = run_program(ABORTED, load_engine(LEAK))
    assert {it.kind for it in findings} == {FindingKind.PROPERTY, FindingKind.DIVERGENCE}
    assert CHECK.sentence not in {it.sentence for it in findings}


@pytest.mark.usefixtures("broken_check")
def test_the_verdict_names_check_step_and_program() -> None:
    options = CheckOptions(preset="tiny", max_events=100)
    result = check(options, place=InProcess(lambda _options: at_safety(SpecEngine)))
    assert result.exit_code is ExitCode.HARNESS
    text = render_first_failure(result)
    assert text.startswith("blockstep check: BLOCKSTEP IS WRONG at event ")
    assert f"harness     checks_raise_nothing\n              the check {CHECK.sentence}" in text
    assert "\n  program " in text
    assert "submit" in text
    failure: Any = check_to_json(result)["failure"]
    assert failure["findings"][0]["kind"] == "harness"


@pytest.mark.parametrize("at", ["observation_differences", "situations", "snapshot_differences"])
def test_a_comparison_that_raises_is_ours(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    monkeypatch.setattr(driver, at, fail)
    _, findings = run_program(PROGRAM, SpecEngine)
    require_ours(findings, "while it judged the answer to submit")


@pytest.mark.parametrize("make_engine", [SpecEngine, at_safety(SpecEngine)])
def test_a_worker_that_raises_is_ours(
    monkeypatch: pytest.MonkeyPatch, make_engine: EngineFactory
) -> None:
    monkeypatch.setattr(Worker, "observe", fail)
    _, findings = run_program(PROGRAM, make_engine)
    require_ours(findings, "while it judged the answer to submit")


def test_what_raises_at_a_wrong_step_does_not_hide_that_the_engine_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(*args: Any, **named: Any) -> Any:
        return fail() if named["asked"] is Asked.ALL else check_step(*args, **named)

    monkeypatch.setattr(driver, "check_step", check)
    _, findings = run_program(ABORTED, load_engine(LEAK))
    assert [it.kind for it in findings] == [FindingKind.DIVERGENCE]


def test_a_resolver_that_raises_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.LockStep, "resolve", fail)
    _, findings = run_program(PROGRAM, SpecEngine)
    require_ours(findings, "in action submit,")


class Copy(SpecEngine):
    """Another copy, which does not fail."""


def fail_at(kind: type, error: Exception) -> Callable[[SpecEngine, v.Event], v.Observation]:
    right = SpecEngine.apply

    def apply(self: SpecEngine, event: v.Event) -> v.Observation:
        if isinstance(event, kind) and type(self) is SpecEngine:
            raise error
        return right(self, event)

    return apply


def test_a_specification_that_raises_is_wrong_whatever_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SpecEngine, "apply", fail_at(v.Schedule, KeyError("A")))
    _, findings = run_program(PROGRAM, Copy)
    assert [it.kind for it in findings] == [FindingKind.SPEC]
    assert findings[0].message == "the spec is wrong: KeyError: 'A'"
    _, findings = score_program(PROGRAM, Copy)
    assert [it.kind for it in findings] == [FindingKind.SPEC]


def test_a_score_accuses_no_engine_of_what_our_worker_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blockstep.conformance.lockstep.solo_run.SoloRun._record", fail)
    _, findings = score_program(PROGRAM, SpecEngine)
    require_ours(findings, "Blockstep, in action submit,")


def test_a_score_accuses_the_engine_of_an_ill_typed_answer() -> None:
    class Wrong(SpecEngine):
        def apply(self, event: v.Event) -> Any:
            seen = super().apply(event)
            return replace(seen, new=cast("Any", None)) if isinstance(seen, v.Plan) else seen

    _, findings = score_program(PROGRAM, Wrong)
    assert [it.kind for it in findings] == [FindingKind.FAULT]
    assert findings[0].sentence == "engine_answers_in_the_vocabulary"


def test_a_replay_accuses_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "observation_differences", fail)
    report = replay([v.Request("A", (0, 1), max_tokens=2)], v.Config(8, 1), Copy, with_spec=True)
    assert report.finding is not None
    assert report.finding.kind is FindingKind.HARNESS


@pytest.mark.usefixtures("broken_check")
def test_a_hunt_continues_after_a_check_that_raises() -> None:
    options = CheckOptions(preset="tiny", max_events=400)
    result = hunt(options, call_here(at_safety(SpecEngine)), scopes=("tiny",))
    assert [it.first.kind for it in result.defects] == [FindingKind.HARNESS]
    assert result.num_events >= 400
    assert result.defects[0].shrunk is not None


def test_what_raised_counts_if_the_engine_has_no_defect() -> None:
    found = {
        kind: Finding(kind, "", "name", "text")
        for kind in (FindingKind.HARNESS, FindingKind.FAULT, FindingKind.SPEC)
    }
    ours, fault, spec = found.values()
    assert exit_code_of_all([]) is ExitCode.CONFORMS
    assert exit_code_of_all([ours]) is ExitCode.HARNESS
    assert exit_code_of_all([ours, fault]) is ExitCode.FAILED
    assert exit_code_of_all([ours, fault, spec]) is ExitCode.SPEC


def fail_late(request: v.Request, _config: v.Config) -> v.Request:
    return fail() if request.request_id == "A" else request


DEVIATION = Deviation("dev", "", PROGRAM, ("engine_raises_nothing",), when=fail)


class Raises(SpecEngine):
    def apply(self, event: v.Event) -> v.Observation:
        raise RuntimeError


@pytest.mark.parametrize(
    ("base", "traits", "name"),
    [
        (SpecEngine, EngineTraits(equivalence=Safety(fit_request=fail_late)), "fit_request"),
        (SpecEngine, EngineTraits(equivalence=SamePlans(fit_request=fail_late)), "fit_request"),
        (Raises, EngineTraits(deviations=(DEVIATION,)), "when of deviation dev"),
        (Raises, EngineTraits(equivalence=Safety(), deviations=(DEVIATION,)), "when of deviation"),
        (type("Declines", (SpecEngine,), {"declines": fail}), EngineTraits(), "declines"),
    ],
)
def test_what_a_function_of_an_adapter_raises_is_a_fault(
    base: type, traits: EngineTraits, name: str
) -> None:
    make_engine: Any = type("Engine", (base,), {"traits": traits})
    _, (finding,) = run_program(PROGRAM, make_engine, SPARING)
    assert finding.kind is FindingKind.FAULT
    assert name in finding.message
    assert "of its adapter raised KeyError: 'no such row'" in finding.message
    assert "fail (test_raised_checks.py" in finding.frames[-1]


def test_what_declines_raises_is_a_fault_in_a_score() -> None:
    make_engine: Any = type("Declines", (SpecEngine,), {"declines": fail})
    _, (finding,) = score_program(PROGRAM, make_engine, SPARING)
    assert finding.kind is FindingKind.FAULT
    assert "declines of its adapter raised KeyError" in finding.message
