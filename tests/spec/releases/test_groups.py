"""Quirks of several KV groups: prefix hits, reserved blocks and skipped blocks of releases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from groups_support import chunks, full, window

from blockstep.spec import Config, Oracle, Rejected, Request, SpecMethod, Status, Submit
from blockstep.spec.core.block_pool import create_pool, publish_blocks
from blockstep.spec.core.prefix_cache import extend_block_keys, get_group_keys, get_prefix_hit
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.profiles import Profile, Quirk, get_profile
from blockstep.spec.releases import get_rules
from blockstep.spec.vocabulary import NULL_BLOCK, BlockTables, KVGroup

Found = tuple[int, BlockTables]
NO_HIT: Found = (0, ())
ALL = tuple(range(9))


def find(
    quirks: Iterable[Quirk],
    groups: tuple[KVGroup, ...],
    num_known: int,
    lost: Iterable[tuple[int, int]] = (),
    has_head: bool = False,
) -> Found:
    """Return length and block tables of the hit of a prompt; blocks in `lost` are not published.

    A block is a pair of group and index. Its id is 100 * group + index + 1, so that ids differ
    between groups.
    """
    size = min(group.block_size for group in groups)
    config = Config(num_blocks=400, block_size=size, groups=groups)
    if has_head:
        config = replace(config, spec_method=SpecMethod.EAGLE, num_speculative_tokens=1)
    known = RequestState(Request("A", tuple(range(num_known))), Status.WAITING)
    keys = extend_block_keys(known, size, STRICT_RULES)
    known = RequestState(known.request, Status.WAITING, block_keys=keys)
    pool = create_pool(config.num_blocks)
    for number, group in enumerate(groups):
        num_full = num_known // group.block_size
        for index in range(num_full):
            if (number, index) not in lost:
                num_links = group.block_size // size
                key = get_group_keys(keys, number, num_links, index, index + 1)
                pool = publish_blocks(pool, (100 * number + index + 1,), key)
    hit = get_prefix_hit(config, pool, known, get_rules(frozenset(quirks), config))
    return hit.num_tokens, hit.block_tables


def test_draft_head_drop_per_group() -> None:
    """Upstream #32802: with a second window, the hit drops one block after the other."""
    two, three = (full(1), window(1, 2)), (full(1), window(1, 2), window(1, 3))
    assert find((), two, 7, has_head=True)[0] == 5
    assert find([Quirk.DRAFT_HEAD_DROP_PER_GROUP], two, 7, has_head=True) == (
        4,
        ((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 104)),
    )
    assert find((), three, 7, has_head=True)[0] == 5
    assert find([Quirk.DRAFT_HEAD_DROP_PER_GROUP], three, 7, has_head=True) == (0, ((), (), ()))
    for groups in (two, three):
        assert find([Quirk.DRAFT_HEAD_DROP_PER_GROUP], groups, 7) == find((), groups, 7), (
            "without a head"
        )


def test_window_hit_cut_without_check() -> None:
    """The fifth token attends to the fourth, whose block is null with the quirk."""
    groups = (full(2), window(1, 2))
    right = (4, ((1, 2), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 104)))
    assert find((), groups, 7, has_head=True) == right
    quirks = [Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK]
    assert find(quirks, groups, 7, has_head=True) == (4, ((1, 2), (NULL_BLOCK,) * 4))
    alike = (full(2), window(2, 2))
    assert find(quirks, alike, 7, has_head=True) == find((), alike, 7, has_head=True)


def test_first_block_of_an_attention_chunk_is_skipped() -> None:
    """With the quirk, the third token attends to two tokens that were not computed."""
    lost = [(0, 0), (0, 1)]
    assert find((), (chunks(2, 3),), 5, lost) == NO_HIT
    quirks = [Quirk.FIRST_BLOCK_OF_AN_ATTENTION_CHUNK_IS_SKIPPED]
    assert find(quirks, (chunks(2, 3),), 5, lost) == (2, ((NULL_BLOCK,),))
    assert find(quirks, (chunks(2, 4),), 5, lost) == find((), (chunks(2, 4),), 5, lost)


def test_a_window_of_one_needs_a_cached_block() -> None:
    groups, lost = (full(1), window(1, 1)), [(1, index) for index in ALL]
    assert find((), groups, 5, lost) == (4, ((1, 2, 3, 4), (NULL_BLOCK,) * 4))
    quirks = [Quirk.WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK]
    assert find(quirks, groups, 5, lost) == (0, ((), ()))
    assert find(quirks, groups, 5, lost[:3]) == (4, ((1, 2, 3, 4), (NULL_BLOCK,) * 4))


