"""The hit of several KV groups is the greatest length that is valid for each of them (P5).

The oracle knows no arithmetic of windows and chunks: it asks of each pair of tokens whether the
one attends to the other, and tries every length.
"""

from collections.abc import Iterable
from itertools import product

import pytest
from groups_support import CHUNK, FULL, WINDOW, attends, chunks, full, window
from hypothesis import given
from hypothesis import strategies as st

from blockstep.spec import Config, Request, SpecMethod, Status
from blockstep.spec.core.block_pool import Pool, create_pool, publish_blocks
from blockstep.spec.core.prefix_cache import extend_block_keys, get_prefix_hit
from blockstep.spec.core.requests import Hit, RequestState
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.features import get_config_rules
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import NULL_BLOCK, BlockKey, KVGroup

Published = frozenset[tuple[int, int]]
"""(group, index) of each block of the prompt that is published."""


def is_valid(config: Config, published: Published, num_known: int, num_tokens: int) -> bool:
    """Whether a hit of so many tokens lacks nothing, group by group and token by token."""
    for number, group in enumerate(config.groups):
        size = group.block_size
        if num_tokens % size:
            return False
        read = {
            position // size
            for reader in range(num_tokens, num_known + 1)
            for position in range(num_tokens)
            if attends(group, reader, position)
        }
        if config.spec_method is SpecMethod.EAGLE:
            read.add(num_tokens // size)
            if num_tokens + size > num_known - 1:
                return False
        if not all((number, index) in published for index in read):
            return False
    return True


def get_greatest(config: Config, published: Published, num_known: int) -> int:
    lengths = range(1, num_known)
    return max((n for n in lengths if is_valid(config, published, num_known, n)), default=0)


def build(
    config: Config, published: Iterable[tuple[int, int]], num_known: int
) -> tuple[Pool, RequestState, dict[tuple[int, int], int]]:
    """A pool where these blocks of the prompt are published, each at an id of its own."""
    request = RequestState(Request("A", tuple(range(num_known))), Status.WAITING)
    chain = extend_block_keys(request, config.block_size, STRICT_RULES)
    places = {place: block_id for block_id, place in enumerate(sorted(published), 1)}
    pool = create_pool(len(places) + 1)
    for (number, index), block_id in places.items():
        end = (index + 1) * config.groups[number].block_size
        last = chain[end // config.block_size - 1]
        key = BlockKey(last.parent, last.token_ids, group=number)
        pool = publish_blocks(pool, (block_id,), (key,))
    known = RequestState(Request("A", tuple(range(num_known))), Status.WAITING, block_keys=chain)
    return pool, known, places


def check(config: Config, published: Published, num_known: int) -> Hit:
    """The hit is the greatest valid one, and shares just what is read: the rest is null."""
    pool, request, places = build(config, published, num_known)
    hit = get_prefix_hit(config, pool, request, get_config_rules(config))
    assert hit.num_tokens == get_greatest(config, published, num_known)
    if not hit.num_tokens:
        return hit
    for number, (group, table) in enumerate(zip(config.groups, hit.block_tables, strict=True)):
        assert len(table) * group.block_size == hit.num_tokens
        for index, block_id in enumerate(table):
            block = range(index * group.block_size, (index + 1) * group.block_size)
            is_read = any(attends(group, hit.num_tokens, position) for position in block)
            assert block_id == (places[number, index] if is_read else NULL_BLOCK)
    return hit


def config_of(*groups: KVGroup, head: bool = False) -> Config:
    return Config(
        99,
        min(group.block_size for group in groups),
        spec_method=SpecMethod.EAGLE if head else SpecMethod.NONE,
        num_speculative_tokens=1 if head else 0,
        groups=groups,
    )


def list_places(config: Config, num_known: int) -> list[tuple[int, int]]:
    return [
        (number, index)
        for number, group in enumerate(config.groups)
        for index in range(num_known // group.block_size)
    ]


SMALL = [
    (config_of(full(2), window(2, 3)), 9),
    (config_of(window(1, 1), full(1)), 5),
    (config_of(window(2, 4), window(2, 6)), 9),
    (config_of(full(1), window(2, 3)), 6),
    (config_of(window(1, 3), full(2)), 6),
    (config_of(window(1, 3), chunks(2, 4)), 6),
    (config_of(chunks(2, 3), full(2)), 9),
    (config_of(chunks(1, 2)), 8),
    (config_of(full(2), window(2, 3), chunks(4, 8)), 9),
    (config_of(full(1), window(2, 2), chunks(2, 4)), 5),
]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("config", "num_known"), SMALL)
def test_of_every_set_of_published_blocks(config: Config, num_known: int, head: bool) -> None:
    config = config_of(*config.groups, head=head)
    places = list_places(config, num_known)
    lengths = set()
    for chosen in product((False, True), repeat=len(places)):
        published = frozenset(place for place, is_in in zip(places, chosen, strict=True) if is_in)
        lengths.add(check(config, published, num_known).num_tokens)
    assert len(lengths) > 1


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Config, Published, int]:
    unit = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=2))
    groups = []
    for ratio in (1, *sizes):
        size = ratio * unit
        kind = draw(st.sampled_from((FULL, WINDOW, CHUNK)))
        extent = draw(st.integers(1, 12))
        groups.append(
            {FULL: full(size), WINDOW: window(size, extent), CHUNK: chunks(size, extent)}[kind]
        )
    config = config_of(*draw(st.permutations(groups)), head=draw(st.booleans()))
    num_known = draw(st.integers(1, 30))
    places = list_places(config, num_known)
    # Mostly there, for of blocks at random hardly any make a hit.
    gone = draw(st.sets(st.sampled_from(places), max_size=6)) if places else set()
    return config, frozenset(places) - gone, num_known


