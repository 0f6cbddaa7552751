"""Seeded bugs in the block pool and the prefix-cache map."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.museum.exhibit import Page
from blockstep.spec.copies import replace
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
from blockstep.spec.core.requests import (
    NOTHING_HELD,
    Hit,
    Holding,
    RequestState,
    without_nulls,
)
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import (
    compute_max_blocks,
    compute_num_blocks,
    publish_slots,
    revoke_slots,
    take_blocks,
)
from blockstep.spec.core.state import State
from blockstep.spec.maps import FrozenMap
from blockstep.spec.vocabulary import Aborted, BlockId, Config, FrameId, RequestId

PAGE = Page()


def get_shared(pool: Pool, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
    """Return those of some blocks that are held."""
    return tuple([block_id for block_id in block_ids if pool.ref_counts[block_id] > 0])


@PAGE.exhibit(
    "a block table is freed from its head",
    "llm-d-inference-sim #704; prefix caching by example, section 2.2",
    "P16",
    invisible="policy: which free block is evicted first",
)
def forward_frees(rules: Rules, _config: Config) -> Rules:
    """The first block of a prompt is evicted first, and with it every hit on the rest."""
    free = rules[free_blocks]
    return rules.replacing(free_blocks, lambda pool, table: free(pool, table[::-1]))


@PAGE.exhibit("a touched block stays in the free queue", "TensorRT-LLM #12667", "P1 P2")
def touch_leaves_block_queued(rules: Rules, _config: Config) -> Rules:
    """A block in use is allocated again."""

    def touch(pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
        return replace(rules[touch_blocks](pool, block_ids), free_queue=pool.free_queue)

    return rules.replacing(touch_blocks, touch)


@PAGE.exhibit(
    "a reused block keeps its old key in the prefix cache",
    "SGLang #27586",
    "P3 P4",
)
def stale_key_after_reuse(rules: Rules, _config: Config) -> Rules:
    """A hit returns a block that another request has overwritten."""

    def allocate(pool: Pool, num_blocks: int) -> tuple[Pool, tuple[BlockId, ...]]:
        after, taken = rules[allocate_blocks](pool, num_blocks)
        kept = replace(after, block_keys=pool.block_keys, cached=pool.cached, journal=pool.journal)
        return kept, taken

    return rules.replacing(allocate_blocks, allocate)


@PAGE.exhibit("an aborted request keeps its blocks", "#46283", "P1")
def leak_on_abort(rules: Rules, _config: Config) -> Rules:
    """Each abort leaks the blocks of its request."""

    def abort(state: State, request_ids: tuple[RequestId, ...]) -> tuple[State, Aborted]:
        requests = state.requests.to_dict()
        for request_id in requests.keys() & set(request_ids):
            held = NOTHING_HELD * len(requests[request_id].holdings)
            requests[request_id] = replace(requests[request_id], holdings=held)
        return rules[process_abort](replace(state, requests=FrozenMap(requests)), request_ids)

    return rules.replacing(process_abort, abort)


@PAGE.exhibit("the null block counts as usable", "#52520, #39734", "P11 P10")
def null_block_counted(rules: Rules, _config: Config) -> Rules:
    """A request is accepted that never fits the pool."""
    count = rules[compute_max_blocks]
    return rules.replacing(
        compute_max_blocks, lambda config, request, rules: count(config, request, rules) - 1
    )


@PAGE.exhibit("a reset does not clear the prefix cache", "vLLM V1: Reset Prefix Cache", "P25")
def reset_keeps_keys(rules: Rules, _config: Config) -> Rules:
    """KV of the old weights is hit after the weights changed."""
    return rules.replacing(withdraw_all, lambda pool: pool)


@PAGE.exhibit("new blocks are taken before hit blocks are touched", "#33775, #44409", "P2 P1 P8")
def take_before_touch(rules: Rules, _config: Config) -> Rules:
    """A hit at the head of the free queue becomes a new block of the same request as well."""
    take_rightly = rules[take_blocks]

    def take(
        config: Config,
        pool: Pool,
        request: RequestState,
        hit: Hit,
        nums_new: Sequence[int],
        rules: Rules,
    ) -> tuple[Pool, list[Holding], list[tuple[BlockId, ...]]]:
        untouched = replace(hit, block_tables=())
        pool, owned, taken = take_rightly(config, pool, request, untouched, nums_new, rules)
        for found in hit.block_tables:
            pool = touch_blocks(pool, without_nulls(found))
        return pool, owned, taken

    return rules.replacing(take_blocks, take)


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
def shared_blocks_counted_free(rules: Rules, _config: Config) -> Rules:
    """The block joins the free queue with each holder that frees it."""

    def free(pool: Pool, block_table: Sequence[BlockId]) -> Pool:
        pool = rules[free_blocks](pool, block_table)
        return replace(pool, free_queue=pool.free_queue + get_shared(pool, block_table))

    return rules.replacing(free_blocks, free)


@PAGE.exhibit(
    "blocks that stay with other holders count as freed by a preemption", "xLLM #55", "P8 P1 P15"
)
def passed_over_blocks_counted(rules: Rules, _config: Config) -> Rules:
    """Too few requests are preempted, since the victim's shared blocks do not become free."""

    def revoke(
        pool: Pool,
        request: RequestState,
        block_sizes: tuple[int, ...],
        all_rules: Rules,
        fence: FrameId | None = None,
    ) -> Pool:
        pool = rules[revoke_slots](pool, request, block_sizes, all_rules, fence)
        shared = get_shared(pool, sum(request.block_tables, ()))
        return replace(pool, free_queue=pool.free_queue + shared)

    return rules.replacing(revoke_slots, revoke)


@PAGE.exhibit(
    "publishing a block evicts the first block of the same request",
    "TensorRT-LLM #17926",
    "P3 P15",
    invisible="efficiency: a later hit is lost",
)
def publisher_evicts_itself(rules: Rules, _config: Config) -> Rules:
    """A full pool makes room for the new entry without protecting the publishing request."""

    def publish(
        config: Config,
        pool: Pool,
        request: RequestState,
        nums_full: Sequence[int],
        all_rules: Rules = rules,
    ) -> tuple[Pool, RequestState]:
        pool, after = rules[publish_slots](config, pool, request, nums_full, all_rules)
        if after is not request and get_num_free_blocks(pool) == 0:
            pool = withdraw_blocks(pool, after.block_tables[0][:1])
        return pool, after

    return rules.replacing(publish_slots, publish)
