"""Hashing: which block contents are the same.

vLLM chains hashes; the specification chains the contents themselves, so that no two different
contents ever share a key (P6). Hashes are an engine's optimisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockstep.spec.copies import replace
from blockstep.spec.requests import RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import BlockKey, Config, TokenIds


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
