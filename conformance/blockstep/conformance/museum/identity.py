"""Seeded bugs in block keys: what distinguishes the content of two blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


class _Misread(Defect):
    """The request that the block keys are computed from is changed as soon as it is submitted."""

    def _submit(self, request: Any) -> Any:
        answer = super()._submit(request)
        slot = self.table.slot_of.get(request.request_id)
        if slot is not None:
            self._misread(self.table.lineages[slot])
        return answer


@PAGE.exhibit("block keys do not contain the cache salt", "#56643", "P6 P3")
class SaltIgnored(_Misread):
    """A tenant hits KV that was computed for another tenant."""

    def _misread(self, lineage: Any) -> None:
        lineage.request = replace(lineage.request, cache_salt=None)


@PAGE.exhibit("block keys do not contain the LoRA adapter", "#56643", "P6 P3")
class AdapterIgnored(_Misread):
    """KV computed with an adapter is hit by requests of another adapter and of the base model."""

    def _misread(self, lineage: Any) -> None:
        lineage.request, lineage._every = replace(lineage.request, adapter=None), b""


Items: TypeAlias = tuple[tuple[str, int], ...]
"""Identifiers of items, each with its offset from the start of the block."""


class _MisreadItems(_Misread):
    """Block keys contain what `_see` makes of the block's items."""

    def _misread(self, lineage: Any) -> None:
        kind, see = type(lineage), self._see

        def items_of(lineage: Any, index: int) -> Any:
            return see(kind.items_of(lineage, index))

        if lineage.request.items and kind.__name__ != "Misread":
            lineage.__class__ = type("Misread", (kind,), {"items_of": items_of, "__slots__": ()})


@PAGE.exhibit("block keys do not contain the offsets of multimodal items", "#36708", "P6 P3")
class ItemOffsetIgnored(_MisreadItems):
    """An image at two different offsets gives the same key."""

    def _see(self, items: Items) -> Items:
        return tuple((name, 0) for name, _ in items)


@PAGE.exhibit("block keys do not contain multimodal items", "LMCache #690", "P6 P3")
class ItemsIgnored(_MisreadItems):
    """All images have the same placeholder tokens, so each request hits the first image's KV."""

    def _see(self, items: Items) -> Items:
        return ()


@PAGE.exhibit(
    "block keys contain only a few bits of an item's identifier",
    "LMCache #3301, #4086, #4783",
    "P6 P3",
    wrong_fix_of="items-ignored",
)
class ItemsInFewBits(_MisreadItems):
    """Sooner or later two images have the same bits; here the bits are the identifier's length."""

    def _see(self, items: Items) -> Items:
        return tuple((str(len(name)), offset) for name, offset in items)


@PAGE.exhibit("block keys do not contain the prompt embeddings", "#28738 (seen in review)", "P6 P3")
class EmbedsIgnored(_Misread):
    """All such prompts have placeholder tokens, so each request hits the KV of the first one."""

    def _misread(self, lineage: Any) -> None:
        lineage.request = replace(lineage.request, prompt_embeds=())


@PAGE.exhibit("a block hash is cut to one byte", "LMCache #3301", "P6 P3 P15")
class DigestInOneByte(Defect):
    """Upstream cut hashes of images to two bytes; with one byte short runs meet a collision."""

    digest: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        whole = self.digest.function
        self.digest = replace(self.digest, function=lambda message: whole(message)[:1])
