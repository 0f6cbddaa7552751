"""Hits: the greatest prefix that is a hit in every group.

    | skipped |     attended      | one block more |        known        |
    |  null   | published: shared |    dropped     |      computed       |

Skipped blocks need not be there. One block more must be there if the proposer needs hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from blockstep.spec.core.block_pool import Pool, find_block
from blockstep.spec.core.prefix_cache import compute_max_hit_blocks, get_group_keys
from blockstep.spec.core.requests import NO_HIT, Hit, RequestState
from blockstep.spec.features.groups.kinds import KINDS, compute_num_skipped_blocks
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, Config, KVGroup


def get_joint_hit(config: Config, pool: Pool, request: RequestState) -> Hit:
    """Return the greatest length that is a hit in every group, and the shared blocks of each group.

    A length is whole blocks of every group, so that no shared block is written. The lengths that
    suit one group are not contiguous: a window may have kept later blocks, and lost earlier ones.
    So all lengths are tried: to reduce the length group by group may stop below the greatest.
    Source: vLLM 0.19.1 `HybridKVCacheCoordinator`; P5.
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
    if KINDS[group.kind].has_kv:
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
