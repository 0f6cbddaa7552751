"""Hits with several KV groups: a release and its profile agree on random caches."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
from vllm_support.installed import RELEASE, VERSION, needs, quiet

from blockstep.conformance.engines.adapters.vllm_groups import fit_groups
from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import create_pool, publish_blocks
from blockstep.spec.core.prefix_cache import extend_block_keys, get_group_keys, get_prefix_hit
from blockstep.spec.core.requests import RequestState
from blockstep.spec.features.groups.kinds import compute_num_skipped_blocks
from blockstep.spec.profiles import get_profile
from blockstep.spec.releases import get_rules

HELD = ("0.11.0", "0.19.1", "0.33.0")
"""Releases whose hits are followed exactly, in the mixes that they take."""
pytestmark = [quiet, needs(VERSION in HELD, "another release")]


def draw_config(draw: random.Random) -> v.Config:
    """A config that the release takes, with one to four groups."""
    size, kinds = draw.choice([2, 2, 4]), draw.choices("FFWWWCR", k=draw.randint(1, 4))
    num_drafts = draw.choice([0, 1])
    groups = []
    for kind in kinds:
        size_of_one = size * draw.choice([1, 1, 2])
        if kind == "F":
            groups.append(v.KVGroup(v.GroupKind.FULL, size_of_one))
        elif kind == "W":
            reach = draw.randint(1, 9)
            groups.append(v.KVGroup(v.GroupKind.SLIDING_WINDOW, size_of_one, sliding_window=reach))
        elif kind == "C":
            reach = draw.randint(1, 9)
            groups.append(
                v.KVGroup(v.GroupKind.CHUNKED_LOCAL, size_of_one, attention_chunk_size=reach)
            )
        else:
            groups.append(
                v.KVGroup(
                    v.GroupKind.RECURRENT,
                    size_of_one,
                    mamba_cache_mode=v.MambaCacheMode.ALIGN,
                    num_speculative_blocks=num_drafts,
                )
            )
    config = v.Config(
        num_blocks=200,
        block_size=min(group.block_size for group in groups),
        max_model_len=64,
        groups=tuple(groups),
        spec_method=v.SpecMethod.EAGLE if num_drafts else v.SpecMethod.NONE,
        num_speculative_tokens=num_drafts,
    )
    return fit_groups(RELEASE, config)[0]


def draw_cached(draw: random.Random, group: v.KVGroup, num_known: int) -> list[int]:
    """Indices of blocks of a group: a run with holes, and with its beginning or end lost."""
    num_full, share = num_known // group.block_size, draw.choice([0.5, 0.8, 0.95, 1])
    is_whole = draw.random() < 0.5
    end = num_full if is_whole else draw.randint(0, num_full)
    is_full = group.kind is v.GroupKind.FULL
    first = 0 if is_full or draw.random() < 0.5 else draw.randint(0, num_full)
    return [index for index in range(first, end) if draw.random() < share]


def publish(pool: Any, utils: Any, digests: list[bytes], group: int, block: int, end: int) -> None:
    """Publish a block of the release's pool under all digests up to that of its last token."""
    held = pool.blocks[block]
    if hasattr(held, "set_block_hash"):  # a larger block is named by its last digest
        carried = utils.make_block_hash_with_group_id(digests[-1], group)
        held.set_block_hash(carried, num_tokens=end)
    else:
        carried = utils.make_block_hash_with_group_id(b"".join(digests), group)
        held.block_hash = carried
    if hasattr(pool.cached_block_hash_to_block, "insert"):
        pool.cached_block_hash_to_block.insert(carried, held)
    else:
        pool.cached_block_hash_to_block[carried][block] = held


@pytest.mark.parametrize("seed", range(4))
def test_a_hit_in_a_random_cache_is_that_of_the_profile(seed: int) -> None:
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    engine_type = importlib.import_module("blockstep.conformance.engines.adapters.vllm").VllmEngine
    profile = get_profile(f"vllm-{VERSION}")
    assert profile is not None
    draw, num_hits = random.Random(seed), 0
    for _ in range(40):
        config = draw_config(draw)
        assert v.config_problems(config) == ()
        asked = v.Request("A", tuple(range(draw.randint(1, 30))), max_tokens=1)
        num_known, size = len(asked.prompt_token_ids), config.block_size
        engine = engine_type(config)
        engine.apply(v.Submit(asked))
        digests = engine.scheduler.requests["A"].block_hashes
        coordinator = engine.scheduler.kv_cache_manager.coordinator
        rules = get_rules(profile.quirks, config)
        request = RequestState(asked, v.Status.WAITING)
        keys = extend_block_keys(request, size, rules)
        pool, block = create_pool(config.num_blocks), 0
        for number, group in enumerate(config.kv_groups):
            num_links = group.block_size // size
            for index in draw_cached(draw, group, num_known):
                block += 1
                key = get_group_keys(keys, number, num_links, index, index + 1)
                pool = publish_blocks(pool, (block,), key)
                links = list(digests[index * num_links : (index + 1) * num_links])
                end = (index + 1) * group.block_size
                publish(coordinator.block_pool, utils, links, number, block, end)
        found = coordinator.find_longest_cache_hit(digests, num_known - 1)
        request = RequestState(asked, v.Status.WAITING, block_keys=keys)
        hit = get_prefix_hit(config, pool, request, rules)
        tables = hit.block_tables or ((),) * len(config.kv_groups)
        assert (hit.num_tokens, tables) == (found[1], get_tables(config, found[0], found[1]))
        num_hits += hit.num_tokens > 0
    assert num_hits > 3


def get_tables(config: v.Config, found: Any, num_tokens: int) -> v.BlockTables:
    """Return the block tables that the release shares for a hit, without skipped blocks."""
    tables = []
    for group, blocks in zip(config.kv_groups, found, strict=True):
        first = compute_num_skipped_blocks(group, num_tokens)
        if VERSION == "0.11.0":  # it holds them until the next step
            first = 0
        ids = [0 if block.is_null else block.block_id for block in blocks]
        tables.append((0,) * min(first, len(ids)) + tuple(ids[first:]))
    return tuple(tables)
