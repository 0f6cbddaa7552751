"""Laws about forks: shared blocks, copy on write and the watermark.

PYTEST_DONT_REWRITE.

Blocks have four slots. The table of these laws is 1, 2, 3; others may hold block 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule
from blockstep.spec.core.block_pool import Pool, free_blocks, get_num_free_blocks
from blockstep.spec.core.requests import NO_HIT, Holding
from blockstep.spec.core.slots import allocate_slots
from blockstep.spec.features import get_config_rules
from blockstep.spec.features.forks import (
    compute_num_shared,
    count_common_tokens,
    get_own,
    get_shared,
)
from blockstep.spec.features.full_isl import can_finish
from blockstep.spec.vocabulary import BlockId, Config, KVGroup

ROOM = LawModule("forks")
TABLE: tuple[BlockId, ...] = (1, 2, 3)


def build_config(**changes: Any) -> Config:
    """Return a config with blocks of four slots and forks."""
    return h.build_config(4, enable_forks=True, **changes)


def get_group() -> KVGroup:
    """Return the one KV group of these laws."""
    (group,) = build_config().kv_groups
    return group


def build_shared_pool(num_holders: int, num_free: int) -> Pool:
    """Return a pool with the table held once, block 2 `num_holders` times, and `num_free` free
    blocks.
    """
    counts = (0, 1, num_holders, 1, *[0] * num_free)
    return h.build_pool(counts, tuple(range(4, 4 + num_free)), published=())


# Laws.


@ROOM.law("P2 P5", (1, 2, 1, 3))
def check_common_prefix_is_equal_and_as_long_as_possible(
    one: int, two: int, other_one: int, other_two: int
) -> None:
    """The tokens after that differ, or one of the sequences ends."""
    assert 0 <= one and 0 <= two and 0 <= other_one and 0 <= other_two
    mine, theirs = (one, two, 7), (other_one, other_two)
    number = count_common_tokens(mine, theirs)
    assert mine[:number] == theirs[:number]
    assert number == len(theirs) or mine[number] != theirs[number]


@ROOM.law("P2 P5", (7, 1))
def check_branch_shares_all_it_can_without_writing_to_cached_blocks(
    num_tokens: int, num_settled: int
) -> None:
    """All tokens are shared, or those before the cached block in which they would end."""
    assert 0 <= num_tokens <= 12 and 0 <= num_settled <= 3
    number = compute_num_shared((get_group(),), (Holding(TABLE, num_settled),), num_tokens)
    is_within = num_tokens % 4 > 0 and num_tokens // 4 < num_settled
    assert number == (num_tokens // 4 * 4 if is_within else num_tokens)


@ROOM.law("P2 P3", (6, 1))
def check_branch_holds_exactly_the_blocks_of_its_computed_tokens(
    num_shared: int, num_settled: int
) -> None:
    """The branch shares the blocks that its tokens fill, the last one in part; only full ones are
    cached.
    """
    assert 0 <= num_shared <= 12 and 0 <= num_settled <= 3
    holding = get_shared(get_group(), Holding(TABLE, num_settled), num_shared)
    num_slots = 4 * len(holding.block_table)
    assert num_shared <= num_slots < num_shared + 4
    assert holding.block_table == TABLE[: len(holding.block_table)]
    assert holding.num_cached_blocks <= num_settled
    assert 4 * holding.num_cached_blocks <= num_shared
    assert num_settled * 4 > num_shared or holding.num_cached_blocks == num_settled


@ROOM.law("P1 P2", (6, 2))
def check_writer_of_a_shared_block_gets_a_copy(num_computed: int, num_holders: int) -> None:
    """Other holders keep theirs; a sole holder, or one that continues in a new block, copies
    nothing.
    """
    assert 0 <= num_computed <= 12 and 1 <= num_holders <= 4
    before = build_shared_pool(num_holders, 2)
    pool, holding = get_own(before, get_group(), Holding(TABLE, 1), num_computed)
    is_copied = 4 < num_computed < 8 and num_holders > 1
    assert h.is_conserved(pool)
    assert holding.block_table == ((1, 4, 3) if is_copied else TABLE)
    assert pool.ref_counts[2] == num_holders - is_copied
    assert pool.ref_counts[4] == is_copied
    assert pool.free_queue == ((5,) if is_copied else (4, 5))


@ROOM.law("P2 P7 P8", (6, 5, 2, 2))
def check_capacity_check_counts_the_copied_block(
    num_computed: int, num_new: int, num_holders: int, num_free: int
) -> None:
    """Slots are granted exactly if the new blocks and the copy are free; then these are taken."""
    assert 5 <= num_computed <= 8 and 1 <= num_new <= 8 and 1 <= num_holders <= 3
    assert 0 <= num_free <= 3
    runner = h.build_runner("a", 40, num_computed, (1, 2))
    config = build_config(num_blocks=4 + num_free)
    pool, rules = build_shared_pool(num_holders, num_free), get_config_rules(config)
    granted = allocate_slots(config, pool, runner, num_new, rules=rules)
    is_copied = num_computed < 8 and num_holders > 1
    num_needed = max(-(-(num_computed + num_new) // 4) - 2, 0) + is_copied
    assert (granted is None) == (num_needed > num_free)
    if granted is not None:
        assert get_num_free_blocks(granted[0]) == num_free - num_needed
        assert granted[0].ref_counts[h.table_of(granted[1])[1]] == 1 or num_computed == 8


@ROOM.law("P8 P10", (6, 9, 2, 1))
def check_admission_check_counts_the_copied_block(
    num_computed: int, num_known: int, num_holders: int, num_free: int
) -> None:
    """A waiting branch with two blocks needs the missing ones and a copy of the shared one."""
    assert 5 <= num_computed <= 8 and num_computed < num_known <= 16
    assert 1 <= num_holders <= 3 and 0 <= num_free <= 3
    branch = h.build_runner("a", num_known, num_computed, (1, 2))
    pool = build_shared_pool(num_holders, num_free)
    num_needed = -(-num_known // 4) - 2 + (num_computed < 8 and num_holders > 1)
    config = build_config(num_blocks=4 + num_free)
    admits = can_finish(config, pool, branch, NO_HIT, get_config_rules(config))
    assert admits == (num_needed <= num_free)


@ROOM.law("P8 P10", (9, 1, 1))
def check_admission_leaves_blocks_for_running_requests(
    num_prompt: int, num_left: int, has_runner: int
) -> None:
    """Four of five blocks are free, or all five; alone the request may have all."""
    assert 1 <= num_prompt <= 24 and 0 <= num_left <= 6 and 0 <= has_runner <= 1
    config = replace(build_config(watermark_blocks=num_left), enable_forks=False)
    runners = (h.build_runner("r", 3, 2, (1,)),) if has_runner else ()
    state = h.build_state(config, runners, (h.build_request("a", num_prompt),))
    after, _ = h.schedule(state)
    num_needed = -(-num_prompt // 4)
    num_free, num_spared = (4, num_left) if has_runner else (5, 0)
    assert ("a" in after.running) == (num_needed + num_spared <= num_free)


@ROOM.law("P1 P16", (2, 1))
def check_lifo_pool_reuses_the_block_freed_last(num_holders: int, num_outer: int) -> None:
    """The tail of the last freed table comes first, without the blocks that others hold."""
    assert 1 <= num_holders <= 3 and 1 <= num_outer <= 2
    counts = (0, num_outer, num_holders, 1, 0, 0)
    pool = replace(h.build_pool(counts, (5, 4), published=()), is_lifo=True)
    after = free_blocks(pool, TABLE)
    gone = [b for b, n in ((3, 1), (2, num_holders), (1, num_outer)) if n == 1]
    assert after.free_queue == (*gone, 5, 4)
    assert h.is_conserved(after)
