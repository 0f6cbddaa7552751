"""Program files: a program is read back exactly as it was written, and has the same run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from engine_support.strategies import strategy_for
from episodes_support import find_failing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.engine import Capability, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Hostile,
    Program,
    Propose,
    describe_config,
    describe_observation,
)
from blockstep.conformance.protocol.program_file import parse_program, read_program, write_program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.trace_lines import TraceError
from blockstep.conformance.report.as_test import write_test
from blockstep.conformance.report.explain_file import describe_state
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import Oracle
from blockstep.spec import vocabulary as v
from blockstep.spec.snapshots import get_snapshot

HERE = Path("it.json")
PROGRAM = Program(
    v.Config(num_blocks=4, block_size=2),
    (v.Submit(v.Request("A", (1, 2), max_tokens=1)), v.Schedule(), Answer()),
)


def make_config(seed: int) -> v.Config:
    return draw_swarm(PRESETS["small"], SeededDraw(str(seed)), None, 4).config


ACTIONS = st.one_of(
    *(strategy_for(kind) for kind in get_args(Action) if kind not in {Hostile, Propose}),
    st.one_of(*(strategy_for(kind) for kind in v.EVENT_TYPES)).map(Hostile),
    strategy_for(Propose).filter(lambda action: bool(action.counts)),
)
PROGRAMS = st.builds(
    Program,
    st.integers(0, 10**6).map(make_config),
    st.lists(ACTIONS, max_size=6).map(tuple),
    st.integers(0, 2**63),
    st.integers(1, 2**40),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS)
def test_every_program_is_read_back_exactly_from_json_and_from_python(program: Program) -> None:
    again = parse_program(write_program(program, 'P1 a "note"'), HERE)
    assert again == program
    assert repr(again) == repr(program)  # tells a tuple from a list, and 1 from True
    names: dict[str, Any] = {}
    exec(write_test(program, 'P1 a "note"\\: and more\n"""'), names)
    assert repr(names["PROGRAM"]) == repr(program)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_a_drawn_program_that_is_read_back_has_the_same_run(seed: int) -> None:
    drawn, program, _ = play_episode(CheckOptions(preset="tiny", seed=seed), 0, SpecEngine, True)
    run, findings = run_program(parse_program(write_program(program), HERE), SpecEngine)
    assert run.exchanges == drawn.exchanges
    assert not findings


def test_a_field_with_its_default_value_may_be_left_out_of_a_file() -> None:
    text = """{"version": 1, "format": "blockstep-program", "config": {"num_blocks": 4},
    "actions": [{"type": "Submit", "request": {"prompt_token_ids": [1], "request_id": "A"}},
    {"type": "Propose", "counts": [[2, 1], [1, 0]]}]}"""
    actions = (v.Submit(v.Request("A", (1,))), Propose(((2, 1), (1, 0))))
    assert parse_program(text, HERE) == Program(v.Config(4), actions)


def test_each_action_is_on_one_line() -> None:
    submit = v.Submit(v.Request("A", (1, 2)))
    program = replace(PROGRAM, actions=(submit, *PROGRAM.actions[1:]))
    lines = write_program(program, "why").splitlines()
    assert lines[-6:] == [
        ' "actions": [',
        '  {"type": "Submit", "request": {"request_id": "A", "prompt_token_ids": [1, 2]}},',
        '  {"type": "Schedule"},',
        '  {"type": "Answer"}',
        " ]",
        "}",
    ]
    assert ' "note": "why",' in lines


@pytest.mark.parametrize(
    "action",
    [
        Hostile("nothing"),  # type: ignore[arg-type]
        Hostile(v.Commit(True, ())),
        Hostile(v.Commit(0, (1,))),  # type: ignore[arg-type]
        Hostile(v.Abort(["A"])),  # type: ignore[arg-type]
        v.Reset(0),  # type: ignore[arg-type]
        v.Submit(v.Request("A", (1.0,))),  # type: ignore[arg-type]
        v.Submit(v.Request("\ud800", (1,))),
        "nothing",
    ],
    ids=repr,
)
@pytest.mark.parametrize("write", [write_program, write_test])
def test_a_program_that_json_cannot_hold_exactly_is_not_written(
    action: Action, write: Callable[[Program], str]
) -> None:
    with pytest.raises(ValueError, match="well-typed values") as error:
        write(replace(PROGRAM, actions=(action,)))
    assert "\n" not in str(error.value)


