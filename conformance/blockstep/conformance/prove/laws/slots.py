"""Slots: token slots, blocks that hold them, and blocks that may be published. PYTEST_DONT_REWRITE.

Block sizes are symbolic: what holds, holds for every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove.harness import Tokens, build_pool, is_conserved, table_of
from blockstep.conformance.prove.law import Room, instead, instead_in
from blockstep.spec.memory.prefix import compute_max_hit_blocks
from blockstep.spec.memory.slots import (
    allocate_slots,
    compute_max_slots,
    compute_num_blocks,
    compute_num_new_blocks,
    compute_num_publishable_blocks,
    compute_num_slots,
    count_needed_blocks,
    is_servable,
)
from blockstep.spec.pool import Pool, allocate_blocks, count_free
from blockstep.spec.requests import Hit, Holding, RequestState
from blockstep.spec.vocabulary import BlockId, Config, Request, Status

ROOM = Room("slots")
_allocate_blocks = allocate_blocks  # a twin of this name calls the right one


# Mistakes.


def exact_multiples_take_a_block_more(num_tokens: int, block_size: int) -> int:
    """The quotient and one more, also where nothing is left over."""
    return num_tokens // block_size + 1


def last_partial_block_is_forgotten(num_tokens: int, block_size: int) -> int:
    """The quotient, rounded down."""
    return num_tokens // block_size


def surplus_gives_a_negative_count(num_slots: int, block_size: int, num_held: int) -> int:
    """After a rejection a request may hold more than enough; a slice then takes from the end."""
    return compute_num_blocks(num_slots, block_size) - num_held


def each_chunk_starts_a_block(num_slots: int, block_size: int, num_held: int) -> int:
    """What is left over in the last held block is not used."""
    return compute_num_blocks(max(num_slots - num_held * block_size + 1, 0), block_size)


def lookahead_passes_the_model_length(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> int:
    """The cap comes before the lookahead."""
    return min(num_computed + num_new, max_model_len) + num_lookahead


def lookahead_is_forgotten(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> int:
    """The proposer writes where nobody owns a block."""
    return min(num_computed + num_new, max_model_len)


def slots_end_before_the_last_position(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> int:
    """Capped like the tokens, although lookahead may fill the last slot."""
    return min(num_computed + num_new + num_lookahead, max_model_len - 2)


def drafts_are_published_too(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """Whatever is scheduled counts, although the drafts in it may be rejected."""
    return (num_computed + num_new) // block_size


def block_is_published_before_it_is_full(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """Rounded up: later tokens would come under the same name."""
    return -(-min(num_computed + num_new, num_known) // block_size)


def full_block_waits_for_the_next_token(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """One token short: a block that ends with the last token stays unknown."""
    return max(min(num_computed + num_new, num_known) - 1, 0) // block_size


def whatever_is_known_is_published(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """As if the whole prompt were computed in one step."""
    return num_known // block_size


def drafts_at_the_end_are_forgotten(
    num_prompt: int, max_tokens: int, num_speculative: int, num_lookahead: int, max_model_len: int
) -> int:
    """Prompt and outputs only."""
    longest = min(num_prompt + max_tokens - 1, max_model_len - 1)
    return min(longest + num_lookahead, max_model_len)


def drafts_follow_even_the_only_token(
    num_prompt: int, max_tokens: int, num_speculative: int, num_lookahead: int, max_model_len: int
) -> int:
    """Drafts are reserved for although there is no output before the last for them to follow."""
    longest = min(num_prompt + max_tokens - 1 + num_speculative, max_model_len - 1)
    return min(longest + num_lookahead, max_model_len)


def null_block_counts_as_usable(self: Config) -> int:
    """All blocks, the one that nobody can hold included."""
    return self.num_blocks


def whole_pool_holds_the_model_length(config: Config, request: Request) -> bool:
    """Checked at start-up against all blocks, the null block included, for all requests alike."""
    num_blocks = compute_num_blocks(config.max_model_len, config.block_size)
    return num_blocks <= config.num_blocks


def full_hit_leaves_nothing_to_compute(num_known: int, block_size: int) -> int:
    """All full blocks may be hit, as a connector reports them."""
    return num_known // block_size


def hit_stops_a_block_early(num_known: int, block_size: int) -> int:
    """The last full block is always computed again, needed or not."""
    return max(num_known // block_size - 1, 0)


def free_hits_cost_nothing(pool: Pool, block_ids: Sequence[BlockId]) -> int:
    """Touching a hit on a free block takes it out of the free ones; that is forgotten."""
    return 0


def every_hit_costs_a_block(pool: Pool, block_ids: Sequence[BlockId]) -> int:
    """Also one that somebody else holds."""
    return len(block_ids)


def hits_are_credited_twice(
    pool: Pool, num_slots: int, block_size: int, num_held: int, hit: tuple[BlockId, ...]
) -> int:
    """The hit is taken off the need once as held, and once more as a hit."""
    return compute_num_new_blocks(num_slots, block_size, num_held + 2 * len(hit)) + len(hit)


def blocks_come_from_the_tail(pool: Pool, num_blocks: int) -> tuple[Pool, tuple[BlockId, ...]]:
    """What was freed last is evicted first."""
    queue = tuple(reversed(pool.free_queue))
    pool, taken = _allocate_blocks(replace(pool, free_queue=queue), num_blocks)
    return replace(pool, free_queue=tuple(reversed(pool.free_queue))), taken


# Blocks.


@ROOM.law(
    "P8",
    witness=(33, 16),
    twins=(
        instead(compute_num_blocks, exact_multiples_take_a_block_more),
        instead(compute_num_blocks, last_partial_block_is_forgotten),
    ),
)
def check_blocks_hold_the_tokens_and_none_is_to_spare(num_tokens: int, block_size: int) -> bool:
    """One block fewer would not hold them."""
    assert 1 <= num_tokens and 1 <= block_size
    num_blocks = compute_num_blocks(num_tokens, block_size)
    assert num_tokens <= num_blocks * block_size < num_tokens + block_size
    return True


@ROOM.law(
    "P8",
    witness=(40, 16, 2),
    twins=(instead(compute_num_new_blocks, surplus_gives_a_negative_count),),
)
def check_new_blocks_fill_up_what_is_held_and_never_give_back(
    num_slots: int, block_size: int, num_held: int
) -> bool:
    """Enough with them, not enough with one fewer, none where there was enough."""
    assert 0 <= num_slots and 1 <= block_size and 0 <= num_held
    num_new = compute_num_new_blocks(num_slots, block_size, num_held)
    assert num_new >= 0
    assert num_slots <= (num_held + num_new) * block_size
    assert num_new == 0 or num_slots > (num_held + num_new - 1) * block_size
    return True


@ROOM.law(
    "P8",
    witness=(20, 40, 16),
    twins=(instead(compute_num_new_blocks, each_chunk_starts_a_block),),
)
def check_growing_in_two_steps_takes_as_many_blocks_as_in_one(
    num_slots: int, num_slots_later: int, block_size: int
) -> bool:
    """A chunk goes on in the block where the last one ended."""
    assert 1 <= num_slots <= num_slots_later and 1 <= block_size
    first = compute_num_new_blocks(num_slots, block_size, 0)
    second = compute_num_new_blocks(num_slots_later, block_size, first)
    assert first + second == compute_num_blocks(num_slots_later, block_size)
    return True


# Token slots.


@ROOM.law(
    "P2",
    "P8",
    witness=(10, 5, 3, 100),
    twins=(
        instead(compute_num_slots, slots_end_before_the_last_position),
        instead(compute_num_slots, lookahead_is_forgotten),
    ),
)
def check_slots_cover_the_scheduled_tokens_and_the_lookahead(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> bool:
    """Every position that is written in the step has a slot, below the model length."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_lookahead
    assert num_computed + num_new <= max_model_len - 1
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, max_model_len)
    assert num_slots >= num_computed + num_new
    assert num_slots == num_computed + num_new + num_lookahead or num_slots == max_model_len
    return True


