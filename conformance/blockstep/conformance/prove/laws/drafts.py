"""Drafts: what is scheduled past the known tokens, and taken back. PYTEST_DONT_REWRITE.

A step of a request that samples: known tokens k, drafts d among n scheduled, s sampled.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove.harness import build_runner
from blockstep.conformance.prove.law import Room, instead
from blockstep.spec.lives.commit import count_drafts, get_rolled_back
from blockstep.spec.lives.drafts import compute_num_rejected, is_accepted_prefix
from blockstep.spec.memory.slots import (
    compute_num_new_blocks,
    compute_num_publishable_blocks,
    compute_num_slots,
)
from blockstep.spec.requests import RequestState
from blockstep.spec.step.share import compute_num_drafts, compute_share
from blockstep.spec.vocabulary import Stats, Status, TokenIds

ROOM = Room("drafts")
_is_accepted_prefix = is_accepted_prefix  # its twin calls the right one


# Mistakes.


def prefill_chunk_has_minus_one_draft(num_computed: int, num_scheduled: int, num_known: int) -> int:
    """Not cut at zero: a slice with it drops the last draft instead of taking none."""
    return num_computed + num_scheduled - num_known


def every_token_after_the_first_is_a_draft(
    num_computed: int, num_scheduled: int, num_known: int
) -> int:
    """As if a request always had one known token left to compute."""
    return max(num_scheduled - 1, 0)


def own_token_counts_as_accepted(num_drafts: int, num_sampled: int) -> int:
    """The worker's own token is taken for an accepted draft."""
    return num_drafts - num_sampled


def rejected_is_what_was_sampled(num_drafts: int, num_sampled: int) -> int:
    """Accepted and rejected are mixed up."""
    return min(num_sampled - 1, num_drafts)


def preempted_request_is_rolled_back_below_zero(
    request: RequestState, num_drafts: int, num_sampled: int
) -> RequestState:
    """The answer of a frame is applied to a request that lost its computed tokens meanwhile."""
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    return replace(request, num_computed_tokens=request.num_computed_tokens - num_rejected)


