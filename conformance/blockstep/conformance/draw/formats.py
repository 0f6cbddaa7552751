"""Formats: the published formats of request traces, each as a table of its fields.

=========== ============================================ =======================================
format      fields of a row                              content of the prompt
=========== ============================================ =======================================
mooncake    timestamp (ms), input_length, output_length, one id for each 512 tokens; a partial
            hash_ids; session_id, delay (ms), priority   last block has an id, too
qwen        timestamp (s), input_length, output_length,  the same for each 16 tokens
            hash_ids, chat_id, parent_chat_id
agent       suite, session, timestamp_us, input_length,  one id for each full 16 tokens; the rest
            output_length, hash_ids                      has none and is unique
azure       TIMESTAMP,ContextTokens,GeneratedTokens      unknown: every prompt is unique
burstgpt    Timestamp (s), Request tokens,               unknown: every prompt is unique
            Response tokens
servingsim  arrival_time_ns, input_toks, output_toks,    the token ids themselves; without
            input_tok_ids; or a session's sub_requests   them every prompt is unique
vllm-bench  input_lens, output_lens, start_times (s):    unknown: every prompt is unique
            arrays of one object
=========== ============================================ =======================================

`mooncake` is also what AIPerf and Dynamo write: a row with a `session_id` follows the row before it
in its session, `delay` after that has finished. `qwen` is Qwen-Bailian's: a row follows its parent.
`servingsim` is LLMServingSim's, `vllm-bench` the file that `vllm bench serve --save-result` writes.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from blockstep.conformance.protocol.lines import TraceError, shown

LENGTH_MAX = 1 << 24
"""Tokens of one prompt or output, at most; what is longer is a broken row."""
TOKEN_ID_MAX = (1 << 30) - 1
"""Greatest token id of a prompt: those above are for outputs."""
TICKS_PER_SECOND = 1000
LFS_POINTER = "version https://git-lfs.github.com/spec/"

_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
_Wide: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Time: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    | Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]
)
_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]


class WorkloadFormat(StrEnum):
    """Published trace format."""

    MOONCAKE = "mooncake"
    QWEN = "qwen"
    AGENT = "agent"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SERVINGSIM = "servingsim"
    VLLM_BENCH = "vllm-bench"


class Role(Enum):
    """The meaning of a field of a row."""

    ARRIVAL = "time of arrival"
    INPUT = "prompt tokens"
    OUTPUT = "output tokens"
    BLOCK_IDS = "ids of the prompt's blocks"
    TOKEN_IDS = "token ids of the prompt"  # noqa: S105 - a name of a field
    SPACE = "where block ids are names"
    SESSION = "session"
    CHAT = "id of the row"
    PARENT = "id of the row before it"
    DELAY = "delay after the row before it"
    PRIORITY = "priority"


class Layout(Enum):
    """The way in which rows are written."""

    LINES = "JSON lines"
    CSV = "CSV"
    ARRAYS = "one JSON object of arrays"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One request as a file describes it."""

    time: int | None
    """Milliseconds in the file's own epoch; None: it arrives as soon as the row before it allows.
    """
    input_length: int
    output_length: int
    block_ids: list[int] = field(default_factory=list)
    token_ids: list[int] | None = None
    space: str = ""
    chat: int | str | None = None
    parent: int | str | None = None
    delay: int = 0
    """Milliseconds."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Column:
    """The meaning of a field, and the way to read its values."""

    role: Role
    kind: Any = _Length
    to_value: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """One format."""

    format: WorkloadFormat
    columns: Mapping[str, Column]
    needs: frozenset[Role]
    layout: Layout = Layout.LINES
    block_size: int = 0
    """Tokens that one block id stands for; 0 where there are no ids."""
    has_partial_ids: bool = True
    """Whether a partial last block has an id, too."""
    unused: frozenset[str] = frozenset()
    """Fields that mean nothing to a scheduler: they are ignored."""
    has_calls: bool = False
    """Whether a line may be a session: its calls are in `sub_requests`, each with the time that a
    tool takes after it."""

    def count_ids(self, length: int, size: int) -> set[int]:
        """Return how many block ids a prompt of `length` tokens may have."""
        if self.has_partial_ids:
            return {-(-length // size)}
        # A prompt that ends at a block boundary may leave out its last block.
        return {length // size, max(length - 1, 0) // size}

    @property
    def needed_fields(self) -> list[str]:
        """Return the names of the fields that every row has."""
        return [name for name, column in self.columns.items() if column.role in self.needs]


def _from_seconds(value: float) -> int:
    return math.floor(round(value * TICKS_PER_SECOND, 3))


def _from_ns(value: float) -> int:
    return int(value // 1_000_000)


_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d) ([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(?:\+00:00)?",
    re.ASCII,
)


def _from_text(value: str) -> int:
    """Return the milliseconds of a date and a time in UTC. Raises ValueError."""
    match = _DATE.fullmatch(value)
    if match is None:
        raise ValueError("no time like 2023-11-16 18:17:03.97")
    year, month, day, hour, minute, second = map(int, match.group(1, 2, 3, 4, 5, 6))
    days = date(year, month, day).toordinal()
    ms = int((match.group(7) or "").ljust(3, "0")[:3])
    return (((days * 24 + hour) * 60 + minute) * 60 + second) * TICKS_PER_SECOND + ms


_LENGTHS = {"input_length": Column(Role.INPUT), "output_length": Column(Role.OUTPUT)}
_IDS = {"hash_ids": Column(Role.BLOCK_IDS, list[_Wide])}
_SIZES = frozenset({Role.INPUT, Role.OUTPUT})

FORMATS: Mapping[WorkloadFormat, FormatSpec] = {
    spec.format: spec
    for spec in (
        FormatSpec(
            WorkloadFormat.QWEN,
            {
                "timestamp": Column(Role.ARRIVAL, _Time, _from_seconds),
                **_LENGTHS,
                **_IDS,
                "chat_id": Column(Role.CHAT, int),
                "parent_chat_id": Column(Role.PARENT, int, lambda it: None if it < 0 else it),
            },
            _SIZES | {Role.ARRIVAL, Role.BLOCK_IDS, Role.CHAT, Role.PARENT},
            block_size=16,
            unused=frozenset({"type", "turn"}),
        ),
        FormatSpec(
            WorkloadFormat.AGENT,
            {
                "timestamp_us": Column(Role.ARRIVAL, _Wide, lambda it: it // 1000),
                **_LENGTHS,
                **_IDS,
                "suite": Column(Role.SPACE, str),
            },
            _SIZES | {Role.ARRIVAL, Role.BLOCK_IDS, Role.SPACE},
            block_size=16,
            has_partial_ids=False,
            unused=frozenset({"session"}),
        ),
        FormatSpec(
            WorkloadFormat.MOONCAKE,
            {
                "timestamp": Column(Role.ARRIVAL, _Time, math.floor),
                **_LENGTHS,
                **_IDS,
                "session_id": Column(Role.SESSION, str),
                "delay": Column(Role.DELAY, _Time, math.floor),
                "priority": Column(Role.PRIORITY, int),
            },
            _SIZES | {Role.BLOCK_IDS},
            block_size=512,
            unused=frozenset({"type", "turn"}),
        ),
        FormatSpec(
            WorkloadFormat.SERVINGSIM,
            {
                "arrival_time_ns": Column(Role.ARRIVAL, _Time, _from_ns),
                "input_toks": Column(Role.INPUT),
                "output_toks": Column(Role.OUTPUT),
                "input_tok_ids": Column(Role.TOKEN_IDS, list[_TokenId]),
                "session_id": Column(Role.SESSION, str),
                "tool_duration_ns": Column(Role.DELAY, _Time, _from_ns),
            },
            _SIZES,
            unused=frozenset({"output_tok_ids"}),
            has_calls=True,
        ),
        FormatSpec(
            WorkloadFormat.AZURE,
            {
                "TIMESTAMP": Column(Role.ARRIVAL, str, _from_text),
                "ContextTokens": Column(Role.INPUT),
                "GeneratedTokens": Column(Role.OUTPUT),
            },
            _SIZES | {Role.ARRIVAL},
            Layout.CSV,
        ),
        FormatSpec(
            WorkloadFormat.BURSTGPT,
            {
                "Timestamp": Column(Role.ARRIVAL, _Time, _from_seconds),
                "Request tokens": Column(Role.INPUT),
                "Response tokens": Column(Role.OUTPUT),
            },
            _SIZES | {Role.ARRIVAL},
            Layout.CSV,
            unused=frozenset({"Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"}),
        ),
        FormatSpec(
            WorkloadFormat.VLLM_BENCH,
            {
                "start_times": Column(Role.ARRIVAL, _Time, _from_seconds),
                "input_lens": Column(Role.INPUT),
                "output_lens": Column(Role.OUTPUT),
            },
            _SIZES,
            Layout.ARRAYS,
        ),
    )
}
"""Every format. `detect` takes the first one that has all needed fields in the first line."""


# Which format a file has.


def detect(path: Path, text: str) -> WorkloadFormat:
    """Return the format of a file that begins with this line. Raises `TraceError`."""
    refuse_other_files(path, text)
    names = _list_fields(text)
    if "sub_requests" in names:
        return WorkloadFormat.SERVINGSIM
    for spec in FORMATS.values():
        if set(spec.needed_fields) <= set(names) and spec.layout in _list_layouts(text):
            return spec.format
    rule = f"a workload is one of {', '.join(FORMATS)}"
    raise TraceError(path, 1, _tell_nearest(names, text), rule, "convert the file")


def refuse_other_files(path: Path, text: str) -> None:
    """Raise `TraceError` for a file that is known to hold no rows."""
    if text.startswith(LFS_POINTER):
        rule = "it names a file that git-lfs keeps elsewhere"
        raise TraceError(path, 1, "a git-lfs pointer", rule, "fetch the file: git lfs pull")
    if text.lstrip().startswith("["):
        found = f"a JSON array, {shown(text)}"
        rule = "a workload is JSON lines, CSV, or an object of arrays"
        fix = "tokenize the prompts, and write a line with input_tok_ids for each (servingsim)"
        raise TraceError(path, 1, found, rule, fix)


def _list_layouts(text: str) -> tuple[Layout, ...]:
    is_json = text.lstrip().startswith("{")
    return (Layout.LINES, Layout.ARRAYS) if is_json else (Layout.CSV,)


def _list_fields(text: str) -> list[str]:
    """Return the fields that a first line names: the keys of an object, or a header of CSV."""
    if not text.lstrip().startswith("{"):
        return [name.strip() for name in text.split(",")]
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        return list(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    return []


def _tell_nearest(names: list[str], text: str) -> str:
    """Say which fields were recognized, and which the nearest format lacks."""
    known = {
        spec.format: [name for name in names if name in spec.columns] for spec in FORMATS.values()
    }
    nearest = max(FORMATS.values(), key=lambda spec: len(known[spec.format]))
    found = known[nearest.format]
    if not found:
        return f"a first line of no known format, {shown(text)}"
    told = ", ".join(f"{nearest.columns[name].role.value} ({name})" for name in found)
    missing = [
        f"{column.role.value} ({name})"
        for name, column in nearest.columns.items()
        if column.role in nearest.needs and name not in names
    ]
    return f"a first line with {told}, and without {', '.join(missing)} as {nearest.format} has"


# Rows.


def read_rows(
    spec: FormatSpec, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield each row as fields by name, with the line that holds it.

    Raises:
        RowError: a line is no row.
    """
    match spec.layout:
        case Layout.LINES:
            for line, text in lines:
                row = _decode(line, text)
                if spec.has_calls and "sub_requests" in row:
                    for call in _split_session(line, text, row):
                        yield line, text, call
                else:
                    yield line, text, row
        case Layout.CSV:
            yield from _read_csv(spec, lines)
        case Layout.ARRAYS:
            for line, text in lines:
                yield from _split_arrays(spec, line, text)


