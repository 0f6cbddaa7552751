"""Laws about recurrent groups: chunk ends, held states and hits.

PYTEST_DONT_REWRITE.

Lengths are symbolic. Chunks are aligned to blocks of four tokens; other block sizes are symbolic,
too. A table belongs to a request with two blocks for drafts.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.prefix_cache import get_prefix_hit
from blockstep.spec.core.schedule import create_step
from blockstep.spec.core.slots import compute_num_blocks
from blockstep.spec.core.work import Scheduled
from blockstep.spec.features import get_config_rules
from blockstep.spec.features.common_prefix import count_common_blocks
from blockstep.spec.features.groups.kinds import compute_max_held_blocks, compute_num_skipped_blocks
from blockstep.spec.features.mamba import (
    compute_aligned_end,
    compute_max_held_states,
    compute_num_certain,
    compute_num_new_states,
    compute_num_state_blocks,
    get_extended_states,
    get_unwritten_states,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import (
    BlockId,
    BlockKey,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    SpecMethod,
)

ROOM = LawModule("mamba_state")
SIZE = 4
FIRST = BlockKey(None, (0,))
SECOND = BlockKey(FIRST, (1,))
CHAIN = (FIRST, SECOND, BlockKey(SECOND, (2,)))
ALIGN, ALL = MambaCacheMode.ALIGN, MambaCacheMode.ALL
Table = tuple[BlockId, ...]


def states(block_size: int, num_speculative: int = 0, mode: MambaCacheMode = ALIGN) -> KVGroup:
    """Return a recurrent group."""
    return KVGroup(
        GroupKind.RECURRENT,
        block_size,
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative,
    )


# Mistakes.


@instead(compute_aligned_end, theirs="#40707")
def what_is_less_than_a_block_is_rounded_to_nothing(
    right: Right[int], num_computed: int, end: int, last: int, unit: int
) -> int:
    """A budget or threshold smaller than a block never gives a token."""
    if num_computed % unit == 0 and end < last:
        return end // unit * unit
    return right()


@instead(compute_aligned_end, theirs="not found upstream")
def tokens_of_a_chunk_are_rounded_and_not_its_end(
    right: Right[int], num_computed: int, end: int, last: int, unit: int
) -> int:
    """The number of tokens is a multiple of the block size, wherever the chunk begins."""
    num_new = (end - num_computed) // unit * unit
    return num_computed + num_new if end < last and num_new else right()


@instead(get_extended_states)
def blocks_of_drafts_stay_where_they_are(
    group: KVGroup, table: Table, num_blocks: int, new_blocks: Table
) -> Table:
    """The blocks for drafts stay in their places, and the gap comes after them."""
    return table + (0,) * (num_blocks - len(table) - len(new_blocks)) + new_blocks


@instead(compute_max_held_states, theirs="not found upstream")
def two_states_are_enough(group: KVGroup, num_all: int) -> int:
    """Two states are charged: one that is read, and one that is written."""
    return min(num_all, 2) + group.num_speculative_blocks


# The end of a chunk.


@ROOM.law("P10", (5, 3, 8), what_is_less_than_a_block_is_rounded_to_nothing)
def check_chunk_is_never_rounded_down_to_no_token(
    num_computed: int, num_new: int, num_last: int
) -> None:
    """It is not made longer either: within budget and threshold the request progresses."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_last
    last, end = num_last * SIZE, num_computed + num_new
    aligned = compute_aligned_end(num_computed, end, last, SIZE, (SIZE,))
    assert num_computed < aligned <= end


@ROOM.law("P3 P5", (5, 9, 4), tokens_of_a_chunk_are_rounded_and_not_its_end)
def check_chunk_passes_no_boundary_whose_state_can_be_hit(
    num_computed: int, num_new: int, num_last: int
) -> None:
    """These are the end of the block in which it begins, and the last boundary that can be hit."""
    assert 0 <= num_computed and 1 <= num_new and 1 <= num_last
    last, end = num_last * SIZE, num_computed + num_new
    aligned = compute_aligned_end(num_computed, end, last, SIZE, (SIZE,))
    block_end = compute_num_blocks(num_computed, SIZE) * SIZE
    assert num_computed == block_end or aligned <= block_end
    assert num_computed >= last or aligned <= last


