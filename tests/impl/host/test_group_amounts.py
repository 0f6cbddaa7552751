"""What a KV group reads, leaves, lacks and holds at most, and what the whole of a waiting request
takes of the free blocks: our engine's figures for it are those of the specification, kind by kind,
wherever blocks, windows, chunks and drafts end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from blockstep.impl.host.groups import GroupHits, GroupMemory, make_groups
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.table import Holding
from blockstep.spec.core.block_pool import allocate_blocks, create_pool, free_blocks, touch_blocks
from blockstep.spec.core.requests import Holding as Held
from blockstep.spec.core.requests import RequestState, without_nulls
from blockstep.spec.core.slots import compute_num_new_blocks
from blockstep.spec.features import mamba as states
from blockstep.spec.features.groups import kinds as rules
from blockstep.spec.features.groups.kinds import count_reserved_blocks
from blockstep.spec.features.mamba import get_aligned_share
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Request,
    SpecMethod,
    Status,
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


KINDS = (GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL, GroupKind.RECURRENT)


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
            ours.leave(holding, computed, min(in_doubt, computed), pool.free)
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


# Of a waiting request.


ACROSS = KVGroup(GroupKind.CROSS_ATTENTION, 1)
"""Stands before the others here; of a request without items it holds nothing."""


def make_memory(config: Config, group: KVGroup) -> GroupMemory:
    prefix = PrefixMap(32, verify=False)
    return GroupMemory(replace(config, groups=(ACROSS, group)), BlockPool(32, prefix), prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_takes_behind_a_hit(kind: GroupKind) -> None:
    for config, group in product(CONFIGS[1::2], draw_groups(kind)):
        memory = make_memory(config, group)
        for num_hits, num_free, more in product((0, 1, 2, 4), (0, 1, 2), (1, 2, 9)):
            length, num_known = num_hits * group.block_size, num_hits * group.block_size + more
            first = rules.compute_num_skipped_blocks(group, length)
            pool, blocks = allocate_blocks(create_pool(32), num_hits - first)
            table = (NULL_BLOCK,) * first + blocks
            memory.pool = BlockPool(32, memory.prefix)
            assert memory.pool.take(num_hits - first) == [*blocks]
            memory.pool.free(blocks[:num_free])
            pool = free_blocks(pool, blocks[:num_free])
            ours = memory.count_for_gate(GroupHits(length, ((), table)), num_known)
            charged = count_reserved_blocks(config, pool, group, num_known, table, Held())
            assert ours == charged, (config, group, num_hits, num_free, more)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_session_takes_beside_what_it_has_kept(kind: GroupKind) -> None:
    """It begins by giving up what it reads no more; of that, what others hold makes no room."""
    for config, group in product(CONFIGS[1::2], draw_groups(kind)):
        if group.num_speculative_blocks:
            continue  # then a session keeps nothing
        memory = make_memory(config, group)
        for computed, ahead, num_shared, more in product((1, 2, 5), (0, 3), (0, 1, 2), (1, 2, 9)):
            memory.pool = BlockPool(32, memory.prefix)
            holding = Holding()
            memory.groups[1].extend(holding, Extent(computed, computed + ahead), memory.pool)
            shared = [b for b in holding.blocks if b != NULL_BLOCK][:num_shared]
            memory.pool.touch(shared)
            kept = without_nulls(tuple(holding.blocks))
            pool, blocks = allocate_blocks(create_pool(32), len(kept))
            assert blocks == kept
            pool = touch_blocks(pool, shared)
            first = rules.compute_num_skipped_blocks(group, computed)
            table, num_free = tuple(holding.blocks), len(pool.free_queue)
            pool = free_blocks(pool, without_nulls(table[:first]))
            held = Held((NULL_BLOCK,) * first + table[first:])
            where = (config, group, computed, ahead, num_shared, more)
            holdings = (Holding(), holding)
            leaving = memory.count_leaving(holdings, computed)
            assert leaving == len(pool.free_queue) - num_free, where
            ours = memory.count_to_end(holdings, computed, computed + more)
            charged = count_reserved_blocks(config, pool, group, computed + more, (), held)
            assert ours == charged, where


# Of a row.


@pytest.mark.parametrize("has_head", [False, True])
def test_a_chunk_ends_where_the_specification_has_states_kept(has_head: bool) -> None:
    config = Config(16, 1)
    if has_head:
        config = replace(config, spec_method=SpecMethod.EAGLE, num_speculative_tokens=1)
    sizes = [((1,), (2,)), ((2,), (4,)), ((1, 2), (2, 4)), ((4,), (2,)), ((3,), (3,))]
    for attended, aligned in sizes:
        groups = [KVGroup(GroupKind.FULL, size) for size in attended]
        groups += [
            KVGroup(GroupKind.RECURRENT, size, mamba_cache_mode=MambaCacheMode.ALIGN)
            for size in aligned
        ]
        config = replace(config, groups=tuple(groups))
        memory = GroupMemory(config, make_pool(), PrefixMap(32, verify=False))
        for num_prompt, num_outputs, computed in product((1, 3, 8, 9), (0, 1, 2, 5), range(13)):
            num_known = num_prompt + num_outputs
            request = RequestState(
                Request("A", (1,) * num_prompt), Status.RUNNING, (2,) * num_outputs
            )
            for num_new in range(1, 14 - computed):
                ours = memory.align(computed, num_new, num_prompt, num_known)
                share = get_aligned_share(config, request, computed, num_new)
                assert ours == share, (has_head, attended, aligned, num_known, computed, num_new)
