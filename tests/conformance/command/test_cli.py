"""The command line: output, JSON and exit codes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.traces import read_trace, write_trace
from blockstep.conformance.search.options import read_budget
from blockstep.spec.vocabulary import Ack, Plan

COMMANDS = (
    *("check", "hunt", "campaign", "prove", "explore", "vectors", "generate", "arms", "replay"),
    *("validate", "properties", "engines", "explain", "quirks", "museum"),
)


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = blockstep(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_short_run_gives_no_verdict() -> None:
    result = blockstep("check", "--budget", "300", "--preset", "tiny", "--jobs", "1")
    assert result.exit_code == 5
    assert "NO VERDICT" in result.output
    assert "not reached" in result.output


def test_a_check_of_one_episode_has_a_verdict() -> None:
    result = blockstep("check", "--episode", "3", "--preset", "tiny")
    assert result.exit_code == 0
    assert result.output.startswith("conforms: engine host")


def test_json_of_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    args = ("check", "--engine", "museum:oldest-preempted", "--budget", 100_000, "--json", path)
    assert blockstep(*args).exit_code == 1
    result = json.loads(path.read_text())
    assert (result["format"], result["version"]) == ("blockstep-check", 2)
    assert result["exit_code"] == 1
    assert not result["conforms"]
    assert result["failure"]["program"]
    assert result["failure"]["reproduce"].startswith("blockstep check --engine museum:oldest")
    assert result["failure"]["findings"][0]["property"] == "P16"
    again = result["failure"]["reproduce"].split()[1:]
    assert blockstep(*again, "--json", path).exit_code == 1
    assert json.loads(path.read_text())["failure"] == result["failure"]


def test_json_is_alone_on_standard_output() -> None:
    result = blockstep("check", "--episode", "1", "--preset", "tiny", "--json", "-")
    assert json.loads(result.stdout)["conforms"]


ENGINES = """
import os, signal, time
from dataclasses import replace
from blockstep.conformance.engine import EngineTraits
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.search import episodes
from blockstep.conformance.lockstep.canary import CanaryEngine
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Abort

class Failing(SpecEngine):
    def apply(self, event):
        if isinstance(event, Abort):
            self.fail()
        return super().apply(event)

class Aborting(Failing):
    def fail(self):
        os.abort()

class Raising(Failing):
    def fail(self):
        raise KeyError("no such request")

class Hanging(Failing):
    def fail(self):
        print("waiting for a lock", flush=True)
        while True:
            pass