def dump(**changes: object) -> str:
    value = json.loads(write_program(PROGRAM))
    return json.dumps({name: part for name, part in (value | changes).items() if part != "gone"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "nothing: a program is", id="empty"),
        pytest.param("hello", "malformed", id="junk"),
        pytest.param("[1]", "got `array`", id="a list"),
        pytest.param("[" * 100_000, "a program is a JSON object", id="deep"),
        pytest.param(dump(format="blockstep-trace"), "format is 'blockstep-trace'", id="a trace"),
        pytest.param(dump(version=2), "this blockstep reads version 1; upgrade",
            id="newer version"),
        pytest.param(dump(colour=1), "unknown field `colour`", id="newer program"),
        pytest.param(dump(config={"num_blocks": 4, "x": 1}), "if it is newer", id="newer config"),
        pytest.param(dump(config="gone"), "missing required field `config`", id="no config"),
        pytest.param(dump(config={}), "missing required field `num_blocks`", id="no blocks"),
        pytest.param(dump(config={"num_blocks": 1}), "num_blocks = 1", id="bad config"),
        pytest.param(dump(token_seed="x"), "$.token_seed", id="seed"),
        pytest.param(dump(vocabulary_size=0), "must be 1 or above", id="no tokens"),
        pytest.param(dump(actions=[1]), "$.actions[0]", id="no object"),
        pytest.param(dump(actions=[{}]), "action 1: Invalid value None", id="no type"),
        pytest.param(dump(actions=[{"type": "Drain"}, {"type": "Dream"}]),
            "action 2: Invalid value",
            id="kind"),
        pytest.param(dump(actions=[{"type": "Drain", "x": 1}]), "action 1: unknown", id="field"),
        pytest.param(dump(actions=[{"type": "Submit", "request": {"request_id": "A"}}]),
            "missing required field `prompt_token_ids` - at `$.request`", id="half a request"),
        pytest.param(dump(actions=[{"type": "Propose", "counts": []}]), "names a count", id="none"),
        pytest.param(dump(actions=[{"type": "Hostile"}]), "has one field", id="hostile"),
        pytest.param(dump(actions=[{"type": "Hostile", "event": {"type": "Drain"}}]), "'Drain'",
            id="no event"),
    ],
)  # fmt: skip
def test_a_bad_file_is_rejected_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_program(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value).removeprefix(str(path))) < 450


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceError, match="a program is a readable file"):
            read_program(path)


# Played by `blockstep check`.

LEAKY = "museum:leak-on-abort"
LEAK = Program(
    v.Config(num_blocks=4, block_size=2),
    (v.Submit(v.Request("A", (1, 2), max_tokens=1)), v.Schedule(), v.Abort(("A",))),
)
FLIGHT = replace(LEAK, config=v.Config(num_blocks=4, max_frames_in_flight=2, async_scheduling=True))


def keep(path: Path, program: Program) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(write_program(program, "kept"))
    return path


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


def test_a_failing_program_is_saved_and_fails_again(tmp_path: Path) -> None:
    path, tests = tmp_path / "leak.json", tmp_path / "test_leak.py"
    drawn = ("--preset", "tiny", "--episode", find_failing())
    first = blockstep("check", "--engine", LEAKY, *drawn, "--save", path, "--json", "-")
    assert first.exit_code == 1
    again = blockstep("check", "--engine", LEAKY, "--program", path, "--json", "-", "--save", tests)
    assert again.exit_code == 1
    found, same = json.loads(first.stdout), json.loads(again.stdout)
    assert same["failure"]["findings"] == found["failure"]["findings"]
    assert same["failure"]["program"] == found["failure"]["program"]
    assert same["program_file"] == str(path)
    assert same["episode"] is None
    assert found["program_file"] is None
    note = json.loads(path.read_text())["note"]
    assert note.startswith("P1 every_block_is_free_or_held: ")
    message = found["failure"]["findings"][0]["message"]
    assert note.endswith(message), "the note is about the saved program, not about the longer one"
    names: dict[str, Any] = {}
    exec(tests.read_text(), names)
    assert names["PROGRAM"] == read_program(path)
    assert "test_p1_every_block_is_free_or_held" in names


def test_a_failing_program_is_reported_with_a_line_to_reproduce_it(tmp_path: Path) -> None:
    path = keep(tmp_path / "a leak.json", LEAK)
    result = blockstep("check", "--engine", LEAKY, "--program", path)
    assert f", engine {LEAKY}, program {path})" in result.output.splitlines()[0]
    assert "preset" not in result.output
    assert "shrunk" not in result.output
    again = shlex.split(result.output.splitlines()[-1])
    assert again[:3] == ["reproduce", "blockstep", "check"]
    assert blockstep(*again[2:]).output == result.output


def test_a_program_that_runs_well_conforms(tmp_path: Path) -> None:
    result = blockstep("check", "--program", keep(tmp_path / "leak.json", LEAK))
    assert result.exit_code == 0
    assert result.output.startswith("conforms: engine host, equivalence exact, profile strict")
    assert result.output.endswith("leak.json: 3 events\n")


def test_a_program_that_the_engine_does_not_support_gives_no_verdict(tmp_path: Path) -> None:
    path = keep(tmp_path / "leak.json", FLIGHT)
    for engine in (f"{__name__}:Sync", f"{__name__}:Watched"):
        result = blockstep("check", "--engine", engine, "--program", path, "--in-process")
        assert result.exit_code == 5
        assert "not tried   async: the engine lacks it (3 actions left out)" in result.output
        assert "NO VERDICT (nothing ran)" in result.output


class Sync(SpecEngine):
    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {Capability.ASYNC}


class Watched(Sync):
    traits = EngineTraits(equivalence=Safety())


