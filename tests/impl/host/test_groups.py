"""Several KV groups on the host: one by name, and which blocks it publishes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from groups_support import ALL, full, recurrent
from tests.impl.host.test_soak import draw_config, draw_event

from blockstep.impl.host import CRC32, HostEngine
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.table import Holding
from blockstep.spec.vocabulary import Config, Request


def test_one_group_by_name_is_the_one_that_there_is_without() -> None:
    for seed in range(15):
        draw = random.Random(seed)
        config = draw_config(draw)
        plain = HostEngine(config)
        named = HostEngine(replace(config, groups=(full(config.block_size),)))
        for _ in range(120):
            event = draw_event(draw, plain)
            assert named.apply(event) == plain.apply(event), seed
            assert named.snapshot() == plain.snapshot(), seed


@pytest.mark.parametrize(("num_cached", "found"), [(0, [5, 6, 7, 8]), (3, [8])])
def test_states_of_this_step_are_not_hit_in_it(num_cached: int, found: list[int]) -> None:
    """What was computed before is there, though its tokens were promised, and it is told late."""
    config = Config(16, 2, groups=(full(2), recurrent(2, ALL)))
    prefix = PrefixMap(16, verify=False)
    memory = GroupMemory(config, BlockPool(16, prefix), prefix)
    lineage = Lineage(Request("A", (1, 2, 3, 4, 5, 6, 7, 8)), 2, CRC32)
    table = [Holding([1, 2, 3, 4], num_cached=4), Holding([5, 6, 7, 8], num_cached=num_cached)]
    memory.publish(table, lineage, 6, 8)
    assert memory.new_states == {8}
    states = [prefix.find(lineage, index, 1) for index in range(4)]
    assert [block for block in states if block is not None] == found


def test_a_place_without_a_block_is_not_published() -> None:
    config = Config(16, 2, groups=(full(2), recurrent(2)))
    prefix = PrefixMap(16, verify=False)
    memory = GroupMemory(config, BlockPool(16, prefix), prefix)
    lineage = Lineage(Request("A", (1, 2, 3, 4)), 2, CRC32)
    memory.publish([Holding([1, 2], num_cached=2), Holding([0, 5])], lineage, 0, 4)
    assert [prefix.find(lineage, index, 1) for index in range(2)] == [None, 5]
