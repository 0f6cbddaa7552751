"""Isolation: an engine that hangs or dies is a finding, and costs its child only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blockstep.conformance.check import CANARY, CheckOptions, check, play_episode
from blockstep.conformance.isolation import Isolation, say
from blockstep.conformance.program import Answer, Drain, Program
from blockstep.conformance.registry import EngineNotFoundError, SpecEngine
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.spec.vocabulary import Config, Event, Observation, Request, Schedule, Submit

ENGINES = '''
import ctypes, os, subprocess, sys, time
from blockstep.conformance.canary import CanaryEngine
from blockstep.conformance.registry import SpecEngine

class Counting(SpecEngine):
    """Breaks at an event, counted over all runs of the process."""
    count, at = 0, 1000

    def apply(self, event):
        type(self).count += 1
        if type(self).count == self.at:
            self.fail()
        return super().apply(event)

class Exiting(Counting):
    def fail(self):
        os._exit(3)

class Leaving(Counting):
    def fail(self):
        raise SystemExit("enough")

class Faulting(Counting):
    def fail(self):
        print("about to read address 0", flush=True)
        ctypes.string_at(0)

class Hanging(Counting):
    def fail(self):
        time.sleep(1000)

class HangingWithChild(Counting):
    def fail(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(os.environ["PID_FILE"], "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)

class Raising(Counting):
    def fail(self):
        raise ValueError("no such block")

class Chatty(SpecEngine):
    def apply(self, event):
        print("to standard output", sys.stdin.read(), flush=True)
        return super().apply(event)

class Unbuildable(SpecEngine):
    def __init__(self, config):
        raise TypeError("which config?")

class ExitingWhileShrunk(CanaryEngine, Exiting):
    at = 300

class ExitingWhenSeenAgain(CanaryEngine, Exiting):
    at = 97
'''


@pytest.fixture
def isolation(tmp_path: Path) -> Iterator[Isolation]:
    (tmp_path / "isolated_engines.py").write_text(ENGINES)
    with Isolation(1.0, [str(tmp_path)]) as isolation:
        yield isolation


def options(name: str, max_events: int = 3000) -> CheckOptions:
    return CheckOptions(f"isolated_engines:{name}", preset="tiny", seed=5, max_events=max_events)


def test_a_check_in_a_child_says_what_a_check_says(isolation: Isolation) -> None:
    wanted = CheckOptions("spec", preset="tiny", max_events=2000)
    here, there = check_to_json(check(wanted)), isolation.check(wanted).check
    assert here | {"seconds": 0} == there | {"seconds": 0}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("Exiting", "the engine's process ended with exit code 3 at: "),
        ("Leaving", "the engine's process ended with exit code 1 at: "),
        ("Faulting", "the engine's process was ended by SIGSEGV at: "),
        ("Hanging", "the engine gave no answer within 1 s at: "),
    ],
)
def test_a_lost_engine_is_a_fault_with_its_program(
    isolation: Isolation, name: str, how: str
) -> None:
    started = time.monotonic()
    outcome = isolation.check(options(name))
    assert time.monotonic() - started < 20
    failure = outcome.check["failure"]
    assert outcome.check["exit_code"] == 1
    assert [finding["kind"] for finding in failure["findings"]] == ["fault"]
    assert failure["findings"][0]["message"].startswith(how)
    assert failure["program"] == play(options(name), failure["episode"])[: failure["event"]]
    assert outcome.text.startswith("blockstep check: FAULT at event ")
    assert f"reproduce  {failure['reproduce']}" in outcome.text
    assert failure["reproduce"].endswith(f"--seed 5 --episode {failure['episode']}")


def play(options: CheckOptions, episode: int) -> list[str]:
    """What an engine is given in an episode."""
    events: list[str] = []

    class Recording(SpecEngine):
        def apply(self, event: Event) -> Observation:
            events.append(say(event))
            return super().apply(event)

    play_episode(options, episode, Recording)
    return events


def test_a_hanging_or_faulting_engine_says_where_it_is(isolation: Isolation) -> None:
    for name in ("Hanging", "Faulting"):
        told = isolation.check(options(name)).text
        assert "isolated_engines.py" in told
        assert "driver.py" not in told


def test_what_an_engine_starts_dies_with_it(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    isolation.check(options("HangingWithChild"))
    isolation.close()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not is_running(pid):
            return
        time.sleep(0.1)
    pytest.fail("a process of the engine outlived it")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_an_engine_raises_in_an_event_is_a_finding_as_ever(isolation: Isolation) -> None:
    outcome = isolation.check(options("Raising"))
    assert outcome.check["exit_code"] == 1
    finding = outcome.check["failure"]["findings"][0]
    assert (finding["kind"], finding["sentence"]) == ("fault", "engine_raises_nothing")
    assert "not deterministic" in outcome.text


def test_an_engine_that_cannot_be_built_is_a_fault(isolation: Isolation) -> None:
    outcome = isolation.check(options("Unbuildable"))
    assert outcome.check["exit_code"] == 1
    message = "the engine raised TypeError: which config? while being built"
    assert outcome.check["failure"]["findings"][0]["message"] == message
    assert message in outcome.text


def test_an_engine_lost_while_its_failure_is_shrunk_is_reported_with_it(
    isolation: Isolation,
) -> None:
    outcome = isolation.check(options("ExitingWhileShrunk"))
    kinds = [finding["kind"] for finding in outcome.check["failure"]["findings"]]
    assert kinds[0] == "property"
    assert kinds[-1] == "fault"
    assert "VIOLATION" in outcome.text
    assert "then, while this was being shrunk: the engine's process ended" in outcome.text


def test_an_engine_lost_before_its_failure_was_seen_again_is_reported_with_it(
    isolation: Isolation, tmp_path: Path
) -> None:
    found = check(CheckOptions(CANARY, preset="tiny", seed=5, max_events=3000))
    at = f"at = {found.num_events + 1}"
    module = tmp_path / "isolated_engines.py"
    module.write_text(module.read_text().replace("at = 97", at))
    outcome = isolation.check(options("ExitingWhenSeenAgain"))
    kinds = [finding["kind"] for finding in outcome.check["failure"]["findings"]]
    assert kinds == ["property", "fault"]
    assert outcome.check["failure"]["episode"] == outcome.check["num_episodes"] - 1
    assert "seen in the same episode before: P1 " in outcome.text


def test_what_an_engine_prints_and_reads_is_its_own_business(isolation: Isolation) -> None:
    outcome = isolation.check(options("Chatty", 300))
    assert outcome.check["failure"] is None
    assert outcome.check["num_events"] >= 300


def test_an_unknown_engine_is_named(isolation: Isolation) -> None:
    with pytest.raises(EngineNotFoundError, match="isolated_engines:Nobody"):
        isolation.check(options("Nobody"))


PROGRAM = Program(
    Config(num_blocks=4, block_size=2),
    (Submit(Request("A", (1, 2, 3), max_tokens=2)), Schedule(), Answer(), Drain()),
)


def test_programs_follow_one_another_in_one_child(isolation: Isolation) -> None:
    assert isolation.run("spec", PROGRAM).text == ""
    told = isolation.run(CANARY, PROGRAM).text
    assert told.startswith(f"blockstep: VIOLATION at event 2 (engine {CANARY})\n")
    assert "preset" not in told
    assert isolation.run("spec", PROGRAM).text == ""


def test_another_child_follows_one_that_was_lost(isolation: Isolation) -> None:
    name = "isolated_engines:Exiting"
    program = replace(PROGRAM, actions=(PROGRAM.actions[0], *(Schedule(),) * 1000))
    told = isolation.run(name, program).text
    assert told.startswith(f"blockstep: FAULT at event 1000 (engine {name})\n")
    assert "ended with exit code 3" in told
    assert isolation.run("spec", PROGRAM).text == ""