@ROOM.law("P5", (4, 9, 5), tokens_of_a_chunk_are_rounded_and_not_its_end)
def check_chunk_of_a_block_or_more_ends_at_a_boundary_before_the_last(
    num_computed: int, num_new: int, num_last: int
) -> None:
    """The state at that boundary can be hit."""
    assert 0 <= num_computed < num_last * SIZE and SIZE <= num_new
    last, end = num_last * SIZE, num_computed + num_new
    aligned = compute_aligned_end(num_computed, end, last, SIZE, (SIZE,))
    assert aligned % SIZE == 0


# Held states.


@ROOM.law("P8", (9, 4))
def check_first_held_block_has_the_state_after_the_last_token(
    num_computed: int, block_size: int
) -> None:
    """The next row starts from this state, wherever in its block the request is."""
    assert 1 <= num_computed and 1 <= block_size
    num_left = compute_num_skipped_blocks(states(block_size), num_computed)
    assert num_left * block_size < num_computed <= (num_left + 1) * block_size


@ROOM.law("P3 P14", (10, 2, 1, 2, 4))
def check_block_that_ends_among_drafts_is_held_until_they_are_verified(
    num_computed: int, num_unverified: int, num_accepted: int, num_speculative: int, block_size: int
) -> None:
    """The drafts are those in flight and those just accepted, whose state is not published yet."""
    assert 1 <= block_size and 0 <= num_unverified <= num_computed
    assert 0 <= num_accepted <= num_speculative and num_accepted <= num_computed
    group = states(block_size, num_speculative)
    num_certain = compute_num_certain(group, num_computed, num_unverified)
    num_left = compute_num_skipped_blocks(group, num_certain)
    first_in_doubt = num_computed - max(num_unverified, num_accepted)
    assert num_left * block_size <= first_in_doubt


@ROOM.law("P8 P11", (11, 2, 3, 2, 4), two_states_are_enough)
def check_states_for_drafts_are_at_most_those_charged(
    num_computed: int, num_drafts: int, num_unverified: int, num_speculative: int, block_size: int
) -> None:
    """This holds at every position, with as many drafts in flight as the pipeline allows."""
    assert 0 <= num_drafts <= num_speculative < block_size
    assert 0 <= num_unverified <= min(3 * num_speculative, num_computed)
    group = states(block_size, num_speculative)
    num_slots = num_computed + 1 + num_drafts
    num_certain = compute_num_certain(group, num_computed, num_unverified)
    num_left = compute_num_skipped_blocks(group, num_certain)
    num_held = compute_num_state_blocks(group, num_slots, num_slots) - num_left
    charged = compute_max_held_blocks(group, num_slots, num_unverified + 1, num_unverified)
    assert num_held <= charged


@ROOM.law("P8 P11", (11, 9, 3, 2, 4))
def check_states_at_boundaries_are_at_most_those_charged(
    num_computed: int, num_new: int, num_unverified: int, num_speculative: int, block_size: int
) -> None:
    """They are the states of a chunk, and the one from which it starts."""
    assert 0 <= num_speculative and 1 <= block_size and 1 <= num_new
    assert 0 <= num_unverified <= num_computed
    group = states(block_size, num_speculative, ALL)
    num_slots = num_computed + num_new
    num_certain = compute_num_certain(group, num_computed, num_unverified)
    num_left = compute_num_skipped_blocks(group, num_certain)
    num_held = compute_num_state_blocks(group, num_slots, num_slots) - num_left
    assert num_held <= compute_max_held_blocks(
        group, num_slots, num_unverified + num_new, num_unverified
    )


# Allocated states.


@ROOM.law("P2 P8", (20, 8), blocks_of_drafts_stay_where_they_are)
def check_chunk_takes_one_block_for_its_state_and_keeps_those_for_drafts(
    num_tokens: int, block_size: int
) -> None:
    """The table has a state in block 3, and blocks 4 and 5 for drafts."""
    assert 1 <= block_size < num_tokens <= 5 * block_size
    group = states(block_size, 2)
    num_blocks = compute_num_state_blocks(group, num_tokens, num_tokens)
    num_new = compute_num_new_states(group, num_blocks, 3, 0)
    table = get_extended_states(group, (3, 4, 5), True, num_blocks, (6, 7, 8, 9, 10)[:num_new])
    assert len(table) == num_blocks
    assert num_new == 1
    assert table[0] == 3 and sorted(table[-3:]) == [4, 5, 6]
    assert table[1:-3] == (0,) * (num_blocks - 4)


