"""Recorded runs: a Config and every (event, observation), one JSON line each.

::

    {"format":"blockstep-trace","version":1,"config":{"num_blocks":9,...}}
    {"event":{"type":"Submit","request":{...}},"observation":{"type":"Ack"}}
    {"event":{"type":"Schedule"},"observation":{"type":"Plan","frame_id":0,...}}
    {"end":{"steps":2}}

The rows are the dataclasses of the vocabulary, tagged with their type names. A field that a line
lacks has the vocabulary's default, so old traces survive new fields; an unknown field is an error,
so a newer trace is never read in part. The last line is optional: with it, a file that lost lines
differs from a short run. For an engine with a weaker equivalence than `exact` the first line names
it: "equivalence":"safety". It also has the declared deviations that occurred in the run, without
the steps in which they are allowed.
"""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, get_args

import msgspec

from blockstep.conformance.engine import EQUIVALENCES, EXACT
from blockstep.conformance.protocol.codec import build, build_tagged, get_fields
from blockstep.conformance.protocol.kv_event_json import to_forms
from blockstep.conformance.protocol.trace_lines import TraceError, read_lines, shown
from blockstep.spec.vocabulary import (
    EVENT_TYPES,
    Config,
    Event,
    Observation,
    Outputs,
    ResetDone,
    config_problems,
)

TRACE_FORMAT = "blockstep-trace"
TRACE_VERSION = 1

LEFT_OUT_WHEN_EMPTY = (
    *("remapped_req_ids", "ending_req_ids"),
    *("num_common_prefix_blocks", "new_block_ids_to_zero", "kv_events"),
)
"""Fields that are newer than the first traces and mostly empty; they are written only if not empty.
"""

OBSERVATION_TYPES: tuple[type, ...] = get_args(Observation)
_EVENTS = {cls.__name__: cls for cls in EVENT_TYPES}
_OBSERVATIONS = {cls.__name__: cls for cls in OBSERVATION_TYPES}


class TraceStep(NamedTuple):
    """One event and the engine's observation."""

    event: Event
    observation: Observation


class Excuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a deviation that the run's engine declares (`engine.Deviation`)."""

    name: str
    summary: str
    sentences: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run."""

    config: Config
    steps: tuple[TraceStep, ...]
    equivalence: str = EXACT
    """The equivalence at which its engine is compared: one of `engine.EQUIVALENCES`, or `exact`."""
    excuses: tuple[Excuse, ...] = ()
    """The deviations that occurred in the run."""


def write_trace(
    path: Path | str,
    config: Config,
    steps: Iterable[tuple[Event, Observation]],
    equivalence: str = EXACT,
    excuses: tuple[Excuse, ...] = (),
) -> int:
    """Write a run to `path`, gzipped if it ends in ".gz"; returns the number of steps.

    `steps` may be any iterable and is consumed one at a time. Every line is read back before it is
    written: if `read_trace` would not return it exactly (for example a value of a wrong type in an
    event), `TraceError` is raised, and the file ends before that step.
    """
    path = Path(path)
    count = 0
    with _created(path) as file:
        file.write(header_line(path, config, equivalence, excuses))
        for event, observation in steps:
            file.write(step_line(path, count + 2, event, observation))
            count += 1
        file.write(msgspec.json.encode({"end": {"steps": count}}) + b"\n")
    return count


def read_trace(path: Path | str) -> Trace:
    """Return the run recorded at `path`, gzipped or plain. Raises `TraceError`."""
    path = Path(path)
    lines = read_lines(path)
    _, header = next(lines, (0, ""))
    config, equivalence, excuses = read_header(path, header)
    return Trace(config, tuple(_read_steps(path, lines)), equivalence, excuses)


# --- lines


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    config: dict[str, Any]
    equivalence: str = EXACT
    excuses: tuple[Excuse, ...] = ()


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    event: dict[str, Any]
    observation: dict[str, Any]


_HEADER = msgspec.json.Decoder(_Header)
_LINE = msgspec.json.Decoder(_Line)


# --- writing


@contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("wb") as file:
            if path.suffix != ".gz":
                yield file
                return
            # The archive has no name and no time, so equal runs give equal files.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped:
                yield zipped  # type: ignore[misc]
    except (OSError, ValueError) as error:
        raise TraceError(
            path, 0, f"cannot be written ({error})", "a trace needs a place", "check the path"
        ) from None


def header_line(
    path: Path, config: Config, equivalence: str = EXACT, excuses: tuple[Excuse, ...] = ()
) -> bytes:
    """Return the first line of a run. Raises `TraceError` if it would not be read back."""
    row = {"format": TRACE_FORMAT, "version": TRACE_VERSION, "config": config}
    row |= {} if equivalence == EXACT else {"equivalence": equivalence}
    row |= {"excuses": excuses} if excuses else {}
    expected = (config, equivalence, excuses)
    return _checked_line(path, 1, row, expected, lambda text: read_header(path, text))


def step_line(path: Path, line: int, event: Event, observation: Observation) -> bytes:
    """Return the line of a step. Raises `TraceError` if it would not be read back."""
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
    fields = get_fields(value)
    for name in LEFT_OUT_WHEN_EMPTY:
        if fields.get(name) == ():
            del fields[name]
    if isinstance(value, Outputs | ResetDone) and value.kv_events:
        fields["kv_events"] = to_forms(value.kv_events)
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
    """The fields of a header that tell whether the rest can be read."""

    format: str
    version: int


class _End(msgspec.Struct, forbid_unknown_fields=True):
    steps: int


class _EndLine(msgspec.Struct, forbid_unknown_fields=True):
    end: _End


_ANY_HEADER = msgspec.json.Decoder(_AnyHeader)
_END_LINE = msgspec.json.Decoder(_EndLine)


def read_header(path: Path, text: str) -> tuple[Config, str, tuple[Excuse, ...]]:
    """Return the config, equivalence and declared deviations of a first line.

    Raises `TraceError`.
    """
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
        full_header = _HEADER.decode(text)
        raw = full_header.config
        config = build(raw, Config, "$.config")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad_line(path, 1, text, error) from None
    if config.max_frames_in_flight > 1 and "async_scheduling" not in raw:
        # Older files have no word for asynchronous scheduling: several frames in flight meant it.
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
    known = (EXACT, *(kind.name for kind in EQUIVALENCES))
    if full_header.equivalence not in known:
        rule = f"an equivalence is one of {', '.join(known)}"
        fix = "it seems newer than this blockstep: upgrade"
        raise TraceError(path, 1, f"equivalence {shown(full_header.equivalence)}", rule, fix)
    return config, full_header.equivalence, full_header.excuses


def _read_steps(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceStep]:
    for count, (line, text) in enumerate(lines):
        if text.startswith('{"end"'):
            _check_end(path, line, text, count, lines)
            return
        yield read_step(path, line, text)


def read_step(path: Path, line: int, text: str) -> TraceStep:
    """Return the step of a line. Raises `TraceError`."""
    try:
        row = _LINE.decode(text)
        return TraceStep(
            build_tagged(row.event, _EVENTS, "$.event"),
            build_tagged(row.observation, _OBSERVATIONS, "$.observation"),
        )
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
            f"the end line says {end.steps}",
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
        "a line of a recorded run is one JSON object of vocabulary values",
        "it seems newer than this blockstep: upgrade" if newer else "record the run again",
    )