class Stubborn(Failing):
    def fail(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

class NeverBuilt(SpecEngine):
    def __init__(self, config):
        while True:
            time.sleep(1)

class Reached(SpecEngine):
    # No coverage goal can be reached, so a short run has a verdict.
    traits = EngineTraits(out_of_reach=frozenset(WITNESSES))

class Meddling(SpecEngine):
    def capabilities(self):
        episodes.draw_swarm = None
        return super().capabilities()
"""


def check_engine(folder: Path, name: str, *args: object) -> Result:
    (folder / "cli_engines.py").write_text(ENGINES)
    engine = ("check", "--engine", f"cli_engines:{name}", "--path", folder, "--preset", "tiny")
    return blockstep(*engine, "--event-seconds", 1, *args)


def test_an_isolated_engine_can_conform(tmp_path: Path) -> None:
    result = check_engine(tmp_path, "Reached", "--budget", 1_200, "--jobs", 2)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("conforms: engine cli_engines:Reached, ")
    assert result.stdout.startswith("conforms: 1,")
    assert "coverage goals reached" not in result.output, "the table is shown if it is asked for"


@pytest.mark.parametrize(
    ("name", "jobs", "headline", "message"),
    [
        ("CanaryEngine", 2, "VIOLATION", "P1 every_block_is_free_or_held"),
        ("Aborting", 2, "FAULT", "the engine's process was ended by SIGABRT at: abort "),
        ("Stubborn", 2, "FAULT", "the engine gave no answer within 1 s at: abort "),
    ],
)
def test_a_failing_isolated_engine_is_reported_with_its_episode(
    tmp_path: Path, name: str, jobs: int, headline: str, message: str
) -> None:
    started = time.monotonic()
    result = check_engine(tmp_path, name, "--budget", 3000, "--jobs", jobs)
    assert time.monotonic() - started < 30
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"blockstep check: {headline} at event ")
    assert lines[0].endswith(f"engine cli_engines:{name}, preset tiny, seed 0)")
    assert message in " ".join(result.output.split())
    again = f"blockstep check --engine cli_engines:{name} --path {tmp_path} --preset tiny --seed 0"
    assert f"  reproduce  {again} --episode " in result.output
    if name != "CanaryEngine":  # the report shows the engine's stack
        assert 'cli_engines.py", line ' in result.output


def test_an_engine_whose_constructor_hangs_is_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockstep.conformance.search.isolation.process.BUILD_SECONDS", 4.0)
    result = check_engine(tmp_path, "NeverBuilt")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "FAULT at event 0: the engine gave no answer within 4 s while being built" in text
    assert "(engine cli_engines:NeverBuilt, " in text
    assert "in __init__" in text


def test_json_of_an_engine_that_hangs(tmp_path: Path) -> None:
    result = check_engine(tmp_path, "Hanging", "--json", "-", "--jobs", 1)
    record = json.loads(result.stdout)
    failure = record["failure"]
    assert (result.exit_code, record["exit_code"], record["conforms"]) == (1, 1, False)
    assert (record["format"], record["engine"]) == ("blockstep-check", "cli_engines:Hanging")
    assert [finding["kind"] for finding in failure["findings"]] == ["fault"]
    assert len(failure["program"]) == failure["event"] > 0
    assert failure["program"][-1].startswith("abort")
    # The command of `reproduce` gives the same message.
    again = blockstep(*failure["reproduce"].split()[1:])
    assert failure["findings"][0]["message"] in " ".join(again.output.split())


def test_a_run_in_this_process_prints_the_same_report(tmp_path: Path) -> None:
    there, here = (
        check_engine(tmp_path, "Raising", *args) for args in ((), ("--in-process", "--jobs", "2"))
    )
    assert here.exit_code == there.exit_code == 1
    assert here.stdout == there.stdout
    assert here.stdout.startswith("blockstep check: FAULT at event ")
    assert "the engine raised KeyError: 'no such request'" in here.stdout


def test_an_episode_of_an_isolated_engine_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    args = ("--episode", 2, "--record", path)
    assert check_engine(tmp_path, "SpecEngine", *args).exit_code == 0
    assert blockstep("validate", path).exit_code == 0
    again = ("--seed", 5, "--episode", 6, "--record", tmp_path / "lost.jsonl")
    lost = check_engine(tmp_path, "Aborting", *again)
    assert lost.exit_code == 1
    assert "lost.jsonl: nothing to write: the engine's process was ended" in lost.output


def test_a_failure_of_the_check_itself_ends_with_code_5(tmp_path: Path) -> None:
    result = check_engine(tmp_path, "Meddling", "--jobs", 1)
    assert result.exit_code == 5
    assert "blockstep: the check itself failed: Traceback" in result.output


def test_budgets_are_read_as_seconds_or_events() -> None:
    assert read_budget("90s") == (None, 90.0)
    assert read_budget("2m") == (None, 120.0)
    assert read_budget("200_000") == (200_000, None)
    assert read_budget("500 events") == (500, None)


def test_features_can_be_required_and_excluded() -> None:
    wanted = ("--with", "drafts", "--without", "caching,pause", "--without", "async")
    args = ("check", "--engine", "museum:tail-freed-twice", "--preset", "tiny", *wanted)
    result = blockstep(*args, "--budget", 50_000, "--json", "-")
    found = json.loads(result.stdout)
    assert (found["with"], found["without"]) == (["drafts"], ["caching", "pause", "async"])
    assert " spec_method=" in found["failure"]["config"]
    assert "enable_prefix_caching=False" in found["failure"]["config"]
    again = found["failure"]["reproduce"]
    assert "--with drafts --without caching --without pause --without async --seed 0" in again
    reproduced = blockstep(*again.split()[1:])
    assert reproduced.exit_code == 1
    assert f"reproduce  {again}" in reproduced.output


def test_worlds_are_chosen_by_their_features() -> None:
    chosen = blockstep("explore", "--list", "--with", "embeds").output
    assert [line.split()[0] for line in chosen.splitlines()[1:]] == ["embeds"]
    assert "embeds" not in blockstep("explore", "--list", "--without", "embeds").output


def test_properties_are_listed_with_their_checks(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert blockstep("properties", "--json", path).exit_code == 0
    listed = {row["id"]: row for row in json.loads(path.read_text())}
    wanted = [
        "P1",
        "P2",
        "P3",
        "P4",
        "P6",
        "P7",
        "P8",
        "P9",
        "P11",
        "P12",
        "P13",
        "P14",
        "P15",
        "P16",
        "P24",
        "P26",
    ]
    assert set(wanted) <= set(listed)
    # The worker checks the other properties: it sees what is written and read.
    assert all(listed[name]["checks"] for name in wanted)


def test_a_recorded_run_is_validated_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    assert blockstep("check", "--episode", 2, "--preset", "tiny", "--record", path).exit_code == 0
    assert blockstep("validate", path).output.startswith("conforms: run.jsonl.gz")
    trace = read_trace(path)
    explained = blockstep("explain", path, "--at", 3)
    assert explained.exit_code == 0
    assert "evicted next:" in explained.output
    assert blockstep("explain", path, "--at", len(trace.steps) + 1).exit_code == 2
    # Then one observation is changed.
    number = next(i for i, step in enumerate(trace.steps) if isinstance(step.observation, Plan))
    steps = list(trace.steps)
    write_trace(path, trace.config, [*steps[:number], (steps[number].event, Ack())])
    result = blockstep("validate", path)
    assert result.exit_code == 1
    assert f"DIVERGENCE at step {number + 1} of {number + 1}" in result.output


@pytest.mark.parametrize(
    ("command", "first", "entry"),
    [
        ("museum", "pool", "zombie-key"),
        ("quirks", "block_pool", "victim_without_a_row_skips_a_request"),
        ("properties", "P1", "pool_keeps_its_size"),
    ],
)
def test_a_listing_fits_a_screen_and_all_shows_every_entry(
    command: str, first: str, entry: str
) -> None:
    overview = blockstep(command).output
    assert len(overview.splitlines()) <= 32
    assert f"\n{first} " in overview
    assert entry not in overview
    assert entry in blockstep(command, "--all").output


class Judged(SpecEngine):
    traits = EngineTraits(equivalence=Safety())


SAFETY = f"{__name__}:Judged"
MOONCAKE = '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}\n'


def test_replay_in_lock_step_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE * 4)
    out = tmp_path / "out.json"
    both = blockstep("replay", path, "--num-blocks", 64, "--json", out)
    assert both.exit_code == 0
    report = json.loads(out.read_text())
    assert (report["requests_finished"], report["equivalence"]) == (4, "exact")
    alone = blockstep("replay", path, "--no-spec", "--block-size", 16, "--num-blocks", 900)
    assert alone.exit_code == 0


@pytest.mark.parametrize(
    ("args", "seen", "message"),
    [
        (("--without", "caching"), (False, "fcfs"), "conforms"),
        (("--with", "caching", "--with", "priority"), (True, "priority"), "conforms"),
        (("--engine", SAFETY), (True, "fcfs"), "judged by properties alone"),
    ],
)
def test_a_replay_runs_with_the_features_asked_for(
    tmp_path: Path, args: tuple[str, ...], seen: tuple[bool, str], message: str
) -> None:
    path, out = tmp_path / "mooncake.jsonl", tmp_path / "out.json"
    path.write_text(MOONCAKE * 2)
    result = blockstep("replay", path, "--num-blocks", 16, "--json", out, *args)
    assert result.exit_code == 0, result.output
    assert message in " ".join(result.output.split())
    config = json.loads(out.read_text())["config"]
    assert (config["enable_prefix_caching"], config["policy"]) == seen


@pytest.mark.parametrize(
    ("engine", "equivalence", "message"),
    [
        ("foreign_support.toys:PlainToy", "safety", "judged by properties alone"),
        ("foreign_support.toys:AbortingToy", "safety", "judged by properties alone"),
        ("foreign_support.hosts:AtRenamed", "renamed", "up to ids of blocks"),
        ("foreign_support.hosts:AtPlan", "plan", "by its plans"),
    ],
)
def test_an_engine_that_is_not_exact_is_replayed(
    engine: str, equivalence: str, message: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "mooncake.jsonl", tmp_path / "out.json"
    path.write_text(MOONCAKE * 4)
    asked = ("replay", path, "--num-blocks", 64, "--engine", engine, "--json", out)
    result = blockstep(*asked)
    assert result.exit_code == 0, result.output
    assert message in " ".join(result.output.split())
    report = json.loads(out.read_text())
    assert (report["equivalence"], report["requests_finished"]) == (equivalence, 4)
    assert (report["snapshots_taken"] > 0) is (equivalence == "renamed")
    assert ("config    enable_prefix_caching=False" in result.output) is ("toys" in engine)
    assert blockstep(*asked, "--no-spec").exit_code == 0
    refused = blockstep(*asked, "--policy", "priority", "--caching")
    assert refused.exit_code == (2 if "toys" in engine else 0)
    if "toys" in engine:
        assert "lacks priority" in refused.output


@pytest.mark.parametrize("args", [(), ("--no-spec",)])
def test_an_engine_whose_constructor_raises_is_a_fault_of_a_replay(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    path, engine = tmp_path / "mooncake.jsonl", "foreign_support.toys:SmallToy"
    path.write_text(MOONCAKE)
    result = blockstep("replay", path, "--engine", engine, "--num-blocks", 64, *args)
    assert result.exit_code == 1
    assert "FAULT at step 0: engine_raises_nothing" in result.output
    assert "MemoryError: too many blocks" in result.output


def test_a_replay_in_which_nothing_finished_is_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE * 2)
    result = blockstep("replay", path, "--max-model-len", 500)
    assert (result.exit_code, "NO VERDICT (no request finished)" in result.output) == (5, True)
