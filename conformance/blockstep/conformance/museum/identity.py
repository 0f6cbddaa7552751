"""Identity: what tells the content of one block from that of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


class _Misread(Defect):
    """What names the blocks of a request is changed as soon as it is submitted."""

    def _submit(self, request: Any) -> Any:
        answer = super()._submit(request)
        slot = self.table.slot_of.get(request.request_id)
        if slot is not None:
            self._misread(self.table.lineages[slot])
        return answer


@PAGE.exhibit("the salt is not part of a block's identity", "#56643", "P6 P3")
class SaltIgnored(_Misread):
    """One tenant is answered from another one's cache."""

    def _misread(self, lineage: Any) -> None:
        lineage.request = replace(lineage.request, cache_salt=None)


@PAGE.exhibit("the adapter is not part of a block's identity", "#56643", "P6 P3")
class AdapterIgnored(_Misread):
    """What one adapter computed is read by another one, and by the base model."""

    def _misread(self, lineage: Any) -> None:
        lineage.request, lineage._every = replace(lineage.request, adapter=None), b""


Items: TypeAlias = tuple[tuple[str, int], ...]
"""Identifier, and offset from the start of the block."""


class _MisreadItems(_Misread):
    """Blocks are named with what `_see` makes of the items in them."""

    def _misread(self, lineage: Any) -> None:
        kind, see = type(lineage), self._see

        def items_of(lineage: Any, index: int) -> Any:
            return see(kind.items_of(lineage, index))

        if lineage.request.items and kind.__name__ != "Misread":
            lineage.__class__ = type("Misread", (kind,), {"items_of": items_of, "__slots__": ()})


@PAGE.exhibit("an item's place is not part of a block's identity", "#36708", "P6 P3")
class ItemOffsetIgnored(_MisreadItems):
    """One image at two places reads as the same."""

    def _see(self, items: Items) -> Items:
        return tuple((name, 0) for name, _ in items)


@PAGE.exhibit("an item is no part of a block's identity", "LMCache #690", "P6 P3")
class ItemsIgnored(_MisreadItems):
    """All images have the same placeholder tokens, so each is answered for the first one."""

    def _see(self, items: Items) -> Items:
        return ()


@PAGE.exhibit(
    "an item is known by a few bits of its name",
    "LMCache #3301, #4086, #4783",
    "P6 P3",
    wrong_fix_of="items-ignored",
)
class ItemsInFewBits(_MisreadItems):
    """Two images share them sooner or later; here the length of the name stands for it."""

    def _see(self, items: Items) -> Items:
        return tuple((str(len(name)), offset) for name, offset in items)


@PAGE.exhibit("an embedding is no part of a block's identity", "#28738 (seen in review)", "P6 P3")
class EmbedsIgnored(_Misread):
    """Prompts sent as embeddings have placeholder tokens, so each is answered for the first one."""

    def _misread(self, lineage: Any) -> None:
        lineage.request = replace(lineage.request, prompt_embeds=())


@PAGE.exhibit("a block is known by one byte of its digest", "LMCache #3301", "P6 P3 P15")
class DigestInOneByte(Defect):
    """Upstream it was two, and of images; one is enough for short runs to meet a collision."""

    digest: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        whole = self.digest.function
        self.digest = replace(self.digest, function=lambda message: whole(message)[:1])
