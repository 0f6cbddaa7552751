"""Laws about windows and chunks, the blocks that they hold, and joint hits.

PYTEST_DONT_REWRITE.

Windows and block sizes are symbolic; a hit is searched among three blocks of each group.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.prefix_cache import get_group_keys, get_prefix_hit
from blockstep.spec.core.requests import Hit, Holding, RequestState
from blockstep.spec.core.slots import allocate_slots, compute_num_blocks
from blockstep.spec.features import get_config_rules
from blockstep.spec.features.groups import skip_slots
from blockstep.spec.features.groups.kinds import (
    compute_max_held_blocks,
    compute_num_skipped_blocks,
    compute_num_skipped_tokens,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import BlockKey, Config, GroupKind, KVGroup

ROOM = LawModule("groups")
FULL, WINDOW, CHUNK = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL
FIRST = BlockKey(None, (0,))
CHAIN = (FIRST, BlockKey(FIRST, (1,)))
CHUNKS = KVGroup(CHUNK, 4, attention_chunk_size=6)
Skipped = tuple[Pool, RequestState]


def window(num_tokens: int, block_size: int) -> KVGroup:
    """Return a sliding-window group."""
    return KVGroup(WINDOW, block_size, sliding_window=num_tokens)


def build_config(*groups: KVGroup, block_size: int = 4, num_blocks: int = 8) -> Config:
    """Return a config of these groups, with prefix caching."""
    return Config(num_blocks, block_size, groups=groups)


# Mistakes.


@instead(compute_max_held_blocks, theirs="#39734")
def window_is_charged_the_whole_request(group: KVGroup, num_slots: int) -> int:
    """The charge ignores that blocks outside the window are freed."""
    return compute_num_blocks(num_slots, group.block_size)


@instead(skip_slots, theirs="not found upstream")
def drafts_in_flight_count_as_computed(right: Right[Skipped]) -> Skipped:
    """The window advances as if all drafts in flight were accepted."""
    return right(num_unverified=0)


# Skipped blocks.


@ROOM.law("P8", (5, 9, 3))
def check_window_skips_exactly_the_tokens_out_of_its_reach(
    position: int, num_computed: int, num_tokens: int
) -> None:
    """The next token attends to itself and to the tokens before it, `num_tokens` in all."""
    assert 0 <= position < num_computed and 1 <= num_tokens
    num_skipped = compute_num_skipped_tokens(window(num_tokens, 1), num_computed)
    assert (position < num_skipped) == (num_computed - position >= num_tokens)


@ROOM.law("P8", (5, 9, 8))
def check_chunked_attention_skips_exactly_the_tokens_of_earlier_chunks(
    position: int, num_computed: int, size: int
) -> None:
    """The next token attends to the tokens of its own chunk."""
    assert 0 <= position <= num_computed and 1 <= size
    group = KVGroup(CHUNK, 1, attention_chunk_size=size)
    num_skipped = compute_num_skipped_tokens(group, num_computed)
    assert (position < num_skipped) == (position // size < num_computed // size)


@ROOM.law("P8", (9, 20, 3, 4))
def check_block_is_skipped_when_all_its_tokens_are(
    position: int, num_computed: int, num_tokens: int, block_size: int
) -> None:
    """A block with one token that is still read stays."""
    assert 0 <= position < num_computed and 1 <= num_tokens and 1 <= block_size
    group = window(num_tokens, block_size)
    num_skipped = compute_num_skipped_tokens(group, num_computed)
    is_held = position // block_size >= compute_num_skipped_blocks(group, num_computed)
    assert is_held == ((position // block_size + 1) * block_size > num_skipped)


# Held blocks.


@ROOM.law("P8 P11", (9, 4, 3, 4, 4))
def check_window_holds_at_most_the_blocks_charged(
    num_computed: int, num_ahead: int, num_tokens: int, reach: int, block_size: int
) -> None:
    """This holds at every position, with any number of slots within the reach of a step."""
    assert 0 <= num_computed and 1 <= num_ahead <= reach and 1 <= num_tokens and 1 <= block_size
    group = window(num_tokens, block_size)
    num_slots = num_computed + num_ahead
    num_left = compute_num_skipped_blocks(group, num_computed)
    num_held = compute_num_blocks(num_slots, block_size) - num_left
    assert num_held <= compute_max_held_blocks(group, num_slots, reach)


@ROOM.law("P8 P11", (11, 4, 4))
def check_chunked_attention_holds_at_most_the_blocks_charged(
    num_computed: int, num_ahead: int, reach: int
) -> None:
    """Chunks have six tokens and blocks four, so every second chunk begins within a block."""
    assert 0 <= num_computed and 1 <= num_ahead <= reach
    num_slots = num_computed + num_ahead
    num_left = compute_num_skipped_blocks(CHUNKS, num_computed)
    num_held = compute_num_blocks(num_slots, 4) - num_left
    assert num_held <= compute_max_held_blocks(CHUNKS, num_slots, reach)


@ROOM.law("P11 P15", (90, 3, 4, 4), window_is_charged_the_whole_request)
def check_charge_of_a_window_does_not_grow_with_the_request(
    num_slots: int, num_tokens: int, reach: int, block_size: int
) -> None:
    """The charge is the window, the reach of a step, and one block for an unaligned start."""
    assert 1 <= num_slots and 1 <= num_tokens and 1 <= reach and 1 <= block_size
    charged = compute_max_held_blocks(window(num_tokens, block_size), num_slots, reach)
    assert charged <= compute_num_blocks(num_tokens - 1 + reach, block_size) + 1
    assert charged <= compute_num_blocks(num_slots, block_size)


@ROOM.law("P1 P8", (20, 2, 3, 8), drafts_in_flight_count_as_computed)
def check_skipped_blocks_are_freed_from_the_last_to_the_first(
    num_computed: int, num_unverified: int, num_tokens: int, block_size: int
) -> None:
    """Tokens that a rejected draft would make the request read again are still there."""
    assert 1 <= block_size and 0 <= num_unverified <= num_computed <= 3 * block_size
    assert 1 <= num_tokens and num_computed < 8192
    config = build_config(window(num_tokens, block_size), block_size=block_size, num_blocks=6)
    request = h.build_runner("a", 1, num_computed, (1, 2, 3), 3)
    pool = h.build_pool((0, 1, 1, 1, 0, 0), (4, 5), published=(1, 2, 3))
    after, skipped = skip_slots(config, pool, request, num_unverified, get_config_rules(config))
    next_token = num_computed - num_unverified
    num_left = max(next_token - num_tokens + 1, 0) // block_size
    assert skipped.holdings == (Holding((0,) * num_left + (1, 2, 3)[num_left:], 3),)
    assert after.free_queue == (4, 5, *(3, 2, 1)[3 - num_left :])


# Several groups together.


@ROOM.law("P1 P8", (30, 16))
def check_all_groups_get_their_blocks_or_none_does(num_new: int, block_size: int) -> None:
    """One group shares both blocks of the hit, one of them free; the other shares the last one."""
    assert 1 <= block_size and 1 <= num_new and 2 * block_size + num_new < 8192
    groups = (KVGroup(FULL, block_size), window(2, block_size))
    config = replace(
        build_config(*groups, block_size=block_size, num_blocks=10), enable_prefix_caching=False
    )
    pool = h.build_pool((0, 1, 0, 0, 0, 0, 0, 0, 0, 0), (3, 2, 4, 5, 6, 7, 8, 9), (1, 2, 3))
    request = replace(h.build_request("a", 1), holdings=(Holding(), Holding()))
    hit = Hit(2 * block_size, ((1, 2), (0, 3)))
    granted = allocate_slots(
        config, pool, request, num_new, hit=hit, rules=get_config_rules(config)
    )
    num_each = compute_num_blocks(num_new, block_size)
    assert (granted is None) == (num_each > 3)
    if granted is not None:
        taken, after = granted
        assert after.block_tables == (
            (1, 2, *range(4, 4 + num_each)),
            (0, 3, *range(4 + num_each, 4 + 2 * num_each)),
        )
        assert len(taken.free_queue) == 6 - 2 * num_each


def build_published(num_full: int, first: int, end: int) -> Pool:
    """Return a pool that caches `num_full` blocks of one group and [first, end) of the other."""
    published = {CHAIN[index]: (1 + index,) for index in range(2) if index < num_full}
    published |= {
        CHAIN[index].in_group(1): (4 + index,) for index in range(2) if first <= index < end
    }
    return Pool((0,) * 8, (None,) * 8, tuple(range(1, 8)), FrozenMap(published))


@ROOM.law("P5", (9, 2, 1, 2, 5), is_slow=True)
def check_hit_is_the_greatest_length_valid_for_both_groups(
    num_known: int, num_full: int, first: int, end: int, num_tokens: int
) -> None:
    """Blocks have four tokens, and windows any number."""
    assert 1 <= num_known <= 9 and 0 <= num_full <= 2 and 0 <= first <= end <= 2 and 1 <= num_tokens
    config = build_config(KVGroup(FULL, 4), window(num_tokens, 4))
    request = replace(h.build_request("a", num_known), block_keys=CHAIN)
    hit = get_prefix_hit(
        config, build_published(num_full, first, end), request, get_config_rules(config)
    )
    greatest = 0
    for length in (4, 8):
        num_left = max(length - num_tokens + 1, 0) // 4
        has_window = num_left * 4 == length or (first <= num_left and length <= end * 4)
        if length < num_known and length <= num_full * 4 and has_window:
            greatest = length
    assert hit.num_tokens == greatest


@ROOM.law("P5 P6", (2, 0, 3))
def check_key_of_a_larger_block_has_its_last_tokens_and_its_group(
    num_links: int, first: int, end: int
) -> None:
    """The chain has six keys."""
    assert 1 <= num_links <= 3 and 0 <= first <= end and end * num_links <= 6
    keys = tuple([BlockKey(None, (index,)) for index in range(6)])
    named = get_group_keys(keys, 1, num_links, first, end)
    assert len(named) == end - first
    for index, key in enumerate(named):
        assert key == keys[(first + index + 1) * num_links - 1].in_group(1)