@ROOM.law(
    "P9",
    witness=(10, 5, 3, 100),
    twins=(instead(compute_num_slots, lookahead_passes_the_model_length),),
)
def check_no_slot_lies_past_the_model_length(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> bool:
    """The block table has a fixed width at the worker."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_lookahead and 2 <= max_model_len
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, max_model_len)
    assert num_slots <= max_model_len
    return True


# Publishing.


@ROOM.law(
    "P3",
    "P4",
    witness=(16, 20, 33, 16),
    twins=(
        instead(compute_num_publishable_blocks, drafts_are_published_too),
        instead(compute_num_publishable_blocks, block_is_published_before_it_is_full),
        instead(compute_num_publishable_blocks, whatever_is_known_is_published),
    ),
)
def check_published_blocks_are_full_of_known_tokens_that_the_step_computes(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> bool:
    """No draft, no partial block, nothing that a later step computes."""
    assert 0 <= num_computed and 1 <= num_new and 1 <= num_known and 1 <= block_size
    num_full = compute_num_publishable_blocks(num_computed, num_new, num_known, block_size)
    assert num_full * block_size <= num_known
    assert num_full * block_size <= num_computed + num_new
    return True


@ROOM.law(
    "P3",
    witness=(16, 20, 33, 16),
    twins=(instead(compute_num_publishable_blocks, full_block_waits_for_the_next_token),),
)
def check_every_full_block_of_computed_known_tokens_is_published(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> bool:
    """The next block is not full yet, or not known."""
    assert 0 <= num_computed and 1 <= num_new and 1 <= num_known and 1 <= block_size
    num_full = compute_num_publishable_blocks(num_computed, num_new, num_known, block_size)
    next_end = (num_full + 1) * block_size
    assert next_end > num_known or next_end > num_computed + num_new
    return True


@ROOM.law(
    "P3",
    "P8",
    witness=(16, 20, 33, 4, 64, 16),
    twins=(instead(compute_num_publishable_blocks, block_is_published_before_it_is_full),),
)
def check_published_blocks_lie_inside_the_table(
    num_computed: int,
    num_new: int,
    num_known: int,
    num_lookahead: int,
    max_model_len: int,
    block_size: int,
) -> bool:
    """Also of a table that the model length cuts short."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_lookahead and 1 <= block_size
    assert 1 <= num_known <= max_model_len
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, max_model_len)
    num_full = compute_num_publishable_blocks(num_computed, num_new, num_known, block_size)
    assert num_full * block_size <= num_slots
    return True


