"""Seeded bugs in KV groups: block tables, windows, chunks and hits that are valid in all groups.

Their episodes have several KV groups, but recurrent ones only on the page `STATES`; all other
seeded bugs have one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from blockstep.conformance.museum.bug import Page, Right, instead, replacing
from blockstep.spec import vocabulary as v
from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import (
    Pool,
    allocate_blocks,
    get_num_free_blocks,
    give_up_blocks,
    touch_blocks,
)
from blockstep.spec.core.prefix_cache import get_group_keys
from blockstep.spec.core.requests import Hit, Holding, RequestState, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import (
    Growth,
    allocate_slots,
    compute_max_blocks,
    compute_num_blocks,
    count_taken,
    publish_slots,
    take_blocks,
)
from blockstep.spec.features.full_isl import count_lacking, count_reserved_blocks
from blockstep.spec.features.groups.hits import get_hit_table, is_valid_hit
from blockstep.spec.features.groups.kinds import (
    compute_max_held_blocks,
    compute_max_reach,
    compute_max_unverified,
    compute_num_skipped_blocks,
    compute_num_skipped_tokens,
)
from blockstep.spec.features.mamba import compute_aligned_end, get_unwritten_states
from blockstep.spec.features.resets import is_held_besides
from blockstep.spec.releases.groups import window_reserves_the_full_request
from blockstep.spec.releases.mamba_state import chunk_rounds_down_to_zero

PAGE = Page(takes_groups=True)
STATES = Page(takes_groups=True, takes_states=True)
"""Seeded bugs in recurrent groups; their episodes have such groups as well."""
Granted = tuple[Pool, RequestState] | None
Taken = tuple[Pool, list[Holding], list[tuple[v.BlockId, ...]]]
MANY: Final = 1_000_000
"""More blocks than any pool has."""


def allocate_by_turns(
    rules: Rules, sort: Callable[[v.Config, Iterable[int]], Iterable[int]]
) -> Rules:
    """Return rules by which hits are touched and blocks are taken group by group, in this order."""

    def take(
        right: Right[Taken],
        config: v.Config,
        pool: Pool,
        request: RequestState,
        hit: Hit,
        nums_new: Sequence[int],
    ) -> Taken:
        if not any(map(any, hit.block_tables)):
            return right()
        taken: list[tuple[v.BlockId, ...]] = [()] * len(nums_new)
        for index in sort(config, range(len(nums_new))):
            pool = touch_blocks(pool, without_nulls(hit.block_tables[index]))
            pool, taken[index] = allocate_blocks(pool, nums_new[index])
        return pool, [*request.holdings], taken

    return replacing(rules, take_blocks, take)


@PAGE.exhibit(
    "a group takes new blocks before the hits of the next group are touched",
    "#33775, #44409; ascend #12139",
    "P2 P1 P8 P16",
)
def group_eats_a_hit(rules: Rules, _config: v.Config) -> Rules:
    """A new block may be a hit of the next group; then both groups use it."""
    return allocate_by_turns(rules, lambda _config, indices: indices)


@PAGE.exhibit(
    "the groups allocate in reverse order",
    "#33775",
    "P2 P1 P8 P16",
    wrong_fix_of="group-eats-a-hit",
)
def last_group_first(rules: Rules, _config: v.Config) -> Rules:
    """Now the first groups lose their hits."""
    return allocate_by_turns(rules, lambda _config, indices: [*indices][::-1])


@PAGE.exhibit(
    "full attention allocates first, the other groups one by one",
    "#33775",
    "P2 P1 P8 P16",
    wrong_fix_of="group-eats-a-hit",
)
def full_attention_first(rules: Rules, _config: v.Config) -> Rules:
    """If there are two window groups, one still takes a hit of the other."""
    return allocate_by_turns(
        rules,
        lambda config, indices: sorted(
            indices, key=lambda index: config.kv_groups[index].kind is not v.GroupKind.FULL
        ),
    )


@PAGE.exhibit(
    "the admission check charges a sliding window for the whole prompt",
    "#39734, #40946",
    "P15 P11",
)
def window_charged_whole(rules: Rules, config: v.Config) -> Rules:
    """A prompt that could run in chunks is never admitted."""
    return window_reserves_the_full_request(rules, config)


@PAGE.exhibit(
    "the admission check charges nothing for a sliding window",
    "#39734",
    "P8",
    wrong_fix_of="window-charged-whole",
    invisible="efficiency: there are more preemptions, but all requests finish",
)
@instead(count_reserved_blocks)
def window_not_charged(right: Right[int], group: v.KVGroup) -> int:
    """Blocks for the window and for the tokens of a step are missing when they are needed."""
    return right() if group.kind is v.GroupKind.FULL else 0


@PAGE.exhibit(
    "a sliding window is charged without the tokens of a step",
    "#39734, #40946",
    "P11 P10 P8",
    wrong_fix_of="window-charged-whole",
)
def window_without_its_step(rules: Rules, _config: v.Config) -> Rules:
    """A request is accepted although the blocks of its largest step exceed the pool."""
    return rules.replacing(compute_max_reach, lambda config: compute_max_unverified(config) + 1)


@PAGE.exhibit(
    "freed blocks of a sliding window count as held",
    "#39734, #50169",
    "P26 P8 P2 P1",
    wrong_fix_of="window-charged-whole",
)
def nulls_count_as_held(rules: Rules, config: v.Config) -> Rules:
    """The check caps a window's blocks, but also counts the null blocks of its table as held."""
    reach, doubt = compute_max_reach(config), compute_max_unverified(config)

    def count(group: v.KVGroup, growth: Growth, num_held: int, num_hit: int) -> int:
        num_due = compute_max_held_blocks(group, growth.num_slots, reach, doubt)
        return max(num_due - num_held - num_hit, 0)

    def publish(
        right: Right[tuple[Pool, RequestState]], request: RequestState, nums_full: Sequence[int]
    ) -> tuple[Pool, RequestState]:
        return right(nums_full=[*map(min, nums_full, map(len, request.block_tables))])

    return replacing(replacing(rules, count_taken, count), publish_slots, publish)


