"""Prefix: the most computed tokens that a waiting request can share, from published blocks.

    |     published: shared      | one block more |        known        |
    |            hit             |    dropped     |      computed       |

The last block is dropped if the proposer needs hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.memory.slots import NO_HIT
from blockstep.spec.pool import Pool, find_block
from blockstep.spec.requests import Hit, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import BlockId, BlockKey, Config


def compute_max_hit_blocks(num_known: int, block_size: int) -> int:
    """Return the most blocks that may be hit: at least one token is left to compute.

    Without a computed token there are no logits to sample from. The hit is whole blocks, so a fully
    cached prompt recomputes its last block. Source: seed 001 "find_longest_cache_hit()"; upstream
    #11186.
    """
    return (num_known - 1) // block_size


def get_prefix_hit(config: Config, pool: Pool, request: RequestState, rules: Rules) -> Hit:
    """Return the longest published prefix of the request's known tokens, in every group.

    Source: seed 001 "find_longest_cache_hit()"; P5.
    """
    if not reads_prefix_cache(config, request):
        return NO_HIT
    return rules[find_hit](config, pool, request)


def find_hit(config: Config, pool: Pool, request: RequestState) -> Hit:
    """Return the longest published prefix in the blocks of the one group.

    With a proposer that needs hidden states the last hit block is dropped, to be computed again.
    Source: seed 001 "find_longest_cache_hit()"; seed 003 section 1.1; P5.
    """
    max_blocks = compute_max_hit_blocks(request.num_known_tokens, config.block_size)
    hit = find_published(pool, request.block_keys[:max_blocks])
    if config.drops_last_hit_block:
        hit = hit[:-1]
    return Hit(len(hit) * config.block_size, (hit,))


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
