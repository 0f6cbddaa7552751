"""Isolation: an engine that hangs or crashes is a finding, and ends only its child process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blockstep.conformance.engine import EngineTraits
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.conformance.protocol.registry import EngineNotFoundError, SpecEngine
from blockstep.conformance.recorded.episodes import write_episode
from blockstep.conformance.recorded.validate import validate
from blockstep.conformance.report.failure import render_first_failure, render_outcome
from blockstep.conformance.report.jsonform import check_to_json
from blockstep.conformance.search.check import CheckResult, check
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.isolation import Isolation, LostError
from blockstep.conformance.search.isolation.call_journal import (
    JOURNAL_BYTES,
    Journal,
    describe_call,
)
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.conformance.search.verdict_requirements import CANARY
from blockstep.spec.vocabulary import Config, Event, Observation, Request, Reset, Schedule, Submit

ENGINES = '''
import ctypes, os, signal, subprocess, sys, time
from blockstep.conformance.engine import EngineTraits
from blockstep.conformance.lockstep.canary import CanaryEngine
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Abort, Reset

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

class ExitingWhenSeenAgain(CanaryEngine):
    """Ends its process where it is wrong, in whatever process, but for the first time."""
    def snapshot(self):
        snapshot = super().snapshot()
        if snapshot != SpecEngine.snapshot(self):
            if os.path.exists(os.environ["SEEN_FILE"]):
                os._exit(3)
            open(os.environ["SEEN_FILE"], "w").close()
        return snapshot

class AbortingAtAbort(SpecEngine):
    def apply(self, event):
        if isinstance(event, Abort):
            os.abort()
        return super().apply(event)

class LeavingAtAbort(SpecEngine):
    def apply(self, event):
        if isinstance(event, Abort):
            sys.exit("enough")
        return super().apply(event)

class Named(str):
    pass

class Declining(SpecEngine):
    """Says how deep a check may go, and what it declines, by a name of a type of its own."""
    traits = EngineTraits(max_depth=2)

    def declines(self, event):
        return Named("a known defect") if isinstance(event, Reset) else None

class Reluctant:
    __hash__ = None

    def __eq__(self, other):
        time.sleep(1000)

class Late(SpecEngine):
    """Answers with something that hangs when it is compared."""
    def apply(self, event):
        return Reluctant()

class Unserious(Raising):
    """Ignores SIGTERM, and closes all its files."""
    def fail(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(0, 100)
        while True:
            pass
'''


@pytest.fixture
def isolation(tmp_path: Path) -> Iterator[Isolation]:
    (tmp_path / "isolated_engines.py").write_text(ENGINES)
    with Isolation(1.0, [str(tmp_path)]) as isolation:
        yield isolation


def options(name: str, max_events: int = 3000) -> CheckOptions:
    return CheckOptions(f"isolated_engines:{name}", preset="tiny", seed=5, max_events=max_events)


def test_a_check_in_a_child_reports_what_a_check_reports(isolation: Isolation) -> None:
    wanted = CheckOptions("spec", preset="tiny", max_events=2000)
    here, there = check_to_json(check(wanted)), check_to_json(isolation.check(wanted))
    assert here | {"seconds": 0} == there | {"seconds": 0}


def test_an_engine_that_exits_is_a_fault_that_is_shrunk(isolation: Isolation) -> None:
    result = isolation.check(options("LeavingAtAbort"))
    assert result.failure is not None
    (found,) = result.failure.findings
    assert found.message == "the engine raised SystemExitError: sys.exit('enough')"
    assert found.frames[-1].startswith("apply (isolated_engines.py:")
    assert len(result.failure.program.actions) == 1


@pytest.mark.parametrize(
    ("name", "how", "has_place"),
    [
        ("Exiting", "the engine's process ended with exit code 3 at: ", False),
        ("Faulting", "the engine's process was ended by SIGSEGV at: ", True),
        ("Hanging", "the engine gave no answer within 1 s at: ", True),
    ],
)
def test_a_lost_engine_is_a_fault_with_its_program_and_its_place(
    isolation: Isolation, name: str, how: str, has_place: bool
) -> None:
    started = time.monotonic()
    result = isolation.check(options(name))
    assert time.monotonic() - started < 20
    record, text = check_to_json(result), render_first_failure(result)
    failure = record["failure"]
    assert record["exit_code"] == 1
    assert [finding["kind"] for finding in failure["findings"]] == ["fault"]
    assert failure["findings"][0]["message"].startswith(how)
    assert failure["program"] == play(options(name), failure["episode"])[: failure["event"]]
    assert record["num_events"] == 1000
    assert record["num_episodes"] == failure["episode"] + 1
    assert text.startswith("blockstep check: FAULT at event ")
    assert f"reproduce  {failure['reproduce']}" in text
    again = f"--seed 5 --episode {failure['episode']} --event-seconds 1"
    assert failure["reproduce"].endswith(again)
    assert ('isolated_engines.py", line ' in text) is has_place
    assert "driver.py" not in text


def play(options: CheckOptions, episode: int) -> list[str]:
    """Return the calls that an engine gets in an episode."""
    events: list[str] = []

    class Recording(SpecEngine):
        def apply(self, event: Event) -> Observation:
            events.append(describe_call(event))
            return super().apply(event)

    play_episode(options, episode, Recording)
    return events


def test_processes_that_an_engine_starts_end_with_it(
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


def test_an_engine_that_cannot_be_built_is_a_fault(isolation: Isolation) -> None:
    result = isolation.check(options("Unbuildable"))
    assert result.exit_code is ExitCode.FAILED
    message = "the engine raised TypeError: which config? while being built"
    assert check_to_json(result)["failure"]["findings"][0]["message"] == message
    assert message in render_first_failure(result)


def test_an_engine_lost_while_its_failure_is_shrunk_is_reported_with_it(
    isolation: Isolation,
) -> None:
    result = isolation.check(options("ExitingWhileShrunk"))
    failure, text = check_to_json(result)["failure"], render_first_failure(result)
    kinds = [finding["kind"] for finding in failure["findings"]]
    assert (kinds[0], kinds[-1]) == ("property", "fault")
    assert text.startswith("blockstep check: VIOLATION at event ")
    assert "then, while this was being shrunk: the engine's process ended" in text


def test_an_engine_lost_when_its_failure_is_repeated_is_reported_with_it(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN_FILE", str(tmp_path / "seen"))
    result = isolation.check(options("ExitingWhenSeenAgain"))
    failure = check_to_json(result)["failure"]
    assert [finding["kind"] for finding in failure["findings"]] == ["property", "fault"]
    assert failure["episode"] == result.num_episodes - 1
    assert "seen in the same episode before: P1 " in render_first_failure(result)


def test_an_engine_may_print_and_read_standard_input(isolation: Isolation) -> None:
    result = isolation.check(options("Chatty", 300))
    assert result.first is None
    assert result.num_events >= 300


def test_traits_are_read_in_the_child_and_jobs_change_nothing(isolation: Isolation) -> None:
    wanted = replace(options("Declining", 1500), preset="small", profile="sparing")
    here = check_to_json(check(replace(wanted, engine=f"{__name__}:Declining")))
    for jobs in (1, 2):
        seen: list[CheckResult] = []
        there = isolation.check(replace(wanted, jobs=jobs), seen.append)
        counts = [now.num_events for now in seen]
        assert counts == sorted(set(counts))
        assert counts[-1] == there.num_events
        assert there.options.max_depth == 2
        assert there.skipped.keys() == {"a known defect"}
        same = {"seconds": 0, "engine": ""}
        assert check_to_json(there) | same == here | same


class Declining(SpecEngine):
    """The same engine as in `ENGINES`."""

    traits = EngineTraits(max_depth=2)

    def declines(self, event: Event) -> str | None:
        return "a known defect" if isinstance(event, Reset) else None


def test_the_first_lost_episode_is_reported_with_any_number_of_jobs(
    isolation: Isolation,
) -> None:
    """This engine fails at a kind of event, and not after a number of calls."""
    found = [
        check_to_json(isolation.check(replace(options("AbortingAtAbort"), jobs=jobs)))
        for jobs in (1, 2)
    ]
    assert found[0] | {"seconds": 0} == found[1] | {"seconds": 0}
    assert "was ended by SIGABRT at: " in found[0]["failure"]["findings"][0]["message"]


def test_an_engine_that_hangs_between_two_calls_is_stopped(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockstep.conformance.search.isolation.process.BUILD_SECONDS", 4.0)
    result = isolation.check(options("Late"))
    assert result.first is not None
    assert result.first.message == "the engine gave no answer within 4 s between two calls"


def test_an_engine_that_ignores_signals_and_closes_files_is_killed(isolation: Isolation) -> None:
    result = isolation.check(options("Unserious"))
    assert result.first is not None
    assert result.first.message.startswith("the engine closed the files of its process at: ")


def test_no_record_is_written_of_an_engine_that_crashes(
    isolation: Isolation, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    isolation.call(write_episode, replace(options("Chatty"), episode=0), path)
    assert validate(path).conforms
    wanted = replace(options("AbortingAtAbort"), episode=6)
    with pytest.raises(LostError, match="SIGABRT"):
        isolation.call(write_episode, wanted, tmp_path / "no.jsonl")
    assert not (tmp_path / "no.jsonl").exists()


def test_an_unknown_engine_is_named(isolation: Isolation) -> None:
    with pytest.raises(EngineNotFoundError, match="isolated_engines:Nobody"):
        isolation.check(options("Nobody"))


def test_a_journal_has_room_for_a_long_run_and_forgets_the_one_before(tmp_path: Path) -> None:
    def read() -> list[str]:
        return (tmp_path / "journal").read_bytes().rstrip(b"\0").decode().split("\n")

    journal = Journal(tmp_path / "journal")
    journal.begin("first")
    for number in range(JOURNAL_BYTES):
        journal.enter(f"event {number}")
        journal.leave()
    assert len(read()) == JOURNAL_BYTES + 2
    journal.begin("second")
    journal.enter("in two\nlines")
    assert read() == ['[2, "second"]', "in two lines"]


PROGRAM = Program(
    Config(num_blocks=4, block_size=2),
    (Submit(Request("A", (1, 2, 3), max_tokens=2)), Schedule(), Answer(), Drain()),
)


def test_several_programs_run_in_one_child(isolation: Isolation) -> None:
    assert isolation.run(CheckOptions("spec"), PROGRAM).first is None
    text = render_outcome(isolation.run(CheckOptions(CANARY), PROGRAM), CANARY)
    assert text.startswith("blockstep: VIOLATION at event 2: MEMORY: ")
    assert text.splitlines()[0].endswith(f"(P1 every_block_is_free_or_held, engine {CANARY})")
    assert "preset" not in text
    assert isolation.run(CheckOptions("spec"), PROGRAM).first is None


def test_a_child_that_was_lost_is_replaced(isolation: Isolation) -> None:
    name = "isolated_engines:Exiting"
    program = replace(PROGRAM, actions=(PROGRAM.actions[0], *(Schedule(),) * 1000))
    text = render_outcome(isolation.run(CheckOptions(name), program), name)
    assert text.startswith("blockstep: FAULT at event 1000: ")
    assert text.splitlines()[0].endswith(f"(engine {name})")
    assert "ended with exit code 3" in text
    assert isolation.run(CheckOptions("spec"), PROGRAM).first is None