def test_a_window_of_one_holds_a_skipped_block() -> None:
    """With the quirk, the hit includes its last block, which is outside the window already."""
    groups = (full(1), window(1, 1))
    assert find((), groups, 5)[1][1] == (NULL_BLOCK,) * 4
    assert find([Quirk.WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK], groups, 5) == find((), groups, 5)
    held = find([Quirk.WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK], groups, 5)
    assert held == (4, ((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 104)))


@pytest.mark.parametrize(
    ("name", "first"), [("vllm-0.12.0", 1), ("vllm-0.14.0", 0), ("vllm-0.16.0", 0)]
)
def test_hits_hold_skipped_blocks_before_0_14(name: str, first: int) -> None:
    """The hit ends where a window of 1 token begins; 0.14.0 uses the null block."""
    profile = get_profile(name)
    assert profile is not None
    oracle = Oracle(Config(3, 1, groups=(window(1, 1),)), profile)
    oracle.submit(Request("A", (0,), max_tokens=1))
    oracle.submit(Request("B", (0, 0), max_tokens=1))
    assert [row.block_ids for row in oracle.schedule().new] == [((1,),), ((first, 2),)]


@pytest.mark.parametrize(("name", "first"), [("vllm-0.11.0", 1), ("vllm-0.11.1", 0)])
def test_a_chunk_keeps_a_published_block_in_0_11_0(name: str, first: int) -> None:
    profile = get_profile(name)
    assert profile is not None
    oracle = Oracle(Config(3, 1, groups=(chunks(1, 1),)), profile)
    oracle.submit(Request("A", (0,), max_tokens=2))
    oracle.commit(oracle.schedule(), {"A": [3]})
    oracle.schedule()
    assert oracle.state.requests["A"].block_tables == ((first, 2),)


def test_draft_head_cuts_short_windows_twice() -> None:
    """The hit of 8 cached tokens is 4.

    The release cuts 6 to 4, drops a block, and cuts again.
    """
    groups, quirks = (full(4), window(2, 6)), [Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE]
    assert find((), groups, 9, has_head=True) == (4, ((1,), (101, 102)))
    assert find(quirks, groups, 9, has_head=True) == (0, ((), ()))
    assert find(quirks, groups, 9) == find((), groups, 9), "without a head"
    alike = (full(2), window(2, 6))
    assert find(quirks, alike, 9, has_head=True) == find((), alike, 9, has_head=True)
    assert find(quirks, groups, 13, has_head=True) == find((), groups, 13, has_head=True)


def test_only_first_full_attention_group_is_cut() -> None:
    groups, lost = (full(1), full(2), window(1, 2)), [(2, index) for index in ALL]
    assert find((), groups, 9, lost) == NO_HIT
    quirks = [Quirk.ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT]
    assert find(quirks, groups, 9, lost) == (0, ((), (101, 102, 103, 104), ()))


@pytest.mark.parametrize(("quirk", "expected"), [(False, 1), (True, 0)])
def test_window_reserves_the_full_request(quirk: bool, expected: int) -> None:
    """Upstream #39734: the request needs 2 of 3 blocks; with the quirk it waits for ever."""
    config = Config(4, 1, max_num_batched_tokens=1, max_model_len=6, groups=(window(1, 2),))
    quirks = {Quirk.WINDOW_RESERVES_THE_FULL_REQUEST} if quirk else set()
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(Request("A", (1, 2, 3, 4, 5), max_tokens=1))
    assert len(oracle.schedule().rows) == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, 2), (True, 3)])
def test_window_moves_as_if_drafts_were_accepted(quirk: bool, expected: int) -> None:
    """If the draft in flight is rejected, the next token attends to a null block."""
    config = Config(
        9, 1, max_model_len=9, max_frames_in_flight=3, async_scheduling=True,
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=1, groups=(window(1, 2),),
    )  # fmt: skip
    quirks = {Quirk.WINDOW_MOVES_AS_IF_DRAFTS_WERE_ACCEPTED} if quirk else set()
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(Request("A", (1, 2), max_tokens=6))
    oracle.schedule()  # the prompt
    oracle.schedule()  # what it samples, and a draft
    oracle.schedule()  # and so on
    (table,) = oracle.state.requests["A"].block_tables
    assert table.count(NULL_BLOCK) == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, (0, 0, 3)), (True, (0, 2, 3))])