@given(worlds())
def test_of_groups_at_random(world: tuple[Config, Published, int]) -> None:
    check(*world)


def test_nothing_is_hit_although_the_full_group_has_it_all() -> None:
    """The window lacks the block before each length that it could be."""
    config = config_of(full(2), window(2, 3))
    hit = check(config, frozenset({(0, 0), (0, 1), (0, 2), (0, 3)}), 9)
    assert hit.num_tokens == 0


def test_a_window_may_have_lost_what_it_skips() -> None:
    config = config_of(full(2), window(2, 3))
    hit = check(config, frozenset({(0, 0), (0, 1), (0, 2), (1, 2)}), 9)
    assert hit == Hit(6, ((1, 2, 3), (0, 0, 4)))


def test_a_shorter_hit_may_be_valid_where_a_longer_one_is_not() -> None:
    """Its last block is gone, so the window falls back behind it, not to nothing."""
    config = config_of(full(2), window(2, 3))
    published = frozenset({(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)})
    assert check(config, published, 9).num_tokens == 4


def test_a_length_is_whole_blocks_of_every_group() -> None:
    config = config_of(full(2), full(4))
    published = frozenset({(0, 0), (0, 1), (0, 2), (1, 0)})
    assert check(config, published, 9).num_tokens == 4


def test_chunks_alone_are_hit_up_to_the_last_one_without_any_block() -> None:
    """Nobody reads an earlier chunk, so there is nothing to be found."""
    config = config_of(chunks(16, 32))
    assert check(config, frozenset(), 70) == Hit(64, ((0, 0, 0, 0),))


def test_a_head_gives_one_block_back_that_every_group_must_have() -> None:
    config = config_of(full(2), window(2, 3), head=True)
    everything = frozenset(list_places(config, 9))
    assert check(config, everything, 9).num_tokens == 6
    assert check(config, everything - {(1, 3)}, 9).num_tokens == 4
    assert check(config, everything - {(0, 3)}, 9).num_tokens == 4


def test_a_head_keeps_the_longest_of_three_groups() -> None:
    """Where each group in turn gives back a block of what the other left, nothing would be left."""
    config = config_of(full(2), window(2, 3), chunks(2, 4), head=True)
    assert check(config, frozenset(list_places(config, 9)), 9).num_tokens == 6


def test_a_key_names_its_group_in_its_last_link_only() -> None:
    config = config_of(full(1), window(2, 3))
    pool, _, places = build(config, {(0, 0), (0, 1), (1, 0)}, 3)
    first, last, large = (pool.block_keys[places[place]] for place in ((0, 0), (0, 1), (1, 0)))
    assert first is not None
    assert last is not None
    assert large is not None
    assert large != last
    assert (large.parent, large.token_ids, large.group) == (first, last.token_ids, 1)
    assert large == last.in_group(1)
    assert last.in_group(0) is last
    assert pool.cached == FrozenMap({first: (1,), last: (2,), large: (3,)})
