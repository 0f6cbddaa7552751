"""Laws about forks: shared blocks, copy on write and the watermark.

PYTEST_DONT_REWRITE.

Blocks have four slots. The table of these laws is 1, 2, 3; others may hold block 2.
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


# Mutants: sharing.


@instead(count_common_tokens)
def shorter_text_is_in_the_longer(mine: TokenIds, theirs: TokenIds) -> int:
    """The lengths are compared instead of the tokens."""
    return min(len(mine), len(theirs))


@instead(is_shareable)
def only_whole_blocks_are_shared(group: KVGroup, num_shared: int) -> bool:
    """The tokens of a partly filled last block are computed again."""
    return num_shared % group.block_size == 0


@instead(is_shareable)
def findable_blocks_are_shared_in_part(num_shared: int) -> bool:
    """A branch may write to a block that is cached."""
    return num_shared >= 0


@instead(is_shareable)
def last_findable_block_is_written_in(
    right: Right[bool], holding: Holding, num_shared: int
) -> bool:
    """The last cached block counts as not cached."""
    settled = max(holding.num_cached_blocks - 1, 0)
    return right(holding=replace(holding, num_cached_blocks=settled)) and num_shared >= 0


@instead(get_shared)
def block_that_is_not_full_stays_behind(
    group: KVGroup, holding: Holding, num_shared: int
) -> Holding:
    """The partly filled block is not shared, but its tokens count as computed."""
    num_full = num_shared // group.block_size
    return Holding(holding.block_table[:num_full], min(holding.num_cached_blocks, num_full))


@instead(get_shared)
def whole_table_is_shared(holding: Holding) -> Holding:
    """Blocks that the branch has not computed are shared, too, as in the seed."""
    return holding


@instead(get_shared)
def branch_has_settled_what_its_parent_has(right: Right[Holding], holding: Holding) -> Holding:
    """The branch counts its next blocks as published, so they never are."""
    return replace(right(), num_cached_blocks=holding.num_cached_blocks)


# Mutants: copy on write.


@instead(compute_num_copies)
def copy_is_seen_behind_its_own_hold(right: Right[int], pool: Pool) -> int:
    """The request drops its reference first, so the first of two holders does not copy."""
    return right(pool=replace(pool, ref_counts=tuple([max(n - 1, 0) for n in pool.ref_counts])))


@instead(compute_num_copies)
def last_holder_copies_too(right: Right[int], pool: Pool) -> int:
    """The last holder copies a block although it has it alone."""
    return right(pool=replace(pool, ref_counts=tuple([n + 1 for n in pool.ref_counts])))


@instead(compute_num_copies)
def full_block_is_copied(right: Right[int], num_computed: int, group: KVGroup) -> int:
    """A full block is copied, to which no request writes."""
    is_behind = num_computed % group.block_size == 0 and num_computed > 0
    return right(num_computed=num_computed - 1 if is_behind else num_computed)


@instead(get_own)
def hold_is_kept(right: Right[tuple[Pool, Holding]], pool: Pool) -> tuple[Pool, Holding]:
    """The reference to the copied block is not given up."""
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
    """The copy is put at the end of the table, and the shared block stays in its place."""
    pool, after = right()
    if after.block_table == holding.block_table:
        return pool, after
    return pool, replace(holding, block_table=(*holding.block_table[:-1], after.block_table[1]))


@instead_in(slots, "compute_num_copies")
def estimate_forgets_the_copy() -> int:
    """The capacity check ignores the copy, as in the seed; the block is taken all the same."""
    return 0


@instead(count_reserved_blocks)
def gate_forgets_the_copy(right: Right[int]) -> int:
    """The admitted request cannot finish."""
    return right(num_copies=0)


# Mutants: the watermark and the order of the free queue.


def _with_watermark(step: Step, num_blocks: int) -> Step:
    config = replace(step.state.config, watermark_blocks=num_blocks)
    return replace(step, state=replace(step.state, config=config))


@instead(get_slots_at_admission)
def watermark_is_forgotten(right: Right[Granted], step: Step) -> Granted:
    """An admission takes the last block, and the next running request preempts it."""
    return right(step=_with_watermark(step, 0))


@instead(get_slots_at_admission)
def watermark_is_one_block_short(right: Right[Granted], step: Step) -> Granted:
    """One block less than the watermark may be left."""
    return right(step=_with_watermark(step, max(step.state.config.watermark_blocks - 1, 0)))


@instead(get_slots_at_admission)
def empty_engine_has_a_watermark(right: Right[Granted], step: Step) -> Granted:
    """A request as large as the pool waits for ever although nothing runs, as in the seed."""
    granted = right()
    if granted and get_num_free_blocks(granted[0]) < step.state.config.watermark_blocks:
        return None
    return granted


@instead(free_blocks)
def stack_is_a_queue(right: Right[Pool], pool: Pool) -> Pool:
    """A LIFO list is used first in, first out."""
    return replace(right(pool=replace(pool, is_lifo=False)), is_lifo=pool.is_lifo)


@instead(free_blocks)
def blocks_are_stacked_one_by_one(right: Right[Pool], block_table: Sequence[BlockId]) -> Pool:
    """The head of a prompt is reused before its tail."""
    return right(block_table=tuple(reversed(block_table)))


# Laws.


@ROOM.law("P2 P5", (1, 2, 1, 3), shorter_text_is_in_the_longer)
def check_what_two_texts_have_in_common_is_the_same(
    one: int, two: int, other_one: int, other_two: int
) -> None:
    """The tokens after that differ, or one of the sequences ends."""
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
    """All tokens are shared, or those before the cached block in which they would end."""
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


@ROOM.law(
    "P1 P2",
    (6, 2),
    *(copy_is_seen_behind_its_own_hold, last_holder_copies_too, full_block_is_copied),
    *(hold_is_kept, copy_stands_at_the_end),
)
def check_who_writes_in_a_shared_block_has_its_own(num_computed: int, num_holders: int) -> None:
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


@ROOM.law(
    "P2 P7 P8",
    (6, 5, 2, 2),
    *(estimate_forgets_the_copy, copy_is_seen_behind_its_own_hold, last_holder_copies_too),
)
def check_the_estimate_counts_the_copy_and_it_is_taken(
    num_computed: int, num_new: int, num_holders: int, num_free: int
) -> None:
    """Slots are granted exactly if the new blocks and the copy are free; then these are taken."""
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
    """A waiting branch with two blocks needs the missing ones and a copy of the shared one."""
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
    """Four of five blocks are free, or all five; alone the request may have all."""
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
    """The tail of the last freed table comes first, without the blocks that others hold."""
    assert 1 <= num_holders <= 3 and 1 <= num_outer <= 2
    counts = (0, num_outer, num_holders, 1, 0, 0)
    pool = replace(h.build_pool(counts, (5, 4), published=()), is_lifo=True)
    after = free_blocks(pool, TABLE)
    gone = [b for b, n in ((3, 1), (2, num_holders), (1, num_outer)) if n == 1]
    assert after.free_queue == (*gone, 5, 4)
    assert h.is_conserved(after)
