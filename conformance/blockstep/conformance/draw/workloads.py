"""Workloads: published request traces, read as requests of the vocabulary.

Three formats, gzipped or plain, told apart by their first line:

=========== ==================================================== ==============================
format      row                                                  content of the prompt
=========== ==================================================== ==============================
mooncake    timestamp (ms), input_length, output_length,         one id per 512 tokens; a last,
            hash_ids                                             partial block has an id too
azure       TIMESTAMP,ContextTokens,GeneratedTokens (CSV)        unknown: every prompt is unique
agent       suite, session, timestamp_us, input_length,          one id per full 16 tokens; the
            output_length, hash_ids                              rest has none and is unique
=========== ==================================================== ==============================

What the published files say about themselves, and what is made of it:

* mooncake: every one of the 12,031 rows has ceil(input_length / 512) ids. Ids name whole
  prefixes (none has two parents or two positions). 11,891 of them name a partial last block, each
  always of the same length and none ever a full block, so an id never stands for two contents.
* agent: ids start at 0 again in each suite, in order of first appearance, and go on counting from
  session to session: they are names within a suite, shared by its sessions (31 of magagent's by
  21 of its 25 sessions). They name content:
  205 have several parents. A row has floor(input_length / 16) ids, except that 67 of the 82 rows
  that end on a block boundary leave out the last block's; both counts are accepted. 53 rows have
  no input at all: such a request is yielded as it is, and every engine refuses it (bad_request).
* azure: a snapshot of one hour; timestamps in UTC with seven decimals.
* 283 agent rows have no output. An engine cannot deliver nothing, so `max_tokens` is at least 1.

Ticks of `arrival_time` are milliseconds since the earliest arrival of the rows read.

**Token ids.** The tokens of a block are made from its id alone, so equal ids give equal tokens.
A block is cut into stretches of 16 tokens; each begins with an anchor that occurs nowhere else
(ids from 256 up, one per id and stretch) and goes on with small numbers that tell the position.
Two prompts therefore agree exactly as far as their ids do, and two blocks of 16 tokens or more,
cut at a multiple of 16, differ whenever their ids do, even apart from their chains. Below 16 the
chain of a block tells it apart. The small numbers cost no memory of their own: with a distinct
int in every slot the Mooncake trace would need four times as much. The blocks of an engine may
have any size; that of the trace only says how far an id reaches.

Prompt tokens stay below `OUTPUT_TOKENS_START`; ids from there up are for outputs (see replay).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from blockstep.conformance.protocol.lines import TraceError, read_lines, shown
from blockstep.spec.vocabulary import MAX_INT, Request, TokenIds

OUTPUT_TOKENS_START = 1 << 30
"""Token ids from here up never occur in a prompt of a workload."""

STRETCH_SIZE = 16
"""Tokens per anchor."""

FIRST_ANCHOR = 256
"""Ids below are fillers; CPython keeps one object for each, so that they cost no memory."""

TICKS_PER_SECOND = 1000

LENGTH_MAX = 1 << 24
"""Tokens of one prompt or output, at most; what is longer is a broken row."""


class WorkloadFormat(StrEnum):
    """Which published trace format a file has."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    AGENT = "agent"


BLOCK_SIZE = {WorkloadFormat.MOONCAKE: 512, WorkloadFormat.AZURE: 0, WorkloadFormat.AGENT: 16}
"""Tokens that one hash id stands for; 0 where there are no ids."""


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One request of a trace, its prompt not yet spelled out."""

    row: int
    """Counted from 0 in the file; the request id is "r" and this."""
    arrival_time: int
    """Ticks (ms) since the earliest arrival."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Output tokens as recorded; may be 0."""
    anchors: tuple[int, ...]
    """The first anchor of each identified block."""
    tail_anchor: int
    """The first anchor of the tokens after them, which no other request has."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one trace file, by time of arrival; ties stay in the order of the file.

    Iterating spells the prompts out, one at a time: nothing keeps them. It can be done any number
    of times and gives equal requests each time.
    """

    path: Path
    format: WorkloadFormat
    rows: tuple[WorkloadRow, ...]

    @property
    def block_size(self) -> int:
        """Tokens that one hash id stands for; 0 without ids."""
        return BLOCK_SIZE[self.format]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Request]:
        return map(self.request, self.rows)

    def request(self, row: WorkloadRow) -> Request:
        """The request of one of `rows`."""
        return Request(
            request_id=f"r{row.row}",
            prompt_token_ids=self._prompt(row),
            max_tokens=max(row.output_length, 1),
            arrival_time=row.arrival_time,
        )

    def _prompt(self, row: WorkloadRow) -> TokenIds:
        size = self.block_size
        tokens: list[int] = []
        if row.anchors:
            filler = _fillers(size)
            stretches = len(filler[::STRETCH_SIZE])
            for anchor in row.anchors:
                start = len(tokens)
                tokens += filler
                tokens[start::STRETCH_SIZE] = range(anchor, anchor + stretches)
            del tokens[row.input_length :]  # the last block may be partial
        tail = _fillers(row.input_length - len(tokens))
        anchors = range(row.tail_anchor, row.tail_anchor + len(tail[::STRETCH_SIZE]))
        tail[::STRETCH_SIZE] = anchors
        return tuple(tokens + tail)


