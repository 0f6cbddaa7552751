"""Stream: KV events of any engine, from a dump or a socket, and the blocks that are cached.

A batch is `[time, [event, ...], rank]`, an event an array (its name, then its fields in order, of
which the last ones may be missing) or a map. Both are read, of any release: vLLM since 0.9, SGLang.
An event of an unknown type is counted by its name and changes nothing.

A dump holds a batch in each line of JSON; hashes are numbers, or bytes in hexadecimal:

    {"seq": 0, "ts": 1.5, "events": [["BlockStored", [17], null, [1, 2], 2, null, "GPU"]]}

Source: vLLM `distributed/kv_events.py` 0.9 to 0.33.0 (names and order of the fields, frames of the
sockets); SGLang `disaggregation/kv_events.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from blockstep.conformance.protocol.trace_lines import TraceError, read_lines, shown

BlockHash: TypeAlias = int | str
"""Hash of a block: a number, or bytes in hexadecimal."""
Name: TypeAlias = tuple[int, BlockHash]
"""Group and hash of a block."""

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
FIELDS: Mapping[str, tuple[str, ...]] = {
    STORED: (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
        *("kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
        "lookahead_token_ids",
    ),
    REMOVED: ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    CLEARED: (),
}
"""Fields of each type in the order in which arrays have them."""
NEEDED = {STORED: ("block_hashes", "token_ids", "block_size"), REMOVED: ("block_hashes",)}
CONTRADICTIONS_MAX = 20
"""Contradictions that are kept; more are counted."""


class StreamError(ValueError):
    """A batch cannot be read."""


@dataclass(frozen=True, slots=True)
class KVRecord:
    """One event."""

    type: str
    block_hashes: tuple[BlockHash, ...] = ()
    parent: BlockHash | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = 0
    medium: str | None = None
    group: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the event as JSON has it, for an index in another process."""
        names: dict[str, Any] = {"type": self.type}
        if self.type != CLEARED:
            names |= {"block_hashes": self.block_hashes, "medium": self.medium}
            names |= {"group_idx": self.group}
        if self.type == STORED:
            names |= {"parent_block_hash": self.parent, "token_ids": self.token_ids}
            names |= {"block_size": self.block_size}
        return names


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message."""

    seq: int | None
    """Number of the message; None where the source has none."""
    events: tuple[KVRecord, ...]
    ts: float = 0.0
    rank: int | None = None
    """Data-parallel rank of the sender; each rank counts its own messages."""
    unknown: tuple[str, ...] = ()
    """Types of events that are not known here."""


# Reading.


def parse_batch(raw: Any, seq: int | None) -> Batch:
    """Return the batch `[time, events, rank]`, or the same as a map. Raises StreamError."""
    if isinstance(raw, Mapping):
        parts = [raw.get("ts", 0.0), raw.get("events"), raw.get("data_parallel_rank")]
    else:
        parts = [*raw, None, None][:3] if isinstance(raw, Sequence) else [None, None, None]
    ts, events, rank = parts
    if not isinstance(events, list | tuple) or not isinstance(ts, int | float):
        raise StreamError(f"{shown(raw)}: a batch is [time, [event, ...], rank]")
    if rank is not None and not isinstance(rank, int):
        raise StreamError(f"data_parallel_rank {shown(rank)}: must be a number or nil")
    read, unknown = [], []
    for event in events:
        record = parse_event(event)
        if isinstance(record, str):
            unknown.append(record)
        else:
            read.append(record)
    return Batch(seq, tuple(read), float(ts), rank, tuple(unknown))


def parse_event(raw: Any) -> KVRecord | str:
    """Return the event; of an unknown type, the name of the type. Raises StreamError."""
    if isinstance(raw, Mapping):
        fields = dict(raw)
        name = fields.pop("type", None)
    elif isinstance(raw, list | tuple) and raw:
        name, *values = raw
        known = FIELDS.get(name, ()) if isinstance(name, str) else ()
        fields = dict(zip(known, values, strict=False))
    else:
        name = None
    if not isinstance(name, str):
        raise StreamError(f"{shown(raw)}: an event is an array or a map that names its type")
    if name not in FIELDS:
        return name
    for field_name in NEEDED.get(name, ()):
        if fields.get(field_name) is None:
            raise StreamError(f"{name} without {field_name}: {shown(raw)}")
    parent = fields.get("parent_block_hash")
    try:
        return KVRecord(
            name,
            tuple(map(_to_hash, fields.get("block_hashes", ()))),
            None if parent is None else _to_hash(parent),
            tuple(msgspec.convert(fields.get("token_ids", ()), list[int])),
            msgspec.convert(fields.get("block_size", 0), int),
            msgspec.convert(fields.get("medium"), str | None),
            msgspec.convert(fields.get("group_idx"), int | None) or 0,
        )
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise StreamError(f"{name}: {error}: {shown(raw)}") from None


def _to_hash(value: Any) -> BlockHash:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    raise ValueError(f"block hash {shown(value)}: must be a number or bytes")


def read_message(payload: bytes, seq: int | None) -> Batch:
    """Return the batch that a message holds in msgpack. Raises StreamError."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StreamError(f"message {seq} of {len(payload)} bytes: {error}") from None
    return parse_batch(raw, seq)


def read_dump(path: Path) -> Iterator[Batch]:
    """Yield the batches of a dump, gzipped or plain. Raises `TraceError`."""
    for line, text in read_lines(path, "dump of KV events"):
        try:
            raw = msgspec.json.decode(text)
            seq = raw.get("seq") if isinstance(raw, dict) else None
            if seq is not None and not isinstance(seq, int):
                raise StreamError(f"seq {shown(seq)}: must be a number")
            yield parse_batch(raw, seq)
        except (msgspec.MsgspecError, StreamError, RecursionError) as error:
            rule = 'a line is {"seq": 0, "ts": 1.5, "events": [...]}'
            fix = "give a file that blockstep events --save wrote"
            raise TraceError(path, line, str(error), rule, fix) from None