@ROOM.law("P8", (20, 2, 8))
def check_first_chunk_takes_a_block_for_its_state_and_each_draft(
    num_tokens: int, num_hit: int, block_size: int
) -> None:
    """It follows a hit of `num_hit` blocks, of which one is held."""
    assert 1 <= block_size and 0 <= num_hit <= 2
    assert num_hit * block_size < num_tokens <= 5 * block_size
    group = states(block_size, 2)
    hit = (0, 0, 3)[3 - num_hit :] if num_hit else ()
    num_blocks = compute_num_state_blocks(group, num_tokens, num_tokens)
    num_new = compute_num_new_states(group, num_blocks, 0, num_hit)
    assert num_new == 3
    table = get_extended_states(group, hit, False, num_blocks, (6, 7, 8))
    assert len(table) == num_blocks
    assert table[-3:] == (6, 7, 8) and table[:num_hit] == hit


# Hits.


def build_published(num_full: int, of_state: int) -> Pool:
    """Return a pool that caches `num_full` blocks of the first group and one state of the other.

    The keys are the chain of three blocks; `of_state` is the index of the state.
    """
    published = {CHAIN[index]: (1 + index,) for index in range(3) if index < num_full}
    published |= {CHAIN[i].in_group(1): (4 + i,) for i in range(3) if i == of_state}
    return Pool((0,) * 8, (None,) * 8, tuple(range(1, 8)), FrozenMap(published))


@ROOM.law("P5", (13, 3, 1, 1), is_slow=True)
def check_hit_ends_at_a_state_with_all_attention_blocks_before_it(
    num_known: int, num_full: int, of_state: int, num_behind: int
) -> None:
    """Attention needs one more block with a draft head, and drops it; one state suffices."""
    assert 1 <= num_known <= 13 and 0 <= num_full <= 3 and 0 <= of_state <= 3
    assert 0 <= num_behind <= 1
    method = SpecMethod.EAGLE if num_behind else SpecMethod.NONE
    config = Config(
        8,
        4,
        spec_method=method,
        num_speculative_tokens=num_behind,
        groups=(KVGroup(GroupKind.FULL, 4), states(4, 1)),
    )
    request = replace(h.build_request("a", num_known), block_keys=CHAIN)
    hit = get_prefix_hit(
        config, build_published(num_full, of_state), request, get_config_rules(config)
    )
    end = of_state + 1
    is_hit = end <= 3 and end + num_behind <= num_full and (end + num_behind) * 4 < num_known
    assert hit.num_tokens == (end * 4 if is_hit else 0)
    if is_hit:
        assert hit.block_tables == ((1, 2, 3)[:end], (0,) * of_state + (4 + of_state,))


@ROOM.law("P4", (9, 3, 4))
def check_states_can_be_hit_from_the_next_step_on(
    num_computed: int, num_new: int, block_size: int
) -> None:
    """Three states of a running request are published."""
    assert 1 <= block_size and 0 <= num_computed <= 3 * block_size and 1 <= num_new
    config = Config(8, block_size, groups=(states(block_size, mode=ALL),))
    request = h.build_runner("a", 1, num_computed, (1, 2, 3), 3)
    state = h.build_state(config, (request,))
    pool = h.build_pool((0, 1, 1, 1, 0, 0, 0, 0), (4, 5, 6, 7), published=(1, 2, 3))
    step = create_step(replace(state, pool=pool))
    step.rows.append(Scheduled("a", num_computed, num_new, ((),)))
    unwritten = get_unwritten_states(step)
    for index in range(3):
        is_there = index + 1 not in unwritten
        assert is_there == ((index + 1) * block_size <= num_computed)


# Common prefix blocks.


@ROOM.law("P26", (1, 2, 1, 3, 1, 2))
def check_common_blocks_are_the_common_beginning_of_all_tables(
    first_a: int, second_a: int, first_b: int, second_b: int, first_c: int, second_c: int
) -> None:
    """Each of three tables has two different blocks."""
    assert first_a != second_a and first_b != second_b and first_c != second_c
    tables = ((first_a, second_a), (first_b, second_b), (first_c, second_c))
    num_common = count_common_blocks(tables)
    is_first = first_a == first_b and first_b == first_c
    is_second = second_a == second_b and second_b == second_c
    assert num_common == (2 if is_first and is_second else 1 if is_first else 0)
