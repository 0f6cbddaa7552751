"""`make gpu` and its lockstep command, tested without a GPU on parts that end quickly."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import device
from benchmarks.engine import Row
from benchmarks.gpu import lockstep, runner
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.aims import AIMS, Aim, judge, look_up, make_table
from benchmarks.gpu.lockstep import (
    KINDS,
    SPECIFICATION,
    DifferenceError,
    Episode,
    draw_config,
    list_lacks,
)
from benchmarks.gpu.parts import KINDS as KINDS_RUN
from benchmarks.gpu.parts import SIZES, Command, Part, list_parts
from benchmarks.kernels import list_cases
from tests.benchmarks.test_kernels import SMALL

from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import FOLDER, Numpied

ROOT = Path(__file__).resolve().parents[2]
FIGURE = "import sys; open(sys.argv[1], 'w').write('{\"ms\": %s}')"
AIM = Aim("speed", "times", ("one", "ms"), 5.0, "ms", is_least=False)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    """Return a command that runs `code`."""
    return ("{python}", "-c", code, *arguments)


def make_part(name: str, code: str = "", **others: Any) -> Part:
    """Return a part of one command."""
    part = Part(name, "", 20.0, [Command("one", python(code, "{json}"))], lines="shown")
    return replace(part, **others)


def start(
    folder: Path, parts: Sequence[Part], *options: str, aims: Sequence[Aim] = ()
) -> tuple[int, dict[str, Any]]:
    """Run the parts. Return the exit status and the written file."""
    status = main(["--results", str(folder), *options], lambda *_: list(parts), aims)
    written: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return status, written


def test_figures_are_written_and_compared_with_the_aims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [make_part("times", FIGURE % 4.5 + "; print('shown'); print('hidden')")]
    aims = [AIM, replace(AIM, name="slowness", is_least=True), replace(AIM, path=("two",))]
    status, written = start(tmp_path, parts, "--about", '{"device": "NVIDIA H200"}', aims=aims)
    assert status == 0
    assert written["device"] == "NVIDIA H200"
    assert written["parts"]["times"]["figures"] == {"one": {"ms": 4.5}}
    assert [aim["verdict"] for aim in written["aims"]] == ["met", "missed", "not measured"]
    lines = capsys.readouterr().out.splitlines()
    assert "  shown" in lines
    assert "  hidden" not in lines
    assert [line.split()[0] for line in lines[-6:-3]] == ["not", "met", "missed"]
    assert lines[-3] == "aims: 1 missed, 1 met, 1 not measured"
    assert lines[-1].endswith("-gpu-h200.json")
    with tarfile.open(tmp_path / "raw.tgz") as packed:
        assert packed.getnames() == ["times-one.json", "times-one.txt"]


def test_only_a_strict_run_fails_for_a_missed_aim(tmp_path: Path) -> None:
    parts = [make_part("times", FIGURE % 6)]
    assert start(tmp_path, parts, aims=[AIM])[0] == 0
    assert start(tmp_path, parts, "--strict", aims=[AIM])[0] == 1


def test_a_part_that_passed_is_not_run_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write('%s ')"
    parts = [make_part("good", note % "good" + ";" + FIGURE % 1),
             make_part("bad", note % "bad" + "; raise SystemExit(7)")]  # fmt: skip
    status, written = start(tmp_path, parts)
    assert status == 1
    assert written["parts"]["bad"]["status"] == "FAILED"
    assert written["parts"]["bad"]["detail"] == "one (7)"
    status, again = start(tmp_path, parts)
    assert (status, log.read_text().split().count("good")) == (1, 1)
    assert log.read_text().split().count("bad") == 2
    assert again["parts"]["good"] == written["parts"]["good"]
    with tarfile.open(tmp_path / "raw.tgz") as packed:
        assert {"good-one.txt", "bad-one.txt"} <= {*packed.getnames()}
    _, anew = start(tmp_path, parts, "--again", "good")
    assert log.read_text().split().count("good") == 2
    assert anew["parts"]["bad"] == again["parts"]["bad"]


@pytest.mark.parametrize("what", ["device", "sources"])
def test_results_of_another_device_or_other_sources_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    start(tmp_path, [make_part("good")], "--about", '{"device": "one"}')
    if what == "sources":
        monkeypatch.setattr(runner, "hash_sources", lambda root: "others")
    device = "one" if what == "sources" else "two"
    _, written = start(tmp_path, [], "--about", json.dumps({"device": device}))
    assert written["parts"] == {}
    with tarfile.open(tmp_path / "raw.tgz") as packed:
        assert packed.getnames() == []


def test_the_hash_of_sources_depends_on_their_content(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    names = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "spec" / "one.py").write_text(text)
        names.append(runner.hash_sources(tmp_path))
    assert names[0] == names[2] != names[1]


def is_alive(number: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def test_a_part_is_stopped_at_its_limit_with_its_child_processes(
    tmp_path: Path,
) -> None:
    pid = tmp_path / "pid"
    slow = Part("slow", "", 1.5, [Command("one", python(CHILD, str(pid)))])
    steady = make_part("steady", "import time; time.sleep(2.5)")
    status, written = start(tmp_path, [slow, steady])
    assert status == 1
    assert written["parts"]["slow"]["status"] == "STOPPED"
    assert written["parts"]["slow"]["detail"].startswith("limit reached: one after ")
    assert written["parts"]["steady"]["status"] == "passed"
    assert not is_alive(int(pid.read_text()))


def test_no_part_starts_after_the_total_time_limit(tmp_path: Path) -> None:
    status, written = start(tmp_path, [make_part("late")], "--seconds", "1")
    assert status == 2
    assert written["parts"]["late"]["status"] == "NOT RUN"


@pytest.mark.parametrize(("is_required", "status"), [(True, 1), (False, 0)])
def test_a_missing_tool_fails_only_a_required_part(
    tmp_path: Path, is_required: bool, status: int
) -> None:
    lacking = make_part("lacking", tool="/no/such/tool", is_required=is_required)
    found, written = start(tmp_path, [make_part("good"), lacking])
    assert found == status
    assert written["parts"]["lacking"]["detail"] == "there is no /no/such/tool"


def test_the_output_of_a_tool_can_fail_a_part(tmp_path: Path) -> None:
    parts = [make_part("checked", "print('ERROR SUMMARY: 2 errors')", faults="SUMMARY: [1-9]")]
    assert start(tmp_path, parts)[0] == 1
    (sanitizer,) = [part for part in list_parts() if part.name == "sanitizer"]
    assert sanitizer.faults == "ERROR SUMMARY: [1-9]"


MEET = """
import pathlib, sys, time
folder, own, other = pathlib.Path(sys.argv[2]), *sys.argv[3:]
(folder / own).touch()
until = time.monotonic() + 10
while not (folder / other).exists():
    assert time.monotonic() < until
    time.sleep(0.02)
