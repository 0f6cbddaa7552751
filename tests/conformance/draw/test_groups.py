"""Drawn configs with KV groups are valid, most requests fit, and pools stay small."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.groups import count_slots, draw_groups, list_boundaries
from blockstep.conformance.draw.items import count_held_blocks
from blockstep.conformance.draw.presets import PRESETS, Swarm
from blockstep.conformance.draw.requests import draw_request
from blockstep.conformance.draw.swarms import draw_swarm
from blockstep.conformance.features.groups import FEATURE as GROUPS
from blockstep.conformance.features.groups import PARTS, STATES, GroupsOfKind
from blockstep.conformance.protocol.feature import settle_states, without_states
from blockstep.conformance.protocol.feature_selection import FeatureSelection, make_wish
from blockstep.conformance.protocol.features import CACHING, LATE, UsageError
from blockstep.spec.core.slots import is_servable
from blockstep.spec.features import get_config_rules
from blockstep.spec.vocabulary import (
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    SpecMethod,
    config_problems,
)

FULL, WINDOW, CHUNKS = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL
ALIGN = MambaCacheMode.ALIGN
ALWAYS = FeatureSelection(always=frozenset({GROUPS.name}))


def draw_some(preset: str, count: int = 150) -> list[Swarm]:
    return [
        draw_swarm(PRESETS[preset], SeededDraw(f"groups/{index}"), wish=ALWAYS)
        for index in range(count)
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_drawn_configs_are_valid_and_most_requests_can_be_served(preset: str) -> None:
    servable = 0
    for number, swarm in enumerate(draw_some(preset)):
        assert swarm.has(GROUPS)
        assert swarm.config.groups
        assert config_problems(swarm.config) == ()
        draw = SeededDraw(f"requests/{number}")
        for index in range(4):
            request = draw_request(swarm, draw, "A", index)
            servable += is_servable(swarm.config, request, get_config_rules(swarm.config))
    assert servable > 0.85 * 4 * 150


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_most_pools_are_too_small_for_three_requests_of_full_length(preset: str) -> None:
    swarms = draw_some(preset)
    everything = sum(
        swarm.config.num_usable_blocks
        < count_held_blocks(swarm.config, swarm.config.max_model_len)
        * min(swarm.config.max_num_seqs, 3)
        for swarm in swarms
    )
    assert everything > 100


def test_every_kind_and_size_of_groups_is_drawn() -> None:
    seen: Counter[str] = Counter()
    for swarm in draw_some("small", 500):
        config, groups = swarm.config, swarm.config.groups
        kinds = {group.kind for group in groups}
        windows = [group for group in groups if group.kind is WINDOW]
        chunks = [group for group in groups if group.kind is CHUNKS]
        for states in (group for group in groups if group.kind is GroupKind.RECURRENT):
            seen[f"states of mode {states.mamba_cache_mode}"] += 1
            seen["a state block for each draft"] += states.num_speculative_blocks > 0
            seen["states of larger blocks"] += states.block_size > config.block_size
        seen["three kinds"] += len(kinds) == 3
        seen["one group"] += len(groups) == 1
        seen["no full attention"] += FULL not in kinds
        seen["full attention first"] += groups[0].kind is FULL
        seen["full attention last"] += groups[-1].kind is FULL and len(groups) > 1
        seen["unequal blocks"] += len(set(config.block_sizes)) > 1
        seen["a storm"] += swarm.is_storm
        seen["drafts"] += config.num_speculative_tokens > 0
        seen["several frames"] += config.max_frames_in_flight > 1
        seen["without caching"] += not config.enable_prefix_caching
        for window in windows:
            seen["window inside a block"] += window.sliding_window < window.block_size
            seen["window that ends in a block"] += window.sliding_window % window.block_size > 0
            seen["window that never slides"] += window.sliding_window >= config.max_model_len
            seen["window shorter than a step"] += (
                window.sliding_window < config.max_num_batched_tokens
            )
        for chunk in chunks:
            size = chunk.attention_chunk_size
            seen["chunks of whole blocks"] += size % chunk.block_size == 0
            seen["chunks that end in a block"] += size % chunk.block_size > 0
    assert min(seen.values()) >= 10, seen


def find_share(wish: FeatureSelection, count: int = 400) -> Counter[str]:
    """Return how many of a thousand drawn configs have recurrent groups, three kinds of groups with
    a draft head, and any groups."""
    seen: Counter[str] = Counter()
    for index in range(count):
        config = draw_swarm(PRESETS["small"], SeededDraw(f"share/{index}"), wish=wish).config
        seen["states"] += STATES.is_asked_by(config)
        is_mixed = len({group.kind for group in config.groups}) > 2
        seen["three kinds with a head"] += is_mixed and config.drops_last_hit_block
        seen["groups"] += bool(config.groups)
    return Counter({name: number * 1000 // count for name, number in seen.items()})


def test_mixes_of_three_kinds_with_a_draft_head_are_common() -> None:
    """With a draft head, each kind of group drops its last hit block; no other config tests it."""
    assert find_share(ALWAYS)["three kinds with a head"] > 100
    assert find_share(FeatureSelection())["states"] > 40


@pytest.mark.parametrize(
    "other_features", [(), ("tiers",), ("masks",), ("pins",), ("forks",), ("encoder",)]
)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_groups_of_one_kind_can_be_asked_for(
    part: GroupsOfKind, other_features: tuple[str, ...]
) -> None:
    try:
        wish = make_wish((part.name, *other_features), ())
    except UsageError:
        assert (part, other_features) == (STATES, ("forks",))
        return
    for index in range(60):
        swarm = draw_swarm(PRESETS["small"], SeededDraw(f"part/{index}"), wish=wish)
        assert part.is_asked_by(swarm.config)
        assert wish.always <= {*swarm.features, *wish.always - {*LATE}}
        assert config_problems(swarm.config) == ()
    with pytest.raises(UsageError, match="'groups': cannot be both with and without"):
        make_wish((part.name,), ("groups",))


def test_recurrent_groups_are_left_out_of_configs_that_exclude_them() -> None:
    full, states = KVGroup(FULL, 4), KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=ALIGN)
    config = Config(num_blocks=9, block_size=2, groups=(states, full))
    assert settle_states(config) is config
    alone = replace(config, groups=(full,), block_size=4)
    assert without_states(config) == alone
    assert CACHING.take_from(config) == replace(alone, enable_prefix_caching=False)
    assert config_problems(CACHING.take_from(config)) == ()
    drafts = replace(config, spec_method=SpecMethod.NGRAM, num_speculative_tokens=1)
    assert config_problems(drafts)
    assert settle_states(drafts).groups == (full,)
    one = Config(num_blocks=9, groups=(KVGroup(GroupKind.RECURRENT, 16, mamba_cache_mode=ALIGN),))
    assert CACHING.take_from(one) == Config(num_blocks=9, enable_prefix_caching=False)


def test_without_states_the_smallest_block_size_divides_the_others() -> None:
    """Block keys are of the smallest block size."""
    states = KVGroup(GroupKind.RECURRENT, 2, mamba_cache_mode=ALIGN)
    others = KVGroup(GroupKind.FULL, 4), KVGroup(GroupKind.SLIDING_WINDOW, 6, sliding_window=5)
    config = Config(99, 2, groups=(states, *others))
    left = without_states(config)
    assert [group.block_size for group in left.groups] == [4, 4]
    assert config_problems(left) == ()


def test_count_slots_is_the_length_of_the_longest_request_that_fits() -> None:
    config = Config(num_blocks=9, block_size=4)
    assert count_slots(config) == 32
    full, window = KVGroup(FULL, 4), KVGroup(WINDOW, 4, sliding_window=5)
    config = replace(config, groups=(full, window), max_num_batched_tokens=4)
    # A window of five and a step of four lie in three blocks at most, so full attention has five.
    assert count_slots(config) == 20
    assert count_held_blocks(config, 20) == 8
    assert count_held_blocks(config, 21) == 9


def test_boundaries_are_those_of_blocks_windows_and_chunks() -> None:
    groups = (
        *(KVGroup(FULL, 8), KVGroup(WINDOW, 4, sliding_window=5)),
        KVGroup(CHUNKS, 4, attention_chunk_size=16),
    )
    assert list_boundaries(Config(num_blocks=9, block_size=4, groups=groups)) == [4, 5, 8, 16]
    assert list_boundaries(Config(num_blocks=9, block_size=4)) == [4]


def test_the_pool_grows_up_to_every_token_in_every_group() -> None:
    config = Config(num_blocks=11, block_size=2, max_model_len=20, max_num_batched_tokens=8)
    for is_storm in (False, True):
        for seed in range(100):
            grouped = draw_groups(config, SeededDraw(f"pool/{seed}"), is_storm)
            added = grouped.num_usable_blocks - 10
            room = sum(-(-20 // group.block_size) for group in grouped.groups) - 10
            assert 0 <= added <= max(room // 2 if is_storm else room, 0)
