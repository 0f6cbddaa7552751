"""Items for an encoder: few, of one length each; not all of them fit beside each other."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from blockstep.conformance.draw.decisions import Draw
from blockstep.spec.vocabulary import Config, MultiModalItem

IDENTIFIERS = ("cat", "dog", "owl")
CROWD = (*IDENTIFIERS, "elk", "fox", "hen")
"""In a storm: so many that most are made, and not found."""


def draw_encoder(config: Config, draw: Draw) -> Config:
    """The config with an encoder: room for the largest item, or for two of them, seldom for all."""
    longest = max(min(4, config.max_model_len // 3), 1)
    return replace(
        config,
        encoder_compute_budget=draw.integer(longest, 2 * longest),
        encoder_cache_size=draw.integer(longest, 3 * longest),
        disable_chunked_mm_input=draw.chance(25),
    )


def get_shape(identifier: str, seed: int, longest: int) -> tuple[int, tuple[bool, ...]]:
    """The length and the mask of an item: equal identifiers have equal content."""
    random = Random(f"{identifier}/{seed}/{longest}")  # noqa: S311 - tests, not secrets
    length = random.randint(1, max(longest, 1))
    mask = tuple(random.random() < 0.6 for _ in range(length)) if random.random() < 0.4 else ()
    return length, mask if any(mask) else ()


def draw_encoded(
    draw: Draw, num_prompt: int, config: Config, seed: int, is_storm: bool = False
) -> tuple[MultiModalItem, ...]:
    """Up to three items in a prompt, some of them twice; in a storm one after the other, so that
    each chunk begins another one."""
    items: list[MultiModalItem] = []
    longest, start = max(min(4, config.max_model_len // 3), 1), 0
    for _ in range(num_prompt if is_storm else draw.integer(1, 3)):
        identifier = draw.choice(CROWD if is_storm else IDENTIFIERS)
        length, mask = get_shape(identifier, seed, longest)
        offset = start + draw.integer(0, 1 if is_storm else 2)
        if offset + length <= num_prompt:
            items.append(MultiModalItem(identifier, offset, length, mask))
            start = offset + length
    return tuple(items)
