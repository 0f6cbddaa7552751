"""Wire: KV events in vLLM's encoding, so that its consumers can read ours.

A batch is a msgpack array `[time, [event, ...], rank]`. In older releases an event is an array: its
name and every field, nil included:

    ["BlockStored", hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

In newer releases it is a map with the names of its fields, without most fields that are nil:

    {type: "BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
     lora_name, extra_keys, group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window, ...}
    {type: "BlockRemoved", block_hashes, medium, group_idx, ...}
    {type: "AllBlocksCleared"}

Both are read. Source: vLLM `distributed/kv_events.py`, arrays in 0.19.1, maps in 0.24.0 and later.
Arrays do not name the KV-cache group; our hashes differ between groups.
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
"""Hash of a block on the wire: 64 bits of a digest, or the whole digest."""
ExtraKeys: TypeAlias = tuple[Any, ...] | None
"""Parts of a block's identity besides its tokens; None if there are none."""
_MASK = (1 << 64) - 1


class Stored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """Blocks were cached; each is the child of the one before it."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[ExtraKeys] | None = None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """Blocks were evicted."""

    block_hashes: list[BlockHash]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """The prefix cache was cleared."""


class StoredMap(Stored, array_like=False, omit_defaults=True, tag="BlockStored"):
    """`Stored` as a map. Fields from `locality` on are read and never written."""

    # Releases with maps require the name. msgspec writes a default of None only if a function
    # returns it.
    lora_name: str | None = msgspec.field(default_factory=lambda: None)
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class RemovedMap(Removed, array_like=False, omit_defaults=True, tag="BlockRemoved"):
    """`Removed` as a map."""

    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedMap(Cleared, array_like=False, omit_defaults=True, tag="AllBlocksCleared"):
    """`Cleared` as a map."""


WireEvent: TypeAlias = Stored | Removed | Cleared


class Form(StrEnum):
    """Form in which events are written."""

    ARRAYS = "arrays"
    """The form of vLLM 0.19.1."""
    MAPS = "maps"
    """The form of vLLM 0.33.0."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The events of one observation of an engine."""

    ts: float
    """Seconds since the epoch."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class _Frame(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are not decoded yet."""

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
"""vLLM's names of group kinds that differ from ours."""


class KeyDigests:
    """SHA-256 digests of block keys, each computed once from the parent's digest and the block.

    An engine with digests of its own passes those instead. Consumers of vLLM's events use a hash
    as a name only, or compute it from tokens by vLLM's own rule, which is another one.
    """

    def __init__(self) -> None:
        self._known: dict[BlockKey, bytes] = {}

    def __call__(self, key: BlockKey) -> bytes:
        """Return the digest of `key` and all of its ancestors, 32 bytes."""
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
    """Encodes the KV events of an engine.

    Args:
        digest: returns the digest of a key; different keys have different digests.
        is_short: use the last 64 bits of a digest as the hash of a block, as vLLM does by default
            (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
        lora_ids: ids of adapters by name; current consumers read the name.
        rank: the engine's data-parallel rank.
        form: arrays or maps.
        groups: KV-cache groups in order; maps have their kinds.
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
        """Return the hash of a block on the wire."""
        digest = self._digest(key)
        return int.from_bytes(digest, "big") & _MASK if self._is_short else digest

    def write(self, kv_events: Iterable[KVEvent], now: float) -> bytes:
        """Return the events of one observation as a batch; `now` is in seconds since the epoch."""
        to_wire = self._to_map if self._form is Form.MAPS else self._to_array
        return write_batch(Batch(now, [to_wire(event) for event in kv_events], self._rank))

    def _to_map(self, event: KVEvent) -> WireEvent:
        fields = msgspec.structs.asdict(self._to_array(event))
        match event:
            case BlockStored(keys=keys):
                group = keys[0].group
                kind, window = self._kinds[group] if group < len(self._kinds) else (None, None)
                fields["kv_cache_spec_kind"], fields["kv_cache_spec_sliding_window"] = kind, window
                return StoredMap(**fields, group_idx=group)
            case BlockRemoved(keys=keys):
                return RemovedMap(**fields, group_idx=keys[0].group)
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
    """Return adapter, items with their offsets, salt and digest of embeddings; None if none is set.

    A block of several keys has the items of each, with offsets in the block.
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
    """Return the KV-cache group of an event's blocks; None if the event does not name it."""
    return event.group_idx if isinstance(event, StoredMap | RemovedMap) else None


def write_batch(batch: Batch) -> bytes:
    """Return a batch as bytes."""
    return _ENCODER.encode(batch)


def read_batch(payload: bytes) -> Batch:
    """Decode a batch of either form. Raises msgspec.MsgspecError if `payload` is not a batch."""
    frame = _FRAMES.decode(payload)
    events: list[WireEvent] = [
        (_MAPS if memoryview(raw)[0] in _MAP_HEADS else _ARRAYS).decode(raw) for raw in frame.events
    ]
    return Batch(frame.ts, events, frame.data_parallel_rank)
