"""Laws about loads: their length, failed blocks and publishing. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.admission import process_waiting_phase
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.core.work import Step
from blockstep.spec.features.kv_transfer import publish_loaded
from blockstep.spec.features.kv_transfer.transfers import (
    NO_STORE,
    TRANSFERS,
    Transfers,
    compute_num_external,
    compute_num_valid,
    end_transfer,
    take_offer,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.releases.transfers import (
    compute_num_loaded,
    loads_are_published_before_they_are_loaded,
)
from blockstep.spec.vocabulary import (
    BlockTables,
    GroupKind,
    HeldBlocks,
    KVGroup,
    KVOffer,
    RequestId,
    Status,
)

ROOM = LawModule("transfers")


# Mistakes.


@instead(compute_num_external, theirs="0.19.1")
def last_token_is_loaded(right: Right[int], num_known: int) -> int:
    """All known tokens are loaded, so no token is left to sample from."""
    return right(num_known=num_known + 1)


@instead(compute_num_loaded, theirs="0.19.1")
def longer_hit_takes_a_negative_amount(group: KVGroup, num_tokens: int, num_found: int) -> int:
    """The count is negative if the hit is longer than the load; the free blocks then grow by it."""
    return -(-num_tokens // group.block_size) - num_found


@instead(compute_num_valid, theirs="0.19.1")
def hit_may_have_failed(right: Right[int | None], firsts: Sequence[int]) -> int | None:
    """Blocks of the hit, which were not loaded, are checked, too."""
    return right(firsts=[0 for _ in firsts])


@instead(compute_num_valid, theirs="0.19.1")
def first_group_speaks_for_all(
    right: Right[int | None], tables: BlockTables, firsts: Sequence[int], block_sizes: Sequence[int]
) -> int | None:
    """Only the first group's blocks are checked."""
    return right(tables=tables[:1], firsts=firsts[:1], block_sizes=block_sizes[:1])


@instead(end_transfer, theirs="0.19.1")
def any_end_ends_all_holds(
    transfers: Transfers, request_id: RequestId
) -> tuple[Transfers, BlockTables]:
    """The end of one transfer frees blocks that another still uses."""
    entry = transfers.held[request_id]
    return replace(transfers, held=transfers.held.without(request_id)), entry.block_tables


@instead(process_waiting_phase, theirs="0.19.1")
def loads_are_findable_at_once(right: Right[None], step: Step) -> None:
    """Blocks are published in the step that starts their load."""
    before = step.state
    step.state = replace(
        before, rules=loads_are_published_before_they_are_loaded(before.rules, before.config)
    )
    right()
    step.state = before


# Laws.


@ROOM.law("P13", (20, 10, 4, 0), last_token_is_loaded)
def check_load_leaves_a_token_to_compute(
    num_offered: int, num_known: int, num_local: int, is_async: int
) -> None:
    """The local hit leaves a token to compute, and so does a load after it, now or later."""
    assert 0 <= num_offered and 0 <= num_local < num_known and 0 <= is_async <= 1
    offer = KVOffer("a", num_offered, is_async == 1)
    num_external = compute_num_external(offer, num_known, num_local)
    assert num_local + num_external < num_known


@ROOM.law("P5", (3, 10, 4))
def check_store_extends_the_hit_by_all_blocks_it_has(
    num_offered: int, num_known: int, num_local: int
) -> None:
    """It is never shorter."""
    assert 0 <= num_offered and 0 <= num_local < num_known
    num_start = num_local + compute_num_external(KVOffer("a", num_offered), num_known, num_local)
    assert num_start == max(num_local, min(num_offered, num_known - 1))


@ROOM.law("P1 P8", (4, 9, 1), longer_hit_takes_a_negative_amount)
def check_group_that_loads_in_turn_takes_no_negative_number_of_blocks(
    block_size: int, num_tokens: int, num_found: int
) -> None:
    """This is for the quirk `external_blocks_per_group`: a hit longer than the load takes no
    block."""
    assert 1 <= block_size and 0 <= num_tokens and 0 <= num_found
    group = KVGroup(GroupKind.FULL, block_size)
    num_loaded = compute_num_loaded(group, num_tokens, num_found)
    assert num_loaded >= 0
    num_held = num_found + num_loaded
    assert num_held * block_size >= num_tokens
    assert num_loaded == 0 or (num_held - 1) * block_size < num_tokens


@ROOM.law("P19", (16, 1, 2), hit_may_have_failed)
def check_load_counts_up_to_its_first_invalid_block(
    block_size: int, first: int, index: int
) -> None:
    """Blocks from `first` on are loaded, and the one at `index` is invalid."""
    assert 1 <= block_size and 0 <= first <= 3 and 0 <= index <= 2
    num_valid = compute_num_valid(((1, 2, 3),), (first,), (block_size,), (index + 1,))
    assert num_valid == (index * block_size if index >= first else None)


