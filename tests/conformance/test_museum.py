"""The museum: what it shows, and that a survivor is not passed over in silence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance import museum
from blockstep.conformance.command.main import app
from blockstep.conformance.judge.properties import PROPERTIES
from blockstep.conformance.museum import EXHIBITS, Exhibit, build
from blockstep.conformance.museum.exhibit import Defect, Page, collect
from blockstep.conformance.museum.trial import (
    DIVERGENCE,
    SURVIVED,
    Fall,
    Trial,
    Tried,
    json_of,
    museum_page,
    name_of,
    row_of,
    run_trial,
)
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.spec.vocabulary import Config

NAMED = {entry.id for entry in PROPERTIES} | {"P10"}
"""What a finding may name. P10 is about whole runs: the driver speaks of it."""
QUICK = ("leak-on-abort", "forward-frees", "row-of-victim-stays")
IDLE = Exhibit("nothing-is-wrong", "nothing", "nowhere", ("P1",), Defect)


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


@pytest.fixture
def with_survivor(monkeypatch: pytest.MonkeyPatch) -> str:
    """An exhibit that plants nothing. It is known in this process only, so it needs one job."""
    exhibits = {**EXHIBITS, IDLE.name: IDLE}
    monkeypatch.setattr(museum, "EXHIBITS", exhibits)
    monkeypatch.setattr("blockstep.conformance.command.museum.EXHIBITS", exhibits)
    return IDLE.name


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_says_where_it_is_from_and_what_kills_it(name: str) -> None:
    entry = EXHIBITS[name]
    assert entry.name == name
    assert entry.title
    assert re.search(r"#\d+|vLLM|rule|by example, section", entry.upstream), entry.upstream
    assert entry.properties
    assert set(entry.properties) <= NAMED
    assert len(set(entry.properties)) == len(entry.properties)
    assert entry.defect.__doc__
    assert "\n" not in entry.defect.__doc__.strip()


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_can_be_built_and_runs(name: str) -> None:
    config = Config(num_blocks=8)
    engine = build(name)(config)
    assert engine.snapshot() is not None
    kinds = {type(engine), *map(type, vars(engine).values())}
    assert any(EXHIBITS[name].defect in kind.__mro__ for kind in kinds)


def test_titles_differ_and_wrong_fixes_are_of_something_else() -> None:
    assert len({entry.title for entry in EXHIBITS.values()}) == len(EXHIBITS)
    fixes = [entry for entry in EXHIBITS.values() if entry.wrong_fix_of]
    assert fixes
    for entry in fixes:
        assert not EXHIBITS[entry.wrong_fix_of].wrong_fix_of
        assert entry.wrong_fix_of != entry.name


def test_a_name_is_given_once() -> None:
    page = Page()
    page.exhibits += [IDLE, IDLE]
    with pytest.raises(ValueError, match="the name is taken"):
        collect([page])


def test_a_wrong_fix_is_of_an_exhibit() -> None:
    page = Page()
    page.exhibit("a title", "#1", "P1", wrong_fix_of="nothing")(Defect)
    with pytest.raises(ValueError, match="no 'nothing' to fix"):
        collect([page])


def test_quick_ones_are_killed_and_told_in_every_form(tmp_path: Path) -> None:
    told, page = tmp_path / "museum.json", tmp_path / "museum.md"
    options = ("--seed", 0, "--seed", 1, "--budget", 30_000, "--jobs", 1)
    result = blockstep("museum", "run", *QUICK, *options, "--json", told, "--markdown", page)
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in QUICK)
    assert "6 of 6 hunts killed" in result.output
    rows = json.loads(told.read_text())
    assert [row["exhibit"] for row in rows] == list(QUICK)
    assert [fall["seed"] for fall in rows[0]["seeds"]] == [0, 1]
    assert rows[0]["seeds"][0]["killed by"].startswith("P1 ")
    assert not any(row["survived"] for row in rows)
    text = page.read_text()
    assert "blockstep museum run leak-on-abort" in text
    assert "| forward-frees | a table is freed from its head |" in text


def test_several_processes_find_the_same() -> None:
    chosen = [EXHIBITS["leak-on-abort"], EXHIBITS["forward-frees"]]
    side_by_side = run_trial(chosen, Trial((0,), max_events=30_000, jobs=2))
    in_a_row = run_trial(chosen, Trial((0,), max_events=30_000))
    assert [_without_clock(entry) for entry in side_by_side] == [
        _without_clock(entry) for entry in in_a_row
    ]


def _without_clock(tried: Tried) -> list[tuple[object, ...]]:
    return [(fall.seed, fall.killed_by, fall.events, fall.shrunk) for fall in tried.falls]


def test_progress_is_told_after_each_hunt() -> None:
    told: list[tuple[float, str]] = []
    trial = Trial((0, 1), max_events=30_000)
    run_trial([EXHIBITS["leak-on-abort"]], trial, lambda done, text: told.append((done, text)))
    assert told == [(0.5, "1 of 2 hunts, none survived"), (1.0, "2 of 2 hunts, none survived")]


def test_a_survivor_is_named_and_ends_with_the_code_of_the_harness(with_survivor: str) -> None:
    options = ("--seed", 0, "--budget", 300, "--jobs", 1)
    result = blockstep("museum", "run", with_survivor, "leak-on-abort", *options)
    assert result.exit_code == 5
    assert SURVIVED in result.output
    assert f"survived: {with_survivor}\n" in result.output


def test_unknown_names_and_misplaced_options_are_usage_errors() -> None:
    unknown = blockstep("museum", "run", "no-such-thing")
    assert unknown.exit_code == 2
    assert "no such exhibit" in unknown.output
    misplaced = blockstep("museum", "--json", "x.json", "run", "leak-on-abort")
    assert misplaced.exit_code == 2
    assert "behind the command" in misplaced.output


def test_the_list_says_what_each_exhibit_is(tmp_path: Path) -> None:
    told = tmp_path / "museum.json"
    result = blockstep("museum", "--json", told)
    assert result.exit_code == 0
    rows = {row["exhibit"]: row for row in json.loads(told.read_text())}
    assert list(rows) == list(EXHIBITS)
    assert rows["zombie-key"]["speaks"] == list(EXHIBITS["zombie-key"].properties)
    assert rows["all-keys-withdrawn"]["what is wrong"].startswith("wrong fix of zombie-key: ")


def test_rows_show_the_seeds_side_by_side() -> None:
    falls = (Fall(0, "P1 a", 1_020, 1.26, 5), Fall(1, SURVIVED, 300, 2.0, None))
    tried = Tried(IDLE, falls)
    row = row_of(tried)
    assert row["killed by"] == f"P1 a; {SURVIVED}"
    assert row["events"] == "1,020 / 300"
    assert row["seconds"] == "1.3 / 2.0"
    assert row["shrunk to"] == "5 / -"
    assert tried.survived
    assert json_of(tried)["survived"]
    assert "for each of the seeds 0 / 1" in museum_page([row], "blockstep", (0, 1))


@pytest.mark.parametrize(
    ("kind", "property_id", "name"),
    [
        (FindingKind.PROPERTY, "P3", "P3 words"),
        (FindingKind.DIVERGENCE, "", DIVERGENCE),
        (FindingKind.FAULT, "", "fault words"),
        (FindingKind.LIVENESS, "P10", "P10 words"),
    ],
)
def test_killers_have_names(kind: FindingKind, property_id: str, name: str) -> None:
    assert name_of(Finding(kind, property_id, "words", "")) == name
