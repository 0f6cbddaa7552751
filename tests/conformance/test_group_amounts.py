"""What a KV group reads, leaves, lacks and holds at most: our engine's figures for it are those of
the specification, kind by kind, wherever blocks, windows, chunks and drafts end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from blockstep.impl.host.groups import make_groups
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.table import Holding
from blockstep.spec.memory import groups as rules
from blockstep.spec.memory import states
from blockstep.spec.memory.slots import compute_num_new_blocks
from blockstep.spec.vocabulary import (
    BlockId,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    SpecMethod,
)

SLOTS = range(14)
DRAFTS = Config(16, 1, spec_method=SpecMethod.DRAFT_MODEL, num_speculative_tokens=2)
CONFIGS = [
    Config(16, 1, max_num_batched_tokens=3),
    Config(16, 1, max_num_batched_tokens=4, long_prefill_token_threshold=2),
    Config(16, 1, max_num_batched_tokens=2, long_prefill_token_threshold=4),
    replace(DRAFTS, max_num_batched_tokens=4),
    replace(DRAFTS, max_num_batched_tokens=4, max_frames_in_flight=3),
    replace(DRAFTS, max_num_batched_tokens=4, max_frames_in_flight=3, async_scheduling=True),
    replace(DRAFTS, max_num_batched_tokens=2, max_frames_in_flight=2, async_scheduling=True),
]
"""Rows bounded by the budget or by the threshold; drafts in flight, or none, or cut by a row."""


def draw_groups(kind: GroupKind) -> Iterator[KVGroup]:
    """Groups of one kind, of all small sizes."""
    for size in (1, 2, 3, 4):
        match kind:
            case GroupKind.SLIDING_WINDOW:
                yield from (KVGroup(kind, size, sliding_window=number) for number in range(1, 7))
            case GroupKind.CHUNKED_LOCAL:
                of_chunks = (2, 3, 4, 5, 6)
                yield from (
                    KVGroup(kind, size, attention_chunk_size=tokens) for tokens in of_chunks
                )
            case GroupKind.RECURRENT:
                for mode, spare in product(MambaCacheMode, (0, 1, 2)):
                    # One state that is written over has a block as long as the model.
                    slots = max(SLOTS) if mode is MambaCacheMode.NONE else size
                    yield KVGroup(kind, slots, mamba_cache_mode=mode, num_speculative_blocks=spare)
            case _:
                yield KVGroup(kind, size)


KINDS = (
    GroupKind.FULL,
    GroupKind.SLIDING_WINDOW,
    GroupKind.CHUNKED_LOCAL,
    GroupKind.RECURRENT,
)


def make_pool() -> BlockPool:
    """A pool with room for any table here."""
    return BlockPool(32, PrefixMap(32, verify=False))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_holds_at_most_what_the_specification_charges(kind: GroupKind) -> None:
    for config, group in product(CONFIGS, draw_groups(kind)):
        (ours,) = make_groups(replace(config, groups=(group,)))
        reach, doubt = rules.compute_max_reach(config), rules.compute_max_doubt(config)
        held = [ours.count_held(slots) for slots in SLOTS]
        charged = [rules.compute_max_held_blocks(group, slots, reach, doubt) for slots in SLOTS]
        assert held[1:] == charged[1:], (config, group)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_leaves_what_the_specification_skips(kind: GroupKind) -> None:
    for group, computed, in_doubt in product(draw_groups(kind), SLOTS, (0, 1, 2)):
        (ours,) = make_groups(Config(32, 1, groups=(group,)))
        certain = states.compute_num_certain(group, computed, min(in_doubt, computed))
        skipped = rules.compute_num_skipped_blocks(group, certain)
        pool = make_pool()
        blocks = pool.take(max(-(-computed // group.block_size), skipped) + ours.num_spare)
        holding = Holding([*blocks])
        if computed >= ours.count_doubt(in_doubt):
            ours.leave(holding, computed, min(in_doubt, computed), pool)
            assert holding.blocks == [0] * skipped + blocks[skipped:], (group, computed, in_doubt)
            assert holding.num_left == skipped


WALKS = [[*range(row, 14, row)] for row in (1, 2, 3, 5)] + [[6, 4, 7, 5, 6, 11], [5, 1, 2, 9]]
"""Ends of the rows of one request; one goes back where drafts were rejected."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_grows_by_what_the_specification_says(kind: GroupKind) -> None:
    """Step by step, with and without slots for a proposer behind each."""
    for group, walk, ahead in product(draw_groups(kind), WALKS, (0, 1)):
        (ours,) = make_groups(Config(32, 1, groups=(group,)))
        pool, holding = make_pool(), Holding()
        table: tuple[BlockId, ...] = ()
        for end in walk:
            if kind is GroupKind.RECURRENT:
                length = states.compute_num_state_blocks(group, end, end + ahead)
                missing = states.compute_num_new_states(group, length, len(table), 0)
            else:
                length = -(-(end + ahead) // group.block_size)
                missing = compute_num_new_blocks(end + ahead, group.block_size, len(table))
            extent = Extent(end, end + ahead)
            assert ours.count_missing(holding, extent) == missing, (group, walk, end)
            taken = ours.extend(holding, extent, pool)
            new = tuple([block for block in taken if block and block not in table])
            assert len(new) == missing, (group, walk, end)
            table = states.get_extended_states(group, table, bool(table), length, new)
            assert tuple(holding.blocks) == table, (group, walk, end)
