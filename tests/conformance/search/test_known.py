"""Known findings: a check and a hunt suppress and count them, and report those that are gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.trace_lines import TraceError
from blockstep.conformance.report.hunt import hunt_to_json, render_hunt
from blockstep.conformance.report.verdict import verdict_text
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.check import CheckResult, InProcess, check
from blockstep.conformance.search.episodes import EpisodeResult, Loss
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.isolation import LostError
from blockstep.conformance.search.known import PATIENCE, KnownFindings, read_known
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

OPTIONS = CheckOptions(preset="tiny", max_events=1000, max_depth=1)
RESETS_MAX = 4
LEAK = Program(v.Config(num_blocks=3), (v.Submit(v.Request("A", (1,), 1)), v.Abort(("A",))))


class Leaks(SpecEngine):
    """An engine that loses a free block after an abort."""

    has_aborted = False

    def apply(self, event: v.Event) -> v.Observation:
        self.has_aborted |= isinstance(event, v.Abort)
        return super().apply(event)

    def snapshot(self) -> v.Snapshot:
        shown = super().snapshot()
        return replace(shown, free_queue=shown.free_queue[1:]) if self.has_aborted else shown


class LeaksAndRaises(Leaks):
    """`Leaks`, which also raises after some resets."""

    num_resets = 0

    def apply(self, event: v.Event) -> v.Observation:
        self.num_resets += isinstance(event, v.Reset)
        if self.num_resets > RESETS_MAX:
            raise KeyError("cache")
        return super().apply(event)


class Sync(Leaks):
    """`Leaks` without asynchronous scheduling."""

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {"async"}


def check_with(make_engine: type[SpecEngine], *programs: Program) -> CheckResult:
    """Run a check that suppresses the failures of these programs."""
    named = {f"known/{number}.json": program for number, program in enumerate(programs)}
    known = KnownFindings(OPTIONS, call_here(make_engine), named)
    return check(OPTIONS, place=InProcess(lambda _options: make_engine), shrinks=False, known=known)


def test_a_check_suppresses_known_findings() -> None:
    result = check_with(Leaks, LEAK)
    assert (result.first, result.exit_code) == (None, 0)
    count = result.known_programs["known/0.json"]
    assert count is not None
    assert PATIENCE < count < result.num_episodes
    text = verdict_text(result)
    assert f"known       known/0.json: {count} failures were the same defect" in text
    assert "conforms but for known findings: engine host" in text
    assert any(name.startswith("abort_") for name in result.missing), "it ends each episode"
    assert "not reached " in text


def test_a_check_finds_an_unknown_defect() -> None:
    result = check_with(LeaksAndRaises, LEAK)
    assert result.first is not None
    assert (result.first.sentence, result.exit_code) == ("engine_raises_nothing", 1)
    assert result.known_programs["known/0.json"], "and what is known was seen before"


class LeaksAndAsserts(Leaks):
    """And an assertion of its own fails after some requests."""

    num_requests = 0

    def apply(self, event: v.Event) -> v.Observation:
        self.num_requests += isinstance(event, v.Submit)
        assert self.num_requests <= RESETS_MAX
        return super().apply(event)


class LeaksTwice(Leaks):
    """It loses a free block of many requests, too, without an abort."""

    num_requests = 0

    def apply(self, event: v.Event) -> v.Observation:
        self.num_requests += isinstance(event, v.Submit)
        self.has_aborted |= self.num_requests > RESETS_MAX
        return super().apply(event)


class RaisesTwice(SpecEngine):
    """It raises in an abort, and for two names in another way."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Abort) and len(event.request_ids) > 1:
            raise ZeroDivisionError
        if isinstance(event, v.Abort):
            raise KeyError("A")
        return super().apply(event)


def fail(make_engine: type[SpecEngine], program: Program) -> EpisodeResult:
    """An episode in which this program was drawn, and failed."""
    _, findings = run_program(program, make_engine)
    return EpisodeResult(0, 1, {}, {}, {}, {}, True, program=program, first=findings[0])


def test_the_failure_that_is_shown_is_not_a_known_one() -> None:
    """A shorter failure like it is looked for in other episodes, and the known one is shorter."""
    known = KnownFindings(OPTIONS, call_here(LeaksAndAsserts), {"leak.json": LEAK})
    result = check(OPTIONS, place=InProcess(lambda _options: LeaksAndAsserts), known=known)
    assert result.first is not None
    assert result.failure is not None
    assert result.first.sentence == "engine_raises_nothing"
    assert [it.sentence for it in result.failure.findings] == ["engine_raises_nothing"]
    assert len(result.failure.program.actions) == RESETS_MAX + 1


def test_a_failure_that_does_not_need_the_acts_of_a_known_one_is_another() -> None:
    """Also when many known failures of its check were seen, and when it comes with an abort."""
    submits = tuple(v.Submit(v.Request(name, (1,), 1)) for name in "ABCDE")
    other = Program(v.Config(num_blocks=9), (v.Submit(v.Request("Z", (1,), 1)), *submits))
    both = replace(other, actions=(*LEAK.actions, *submits))
    known = KnownFindings(OPTIONS, call_here(LeaksTwice), {"leak.json": LEAK})
    for _ in range(PATIENCE + 1):
        assert known.pass_over(OPTIONS, fail(LeaksTwice, LEAK)).first is None
    assert known.pass_over(OPTIONS, fail(LeaksTwice, both)).first is None, "it ends at the abort"
    assert known.pass_over(OPTIONS, fail(LeaksTwice, other)).first is not None


