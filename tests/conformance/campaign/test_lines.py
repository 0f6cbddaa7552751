"""Campaigns steered by the lines that an engine runs: recording, kept programs and reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from blockstep.conformance.campaign import lines, play, steering
from blockstep.conformance.campaign.executor import run_workers
from blockstep.conformance.campaign.folder import open_store
from blockstep.conformance.campaign.lines import LineWatch
from blockstep.conformance.campaign.plan import read_plan
from blockstep.conformance.campaign.records import Look, Past, Round, UnitResult
from blockstep.conformance.campaign.summary import summarize, summary_to_json
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.report.campaign import render_campaign, render_page
from blockstep.conformance.search import hunt_jobs
from blockstep.conformance.search.options import load
from blockstep.spec.profiles import STRICT

PLAN = """
name = "lines"
budget = 300
presets = ["tiny"]
episodes = 2
round = 2
[[engines]]
engine = "plain_engine:PlainEngine"
lines = [{modules}]
"""


class TracedMonitoring:
    """The used part of `sys.monitoring`, written with `sys.settrace` for Python 3.11."""

    DISABLE = object()
    events = SimpleNamespace(LINE=1)

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._disabled: set[tuple[CodeType, int]] = set()
        self._add: Callable[[CodeType, int], Any] | None = None

    def get_tool(self, _tool: int) -> str | None:
        return None

    def use_tool_id(self, _tool: int, _name: str) -> None:
        sys.settrace(self._enter)

    def free_tool_id(self, _tool: int) -> None:
        sys.settrace(None)

    def register_callback(self, _tool: int, _event: int, add: Any) -> None:
        self._add = add

    def set_local_events(self, _tool: int, code: CodeType, event: int) -> None:
        (self._codes.add if event else self._codes.discard)(code)

    def restart_events(self) -> None:
        self._disabled.clear()

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._run if frame.f_code in self._codes else None

    def _run(self, frame: FrameType, event: str, _arg: object) -> Any:
        place = frame.f_code, frame.f_lineno
        if event == "line" and place not in self._disabled and self._add is not None:
            assert self._add(*place) is self.DISABLE
            self._disabled.add(place)
        return self._run


@pytest.fixture
def _recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record lines with `sys.settrace` where Python has no `sys.monitoring`."""
    if lines._monitoring is None:
        before = sys.gettrace()
        monkeypatch.setattr(lines, "_monitoring", TracedMonitoring())
        yield
        sys.settrace(before)
    else:
        yield


def write_plan(folder: Path, *modules: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(PLAN.format(modules=", ".join(f'"{it}"' for it in modules)))
    return path


MODULE = """
from contextlib import contextmanager

def outer(is_wanted):
    def inner():
        return 1
    return inner() if is_wanted else 2

class Engine:
    def step(self):
        with self.held() as value:
            return value

    @contextmanager
    def held(self):
        yield [it for it in (1, 2)
            if it]
"""


@pytest.mark.usefixtures("_recording")
def test_lines_of_the_named_modules_are_recorded_in_each_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recorded_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("def first():\n    return 1\n")
    (folder / "part.py").write_text(MODULE)
    (tmp_path / "recorded_alone.py").write_text("def alone():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    package, part, alone = (
        import_module(f"recorded_{it}") for it in ("package", "package.part", "alone")
    )
    watch = LineWatch(("recorded_package",))
    name = "recorded_package.part"
    with watch.watch() as reached:
        part.outer(is_wanted=False)
        alone.alone()
    assert reached == {f"{name}:5", f"{name}:7"}
    for _ in range(2):
        with watch.watch() as reached:
            part.outer(is_wanted=True)
            part.Engine().step()
            package.first()
        numbers = (5, 6, 7, 11, 12, 16, 17)
        assert reached == {"recorded_package:2", *(f"{name}:{it}" for it in numbers)}
    part.outer(is_wanted=True)
    assert f"{name}:4" not in reached


def test_a_module_that_cannot_be_recorded_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LineWatch(()).watch() as reached:
        assert not reached
    monkeypatch.setattr(lines, "_monitoring", None)
    with pytest.raises(EngineNotFoundError, match=r"cannot record lines, 3\.12 can"):
        LineWatch(("json",))
    monkeypatch.setattr(lines, "_monitoring", TracedMonitoring())
    for name in ("no_such_module", "no_such.module", ""):
        with pytest.raises(EngineNotFoundError, match=f"there is no module '{name}'"):
            LineWatch((name,))


@pytest.mark.usefixtures("_recording")
def test_a_program_that_reaches_a_rare_line_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play, "KEEP_RUNS", 5)
    modules = ("plain_engine",)
    plan = read_plan(write_plan(tmp_path, *modules))
    options = plan.make_options(plan.cells[0])
    make_engine = load(options)

    def go(counts: play.Counts) -> list[play.Played]:
        return list(play.play_part(options, make_engine, range(4), None, counts, modules))

    common: dict[str, int] = {}
    for played in go(play.Counts()):
        common |= dict.fromkeys(played.lines, play.RARE + 1)
        assert played.kept is None
        rare = max(played.lines)
    counts = play.Counts(lines={**common, rare: play.RARE})
    kept = [played.kept for played in go(counts) if played.kept]
    assert [name for name, _ in kept] == [rare]
    with LineWatch(modules).watch() as reached:
        run_program(kept[0][1], make_engine, STRICT)
    assert rare in reached
    assert not any(played.kept for played in go(play.Counts(lines=common)))
    assert any(played.kept for played in go(play.Counts(goals={}, lines=common)))


@pytest.mark.usefixtures("_recording")
def test_a_campaign_counts_and_shows_lines(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path, "plain_engine"))
    run_workers(plan, str(tmp_path / "store"), 1, runs_here=lambda _: True)
    found = summarize(plan, open_store(str(tmp_path / "store"), plan.key), with_course=True)
    (target,) = found.totals.targets
    assert len(target.lines) > 100
    assert all(name.startswith("plain_engine") for name in target.lines)
    assert f"  {len(target.lines):,}  " in render_campaign(found)
    assert "Lines of engines reached" in render_page(found)
    targets: Any = summary_to_json(found)["targets"]
    assert targets[0]["num_lines"] == len(target.lines)
    assert found.course[-1].lines > 100


def test_a_round_is_rewarded_for_rare_lines(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path, "plain_engine"))
    totals = steering.start_totals(plan)
    totals.targets[0].look = Look(hunt_jobs.UNKNOWN.facts, "", 1, {}, ())
    totals.targets[0].lines = {"m:1": 99}
    units = steering.open_round(plan, totals, None, 0.0).units
    result = UnitResult(4, 10, lines={"m:1": 1, "m:2": 1}, kept={"m:2": "digest"})
    played = Round(0, units, (1,), Past(0.0))
    totals = steering.add_round(plan, totals, played, [result])
    assert totals.cells[0].reward == pytest.approx(1 / 100 + 1)
    assert totals.targets[0].lines == {"m:1": 100, "m:2": 1}
    assert totals.targets[0].kept == {"m:2": "digest"}


def test_recorded_modules_are_part_of_the_key_of_a_campaign(tmp_path: Path) -> None:
    keys = [read_plan(write_plan(tmp_path, *it)).key for it in ((), ("json",), ("csv",), ())]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