"""
ALONE = """
import os, sys, time
os.mkdir(sys.argv[2])
time.sleep(0.3)
os.rmdir(sys.argv[2])
"""


def test_untimed_parts_run_in_parallel_and_timed_ones_alone(tmp_path: Path) -> None:
    def make(name: str, code: str, *arguments: str, is_timed: bool = False) -> Part:
        command = Command("one", python(code, "{json}", *arguments))
        return Part(name, "", 15.0, [command], is_timed)

    meeting, place = str(tmp_path), str(tmp_path / "alone")
    parts = [
        make("a", MEET, meeting, "a", "b"), make("b", MEET, meeting, "b", "a"),
        make("c", ALONE, place, is_timed=True), make("d", ALONE, place, is_timed=True),
        make("e", ALONE, place),
    ]  # fmt: skip
    status, written = start(tmp_path, parts)
    assert status == 0, written["parts"]


WHOLE = """
import sys
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import Command, Part
quick = Part("quick", "", 20, [Command("one", ["{python}", "-c", "print(1)"])], True)
slow = Part("slow", "", 50, [Command("one", ["{python}", "-c", sys.argv[2], sys.argv[3]])], True)
sys.exit(main(["--results", sys.argv[1]], lambda *_: [quick, slow], []))
"""


def test_results_are_kept_when_the_run_is_terminated(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", WHOLE, tmp_path, CHILD, pid], cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    assert not is_alive(int(pid.read_text()))
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["parts"]["quick"]["status"] == "passed"
    with tarfile.open(tmp_path / "raw.tgz") as packed:
        assert "slow-one.txt" in packed.getnames()


def test_an_unknown_part_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--results", str(tmp_path), "other"], lambda *_: [make_part("one")])
    assert "no part other; there are one" in capsys.readouterr().err


def test_options_after_two_dashes_are_passed_to_the_tests() -> None:
    given: list[object] = []

    def make(*options: object) -> list[Part]:
        given.extend(options)
        return []

    assert main(["--list", "--sanitizer", "", "--", "-x", "--", "-v"], make) == 0
    assert given[:2] == [["-x", "--", "-v"], ""]


# The parts and aims themselves.


@pytest.mark.xfail(
    not (ROOT / "benchmarks" / "attention.py").exists(),
    reason="it comes with the kernel that it measures",
)
def test_every_part_runs_existing_files() -> None:
    for part in list_parts(["-x"]):
        assert part.limit <= 120
        for command in part.commands:
            modules = [b for a, b in zip(command.argv, command.argv[1:], strict=False) if a == "-m"]
            for module in modules:
                path = ROOT / module.replace(".", "/")
                is_ours = module.startswith("benchmarks.")
                assert not is_ours or path.with_suffix(".py").exists() or path.is_dir(), module
    (tests,) = [part for part in list_parts(["-x"]) if part.name == "tests"]
    assert tests.commands[0].argv[-1] == "-x"
    assert {*KINDS_RUN} == {*KINDS, SPECIFICATION}
    assert "sanitizer" not in {part.name for part in list_parts(sanitizer="")}


def test_every_aim_gets_its_figure_from_a_command() -> None:
    commands = {(part.name, one.name) for part in list_parts() for one in part.commands}
    assert {(aim.part, aim.path[0]) for aim in AIMS} <= commands
    assert len({aim.name for aim in AIMS}) == len(AIMS)
    known = {field.name for field in fields(Row)} | {"host_by_device"}
    for aim in AIMS:
        if aim.part == "engine":
            assert aim.path[1] in ("best", "best_device")
            assert aim.path[-1] in known


def test_attention_cases_with_an_aim_are_timed() -> None:
    attention = pytest.importorskip("benchmarks.attention")
    timed = {case.name: case for case in attention.CASES}
    for aim in AIMS:
        if aim.part == "attention":
            assert timed[aim.path[2]].aim == aim.bound


def test_other_kernels_with_an_aim_are_timed() -> None:
    names = {case.name: case.peers for case in list_cases(SMALL, "cpu")}
    for aim in AIMS:
        if aim.part == "kernels":
            assert aim.by[-1] in names[aim.path[2]]


def test_the_figure_of_a_device_step_has_the_path_of_its_aim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The times are made up."""
    monkeypatch.setattr(device, "replay", lambda running, replays: [1.0 * running] * 100)
    options = argparse.Namespace(count=False, replays=8, no_host=True, vllm=None)
    made = {f"{running}": device.measure(running, options, has_gpu=True) for running in SIZES}
    values = [one.value for one in judge({"device": {"device": made}}) if one.value is not None]
    assert values == [*SIZES]


