"""Items for an encoder: few identifiers, each of one length; not all of them fit the cache at once.

Items are placed in prompts. An encoder-decoder model has one item outside of the prompt, which may
be longer than it.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.protocol.feature import without_states
from blockstep.spec.features.groups.kinds import compute_max_held_blocks, compute_max_reach
from blockstep.spec.vocabulary import (
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    MultiModalItem,
    config_problems,
)

IDENTIFIERS = ("cat", "dog", "owl")
CROWD = (*IDENTIFIERS, *("ape", "bee", "cow", "eel", "elk", "fox", "hen", "jay", "yak"))
"""Identifiers in a storm: enough that most items are encoded, and few are found in the cache."""


def draw_encoder(config: Config, draw: Draw, is_storm: bool = False) -> Config:
    """Return the config with an encoder: room for one or two of the largest items, seldom for all.

    A storm has more room: a request that waits for room encodes nothing that a preemption could
    undo.
    """
    longest = get_longest_item(config)
    most = 3 if is_storm else 1
    config = replace(
        config,
        encoder_compute_budget=draw.integer(longest, 2 * most * longest),
        encoder_cache_size=draw.integer(longest, 3 * most * longest),
        disable_chunked_mm_input=draw.chance(25) and not keeps_states_at_block_ends(config),
    )
    if config.disable_chunked_mm_input and draw.chance(40):  # an item then fills a chunk, or more
        config = replace(config, long_prefill_token_threshold=draw.integer(1, longest))
    return config


def keeps_states_at_block_ends(config: Config) -> bool:
    """Return whether chunks end at block boundaries to keep recurrent states, even amid an item."""
    return any(group.mamba_cache_mode is MambaCacheMode.ALIGN for group in config.groups)


def get_longest_item(config: Config) -> int:
    """Return the tokens of the longest item that is drawn."""
    return max(min(4, config.max_model_len // 3), 1)


def draw_beside(config: Config, draw: Draw, has_groups: bool) -> Config:
    """Return the config of an encoder-decoder model, with the encoder budget and cache unchanged.

    `has_groups`: layers with cross attention form a group of their own, added to the groups of the
    config or to one of full attention. All share one pool, which has room for the longest item with
    a short request, and seldom for many.
    """
    if config.enable_prefix_caching:
        config = forget_states(config)
    config = replace(
        config,
        is_encoder_decoder=True,
        disable_chunked_mm_input=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_model_len),
    )
    if not has_groups:
        return config
    size = config.block_size * draw.choice((1, 1, 2))
    across = KVGroup(GroupKind.CROSS_ATTENTION, size)
    others = config.groups or (KVGroup(GroupKind.FULL, config.block_size),)
    groups = (across, *others) if draw.chance(30) else (*others, across)
    config = replace(config, groups=groups)
    shortest = 2 + config.num_speculative_tokens + config.num_lookahead_tokens
    num_blocks = count_held_blocks(config, shortest)
    if num_blocks > config.num_usable_blocks or draw.chance(50):
        num_blocks = max(num_blocks, config.num_usable_blocks) + draw.integer(0, num_blocks)
        config = replace(config, num_blocks=1 + num_blocks)
    return config


def forget_states(config: Config) -> Config:
    """Return the config without prefix caching, and with recurrent groups that keep no state.

    Recurrent groups are left out where their block size does not fit those of the others.
    """
    unit = config.block_size
    size = -(-config.max_model_len // unit) * unit
    groups = [
        replace(group, block_size=size, mamba_cache_mode=MambaCacheMode.NONE)
        if group.kind is GroupKind.RECURRENT
        else group
        for group in config.groups
    ]
    plain = replace(config, enable_prefix_caching=False, groups=tuple(groups))
    return without_states(config) if config_problems(plain) else plain


def count_held_blocks(config: Config, num_slots: int) -> int:
    """Return the most blocks that a request of `num_slots` slots and the longest item holds."""
    reach, longest = compute_max_reach(config), get_longest_item(config)
    return sum(
        compute_max_held_blocks(
            group, longest if group.kind is GroupKind.CROSS_ATTENTION else num_slots, reach
        )
        for group in config.groups
    )


def get_shape(identifier: str, seed: int, longest: int) -> tuple[int, tuple[bool, ...]]:
    """Return the length and the mask of an item: equal identifiers have equal content."""
    random = Random(f"{identifier}/{seed}/{longest}")  # noqa: S311 - tests, not secrets
    length = random.randint(1, max(longest, 1))
    mask = tuple(random.random() < 0.6 for _ in range(length)) if random.random() < 0.4 else ()
    return length, mask if any(mask) else ()


def draw_encoded(
    draw: Draw, num_prompt: int, config: Config, seed: int, is_storm: bool = False
) -> tuple[MultiModalItem, ...]:
    """Draw up to three items in a prompt, some of them twice; in an encoder-decoder model one. In a
    storm they follow one another closely, so that each chunk begins another one."""
    names = CROWD if is_storm else IDENTIFIERS
    items: list[MultiModalItem] = []
    longest, start = get_longest_item(config), 0
    if config.is_encoder_decoder:
        identifier = draw.choice(names)
        return (MultiModalItem(identifier, 0, get_shape(identifier, seed, longest)[0]),)
    for _ in range(num_prompt if is_storm else draw.integer(1, 3)):
        identifier = draw.choice(names)
        length, mask = get_shape(identifier, seed, longest)
        offset = start + draw.integer(0, 1 if is_storm else 2)
        if offset + length <= num_prompt:
            items.append(MultiModalItem(identifier, offset, length, mask))
            start = offset + length
    return tuple(items)


def keep_items(
    config: Config, items: tuple[MultiModalItem, ...], num_prompt: int
) -> tuple[MultiModalItem, ...]:
    """Return the items that fit in a prompt of `num_prompt` tokens."""
    if config.is_encoder_decoder:
        return items
    return tuple([item for item in items if item.offset + item.length <= num_prompt])
