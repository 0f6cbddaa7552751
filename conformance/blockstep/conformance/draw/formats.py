"""Formats: the published formats of request traces, each as a table of its fields.

=========== ============================================ =======================================
format      fields of a row                              content of the prompt
=========== ============================================ =======================================
mooncake    timestamp (ms), input_length, output_length, one id for each 512 tokens; a partial
            hash_ids; session_id, delay (ms), priority;  last block has an id, too; without ids
            request_id, wait_for, tool_wait_ms           every prompt is unique
qwen        timestamp (s), input_length, output_length,  the same for each 16 tokens
            hash_ids, chat_id, parent_chat_id
timed-trace timestamp (s), input_length, output_length,  the same for each 16 tokens
            hash_ids
dynamo      request_received_ms, output_tokens,          one id for each trace_block_size tokens,
            input_length, input_sequence_hashes          a partial last block included
agent       suite, session, timestamp_us, input_length,  one id for each full 16 tokens; the rest
            output_length, hash_ids                      has none and is unique
azure       TIMESTAMP,ContextTokens,GeneratedTokens      unknown: every prompt is unique
burstgpt    Timestamp (s), Request tokens,               unknown: every prompt is unique
            Response tokens
servingsim  arrival_time_ns, input_toks, output_toks,    the token ids themselves; without
            input_tok_ids; or a session's sub_requests   them every prompt is unique
vllm-bench  input_lens, output_lens, start_times (s):    unknown: every prompt is unique
            arrays of one object
vllm-custom prompt, output_tokens                        a text
sharegpt    conversations: turns with from and value     texts: all turns before the reply
aiperf      text, output_length, timestamp (ms), delay   texts: all turns up to this one
            (ms), session_id; or a session's turns
=========== ============================================ =======================================

`mooncake` is also what AIPerf and Dynamo write: a row with a `session_id` follows the row before it
in its session, `delay` after that has finished; one with `wait_for` follows the rows that it names.
`qwen` is Qwen-Bailian's: a row follows its parent. `dynamo` is Dynamo's request trace. `servingsim`
is LLMServingSim's, `vllm-bench` the file that `vllm bench serve --save-result` writes,
`timed-trace`, `vllm-custom` and `sharegpt` are datasets that it reads, `aiperf` are the datasets
`single_turn` and `multi_turn` of AIPerf. A file is JSON lines, a JSON array, or CSV.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum, StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from blockstep.conformance.protocol.trace_lines import TraceError, shown

LENGTH_MAX = 1 << 24
"""Tokens of one prompt or output, at most; what is longer is a broken row."""
TOKEN_ID_MAX = (1 << 30) - 1
"""Greatest token id of a prompt: those above are for outputs."""
TICKS_PER_SECOND = 1000
LFS_POINTER = "version https://git-lfs.github.com/spec/"
ELEMENT_CHARS_MAX = 1 << 24
"""Most characters of one element of a JSON array."""
Tokenize: TypeAlias = Callable[[str], Sequence[int]]
"""Tokenizes a text."""

_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
_BlockId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Wide: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Time: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    | Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]
)
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)]
_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]


class WorkloadFormat(StrEnum):
    """Published trace format."""

    MOONCAKE = "mooncake"
    QWEN = "qwen"
    TIMED_TRACE = "timed-trace"
    DYNAMO = "dynamo"
    AGENT = "agent"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SERVINGSIM = "servingsim"
    VLLM_BENCH = "vllm-bench"
    VLLM_CUSTOM = "vllm-custom"
    SHAREGPT = "sharegpt"
    AIPERF = "aiperf"


class Role(Enum):
    """The meaning of a field of a row."""

    ARRIVAL = "time of arrival"
    INPUT = "prompt tokens"
    OUTPUT = "output tokens"
    BLOCK_IDS = "ids of the prompt's blocks"
    BLOCK_SIZE = "tokens of a block id"
    TEXT = "text of the prompt"
    REPLY = "text of the output"
    TOKEN_IDS = "token ids of the prompt"  # noqa: S105 - a name of a field
    SPACE = "where block ids are names"
    SESSION = "session"
    CHAT = "id of the row"
    PARENT = "id of the row before it"
    PARENTS = "ids of the rows before it"
    DELAY = "delay after the row before it"
    PRIORITY = "priority"


ROLE_OF_TEXT = {Role.TEXT: Role.INPUT, Role.REPLY: Role.OUTPUT}
"""The role that a text has once it is tokenized."""


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
    block_ids: list[int] | None = None
    """None: the content of the prompt is unknown."""
    block_size: int | None = None
    """Tokens of a block id, if the row says it."""
    token_ids: Sequence[int] | None = None
    space: str = ""
    parents: tuple[int, ...] = ()
    """Numbers of the rows that it follows, from 0."""
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
    """Roles that every row has. A field that has the role of an earlier one is another name of
    it."""
    signs: frozenset[Role] = frozenset()
    """Further roles that the first row must have for the format to be recognized."""
    layout: Layout = Layout.LINES
    block_size: int = 0
    """Tokens that one block id stands for; 0 where there are no ids, or where the rows say it."""
    has_partial_ids: bool = True
    """Whether a partial last block has an id, too."""
    unused: frozenset[str] = frozenset()
    """Fields that mean nothing to a scheduler: they are ignored."""
    marks: frozenset[str] = frozenset()
    """Fields of which one is enough to recognize a row of this format."""
    split: Callable[[Mapping[str, Any], int], Iterator[Mapping[str, Any]]] | None = None
    """Yields the requests of a line that nests fields or has several requests, given the line's
    number; None: a line is a row."""

    @property
    def has_texts(self) -> bool:
        """Return whether each prompt is a text, for which a tokenizer is needed."""
        return Role.TEXT in self.needs

    def count_ids(self, length: int, size: int) -> set[int]:
        """Return how many block ids a prompt of `length` tokens may have."""
        if self.has_partial_ids:
            return {-(-length // size)}
        # A prompt that ends at a block boundary may leave out its last block.
        return {length // size, max(length - 1, 0) // size}

    def find_missing(self, names: Iterable[str], needs: frozenset[Role]) -> dict[str, Column]:
        """Return the columns of the roles `needs` that are not among the fields `names`."""
        found = {self.columns[name].role for name in names if name in self.columns}
        found |= {ROLE_OF_TEXT[role] for role in found & ROLE_OF_TEXT.keys()}
        missing: dict[Role, tuple[str, Column]] = {}
        for name, column in self.columns.items():
            if column.role in needs - found:
                missing.setdefault(column.role, (name, column))
        return dict(missing.values())


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


# Lines that hold several requests, or nested ones.


def _split_calls(row: Mapping[str, Any], number: int) -> Iterator[Mapping[str, Any]]:
    """Yield the calls of a session of LLMServingSim, each with the time of the tool before it."""
    if "sub_requests" not in row:
        yield row
        return
    head = {name: value for name, value in row.items() if name != "sub_requests"}
    head.setdefault("session_id", f"line {number}")
    for call in _convert(row["sub_requests"], list[dict[str, Any]], "sub_requests"):
        after = {name: value for name, value in call.items() if name != "tool_duration_ns"}
        yield {**head, **after}
        head.pop("arrival_time_ns", None)
        head["tool_duration_ns"] = call.get("tool_duration_ns", 0)


REPLIES = frozenset({"gpt", "chatgpt", "assistant", "bard", "bing", "model"})
"""The names under which a model speaks in ShareGPT."""


def _split_conversation(row: Mapping[str, Any], number: int) -> Iterator[Mapping[str, Any]]:
    """Yield a request for each reply of a conversation: the turns before it are the prompt."""
    turns = _convert(row.get("conversations"), list[dict[str, Any]], "conversations")
    for turn in turns:
        if not (isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
            raise ValueError("a turn without 'from' and 'value' in 'conversations'")
    for at, turn in enumerate(turns):
        if at and turn["from"] in REPLIES:
            texts = [before["value"] for before in turns[:at]]
            yield {"texts": texts, "reply": turn["value"], "session": f"line {number}"}


def _split_turns(row: Mapping[str, Any], number: int) -> Iterator[Mapping[str, Any]]:
    """Yield the turns of a session of AIPerf, each with the texts before it; or the one request."""
    turns = _convert(row.get("turns", [row]), list[dict[str, Any]], "turns")
    session = {"session_id": row.get("session_id", f"line {number}")} if "turns" in row else {}
    texts: list[Any] = []
    for turn in turns:
        more = turn["texts"] if "texts" in turn else [turn[it] for it in ("text",) if it in turn]
        texts += _convert(more, list[str], "texts")
        rest = {name: value for name, value in turn.items() if name not in ("text", "texts")}
        yield {**rest, **session, **({"text": [*texts]} if more else {})}


class _Replayed(msgspec.Struct):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]


class _Measured(msgspec.Struct):
    request_received_ms: int
    output_tokens: int
    replay: _Replayed


class _Context(msgspec.Struct):
    session_id: str


class _RequestEnd(msgspec.Struct):
    request: _Measured
    agent_context: _Context | None = None


def _split_record(row: Mapping[str, Any], _number: int) -> Iterator[Mapping[str, Any]]:
    """Yield the request of a `request_end` record of Dynamo; other records have none."""
    record = row.get("event", row)
    if not isinstance(record, dict) or record.get("event_type") != "request_end":
        return
    end = _convert(record, _RequestEnd, "request_end")
    session = {} if end.agent_context is None else {"session_id": end.agent_context.session_id}
    yield {
        "request_received_ms": end.request.request_received_ms,
        "output_tokens": end.request.output_tokens,
        **msgspec.structs.asdict(end.request.replay),
        **session,
    }


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Return a value of a row as `kind`. Raises ValueError, which names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{error} in {name!r}") from None


# The table.

_LENGTHS = {"input_length": Column(Role.INPUT), "output_length": Column(Role.OUTPUT)}
_IDS = {"hash_ids": Column(Role.BLOCK_IDS, list[_BlockId])}
_SECONDS = {"timestamp": Column(Role.ARRIVAL, _Time, _from_seconds)}
_MS = Column(Role.ARRIVAL, _Time, math.floor)
_DELAY = Column(Role.DELAY, _Time, math.floor)
_SESSION = {"session_id": Column(Role.SESSION, str)}
_SIZES = frozenset({Role.INPUT, Role.OUTPUT})
_TIMED = _SIZES | {Role.ARRIVAL}
_TEXTS = frozenset({Role.TEXT, Role.OUTPUT})

FORMATS: Mapping[WorkloadFormat, FormatSpec] = {
    spec.format: spec
    for spec in (
        FormatSpec(
            WorkloadFormat.QWEN,
            {
                **_SECONDS,
                **_LENGTHS,
                **_IDS,
                "chat_id": Column(Role.CHAT, int),
                "parent_chat_id": Column(Role.PARENT, int, lambda it: None if it < 0 else it),
            },
            _TIMED | {Role.BLOCK_IDS, Role.CHAT, Role.PARENT},
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
            _TIMED | {Role.BLOCK_IDS, Role.SPACE},
            block_size=16,
            has_partial_ids=False,
            unused=frozenset({"session"}),
        ),
        FormatSpec(
            WorkloadFormat.MOONCAKE,
            {
                "timestamp": _MS,
                "created_time": _MS,
                **_LENGTHS,
                "input_tokens": Column(Role.INPUT),
                "output_tokens": Column(Role.OUTPUT),
                "text_input": Column(Role.TEXT, str, lambda text: [text]),
                **_IDS,
                **_SESSION,
                "request_id": Column(Role.CHAT, str),
                "wait_for": Column(Role.PARENTS, list[str]),
                "delay": _DELAY,
                "delay_ms": _DELAY,
                "tool_wait_ms": _DELAY,
                # Of Dynamo: a greater one is served first, where vLLM serves the least one first.
                "priority": Column(Role.PRIORITY, _Priority, lambda it: -it),
            },
            _SIZES,
            signs=frozenset({Role.BLOCK_IDS}),
            block_size=512,
            unused=frozenset(
                {
                    *("type", "turn", "extra", "output_token_ids", "strict_priority", "model"),
                    *("policy_class", "request_kind", "routing_constraints", "branches"),
                    *("prefix_reset", "tool_events"),
                }
            ),
            marks=frozenset({"text_input", "wait_for"}),
        ),
        FormatSpec(
            WorkloadFormat.TIMED_TRACE,
            {**_SECONDS, **_LENGTHS, **_IDS},
            _TIMED,
            signs=frozenset({Role.BLOCK_IDS}),  # as `mooncake`, which is recognized before it
            block_size=16,
            unused=frozenset({"type", "turn", "chat_id", "parent_chat_id"}),
        ),
        FormatSpec(
            WorkloadFormat.DYNAMO,
            {
                "request_received_ms": Column(Role.ARRIVAL, _Wide),
                "output_tokens": Column(Role.OUTPUT),
                "trace_block_size": Column(Role.BLOCK_SIZE, Annotated[int, msgspec.Meta(ge=1)]),
                "input_length": Column(Role.INPUT),
                "input_sequence_hashes": Column(Role.BLOCK_IDS, list[_BlockId]),
                **_SESSION,
            },
            _TIMED | {Role.BLOCK_IDS, Role.BLOCK_SIZE},
            marks=frozenset({"event_type", "event"}),
            split=_split_record,
        ),
        FormatSpec(
            WorkloadFormat.SERVINGSIM,
            {
                "arrival_time_ns": Column(Role.ARRIVAL, _Time, _from_ns),
                "input_toks": Column(Role.INPUT),
                "output_toks": Column(Role.OUTPUT),
                "input_tok_ids": Column(Role.TOKEN_IDS, list[_TokenId]),
                **_SESSION,
                "tool_duration_ns": Column(Role.DELAY, _Time, _from_ns),
            },
            _SIZES,
            unused=frozenset({"output_tok_ids"}),
            marks=frozenset({"sub_requests"}),
            split=_split_calls,
        ),
        FormatSpec(
            WorkloadFormat.AZURE,
            {
                "TIMESTAMP": Column(Role.ARRIVAL, str, _from_text),
                "ContextTokens": Column(Role.INPUT),
                "GeneratedTokens": Column(Role.OUTPUT),
            },
            _TIMED,
            layout=Layout.CSV,
        ),
        FormatSpec(
            WorkloadFormat.BURSTGPT,
            {
                "Timestamp": Column(Role.ARRIVAL, _Time, _from_seconds),
                "Request tokens": Column(Role.INPUT),
                "Response tokens": Column(Role.OUTPUT),
            },
            _TIMED,
            layout=Layout.CSV,
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
            layout=Layout.ARRAYS,
        ),
        FormatSpec(
            WorkloadFormat.VLLM_CUSTOM,
            {
                "prompt": Column(Role.TEXT, str, lambda text: [text]),
                "output_tokens": Column(Role.OUTPUT),
            },
            _TEXTS,
            marks=frozenset({"prompt"}),
        ),
        FormatSpec(
            WorkloadFormat.SHAREGPT,
            {
                "texts": Column(Role.TEXT, list[str]),
                "reply": Column(Role.REPLY, str),
                "session": Column(Role.SESSION, str),
            },
            _TEXTS,
            marks=frozenset({"conversations"}),
            split=_split_conversation,
        ),
        FormatSpec(
            WorkloadFormat.AIPERF,
            {
                "text": Column(Role.TEXT, list[str]),
                "output_length": Column(Role.OUTPUT),
                "timestamp": _MS,
                "delay": _DELAY,
                **_SESSION,
            },
            _TEXTS,
            unused=frozenset({"type", "role", "extra"}),
            marks=frozenset({"turns", "text", "texts"}),
            split=_split_turns,
        ),
    )
}
"""Every format, in the order in which `detect` tries them."""


# Which format a file has.


def detect(path: Path, text: str) -> WorkloadFormat:
    """Return the format of a file that begins with this line, or with this element of an array.

    Raises `TraceError`.
    """
    refuse_pointer(path, text)
    names = _list_fields(text)
    specs = [spec for spec in FORMATS.values() if spec.layout in _list_layouts(text)]
    for spec in specs:
        if spec.marks & set(names):
            return spec.format
    for spec in specs:
        if not spec.find_missing(names, spec.needs | spec.signs):
            return spec.format
    rule = f"a workload is one of {', '.join(FORMATS)}"
    fix = "convert the file, or name the format that it has"
    raise TraceError(path, 1, _describe_nearest(names, text), rule, fix)


def refuse_pointer(path: Path, text: str) -> None:
    """Raise `TraceError` for a file that git-lfs keeps elsewhere."""
    if text.startswith(LFS_POINTER):
        rule = "it names a file that git-lfs keeps elsewhere"
        raise TraceError(path, 1, "a git-lfs pointer", rule, "fetch the file: git lfs pull")


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


def _describe_nearest(names: list[str], text: str) -> str:
    """Say which fields were recognized, and which the nearest format lacks."""
    known = {
        spec.format: [name for name in names if name in spec.columns] for spec in FORMATS.values()
    }
    lacking = {
        spec.format: spec.find_missing(names, spec.needs | spec.signs) for spec in FORMATS.values()
    }
    nearest = max(FORMATS, key=lambda name: (len(known[name]), -len(lacking[name])))
    columns, found = FORMATS[nearest].columns, known[nearest]
    if not found:
        return f"a first line of no known format, {shown(text)}"
    found_columns = ", ".join(f"{columns[name].role.value} ({name})" for name in found)
    lacks = ", ".join(f"{it.role.value} ({name})" for name, it in lacking[nearest].items())
    return f"a first line with {found_columns}, and without {lacks} as {nearest} has"


# Rows.


class RowError(ValueError):
    """A line is no row of its format."""

    def __init__(self, line: int, text: str, reason: object) -> None:
        super().__init__(str(reason))
        self.line = line
        self.text = text


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')
"""A string of JSON, which ends in its line, or a bracket outside of strings."""


def split_array(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the elements of a JSON array with the line in which each ends; other files as they are.

    Raises:
        RowError: the array breaks off, or has an element that is no object or is too long.
    """
    first = next(lines, None)
    if first is None or not first[1].lstrip().startswith("["):
        yield from () if first is None else chain([first], lines)
        return
    depth, parts, size = 0, list[str](), 0  # of the element that has begun
    for line, text in chain([(first[0], first[1].lstrip()[1:])], lines):
        at = 0  # where the element begins in this line, or the one before it has ended
        for token in _TOKEN.finditer(text):
            if depth == 0:
                if text[at : token.start()].strip(" \t\r,") or token.group() not in ("{", "]"):
                    raise RowError(line, text[at:], "an element that is no object")
                if token.group() == "]":
                    return
                at = token.start()
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token.group(), 0)
            if depth == 0:
                yield line, "\n".join([*parts, text[at : token.end()]])
                at, parts, size = token.end(), [], 0
        if depth:
            parts.append(text[at:])
            size += len(text)
            if size > ELEMENT_CHARS_MAX:
                raise RowError(line, parts[0], "an element that is too long")
        elif text[at:].strip(" \t\r,"):
            raise RowError(line, text[at:], "an element that is no object")
    raise RowError(line, "".join(parts[:1]), "a JSON array that does not end")