@pytest.mark.parametrize("arguments", ["attention", "device --no-host -n 64", "engine", "kernels"])
def test_a_benchmark_without_a_gpu_fails(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = arguments.partition(" ")[0]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", arguments.split())
    assert importlib.import_module(f"benchmarks.{name}").main() == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "no CUDA device is available" in output.err


def test_a_figure_is_found_by_key_and_by_name() -> None:
    figures = {"times": {"one": {"cases": [{"name": "x", "us": 3}, {"name": "y", "us": True}]}}}
    assert look_up(figures, ("times", "one", "cases", "x", "us")) == 3.0
    for path in (("cases", "y", "us"), ("cases", "z", "us"), ("cases", "x", "us", "more"), ()):
        assert look_up(figures, ("times", "one", *path)) is None
    ratio = Aim("r", "times", ("one", "cases", "x", "us"), 2.0, "", by=("one", "cases", "x", "us"))
    (verdict,) = judge(figures, [ratio])
    assert (verdict.value, verdict.word) == (1.0, "missed")
    (verdict,) = judge(figures, [replace(ratio, by=("one",))])
    assert verdict.word == "not measured"
    assert make_table([verdict]).endswith("aims: 0 missed, 0 met, 1 not measured")


# The lock-step, with numpy on both sides.


def play(kind: str, other: Numpied | None, num_episodes: int) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in range(num_episodes):
        config = draw_config(kind, random.Random(seed))
        left, right = DeviceEngine(config, lanes=16), DeviceEngine(config, other, lanes=64)
        episode = Episode(config, left, right, seed)
        episode.play()
        reached += episode.reached
    return reached


@pytest.mark.parametrize("kind", KINDS)
def test_equal_engines_stay_in_lockstep_and_reach_all_goals(kind: str) -> None:
    reached = play(kind, None, 10)
    assert list_lacks(kind, reached) == []
    assert list_lacks(kind, Counter(events=10))[0] == "10 events"


def plant_mistake() -> Numpied:
    """Return the kernels, changed so that the first block of a request is freed first."""
    text = (FOLDER / "pool.py").read_text()
    old = "(last - 1 - step)"
    assert text.count(old) == 1
    return Numpied(changed={"pool": text.replace(old, "step")})


def test_a_difference_in_one_decision_is_found() -> None:
    with pytest.raises(DifferenceError, match="episode"):
        play("plain", plant_mistake(), 10)


def test_the_lockstep_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numpy stands in for a GPU, and one episode reaches the required number of events."""
    monkeypatch.setattr(lockstep, "Compiled", Numpied)
    monkeypatch.setattr(lockstep, "NUM_EVENTS_MIN", 50)
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["lockstep", "plain", "--seconds", "0.5", "--json", f"{file}"])
    assert lockstep.main() == 0
    record = json.loads(file.read_text())
    assert record["problem"] == ""
    assert record["events"] >= 50
    monkeypatch.setattr(sys, "argv", ["lockstep", "plain", "--seconds", "0"])
    capsys.readouterr()
    assert lockstep.main() == 1
    assert "reached only " in capsys.readouterr().out


def test_the_lockstep_command_fails_for_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = plant_mistake()
    monkeypatch.setattr(lockstep, "Compiled", lambda: planted)
    for kind, words in (("plain", "episode"), (SPECIFICATION, "free_queue")):
        monkeypatch.setattr(sys, "argv", ["lockstep", kind, "--seconds", "10"])
        assert lockstep.main() == 1
        assert words in capsys.readouterr().out
