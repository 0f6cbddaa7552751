"""Groups: several KV groups for a config, in a pool that is as scarce as before.

Blocks of some groups are larger than those of others; windows and chunks end inside of blocks,
prompts and steps, or beyond all. A request holds blocks of every group, so the pool has room at
least for the shortest request, and at most for as many tokens as it had with one group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.items import count_held_blocks
from blockstep.conformance.protocol.feature import without_states
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
"""Kinds of attention layers in the order of their groups; common mixes are listed several times."""
SIZES = (1, 1, 1, 2, 2, 3, 4)
"""Block sizes, as multiples of the smallest."""


def draw_groups(
    config: Config,
    draw: Draw,
    is_storm: bool = False,
    wanted: Collection[GroupKind] = (),
    unwanted: Collection[GroupKind] = (),
) -> Config:
    """Return the config with several groups, and with a pool drawn for them.

    All kinds `wanted` are among them, and none of those `unwanted`. With a draft head more mixes
    have three kinds, since a hit drops a block in each. The largest pool holds in every group as
    many tokens as one group had room for; in a storm, and in every other config, at most half of
    the addition.
    """
    attended = {*wanted} - {RECURRENT}
    mixes = [mix for mix in MIXES if attended.issubset(mix) and not {*unwanted}.intersection(mix)]
    has_head = config.drops_last_hit_block and draw.chance(40)
    kinds = draw.choice([mix for mix in mixes if has_head and len({*mix}) > 2] or mixes)
    sizes = [1] * len(kinds)
    if draw.chance(50):
        sizes = [draw.choice(SIZES) for _ in kinds]
        sizes[draw.integer(0, len(sizes) - 1)] = 1  # block keys have the smallest size
    groups = tuple(
        _draw_group(kind, size * config.block_size, config, draw)
        for kind, size in zip(kinds, sizes, strict=True)
    )
    if RECURRENT in wanted or (RECURRENT not in unwanted and draw.chance(45)):
        groups = _add_states(groups, config, draw, may_replace=not wanted)
        if not is_storm and draw.chance(50):  # several requests have a chunk in one step
            budget = 3 * config.max_num_batched_tokens
            config = replace(config, max_num_batched_tokens=budget)
    config = replace(config, groups=groups)
    num_tokens = config.num_usable_blocks * config.block_size
    least = max(config.num_usable_blocks, _count_least(config))
    most = max(least, sum(-(-num_tokens // group.block_size) for group in groups))
    if is_storm or draw.chance(50):
        most = (least + most) // 2
    return replace(config, num_blocks=1 + draw.integer(least, most))


def leave_states_out(config: Config) -> Config:
    """Return the config without recurrent groups; if none is left, with one of full attention."""
    left = without_states(config)
    if config.groups and not left.groups:
        left = replace(left, groups=(KVGroup(FULL, left.block_size),))
    return left


def make_full(config: Config) -> Config:
    """Return the config with full attention in all groups, and blocks for the shortest request."""
    groups = tuple(KVGroup(FULL, group.block_size) for group in config.groups)
    config = replace(config, groups=groups)
    return replace(config, num_blocks=1 + max(config.num_usable_blocks, _count_least(config)))


def _count_least(config: Config) -> int:
    """Return the blocks that a request holds at most with a prompt of one token and one output
    token."""
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
    """Return the groups with one or two recurrent ones, of a cache mode that the config allows.

    They are first or last. If they `may_replace` others, they sometimes take the place of the last
    group.
    """
    unit, num_blocks = config.block_size, config.num_speculative_tokens
    mode = MambaCacheMode.NONE
    least = config.max_model_len
    if config.enable_prefix_caching:
        mode = draw.choice((MambaCacheMode.ALIGN, MambaCacheMode.ALIGN, MambaCacheMode.ALL))
        if not config.enable_chunked_prefill:
            mode = MambaCacheMode.ALL
        num_blocks += draw.integer(0, 1)
        # With `align` a step with drafts ends at most one block.
        least = num_blocks + 1 if mode is MambaCacheMode.ALIGN else 1
    size = -(-max(least, unit * draw.choice((1, 1, 2))) // unit) * unit
    states = KVGroup(RECURRENT, size, mamba_cache_mode=mode, num_speculative_blocks=num_blocks)
    kept = groups[: len(groups) - (draw.integer(0, 1) if may_replace else 0)]
    # Block keys have the smallest size, whether or not there are recurrent groups.
    if unit not in [group.block_size for group in kept or (states,)]:
        kept = groups
    others = (states,) * draw.choice((1, 1, 2))
    return (*others, *kept) if draw.chance(40) else (*kept, *others)


@lru_cache(maxsize=8)
def count_slots(config: Config) -> int:
    """Return the token slots of the longest request that fits the empty pool, in every group."""
    if not config.groups:
        return config.num_usable_blocks * config.block_size
    lengths = range(config.max_model_len + 1)
    held = config.num_usable_blocks
    return bisect_right(lengths, held, key=lambda length: count_held_blocks(config, length)) - 1


def list_boundaries(config: Config) -> list[int]:
    """Return the lengths at which something ends: a block of a group, a window, a chunk."""
    spans = [
        (group.block_size, group.sliding_window, group.attention_chunk_size)
        for group in config.kv_groups
    ]
    return sorted({length for span in spans for length in span if length})
