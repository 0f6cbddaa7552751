"""Seeded bugs in the block pool and the prefix-cache map."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.admission import get_verdict
from blockstep.spec.core.async_ import publish_verified
from blockstep.spec.core.block_pool import (
    Pool,
    allocate_blocks,
    free_blocks,
    get_num_free_blocks,
    touch_blocks,
    withdraw_all,
    withdraw_blocks,
)
from blockstep.spec.core.lifecycle import process_abort
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import (
    NOTHING_HELD,
    Hit,
    Holding,
    RequestState,
    without_nulls,
)
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import (
    Growth,
    allocate_slots,
    compute_max_blocks,
    compute_num_blocks,
    count_taken,
    publish_slots,
    revoke_slots,
    take_blocks,
)
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import Aborted, BlockId, Config, KVGroup, RequestId

PAGE = Page()
LISTINGS = Page()
"""Seeded bugs from the block manager's listings that fit no other page."""


def get_shared(pool: Pool, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
    """Return those of some blocks that are held."""
    return tuple([block_id for block_id in block_ids if pool.ref_counts[block_id] > 0])


@PAGE.exhibit(
    "a block table is freed from its head",
    "llm-d-inference-sim #704; prefix caching by example, section 2.2",
    "P16",
    invisible="policy: which free block is evicted first",
)
@instead(free_blocks)
def forward_frees(right: Right[Pool], block_table: Sequence[BlockId]) -> Pool:
    """The first block of a prompt is evicted first, and with it every hit on the rest."""
    return right(block_table=block_table[::-1])


@PAGE.exhibit("a touched block stays in the free queue", "TensorRT-LLM #12667", "P1 P2")
@instead(touch_blocks)
def touch_leaves_block_queued(right: Right[Pool], pool: Pool) -> Pool:
    """A block in use is allocated again."""
    return replace(right(), free_queue=pool.free_queue)


@PAGE.exhibit(
    "a reused block keeps its old key in the prefix cache",
    "SGLang #27586",
    "P3 P4",
)
@instead(allocate_blocks)
def stale_key_after_reuse(
    right: Right[tuple[Pool, tuple[BlockId, ...]]], pool: Pool
) -> tuple[Pool, tuple[BlockId, ...]]:
    """A hit returns a block that another request has overwritten."""
    after, taken = right()
    kept = replace(after, block_keys=pool.block_keys, cached=pool.cached, journal=pool.journal)
    return kept, taken


@PAGE.exhibit("an aborted request keeps its blocks", "#46283", "P1")
@instead(process_abort)
def leak_on_abort(
    right: Right[tuple[State, Aborted]], state: State, request_ids: tuple[RequestId, ...]
) -> tuple[State, Aborted]:
    """Each abort leaks the blocks of its request."""
    requests = state.requests.to_dict()
    for request_id in requests.keys() & set(request_ids):
        held = NOTHING_HELD * len(requests[request_id].holdings)
        requests[request_id] = replace(requests[request_id], holdings=held)
    return right(state=replace(state, requests=FrozenMap(requests)))


@PAGE.exhibit("the null block counts as usable", "#52520, #39734", "P11 P10")
@instead(compute_max_blocks)
def null_block_counted(right: Right[int]) -> int:
    """A request is accepted that never fits the pool."""
    return right() - 1


@PAGE.exhibit("a reset does not clear the prefix cache", "vLLM V1: Reset Prefix Cache", "P25")
def reset_keeps_keys(rules: Rules, _config: Config) -> Rules:
    """KV of the old weights is hit after the weights changed."""
    return rules.replacing(withdraw_all, lambda pool: pool)


@PAGE.exhibit("new blocks are taken before hit blocks are touched", "#33775, #44409", "P2 P1 P8")
@instead(take_blocks)
def take_before_touch(
    right: Right[tuple[Pool, list[Holding], list[tuple[BlockId, ...]]]], pool: Pool, hit: Hit
) -> tuple[Pool, list[Holding], list[tuple[BlockId, ...]]]:
    """A hit at the head of the free queue becomes a new block of the same request as well."""
    untouched = replace(hit, block_tables=())
    pool, owned, taken = right(hit=untouched)
    for found in hit.block_tables:
        pool = touch_blocks(pool, without_nulls(found))
    return pool, owned, taken


@PAGE.exhibit("blocks of rejected drafts are freed twice", "SGLang #12224", "P1 P12")
def tail_freed_twice(rules: Rules, _config: Config) -> Rules:
    """The rollback frees blocks of rejected drafts, and the end of the request frees them again."""

    def publish(state: State, pool: Pool, request: RequestState) -> tuple[Pool, RequestState]:
        pool, request = rules[publish_verified](state, pool, request)
        num_used = compute_num_blocks(request.num_computed_tokens, state.config.block_size)
        for table in request.block_tables:
            pool = rules[free_blocks](pool, table[num_used:])
        return pool, request

    return rules.replacing(publish_verified, publish)


@PAGE.exhibit(
    "freeing a shared block counts it as free while others hold it",
    "SGLang #35270",
    "P8 P25 P15 P1",
)
@instead(free_blocks)
def shared_blocks_counted_free(
    right: Right[Pool], pool: Pool, block_table: Sequence[BlockId]
) -> Pool:
    """The block joins the free queue with each holder that frees it."""
    pool = right()
    return replace(pool, free_queue=pool.free_queue + get_shared(pool, block_table))


@PAGE.exhibit(
    "blocks that stay with other holders count as freed by a preemption", "xLLM #55", "P8 P1 P15"
)
@instead(revoke_slots)
def passed_over_blocks_counted(right: Right[Pool], pool: Pool, request: RequestState) -> Pool:
    """Too few requests are preempted, since the victim's shared blocks do not become free."""
    pool = right()
    shared = get_shared(pool, sum(request.block_tables, ()))
    return replace(pool, free_queue=pool.free_queue + shared)


@PAGE.exhibit(
    "publishing a block evicts the first block of the same request",
    "TensorRT-LLM #17926",
    "P3 P15",
    invisible="efficiency: a later hit is lost",
)
@instead(publish_slots)
def publisher_evicts_itself(
    right: Right[tuple[Pool, RequestState]], pool: Pool, request: RequestState
) -> tuple[Pool, RequestState]:
    """A full pool makes room for the new entry without protecting the publishing request."""
    pool, after = right()
    if after is not request and get_num_free_blocks(pool) == 0:
        pool = withdraw_blocks(pool, after.block_tables[0][:1])
    return pool, after


Granted = tuple[Pool, RequestState] | None


@LISTINGS.exhibit(
    "a partly filled last block is not allocated if full blocks are computed, too",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P26 P8",
)
@instead(count_taken)
def tail_block_left_out(
    right: Right[int], group: KVGroup, growth: Growth, num_held: int, num_hit: int
) -> int:
    """The tail is allocated only if all full blocks of the request were hit."""
    num_taken = right()
    num_full, num_rest = divmod(growth.num_slots, group.block_size)
    is_left_out = num_held == 0 and num_rest > 0 and num_full != num_hit
    return num_taken - is_left_out


@LISTINGS.exhibit(
    "a block is published when it is allocated",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P4 P3",
)
@instead(allocate_slots)
def published_as_it_is_taken(right: Right[Granted], config: Config, rules: Rules) -> Granted:
    """A chunk may end within the block, so the next request hits slots that are not computed."""
    granted = right()
    if granted is None or not config.enable_prefix_caching:
        return granted
    pool, request = granted
    num_full = request.num_known_tokens // config.block_size
    nums_full = [min(num_full, len(table)) for table in request.block_tables]
    return publish_slots(config, pool, request, nums_full, rules)


_SKIPS_NEXT = Note("skips_next", False)


@LISTINGS.exhibit(
    "every second waiting request is skipped",
    "the block manager: in the Scheduling Loop, breaks its rule",
    "P16 P15",
    invisible="policy: which request is admitted first",
)
@instead(get_verdict)
def every_second_is_passed_over(right: Right[Verdict], step: Step) -> Verdict:
    """The queue is shortened during an iteration over it."""
    skips, verdict = _SKIPS_NEXT.of(step), Verdict.PASSED_OVER
    if not skips:
        verdict = right()
    _SKIPS_NEXT.set(step, verdict is Verdict.ADMITTED)
    return verdict
