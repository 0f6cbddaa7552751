"""What the adapter of vLLM can say without vLLM: what a digest stands for, and names."""

from __future__ import annotations

from blockstep.conformance.engines.adapters.vllm_releases import Release
from blockstep.spec.vocabulary import BlockKey, Request, TokenIds

ADAPTER_PREFIX = "adapter:"


def get_lora_name(adapter: str, separate_names: bool) -> str:
    """The LoRA name that stands for `adapter`: prefixed if names are to be kept from salts."""
    return ADAPTER_PREFIX + adapter if separate_names else adapter


def compute_block_key(
    release: Release,
    request: Request,
    parent: BlockKey | None,
    token_ids: TokenIds,
    start: int,
    is_after_output: bool,
) -> BlockKey:
    """What the digest of one full block stands for.

        prompt    |------------------------------|
        items         |--- a ---|   |--- b ---|
        blocks    |  [(a,2)]  | [(a,-6),(b,2)] | ...       offsets count from the block's start

    Once the request has output, some releases look at its last item alone, but for the first block
    (`_gen_mm_extra_hash_keys` with `start_mm_idx` -1), so that is what the digest names; and some
    of them take it also if it ends where the block begins. Where the place of an item is no part
    of the digest, every offset is 0.
    Source: `generate_block_hash_extra_keys`.

    Args:
        release: Whose digest it is.
        request: As it was submitted.
        parent: The key of the block before; None for the first.
        token_ids: The tokens of this block, exactly block-size many.
        start: Position of its first token.
        is_after_output: Whether it was hashed when the request had output already.
    """
    end = start + len(token_ids)
    only_last = is_after_output and start > 0 and not release.has_all_items
    items = request.items[-1:] if only_last else request.items
    reach = int(only_last and not release.has_exact_ends)
    return BlockKey(
        parent,
        token_ids,
        adapter=request.adapter,
        cache_salt=request.cache_salt if parent is None else None,
        items=tuple(
            (item.identifier, item.offset - start if release.has_offsets else 0)
            for item in items
            if item.offset < end and start < item.offset + item.length + reach
        ),
    )