# The longest a request can get.


@ROOM.law(
    "P11",
    witness=(10, 20, 3, 12, 3, 2, 4, 4, 100),
    twins=(instead(compute_max_slots, drafts_at_the_end_are_forgotten),),
)
def check_no_step_needs_more_slots_than_the_longest(
    num_prompt: int,
    max_tokens: int,
    num_outputs: int,
    num_computed: int,
    num_new: int,
    num_drafts: int,
    num_speculative: int,
    num_lookahead: int,
    max_model_len: int,
) -> bool:
    """Whatever is computed, drafted and reserved for: a request that was accepted always fits."""
    assert 1 <= num_prompt < max_model_len and 0 <= num_outputs < max_tokens
    assert num_prompt + num_outputs < max_model_len
    assert 0 <= num_drafts <= num_speculative and 0 <= num_lookahead
    assert num_drafts == 0 or num_outputs >= 1
    assert 0 <= num_computed and 1 <= num_new
    assert num_computed + num_new <= num_prompt + num_outputs + num_drafts
    assert num_computed + num_new <= max_model_len - 1
    longest = compute_max_slots(
        num_prompt, max_tokens, num_speculative, num_lookahead, max_model_len
    )
    assert compute_num_slots(num_computed, num_new, num_lookahead, max_model_len) <= longest
    return True


@ROOM.law(
    "P11",
    witness=(10, 20, 3, 3, 100),
    twins=(instead(compute_max_slots, drafts_follow_even_the_only_token),),
)
def check_some_step_needs_as_many_slots_as_the_longest(
    num_prompt: int, max_tokens: int, num_speculative: int, num_lookahead: int, max_model_len: int
) -> bool:
    """The last step, with all drafts: nobody is refused who would have fitted."""
    assert 1 <= num_prompt and 1 <= max_tokens and 0 <= num_speculative and 0 <= num_lookahead
    assert num_prompt < max_model_len and num_prompt + max_tokens <= max_model_len
    longest = compute_max_slots(
        num_prompt, max_tokens, num_speculative, num_lookahead, max_model_len
    )
    num_known = num_prompt + max_tokens - 1
    num_drafts = num_speculative if num_known > num_prompt else 0
    num_new = min(1 + num_drafts, max_model_len - 1 - (num_known - 1))
    last = compute_num_slots(num_known - 1, num_new, num_lookahead, max_model_len)
    assert last == longest
    return True


