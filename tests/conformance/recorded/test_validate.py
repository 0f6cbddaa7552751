"""`validate`: a recorded run is checked at the equivalence of its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.recorded.episodes import write_episode
from blockstep.conformance.recorded.traces import TraceError, TraceStep, read_trace, write_trace
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config, Outputs, Plan

ENGINES = {
    "foreign_support.toys:PlainToy": "safety",
    "foreign_support.toys:AbortingToy": "safety",
    "foreign_support.hosts:AtSafety": "safety",
    "foreign_support.hosts:AtRenamed": "renamed",
    "foreign_support.hosts:AtPlan": "plan",
    "equivalent_engines:Simulator": "plan",
    "host": "exact",
}


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_recorded_from_a_right_engine_conforms(engine: str, tmp_path: Path) -> None:
    for episode in (1, 4):
        path, out = tmp_path / f"{episode}.jsonl", tmp_path / "out.json"
        write_episode(CheckOptions(engine, episode=episode), None, path)
        trace = read_trace(path)
        assert trace.equivalence == ENGINES[engine]
        assert ("equivalence" in path.read_text().split("\n")[0]) is (engine != "host")
        result = blockstep("validate", path, "--json", out)
        assert result.exit_code == 0, result.output
        assert result.output.startswith(f"conforms: {episode}.jsonl: {len(trace.steps)} recorded")
        plain = json.loads(out.read_text())
        assert (plain["equivalence"], plain["finding"]) == (ENGINES[engine], None)
        assert plain["left_out"] == {}


Bend: TypeAlias = Callable[[TraceStep], TraceStep]


def bend_outputs(step: TraceStep) -> TraceStep:
    """The first row delivers another token."""
    seen = step.observation
    assert isinstance(seen, Outputs)
    row = replace(seen.rows[0], new_token_ids=(7_777,))
    return step._replace(observation=replace(seen, rows=(row, *seen.rows[1:])))


def bend_plan(step: TraceStep) -> TraceStep:
    """The first new request skips a token."""
    seen = step.observation
    assert isinstance(seen, Plan)
    row = replace(seen.new[0], num_computed_tokens=seen.new[0].num_computed_tokens + 1)
    return step._replace(observation=replace(seen, new=(row, *seen.new[1:])))


def can_bend(bend: Bend, step: TraceStep) -> bool:
    match step.observation:
        case Outputs(rows=rows):
            return bend is bend_outputs and bool(rows)
        case Plan(new=new):
            return bend is bend_plan and bool(new)
    return False


@pytest.mark.parametrize("engine", ["foreign_support.toys:PlainToy", *list(ENGINES)[3:]])
@pytest.mark.parametrize("bend", [bend_outputs, bend_plan])
def test_a_changed_observation_is_found_at_its_step(
    engine: str, bend: Bend, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    write_episode(CheckOptions(engine, episode=1), None, path)
    trace = read_trace(path)
    number = next(index for index, step in enumerate(trace.steps) if can_bend(bend, step))
    steps = list(trace.steps)
    steps[number] = bend(steps[number])
    write_trace(path, trace.config, steps, trace.equivalence)
    result = blockstep("validate", path)
    assert result.exit_code == 1
    word = "VIOLATION" if ENGINES[engine] == "safety" else ""
    assert f"{word} at step {number + 1} of {len(steps)}" in result.output
    explained = blockstep("explain", path, "--at", number)
    assert explained.exit_code == 0
    label = "unfinished:" if ENGINES[engine] == "safety" else "evicted next:"
    assert label in explained.output


def test_an_empty_trace_gives_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_trace(path, Config(num_blocks=9), [])
    result = blockstep("validate", path)
    assert (result.exit_code, result.output[:10]) == (5, "NO VERDICT")


def test_an_unknown_equivalence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(TraceError, match="almost"):
        write_trace(path, Config(num_blocks=9), [], "almost")
    write_trace(path, Config(num_blocks=9), [], "plan")
    path.write_text(path.read_text().replace('"plan"', '"almost"'))
    with pytest.raises(TraceError, match="exact, renamed, plan, safety"):
        read_trace(path)


def test_a_trace_keeps_the_deviations_that_its_engine_declares(tmp_path: Path) -> None:
    path, out, num_excused = tmp_path / "run.jsonl", tmp_path / "out.json", 0
    for episode in range(8):
        engine = "foreign_support.toys:AnswersTwice"
        write_episode(CheckOptions(engine, episode=episode), None, path)
        trace = read_trace(path)
        result = blockstep("validate", path, "--json", out)
        assert result.exit_code == 0, result.output
        excused = json.loads(out.read_text())["excused"]
        assert bool(trace.excuses) == bool(excused) == ("declared  late_reply" in result.output)
        num_excused += sum(excused.values())
        if excused:  # nothing else is excused
            steps = [
                bend_outputs(one) if can_bend(bend_outputs, one) else one for one in trace.steps
            ]
            write_trace(path, trace.config, steps, trace.equivalence, trace.excuses)
            assert blockstep("validate", path).exit_code == 1
    assert num_excused > 0
