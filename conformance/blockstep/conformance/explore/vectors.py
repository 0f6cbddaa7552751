"""Vectors: programs with the right observations and states, in a file that any language can read.

::

    {"format":"blockstep-vectors","version":1,"spec":"0.1.0","preset":"loop","programs":2,"sha256":"..."}
    {"format":"blockstep-trace","version":1,"config":{"num_blocks":3,...}}
    {"program":1,"steps":2}
    {"event":{"type":"Submit","request":{...}},"observation":{"type":"Ack"}}
    {"snapshot":{"pause_state":"unpaused","waiting":["A"],...}}
    ...

The second line and the steps are those of a recorded run (`traces`); after each step comes the
state after it. The manifest holds the SHA-256 of everything below it, so a file that was changed
is distinguished from one on which an engine fails. Described in docs/reference/vectors.md.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from blockstep.conformance.explore.cover import choose, trace_program
from blockstep.conformance.explore.shard import Task
from blockstep.conformance.explore.walk import walk
from blockstep.conformance.explore.world import World
from blockstep.conformance.protocol.codec import StateForm, from_form, to_form
from blockstep.conformance.recorded.traces import TraceError, read_lines, recorded
from blockstep.spec import vocabulary as v
from blockstep.spec.oracle import Oracle
from blockstep.spec.profiles import initial_state

VECTORS_FORMAT = "blockstep-vectors"
VECTORS_VERSION = 1

T = TypeVar("T")


class _StateLine(msgspec.Struct, forbid_unknown_fields=True):
    snapshot: StateForm


class _ProgramLine(msgspec.Struct, forbid_unknown_fields=True):
    program: int
    steps: int


class _AnyManifest(msgspec.Struct):
    format: str
    version: int


class Manifest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The first line of a file of vectors."""

    format: str
    version: int
    spec: str
    """The version of Blockstep that wrote the file."""
    preset: str
    programs: int
    sha256: str
    """Digest of all lines below, each with its line feed."""


@dataclass(frozen=True, slots=True)
class VectorStep:
    """One event, and the right observation and state after it."""

    event: v.Event
    observation: v.Observation
    snapshot: v.Snapshot


@dataclass(frozen=True, slots=True)
class Vectors:
    """A file of vectors."""

    manifest: Manifest
    config: v.Config
    programs: tuple[tuple[VectorStep, ...], ...]


# --- writing


def write_vectors(
    path: Path, preset: str, config: v.Config, programs: Sequence[Sequence[v.Event]]
) -> Manifest:
    """Play each program on the specification and write its observations; gzipped for ".gz".

    Raises:
        TraceError: the file cannot be written, or an event holds a value of a wrong type.
    """
    lines = [recorded.header_line(path, config)]
    for number, events in enumerate(programs, 1):
        lines.append(_encode(_ProgramLine(number, len(events))))
        oracle = Oracle(config)
        for event in events:
            answer = oracle.apply(event)
            if isinstance(answer, v.Rejected):
                answer = v.Rejected(answer.code)  # the wording is not compared
            lines.append(recorded.step_line(path, 0, event, answer))
            lines.append(_encode(_StateLine(to_form(oracle.snapshot()))))
    body = b"".join(lines)
    spec, digest = version("blockstep"), sha256(body).hexdigest()
    manifest = Manifest(VECTORS_FORMAT, VECTORS_VERSION, spec, preset, len(programs), digest)
    data = _encode(manifest) + body
    try:
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        found = f"cannot be written ({error.strerror or error})"
        raise TraceError(path, 0, found, "vectors need a place", "check the path") from None
    return manifest


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


