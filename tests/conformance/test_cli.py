"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner, Result

from blockstep.conformance.cli import app, parse_budget
from blockstep.conformance.traces import read_trace, write_trace
from blockstep.spec.vocabulary import Ack, Plan

COMMANDS = ("check", "replay", "validate", "properties", "engines", "explain", "museum")


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


def test_help_lists_every_command_and_the_exit_codes() -> None:
    result = blockstep("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)
    assert "4 liveness" in " ".join(result.output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = blockstep(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_failure_has_the_face_of_the_product(snapshot: SnapshotAssertion) -> None:
    result = blockstep("check", "--engine", "museum:zombie-key", "--seed", 0, "--budget", 150_000)
    assert result.exit_code == 1
    assert result.output == snapshot


def test_a_leak_is_reported_with_its_property(snapshot: SnapshotAssertion) -> None:
    result = blockstep(
        "check", "--engine", "museum:leak-on-abort", "--preset", "tiny", "--budget", 50_000
    )
    assert result.exit_code == 1
    assert result.output == snapshot


def test_a_short_run_gives_no_verdict() -> None:
    result = blockstep("check", "--budget", "300", "--preset", "tiny", "--jobs", "1")
    assert result.exit_code == 5
    assert "NO VERDICT" in result.output
    assert "not reached" in result.output


def test_one_episode_is_enough_to_reproduce() -> None:
    result = blockstep("check", "--episode", "3", "--preset", "tiny")
    assert result.exit_code == 0
    assert result.output.startswith("conforms: engine host")


def test_json_of_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    args = ("check", "--engine", "museum:oldest-preempted", "--budget", 100_000, "--json", path)
    assert blockstep(*args).exit_code == 1
    result = json.loads(path.read_text())
    assert (result["format"], result["version"]) == ("blockstep-check", 1)
    assert result["exit_code"] == 1
    assert not result["conforms"]
    assert result["failure"]["program"]
    assert result["failure"]["reproduce"].startswith("blockstep check --engine museum:oldest")
    assert result["failure"]["findings"][0]["property"] == "P16"


def test_json_on_standard_output_is_all_there_is() -> None:
    result = blockstep("check", "--episode", "1", "--preset", "tiny", "--json", "-")
    assert json.loads(result.stdout)["conforms"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("check", "--engine", "nowhere"), "neither one of"),
        (("check", "--engine", "no.such.module:make"), "cannot load"),
        (("check", "--engine", "json:nothing"), "cannot load"),
        (("check", "--engine", "json:__name__"), "not callable"),
        (("check", "--engine", "museum:nothing"), "no such exhibit"),
        (("check", "--preset", "huge"), "tiny, small, real"),
        (("check", "--budget", "soon"), "60s"),
        (("check", "--budget", "0s"), "60s"),
        (("check", "--record", "x.jsonl"), "needs --episode"),
        (("check", "--policy", "random"), "policy"),
        (("check", "--episode", "0", "--preset", "tiny", "--json", "/no/such/dir/x"), "write"),
        (("explain", "nothing-of-that-name"), "no property"),
        (("replay", "/no/such/file"), "/no/such/file"),
        (("validate", "/no/such/file"), "/no/such/file"),
        (("museum", "run", "nothing"), "no such exhibit"),
    ],
)
def test_usage_errors_name_the_input_and_the_rule(args: tuple[str, ...], says: str) -> None:
    result = blockstep(*args)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_budgets() -> None:
    assert parse_budget("90s") == (None, 90.0)
    assert parse_budget("2m") == (None, 120.0)
    assert parse_budget("200_000") == (200_000, None)
    assert parse_budget("500 events") == (500, None)


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
    # The worker speaks for the rest: it sees what is written and read.
    assert all(listed[name]["checks"] for name in wanted)


def test_engines_are_listed_with_what_they_implement() -> None:
    result = blockstep("engines")
    assert result.exit_code == 0
    assert "host" in result.output
    assert "snapshot" in result.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("P4", "publish"),
        ("slots.revoke_slots", "#43569"),
        ("allocate_slots", "P7"),
        ("preempted", "situation preempted"),
    ],
)
def test_explain_a_name(name: str, says: str) -> None:
    result = blockstep("explain", name)
    assert result.exit_code == 0
    assert says in result.output


def test_explain_suggests_what_is_close() -> None:
    assert "slots.allocate_slots" in blockstep("explain", "allocate_slot").output


def test_record_validate_explain(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    assert blockstep("check", "--episode", 2, "--preset", "tiny", "--record", path).exit_code == 0
    assert blockstep("validate", path).output.startswith("conforms: run.jsonl.gz")
    trace = read_trace(path)
    told = blockstep("explain", path, "--at", 3)
    assert told.exit_code == 0
    assert "evicted next:" in told.output
    assert blockstep("explain", path, "--at", len(trace.steps) + 1).exit_code == 2
    # Now with one answer bent.
    number = next(i for i, step in enumerate(trace.steps) if isinstance(step.observation, Plan))
    steps = list(trace.steps)
    write_trace(path, trace.config, [*steps[:number], (steps[number].event, Ack())])
    result = blockstep("validate", path)
    assert result.exit_code == 1
    assert f"DIVERGENCE at step {number + 1} of {number + 1}" in result.output


def test_museum_is_listed() -> None:
    result = blockstep("museum")
    assert result.exit_code == 0
    assert "zombie-key" in result.output


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


def test_replay_of_a_broken_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE + '{"timestamp": 0, "input_length": -3}\n')
    result = blockstep("replay", path)
    assert result.exit_code == 2
    assert "2" in result.output
    assert "Traceback" not in result.output


def test_replay_with_a_config_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    result = blockstep("replay", path, "--max-num-seqs", 0)
    assert result.exit_code == 2