class RowError(ValueError):
    """A line is no row of its format."""

    def __init__(self, line: int, text: str, reason: object) -> None:
        super().__init__(str(reason))
        self.line = line
        self.text = text


def _decode(line: int, text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RowError(line, text, error) from None


def _split_session(line: int, text: str, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the calls of a session, each with the time of the tool that runs before it."""
    head = {name: value for name, value in row.items() if name != "sub_requests"}
    head.setdefault("session_id", f"line {line}")
    try:
        calls = msgspec.convert(row["sub_requests"], list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise RowError(line, text, f"{error} in 'sub_requests'") from None
    for call in calls:
        after = {name: value for name, value in call.items() if name != "tool_duration_ns"}
        yield {**head, **after}
        head.pop("arrival_time_ns", None)
        head["tool_duration_ns"] = call.get("tool_duration_ns", 0)


def _read_csv(
    spec: FormatSpec, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    number, header = next(lines)
    names = [name.strip() for name in header.split(",")]
    missing = [name for name in spec.needed_fields if name not in names]
    if missing:
        raise RowError(number, header, f"a header without {', '.join(missing)}")
    for line, text in lines:
        try:
            (values,) = csv.reader([text], strict=True)
        except (csv.Error, ValueError) as error:
            raise RowError(line, text, error) from None
        if len(values) != len(names):
            raise RowError(line, text, f"{len(values)} values, where the header has {len(names)}")
        row: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            column = spec.columns.get(name)
            row[name] = value if column is None or column.kind is str else _to_number(value)
        yield line, text, row


def _to_number(value: str) -> int | float | str:
    """Return the number that a text is, or the text, which no column of numbers takes."""
    if re.fullmatch(r"\d{1,18}", value, re.ASCII):
        return int(value)
    return float(value) if re.fullmatch(r"\d{1,18}\.\d{1,18}", value, re.ASCII) else value


def _split_arrays(
    spec: FormatSpec, line: int, text: str
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    whole = _decode(line, text)
    arrays = {name: whole[name] for name in spec.columns if name in whole}
    for name, values in arrays.items():
        if not isinstance(values, list):
            raise RowError(line, text, f"{name!r} is no array")
    if len({len(values) for values in arrays.values()}) > 1:
        counts = ", ".join(f"{len(values)} {name}" for name, values in arrays.items())
        raise RowError(line, text, f"arrays of different lengths: {counts}")
    for values in zip(*arrays.values(), strict=True):
        yield line, text, dict(zip(arrays, values, strict=True))


class RowReader:
    """Makes a `RawRow` of the fields of a row, in one format."""

    def __init__(self, spec: FormatSpec) -> None:
        self._spec = spec
        self._last_of: dict[str, int] = {}
        """Number of the last row, by session."""
        self._num_rows = 0

    def read(self, row: Mapping[str, Any]) -> RawRow:
        """Return the row. Raises ValueError, which names the field."""
        spec, found = self._spec, dict[Role, Any]()
        for name, value in row.items():
            column = spec.columns.get(name)
            if column is not None:
                found[column.role] = self._convert(name, column, value)
            elif name not in spec.unused:
                raise ValueError(f"unknown field {name!r}")
        for name in spec.needed_fields:
            if name not in row:
                raise ValueError(f"no field {name!r}")
        tokens = found.get(Role.TOKEN_IDS)
        if tokens is not None and len(tokens) != found[Role.INPUT]:
            raise ValueError(f"{len(tokens)} token ids for {found[Role.INPUT]} tokens")
        chat, parent = found.get(Role.CHAT), found.get(Role.PARENT)
        session = found.get(Role.SESSION)
        if session is not None:
            chat, parent = self._num_rows, self._last_of.get(session)
            self._last_of[session] = self._num_rows
        elif Role.DELAY in found:
            raise ValueError("a delay without a session_id")
        elif Role.ARRIVAL not in found and spec.layout is Layout.LINES:
            raise ValueError("no time of arrival, and no session_id")
        self._num_rows += 1
        return RawRow(
            found.get(Role.ARRIVAL),
            found[Role.INPUT],
            found[Role.OUTPUT],
            found.get(Role.BLOCK_IDS, []),
            tokens,
            found.get(Role.SPACE, ""),
            chat,
            parent,
            found.get(Role.DELAY, 0),
            found.get(Role.PRIORITY, 0),
        )

    def _convert(self, name: str, column: Column, value: Any) -> Any:
        try:
            return column.to_value(msgspec.convert(value, column.kind))
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise ValueError(f"{error} in {name!r}") from None
