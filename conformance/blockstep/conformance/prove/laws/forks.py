"""Forks: what is shared, who copies, and what an admission leaves. PYTEST_DONT_REWRITE.

Blocks have four slots. The table of these laws is 1, 2, 3; others hold block 2, or do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import Right, Room, instead, instead_in
from blockstep.spec.memory import slots
from blockstep.spec.memory.forks import (
    compute_num_copies,
    compute_num_shared,
    count_common_tokens,
    get_own,
    get_shared,
    is_shareable,
)
from blockstep.spec.memory.slots import allocate_slots, can_finish, count_reserved_blocks
from blockstep.spec.pool import Pool, free_blocks, get_num_free_blocks
from blockstep.spec.requests import Holding, RequestState
from blockstep.spec.step.admission import get_slots_at_admission
from blockstep.spec.step.work import Step
from blockstep.spec.strict import STRICT_RULES
from blockstep.spec.vocabulary import BlockId, Config, KVGroup, TokenIds

ROOM = Room("forks")
TABLE: tuple[BlockId, ...] = (1, 2, 3)
Granted = tuple[Pool, RequestState] | None


def build_config(**changes: Any) -> Config:
    """Blocks of four slots, and forks."""
    return h.build_config(4, enable_forks=True, **changes)


def get_group() -> KVGroup:
    """The one group of these laws."""
    (group,) = build_config().kv_groups
    return group


def build_shared_pool(num_holders: int, num_free: int) -> Pool:
    """A table is held once, but for its second block; so many blocks behind it are free."""
    counts = (0, 1, num_holders, 1, *[0] * num_free)
    return h.build_pool(counts, tuple(range(4, 4 + num_free)), published=())


# Mistakes: what is shared.


@instead(count_common_tokens)
def shorter_text_is_in_the_longer(mine: TokenIds, theirs: TokenIds) -> int:
    """The tokens themselves are not looked at."""
    return min(len(mine), len(theirs))


@instead(is_shareable)
def only_whole_blocks_are_shared(group: KVGroup, num_shared: int) -> bool:
    """What is in the last block is computed again."""
    return num_shared % group.block_size == 0


@instead(is_shareable)
def findable_blocks_are_shared_in_part(num_shared: int) -> bool:
    """A branch may write in what others will find."""
    return num_shared >= 0


@instead(is_shareable)
def last_findable_block_is_written_in(
    right: Right[bool], holding: Holding, num_shared: int
) -> bool:
    """One block too few counts as findable."""
    settled = max(holding.num_cached_blocks - 1, 0)
    return right(holding=replace(holding, num_cached_blocks=settled)) and num_shared >= 0


@instead(get_shared)
def block_that_is_not_full_stays_behind(
    group: KVGroup, holding: Holding, num_shared: int
) -> Holding:
    """What is computed in it counts all the same."""
    num_full = num_shared // group.block_size
    return Holding(holding.block_table[:num_full], min(holding.num_cached_blocks, num_full))


@instead(get_shared)
def whole_table_is_shared(holding: Holding) -> Holding:
    """As in the seed: what the branch has not computed, too."""
    return holding


@instead(get_shared)
def branch_has_settled_what_its_parent_has(right: Right[Holding], holding: Holding) -> Holding:
    """Its next blocks are never named."""
    return replace(right(), num_cached_blocks=holding.num_cached_blocks)


# Mistakes: who copies.


@instead(compute_num_copies)
def copy_is_seen_behind_its_own_hold(right: Right[int], pool: Pool) -> int:
    """Its hold is given up first, so the first of two holders writes for both."""
    return right(pool=replace(pool, ref_counts=tuple([max(n - 1, 0) for n in pool.ref_counts])))


@instead(compute_num_copies)
def last_holder_copies_too(right: Right[int], pool: Pool) -> int:
    """A block for nothing."""
    return right(pool=replace(pool, ref_counts=tuple([n + 1 for n in pool.ref_counts])))


@instead(compute_num_copies)
def full_block_is_copied(right: Right[int], num_computed: int, group: KVGroup) -> int:
    """Nobody writes in it."""
    is_behind = num_computed % group.block_size == 0 and num_computed > 0
    return right(num_computed=num_computed - 1 if is_behind else num_computed)


@instead(get_own)
def hold_is_kept(right: Right[tuple[Pool, Holding]], pool: Pool) -> tuple[Pool, Holding]:
    """Nobody gives up what was exchanged."""
    after, holding = right()
    if after is pool:
        return after, holding
    counts = list(after.ref_counts)
    counts[2] += 1
    return replace(after, ref_counts=tuple(counts)), holding


@instead(get_own)
def copy_stands_at_the_end(
    right: Right[tuple[Pool, Holding]], holding: Holding
) -> tuple[Pool, Holding]:
    """And the shared block stays where it was."""
    pool, after = right()
    if after.block_table == holding.block_table:
        return pool, after
    return pool, replace(holding, block_table=(*holding.block_table[:-1], after.block_table[1]))


@instead_in(slots, "compute_num_copies")
def estimate_forgets_the_copy() -> int:
    """As in the seed, which asks for a block behind a full one alone: it is taken all the same."""
    return 0


@instead(count_reserved_blocks)
def gate_forgets_the_copy(right: Right[int]) -> int:
    """Who was let in cannot finish."""
    return right(num_copies=0)


# Mistakes: what is left, and in which order it is taken.


def _with_watermark(step: Step, num_blocks: int) -> Step:
    config = replace(step.state.config, watermark_blocks=num_blocks)
    return replace(step, state=replace(step.state, config=config))


@instead(get_slots_at_admission)
def watermark_is_forgotten(right: Right[Granted], step: Step) -> Granted:
    """Who is admitted takes the last block, and whoever runs preempts it."""
    return right(step=_with_watermark(step, 0))


@instead(get_slots_at_admission)
def watermark_is_one_block_short(right: Right[Granted], step: Step) -> Granted:
    """It is what may be left over, not what has to be."""
    return right(step=_with_watermark(step, max(step.state.config.watermark_blocks - 1, 0)))


@instead(get_slots_at_admission)
def empty_engine_has_a_watermark(right: Right[Granted], step: Step) -> Granted:
    """As in the seed: a request that is as large as the pool waits for ever."""
    granted = right()
    if granted and get_num_free_blocks(granted[0]) < step.state.config.watermark_blocks:
        return None
    return granted


@instead(free_blocks)
def stack_is_a_queue(right: Right[Pool], pool: Pool) -> Pool:
    """What was freed last is taken last, whatever was asked for."""
    return replace(right(pool=replace(pool, is_lifo=False)), is_lifo=pool.is_lifo)


@instead(free_blocks)
def blocks_are_stacked_one_by_one(right: Right[Pool], block_table: Sequence[BlockId]) -> Pool:
    """The head of a prompt is overwritten before its tail."""
    return right(block_table=tuple(reversed(block_table)))


# Laws.


@ROOM.law("P2 P5", (1, 2, 1, 3), shorter_text_is_in_the_longer)
def check_what_two_texts_have_in_common_is_the_same(
    one: int, two: int, other_one: int, other_two: int
) -> None:
    """And behind it they part, or one of them ends."""
    assert 0 <= one and 0 <= two and 0 <= other_one and 0 <= other_two
    mine, theirs = (one, two, 7), (other_one, other_two)
    number = count_common_tokens(mine, theirs)
    assert mine[:number] == theirs[:number]
    assert number == len(theirs) or mine[number] != theirs[number]


@ROOM.law(
    "P2 P5",
    (7, 1),
    *(only_whole_blocks_are_shared, findable_blocks_are_shared_in_part),
    last_findable_block_is_written_in,
)
def check_the_most_is_shared_that_leaves_findable_blocks_alone(
    num_tokens: int, num_settled: int
) -> None:
    """All of it, or what is before the findable block in which it would end."""
    assert 0 <= num_tokens <= 12 and 0 <= num_settled <= 3
    number = compute_num_shared((get_group(),), (Holding(TABLE, num_settled),), num_tokens)
    is_within = num_tokens % 4 > 0 and num_tokens // 4 < num_settled
    assert number == (num_tokens // 4 * 4 if is_within else num_tokens)


@ROOM.law(
    "P2 P3",
    (6, 1),
    *(block_that_is_not_full_stays_behind, whole_table_is_shared),
    branch_has_settled_what_its_parent_has,
)
def check_a_branch_holds_what_it_has_computed_and_no_more(
    num_shared: int, num_settled: int
) -> None:
    """As many blocks as its tokens fill, the last one in part; full ones alone are settled."""
    assert 0 <= num_shared <= 12 and 0 <= num_settled <= 3
    holding = get_shared(get_group(), Holding(TABLE, num_settled), num_shared)
    num_slots = 4 * len(holding.block_table)
    assert num_shared <= num_slots < num_shared + 4
    assert holding.block_table == TABLE[: len(holding.block_table)]
    assert holding.num_cached_blocks <= num_settled
    assert 4 * holding.num_cached_blocks <= num_shared
    assert num_settled * 4 > num_shared or holding.num_cached_blocks == num_settled


@ROOM.law(
    "P1 P2",
    (6, 2),
    *(copy_is_seen_behind_its_own_hold, last_holder_copies_too, full_block_is_copied),
    *(hold_is_kept, copy_stands_at_the_end),
)
def check_who_writes_in_a_shared_block_has_its_own(num_computed: int, num_holders: int) -> None:
    """Others hold what they held; where it is alone, or goes on in a new block, nothing happens."""
    assert 0 <= num_computed <= 12 and 1 <= num_holders <= 4
    before = build_shared_pool(num_holders, 2)
    pool, holding = get_own(before, get_group(), Holding(TABLE, 1), num_computed)
    is_copied = 4 < num_computed < 8 and num_holders > 1
    assert h.is_conserved(pool)
    assert holding.block_table == ((1, 4, 3) if is_copied else TABLE)
    assert pool.ref_counts[2] == num_holders - is_copied
    assert pool.ref_counts[4] == is_copied
    assert pool.free_queue == ((5,) if is_copied else (4, 5))


@ROOM.law(
    "P2 P7 P8",
    (6, 5, 2, 2),
    *(estimate_forgets_the_copy, copy_is_seen_behind_its_own_hold, last_holder_copies_too),
)
def check_the_estimate_counts_the_copy_and_it_is_taken(
    num_computed: int, num_new: int, num_holders: int, num_free: int
) -> None:
    """Slots are given exactly where what is new and the copy are free, and then those are gone."""
    assert 5 <= num_computed <= 8 and 1 <= num_new <= 8 and 1 <= num_holders <= 3
    assert 0 <= num_free <= 3
    runner = h.build_runner("a", 40, num_computed, (1, 2))
    config = build_config(num_blocks=4 + num_free)
    granted = allocate_slots(config, build_shared_pool(num_holders, num_free), runner, num_new)
    is_copied = num_computed < 8 and num_holders > 1
    num_needed = max(-(-(num_computed + num_new) // 4) - 2, 0) + is_copied
    assert (granted is None) == (num_needed > num_free)
    if granted is not None:
        assert get_num_free_blocks(granted[0]) == num_free - num_needed
        assert granted[0].ref_counts[h.table_of(granted[1])[1]] == 1 or num_computed == 8


@ROOM.law("P8 P10", (6, 9, 2, 1), gate_forgets_the_copy)
def check_the_gate_asks_for_the_copy_too(
    num_computed: int, num_known: int, num_holders: int, num_free: int
) -> None:
    """A branch that waits with two blocks wants what it lacks, and a copy of what it shares."""
    assert 5 <= num_computed <= 8 and num_computed < num_known <= 16
    assert 1 <= num_holders <= 3 and 0 <= num_free <= 3
    branch = h.build_runner("a", num_known, num_computed, (1, 2))
    pool = build_shared_pool(num_holders, num_free)
    num_needed = -(-num_known // 4) - 2 + (num_computed < 8 and num_holders > 1)
    config = build_config(num_blocks=4 + num_free)
    admits = can_finish(config, pool, branch, slots.NO_HIT, STRICT_RULES)
    assert admits == (num_needed <= num_free)


@ROOM.law(
    "P8 P10",
    (9, 1, 1),
    *(watermark_is_forgotten, watermark_is_one_block_short, empty_engine_has_a_watermark),
)
def check_an_admission_leaves_blocks_for_those_that_run(
    num_prompt: int, num_left: int, has_runner: int
) -> None:
    """Four of five blocks are free, or all: alone it may have them all."""
    assert 1 <= num_prompt <= 24 and 0 <= num_left <= 6 and 0 <= has_runner <= 1
    config = replace(build_config(watermark_blocks=num_left), enable_forks=False)
    runners = (h.build_runner("r", 3, 2, (1,)),) if has_runner else ()
    state = h.build_state(config, runners, (h.build_request("a", num_prompt),))
    after, _ = h.schedule(state)
    num_needed = -(-num_prompt // 4)
    num_free, num_spared = (4, num_left) if has_runner else (5, 0)
    assert ("a" in after.running) == (num_needed + num_spared <= num_free)


@ROOM.law("P1 P16", (2, 1), stack_is_a_queue, blocks_are_stacked_one_by_one)
def check_a_stack_gives_back_what_was_freed_last(num_holders: int, num_outer: int) -> None:
    """The tail of the last table first; what others hold is not in it."""
    assert 1 <= num_holders <= 3 and 1 <= num_outer <= 2
    counts = (0, num_outer, num_holders, 1, 0, 0)
    pool = replace(h.build_pool(counts, (5, 4), published=()), is_lifo=True)
    after = free_blocks(pool, TABLE)
    gone = [b for b, n in ((3, 1), (2, num_holders), (1, num_outer)) if n == 1]
    assert after.free_queue == (*gone, 5, 4)
    assert h.is_conserved(after)
