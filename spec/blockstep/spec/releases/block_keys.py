"""Identity: quirks of releases with the keys of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockstep.spec.copies import replace
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.features import identity
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, Request


def _is_behind_outputs(request: RequestState, index: int) -> bool:
    """Return whether outputs complete the block, or the prompt after them."""
    return bool(request.block_keys or (index > 0 and request.output_token_ids))


def output_block_key_has_only_the_last_item(rules: Rules, _config: Config) -> Rules:
    """A block completed by outputs has only the last item in its key, unless it is the first
    block."""

    def name_content(
        request: RequestState, index: int, start: int, end: int, within: Rules
    ) -> Mapping[str, Any]:
        if _is_behind_outputs(request, index):
            asked = replace(request.request, items=request.request.items[-1:])
            request = replace(request, request=asked)
        return rules[identity.name_content](request, index, start, end, within)

    return rules.replacing(identity.name_content, name_content)


def item_offset_not_in_key(rules: Rules, _config: Config) -> Rules:
    """The key of a block has the identifier of an item, but not the item's offset."""

    def get_item_keys(request: Request, start: int, end: int) -> tuple[tuple[str, int], ...]:
        return tuple((name, 0) for name, _ in rules[identity.get_item_keys](request, start, end))

    return rules.replacing(identity.get_item_keys, get_item_keys)


def adjacent_item_in_output_block_key(rules: Rules, _config: Config) -> Rules:
    """A block completed by outputs has an item in its key that ends where the block begins."""

    def name_content(
        request: RequestState, index: int, start: int, end: int, within: Rules
    ) -> Mapping[str, Any]:
        if request.request.items and _is_behind_outputs(request, index):
            *before, last = request.request.items
            longer = replace(last, length=last.length + 1)
            asked = replace(request.request, items=(*before, longer))
            request = replace(request, request=asked)
        return rules[identity.name_content](request, index, start, end, within)

    return rules.replacing(identity.name_content, name_content)


STORIES = (
    QuirkStory(
        Quirk.OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM,
        output_block_key_has_only_the_last_item,
        "a block completed by outputs has only the last item in its key, unless it is the first "
        "block",
        ("P3", "P6"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "blocks of 4; a prompt of 7 tokens with one item at 4 and another at 5, one output: a "
        "request with another first item hits the second block",
    ),
    QuirkStory(
        Quirk.ITEM_OFFSET_NOT_IN_KEY,
        item_offset_not_in_key,
        "the key of a block has the identifier of an item, but not the item's offset",
        ("P3", "P6"),
        "#36708 (fixed in 0.19.0)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "blocks of 4, two requests whose prompts are the same token, 8 times; an item of length 1 "
        "is at offset 0 in the first and at 1 in the second: the second hits the block of the "
        "first",
    ),
    QuirkStory(
        Quirk.ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY,
        adjacent_item_in_output_block_key,
        "a block completed by outputs has an item in its key that ends where the block begins",
        ("P6",),
        "not found upstream (fixed in 0.19.0)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "blocks of 1; a prompt of one token that is an item, two outputs: the block of the first "
        "output has the key that it would have if the item reached into it",
    ),
)