def read_rows(
    spec: FormatSpec, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield each row as fields by name, with the line that holds it.

    Raises:
        RowError: a line is no row.
    """
    match spec.layout:
        case Layout.LINES:
            for number, (line, text) in enumerate(lines, 1):
                row = _decode(line, text)
                try:
                    for part in [row] if spec.split is None else spec.split(row, number):
                        yield line, text, part
                except ValueError as error:
                    raise RowError(line, text, error) from None
        case Layout.CSV:
            yield from _read_csv(spec, lines)
        case Layout.ARRAYS:
            for line, text in lines:
                yield from _split_arrays(spec, line, text)


def _decode(line: int, text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RowError(line, text, error) from None


def _read_csv(
    spec: FormatSpec, lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    number, header = next(lines)
    names = [name.strip() for name in header.split(",")]
    missing = spec.find_missing(names, spec.needs)
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

    def __init__(
        self, spec: FormatSpec, tokenize: Tokenize | None = None, output_length: int | None = None
    ) -> None:
        """`output_length` is that of the rows which do not say one."""
        self._spec = spec
        self._tokenize = tokenize
        self._output_length = output_length
        self._number_of: dict[int | str, int] = {}
        """Number of a row, by its own id."""
        self._last_of: dict[str, int] = {}
        """Number of the last row, by session."""
        self._num_rows = 0
        self._has_ids: bool | None = None
        """Whether the rows up to now have block ids; None: there are none."""

    def read(self, row: Mapping[str, Any]) -> RawRow:
        """Return the row. Raises ValueError, which names the field."""
        spec, found = self._spec, self._convert_all(row)
        self._take_texts(found)
        for name in spec.find_missing([it for it in row if row[it] is not None], spec.needs):
            if spec.columns[name].role not in found:
                raise ValueError(f"no field {name!r}")
        tokens, ids = found.get(Role.TOKEN_IDS), found.get(Role.BLOCK_IDS)
        if tokens is not None and len(tokens) != found[Role.INPUT]:
            raise ValueError(f"{len(tokens)} token ids for {found[Role.INPUT]} tokens")
        if self._has_ids not in (None, ids is not None):
            raise ValueError("some rows have ids of the prompt's blocks, and some have none")
        self._has_ids = ids is not None
        parents = self._find_parents(found)
        self._num_rows += 1
        return RawRow(
            found.get(Role.ARRIVAL),
            found[Role.INPUT],
            found[Role.OUTPUT],
            ids,
            found.get(Role.BLOCK_SIZE),
            tokens,
            found.get(Role.SPACE, ""),
            parents,
            found.get(Role.DELAY, 0),
            found.get(Role.PRIORITY, 0),
        )

    def _convert_all(self, row: Mapping[str, Any]) -> dict[Role, Any]:
        """Return the values of a row by role; a null is no value, and delays add up."""
        found: dict[Role, Any] = {}
        for name, value in row.items():
            column = self._spec.columns.get(name)
            if column is None:
                if name not in self._spec.unused:
                    raise ValueError(f"unknown field {name!r}")
            elif value is not None:
                try:
                    read = column.to_value(_convert(value, column.kind, name))
                except OverflowError as error:
                    raise ValueError(f"{error} in {name!r}") from None
                delay = found.get(Role.DELAY, 0) if column.role is Role.DELAY else None
                found[column.role] = read if delay is None else read + delay
        return found

    def _take_texts(self, found: dict[Role, Any]) -> None:
        """Put token ids and lengths in the place of texts."""
        texts, reply = found.get(Role.TEXT), found.get(Role.REPLY)
        if self._output_length is not None:
            found.setdefault(Role.OUTPUT, self._output_length)
        if texts is None:
            return
        if self._tokenize is None:
            raise ValueError("a text, and no --tokenizer")
        found[Role.TOKEN_IDS] = [token for text in texts for token in self._tokenize(text)]
        found[Role.INPUT] = len(found[Role.TOKEN_IDS])
        if reply is not None:
            found[Role.OUTPUT] = len(self._tokenize(reply))

    def _find_parents(self, found: Mapping[Role, Any]) -> tuple[int, ...]:
        """Return the numbers of the rows that a row follows, and note the row itself."""
        spec, session = self._spec, found.get(Role.SESSION)
        parents = []
        if Role.PARENTS in found:
            for name in found[Role.PARENTS]:
                if name not in self._number_of:
                    raise ValueError(f"it waits for {name!r}, which is no row before it")
                parents.append(self._number_of[name])
        elif session is not None:
            parents = [self._last_of[session]] if session in self._last_of else []
        elif found.get(Role.PARENT) in self._number_of:
            parents = [self._number_of[found[Role.PARENT]]]
        if session is None and Role.PARENTS not in found:
            if Role.DELAY in found:
                raise ValueError("a delay without a session_id")
            if Role.ARRIVAL not in found and spec.layout is Layout.LINES and not spec.has_texts:
                raise ValueError("no time of arrival, and no session_id")
        if Role.CHAT in found:
            self._number_of[found[Role.CHAT]] = self._num_rows
        if session is not None:
            self._last_of[session] = self._num_rows
        return tuple(parents)
