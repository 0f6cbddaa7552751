"""Slots: the blocks that a request needs, allocated all at once or not at all.

    | computed  |  hit   | pending  |    new     | lookahead |
    |   table   | touch  |        allocate                   |
    |       published       |  published up to known tokens  |

`computed` is non-empty for running requests only, `hit` and `pending` for waiting ones only.
KV of `pending` tokens is written from outside: they are published once it is confirmed. Each KV
group has a table of its own, in blocks of its own size; all take from one pool, and all get what
they need, or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import (
    Changes,
    Pool,
    allocate_blocks,
    count_free,
    get_num_free_blocks,
    give_up_blocks,
    publish_blocks,
    touch_blocks,
    withdraw_blocks,
)
from blockstep.spec.core.prefix_cache import get_group_keys
from blockstep.spec.core.requests import NO_HIT, Hit, Holding, RequestState, without_nulls
from blockstep.spec.core.rules import STRICT_RULES, Rules
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, Config, FrameId, KVGroup, Request


class Growth(NamedTuple):
    """The extent to which the table of a group grows in a step."""

    num_tokens: int
    """Computed tokens after the step."""
    num_slots: int
    """Slots of the table, lookahead included."""
    is_pending: bool
    """Whether KV behind the hit is written from outside."""


def compute_num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold `num_tokens`: the quotient, rounded up.

    Source: seed 000 "Allocation".
    """
    return -(-num_tokens // block_size)


def compute_num_slots(
    num_computed: int, num_new: int, num_lookahead: int, max_model_len: int
) -> int:
    """Return the slots needed to run `num_new` tokens; no slot past the model length.

    Source: seed 001 "allocate_slots(), Phase 1".
    """
    return min(num_computed + num_new + num_lookahead, max_model_len)


def compute_num_new_blocks(num_slots: int, block_size: int, num_held: int) -> int:
    """Return the blocks to take from the queue when `num_held` are there already.

    Rejected drafts may have left more than enough. Source: seed 001 "Phase 1"; P8.
    """
    return max(compute_num_blocks(num_slots, block_size) - num_held, 0)


def compute_num_publishable_blocks(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> int:
    """Return the leading blocks that are full of known tokens once `num_new` more are computed.

    Drafts come after the known tokens, so they are never published. Source: seed 001 "Draft tokens
    are never cached".
    """
    return min(num_computed + num_new, num_known) // block_size


def compute_max_slots(
    num_prompt: int,
    max_tokens: int,
    num_speculative: int,
    num_lookahead: int,
    max_model_len: int,
) -> int:
    """Return the token slots that a request needs at its longest.

    Its last output token is never computed. Drafts may be placed after it, if there is an output
    before it for them to follow; but no step runs beyond position max_model_len - 2. Source: seed
    001 "Chunked Prefill" (the cap); upstream #52520; P11.
    """
    num_drafts = num_speculative if max_tokens > 1 else 0
    longest = min(num_prompt + max_tokens - 1 + num_drafts, max_model_len - 1)
    return min(longest + num_lookahead, max_model_len)


def compute_max_blocks(config: Config, request: Request, rules: Rules) -> int:
    """Return the most blocks that a request needs in all groups.

    Source: upstream #52520, #39734; P11.
    """
    num_slots = compute_max_slots(
        len(request.prompt_token_ids),
        request.max_tokens,
        config.num_speculative_tokens,
        config.num_lookahead_tokens,
        config.max_model_len,
    )
    count, slots_of = rules[count_held_at_most], rules[get_num_slots_of]
    groups = config.kv_groups
    return sum([count(config, group, slots_of(group, num_slots, request)) for group in groups])


def is_servable(config: Config, request: Request, rules: Rules) -> bool:
    """Whether the empty pool can hold the request at its longest. Source: upstream #52520; P11."""
    return compute_max_blocks(config, request, rules) <= config.num_usable_blocks


# One group.


def get_num_slots_of(group: KVGroup, num_slots: int, request: Request) -> int:
    """Return the slots in a group's table: one for each token. Source: seed 000 "Allocation"."""
    del group, request
    return num_slots


def count_held_at_most(config: Config, group: KVGroup, num_slots: int) -> int:
    """Return the most blocks of a group that a request of `num_slots` holds at once: all of them.

    Source: vLLM 0.19.1 `max_memory_usage_bytes`; P11.
    """
    del config
    return compute_num_blocks(num_slots, group.block_size)


def count_taken(group: KVGroup, growth: Growth, num_held: int, num_hit: int) -> int:
    """Return the blocks that a group takes from the queue: those that its table lacks.

    Source: vLLM 0.19.1 `allocate_new_blocks`; P8.
    """
    return compute_num_new_blocks(growth.num_slots, group.block_size, num_held + num_hit)


def get_extended_table(
    group: KVGroup,
    growth: Growth,
    held: tuple[BlockId, ...],
    found: tuple[BlockId, ...],
    new_blocks: tuple[BlockId, ...],
) -> tuple[BlockId, ...]:
    """Return the table of a group with the blocks of a hit, and with new ones. Source: P8."""
    del group, growth
    return held + found + new_blocks


def count_copies(
    pool: Pool, group: KVGroup, holding: Holding, num_computed: int, rules: Rules
) -> int:
    """Return the blocks that a request needs besides new ones, because others hold its own, too.

    Source: P2, P8.
    """
    return sum([rules[need](pool, group, holding, num_computed) for need in rules.hooks.needs])


def allocate_slots(
    config: Config,
    pool: Pool,
    request: RequestState,
    num_new: int,
    num_lookahead: int = 0,
    hit: Hit = NO_HIT,
    rules: Rules = STRICT_RULES,
) -> tuple[Pool, RequestState] | None:
    """Allocate slots for `num_new` tokens after the request's computed ones and its hit.

    Returns the pool and the request afterwards, or None if the pool is too full; then nothing has
    changed (P7). Hits of all groups are touched before any group takes a block. Blocks are
    published here, because the step that computes the tokens is about to run. Source:
    seed 001 "allocate_slots() -- The Block Allocation Pipeline"; P4, P7, P8.
    """
    num_computed = request.num_computed_tokens + hit.num_tokens
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, config.max_model_len)
    hit_tables = hit.block_tables or ((),) * len(request.holdings)
    groups = [*zip(config.kv_groups, request.holdings, hit_tables, strict=True)]
    count, slots_of, extend = rules[count_taken], rules[get_num_slots_of], rules[get_extended_table]
    num_needed, nums_new, growths = 0, [], []
    for group, holding, found in groups:
        num_owned = slots_of(group, num_slots, request.request)
        growth = Growth(num_computed + num_new, num_owned, hit.num_pending > 0)
        num_taken = count(group, growth, len(holding.block_table), len(found))
        growths.append(growth)
        nums_new.append(num_taken)
        num_needed += num_taken + (count_free(pool, found) if found else 0)
        if rules.hooks.needs:
            num_needed += count_copies(pool, group, holding, num_computed, rules)
    # refuse
    if num_needed > get_num_free_blocks(pool):
        return None
    # pool, requests
    if any(nums_new) or any(hit_tables) or rules.hooks.owns:
        pool, owned, taken = rules[take_blocks](config, pool, request, hit, nums_new, rules)
        settle = rules[get_nums_settled]
        nums_settled = settle(config, hit) if hit.num_pending else map(len, hit_tables)
        holdings = []
        amounts = zip(groups, growths, owned, taken, nums_settled, strict=True)
        for (group, _, found), growth, holding, new_blocks, num_settled in amounts:
            if found or new_blocks:
                table = extend(group, growth, holding.block_table, found, new_blocks)
                holding = Holding(table, holding.num_cached_blocks + num_settled)
            holdings.append(holding)
        request = replace(request, holdings=tuple(holdings))
    if not config.enable_prefix_caching or request.has_unconfirmed_kv:
        return pool, request
    num_known = request.num_known_tokens
    nums_full = [
        compute_num_publishable_blocks(num_computed, num_new, num_known, group.block_size)
        for group, _, _ in groups
    ]
    return publish_slots(config, pool, request, nums_full, rules)


def take_blocks(
    config: Config,
    pool: Pool,
    request: RequestState,
    hit: Hit,
    nums_new: Sequence[int],
    rules: Rules,
) -> tuple[Pool, list[Holding], list[tuple[BlockId, ...]]]:
    """Hold the hit of all groups, then take `nums_new` blocks for each.

    Also returns, per group, what the request holds with a block of its own for its next token, and
    the blocks taken. Source: seed 001 "Phase 3"; upstream #33775, #44409; P2.
    """
    for found in hit.block_tables:
        pool = touch_blocks(pool, without_nulls(found))
    owned, taken, num_computed = [], [], request.num_computed_tokens + hit.num_tokens
    for group, holding, num_new in zip(config.kv_groups, request.holdings, nums_new, strict=True):
        for own in rules.hooks.owns:
            pool, holding = rules[own](pool, group, holding, num_computed)
        pool, new_blocks = allocate_blocks(pool, num_new) if num_new else (pool, ())
        owned.append(holding)
        taken.append(new_blocks)
    return pool, owned, taken


def get_nums_settled(config: Config, hit: Hit) -> tuple[int, ...]:
    """Return, per group, the blocks that count as published while KV is pending: those of the local
    hit. Source: P19."""
    return tuple([hit.num_local // size for size in config.block_sizes])


def publish_slots(
    config: Config,
    pool: Pool,
    request: RequestState,
    nums_full: Sequence[int],
    rules: Rules = STRICT_RULES,
) -> tuple[Pool, RequestState]:
    """Publish the first blocks of each table, `nums_full` per group, if they are not yet published.

    A block that was skipped before its tokens were known cannot be published. Source: seed 001
    "Phase 5: commit to the prefix cache"; P3, P4.
    """
    settled = [holding.num_cached_blocks for holding in request.holdings]
    if all(map(ge, settled, nums_full)):
        return pool, request
    holdings = []
    for group, (holding, num_full) in enumerate(zip(request.holdings, nums_full, strict=True)):
        fresh = holding.block_table[settled[group] : num_full]
        block_ids = without_nulls(fresh)
        num_null = len(fresh) - len(block_ids)
        if num_null and fresh[num_null:] != block_ids:  # some null blocks are between the others
            num_null = 0
        num_links = config.block_sizes[group] // config.block_size
        first = settled[group] + num_null
        keys = get_group_keys(request.block_keys, group, num_links, first, num_full)
        if len(keys) != len(block_ids):
            keys = tuple([k for k, b in zip(keys, fresh, strict=True) if b != NULL_BLOCK])
        changes: Changes = ()
        for publish in rules.hooks.publishes:
            changes += rules[publish](config, request, group, fresh, settled[group])
        pool = publish_blocks(pool, block_ids, keys, changes)
        holdings.append(Holding(holding.block_table, max(settled[group], num_full)))
    return pool, replace(request, holdings=tuple(holdings))


def release_slots(
    pool: Pool, request: RequestState, rules: Rules, fence: FrameId | None = None
) -> Pool:
    """Free every block that a request holds, after the commit of frame `fence` if one is given.

    Source: seed 001 "Deallocation"; P1, P17.
    """
    return give_up_blocks(pool, request.block_tables, rules, fence)


def revoke_slots(
    pool: Pool,
    request: RequestState,
    block_sizes: tuple[int, ...],
    rules: Rules,
    fence: FrameId | None = None,
) -> Pool:
    """Free every block of a preempted request, and withdraw the keys of blocks not computed.

    A request that was planned earlier in this very step has published blocks which now will not be
    written: their keys are withdrawn. Blocks computed before this step keep their
    keys. Source: upstream #43569; P4.
    """
    for holding, block_size in zip(request.holdings, block_sizes, strict=True):
        num_written = request.num_computed_tokens // block_size
        unwritten = holding.block_table[num_written : holding.num_cached_blocks]
        pool = withdraw_blocks(pool, unwritten)
    return release_slots(pool, request, rules, fence)