def write_line(batch: Batch) -> bytes:
    """Return the line of a dump for a batch; events of unknown types are not kept."""
    row = {
        "seq": batch.seq,
        "ts": batch.ts,
        "events": [event.to_plain() for event in batch.events],
        "data_parallel_rank": batch.rank,
    }
    return msgspec.json.encode(row) + b"\n"


# Following.


@dataclass(slots=True)
class Block:
    """One cached block as the stream describes it."""

    parent: BlockHash | None
    token_ids: tuple[int, ...]
    copies: Counter[str]
    """Number of copies by medium; the block is cached until all are removed."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two things that a stream said and that cannot both be true."""

    seq: int | None
    name: str
    message: str


@dataclass(slots=True)
class Follower:
    """Rebuilds the set of cached blocks from the batches of one engine in their order."""

    blocks: dict[Name, Block] = field(default_factory=dict)
    """Blocks that are cached now."""
    parents: dict[Name, BlockHash | None] = field(default_factory=dict)
    """Parent of every block that was ever stored."""
    num_batches: int = 0
    num_events: Counter[str] = field(default_factory=Counter)
    num_cached_peak: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """First and last missing number of each gap."""
    restarts: list[int] = field(default_factory=list)
    """Numbers of messages that are not above the one before."""
    unknown: Counter[str] = field(default_factory=Counter)
    contradictions: list[Contradiction] = field(default_factory=list)
    num_contradictions: int = 0
    is_whole: bool = True
    """False from a gap to the next clearing or restart: unknown blocks are no contradiction."""
    _seq: int | None = None

    def take(self, batch: Batch) -> None:
        """Apply a batch."""
        self._note_number(batch.seq)
        self.num_batches += 1
        self.unknown.update(batch.unknown)
        for event in batch.events:
            self.num_events[event.type] += 1
            match event.type:
                case "BlockStored":
                    self._store(batch.seq, event)
                case "BlockRemoved":
                    self._remove(batch.seq, event)
                case "AllBlocksCleared":
                    self._clear()
        self.num_cached_peak = max(self.num_cached_peak, len(self.blocks))

    def count_found(self, hashes: Sequence[BlockHash], group: int = 0) -> int:
        """Return how many leading blocks of a chain are cached."""
        found = 0
        for block_hash in hashes:
            if (group, block_hash) not in self.blocks:
                break
            found += 1
        return found

    def get_chain(self, name: Name) -> list[BlockHash]:
        """Return the hashes of a chain that ends with this block, as far as they are known."""
        group, block_hash = name
        chain = [block_hash]
        while (parent := self.parents.get((group, chain[-1]))) is not None and parent not in chain:
            chain.append(parent)
        return chain[::-1]

    def _note_number(self, seq: int | None) -> None:
        last, self._seq = self._seq, seq
        if seq is None:
            return
        if last is None:
            last = -1
        if seq > last + 1:
            self.gaps.append((last + 1, seq - 1))
            self.is_whole = False
        elif seq <= last:
            self.restarts.append(seq)
            self._clear()
            if seq:
                self.gaps.append((0, seq - 1))
                self.is_whole = False

    def _clear(self) -> None:
        self.blocks.clear()
        self.parents.clear()
        self.is_whole = True

    def _store(self, seq: int | None, event: KVRecord) -> None:
        size, count = event.block_size, len(event.block_hashes)
        if size < 1 or len(event.token_ids) != size * count:
            what = f"{len(event.token_ids)} tokens for {count} blocks of {size}"
            self._contradict(seq, "stored_tokens_fill_the_blocks", what)
        parent = event.parent
        if parent is not None and (event.group, parent) not in self.parents and self.is_whole:
            what = f"parent {parent} of {event.block_hashes[:1]} was never stored"
            self._contradict(seq, "parent_was_stored_before", what)
        for at, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[at * size : (at + 1) * size]
            name, medium = (event.group, block_hash), event.medium or "GPU"
            known = self.blocks.get(name)
            if known is None:
                self.blocks[name] = Block(parent, tokens, Counter({medium: 1}))
            else:
                if (known.parent, known.token_ids) != (parent, tokens):
                    what = f"{block_hash} is stored for other tokens or another parent than before"
                    self._contradict(seq, "hash_names_one_content", what)
                known.copies[medium] += 1
            self.parents[name] = parent
            parent = block_hash

    def _remove(self, seq: int | None, event: KVRecord) -> None:
        for block_hash in event.block_hashes:
            name, medium = (event.group, block_hash), event.medium or "GPU"
            block = self.blocks.get(name)
            if block is None or not block.copies[medium]:
                if self.is_whole:
                    what = f"{block_hash} is removed from {medium}, where it is not stored"
                    self._contradict(seq, "removed_block_was_stored", what)
                continue
            block.copies[medium] -= 1
            if not block.copies.total():
                del self.blocks[name]

    def _contradict(self, seq: int | None, name: str, message: str) -> None:
        self.num_contradictions += 1
        if len(self.contradictions) < CONTRADICTIONS_MAX:
            self.contradictions.append(Contradiction(seq, name, message))


def follow(batches: Iterable[Batch]) -> dict[int | None, Follower]:
    """Return what the batches make known, by data-parallel rank."""
    followers: dict[int | None, Follower] = {}
    for batch in batches:
        followers.setdefault(batch.rank, Follower()).take(batch)
    return followers
