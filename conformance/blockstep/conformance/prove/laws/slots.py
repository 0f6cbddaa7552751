"""Laws about token slots and the blocks that hold them.

PYTEST_DONT_REWRITE.

Block sizes are symbolic, so the laws hold for every block size.
"""

from __future__ import annotations

from blockstep.conformance.prove.harness import Tokens, build_config, build_runner
from blockstep.conformance.prove.host_states import COLUMNS, GROUPS, build_host
from blockstep.conformance.prove.law import LawModule, instead
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.core.slots import (
    compute_max_slots,
    compute_num_blocks,
    compute_num_new_blocks,
    compute_num_slots,
    is_servable,
)
from blockstep.spec.vocabulary import MAX_INT, Config, Request

ROOM = LawModule("slots")


# Mistakes.


@instead(compute_num_new_blocks)
def surplus_gives_a_negative_count(num_slots: int, block_size: int, num_held: int) -> int:
    """A request that holds too many blocks gives a negative count, which slices from the end."""
    return compute_num_blocks(num_slots, block_size) - num_held


@instead(is_servable, theirs="#52520")
def whole_pool_holds_the_model_length(config: Config) -> bool:
    """The check is done once, for the model length, with all blocks including the null block."""
    num_blocks = compute_num_blocks(config.max_model_len, config.block_size)
    return num_blocks <= config.num_blocks


# Blocks.


@ROOM.law("P8", (33, 16))
def check_blocks_are_the_fewest_that_hold_the_tokens(num_tokens: int, block_size: int) -> None:
    """One block fewer would not hold them."""
    assert 1 <= num_tokens and 1 <= block_size
    num_blocks = compute_num_blocks(num_tokens, block_size)
    assert num_tokens <= num_blocks * block_size < num_tokens + block_size


@ROOM.law("P8", (40, 16, 2), surplus_gives_a_negative_count)
def check_new_blocks_are_those_that_the_table_lacks(
    num_slots: int, block_size: int, num_held: int
) -> None:
    """The new blocks are just enough, and none is taken if the held ones suffice."""
    assert 0 <= num_slots and 1 <= block_size and 0 <= num_held
    num_new = compute_num_new_blocks(num_slots, block_size, num_held)
    assert num_new >= 0
    assert num_slots <= (num_held + num_new) * block_size
    assert num_new == 0 or num_slots > (num_held + num_new - 1) * block_size


@ROOM.law("P8", (20, 40, 16))
def check_growing_in_two_steps_takes_as_many_blocks_as_in_one(
    num_slots: int, num_slots_later: int, block_size: int
) -> None:
    """A chunk continues in the block in which the previous one ended."""
    assert 1 <= num_slots <= num_slots_later and 1 <= block_size
    first = compute_num_new_blocks(num_slots, block_size, 0)
    second = compute_num_new_blocks(num_slots_later, block_size, first)
    assert first + second == compute_num_blocks(num_slots_later, block_size)


# Token slots.


@ROOM.law("P2 P8", (10, 5, 3, 100))
def check_slots_cover_the_scheduled_tokens_and_the_lookahead(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> None:
    """Every position that the step writes has a slot below the model length."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_lookahead
    assert num_computed + num_new <= max_model_len - 1
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, max_model_len)
    assert num_slots >= num_computed + num_new
    assert num_slots == num_computed + num_new + num_lookahead or num_slots == max_model_len


@ROOM.law("P9", (10, 5, 3, 100))
def check_no_slot_lies_past_the_model_length(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> None:
    """A worker's block table has a fixed width."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_lookahead and 2 <= max_model_len
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, max_model_len)
    assert num_slots <= max_model_len


# The most slots that a request can need.


@ROOM.law("P11", (10, 20, 3, 12, 3, 2, 4, 4, 100))
def check_no_step_needs_more_slots_than_the_maximum(
    num_prompt: int,
    max_tokens: int,
    num_outputs: int,
    num_computed: int,
    num_new: int,
    num_drafts: int,
    num_speculative: int,
    num_lookahead: int,
    max_model_len: int,
) -> None:
    """An accepted request therefore always fits an empty pool, with its drafts and lookahead."""
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


@ROOM.law("P11", (10, 20, 3, 3, 100))
def check_some_step_needs_the_maximum_of_slots(
    num_prompt: int, max_tokens: int, num_speculative: int, num_lookahead: int, max_model_len: int
) -> None:
    """It is the last step, with all drafts: no request is rejected that would fit."""
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


@ROOM.law("P11", (5, 16, 64, 10, 20, 12), whole_pool_holds_the_model_length)
def check_accepted_request_alone_in_the_pool_always_gets_its_blocks(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    num_prompt: int,
    max_tokens: int,
    num_computed: int,
) -> None:
    """The null block is not usable, so one block fewer is available."""
    assert 2 <= num_blocks and 1 <= block_size and 2 <= max_model_len
    assert 1 <= num_prompt < max_model_len and 1 <= max_tokens
    assert 0 <= num_computed < num_prompt + max_tokens - 1 and num_computed < max_model_len - 1
    config = Config(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
    accepted = is_servable(
        config, Request("a", Tokens(num_prompt), max_tokens=max_tokens), STRICT_RULES
    )
    num_slots = compute_num_slots(num_computed, 1, 0, max_model_len)
    needed = compute_num_new_blocks(num_slots, block_size, 0)
    assert not accepted or needed <= num_blocks - 1


# The engine.


@ROOM.law("P8 P9", (20, 15, 16, 100))
def check_engine_counts_the_same_blocks_for_a_running_request(
    num_computed: int, num_new: int, block_size: int, max_model_len: int
) -> None:
    """The request holds two blocks; there are two lookahead slots."""
    assert 1 <= block_size <= MAX_INT and 2 <= max_model_len <= MAX_INT
    assert 0 <= num_computed and 1 <= num_new and num_computed + num_new < max_model_len
    config = build_config(block_size, max_model_len, num_speculative_tokens=2)
    host = build_host(config, build_runner("a", 1, num_computed, (1, 2)))
    num_slots = compute_num_slots(num_computed, num_new, 2, max_model_len)
    due = compute_num_new_blocks(num_slots, block_size, 2)
    assert GROUPS.count_needed(host, 0, num_new) == due


@ROOM.law("P8", (40, 1, 16))
def check_engine_counts_the_same_blocks_for_a_new_request(
    num_tokens: int, num_hits: int, block_size: int
) -> None:
    """The blocks of its hit are as good as held."""
    assert 1 <= block_size <= MAX_INT and 1 <= num_tokens and 0 <= num_hits
    host = build_host(build_config(block_size))
    needed = GROUPS.count_missing(host, 0, num_hits, 0, num_tokens, num_tokens, 0)
    assert needed == compute_num_new_blocks(num_tokens, block_size, num_hits)


@ROOM.law("P11", (40, 16))
def check_engine_rejects_the_same_requests_for_their_size(num_slots: int, block_size: int) -> None:
    """A request holds the blocks of all its slots at once."""
    assert 1 <= num_slots <= MAX_INT and 1 <= block_size <= MAX_INT
    host = build_host(build_config(block_size))
    most = COLUMNS.count_most_blocks(host.groups, num_slots, 0)
    assert most == compute_num_blocks(num_slots, block_size)
