"""Workloads: published request traces, read as requests of the vocabulary.

The formats are those of `draw.formats`, gzipped or plain, recognized by their first line.

What the published files contain, and how it is read:

* mooncake: every one of the 12,031 rows has ceil(input_length / 512) ids. Ids name whole
  prefixes (none has two parents or two positions). 11,891 of them name a partial last block, each
  always of the same length and none ever a full block, so an id never has two contents.
* agent: ids start at 0 again in each suite, in order of first appearance, and continue from
  session to session: they are names within a suite, shared by its sessions (31 of magagent's by
  21 of its 25 sessions). They name content:
  205 have several parents. A row has floor(input_length / 16) ids, except that 67 of the 82 rows
  that end on a block boundary leave out the last block's; both counts are accepted. 53 rows have
  no input at all: such a request is yielded as it is, and every engine rejects it (bad_request).
* azure: a snapshot of one hour (2023) or of a week (2024); timestamps in UTC.
* qwen, dynamo, and mooncake rows with a session: a row is submitted at its time, but not before the
  row before it in its chat has finished; a `delay` counts from that end (`Workload.follows`).
* dynamo: a record is written when its request ends; its row has the time of the request's arrival.
* sharegpt, vllm-custom, aiperf: token ids are made by a tokenizer, turn by turn and without a chat
  template, so that the prompts of a conversation share a prefix.
* 283 agent rows have no output. An engine must deliver a token, so `max_tokens` is at least 1.

Ticks of `arrival_time` are milliseconds since the earliest arrival of the rows read.

**Token ids.** The tokens of a block are made from its id alone, so equal ids give equal tokens. A
block is cut into stretches of 16 tokens; each begins with an anchor that occurs nowhere else (ids
from 256 up, one per id and stretch), followed by small numbers that encode the position. Two
prompts therefore agree exactly as far as their ids do, and two blocks of 16 tokens or more, cut at
a multiple of 16, differ whenever their ids do, even apart from their parents. Smaller blocks are
distinguished by their parents. The small numbers cost no memory of their own: with a distinct int
in every slot the Mooncake trace would need four times as much. The blocks of an engine may have any
size; that of the trace is only the number of tokens per id.

Prompt tokens are below `OUTPUT_TOKENS_START`; ids from there up are for outputs (see replay).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn

from blockstep.conformance.draw.formats import (
    FORMATS,
    FormatSpec,
    Layout,
    RawRow,
    RowError,
    RowReader,
    Tokenize,
    WorkloadFormat,
    detect,
    read_rows,
    refuse_pointer,
    split_array,
)
from blockstep.conformance.protocol.trace_lines import TraceError, read_lines, shown
from blockstep.spec.vocabulary import MAX_INT, Request, TokenIds

__all__ = [
    "OUTPUT_TOKENS_START",
    "Follows",
    "Workload",
    "WorkloadFormat",
    "WorkloadRow",
    "load",
]

OUTPUT_TOKENS_START = 1 << 30
"""Token ids from here up never occur in a prompt of a workload."""

STRETCH_SIZE = 16
"""Tokens per anchor."""

FIRST_ANCHOR = 256
"""Ids below are fillers; CPython keeps one object for each, so that they cost no memory."""


@dataclass(frozen=True, slots=True)
class Follows:
    """Order of requests: one is submitted only after others, `request_ids`, have finished."""

    request_ids: tuple[str, ...]
    delay: int
    """Ticks (ms) after the last of these ends."""


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One request of a trace, without its prompt tokens."""

    row: int
    """Row number in the file, from 0; the request id is "r" and this number."""
    arrival_time: int
    """Ticks (ms) since the earliest arrival."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Output tokens as recorded; may be 0."""
    anchors: tuple[int, ...]
    """The first anchor of each identified block."""
    tail_anchor: int
    """First anchor of the tokens after them, which no other request has."""
    token_ids: TokenIds | None = None
    """Prompt token ids, if the file has them."""
    priority: int = 0
    follows: Follows | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one trace file, by time of arrival; equal times keep the order of the file.

    Iterating makes the prompts, one at a time, and keeps none. It can be repeated, and gives equal
    requests each time.
    """

    path: Path
    format: WorkloadFormat
    rows: tuple[WorkloadRow, ...]
    block_size: int
    """Tokens per block id; 0 without ids."""

    @property
    def follows(self) -> Mapping[str, Follows]:
        """Return the requests that follow another one, by request id."""
        return {f"r{row.row}": row.follows for row in self.rows if row.follows is not None}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Request]:
        return map(self.request, self.rows)

    def request(self, row: WorkloadRow) -> Request:
        """Return the request of one of `rows`."""
        return Request(
            request_id=f"r{row.row}",
            prompt_token_ids=self._prompt(row),
            max_tokens=max(row.output_length, 1),
            arrival_time=row.arrival_time,
            priority=row.priority,
        )

    def _prompt(self, row: WorkloadRow) -> TokenIds:
        if row.token_ids is not None:
            return row.token_ids
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
    path: Path | str,
    *,
    as_format: WorkloadFormat | None = None,
    limit: int | None = None,
    id_block_size: int | None = None,
    tokenize: Tokenize | None = None,
    output_length: int | None = None,
) -> Workload:
    """Return the workload at `path`, of the format `as_format`, or else of that of its first line.

    `limit` takes the first requests of the file (at least 1) and reads no further. `id_block_size`
    is how many tokens a block id of this file stands for, if not the format's own number.
    A file with texts needs `tokenize`. `output_length` is that
    of the requests for which the file has none. Every row read is checked before anything is
    returned. Raises `TraceError`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be None or at least 1")
    path = Path(path)
    lines = read_lines(path)
    head = next(lines, None)
    if head is None:
        raise TraceError(path, 0, "empty", "a workload has rows", "give a trace file")
    refuse_pointer(path, head[1])
    elements = split_array(chain([head], lines))
    try:
        first = next(elements, None)
    except RowError as error:
        found, rule = f"{error}: {shown(error.text)}", "an array holds rows of a workload"
        raise TraceError(path, error.line, found, rule, "give a trace file") from None
    if first is None:
        raise TraceError(path, 0, "no rows", "a workload has rows", "give a trace file")
    spec = FORMATS[detect(path, first[1]) if as_format is None else WorkloadFormat(as_format)]
    size = spec.block_size if id_block_size is None else id_block_size
    if id_block_size is not None and (not spec.block_size or id_block_size < 1):
        what = f"id_block_size = {id_block_size}"
        rule = "must be at least 1, and only for a format with block ids that do not say it"
        raise TraceError(path, 0, what, rule, f"leave it out for {spec.format}")
    if spec.has_texts and tokenize is None:
        rule = "a scheduler is given token ids"
        fix = "name the tokenizer.json of the model with --tokenizer"
        raise TraceError(path, 1, f"texts ({spec.format}), and no token ids", rule, fix)
    reader = _Reader(path, spec, size, RowReader(spec, tokenize, output_length))
    try:
        for line, text, row in islice(read_rows(spec, chain([first], elements)), limit):
            reader.read(line, text, row)
    except RowError as error:
        reader.refuse(error.line, error.text, error)
    rows = reader.finish()
    return Workload(path, spec.format, rows, reader.size)