# --- filling


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of `fill`."""

    manifest: Manifest
    num_events: int
    num_deeds: int
    """Branches, coverage goals and observations that the programs cover: all that the walk met."""
    num_states: int
    is_complete: bool
    """Whether the walk visited every state."""


def fill(
    path: Path,
    world: World,
    max_states: int,
    on_progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Filled:
    """Walk `world`, up to `max_states`, and write the programs that cover what was met.

    Raises:
        TraceError: the file cannot be written.
    """
    task = Task(world, properties=False, deeds=True, max_states=max_states)
    walked = walk(task, on_progress=on_progress)
    start = initial_state(world.config)
    programs: list[tuple[v.Event, ...]] = [*walked.programs, world.mistakes]
    deeds = [trace_program(start, events) for events in programs]
    chosen = choose([(len(events), done) for events, done in zip(programs, deeds, strict=True)])
    kept = [programs[index] for index in sorted({*chosen, len(programs) - 1})]
    return Filled(
        manifest=write_vectors(path, world.name, world.config, kept),
        num_events=sum(map(len, kept)),
        num_deeds=len(frozenset[str]().union(*deeds)),
        num_states=walked.counts.states,
        is_complete=walked.is_complete,
    )


# --- reading


def read_vectors(path: Path) -> Vectors:
    """Return the vectors at `path`, gzipped or plain. Raises `TraceError`."""
    lines = [text for _, text in read_lines(path)]
    manifest = _read_manifest(path, lines[0] if lines else "")
    body = "".join(f"{text}\n" for text in lines[1:]).encode("utf-8")
    digest = sha256(body).hexdigest()
    if digest != manifest.sha256:
        found = f"the lines below hash to {digest[:12]}..."
        rule = f"the manifest says {manifest.sha256[:12]}...: the file was changed"
        fix = "fetch it again, or fill it again with `blockstep vectors fill`"
        raise TraceError(path, 1, found, rule, fix)
    if len(lines) < 2:
        raise _bad(path, 2, "no line with the config", "the config is the line below the manifest")
    config, *_ = recorded.read_header(path, lines[1])
    programs = tuple(_read_programs(path, enumerate(lines[2:], 3)))
    if len(programs) != manifest.programs:
        promised = f"the manifest says {manifest.programs}"
        raise _bad(path, 1, f"{len(programs)} programs", promised)
    return Vectors(manifest, config, programs)


def _read_manifest(path: Path, text: str) -> Manifest:
    rule = f'the first line of vectors is {{"format":"{VECTORS_FORMAT}",...}}'
    found = _decode(path, 1, text, _AnyManifest, rule)
    if found.format != VECTORS_FORMAT:
        raise _bad(path, 1, f"format {found.format!r}", rule)
    if found.version != VECTORS_VERSION:
        readable = f"this blockstep reads version {VECTORS_VERSION}"
        raise _bad(path, 1, f"version {found.version}", readable)
    return _decode(path, 1, text, Manifest, rule)


def _decode(path: Path, line: int, text: str, kind: type[T], rule: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(path, line, str(error), rule) from None


def _read_programs(
    path: Path, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[VectorStep, ...]]:
    for line, text in lines:
        rule = 'a program starts with {"program":N,...}'
        head = _decode(path, line, text, _ProgramLine, rule)
        steps = []
        for _ in range(head.steps):
            pair = list(islice(lines, 2))
            if len(pair) < 2:
                rule = f"program {head.program} has {head.steps} steps"
                raise _bad(path, line, "the file ends", rule)
            (at, step_text), (_, state_text) = pair
            step = recorded.read_step(path, at, step_text)
            steps.append(VectorStep(*step, _read_state(path, at + 1, state_text)))
        yield tuple(steps)


def _read_state(path: Path, line: int, text: str) -> v.Snapshot:
    rule = "after each step comes the state after it"
    form = _decode(path, line, text, _StateLine, rule).snapshot
    try:
        return from_form(form)
    except msgspec.ValidationError as error:
        raise _bad(path, line, str(error), "cached blocks have a key") from None


def _bad(path: Path, line: int, found: str, rule: str) -> TraceError:
    fix = "fill the file again with `blockstep vectors fill`, or upgrade blockstep"
    return TraceError(path, line, found, rule, fix)