@ROOM.law(
    "P11",
    witness=(5, 16, 64, 10, 20, 12),
    twins=(
        instead_in(Config, "num_usable_blocks", property(null_block_counts_as_usable)),
        instead(is_servable, whole_pool_holds_the_model_length, theirs="#52520"),
    ),
)
def check_accepted_request_alone_in_the_pool_always_gets_its_blocks(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    num_prompt: int,
    max_tokens: int,
    num_computed: int,
) -> bool:
    """The null block belongs to nobody: one block fewer than there are."""
    assert 2 <= num_blocks and 1 <= block_size and 2 <= max_model_len
    assert 1 <= num_prompt < max_model_len and 1 <= max_tokens
    assert 0 <= num_computed < num_prompt + max_tokens - 1 and num_computed < max_model_len - 1
    config = Config(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
    accepted = is_servable(config, Request("a", Tokens(num_prompt), max_tokens=max_tokens))
    num_slots = compute_num_slots(num_computed, 1, 0, max_model_len)
    needed = compute_num_new_blocks(num_slots, block_size, 0)
    assert not accepted or needed <= num_blocks - 1
    return True


# Hits.


@ROOM.law(
    "P5",
    "P12",
    witness=(33, 16),
    twins=(
        instead(
            compute_max_hit_blocks,
            full_hit_leaves_nothing_to_compute,
            theirs="#30320 (hits of a connector)",
        ),
        instead(compute_max_hit_blocks, hit_stops_a_block_early),
    ),
)
def check_longest_hit_leaves_a_token_and_no_block_more(num_known: int, block_size: int) -> bool:
    """One block more would leave nothing to sample from."""
    assert 1 <= num_known and 1 <= block_size
    num_blocks = compute_max_hit_blocks(num_known, block_size)
    assert 0 <= num_blocks * block_size < num_known
    assert (num_blocks + 1) * block_size >= num_known
    return True


# Allocation: 1 and 2 are held, the others are free; 3 may be hit, being free.

FREE: tuple[BlockId, ...] = (3, 4, 5, 6)


def build_small_pool(num_holders: int) -> Pool:
    """Seven blocks: the first real one has `num_holders`, the second one holder."""
    return build_pool((0, num_holders, 1, 0, 0, 0, 0), FREE, published=(1, 3))


def build_small_config(block_size: int) -> Config:
    """Without caching: hits are handed in, and keys decide nothing here."""
    return Config(num_blocks=7, block_size=block_size, enable_prefix_caching=False)


@ROOM.law(
    "P1",
    "P8",
    "P15",
    witness=(20, 30, 16),
    twins=(
        instead(compute_num_blocks, last_partial_block_is_forgotten),
        instead(allocate_blocks, blocks_come_from_the_tail),
    ),
)
def check_running_request_is_granted_exactly_what_it_needs_from_the_head_of_the_queue(
    num_computed: int, num_new: int, block_size: int
) -> bool:
    """Refused only if the free blocks do not suffice."""
    assert 1 <= block_size and 0 <= num_computed <= 2 * block_size and 1 <= num_new
    assert num_computed + num_new < 8192
    request = RequestState(
        Request("a", (1,)),
        Status.RUNNING,
        num_computed_tokens=num_computed,
        holdings=(Holding((1, 2)),),
    )
    granted = allocate_slots(build_small_config(block_size), build_small_pool(1), request, num_new)
    num_missing = compute_num_new_blocks(num_computed + num_new, block_size, 2)
    assert (granted is None) == (num_computed + num_new > 6 * block_size)
    if granted is not None:
        pool, after = granted
        assert table_of(after) == (1, 2, *FREE[:num_missing])
        assert pool.free_queue == FREE[num_missing:]
        assert is_conserved(pool)
    return True


@ROOM.law(
    "P1",
    "P8",
    witness=(30, 16),
    twins=(
        instead(count_free, free_hits_cost_nothing),
        instead(count_needed_blocks, hits_are_credited_twice),
    ),
)
def check_hit_on_a_free_block_uses_up_a_free_block(num_new: int, block_size: int) -> bool:
    """The estimate counts it, and the allocation leaves it where it is."""
    assert 1 <= block_size and 1 <= num_new and block_size + num_new < 8192
    request = RequestState(Request("a", (1,)), Status.WAITING)
    granted = allocate_slots(
        build_small_config(block_size),
        build_small_pool(1),
        request,
        num_new,
        hit=Hit(block_size, ((3,),)),
    )
    num_missing = compute_num_new_blocks(num_new, block_size, 0)
    assert (granted is None) == (num_new > 3 * block_size)
    if granted is not None:
        pool, after = granted
        assert table_of(after) == (3, *FREE[1 : 1 + num_missing])
        assert pool.free_queue == FREE[1 + num_missing :]
        assert pool.ref_counts[3] == 1
    return True


@ROOM.law(
    "P1",
    "P8",
    "P15",
    witness=(30, 16, 2),
    twins=(instead(count_free, every_hit_costs_a_block),),
)
def check_hit_on_a_held_block_is_free_of_charge(
    num_new: int, block_size: int, num_holders: int
) -> bool:
    """However many hold it; they are one more then."""
    assert 1 <= block_size and 1 <= num_new and block_size + num_new < 8192 and 1 <= num_holders
    request = RequestState(Request("a", (1,)), Status.WAITING)
    granted = allocate_slots(
        build_small_config(block_size),
        build_small_pool(num_holders),
        request,
        num_new,
        hit=Hit(block_size, ((1,),)),
    )
    num_missing = compute_num_new_blocks(num_new, block_size, 0)
    assert (granted is None) == (num_new > 4 * block_size)
    if granted is not None:
        pool, after = granted
        assert table_of(after) == (1, *FREE[:num_missing])
        assert pool.free_queue == FREE[num_missing:]
        assert pool.ref_counts[1] == num_holders + 1
    return True
