"""Wire: KV events in the bytes in which vLLM publishes them, so that its consumers read ours.

A batch is a msgpack array `[time, [event, ...], rank]`. An event was an array that begins with its
name, with every field, also where it is nil:

    ["BlockStored", hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

Today it is a map that names its fields and leaves out most of those that are nil:

    {type: "BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
     lora_name, extra_keys, group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window, ...}
    {type: "BlockRemoved", block_hashes, medium, group_idx, ...}
    {type: "AllBlocksCleared"}

Both are read. Source: vLLM `distributed/kv_events.py`, arrays in 0.19.1, maps in 0.24.0 and later.
Arrays name no KV-cache group: with several, the hashes that we give tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, TypeAlias, assert_never

import msgspec

from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    GroupKind,
    KVEvent,
    KVGroup,
)

BlockHash: TypeAlias = int | bytes
"""How a block is named on the wire: 64 bits of a digest, or all of it."""
ExtraKeys: TypeAlias = tuple[Any, ...] | None
"""What names a block beside its tokens; None for nothing."""
_MASK = (1 << 64) - 1


class Stored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """Blocks became findable, each behind the one before it."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """Blocks are not findable any more."""

    block_hashes: list[BlockHash]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """Nothing is findable any more."""


class StoredMap(Stored, array_like=False, omit_defaults=True, tag="BlockStored"):
    """Likewise, as a map. The last fields are read and never written: other tiers tell of them."""

    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class RemovedMap(Removed, array_like=False, omit_defaults=True, tag="BlockRemoved"):
    """Likewise, as a map."""

    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedMap(Cleared, array_like=False, omit_defaults=True, tag="AllBlocksCleared"):
    """Likewise, as a map."""


WireEvent: TypeAlias = Stored | Removed | Cleared


class Form(StrEnum):
    """How events are written."""

    ARRAYS = "arrays"
    """As vLLM 0.19.1 does."""
    MAPS = "maps"
    """As vLLM 0.33.0 does."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What one answer of an engine told."""

    ts: float
    """Seconds since the epoch."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class _Frame(msgspec.Struct, array_like=True, gc=False):
    """A batch of which the events are not read yet."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_FRAMES = msgspec.msgpack.Decoder(_Frame)
_ARRAYS = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
_MAPS = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap)
_MAP_HEADS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
"""First bytes of a msgpack map."""
_KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.RECURRENT: "mamba",
}
"""Names of kinds of KV-cache groups that are not ours, too."""


class KeyDigests:
    """SHA-256 of keys, each taken once: of the digest before, and of what a block adds.

    An engine that has digests of its own gives those instead. The consumers of vLLM take hashes for
    names, or compute them anew from tokens by vLLM's own rule, which this is not.
    """

    def __init__(self) -> None:
        self._known: dict[BlockKey, bytes] = {}

    def __call__(self, key: BlockKey) -> bytes:
        """32 bytes that stand for the whole chain of `key`."""
        known = self._known.get(key)
        if known is not None:
            return known
        missing: list[BlockKey] = []
        link: BlockKey | None = key
        while link is not None and link not in self._known:
            missing.append(link)
            link = link.parent
        for link in reversed(missing):
            before = b"" if link.parent is None else self._known[link.parent]
            names = (link.token_ids, link.adapter, link.cache_salt, link.items, link.embeds)
            message = _ENCODER.encode((before, *names, link.group))
            self._known[link] = sha256(message).digest()
        return self._known[key]


