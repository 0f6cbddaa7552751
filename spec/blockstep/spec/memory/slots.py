"""Slots: how many blocks a request needs, and giving them to it all at once or not at all.

    | computed  |  hit   | external |    new     | lookahead |
    |   table   | touch  |        allocate                   |
    |       published       |  published up to known tokens  |

`computed` is non-empty for running requests only and `hit` for waiting ones only; `external`
belongs to KV connectors, which are not specified yet.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.pool import (
    Pool,
    allocate_blocks,
    count_free,
    get_num_free_blocks,
    publish_blocks,
    touch_blocks,
    withdraw_blocks,
)
from blockstep.spec.requests import NOTHING_HELD, Hit, Holding, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import BlockId, BlockTables, Config, Request

NO_HIT = Hit(0, ((),) * len(NOTHING_HELD))


def compute_num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`: the quotient, rounded up. Source: seed 000 "Allocation"."""
    return -(-num_tokens // block_size)


def compute_num_slots(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> int:
    """Token slots a request must own to run `num_new` tokens; no slot past the model length.

    Source: seed 001 "allocate_slots(), Phase 1".
    """
    return min(num_computed + num_new + num_lookahead, max_model_len)


def compute_num_new_blocks(num_slots: int, block_size: int, num_held: int) -> int:
    """Blocks to take from the queue when `num_held` are there already.

    Rejected drafts may have left more than enough. Source: seed 001 "Phase 1"; P8.
    """
    return max(compute_num_blocks(num_slots, block_size) - num_held, 0)


def compute_num_publishable_blocks(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """Leading blocks that are full of known tokens once `num_new` more are computed.

    Drafts lie past the known tokens, so they are never published.
    Source: seed 001 "Draft tokens are never cached".
    """
    return min(num_computed + num_new, num_known) // block_size


def compute_max_slots(
    num_prompt: int,
    max_tokens: int,
    num_speculative: int,
    num_lookahead: int,
    max_model_len: int,
) -> int:
    """Token slots a request needs at its longest.

    Its last output token is never computed. Drafts may lie past it, if there is an output before
    it for them to follow; but no step runs beyond position max_model_len - 2.
    Source: seed 001 "Chunked Prefill" (the cap); upstream #52520; P11.
    """
    num_drafts = num_speculative if max_tokens > 1 else 0
    longest = min(num_prompt + max_tokens - 1 + num_drafts, max_model_len - 1)
    return min(longest + num_lookahead, max_model_len)


def is_servable(config: Config, request: Request) -> bool:
    """Whether the empty pool can hold the request at its longest. Source: upstream #52520; P11."""
    num_slots = compute_max_slots(
        len(request.prompt_token_ids),
        request.max_tokens,
        config.num_speculative_tokens,
        config.num_lookahead_tokens,
        config.max_model_len,
    )
    return compute_num_blocks(num_slots, config.block_size) <= config.num_usable_blocks


def count_needed_blocks(
    pool: Pool, num_slots: int, block_size: int, num_held: int, hit: tuple[BlockId, ...]
) -> int:
    """Free blocks that one group needs for `num_slots`, beside those held and those hit.

    A hit on a free block uses up a free block, too. Source: seed 001 "Phase 2"; upstream #11562;
    P8.
    """
    num_new_blocks = compute_num_new_blocks(num_slots, block_size, num_held + len(hit))
    return num_new_blocks + count_free(pool, hit)


def can_hold(
    pool: Pool,
    num_slots: int,
    block_size: int,
    holdings: tuple[Holding, ...],
    hit_tables: BlockTables,
) -> bool:
    """Whether the free blocks suffice for `num_slots` in all groups together.

    Source: seed 001 "Phase 2"; P8.
    """
    num_needed = sum(
        [
            count_needed_blocks(pool, num_slots, block_size, len(holding.block_table), hit)
            for holding, hit in zip(holdings, hit_tables, strict=True)
        ]
    )
    return num_needed <= get_num_free_blocks(pool)


def allocate_slots(
    config: Config,
    pool: Pool,
    request: RequestState,
    num_new: int,
    num_lookahead: int = 0,
    hit: Hit = NO_HIT,
) -> tuple[Pool, RequestState] | None:
    """Give the request slots for `num_new` tokens past its computed ones and its hit.

    Returns the pool and the request afterwards, or None if the pool is too full; then nothing has
    happened (P7). Hits of all groups are touched before any group takes a block. Publishing comes
    with it: the step that computes the tokens is about to run.
    Source: seed 001 "allocate_slots() -- The Block Allocation Pipeline"; P4, P7, P8.
    """
    num_computed = request.num_computed_tokens + hit.num_tokens
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, config.max_model_len)
    # refuse
    if not can_hold(pool, num_slots, config.block_size, request.holdings, hit.block_tables):
        return None
    # pool
    for block_ids in hit.block_tables:
        pool = touch_blocks(pool, block_ids)
    holdings = []
    for holding, block_ids in zip(request.holdings, hit.block_tables, strict=True):
        pool, after = extend_holding(pool, holding, block_ids, num_slots, config.block_size)
        holdings.append(after)
    # requests
    if holdings != [*request.holdings]:
        request = replace(request, holdings=tuple(holdings))
    if not config.enable_prefix_caching:
        return pool, request
    num_full = compute_num_publishable_blocks(
        num_computed, num_new, request.num_known_tokens, config.block_size
    )
    return publish_slots(pool, request, num_full)


def extend_holding(
    pool: Pool, holding: Holding, hit: tuple[BlockId, ...], num_slots: int, block_size: int
) -> tuple[Pool, Holding]:
    """One group's table with its hit, and with new blocks until it has `num_slots`.

    Source: seed 001 "Phase 3", "Phase 4"; P8.
    """
    table = holding.block_table + hit
    num_new_blocks = compute_num_new_blocks(num_slots, block_size, len(table))
    if not hit and num_new_blocks == 0:
        return pool, holding
    pool, new_blocks = allocate_blocks(pool, num_new_blocks)
    return pool, Holding(table + new_blocks, holding.num_cached_blocks + len(hit))


def publish_slots(pool: Pool, request: RequestState, num_full: int) -> tuple[Pool, RequestState]:
    """Make the first `num_full` blocks of each table findable, as far as they are not yet.

    Source: seed 001 "Phase 5: commit to the prefix cache"; P3, P4.
    """
    if all(holding.num_cached_blocks >= num_full for holding in request.holdings):
        return pool, request
    holdings = []
    for holding in request.holdings:
        fresh = slice(holding.num_cached_blocks, num_full)
        pool = publish_blocks(pool, holding.block_table[fresh], request.block_keys[fresh])
        num_cached_blocks = max(holding.num_cached_blocks, num_full)
        holdings.append(Holding(holding.block_table, num_cached_blocks))
    return pool, replace(request, holdings=tuple(holdings))


def release_slots(pool: Pool, request: RequestState, rules: Rules) -> Pool:
    """Free every block that a request holds. Source: seed 001 "Deallocation"; P1."""
    for holding in request.holdings:
        pool = rules.free_blocks(pool, holding.block_table)
    return pool


def revoke_slots(pool: Pool, request: RequestState, block_size: int, rules: Rules) -> Pool:
    """Free every block of a request that is preempted, unpublishing what will not be computed.

    A request that was planned earlier in this very step has published blocks which now nobody
    will write. Upstream leaves those keys behind, and a later hit reads garbage (#43569); here
    they are withdrawn. Blocks computed before this step keep their keys. Source: P4.
    """
    num_written = request.num_computed_tokens // block_size
    for holding in request.holdings:
        unwritten = holding.block_table[num_written : holding.num_cached_blocks]
        pool = withdraw_blocks(pool, unwritten)
    return release_slots(pool, request, rules)
