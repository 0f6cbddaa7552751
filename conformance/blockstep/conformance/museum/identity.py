"""Identity: what tells the content of one block from that of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from blockstep.conformance.museum.exhibit import Methods, Page

PAGE = Page()


def _misread(clean: Any, misread: Callable[[Any], None]) -> Methods:
    """What names the blocks of a request is changed by `misread` as soon as it is submitted."""

    def _submit(self: Any, request: Any) -> Any:
        answer = clean._submit(self, request)
        slot = self.table.slot_of.get(request.request_id)
        if slot is not None:
            misread(self.table.lineages[slot])
        return answer

    return {"_submit": _submit}


@PAGE.exhibit("the salt is not part of a block's identity", "#56643", "P6", "P3")
def salt_ignored(clean: Any) -> Methods:
    """One tenant is answered from another one's cache."""

    def misread(lineage: Any) -> None:
        lineage.request = replace(lineage.request, cache_salt=None)

    return _misread(clean, misread)


@PAGE.exhibit("the adapter is not part of a block's identity", "#56643", "P6", "P3")
def adapter_ignored(clean: Any) -> Methods:
    """What one adapter computed is read by another one, and by the base model."""

    def misread(lineage: Any) -> None:
        lineage.request, lineage._every = replace(lineage.request, adapter=None), b""

    return _misread(clean, misread)


Items: TypeAlias = tuple[tuple[str, int], ...]
"""Identifier, and offset from the start of the block."""


def _misread_items(clean: Any, see: Callable[[Items], Items]) -> Methods:
    """Blocks are named with what `see` makes of the items in them."""

    def items_of(self: Any, index: int) -> Items:
        return see(type(self).__mro__[1].items_of(self, index))  # type: ignore[attr-defined]

    def misread(lineage: Any) -> None:
        kind = type(lineage)
        if lineage.request.items and kind.__name__ != "Misread":
            lineage.__class__ = type("Misread", (kind,), {"items_of": items_of, "__slots__": ()})

    return _misread(clean, misread)


@PAGE.exhibit("an item's place is not part of a block's identity", "#36708", "P6", "P3")
def item_offset_ignored(clean: Any) -> Methods:
    """One image at two places reads as the same."""
    return _misread_items(clean, lambda items: tuple((name, 0) for name, _ in items))


@PAGE.exhibit("an item is no part of a block's identity", "LMCache #690", "P6", "P3")
def items_ignored(clean: Any) -> Methods:
    """All images have the same placeholder tokens, so each is answered for the first one."""
    return _misread_items(clean, lambda _items: ())


@PAGE.exhibit(
    "an item is known by a few bits of its name",
    "LMCache #3301, #4086, #4783",
    "P6",
    "P3",
    wrong_fix_of="items-ignored",
)
def items_in_few_bits(clean: Any) -> Methods:
    """Two images share them sooner or later; here the length of the name stands for it."""
    return _misread_items(
        clean, lambda items: tuple((str(len(name)), offset) for name, offset in items)
    )


@PAGE.exhibit(
    "an embedding is no part of a block's identity", "#28738 (seen in review)", "P6", "P3"
)
def embeds_ignored(clean: Any) -> Methods:
    """Prompts sent as embeddings have placeholder tokens, so each is answered for the first one."""

    def misread(lineage: Any) -> None:
        lineage.request = replace(lineage.request, prompt_embeds=())

    return _misread(clean, misread)


@PAGE.exhibit("a block is known by one byte of its digest", "LMCache #3301", "P6", "P3", "P15")
def digest_in_one_byte(clean: Any) -> Methods:
    """Upstream it was two, and of images; one is enough for short runs to meet a collision."""

    def init(self: Any, config: Any) -> None:
        clean.__init__(self, config)
        whole = self.digest.function
        self.digest = replace(self.digest, function=lambda message: whole(message)[:1])

    return {"__init__": init}
