"""Groups: several KV-cache groups for a config, in a pool that is as short for them as it was.

Blocks of some are larger than those of others; windows and chunks end inside of blocks, prompts
and steps, or beyond all of them. A request holds blocks of every group, so the pool has room for
the shortest request at least, and at most for as many tokens as it had with one group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from blockstep.conformance.draw.decisions import Draw
from blockstep.conformance.draw.items import count_held_blocks
from blockstep.conformance.protocol.features import without_states
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, MambaCacheMode

FULL, WINDOW, CHUNKS = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL
RECURRENT = GroupKind.RECURRENT
MIXES: tuple[tuple[GroupKind, ...], ...] = (
    *((FULL, WINDOW), (FULL, WINDOW), (FULL, WINDOW), (WINDOW, FULL)),
    *((WINDOW,), (CHUNKS,), (FULL, CHUNKS), (CHUNKS, FULL)),
    *((WINDOW, WINDOW), (WINDOW, CHUNKS), (FULL, FULL)),
    *((FULL, WINDOW, WINDOW), (FULL, WINDOW, CHUNKS), (WINDOW, CHUNKS, FULL)),
    (FULL, WINDOW, FULL, WINDOW),
)
"""Kinds of attention side by side, in the order of their groups; the commonest several times."""
SIZES = (1, 1, 1, 2, 2, 3, 4)
"""Token slots of a block, in those of the smallest."""


def draw_groups(
    config: Config,
    draw: Draw,
    is_storm: bool = False,
    wanted: Collection[GroupKind] = (),
    unwanted: Collection[GroupKind] = (),
) -> Config:
    """The config with several groups, and with blocks for them.

    All kinds `wanted` are among them, and none of those `unwanted`. With a draft head more of them
    are of three kinds, since a hit drops a block in each. The largest pool holds every token in
    every group that one group had room for; in a storm, and in every other config, there is at most
    half of what that adds.
    """
    attended = {*wanted} - {RECURRENT}
    mixes = [mix for mix in MIXES if attended.issubset(mix) and not {*unwanted}.intersection(mix)]
    has_head = config.drops_last_hit_block and draw.chance(40)
    kinds = draw.choice([mix for mix in mixes if has_head and len({*mix}) > 2] or mixes)
    sizes = [1] * len(kinds)
    if draw.chance(50):
        sizes = [draw.choice(SIZES) for _ in kinds]
        sizes[draw.integer(0, len(sizes) - 1)] = 1  # blocks are named by the smallest
    groups = tuple(
        _draw_group(kind, size * config.block_size, config, draw)
        for kind, size in zip(kinds, sizes, strict=True)
    )
    if RECURRENT in wanted or (RECURRENT not in unwanted and draw.chance(45)):
        groups = _add_states(groups, config, draw, may_replace=not wanted)
    config = replace(config, groups=groups)
    num_tokens = config.num_usable_blocks * config.block_size
    least = max(config.num_usable_blocks, _count_least(config))
    most = max(least, sum(-(-num_tokens // group.block_size) for group in groups))
    if is_storm or draw.chance(50):
        most = (least + most) // 2
    return replace(config, num_blocks=1 + draw.integer(least, most))


def leave_states_out(config: Config) -> Config:
    """The config without recurrent groups; if there were no others, with one of full attention."""
    left = without_states(config)
    if config.groups and not left.groups:
        left = replace(left, groups=(KVGroup(FULL, left.block_size),))
    return left


def make_full(config: Config) -> Config:
    """The config whose groups all hold every token, with blocks for the shortest request."""
    groups = tuple(KVGroup(FULL, group.block_size) for group in config.groups)
    config = replace(config, groups=groups)
    return replace(config, num_blocks=1 + max(config.num_usable_blocks, _count_least(config)))


def _count_least(config: Config) -> int:
    """Blocks that the shortest request holds, which is not alone with its prompt."""
    return count_held_blocks(
        config, 2 + config.num_speculative_tokens + config.num_lookahead_tokens
    )


def _draw_group(kind: GroupKind, block_size: int, config: Config, draw: Draw) -> KVGroup:
    if kind is FULL:
        return KVGroup(kind, block_size)
    longest = draw.choice((block_size + 1, 3 * block_size, config.max_model_len + 2))
    num_tokens = draw.integer(1, longest)
    if draw.chance(60 if kind is CHUNKS else 30):
        num_tokens += -num_tokens % block_size
    if kind is WINDOW:
        return KVGroup(kind, block_size, sliding_window=num_tokens)
    return KVGroup(kind, block_size, attention_chunk_size=num_tokens)


def _add_states(
    groups: tuple[KVGroup, ...], config: Config, draw: Draw, may_replace: bool
) -> tuple[KVGroup, ...]:
    """The groups with a recurrent one or two, of the modes that the config allows.

    They are in front or last, and if they `may_replace` others, they now and then take the place of
    a group with the same blocks.
    """
    unit, num_blocks = config.block_size, config.num_speculative_tokens
    mode = MambaCacheMode.NONE
    least = config.max_model_len
    if config.enable_prefix_caching:
        mode = draw.choice((MambaCacheMode.ALIGN, MambaCacheMode.ALIGN, MambaCacheMode.ALL))
        if not config.enable_chunked_prefill:
            mode = MambaCacheMode.ALL
        num_blocks += draw.integer(0, 1)
        # With `align` a step among drafts ends one block at most.
        least = num_blocks + 1 if mode is MambaCacheMode.ALIGN else 1
    size = -(-max(least, unit * draw.choice((1, 1, 2))) // unit) * unit
    states = KVGroup(RECURRENT, size, mamba_cache_mode=mode, num_speculative_blocks=num_blocks)
    kept = groups[: len(groups) - (draw.integer(0, 1) if may_replace else 0)]
    # Blocks are named by the smallest, whether or not there are states.
    if unit not in [group.block_size for group in kept or (states,)]:
        kept = groups
    others = (states,) * draw.choice((1, 1, 2))
    return (*others, *kept) if draw.chance(40) else (*kept, *others)


@lru_cache(maxsize=8)
def count_slots(config: Config) -> int:
    """Slots of the longest request that the empty pool can hold, in every group."""
    if not config.groups:
        return config.num_usable_blocks * config.block_size
    lengths = range(config.max_model_len + 1)
    held = config.num_usable_blocks
    return bisect_right(lengths, held, key=lambda length: count_held_blocks(config, length)) - 1


def list_boundaries(config: Config) -> list[int]:
    """Tokens after which something ends: a block of a group, a window, a chunk."""
    spans = [
        (group.block_size, group.sliding_window, group.attention_chunk_size)
        for group in config.kv_groups
    ]
    return sorted({length for span in spans for length in span if length})
