"""Identity: what decides the content of a block besides its tokens.

The adapter is part of every block's key, the salt only of the first one's: the chain includes it in
later ones. Items and embeddings are part of the keys of their blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.vocabulary import Request


def name_content(
    request: RequestState, index: int, start: int, end: int, rules: Rules
) -> Mapping[str, Any]:
    """Return the adapter, salt, items and embeddings of a block at positions [start, end).

    Source: seed 001 "Block Hash Computation"; seed 003 section 1.2; P6.
    """
    asked = request.request
    return {
        "adapter": asked.adapter,
        "cache_salt": asked.cache_salt if index == 0 else None,
        "items": rules[get_item_keys](asked, start, end),
        "embeds": asked.prompt_embeds[start:end],
    }


def get_item_keys(request: Request, start: int, end: int) -> tuple[tuple[str, int], ...]:
    """Return the multimodal items that overlap token positions [start, end), with relative offsets.

    The offset matters: one image at two places of otherwise equal placeholder tokens makes two
    different contents. Source: seed 001 "Block Hash Computation"; upstream #36708; P6.
    """
    return tuple(
        (item.identifier, item.offset - start)
        for item in request.items
        if item.offset < end and start < item.offset + item.length
    )


FEATURE: Final = Feature("identity", is_always, Hooks(names=(name_content,)))