def test_another_exception_is_another_defect() -> None:
    known = KnownFindings(OPTIONS, call_here(RaisesTwice), {"raises.json": LEAK})
    both = replace(LEAK, actions=(*LEAK.actions[:1], v.Abort(("A", "B"))))
    assert known.pass_over(OPTIONS, fail(RaisesTwice, LEAK)).first is None
    assert known.pass_over(OPTIONS, fail(RaisesTwice, both)).first is not None


def test_a_known_program_that_passes_now_is_reported() -> None:
    result = check_with(SpecEngine, LEAK)
    assert result.known_programs == {"known/0.json": None}
    assert result.exit_code == (5 if result.missing else 2)
    assert replace(result, missing=()).exit_code == 2
    assert "KNOWN FINDINGS ARE GONE" in verdict_text(replace(result, missing=()))
    assert "gone        known/0.json: it passes now" in verdict_text(result)


def test_a_program_that_cannot_be_played_is_reported() -> None:
    ahead = v.Config(num_blocks=3, max_frames_in_flight=2, async_scheduling=True)
    programs = {"leak.json": LEAK, "ahead.json": replace(LEAK, config=ahead)}
    result = CheckResult(OPTIONS)
    KnownFindings(OPTIONS, call_here(Sync), programs).conclude(result)
    assert result.known_programs == {"leak.json": 0}
    assert result.skipped == {"ahead.json: the engine lacks async": 1}


def test_a_run_with_only_known_failures_gives_no_verdict() -> None:
    result = CheckResult(OPTIONS, 3, 9, missing=("preempted",), canary_killed_after=1)
    assert replace(result, known_programs={"a": 3}).exit_code == 5
    assert replace(result, known_programs={"a": 2}).exit_code == 0
    assert replace(result, known_programs={"a": 0}).exit_code == 5


def test_a_hunt_counts_known_findings_and_lists_the_rest() -> None:
    programs = {"leak.json": LEAK, "sound.json": replace(LEAK, actions=LEAK.actions[:1])}
    result = hunt(
        replace(OPTIONS, max_events=700),
        call_here(LeaksAndRaises),
        scopes=("tiny",),
        known=programs,
    )
    assert [defect.first.sentence for defect in result.defects] == ["engine_raises_nothing"]
    assert result.known_programs["leak.json"]
    assert result.known_programs["sound.json"] is None
    text = render_hunt(result)
    assert "failures were the same defect, and were suppressed" in text
    assert "gone        sound.json: " in text
    assert hunt_to_json(result)["known_programs"] == result.known_programs


def test_a_known_crash_or_hang_is_suppressed() -> None:
    def lose(*_args: object, **_options: object) -> Any:
        raise LostError(Loss("the engine gave no answer within 1 s at: abort A"))

    known = KnownFindings(OPTIONS, lose, {"hangs.json": LEAK})
    again = Loss("the engine gave no answer within 1 s at: abort C D")
    other = Loss("the engine's process ended with exit code 3 at: abort A")
    for loss, name in ((again, "hangs.json"), (other, None)):
        episode = EpisodeResult(0, 1, {}, {}, {}, {}, True, first=loss.finding, loss=loss)
        assert (known.pass_over(OPTIONS, episode).first is None) == (name is not None)
        assert set(known.counts) == {"hangs.json"}


# The command line.


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a corpus that contains a known program."""
    (tmp_path / "corpus" / "known").mkdir(parents=True)
    (tmp_path / "corpus" / "known" / "leak.json").write_text(write_program(LEAK, "P1 leak"))
    (tmp_path / "corpus" / "sound.json").write_text(
        write_program(replace(LEAK, actions=LEAK.actions[:1]))
    )
    return tmp_path / "corpus"


def test_known_programs_are_read_from_a_file_or_a_folder(folder: Path) -> None:
    file = folder / "known" / "leak.json"
    assert read_known(file) == read_known(folder / "known") == {str(file): LEAK}
    (folder / "empty").mkdir()
    with pytest.raises(TraceError, match="no program in it"):
        read_known(folder / "empty")


def test_the_command_line_suppresses_known_findings(folder: Path) -> None:
    """The corpus is played without the known programs."""
    drawn = ("--preset", "tiny", "--depth", 1, "--budget", 600, "--in-process", "--json", "-")
    given = ("--known", folder / "known", "--corpus", folder)
    record = json.loads(blockstep("check", "--engine", f"{__name__}:Leaks", *given, *drawn).stdout)
    assert (record["exit_code"], record["failure"]) == (0, None)
    assert record["known_programs"][str(folder / "known" / "leak.json")] > 0
    assert [row["program_file"] for row in record["corpus"]] == [str(folder / "sound.json")]


def test_a_known_program_of_the_table_fails_if_it_is_played_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = f"{__name__}:Leaks"
    table = f'[tool.blockstep]\nengine = "{engine}"\nknown = "known"\ncorpus = "."\n'
    (folder / "pyproject.toml").write_text(table)
    monkeypatch.chdir(folder)
    result = blockstep("check", "--program", "known/leak.json", "--in-process")
    assert (result.exit_code, "VIOLATION at event 2" in result.output) == (1, True)
    record = json.loads(
        blockstep("hunt", "--preset", "tiny", "--budget", 300, "--in-process", "--json", "-").stdout
    )
    assert str(folder / "known" / "leak.json") in record["known_programs"]