class Narrow(SpecEngine):
    traits = EngineTraits(
        equivalence=Safety(fit_config=lambda config: replace(config, block_size=1, groups=()))
    )


def test_nothing_is_saved_where_nothing_failed(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    result = blockstep("check", "--episode", 0, "--preset", "tiny", "--save", path)
    assert result.exit_code == 0
    assert f"--save {path}: nothing to write: nothing failed" in result.stderr
    assert not path.exists()


def test_a_corpus_is_played_before_anything_is_drawn(tmp_path: Path) -> None:
    keep(tmp_path / "corpus" / "b.json", LEAK)
    keep(tmp_path / "corpus" / "a.json", PROGRAM)
    options = ("--corpus", tmp_path / "corpus", "--preset", "tiny", "--budget", 300, "--jobs", 1)
    result = blockstep("check", "--engine", LEAKY, *options)
    assert result.exit_code == 1
    assert result.output.splitlines()[0].endswith("b.json)")
    assert result.output.endswith("1 of 2 programs failed, 0 not tried\n")
    record = json.loads(blockstep("check", "--engine", LEAKY, *options, "--json", "-").stdout)
    assert [(Path(row["program_file"]).name, row["exit_code"]) for row in record["corpus"]] == [
        ("a.json", 0),
        ("b.json", 1),
    ]
    assert record["program_file"].endswith("b.json")
    clean = blockstep("check", *options, "--json", "-")
    assert json.loads(clean.stdout)["num_events"] >= 300
    assert "0 of 2 programs failed, 0 not tried" in clean.stderr


def test_unsupported_programs_of_a_corpus_are_listed_and_not_run(
    tmp_path: Path,
) -> None:
    keep(tmp_path / "leak.json", LEAK)
    options = ("--corpus", tmp_path, "--preset", "tiny", "--budget", 300, "--in-process")
    result = blockstep("check", "--engine", f"{__name__}:Narrow", *options, "--json", "-")
    assert "leak.json: config: block_size = 2: is not a config of this engine" in result.stderr
    assert "0 of 1 programs failed, 1 not tried" in result.stderr
    assert json.loads(result.stdout)["num_events"] >= 300


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--program", "{tmp}/good.json", "--corpus", "{tmp}"], "give only one"),
        (["--corpus", "{tmp}"], "bad.json: 'junk'"),
        (["--program", "{tmp}/good.json", "--engine", f"{__name__}:Narrow"], "is not a config"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ",
)
def test_programs_that_cannot_be_played_are_rejected_in_one_line(
    args: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text("junk")
    keep(tmp_path / "good.json", LEAK)
    result = blockstep("check", "--in-process", *(arg.format(tmp=tmp_path) for arg in args))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.output.count("\n") == 1


def test_the_program_of_an_engine_that_crashes_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last event of the program is the one at which the engine crashes, and crashes again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mortal.py").write_text(
        """
import os
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Abort

class Mortal(SpecEngine):
    def apply(self, event):
        if isinstance(event, Abort) and any(map(self.knows, event.request_ids)):
            os._exit(3)
        return super().apply(event)

    def knows(self, name):
        return self.snapshot().request(name) is not None
"""
    )
    path = tmp_path / "ended.json"
    options = ("--preset", "tiny", "--budget", 1000, "--jobs", 1, "--with", "aborts")
    first = blockstep("check", "--engine", "mortal:Mortal", *options, "--save", path)
    assert first.exit_code == 1
    assert "ended with exit code 3" in first.output
    program = read_program(path)
    assert isinstance(program.actions[-1], v.Abort)
    again = blockstep("check", "--engine", "mortal:Mortal", "--program", path)
    assert again.exit_code == 1
    assert "ended with exit code 3" in again.output
    assert again.output.splitlines()[-1].strip() == (
        f"reproduce  blockstep check --engine mortal:Mortal --program {path}"
    )


GROUPED = v.Config(
    num_blocks=30,
    block_size=2,
    max_num_batched_tokens=8,
    groups=(
        v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=3),
        v.KVGroup(v.GroupKind.FULL, 4),
    ),
)


def test_several_groups_are_described_on_one_line() -> None:
    text = describe_config(GROUPED)
    assert text.endswith("groups=sliding_window(block_size=2,sliding_window=3)+full(block_size=4)")
    oracle = Oracle(GROUPED)
    oracle.submit(v.Request("A", tuple(range(9)), max_tokens=2))
    oracle.commit(oracle.schedule(), {})
    plan = oracle.schedule()
    assert describe_observation(plan) == "plan 1: A runs, position 8, blocks 7 | 8"
    state = describe_state(get_snapshot(oracle.state))
    assert "blocks [0 0 0 4 7 | 5 6 8]" in state
    assert "#1[2,3] group 1" in state, "the key of a larger block is of its last tokens"


def test_a_program_with_several_groups_is_read_as_it_was_written() -> None:
    program = Program(GROUPED, (v.Schedule(),))
    assert parse_program(write_program(program), HERE) == program
    namespace: dict[str, Any] = {}
    exec(write_test(program), namespace)
    assert namespace["PROGRAM"] == program
