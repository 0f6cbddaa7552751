"""Recorded runs: a Config and every (event, observation), one JSON line each.

::

    {"format":"blockstep-trace","version":1,"config":{"num_blocks":9,...}}
    {"event":{"type":"Submit","request":{...}},"observation":{"type":"Ack"}}
    {"event":{"type":"Schedule"},"observation":{"type":"Plan","frame_id":0,...}}
    {"end":{"steps":2}}

The rows are the dataclasses of the vocabulary, tagged with their type names. What a line lacks
takes the vocabulary's default, so a trace outlives new fields; what the vocabulary does not know
is refused, so that a newer trace is never half understood. The last line is optional: with it, a
file that lost lines is told from a short run.
"""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import IO, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from blockstep.conformance.protocol.lines import TraceError, read_lines, shown
from blockstep.spec.vocabulary import (
    EVENT_TYPES,
    Config,
    Event,
    Observation,
    config_problems,
)

TRACE_FORMAT = "blockstep-trace"
TRACE_VERSION = 1

OBSERVATION_TYPES: tuple[type, ...] = get_args(Observation)


class TraceStep(NamedTuple):
    """One event and what the engine answered."""

    event: Event
    observation: Observation


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run."""

    config: Config
    steps: tuple[TraceStep, ...]


def write_trace(
    path: Path | str, config: Config, steps: Iterable[tuple[Event, Observation]]
) -> int:
    """Write a run to `path`, gzipped if it ends in ".gz"; returns the number of steps.

    `steps` may be any iterable and is consumed one at a time. Every line is read back before it
    is written: what `read_trace` would not return exactly (a value of a wrong type inside an
    event, say) raises `TraceError`, and the file then ends before that step.
    """
    path = Path(path)
    count = 0
    with _created(path) as file:
        file.write(header_line(path, config))
        for event, observation in steps:
            file.write(step_line(path, count + 2, event, observation))
            count += 1
        file.write(msgspec.json.encode({"end": {"steps": count}}) + b"\n")
    return count


def read_trace(path: Path | str) -> Trace:
    """The run recorded at `path`, gzipped or plain. Raises `TraceError`."""
    path = Path(path)
    lines = read_lines(path)
    _, header = next(lines, (0, ""))
    config = read_header(path, header)
    return Trace(config, tuple(_read_steps(path, lines)))


# --- codec: for each dataclass of the vocabulary a struct with the same fields and defaults


class _Codec:
    """Decodes the vocabulary strictly: msgspec itself lets unknown fields of dataclasses pass."""

    def __init__(self) -> None:
        self._structs: dict[type, type[msgspec.Struct]] = {}
        self._builders: dict[type, Callable[[Any], Any]] = {}
        event = self._union(EVENT_TYPES)
        observation = self._union(OBSERVATION_TYPES)
        header = msgspec.defstruct(
            "Header",
            [("format", str), ("version", int), ("config", self._struct(Config, tagged=False))],
            forbid_unknown_fields=True,
        )
        line = msgspec.defstruct(
            "Line",
            [("event", event), ("observation", observation)],
            forbid_unknown_fields=True,
        )
        self._header = msgspec.json.Decoder(header)
        self._line = msgspec.json.Decoder(line)

    def header(self, text: str) -> Config:
        """The config of a header line. Raises `msgspec.MsgspecError`."""
        row: Any = self._header.decode(text)
        config: Config = self._builders[type(row.config)](row.config)
        return config

    def step(self, text: str) -> TraceStep:
        """The step of a line. Raises `msgspec.MsgspecError`."""
        row: Any = self._line.decode(text)
        event: Event = self._builders[type(row.event)](row.event)
        observation: Observation = self._builders[type(row.observation)](row.observation)
        return TraceStep(event, observation)

    def _union(self, types: tuple[type, ...]) -> Any:
        structs: list[Any] = [self._struct(cls, tagged=True) for cls in types]
        return reduce(or_, structs)

    def _struct(self, cls: type, *, tagged: bool) -> type[msgspec.Struct]:
        if cls in self._structs:
            return self._structs[cls]
        hints = get_type_hints(cls)
        fields: list[Any] = []
        builders: list[tuple[str, Callable[[Any], Any] | None]] = []
        for field in dataclasses.fields(cls):
            annotation, build = self._mirrored(hints[field.name])
            if field.default is not dataclasses.MISSING:
                fields.append((field.name, annotation, field.default))
            elif field.default_factory is not dataclasses.MISSING:
                default = msgspec.field(default_factory=field.default_factory)
                fields.append((field.name, annotation, default))
            else:
                fields.append((field.name, annotation))
            builders.append((field.name, build))
        struct = msgspec.defstruct(
            cls.__name__,
            fields,
            tag=cls.__name__ if tagged else None,
            forbid_unknown_fields=True,
        )
        self._structs[cls] = struct
        self._builders[struct] = _builder(cls, builders)
        return struct

    def _mirrored(self, hint: Any) -> tuple[Any, Callable[[Any], Any] | None]:
        """The struct side of an annotation, and how a value of it becomes the dataclass side."""
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            struct = self._struct(hint, tagged=False)
            return struct, self._builders[struct]
        args = get_args(hint)
        if get_origin(hint) is tuple and len(args) == 2 and args[1] is Ellipsis:
            element, build = self._mirrored(args[0])
            if build is None:
                return hint, None
            one = build
            mirrored: Any = tuple.__class_getitem__((element, ...))
            return mirrored, lambda value: tuple(map(one, value))
        if get_origin(hint) in (Union, UnionType) and len(args) == 2 and args[1] is type(None):
            element, build = self._mirrored(args[0])
            if build is None:
                return hint, None
            some = build
            return element | None, lambda value: None if value is None else some(value)
        return hint, None


def _builder(
    cls: type, fields: list[tuple[str, Callable[[Any], Any] | None]]
) -> Callable[[Any], Any]:
    def build(struct: Any) -> Any:
        values = []
        for name, convert in fields:
            value = getattr(struct, name)
            values.append(value if convert is None or value is None else convert(value))
        return cls(*values)

    return build


_CODEC = _Codec()


# --- writing


@contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("wb")
    except (OSError, ValueError) as error:
        raise TraceError(
            path, 0, f"cannot be written ({error})", "a trace needs a place", "check the path"
        ) from None
    with file:
        if path.suffix != ".gz":
            yield file
            return
        # No name and no time inside: equal runs give equal files.
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped:
            yield zipped  # type: ignore[misc]


def header_line(path: Path, config: Config) -> bytes:
    """The first line of a run. Raises `TraceError` if it would not be read back."""
    row = {"format": TRACE_FORMAT, "version": TRACE_VERSION, "config": config}
    return _checked_line(path, 1, row, config, lambda text: read_header(path, text))


def step_line(path: Path, line: int, event: Event, observation: Observation) -> bytes:
    """The line of a step. Raises `TraceError` if it would not be read back."""
    row = {
        "event": _tagged(path, line, "event", event, EVENT_TYPES),
        "observation": _tagged(path, line, "observation", observation, OBSERVATION_TYPES),
    }
    expected = TraceStep(event, observation)
    return _checked_line(path, line, row, expected, lambda text: read_step(path, line, text))


def _tagged(
    path: Path, line: int, what: str, value: object, types: tuple[type, ...]
) -> dict[str, object]:
    if type(value) not in types:
        raise _unwritable(path, line, f"{what} {shown(value)}")
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(type(value))}  # type: ignore[arg-type]
    return {"type": type(value).__name__, **fields}


def _checked_line(
    path: Path, line: int, row: object, expected: object, read: Callable[[str], object]
) -> bytes:
    try:
        data = msgspec.json.encode(row)
        same = read(data.decode("utf-8")) == expected
    except (msgspec.MsgspecError, TypeError, OverflowError, ValueError, TraceError) as error:
        reason = error.found if isinstance(error, TraceError) else str(error)
        raise _unwritable(path, line, f"{shown(expected)} ({reason})") from None
    if not same:
        raise _unwritable(path, line, shown(expected))
    return data + b"\n"


def _unwritable(path: Path, line: int, found: str) -> TraceError:
    return TraceError(
        path,
        line,
        found,
        "a trace holds well-typed values of the vocabulary only",
        "leave ill-typed events out of recorded runs",
    )


# --- reading


class _AnyHeader(msgspec.Struct):
    """As much of a header as tells whether the rest can be read."""

    format: str
    version: int


class _End(msgspec.Struct, forbid_unknown_fields=True):
    steps: int


class _EndLine(msgspec.Struct, forbid_unknown_fields=True):
    end: _End


_ANY_HEADER = msgspec.json.Decoder(_AnyHeader)
_END_LINE = msgspec.json.Decoder(_EndLine)


def read_header(path: Path, text: str) -> Config:
    """The config of a first line. Raises `TraceError`."""
    try:
        header = _ANY_HEADER.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _no_header(path, text, str(error)) from None
    if header.format != TRACE_FORMAT:
        raise _no_header(path, text, f"format is {shown(header.format)}")
    if header.version != TRACE_VERSION:
        raise TraceError(
            path,
            1,
            f"version {header.version}",
            f"this blockstep reads version {TRACE_VERSION}",
            "use the blockstep that wrote it" if header.version < 1 else "upgrade blockstep",
        )
    try:
        config = _CODEC.header(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad_line(path, 1, text, error) from None
    if config.max_frames_in_flight > 1 and not _has_word(text, "async_scheduling"):
        config = dataclasses.replace(config, async_scheduling=True)
    problems = config_problems(config)
    if problems:
        raise TraceError(
            path,
            1,
            "; ".join(map(str, problems)),
            "the config of a run is one that an engine accepts",
            "record the run again",
        )
    return config


def _has_word(text: str, name: str) -> bool:
    """Whether the config of a first line says so much; before it had the word, several frames in
    flight were asynchronous scheduling."""
    return name in msgspec.json.decode(text)["config"]


def _read_steps(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceStep]:
    for count, (line, text) in enumerate(lines):
        if text.startswith('{"end"'):
            _check_end(path, line, text, count, lines)
            return
        yield read_step(path, line, text)


def read_step(path: Path, line: int, text: str) -> TraceStep:
    """The step of a line. Raises `TraceError`."""
    try:
        return _CODEC.step(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad_line(path, line, text, error) from None


def _check_end(
    path: Path, line: int, text: str, count: int, lines: Iterator[tuple[int, str]]
) -> None:
    try:
        end = _END_LINE.decode(text).end
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad_line(path, line, text, error) from None
    if end.steps != count:
        raise TraceError(
            path,
            line,
            f"{count} steps before it",
            f"the end line promises {end.steps}",
            "record the run again, or delete the end line to read what is left",
        )
    for extra, _ in lines:
        raise TraceError(
            path,
            extra,
            "a line after the end line",
            "the end line is the last",
            "keep one run per file",
        )


def _no_header(path: Path, text: str, reason: str) -> TraceError:
    found = f"{shown(text)} ({reason})" if text else "no line at all"
    return TraceError(
        path,
        1,
        found,
        f'the first line of a recorded run is {{"format":"{TRACE_FORMAT}",...}}',
        "give a recorded run (a workload goes to `blockstep replay`)",
    )


def _bad_line(path: Path, line: int, text: str, error: Exception) -> TraceError:
    reason = str(error)
    newer = "unknown field" in reason or ("Invalid value" in reason and ".type`" in reason)
    return TraceError(
        path,
        line,
        f"{reason} in {shown(text)}",
        "a line of a recorded run is one JSON object in the words of the vocabulary",
        "it seems newer than this blockstep: upgrade" if newer else "record the run again",
    )
