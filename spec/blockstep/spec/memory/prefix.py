"""Prefix: the most computed tokens that a waiting request can share, from published blocks.

    | skipped |     attended      | one block more |        known        |
    |  null   | published: shared |    dropped     |      computed       |

Skipped blocks need not be there. One block more must be there if the proposer needs hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from blockstep.spec.hashing import get_group_keys
from blockstep.spec.memory.groups import compute_num_skipped_blocks
from blockstep.spec.memory.slots import NO_HIT
from blockstep.spec.pool import Pool, find_block
from blockstep.spec.requests import Hit, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, BlockKey, Config, GroupKind, KVGroup


def compute_max_hit_blocks(num_known: int, block_size: int) -> int:
    """Return the most blocks that may be hit: at least one token is left to compute.

    Without a computed token there are no logits to sample from. The hit is whole blocks, so a fully
    cached prompt recomputes its last block. Source: seed 001 "find_longest_cache_hit()"; upstream
    #11186.
    """
    return (num_known - 1) // block_size


def get_prefix_hit(config: Config, pool: Pool, request: RequestState, rules: Rules) -> Hit:
    """Return the longest published prefix of the request's known tokens, in every group.

    With a proposer that needs hidden states the last hit block is dropped, to be computed again.
    Source: seed 001 "find_longest_cache_hit()"; seed 003 section 1.1; P5.
    """
    if not reads_prefix_cache(config, request):
        return NO_HIT
    if config.groups:
        return rules[get_joint_hit](config, pool, request)
    max_blocks = compute_max_hit_blocks(request.num_known_tokens, config.block_size)
    hit = find_published(pool, request.block_keys[:max_blocks])
    if config.drops_last_hit_block:
        hit = hit[:-1]
    return Hit(len(hit) * config.block_size, (hit,))


def get_joint_hit(config: Config, pool: Pool, request: RequestState) -> Hit:
    """Return the greatest length that is a hit in every group, and the shared blocks of each group.

    A length is whole blocks of every group, so that no shared block is written. The lengths that
    suit one group are not contiguous: a window may have kept later blocks, and lost earlier ones.
    So all lengths are tried, while upstream reduces the length group by group, and may stop below
    the greatest. Source: vLLM 0.19.1 `HybridKVCacheCoordinator`; P5.
    """
    num_known, num_behind = request.num_known_tokens, int(config.drops_last_hit_block)
    found = []
    for index, group in enumerate(config.groups):
        num_links = group.block_size // config.block_size
        end = compute_max_hit_blocks(num_known, group.block_size)
        keys = get_group_keys(request.block_keys, index, num_links, 0, end)
        found.append([find_block(pool, key) for key in keys])
    runs = [count_runs(blocks) for blocks in found]
    unit = lcm(*config.block_sizes)
    for num_tokens in range((num_known - 1) // unit * unit, 0, -unit):
        if all(
            is_valid_hit(group, run, num_tokens, num_behind)
            for group, run in zip(config.groups, runs, strict=True)
        ):
            tables = [
                get_hit_table(group, blocks, num_tokens)
                for group, blocks in zip(config.groups, found, strict=True)
            ]
            return Hit(num_tokens, tuple(tables))
    return NO_HIT


def count_runs(found: Sequence[BlockId | None]) -> tuple[int, ...]:
    """Return for each index the number of consecutive published blocks that end before it.

    Source: P5.
    """
    runs = [0]
    for block_id in found:
        runs.append(0 if block_id is None else runs[-1] + 1)
    return tuple(runs)


def is_valid_hit(group: KVGroup, runs: Sequence[int], num_tokens: int, num_behind: int) -> bool:
    """Whether every attended block of one group is published, and the `num_behind` ones after.

    A proposer's KV of a token depends on the next token, too, so it is right in a block only if the
    next tokens are the same. A state depends only on the tokens before it. Source: vLLM 0.19.1
    `find_longest_cache_hit` of each kind, as to which blocks are needed; P5.
    """
    first = compute_num_skipped_blocks(group, num_tokens)
    end = num_tokens // group.block_size
    if group.kind is not GroupKind.RECURRENT:
        end += num_behind
    return end < len(runs) and runs[end] >= end - first


def get_hit_table(
    group: KVGroup, found: Sequence[BlockId | None], num_tokens: int
) -> tuple[BlockId, ...]:
    """Return the table of one group after a hit: null blocks for skipped ones, then shared blocks.

    Source: vLLM 0.19.1 `allocate_new_computed_blocks`; P5, P8.
    """
    first = compute_num_skipped_blocks(group, num_tokens)
    shared = [b for b in found[first : num_tokens // group.block_size] if b is not None]
    return ((NULL_BLOCK,) * first) + tuple(shared)


def find_published(pool: Pool, keys: Sequence[BlockKey]) -> tuple[BlockId, ...]:
    """Return the blocks of one group that a hit on these keys takes, in order.

    Keys are chained, so the first miss ends the search. Source: seed 003 section 1.1; P5.
    """
    hit: list[BlockId] = []
    for key in keys:
        block_id = find_block(pool, key)
        if block_id is None:
            break
        hit.append(block_id)
    return tuple(hit)


def reads_prefix_cache(config: Config, request: RequestState) -> bool:
    """Whether this request looks for a prefix hit. Source: seed 001 "get_computed_blocks"."""
    return config.enable_prefix_caching and not request.request.skip_reading_prefix_cache
