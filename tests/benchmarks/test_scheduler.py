"""The page of the scheduler benchmark: goals are judged, and sections are filled from results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import scheduler
from docs.pictures import draw_steps

from blockstep.conformance.bench.measure import Measurement, Reading, Spread
from blockstep.conformance.bench.report import to_json

MACHINE = {
    "processor": "P", "cores": 2, "python": "3", "system": "S", "date": "D", "load_1min": 0.1,
}  # fmt: skip


def entry_of(scenario: str, running: int, ours: float, vllm: float = 1000.0) -> Measurement:
    """Return an entry with an engine whose means are twice its p50, and vLLM."""

    def reading(engine: str, name: str, time: float) -> Reading:
        times = Spread(time, time, 2 * time if engine == "ours" else time)
        return Reading(engine, name, times, times, times, 1.0)

    readings = (
        reading("ours", "arrays", ours),
        reading("ours", "materialised", 4 * ours),
        reading("ours", "protocol", 8 * ours),
        reading("vllm", "objects", vllm),
    )
    return Measurement(scenario, running, 9, running, running, 0.0, 0.0, "digest", readings)


ENTRIES = [
    entry_of("decode", 1, 1000.0),
    entry_of("decode", 64, 10.0),
    entry_of("decode", 1024, 58.0, 5801.0),
    entry_of("long", 1, 1101.0),
    entry_of("mixed", 256, 50.1),
    entry_of("storm", 256, 100.0),
    entry_of("trace", 256, 20.0),
]


def test_goals_are_compared_with_the_figures() -> None:
    head, marks, *rows = scheduler.make_goals(ENTRIES)
    assert head == "| what | goal | ours |"
    assert marks.count("|") == 4
    verdicts = {row.split(" | ")[0][2:]: row.split(" | ")[2][:-2] for row in rows}
    assert verdicts == {
        "decode, 1,024 running, arrays": "100x, met",
        "decode, full and window, 1,024 running, arrays": "not measured",
        "decode, full and recurrent, 1,024 running, arrays": "not measured",
        "decode, 1,024 running, materialised": "25x, **missed**",
        "decode, 1,024 running, through apply": "12.5x, met",
        "decode, 64 running, arrays": "100x, met",
        "decode, 8 running, arrays": "not measured",
        "decode, one running request more, arrays": "50 ns, met",
        "100,000 tokens of context by 512, arrays": "1.101, **missed**",
        "mixed, 256 running, arrays": "19.96x, **missed**",
        "hits, 256 running, arrays": "not measured",
        "storm of preemptions, 256 running, arrays": "10x, **missed**",
        "waves: all admitted, all end, 256, arrays": "not measured",
        "Mooncake, 2,000 requests, all steps, arrays": "25x, **missed**",
    }


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository without results."""
    (tmp_path / scheduler.RESULTS).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_result(part: str, date: str, plain: dict[str, Any]) -> None:
    (scheduler.RESULTS / f"{date}-scheduler-{part}-2core.json").write_text(json.dumps(plain))


@pytest.mark.usefixtures("house")
def test_sections_show_the_newest_results() -> None:
    for date, command in (("2026-02-01", "NEW"), ("2026-01-31", "OLD")):
        conditions = {"command": command, "machine": MACHINE, "gc": "off"}
        write_result("steady", date, to_json(ENTRIES[:4], conditions))
        write_result("trace", date, to_json(ENTRIES[6:], conditions))
        line = {"function": "module.py: f", "calls": 2.0, "own": 0.25, "total": 0.5}
        found = {
            "scenario": "decode", "num_running": 1024, "engine": "ours", "num_steps": 9,
            "step": 71.5, "lines": [line],
        }  # fmt: skip
        write_result("profile-steady", date, {**conditions, "profiles": [found]})
    sections = scheduler.make_sections()
    page = "\n".join(sections.values())
    assert "OLD" not in page
    assert page.count("`NEW`") == 3
    assert "decode, 1,024 running, ours: 72 us a step" in page
    assert "50.0%    25.0%            2.0   module.py: f" in page
    assert "| hits, 256 running, arrays | at least 25x | not measured |" in page
    assert list(sections) == ["steady", "trace", "profile-steady", scheduler.GOALS_SECTION]


def test_a_part_has_one_command_without_the_path_of_the_trace(
    house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run(arguments: list[str]) -> None:
        seen.append(arguments)
        Path(arguments[-1]).write_text(json.dumps({"command": " ".join(arguments)}))

    monkeypatch.setattr(scheduler, "run", run)
    trace = house / "deep" / "trace.jsonl.gz"
    for part in ("trace", "profile-churn"):
        scheduler.measure_part(part, scheduler.ENGINES, trace)
    assert seen[0][:5] == ["scheduler", "--engine", "host", "--engine", "vllm"]
    assert "vllm" not in seen[1]
    newest = scheduler.find_newest("trace")
    assert newest is not None
    assert "--trace trace.jsonl.gz --json" in newest.read_text()
    assert str(house) not in newest.read_text()


@pytest.mark.usefixtures("house")
def test_the_plot_has_a_line_for_each_reading_and_each_release() -> None:
    conditions = {"command": "A", "machine": MACHINE, "gc": "off"}
    write_result("steady", "2026-02-01", to_json(ENTRIES, {**conditions, "vllm": "0.19.1"}))
    write_result("other", "2026-02-01", to_json(ENTRIES[2:3], {**conditions, "vllm": "0.33.0"}))
    lines = scheduler.list_step_lines()
    assert list(lines) == ["arrays", "materialised", "protocol", "vLLM 0.19.1", "vLLM 0.33.0"]
    assert lines["arrays"] == [(1, 1000.0), (64, 10 / 64), (1024, 58 / 1024)]
    assert lines["vLLM 0.33.0"] == [(1024, 5801 / 1024)]
    picture = draw_steps(lines)
    assert picture.count("<polyline") == 5
    assert all(label in picture for label in ("ours, apply", "vLLM 0.33.0", "TensorRT-LLM"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--write", "nap"], "'nap': must be one of steady,"), (["--write"], "needs --trace FILE")],
)
def test_bad_input_is_rejected(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["scheduler.py", *arguments])
    with pytest.raises(SystemExit):
        scheduler.main()
    assert message in capsys.readouterr().err
