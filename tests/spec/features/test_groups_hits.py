"""Prefix hits with several KV groups: the hit is the longest that is valid in every group (P5).

The check does no arithmetic with windows and chunks. It tries every length, and asks for each pair
of tokens whether one attends to the other.
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
    """Return whether every group has all blocks that a hit of `num_tokens` needs."""
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
    """Return a pool where these blocks of the prompt are published, a request, and block ids."""
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
    """Check that the hit is the longest valid one and has null blocks where nothing is read."""
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
def test_the_hit_is_the_longest_for_every_set_of_published_blocks(
    config: Config, num_known: int, head: bool
) -> None:
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
    # Most blocks are published: with a random half of them, hits would be rare.
    gone = draw(st.sets(st.sampled_from(places), max_size=6)) if places else set()
    return config, frozenset(places) - gone, num_known


@given(worlds())
def test_the_hit_is_the_longest_for_random_groups(world: tuple[Config, Published, int]) -> None:
    check(*world)


def test_there_is_no_hit_if_the_window_lacks_its_blocks() -> None:
    """The full group has all blocks; the window lacks the one before each possible end."""
    config = config_of(full(2), window(2, 3))
    hit = check(config, frozenset({(0, 0), (0, 1), (0, 2), (0, 3)}), 9)
    assert hit.num_tokens == 0


def test_a_hit_does_not_need_blocks_outside_the_window() -> None:
    config = config_of(full(2), window(2, 3))
    hit = check(config, frozenset({(0, 0), (0, 1), (0, 2), (1, 2)}), 9)
    assert hit == Hit(6, ((1, 2, 3), (0, 0, 4)))


def test_the_hit_is_shorter_if_the_window_lacks_its_last_block() -> None:
    """The hit ends before the missing block, not at 0."""
    config = config_of(full(2), window(2, 3))
    published = frozenset({(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)})
    assert check(config, published, 9).num_tokens == 4


def test_the_length_of_a_hit_is_a_multiple_of_all_block_sizes() -> None:
    config = config_of(full(2), full(4))
    published = frozenset({(0, 0), (0, 1), (0, 2), (1, 0)})
    assert check(config, published, 9).num_tokens == 4


def test_chunked_local_groups_alone_hit_all_full_chunks_without_blocks() -> None:
    """No token of the last chunk attends to an earlier one."""
    config = config_of(chunks(16, 32))
    assert check(config, frozenset(), 70) == Hit(64, ((0, 0, 0, 0),))


def test_a_draft_head_drops_one_block_that_every_group_must_have() -> None:
    config = config_of(full(2), window(2, 3), head=True)
    everything = frozenset(list_places(config, 9))
    assert check(config, everything, 9).num_tokens == 6
    assert check(config, everything - {(1, 3)}, 9).num_tokens == 4
    assert check(config, everything - {(0, 3)}, 9).num_tokens == 4


def test_a_draft_head_drops_one_block_for_three_groups() -> None:
    """If each group dropped a block of the others' hit, no hit would be left."""
    config = config_of(full(2), window(2, 3), chunks(2, 4), head=True)
    assert check(config, frozenset(list_places(config, 9)), 9).num_tokens == 6


def test_a_block_key_has_its_group_only_in_the_last_link() -> None:
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