def _fillers(length: int) -> list[int]:
    """Return `length` tokens without anchors: each is its position modulo 256."""
    whole, rest = divmod(length, FIRST_ANCHOR)
    return [*range(FIRST_ANCHOR)] * whole + [*range(rest)]


class _Reader:
    """Reader of rows: it checks them one by one and assigns anchors to blocks, in the order of the
    file."""

    def __init__(self, path: Path, spec: FormatSpec, size: int, reader: RowReader) -> None:
        self._path = path
        self._spec = spec
        self.size = size
        """Tokens of a block id; 0 where there are none, or before the first row says it."""
        self._rows_of = reader
        self._next_anchor = FIRST_ANCHOR
        self._anchor_of: dict[tuple[str, int], int] = {}
        """First anchor of a block, by namespace (the suite) and block id."""
        self._rows: list[tuple[int, int, WorkloadRow]] = []
        """Rows with their time of arrival in ticks (ms) of the file's own epoch, and their line."""

    def read(self, line: int, text: str, fields: Mapping[str, object]) -> None:
        """Check and append one row. Raises `TraceError`."""
        try:
            row = self._rows_of.read(fields)
            self._check_ids(row)
        except (ValueError, RecursionError) as error:
            self.refuse(line, text, error)
        self._append(line, row)
        if self._next_anchor > OUTPUT_TOKENS_START:
            found = f"more than {OUTPUT_TOKENS_START - FIRST_ANCHOR} stretches of distinct tokens"
            rule = "token ids fit in 31 bits"
            raise TraceError(self._path, line, found, rule, "use --limit")

    def refuse(self, line: int, text: str, reason: Exception) -> NoReturn:
        """Raise `TraceError` for a line that is no row of the format."""
        rows = "one row" if self._spec.layout is not Layout.ARRAYS else "the arrays"
        rule = f"every line is {rows} of the {self._spec.format} format"
        fix = "repair the row, or name the right format"
        found = f"{reason} in {shown(text)}" if text.strip() else "an empty line"
        raise TraceError(self._path, line, found, rule, fix) from None

    def finish(self) -> tuple[WorkloadRow, ...]:
        """Return all rows by time of arrival, counted from the earliest. Raises `TraceError`."""
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

    def _check_ids(self, row: RawRow) -> None:
        """Raise ValueError if a prompt has too few or too many block ids."""
        if row.block_ids is None:
            return
        if row.block_size is not None:
            if self.size not in (0, row.block_size):
                raise ValueError(f"blocks of {row.block_size} tokens after blocks of {self.size}")
            self.size = row.block_size
        counts = self._spec.count_ids(row.input_length, self.size)
        if len(row.block_ids) not in counts:
            wanted = " or ".join(map(str, sorted(counts)))
            raise ValueError(
                f"{len(row.block_ids)} block ids for {row.input_length} tokens, where blocks of "
                f"{self.size} make {wanted} (--id-block-size says otherwise)"
            )

    def _append(self, line: int, row: RawRow) -> None:
        anchors = []
        ids = row.block_ids or []
        for block_id in ids:
            name = row.space, block_id
            if name not in self._anchor_of:
                self._anchor_of[name] = self._take_anchors(self.size)
            anchors.append(self._anchor_of[name])
        tail_anchor = self._take_anchors(max(row.input_length - len(ids) * self.size, 0))
        before = tuple(f"r{number}" for number in row.parents)
        made = WorkloadRow(
            len(self._rows),
            0,
            row.input_length,
            row.output_length,
            tuple(anchors),
            tail_anchor,
            None if row.token_ids is None else tuple(row.token_ids),
            row.priority,
            Follows(before, row.delay) if before else None,
        )
        # A row without a time has that of the rows that it follows.
        starts = (self._rows[number][0] for number in row.parents)
        time = row.time if row.time is not None else max(starts, default=0)
        self._rows.append((time, line, made))

    def _take_anchors(self, num_tokens: int) -> int:
        """Return the first anchor of this many tokens."""
        first = self._next_anchor
        self._next_anchor += -(-num_tokens // STRETCH_SIZE)
        return first