def test_attention_chunk_keeps_a_published_block(quirk: bool, expected: tuple[int, ...]) -> None:
    config = Config(9, 1, max_model_len=9, groups=(chunks(1, 2),))
    quirks = {Quirk.ATTENTION_CHUNK_KEEPS_A_PUBLISHED_BLOCK} if quirk else set()
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(Request("A", (1, 2), max_tokens=2))
    oracle.commit(oracle.schedule(), {"A": [3]})
    oracle.schedule()
    (table,) = oracle.state.requests["A"].block_tables
    assert table == expected


def test_draft_head_block_is_looked_up_once() -> None:
    """After the hit is cut to 1 token, the first window lacks the block of the draft head."""
    groups, lost = (full(1), window(1, 2), window(1, 3)), [(1, 1), (2, 2)]
    assert find((), groups, 6, lost, has_head=True) == NO_HIT
    quirks = [Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE]
    assert find(quirks, groups, 6, lost, has_head=True) == (1, ((1,), (101,), (201,)))
    assert find(quirks, groups, 6, lost)[0] == find((), groups, 6, lost)[0] == 5, "without a head"


def test_draft_head_drops_the_last_prompt_block() -> None:
    groups = (full(2), window(2, 2))
    quirks = [
        Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE,
        Quirk.DRAFT_HEAD_DROPS_THE_LAST_PROMPT_BLOCK,
    ]
    hits = [[find(some, groups, n, has_head=True)[0] for n in (5, 6, 7)] for some in ((), quirks)]
    assert hits == [[2, 2, 4], [2, 4, 4]]
    assert find(quirks, groups, 6) == find((), groups, 6), "without a head"


A_STEP, IN_FLIGHT = Quirk.WINDOW_RESERVES_ONE_STEP, Quirk.WINDOW_RESERVES_STEPS_IN_FLIGHT


@pytest.mark.parametrize(
    ("quirk", "group", "budget", "num_frames", "expected"),
    [
        *[
            case
            for quirk in (A_STEP, IN_FLIGHT)
            for case in (
                (
                    quirk,
                    window(1, 2),
                    1,
                    1,
                    3,
                ),  # one token of the window, one of the step, and a block
                (quirk, window(2, 4), 3, 1, 4),
                (quirk, chunks(1, 3), 2, 1, 5),  # a chunk, and a step
                (quirk, full(1), 1, 1, 8),
                (quirk, window(1, 2), 9, 1, 8),  # the prompt itself, which is shorter
            )
        ],
        (A_STEP, window(1, 2), 2, 2, 4),
        (IN_FLIGHT, window(1, 2), 2, 2, 6),
    ],
)
def test_windows_reserve_steps(
    quirk: Quirk, group: KVGroup, budget: int, num_frames: int, expected: int
) -> None:
    """The smallest pool in which a prompt of 8 tokens is admitted is `expected` blocks."""
    profile = Profile("some", frozenset({quirk}))
    admitted = []
    for num_usable in range(1, 10):
        config = Config(
            num_usable + 1, group.block_size, 1, budget, 12, enable_prefix_caching=False,
            max_frames_in_flight=num_frames, async_scheduling=num_frames > 1, groups=(group,),
        )  # fmt: skip
        oracle = Oracle(config, profile)
        answer = oracle.apply(Submit(Request("A", tuple(range(8)), max_tokens=1)))
        if not isinstance(answer, Rejected) and oracle.schedule().rows:
            admitted.append(num_usable)
    assert admitted == list(range(expected, 10))


@pytest.mark.parametrize(("quirk", "expected"), [(False, (0, 2, 3)), (True, (1, 2, 3))])
def test_window_waits_for_commits(quirk: bool, expected: tuple[int, ...]) -> None:
    """The first token is outside the window, as tokens in flight are certain without drafts."""
    config = Config(
        9, 1, max_num_batched_tokens=1, max_model_len=9, max_frames_in_flight=3,
        async_scheduling=True, groups=(window(1, 2),),
    )  # fmt: skip
    quirks = {Quirk.WINDOW_WAITS_FOR_COMMITS} if quirk else set()
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(Request("A", (1, 2, 3, 4, 5), max_tokens=2))
    plans = [oracle.schedule() for _ in range(3)]
    (table,) = oracle.state.requests["A"].block_tables
    assert table == expected
    oracle.commit(plans[0], {})
    oracle.schedule()
    (table,) = oracle.state.requests["A"].block_tables
    assert table.count(NULL_BLOCK) == 2 - 2 * quirk
