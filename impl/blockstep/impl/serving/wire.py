"""Wire: KV events in the bytes in which vLLM publishes them, so that its consumers read ours.

A batch is a msgpack array `[time, [event, ...], rank]`, an event an array that begins with its
name. Every field is there, also where it is nil:

    ["BlockStored", hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

Source: vLLM 0.19.1 `distributed/kv_events.py`. It names no KV-cache group, nor do we: with several
groups the hash of a block tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any, TypeAlias, assert_never

import msgspec

from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockKey,
    BlockRemoved,
    BlockStored,
    KVEvent,
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


WireEvent: TypeAlias = Stored | Removed | Cleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What one answer of an engine told."""

    ts: float
    """Seconds since the epoch."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)


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
    """

    def __init__(
        self,
        digest: Callable[[BlockKey], bytes] | None = None,
        *,
        is_short: bool = True,
        lora_ids: Mapping[str, int] | None = None,
        rank: int | None = 0,
    ) -> None:
        self._digest = digest or KeyDigests()
        self._is_short = is_short
        self._lora_ids = lora_ids or {}
        self._rank = rank

    def name(self, key: BlockKey) -> BlockHash:
        """How a block of this key is named."""
        digest = self._digest(key)
        return int.from_bytes(digest, "big") & _MASK if self._is_short else digest

    def write(self, kv_events: Iterable[KVEvent], now: float) -> bytes:
        """A batch of what one answer told at this time, seconds since the epoch."""
        return write_batch(Batch(now, [self._to_wire(event) for event in kv_events], self._rank))

    def _to_wire(self, event: KVEvent) -> WireEvent:
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


def write_batch(batch: Batch) -> bytes:
    """The bytes of a batch."""
    return _ENCODER.encode(batch)


def read_batch(payload: bytes) -> Batch:
    """A batch from its bytes. Raises `msgspec.MsgspecError`: they are none."""
    return _DECODER.decode(payload)
