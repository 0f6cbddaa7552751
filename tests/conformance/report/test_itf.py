"""`--itf`: a run is written as an ITF trace, and its values are valid in this format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.spec import Config, Request, Schedule, Submit

PROGRAM = Program(
    Config(num_blocks=5, block_size=2, max_model_len=16),
    (Submit(Request("A", (1, 2, 3), max_tokens=2)), Schedule(), Answer(), Drain()),
)


def is_itf(value: Any) -> bool:
    """Return whether a value is an expression of the format."""
    match value:
        case bool() | int() | str():
            return True
        case list():
            return all(map(is_itf, value))
        case {"#set": parts}:
            return len(value) == 1 and all(map(is_itf, parts))
        case {"#map": pairs}:
            return len(value) == 1 and all(len(it) == 2 and is_itf(it) for it in pairs)
        case dict():
            return all(not key.startswith("#") and is_itf(part) for key, part in value.items())
    return False


def test_a_program_is_written_as_a_trace(tmp_path: Path) -> None:
    program, trace = tmp_path / "program.json", tmp_path / "run.itf.json"
    program.write_text(write_program(PROGRAM))
    given = ["check", "--engine", "host", "--program", program, "--itf", trace]
    assert CliRunner().invoke(app, [*map(str, given)]).exit_code == 0
    record = json.loads(trace.read_text())
    states = record["states"]
    assert [state.pop("#meta")["index"] for state in states] == [*range(len(states))]
    assert all(state.keys() == set(record["vars"]) for state in states)
    assert all(map(is_itf, states))
    assert [state["running"] for state in states[:3]] == [[], [], ["A"]]
    (name, request), *_ = states[2]["requests"]["#map"]
    assert (name, request["block_tables"], request["num_computed_tokens"]) == ("A", [[1, 2]], 3)
    assert states[-1]["requests"] == {"#map": []}
    assert sorted(states[-1]["free_queue"]) == [1, 2, 3, 4]


def test_itf_needs_a_program() -> None:
    result = CliRunner().invoke(app, ["check", "--engine", "host", "--itf", "x.itf.json"])
    assert result.exit_code == 2
    assert "--itf: needs --program" in result.output