@ROOM.law("P5 P19", (8, 16, 1, 0), first_group_speaks_for_all)
def check_no_group_counts_tokens_that_another_lacks(
    one_size: int, other_size: int, one_index: int, other_index: int
) -> None:
    """One block in each of two groups is invalid."""
    assert 1 <= one_size and 1 <= other_size and 0 <= one_index <= 1 and 0 <= other_index <= 1
    invalid = (1 + one_index, 3 + other_index)
    num_valid = compute_num_valid(((1, 2), (3, 4)), (0, 0), (one_size, other_size), invalid)
    assert num_valid is not None
    assert num_valid <= one_index * one_size
    assert num_valid <= other_index * other_size
    assert num_valid in (one_index * one_size, other_index * other_size)


@ROOM.law("P4 P19", (40, 20, 16))
def check_only_full_loaded_blocks_are_cached(
    num_known: int, num_there: int, block_size: int
) -> None:
    """All of the full blocks are cached; three blocks are held."""
    assert 1 <= block_size and 0 <= num_there < num_known <= 3 * block_size
    pool = h.build_pool((0, 1, 1, 1), (), ())
    keys = tuple(map(h.key_of, (1, 2, 3)))
    request = h.build_runner("a", num_known, num_there, (1, 2, 3))
    request = replace(request, block_keys=keys, has_unconfirmed_kv=True)
    config = h.build_config(block_size, num_blocks=4, enable_prefix_caching=True)
    pool, after = publish_loaded(config, pool, request, num_there, STRICT_RULES)
    (holding,) = after.holdings
    num_settled = holding.num_cached_blocks
    assert num_settled * block_size <= num_there < (num_settled + 1) * block_size
    assert len(pool.cached) == num_settled
    assert not after.has_unconfirmed_kv


@ROOM.law("P17", (1, 1, 0), any_end_ends_all_holds)
def check_blocks_are_held_until_their_last_transfer_ends(
    is_recving: int, is_sending: int, is_of_load: int
) -> None:
    """One or two directions hold the blocks, and the end of one of them is reported."""
    assert 0 <= is_recving <= 1 and 0 <= is_sending <= 1 and 0 <= is_of_load <= 1
    assert is_recving + is_sending >= 1
    entry = HeldBlocks("a", ((1, 2),), is_recving == 1, is_sending == 1)
    before = replace(NO_STORE, held=FrozenMap({"a": entry}))
    after, tables = end_transfer(before, "a", is_of_load == 1)
    is_left = is_sending if is_of_load else is_recving
    assert ("a" in after.held) == (is_left == 1)
    assert tables == (() if is_left else ((1, 2),))


@ROOM.law("P4 P19", (33, 20, 16), loads_are_findable_at_once)
def check_load_is_not_cached_before_it_is_confirmed(
    num_known: int, num_offered: int, block_size: int
) -> None:
    """Tokens that the same step computes after the load are not cached either."""
    assert 1 <= block_size and 2 <= num_known <= 3 * block_size and 1 <= num_offered
    assert num_known < 8000
    config = h.build_config(block_size, num_blocks=4, enable_prefix_caching=True, kv_connector=True)
    config = replace(config, max_num_batched_tokens=8192)
    keys = tuple(map(h.key_of, (1, 2, 3)))[: num_known // block_size]
    asked = replace(h.build_request("a", num_known), block_keys=keys)
    state = h.build_state(config, (), (asked,))
    state = TRANSFERS.put(state, take_offer(NO_STORE, KVOffer("a", num_offered)))
    after, plan = h.schedule(state)
    (load,) = plan.kv_loads
    assert load.num_external_tokens == min(num_offered, num_known - 1)
    assert after.requests["a"].num_computed_tokens == num_known
    assert len(after.pool.cached) == 0


@ROOM.law("P9 P15", (5, 9, 4))
def check_loading_request_takes_no_tokens_from_others(
    num_offered: int, num_known: int, budget: int
) -> None:
    """The second request in the queue gets the only running slot, and the whole budget."""
    assert 1 <= num_offered < 4000 and 1 <= num_known < 4000 and 1 <= budget
    config = h.build_config(4096, max_num_batched_tokens=budget, max_num_seqs=1, kv_connector=True)
    waiting = (h.build_request("a", 4000), h.build_request("b", num_known))
    state = h.build_state(config, (), waiting)
    offer = KVOffer("a", num_offered, is_async=True)
    after, plan = h.schedule(TRANSFERS.put(state, take_offer(NO_STORE, offer)))
    assert after.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS
    assert after.running == ("b",)
    assert plan.total_num_scheduled_tokens == min(num_known, budget)
