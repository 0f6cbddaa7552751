"""Recorded runs are read back exactly; files that are damaged or of another kind are refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support.strategies import strategy_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockstep.conformance.recorded.traces import (
    Trace,
    TraceError,
    TraceStep,
    read_trace,
    write_trace,
)
from blockstep.conformance.recorded.traces.recorded import OBSERVATION_TYPES
from blockstep.spec import Oracle
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=9, block_size=4, policy=v.Policy.PRIORITY)
HEADER = '{"format":"blockstep-trace","version":1,"config":{"num_blocks":9}}'
STEP = '{"event":{"type":"Schedule"},"observation":{"type":"Plan","frame_id":0}}'


steps_of_all_types = st.builds(
    TraceStep,
    st.one_of(*(strategy_for(cls) for cls in v.EVENT_TYPES)),
    st.one_of(*(strategy_for(cls) for cls in OBSERVATION_TYPES)),
)


def recorded_run() -> list[tuple[v.Event, v.Observation]]:
    engine = Oracle(CONFIG)
    events: list[v.Event] = [
        v.Submit(v.Request("a", (1, 2, 3, 4, 5), max_tokens=3)),
        v.Submit(v.Request("a", (1,))),
        v.Submit(v.Request("b", tuple(range(300)), items=(v.MultiModalItem("x", 0, 2),))),
        v.Submit(v.Request("c", (7,), adapter="l", cache_salt="s", priority=-1)),
        v.Schedule(),
        v.Commit(0, (v.RowTokens("a", (8,)), v.RowTokens("c", (9,)))),
        v.Abort(("a", "zz")),
        v.Schedule(),
        v.Reset(),
    ]
    return [(event, engine.apply(event)) for event in events]


def test_a_run_is_read_back_exactly(tmp_path: Path) -> None:
    steps = recorded_run()
    for name in ("run.jsonl", "run.jsonl.gz"):
        assert write_trace(tmp_path / name, CONFIG, iter(steps)) == len(steps)
        assert read_trace(str(tmp_path / name)) == Trace(CONFIG, tuple(map(TraceStep._make, steps)))


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_trace(tmp_path / name, CONFIG, recorded_run())
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(steps_of_all_types, max_size=4))
def test_every_value_of_the_vocabulary_is_read_back_exactly(
    steps: list[TraceStep], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "t.jsonl"
    write_trace(path, CONFIG, steps)
    back = read_trace(path)
    # repr differs where == does not: tuple and list, enum and string, bool and int, the detail.
    assert repr(back.steps) == repr(tuple(steps))
    assert back.steps == tuple(steps)
    assert back.config == CONFIG
    assert type(back.config.policy) is v.Policy


def test_a_missing_field_has_the_default_of_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    submit = (
        '{"event":{"type":"Submit","request":{"request_id":"a","prompt_token_ids":[1]}},'
        '"observation":{"type":"Rejected","code":"bad_request"}}'
    )
    path.write_text(f"{HEADER}\n{submit}\n{STEP}\n")
    assert read_trace(path) == Trace(
        v.Config(num_blocks=9),
        (
            TraceStep(v.Submit(v.Request("a", (1,))), v.Rejected(v.RejectCode.BAD_REQUEST)),
            TraceStep(v.Schedule(), v.Plan(0)),
        ),
    )


@pytest.mark.parametrize("is_async", [True, False])
def test_old_files_with_several_frames_are_read_as_asynchronous(
    tmp_path: Path, is_async: bool
) -> None:
    config = v.Config(num_blocks=9, max_frames_in_flight=2, async_scheduling=is_async)
    path = tmp_path / "run.jsonl"
    write_trace(path, config, [(v.Schedule(), v.Plan(0))])
    written = f'"async_scheduling":{"true" if is_async else "false"}'
    assert written in path.read_text()
    assert read_trace(path).config == config
    path.write_text(path.read_text().replace(f",{written}", ""))
    assert read_trace(path).config == dataclasses.replace(config, async_scheduling=True)
    write_trace(path, v.Config(num_blocks=9), [])
    path.write_text(path.read_text().replace(',"async_scheduling":false', ""))
    assert read_trace(path).config == v.Config(num_blocks=9)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        pytest.param("", 1, "no line at all", id="empty"),
        pytest.param("\n", 1, "no line at all", id="blank"),
        pytest.param("hello\n", 1, "first line of a recorded run", id="junk"),
        pytest.param('{"timestamp":0,"hash_ids":[]}\n', 1, "blockstep replay", id="a workload"),
        pytest.param(HEADER.replace("-trace", ""), 1, "format is", id="another format"),
        pytest.param(HEADER.replace(":1,", ":2,"), 1, "upgrade blockstep", id="newer version"),
        pytest.param(HEADER.replace(":9", ':9,"x":1'), 1, "unknown field", id="newer config"),
        pytest.param(HEADER.replace(":9", ":1"), 1, "num_blocks = 1", id="bad config"),
        pytest.param(HEADER.replace(":9", ":true"), 1, "Expected `int`", id="config type"),
        pytest.param(f"{HEADER}\n\n{STEP}", 2, "truncated", id="blank line"),
        pytest.param(f"{HEADER}\n{STEP}\n{STEP[:-9]}", 3, "truncated", id="cut"),
        pytest.param(f"{HEADER}\n{STEP.replace('Schedule', 'Dream')}", 2, "newer than this",
            id="new event"),
        pytest.param(f"{HEADER}\n{STEP.replace(':0', ':0,' + chr(34) + 'x' + chr(34) + ':1')}", 2,
            "newer than this", id="new field"),
        pytest.param(f"{HEADER}\n{STEP.replace(':0', ':0.5')}", 2, "Expected `int`", id="type"),
        pytest.param(f'{HEADER}\n{{"end":{{"steps":1}}}}\n', 2, "says 1", id="lost lines"),
        pytest.param(f'{HEADER}\n{{"end":{{"steps":0}}}}\n{STEP}', 3, "after the", id="two runs"),
        pytest.param(f'{HEADER}\n{{"end":{{}}}}\n', 2, "steps", id="bad end"),
        pytest.param(HEADER + "\n" + "[" * 100_000, 2, "json", id="deep"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recorded_run_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert message.lower() in str(caught.value).lower()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(v.Submit(None), id="no request"),  # type: ignore[arg-type]
        pytest.param(v.Abort(["a"]), id="list"),  # type: ignore[arg-type]
        pytest.param(v.Submit(v.Request("a", (1,), max_tokens=True)), id="bool"),
        pytest.param(v.Submit(v.Request("\ud800", (1,))), id="surrogate"),
        pytest.param(v.Submit(v.Request("a", (object(),))), id="object"),  # type: ignore[arg-type]
        pytest.param("schedule", id="no event"),
    ],
)
def test_an_event_that_could_not_be_read_back_is_not_written(
    tmp_path: Path, event: v.Event
) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(TraceError) as caught:
        write_trace(path, CONFIG, [(v.Schedule(), v.Plan(0)), (event, v.ResetDone(True))])
    assert caught.value.line == 3
    assert read_trace(path).steps == ((v.Schedule(), v.Plan(0)),)


def test_a_path_that_cannot_be_written_or_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "t.jsonl", tmp_path / "no" / "t.gz"):
        with pytest.raises(TraceError):
            write_trace(path, CONFIG, [])
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert caught.value.line == 0
    with pytest.raises(TraceError):
        read_trace("a\0b")


def test_an_ill_typed_observation_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="observation"):
        write_trace(tmp_path / "t", CONFIG, [(v.Schedule(), v.Schedule())])  # type: ignore[list-item]
    with pytest.raises(TraceError):
        write_trace(tmp_path / "t", v.Config(num_blocks=0), [(v.Schedule(), v.Ack())])


def mutations(data: bytes, rng: random.Random) -> bytes:
    kinds: list[Callable[[bytes], bytes]] = [
        lambda b: flipped(b, rng),
        lambda b: b[: rng.randrange(len(b))],
        lambda b: without_line(b, rng),
        lambda b: b[: (at := rng.randrange(len(b)))] + rng.randbytes(3) + b[at:],
    ]
    return rng.choice(kinds)(data)


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def without_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_damaged_file_is_a_trace_or_a_trace_error(tmp_path: Path, name: str) -> None:
    rng = random.Random(41)
    path = tmp_path / name
    write_trace(path, CONFIG, recorded_run())
    whole = path.read_bytes()
    refused = 0
    for _ in range(400):
        path.write_bytes(mutations(whole, rng))
        try:
            assert isinstance(read_trace(path), Trace)
        except TraceError:
            refused += 1
    assert refused > 200, "most damage must be noticed"


def test_a_truncated_gzip_stream_names_the_line_where_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    data = gzip.compress(f"{HEADER}\n{STEP}\n{STEP}\n".encode())
    path.write_bytes(data[:-9])
    with pytest.raises(TraceError, match="gzip stream breaks off"):
        read_trace(path)


def test_a_lost_line_is_noticed_through_the_end_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, CONFIG, recorded_run())
    lines = path.read_text().splitlines()
    for lost in range(1, len(lines) - 1):
        path.write_text("\n".join(lines[:lost] + lines[lost + 1 :]))
        with pytest.raises(TraceError, match="end line says"):
            read_trace(path)
    path.write_text("\n".join(lines[:-1]))
    assert len(read_trace(path).steps) == len(lines) - 2, "the end line is optional"


def test_lines_are_plain_json_tagged_with_type_names(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, CONFIG, [(v.Reset(True), v.ResetDone(False))])
    header, step, end = map(json.loads, path.read_text().splitlines())
    assert (header["format"], header["version"]) == ("blockstep-trace", 1)
    assert step == {
        "event": {"type": "Reset", "reset_running_requests": True, "reset_connector": False},
        "observation": {"type": "ResetDone", "success": False},
    }
    assert end == {"end": {"steps": 1}}
