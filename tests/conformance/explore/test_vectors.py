"""Vectors: written files cover a walk; read files are played or refused, and never crash."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from blockstep.conformance.command.vectors import vectors_app
from blockstep.conformance.explore.canonical import Canonicaliser
from blockstep.conformance.explore.consume import consume
from blockstep.conformance.explore.cover import Tracer, choose, trace_program
from blockstep.conformance.explore.shard import Task
from blockstep.conformance.explore.vectors import fill, read_vectors, write_vectors
from blockstep.conformance.explore.walk import walk
from blockstep.conformance.explore.world import World, get_events
from blockstep.conformance.explore.worlds import WORLDS
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.recorded.traces import TraceError
from blockstep.spec.profiles import initial_state
from blockstep.spec.vocabulary import Config, Event, Rejected, Schedule


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "endings.jsonl"
    fill(path, WORLDS["endings"], 20_000)
    return path


def vectors(*args: object) -> Result:
    return CliRunner().invoke(vectors_app, [str(arg) for arg in args])


def reworked(path: Path, to: Path, change: tuple[str, str]) -> Path:
    """Write the file with `change` made below the manifest, and a manifest that fits again."""
    manifest, body = path.read_text().split("\n", 1)
    assert change[0] in body
    body = body.replace(*change, 1)
    fields = json.loads(manifest) | {"sha256": sha256(body.encode()).hexdigest()}
    to.write_text(json.dumps(fields) + "\n" + body)
    return to


def list_deeds(world: World, programs: Iterable[Iterable[Event]]) -> set[str]:
    start = initial_state(world.config)
    return set[str]().union(*(trace_program(start, events) for events in programs))


@pytest.mark.parametrize("name", ["equals", "whole", "seats", "endings"])
def test_few_programs_take_every_branch_that_the_walk_took(
    name: str, filled: Path, tmp_path: Path
) -> None:
    """A vector is a program. The branches of a walk are those of all its transitions."""
    world, path = WORLDS[name], filled if name == "endings" else tmp_path / "filled.jsonl"
    walked = walk(Task(world, properties=False, deeds=True))
    assert walked.is_complete
    met = list_deeds(world, walked.programs)
    if path is not filled:
        fill(path, world, 20_000)
    programs = [[step.event for step in steps] for steps in read_vectors(path).programs]
    assert met <= list_deeds(world, programs)
    assert len(programs) < len(walked.programs)


def test_programs_of_a_walk_take_every_branch_of_its_transitions() -> None:
    """No transition of a complete walk takes a branch that its programs do not take."""
    world = WORLDS["seats"]
    met = list_deeds(world, walk(Task(world, properties=False, deeds=True)).programs)
    digest, tracer = Canonicaliser(world).digest, Tracer()
    seen, left = set[int](), [initial_state(world.config)]
    while left:
        state = left.pop()
        for event in get_events(world, state):
            moment, done = tracer.apply(state, event)
            assert done <= met
            if digest(moment.after) not in seen:
                seen.add(digest(moment.after))
                left.append(moment.after)
    assert world.expected is not None
    assert len(seen) == world.expected.states


def test_every_finish_reason_is_covered(filled: Path) -> None:
    programs = [[step.event for step in steps] for steps in read_vectors(filled).programs]
    done = list_deeds(WORLDS["endings"], programs)
    assert any("compute_stop" in deed for deed in done)
    assert {"stop_repetition", "stop_eos", "min_tokens_held_back_a_stop"} <= done


def test_filling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    once, again, zipped = (tmp_path / name for name in ("1.jsonl", "2.jsonl", "3.jsonl.gz"))
    for path in (once, again, zipped):
        assert fill(path, WORLDS["loop"], 20_000).is_complete
    assert once.read_bytes() == again.read_bytes()
    assert zipped.stat().st_size < once.stat().st_size
    assert read_vectors(zipped) == read_vectors(once)


def test_vectors_have_events_that_must_be_refused(filled: Path) -> None:
    steps = [step for program in read_vectors(filled).programs for step in program]
    codes = {step.observation.code for step in steps if isinstance(step.observation, Rejected)}
    assert {"bad_request", "prompt_too_long", "bad_result", "unknown_frame"} <= codes
    assert {"malformed_event", "duplicate_request", "bad_drafts", "not_structured"} <= codes
    [*_, last] = read_vectors(filled).programs
    assert sum(not isinstance(step.observation, Rejected) for step in last) == 1


@pytest.mark.parametrize("engine", ["host", "spec"])
def test_a_right_engine_conforms(filled: Path, engine: str) -> None:
    result = consume(read_vectors(filled), load_engine(engine))
    assert result.conforms
    assert result.num_programs == read_vectors(filled).manifest.programs
    assert result.skipped == {}


def test_a_wrong_engine_is_reported_with_its_program_and_step(filled: Path) -> None:
    result = vectors("consume", filled, "--engine", "museum:min-tokens-masks-length")
    assert result.exit_code == 1
    assert "DIVERGENCE in program" in result.output


def test_an_engine_is_not_given_what_it_cannot_do(filled: Path) -> None:
    class Modest(load_engine("host")):  # type: ignore[misc]
        def capabilities(self) -> frozenset[str]:
            return frozenset({"snapshot"})

        def snapshot(self) -> None:
            return None

    result = consume(read_vectors(filled), Modest)
    assert result.conforms
    assert result.skipped["rejection"] > 0
    assert result.num_events > 0


def test_the_greedy_choice_drops_redundant_programs() -> None:
    programs = [
        (3, frozenset("ab")),
        (1, frozenset("c")),
        (9, frozenset("abcd")),
        (2, frozenset("cd")),
    ]
    assert choose(programs) == [2]
    assert choose(programs[:2]) == [0, 1]
    assert choose([]) == []


# --- files that are not as they should be


def test_a_changed_file_is_refused(filled: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.jsonl"
    changed.write_text(filled.read_text().replace('"max_tokens":3', '"max_tokens":2', 1))
    with pytest.raises(TraceError, match="the file was changed"):
        read_vectors(changed)
    result = vectors("consume", changed)
    assert result.exit_code == 2
    assert "manifest says" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"type":"Schedule"', '"type":"Shedule"'), "Invalid value"),
        (('{"program":1,', '{"program":"one",'), "a program starts with"),
        (('{"snapshot":{', '{"snapshot":{"more":1,'), "after each step comes the state"),
        (('"num_blocks":', '"num_blocks":-'), "num_blocks"),
        (('"cached":[],"frames', '"cached":[[77]],"frames'), "cached blocks have a key"),
        (('{"program":2,', '{"program":2,"more":1,'), "a program starts with"),
    ],
)
def test_a_wrong_line_is_refused_with_its_rule(
    filled: Path, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_vectors(reworked(filled, tmp_path / "wrong.jsonl", change))


def test_a_file_without_has_work_does_not_compare_it(tmp_path: Path) -> None:
    now, before = tmp_path / "now.jsonl", tmp_path / "before.jsonl"
    write_vectors(now, "idle", Config(num_blocks=3), [[Schedule()]])
    reworked(now, before, (',"has_work":false', ""))
    assert [one.programs[0][0].snapshot.has_work for one in map(read_vectors, (now, before))] == [
        False,
        None,
    ]
    assert consume(read_vectors(before), load_engine("host")).conforms


def test_old_files_with_several_frames_are_read_as_asynchronous(tmp_path: Path) -> None:
    config = Config(num_blocks=3, max_frames_in_flight=2, async_scheduling=True)
    now, before = tmp_path / "now.jsonl", tmp_path / "before.jsonl"
    write_vectors(now, "pair", config, [[Schedule()]])
    change = (',"async_scheduling":true', "")
    assert read_vectors(reworked(now, before, change)).config == read_vectors(now).config == config


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for text in ("", "{}", '{"format":"blockstep-trace","version":1}', "[1]", "null\n"):
        other.write_text(text)
        with pytest.raises(TraceError, match="first line of vectors"):
            read_vectors(other)
    other.write_text('{"format":"blockstep-vectors","version":2}')
    with pytest.raises(TraceError, match="reads version 1"):
        read_vectors(other)
    assert vectors("consume", tmp_path / "nowhere.jsonl").exit_code == 2
    assert vectors("fill", tmp_path / "no" / "where.jsonl", "--preset", "loop").exit_code == 2


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_changed_bytes_is_read_or_refused(
    filled: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Change bytes below a manifest that fits, so that the reader gets to see them."""
    manifest, _, body = filled.read_bytes().partition(b"\n")
    at = data.draw(st.integers(0, len(body)))
    until = data.draw(st.integers(at, min(at + 40, len(body))))
    body = body[:at] + data.draw(st.binary(max_size=12)) + body[until:]
    digest = sha256(body).hexdigest()
    fields = json.loads(manifest) | {"sha256": digest}
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(json.dumps(fields).encode() + b"\n" + body)
    with suppress(TraceError):
        consume(read_vectors(path), load_engine("host"))


VALUES = [b"null", b"-1", b"9" * 30, b"1e999", b"{}", b"[]", b'"A"', b'"\\ud800"', b"\xff", b"["]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_a_changed_value_is_read_or_refused(
    filled: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Change a value of the manifest, or a value below a manifest that still fits."""
    manifest, _, body = filled.read_bytes().partition(b"\n")
    in_manifest = data.draw(st.booleans())
    part = manifest if in_manifest else body[:20_000]
    spans = [found.span(1) for found in re.finditer(rb'[:\[,]("[^"]*"|-?\d+|null|\[\])', part)]
    start, end = data.draw(st.sampled_from(spans))
    changed = part[:start] + data.draw(st.sampled_from(VALUES)) + part[end:]
    path = tmp_path / "fuzz.jsonl"
    if in_manifest:
        path.write_bytes(changed + b"\n" + body)
    else:
        body = changed + body[20_000:]
        fields = json.loads(manifest) | {"sha256": sha256(body).hexdigest()}
        path.write_bytes(json.dumps(fields).encode() + b"\n" + body)
    with suppress(TraceError):
        consume(read_vectors(path), load_engine("host"))
