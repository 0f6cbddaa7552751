"""`explore` and `vectors` on engines that are not exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign_support.toys import AbortingToy, Life
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import Capability
from blockstep.impl.host import HostEngine

TOYS = ("foreign_support.toys:PlainToy", "foreign_support.toys:AbortingToy")


class FreesTwice(AbortingToy):
    """An abort in flight frees a block twice."""

    def end(self, life: Life) -> None:
        super().end(life)
        if self.is_in_flight and life in self.last:
            self.free += life.blocks[:1]


class Waits(AbortingToy):
    """A request that arrives while another waits is never admitted."""

    def plan(self):  # type: ignore[no-untyped-def]
        waiting, self.waiting = self.waiting, self.waiting[:1]
        plan = super().plan()
        self.waiting += waiting[1:] if len(waiting) == 1 else []
        return plan


class NoAborts(HostEngine):
    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.ABORT}


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def explore(engine: str, *worlds: str, out: Path | None = None) -> Result:
    asked = [part for world in worlds for part in ("--preset", world)]
    return blockstep("explore", "--engine", engine, *asked, *(("--json", out) if out else ()))


def test_a_walk_visits_the_states_of_an_engine_at_safety(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = explore(TOYS[1], "loop", "pair", "equals", out=out)
    assert result.exit_code == 0, result.output
    assert f"equals: not walked: {TOYS[1]} lacks priority" in result.output
    loop, pair = json.loads(out.read_text())
    assert loop["counts"] == {"states": 3, "transitions": 4, "refused": 1, "depth": 2}
    assert pair["counts"]["states"] == 99
    assert {one["equivalence"] for one in (loop, pair)} == {"safety"}
    assert all(one["is_complete"] for one in (loop, pair))


def test_all_short_programs_are_tried_on_an_engine_without_states(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = explore(TOYS[0], "loop", out=out)
    assert result.exit_code == 0, result.output
    assert "shows no state, so these are all its programs" in result.output
    (loop,) = json.loads(out.read_text())
    assert 100 < loop["counts"]["states"] <= 500
    assert not loop["is_complete"]


def test_a_bug_of_aborts_in_flight_is_found_by_the_shortest_program() -> None:
    result = explore(f"{__name__}:FreesTwice", "pair")
    assert result.exit_code == 1
    assert "found after 3 events" in result.output
    assert [line.split()[1] for line in result.output.splitlines()[-3:]] == [
        *("submit", "schedule", "abort")
    ]


def test_a_request_that_never_finishes_is_found() -> None:
    result = explore(f"{__name__}:Waits", "pair")
    assert result.exit_code == 4
    assert "P10" in result.output


@pytest.mark.parametrize(("engine", "name"), [("AtRenamed", "renamed"), ("AtPlan", "plan")])
def test_an_engine_at_renamed_or_plan_agrees_in_every_state(
    engine: str, name: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = explore(f"foreign_support.hosts:{engine}", "loop", "equals", out=out)
    assert result.exit_code == 0, result.output
    assert f"agrees on every event in every state (equivalence {name})" in result.output
    for world in json.loads(out.read_text()):
        assert world["counts"] == world["expected"]


def test_events_that_an_engine_lacks_are_left_out() -> None:
    result = explore(f"{__name__}:NoAborts", "equals")
    assert result.exit_code == 0, result.output
    assert "events left out that" in result.output


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("vectors")
    for world in ("loop", "pair"):
        done = blockstep("vectors", "fill", folder / f"{world}.jsonl", "--preset", world,
                         "--max-states", 200)  # fmt: skip
        assert done.exit_code == 0, done.output
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("engine", "equivalence"),
    [
        (TOYS[0], "safety"),
        (TOYS[1], "safety"),
        ("foreign_support.hosts:AtSafety", "safety"),
        ("foreign_support.hosts:AtRenamed", "renamed"),
        ("foreign_support.hosts:AtPlan", "plan"),
    ],
)
def test_vectors_conform_at_every_equivalence(
    engine: str, equivalence: str, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = blockstep("vectors", "consume", *files, "--engine", engine, "--json", out)
    assert result.exit_code == 0, result.output
    assert f"conforms (equivalence {equivalence})" in result.output
    for record in json.loads(out.read_text()):
        assert (record["conforms"], record["equivalence"]) == (True, equivalence)
        assert record["num_programs"] > 1
        assert record["num_events"] > 5
        assert ("abort" in record["skipped"]) is (engine == TOYS[0] and "pair" in record["path"])


def test_vectors_find_a_bug_of_an_engine_at_safety(files: list[Path]) -> None:
    result = blockstep("vectors", "consume", *files, "--engine", f"{__name__}:FreesTwice")
    assert result.exit_code == 1
    assert "VIOLATION in program" in result.output


def test_a_declared_deviation_is_counted_and_no_finding(files: list[Path], tmp_path: Path) -> None:
    engine, out = "foreign_support.toys:AnswersTwice", tmp_path / "out.json"
    walked = explore(engine, "pair", out=out)
    assert walked.exit_code == 0, walked.output
    assert json.loads(out.read_text())[0]["excused"] == ["late_reply"]
    assert "what its adapter declares: late_reply" in walked.output
    played = blockstep("vectors", "consume", *files, "--engine", engine, "--json", out)
    assert played.exit_code == 0, played.output
    assert any(record["excused"].get("late_reply") for record in json.loads(out.read_text()))