def drafts_are_published_too(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """Whatever is scheduled counts, although the drafts in it may be rejected."""
    return (num_computed + num_new) // block_size


def surplus_gives_a_negative_count(num_slots: int, block_size: int, num_held: int) -> int:
    """After a rejection a request may hold more than enough."""
    return -(-num_slots // block_size) - num_held


def any_tokens_may_be_accepted(sampled: TokenIds, drafts: TokenIds) -> bool:
    """Only their number is looked at."""
    return 1 <= len(sampled) <= len(drafts) + 1


def own_token_must_be_a_draft_as_well(sampled: TokenIds, drafts: TokenIds) -> bool:
    """The last sampled token is compared, too."""
    return _is_accepted_prefix((*sampled, 0), drafts)


def row_without_drafts_counts_as_one(stats: Stats, num_drafts: int, num_sampled: int) -> Stats:
    """The worker's own token counts as an accepted draft."""
    return Stats(
        drafts_scheduled=stats.drafts_scheduled + num_drafts,
        drafts_accepted=stats.drafts_accepted + num_sampled,
    )


# Scheduling drafts.


@ROOM.law(
    "P12",
    "P24",
    witness=(20, 3, 19, 2, 100),
    twins=(
        instead(compute_num_drafts, prefill_chunk_has_minus_one_draft),
        instead(compute_num_drafts, every_token_after_the_first_is_a_draft),
    ),
)
def check_dispatched_drafts_are_some_of_the_attached_ones(
    num_known: int, num_attached: int, num_computed: int, budget: int, max_model_len: int
) -> bool:
    """None is made up, and a prefill chunk carries none."""
    assert 0 <= num_computed < num_known < max_model_len and 0 <= num_attached and 1 <= budget
    num_new = compute_share(num_known + num_attached, num_computed, 0, budget, max_model_len - 1)
    num_drafts = compute_num_drafts(num_computed, num_new, num_known)
    assert 0 <= num_drafts <= num_attached
    assert num_computed + num_new >= num_known or num_drafts == 0
    return True


@ROOM.law(
    "P12",
    witness=(19, 3, 20),
    twins=(instead(compute_num_drafts, every_token_after_the_first_is_a_draft),),
)
def check_budget_cuts_drafts_before_known_tokens(
    num_computed: int, num_scheduled: int, num_known: int
) -> bool:
    """What is left without the drafts are known tokens, from the first one on."""
    assert 0 <= num_computed < num_known and 1 <= num_scheduled
    num_drafts = compute_num_drafts(num_computed, num_scheduled, num_known)
    assert num_computed + num_scheduled - num_drafts == min(num_computed + num_scheduled, num_known)
    return True


# Taking back what was rejected.


@ROOM.law(
    "P14",
    witness=(20, 4, 2),
    twins=(
        instead(compute_num_rejected, own_token_counts_as_accepted),
        instead(compute_num_rejected, rejected_is_what_was_sampled),
    ),
)
def check_sampling_leaves_exactly_the_last_token_to_compute(
    num_known: int, num_drafts: int, num_sampled: int
) -> bool:
    """However many drafts were rejected."""
    assert 1 <= num_known and 0 <= num_drafts and 1 <= num_sampled <= num_drafts + 1
    before = build_runner("a", num_known, num_known + num_drafts)
    after = get_rolled_back(before, num_drafts, num_sampled)
    assert after.num_computed_tokens == num_known + num_sampled - 1
    return True


@ROOM.law(
    "P14",
    witness=(20, 4, 2),
    twins=(instead(compute_num_rejected, own_token_counts_as_accepted),),
)
def check_rejected_drafts_might_as_well_never_have_been_scheduled(
    num_known: int, num_drafts: int, num_accepted: int
) -> bool:
    """The same counters as after a step with the accepted drafts only."""
    assert 1 <= num_known and 0 <= num_accepted <= num_drafts
    scheduled = build_runner("a", num_known, num_known + num_drafts)
    without = build_runner("a", num_known, num_known + num_accepted)
    after = get_rolled_back(scheduled, num_drafts, num_accepted + 1)
    assert after == get_rolled_back(without, num_accepted, num_accepted + 1)
    assert after.num_computed_tokens == without.num_computed_tokens
    return True


@ROOM.law(
    "P12",
    "P14",
    witness=(20, 4, 2),
    twins=(instead(get_rolled_back, preempted_request_is_rolled_back_below_zero),),
)
def check_preempted_request_has_nothing_to_roll_back(
    num_known: int, num_drafts: int, num_sampled: int
) -> bool:
    """Its frame was in flight when it lost its computed tokens."""
    assert 1 <= num_known and 0 <= num_drafts and 1 <= num_sampled <= num_drafts + 1
    before = replace(build_runner("a", num_known, 0), status=Status.PREEMPTED)
    after = get_rolled_back(before, num_drafts, num_sampled)
    assert after.num_computed_tokens == 0
    return True


@ROOM.law(
    "P4",
    "P14",
    witness=(16, 8, 20, 4, 16),
    twins=(instead(compute_num_publishable_blocks, drafts_are_published_too),),
)
def check_what_a_step_publishes_stays_computed_after_any_rejection(
    num_computed: int, num_scheduled: int, num_known: int, num_sampled: int, block_size: int
) -> bool:
    """So no key has to be withdrawn when the answer comes."""
    assert 0 <= num_computed < num_known and 1 <= block_size
    assert num_known <= num_computed + num_scheduled
    assert 1 <= num_sampled <= num_computed + num_scheduled - num_known + 1
    num_full = compute_num_publishable_blocks(num_computed, num_scheduled, num_known, block_size)
    num_drafts = compute_num_drafts(num_computed, num_scheduled, num_known)
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    assert num_full * block_size <= num_computed + num_scheduled - num_rejected
    return True


@ROOM.law(
    "P8",
    "P14",
    witness=(20, 4, 2, 1, 100, 16),
    twins=(instead(compute_num_new_blocks, surplus_gives_a_negative_count),),
)
def check_blocks_of_rejected_drafts_serve_the_next_step(
    num_known: int,
    num_drafts: int,
    num_sampled: int,
    num_new: int,
    max_model_len: int,
    block_size: int,
) -> bool:
    """Nothing is given back or taken twice: new blocks are what the longer table lacks."""
    assert 1 <= block_size and 1 <= num_known and 0 <= num_drafts
    assert 1 <= num_sampled <= num_drafts + 1 and 1 <= num_new
    assert num_known + num_drafts < max_model_len
    assert num_known + num_sampled - 1 + num_new < max_model_len
    held = compute_num_new_blocks(num_known + num_drafts, block_size, 0)
    num_computed = num_known + num_drafts - compute_num_rejected(num_drafts, num_sampled)
    num_slots = compute_num_slots(num_computed, num_new, 0, max_model_len)
    taken = compute_num_new_blocks(num_slots, block_size, held)
    assert taken >= 0
    assert taken == 0 or (held + taken - 1) * block_size < num_slots <= (held + taken) * block_size
    return True


# The worker's answer.


@ROOM.law(
    "P3",
    "P13",
    witness=(7, 8, 9, 7, 8, 5),
    twins=(
        instead(is_accepted_prefix, any_tokens_may_be_accepted),
        instead(is_accepted_prefix, own_token_must_be_a_draft_as_well),
    ),
)
def check_two_drafts_are_accepted_only_as_they_were_proposed(
    first_draft: int, second_draft: int, third_draft: int, first: int, second: int, own: int
) -> bool:
    """Two of three accepted and a token of the worker's own, whatever that one is."""
    assert 0 <= first_draft and 0 <= second_draft and 0 <= third_draft
    assert 0 <= first and 0 <= second and 0 <= own
    drafts = (first_draft, second_draft, third_draft)
    is_accepted = is_accepted_prefix((first, second, own), drafts)
    assert is_accepted == (first == first_draft and second == second_draft)
    return True


@ROOM.law(
    "P21",
    witness=(10, 6, 4, 2),
    twins=(instead(count_drafts, row_without_drafts_counts_as_one),),
)
def check_accepted_drafts_never_outnumber_scheduled_ones(
    num_scheduled: int, num_accepted: int, num_drafts: int, num_sampled: int
) -> bool:
    """The worker's own token is no accepted draft."""
    assert 0 <= num_accepted <= num_scheduled
    assert 0 <= num_drafts and 1 <= num_sampled <= num_drafts + 1
    before = Stats(drafts_scheduled=num_scheduled, drafts_accepted=num_accepted)
    after = count_drafts(before, num_drafts, num_sampled)
    assert after.drafts_scheduled == num_scheduled + num_drafts
    assert after.drafts_accepted == num_accepted + num_sampled - 1
    assert after.drafts_accepted <= after.drafts_scheduled
    return True