def get_alone(config: v.Config) -> list[v.Config]:
    """Return the config with each of its groups alone."""
    return [replace(config, groups=(group,)) for group in config.kv_groups]


@PAGE.exhibit(
    "a request is accepted if each KV group alone fits the pool",
    "#52520, #39734; local-inference-lab #394",
    "P11 P10",
)
@instead(compute_max_blocks)
def each_group_fits_alone(right: Right[int], config: v.Config) -> int:
    """The accepted request waits for blocks that the pool does not have, and blocks the queue."""
    return max([right(config=one) for one in get_alone(config)])


@PAGE.exhibit(
    "only the first KV group decides whether a request is accepted",
    "#52520",
    "P11 P10",
    wrong_fix_of="each-group-fits-alone",
)
@instead(compute_max_blocks)
def first_group_decides(right: Right[int], config: v.Config) -> int:
    """This is right only if the first group needs the most blocks."""
    alone = get_alone(config)
    return len(alone) * right(config=alone[0])


@PAGE.exhibit(
    "a hit of full attention is taken as valid for all KV groups",
    "rule P5; #44409",
    "P5 P3 P4",
)
def hit_of_full_attention(rules: Rules, _config: v.Config) -> Rules:
    """Blocks that a sliding window still reads are missing and replaced by null blocks."""

    def is_valid(group: v.KVGroup, runs: Sequence[int], num_tokens: int, num_behind: int) -> bool:
        is_full = group.kind is v.GroupKind.FULL
        return not is_full or rules[is_valid_hit](group, runs, num_tokens, num_behind)

    def get_table(
        group: v.KVGroup, found: Sequence[v.BlockId | None], num_tokens: int
    ) -> tuple[v.BlockId, ...]:
        first = compute_num_skipped_blocks(group, num_tokens)
        there = [block_id or v.NULL_BLOCK for block_id in found[: num_tokens // group.block_size]]
        return (v.NULL_BLOCK,) * first + tuple(there[first:])

    return rules.replacing(is_valid_hit, is_valid).replacing(get_hit_table, get_table)


@PAGE.exhibit(
    "null blocks are freed with the table",
    "rule P1: the null block is never free",
    "P1",
    invisible_if_hidden="books: the ref count of the null block is not used",
)
def nulls_freed(rules: Rules, _config: v.Config) -> Rules:
    """The ref count of the null block becomes negative."""

    def give_up(right: Right[Pool], block_tables: v.BlockTables) -> Pool:
        pool = right()
        counts = [*pool.ref_counts]
        counts[v.NULL_BLOCK] -= sum([table.count(v.NULL_BLOCK) for table in block_tables])
        return replace(pool, ref_counts=tuple(counts))

    def is_held(right: Right[bool], pool: Pool) -> bool:
        return right(pool=replace(pool, ref_counts=pool.ref_counts[v.NULL_BLOCK + 1 :]))

    return replacing(replacing(rules, give_up_blocks, give_up), is_held_besides, is_held)


@PAGE.exhibit(
    "block keys do not contain the KV group",
    "vLLM 0.19.1 make_block_hash_with_group_id, rule",
    "P6 P3 P5",
)
def group_left_out_of_keys(rules: Rules, _config: v.Config) -> Rules:
    """A group hits blocks of another group, whose KV is of other layers."""
    get = rules[get_group_keys]
    return rules.replacing(get_group_keys, lambda keys, _group, *others: get(keys, 0, *others))


@PAGE.exhibit(
    "a block is freed while a part of it is still read",
    "vLLM 0.19.1, found here",
    "P3 P5",
)
@instead(compute_num_skipped_blocks)
def half_a_block_left(group: v.KVGroup, num_computed: int) -> int:
    """A window begins within a block, and so may a chunk of chunked-local attention."""
    return compute_num_blocks(compute_num_skipped_tokens(group, num_computed), group.block_size)


# Recurrent states.


@STATES.exhibit(
    "a chunk is cut to a multiple of the state block, even to zero tokens",
    "#40707, #45414, #51603",
    "P10 P15",
)
def chunk_cut_to_nothing(rules: Rules, config: v.Config) -> Rules:
    """The request never progresses if a budget or threshold is smaller than the block."""
    return chunk_rounds_down_to_zero(rules, config)


@STATES.exhibit(
    "a chunk that would be cut to zero tokens runs to the next block boundary",
    "#51582, #47771",
    "P9 P15",
    wrong_fix_of="chunk-cut-to-nothing",
)
@instead(compute_aligned_end)
def chunk_run_on(right: Right[int], num_computed: int, end: int, last: int, unit: int) -> int:
    """The request progresses, but exceeds the token budget of the step."""
    if end >= last:
        return right()
    return max(end // unit, num_computed // unit + 1) * unit


def is_aligned(group: v.KVGroup) -> bool:
    """Whether states of a group are kept at the ends of chunks only."""
    return group.mamba_cache_mode is v.MambaCacheMode.ALIGN


def is_admission(request: RequestState) -> bool:
    """Whether a request that asks for slots has no block yet."""
    return not any(request.block_tables)


@STATES.exhibit(
    "an admission is charged one state block, but also takes those for drafts",
    "#46892; ascend #11129",
    "P8 P1 P2 P12",
)
@instead(allocate_slots)
def states_charged_once(
    right: Right[Granted], config: v.Config, pool: Pool, request: RequestState
) -> Granted:
    """The blocks for the draft states belong to another request."""
    num_drafts = sum([one.num_speculative_blocks for one in config.groups if is_aligned(one)])
    granted = right()
    if granted is not None or not is_admission(request):
        return granted
    held = [block_id for block_id, count in enumerate(pool.ref_counts) if count > 0]
    granted = right(pool=replace(pool, free_queue=pool.free_queue + tuple(held[:num_drafts])))
    return None if granted is None else (replace(granted[0], free_queue=()), granted[1])


@STATES.exhibit(
    "an admission is charged one state block per block of tokens",
    "#46892",
    "P15 P11 P10",
    wrong_fix_of="states-charged-once",
)
def states_charged_by_tokens(rules: Rules, _config: v.Config) -> Rules:
    """A chunk writes one state however long it is, so requests that would fit have to wait."""

    def allocate(
        right: Right[Granted], config: v.Config, request: RequestState, num_new: int, hit: Hit
    ) -> Granted:
        granted = right()
        if granted is None or not is_admission(request):
            return granted
        num_tokens = request.num_computed_tokens + hit.num_tokens + num_new
        num_more, tables = 0, hit.block_tables or ((),) * len(config.kv_groups)
        for group, found in zip(config.kv_groups, tables, strict=True):
            num_states = compute_num_blocks(num_tokens, group.block_size) - len(found)
            num_more += max(num_states - 1, 0) if is_aligned(group) else 0
        return granted if num_more <= get_num_free_blocks(granted[0]) else None

    def count(
        right: Right[int],
        pool: Pool,
        group: v.KVGroup,
        num_slots: int,
        hit: tuple[v.BlockId, ...],
        holding: Holding,
        num_copies: int,
    ) -> int:
        if not is_aligned(group):
            return right()
        num_blocks = compute_num_blocks(num_slots, group.block_size) + group.num_speculative_blocks
        return count_lacking(pool, num_blocks, MANY, hit, holding, num_copies)

    changed = replacing(rules, allocate_slots, allocate)
    return replacing(changed, count_reserved_blocks, count)


@STATES.exhibit(
    "a recurrent state is hit in the step that computes it",
    "#56525; vLLM 0.19.1, rule",
    "P4 P5",
)
def state_hit_within_its_step(rules: Rules, _config: v.Config) -> Rules:
    """Rows of one step run in parallel, so the state is not written yet."""
    return rules.replacing(get_unwritten_states, lambda _step: [])
