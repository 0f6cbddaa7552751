"""Identity: what a release names blocks by."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import Config, Request


def output_blocks_name_the_last_item(rules: Rules, _config: Config) -> Rules:
    """A block that outputs complete is named by the last item alone, unless it is the first."""

    def get_request_behind_outputs(request: Request) -> Request:
        if len(request.items) < 2:
            return rules.get_request_behind_outputs(request)
        return rules.get_request_behind_outputs(replace(request, items=request.items[-1:]))

    return replace(rules, get_request_behind_outputs=get_request_behind_outputs)


def items_named_without_place(rules: Rules, _config: Config) -> Rules:
    """An item names its block, but not the place where it stands in it."""

    def get_item_keys(request: Request, start: int, end: int) -> tuple[tuple[str, int], ...]:
        return tuple((name, 0) for name, _ in rules.get_item_keys(request, start, end))

    return replace(rules, get_item_keys=get_item_keys)


def touching_item_names_an_output_block(rules: Rules, _config: Config) -> Rules:
    """A last item that ends where a block begins names it, if outputs complete it."""

    def get_request_behind_outputs(request: Request) -> Request:
        request = rules.get_request_behind_outputs(request)
        if not request.items:
            return request
        last = request.items[-1]
        longer = replace(last, length=last.length + 1)
        return replace(request, items=(*request.items[:-1], longer))

    return replace(rules, get_request_behind_outputs=get_request_behind_outputs)


STORIES = (
    QuirkStory(
        Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM,
        output_blocks_name_the_last_item,
        "a block that outputs complete is named by the last item alone, unless it is the first",
        ("P3", "P6"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "blocks of 4; a prompt of 7 tokens with one item at 4 and another at 5, one output: a "
        "request with another first item hits the second block",
    ),
    QuirkStory(
        Quirk.ITEMS_NAMED_WITHOUT_PLACE,
        items_named_without_place,
        "an item names its block, but not the place where it stands in it",
        ("P3", "P6"),
        "#36708 (fixed in 0.19.0)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "blocks of 4, the prompt of two requests is one token, 8 times; an item of length 1 stands "
        "at 0 in the first and at 1 in the second: the second hits the block of the first",
    ),
    QuirkStory(
        Quirk.TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK,
        touching_item_names_an_output_block,
        "a last item that ends where a block begins names it, if outputs complete it",
        ("P6",),
        "not found upstream (fixed in 0.19.0)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "blocks of 1; a prompt of one token that is an item, two outputs: the block of the first "
        "output has the name that it would have if the item reached into it",
    ),
)
