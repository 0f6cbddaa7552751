"""Prefix: the longest run of published blocks that a waiting request can share."""

from __future__ import annotations

from blockstep.spec.pool import Pool, find_block
from blockstep.spec.state import RequestState
from blockstep.spec.vocabulary import BlockId, Config


def compute_max_hit_blocks(num_known: int, block_size: int) -> int:
    """Blocks that may be hit at most: at least one token is left to compute.

    Without a computed token there are no logits to sample from. The hit is whole blocks, so a
    fully cached prompt recomputes its last block. Source: seed 001 "find_longest_cache_hit()";
    upstream #11186.
    """
    return (num_known - 1) // block_size


def get_prefix_hit(config: Config, pool: Pool, request: RequestState) -> tuple[BlockId, ...]:
    """The blocks, in order, of the longest published prefix of the request's known tokens.

    Keys are chained, so the first miss ends the search. With a proposer that needs hidden states
    the last hit block is given back, to be computed again.
    Source: seed 001 "find_longest_cache_hit()"; seed 003 section 1.1; P5.
    """
    if not reads_prefix_cache(config, request):
        return ()
    max_blocks = compute_max_hit_blocks(request.num_known_tokens, config.block_size)
    hit: list[BlockId] = []
    for key in request.block_keys[:max_blocks]:
        block_id = find_block(pool, key)
        if block_id is None:
            break
        hit.append(block_id)
    if config.drops_last_hit_block and hit:
        hit.pop()
    return tuple(hit)


def reads_prefix_cache(config: Config, request: RequestState) -> bool:
    """Whether this request asks the cache at all. Source: seed 001 "get_computed_blocks"."""
    return config.enable_prefix_caching and not request.request.skip_reading_prefix_cache
