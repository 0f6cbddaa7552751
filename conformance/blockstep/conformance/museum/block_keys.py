"""Seeded bugs in block keys: what distinguishes the content of two blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias
from zlib import crc32

from blockstep.conformance.museum.bug import Page, Right, instead, replacing
from blockstep.spec.core.block_pool import Pool, find_block
from blockstep.spec.core.rules import Rules
from blockstep.spec.features.identity import get_item_keys, name_content
from blockstep.spec.vocabulary import BlockId, BlockKey, Config

PAGE = Page()
Items: TypeAlias = tuple[tuple[str, int], ...]
"""Identifiers of items, each with its offset from the start of the block."""


def leave_out(rules: Rules, **fields: Any) -> Rules:
    """Return rules by which some fields of block keys have these values."""

    def name(right: Right[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {**right(), **fields}

    return replacing(rules, name_content, name)


def change_items(rules: Rules, change: Callable[[Items], Items]) -> Rules:
    """Return rules by which the items in block keys are changed."""
    get_items = rules[get_item_keys]
    return rules.replacing(
        get_item_keys, lambda request, start, end: change(get_items(request, start, end))
    )


@PAGE.exhibit("block keys do not contain the cache salt", "#56643", "P6 P3")
def salt_ignored(rules: Rules, _config: Config) -> Rules:
    """A tenant hits KV that was computed for another tenant."""
    return leave_out(rules, cache_salt=None)


@PAGE.exhibit("block keys do not contain the LoRA adapter", "#56643", "P6 P3")
def adapter_ignored(rules: Rules, _config: Config) -> Rules:
    """KV computed with an adapter is hit by requests of another adapter and of the base model."""
    return leave_out(rules, adapter=None)


@PAGE.exhibit("block keys do not contain the offsets of multimodal items", "#36708", "P6 P3")
def item_offset_ignored(rules: Rules, _config: Config) -> Rules:
    """An image at two different offsets gives the same key."""
    return change_items(rules, lambda items: tuple([(name, 0) for name, _ in items]))


@PAGE.exhibit("block keys do not contain multimodal items", "LMCache #690", "P6 P3")
def items_ignored(rules: Rules, _config: Config) -> Rules:
    """All images have the same placeholder tokens, so each request hits the first image's KV."""
    return change_items(rules, lambda _items: ())


@PAGE.exhibit(
    "block keys contain only a few bits of an item's identifier",
    "LMCache #3301, #4086, #4783",
    "P6 P3",
    wrong_fix_of="items-ignored",
)
def items_in_few_bits(rules: Rules, _config: Config) -> Rules:
    """Sooner or later two images have the same bits; here the bits are the identifier's length."""
    return change_items(
        rules, lambda items: tuple([(str(len(name)), offset) for name, offset in items])
    )


@PAGE.exhibit("block keys do not contain the prompt embeddings", "#28738 (seen in review)", "P6 P3")
def embeds_ignored(rules: Rules, _config: Config) -> Rules:
    """All such prompts have placeholder tokens, so each request hits the KV of the first one."""
    return leave_out(rules, embeds=())


@lru_cache(maxsize=4096)
def get_byte(key: BlockKey) -> int:
    """Return a hash of a block's content in one byte."""
    return crc32(repr(key).encode()) & 0xFF


@PAGE.exhibit("a block hash is cut to one byte", "LMCache #3301", "P6 P3 P15")
@instead(find_block)
def digest_in_one_byte(pool: Pool, key: BlockKey) -> BlockId | None:
    """Upstream cut hashes of images to two bytes; with one byte short runs meet a collision."""
    wanted = get_byte(key)
    return next((ids[0] for one, ids in pool.cached.items() if get_byte(one) == wanted), None)
