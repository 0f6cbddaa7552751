"""Prefix cache: which block contents are the same, and the most computed tokens that a waiting
request can share.

Keys chain the contents themselves, so that no two different contents ever share a key (P6). The
hashes of an engine are an optimisation.

    |     published: shared      | one block more |        known        |
    |            hit             |    dropped     |      computed       |

The last block is dropped if the proposer needs hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool, find_block
from blockstep.spec.core.requests import NO_HIT, Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.vocabulary import BlockId, BlockKey, Config, TokenIds


def compute_block_key(
    request: RequestState, index: int, block_size: int, parent: BlockKey | None, rules: Rules
) -> BlockKey:
    """Return the key of block `index` of a request: its tokens, behind those of its parent.

    Whatever else decides its content is part of it. Source: seed 001 "Block Hash Computation"; seed
    003 section 1.2; P6.
    """
    start, end = index * block_size, (index + 1) * block_size
    extra: dict[str, Any] = {}
    for name in rules.hooks.names:
        extra.update(rules[name](request, index, start, end, rules))
    return BlockKey(parent, get_tokens(request, start, end), **extra)


def extend_block_keys(request: RequestState, block_size: int, rules: Rules) -> tuple[BlockKey, ...]:
    """Return the request's keys, with one more for every further full block of known tokens.

    Only full blocks have a key. Known tokens are prompt and verified outputs: a draft is never part
    of one. Source: seed 003 sections 1.1 and 1.2; seed 001 "Draft tokens are never cached".
    """
    num_full_blocks = request.num_known_tokens // block_size
    keys = list(request.block_keys)
    for index in range(len(keys), num_full_blocks):
        parent = keys[-1] if keys else None
        keys.append(compute_block_key(request, index, block_size, parent, rules))
    return tuple(keys)


def get_keyed(config: Config, request: RequestState, rules: Rules) -> RequestState:
    """Return the request with a key for each full block of its known tokens, with prefix caching.

    Source: seed 003 section 1.2.
    """
    num_full_blocks = request.num_known_tokens // config.block_size
    if not config.enable_prefix_caching or num_full_blocks <= len(request.block_keys):
        return request
    return replace(request, block_keys=extend_block_keys(request, config.block_size, rules))


def get_group_keys(
    block_keys: Sequence[BlockKey], group: int, num_links: int, first: int, end: int
) -> tuple[BlockKey, ...]:
    """Return the keys of blocks [first, end) of one KV group, each `num_links` links of the chain.

    The last link of a block determines every token up to its end, and only it has the group, so
    that all groups share one chain. Source: vLLM 0.19.1 `BlockHashListWithBlockSize`,
    `make_block_hash_with_group_id`; architecture D13; P6.
    """
    if group == 0 and num_links == 1:
        return tuple(block_keys[first:end])
    ends = range((first + 1) * num_links, end * num_links + 1, num_links)
    return tuple([block_keys[last - 1].in_group(group) for last in ends])


def get_tokens(request: RequestState, start: int, end: int) -> TokenIds:
    """Return known tokens at positions [start, end). Source: seed 001 "The Request Object"."""
    prompt, outputs = request.request.prompt_token_ids, request.output_token_ids
    num_prompt = len(prompt)
    return prompt[start:end] + outputs[max(start - num_prompt, 0) : max(end - num_prompt, 0)]


# Hits.


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