def load(
    path: Path | str, *, as_format: WorkloadFormat | None = None, limit: int | None = None
) -> Workload:
    """The workload at `path`; `as_format` None: told by the first line.

    `limit` takes the first so many rows of the file (at least 1) and reads no further. Every row
    read is checked before anything is returned. Raises `TraceError`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be None or at least 1")
    path = Path(path)
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(path, 0, "empty", "a workload has rows", "give a trace file")
    found = _detect(path, first[1]) if as_format is None else WorkloadFormat(as_format)
    if found is not WorkloadFormat.AZURE:
        lines = chain([first], lines)
    elif first[1] != AZURE_HEADER:
        what, rule = f"header {shown(first[1])}", f"it must be {AZURE_HEADER}"
        raise TraceError(path, 1, what, rule, "name another format")
    reader = _Reader(path, found)
    for line, text in islice(lines, limit):
        reader.read(line, text)
    return Workload(path, found, reader.finish())


def _fillers(length: int) -> list[int]:
    """`length` tokens without their anchors: each tells its position modulo 256."""
    whole, rest = divmod(length, FIRST_ANCHOR)
    return [*range(FIRST_ANCHOR)] * whole + [*range(rest)]


# --- formats


_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
_Wide: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Keys(msgspec.Struct):
    """Which keys the first row has: enough to tell the formats apart."""

    timestamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    timestamp_us: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hash_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _MooncakeRow(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: _Wide
    input_length: _Length
    output_length: _Length
    hash_ids: list[_Wide]


class _AgentRow(msgspec.Struct, forbid_unknown_fields=True):
    suite: str
    session: str
    timestamp_us: _Wide
    input_length: _Length
    output_length: _Length
    hash_ids: list[_Wide]


_KEYS = msgspec.json.Decoder(_Keys)
_MOONCAKE = msgspec.json.Decoder(_MooncakeRow)
_AGENT = msgspec.json.Decoder(_AgentRow)

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_ROW = re.compile(
    r"(\d{4})-(\d\d)-(\d\d) ([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(?:\+00:00)?"
    r",(\d{1,10}),(\d{1,10})",
    re.ASCII,
)

_FORMATS = (
    f'a workload is mooncake JSON lines ("timestamp", "hash_ids", ...), agent JSON lines'
    f' ("timestamp_us", "hash_ids", ...) or CSV with the header {AZURE_HEADER}'
)


def _detect(path: Path, text: str) -> WorkloadFormat:
    if text == AZURE_HEADER:
        return WorkloadFormat.AZURE
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        keys = _KEYS.decode(text)
        if keys.hash_ids is not msgspec.UNSET and keys.timestamp_us is not msgspec.UNSET:
            return WorkloadFormat.AGENT
        if keys.hash_ids is not msgspec.UNSET and keys.timestamp is not msgspec.UNSET:
            return WorkloadFormat.MOONCAKE
    found = f"a first line of no known format, {shown(text)}"
    raise TraceError(path, 1, found, _FORMATS, "convert the file")


class _Reader:
    """Checks rows one by one and gives every block its anchors, in the order of the file."""

    def __init__(self, path: Path, found: WorkloadFormat) -> None:
        self._path = path
        self._format = found
        self._size = BLOCK_SIZE[found]
        self._next_anchor = FIRST_ANCHOR
        self._anchor_of: dict[tuple[str, int], int] = {}
        """Per namespace (the suite) and hash id."""
        self._rows: list[tuple[int, int, WorkloadRow]] = []
        """With time of arrival in ticks (ms) of the file's own epoch, and line."""

    def read(self, line: int, text: str) -> None:
        """Take one row. Raises `TraceError`."""
        try:
            match self._format:
                case WorkloadFormat.MOONCAKE:
                    self._read_mooncake(line, _MOONCAKE.decode(text))
                case WorkloadFormat.AGENT:
                    self._read_agent(line, _AGENT.decode(text))
                case WorkloadFormat.AZURE:
                    self._read_azure(line, text)
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors as well
            rule = f"every line is one row of the {self._format} format"
            fix = "repair the row, or name the right format"
            found = f"{error} in {shown(text)}"
            raise TraceError(self._path, line, found, rule, fix) from None
        if self._next_anchor > OUTPUT_TOKENS_START:
            found = f"more than {OUTPUT_TOKENS_START - FIRST_ANCHOR} stretches of distinct tokens"
            rule = "token ids fit in 31 bits"
            raise TraceError(self._path, line, found, rule, "use --limit")

    def finish(self) -> tuple[WorkloadRow, ...]:
        """All rows by time of arrival, counted from the earliest. Raises `TraceError`."""
        if not self._rows:
            raise TraceError(self._path, 0, "no rows", "a workload has rows", "give a trace file")
        self._rows.sort(key=lambda timed: timed[0])
        origin = self._rows[0][0]
        last, line, _ = self._rows[-1]
        if last - origin > MAX_INT:
            found = f"it arrives {last - origin} ms after the earliest row"
            rule = f"times fit in 31 bits: {MAX_INT} ms"
            raise TraceError(self._path, line, found, rule, "split the trace, or use --limit")
        return tuple(replace(row, arrival_time=time - origin) for time, _, row in self._rows)

    def _read_mooncake(self, line: int, row: _MooncakeRow) -> None:
        length = row.input_length
        self._check_count(line, row.hash_ids, {-(-length // self._size)}, "ceil", length)
        self._append(line, row.timestamp, length, row.output_length, "", row.hash_ids)

    def _read_agent(self, line: int, row: _AgentRow) -> None:
        length = row.input_length
        # A prompt that ends on a block boundary may leave out its last block.
        counts = {length // self._size, max(length - 1, 0) // self._size}
        self._check_count(line, row.hash_ids, counts, "floor", length)
        time = row.timestamp_us // 1000
        self._append(line, time, length, row.output_length, row.suite, row.hash_ids)

    def _read_azure(self, line: int, text: str) -> None:
        """Raises ValueError."""
        match = _AZURE_ROW.fullmatch(text)
        if match is None:
            raise ValueError(f"not a row of {AZURE_HEADER}")
        year, month, day, hour, minute, second = map(int, match.group(1, 2, 3, 4, 5, 6))
        days = date(year, month, day).toordinal()
        ms = int((match.group(7) or "").ljust(3, "0")[:3])
        time = (((days * 24 + hour) * 60 + minute) * 60 + second) * TICKS_PER_SECOND + ms
        lengths = int(match.group(8)), int(match.group(9))
        if max(lengths) > LENGTH_MAX:
            raise ValueError(f"a length above {LENGTH_MAX}")
        self._append(line, time, *lengths, "", [])

    def _check_count(
        self, line: int, ids: list[int], counts: set[int], rounding: str, length: int
    ) -> None:
        if len(ids) not in counts:
            wanted = " or ".join(map(str, sorted(counts)))
            found = f"{len(ids)} hash_ids for {length} tokens"
            rule = f"{self._format} has {rounding}(input_length / {self._size}) ids, here {wanted}"
            raise TraceError(self._path, line, found, rule, "repair the row, or drop it")

    def _append(
        self, line: int, time: int, length: int, output: int, space: str, ids: list[int]
    ) -> None:
        anchors = []
        for hash_id in ids:
            if (space, hash_id) not in self._anchor_of:
                self._anchor_of[space, hash_id] = self._take_anchors(self._size)
            anchors.append(self._anchor_of[space, hash_id])
        tail_anchor = self._take_anchors(max(length - len(ids) * self._size, 0))
        row = WorkloadRow(len(self._rows), 0, length, output, tuple(anchors), tail_anchor)
        self._rows.append((time, line, row))

    def _take_anchors(self, num_tokens: int) -> int:
        """The first of the anchors of so many tokens."""
        first = self._next_anchor
        self._next_anchor += -(-num_tokens // STRETCH_SIZE)
        return first