class WireWriter:
    """Writes what an engine tells.

    Args:
        digest: a digest of a key: different keys, different digests.
        is_short: name blocks by the last 64 bits of their digests, as vLLM does unless it is told
            otherwise (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
        lora_ids: numbers of adapters, by name; consumers of today read the name.
        rank: of the engine among those that share a model (data parallelism).
        form: arrays or maps.
        groups: KV-cache groups by number, of which maps tell the kind.
    """

    def __init__(
        self,
        digest: Callable[[BlockKey], bytes] | None = None,
        *,
        is_short: bool = True,
        lora_ids: Mapping[str, int] | None = None,
        rank: int | None = 0,
        form: Form = Form.ARRAYS,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        self._digest = digest or KeyDigests()
        self._is_short = is_short
        self._lora_ids = lora_ids or {}
        self._rank = rank
        self._form = form
        self._kinds = [
            (_KINDS.get(group.kind, str(group.kind)), group.sliding_window or None)
            for group in groups
        ]

    def name(self, key: BlockKey) -> BlockHash:
        """How a block of this key is named."""
        digest = self._digest(key)
        return int.from_bytes(digest, "big") & _MASK if self._is_short else digest

    def write(self, kv_events: Iterable[KVEvent], now: float) -> bytes:
        """A batch of what one answer told at this time, seconds since the epoch."""
        to_wire = self._to_map if self._form is Form.MAPS else self._to_array
        return write_batch(Batch(now, [to_wire(event) for event in kv_events], self._rank))

    def _to_map(self, event: KVEvent) -> WireEvent:
        told = msgspec.structs.asdict(self._to_array(event))
        match event:
            case BlockStored(keys=keys):
                group = keys[0].group
                kind, window = self._kinds[group] if group < len(self._kinds) else (None, None)
                told["kv_cache_spec_kind"], told["kv_cache_spec_sliding_window"] = kind, window
                return StoredMap(**told, group_idx=group)
            case BlockRemoved(keys=keys):
                return RemovedMap(**told, group_idx=keys[0].group)
            case AllBlocksCleared():
                return ClearedMap()
            case _:
                assert_never(event)

    def _to_array(self, event: KVEvent) -> WireEvent:
        match event:
            case BlockStored(keys=keys, parent=parent):
                return Stored(
                    [self.name(key) for key in keys],
                    None if parent is None else self.name(parent),
                    list(event.token_ids),
                    event.block_size,
                    None if event.adapter is None else self._lora_ids.get(event.adapter),
                    event.medium,
                    event.adapter,
                    [get_extra_keys(key, event.block_size) for key in keys],
                )
            case BlockRemoved(keys=keys):
                return Removed([self.name(key) for key in keys], event.medium)
            case AllBlocksCleared():
                return Cleared()
            case _:
                assert_never(event)


def get_extra_keys(key: BlockKey, block_size: int) -> ExtraKeys:
    """What names a block beside its tokens: adapter, items by place, salt, embeddings; or None.

    A block of several links has the items of each, by their place in the block.
    """
    links: list[BlockKey] = []
    link: BlockKey | None = key
    while link is not None and len(links) * len(key.token_ids) < block_size:
        links.insert(0, link)
        link = link.parent
    items: dict[tuple[str, int], None] = {}
    for index, part in enumerate(links):
        shift = index * len(part.token_ids)
        items |= dict.fromkeys((name, offset + shift) for name, offset in part.items)
    embeds = [number for part in links for number in part.embeds]
    found = (
        *([key.adapter] if key.adapter else []),
        *items,
        *([links[0].cache_salt] if links[0].cache_salt else []),
        *([sha256(repr(embeds).encode()).digest()] if embeds else []),
    )
    return found or None


def get_group(event: Stored | Removed) -> int | None:
    """The KV-cache group of its blocks; None where it is not told."""
    return event.group_idx if isinstance(event, StoredMap | RemovedMap) else None


def write_batch(batch: Batch) -> bytes:
    """The bytes of a batch."""
    return _ENCODER.encode(batch)


def read_batch(payload: bytes) -> Batch:
    """A batch from its bytes, of either form. Raises `msgspec.MsgspecError`: they are none."""
    frame = _FRAMES.decode(payload)
    events: list[WireEvent] = [
        (_MAPS if memoryview(raw)[0] in _MAP_HEADS else _ARRAYS).decode(raw) for raw in frame.events
    ]
    return Batch(frame.ts, events, frame.data_parallel_rank)
