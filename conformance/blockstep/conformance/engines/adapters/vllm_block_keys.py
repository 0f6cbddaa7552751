"""Parts of the vLLM adapter that need no vLLM: the block keys of digests, and names."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from sys import intern

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_releases import Release
from blockstep.spec.vocabulary import BlockKey, FrameId, MultiModalItem, Request, TokenIds

ADAPTER_PREFIX = "adapter:"
DIGEST_SIZE = sha256().digest_size
"""The number of bytes in a digest."""


KEPT = (
    *("priority", "adapter", "cache_salt", "prompt_embeds", "skip_reading_prefix_cache"),
    *("resumable", "structured_output", "grammar"),
)
"""Fields that a session keeps from its submission; each input replaces all others."""


def get_lora_name(adapter: str, separate_names: bool) -> str:
    """Return the LoRA name of an adapter, with a prefix if names must differ from cache salts."""
    return get_text(ADAPTER_PREFIX + adapter if separate_names else adapter)


def get_text(text: str) -> str:
    """Return one object for all equal strings.

    vLLM hashes pickles, and a pickle writes an object that occurs twice only once: a LoRA name and
    a cache salt with the same text give another digest if they are the same object. Its front end
    creates a new object for each.
    """
    return intern(text)


@dataclass(slots=True)
class RequestRecord:
    """The adapter's record of a request, for data that vLLM does not keep in every release."""

    request: Request
    """The request as submitted; of a session, with the inputs that it has accepted."""
    updates: deque[Request] = field(default_factory=deque)
    """Inputs that a session was given and has not accepted yet."""
    keys: list[BlockKey] = field(default_factory=list)
    """The keys of its full blocks."""
    features: list[object] = field(default_factory=list)
    """vLLM's features of its items, kept here if the scheduler must not see them: it encodes none.
    """
    promised: dict[FrameId, int] = field(default_factory=dict)
    """The tokens, drafts included, that each plan in flight can deliver."""
    is_prefill_chunk: bool = False
    """Whether its last plan left known tokens to compute."""
    num_cached_tokens: int = -1
    """The cached tokens that the first output reported."""
    has_reported_prefill: bool = False
    """Whether an output has reported where the tokens of its prompt came from."""
    num_external_tokens: int = 0
    """Number of cached tokens that were loaded from a store."""
    num_preemptions: int = 0
    moments: list[str] = field(default_factory=list)
    """The names of vLLM's events of the request since its last output, in their order."""

    def follow(self, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        """Update a session's prompt and its limit of outputs to what the release has now.

        The prompt grows when a chunk is taken: by the outputs that are kept, and by the chunk,
        whose items count positions from its own start.
        """
        before = self.request
        if len(prompt_token_ids) == len(before.prompt_token_ids):
            if before.max_tokens != max_tokens:  # taken over when the chunk was hashed already
                self.request = replace(before, max_tokens=max_tokens)
            return
        chunk = self.updates.popleft()
        self.moments.append("QUEUED")
        start = len(prompt_token_ids) - len(chunk.prompt_token_ids)
        items = [replace(item, offset=item.offset + start) for item in chunk.items]
        self.request = replace(
            chunk,
            prompt_token_ids=tuple(prompt_token_ids),
            max_tokens=max_tokens,
            items=(*before.items, *items),
            **{name: getattr(before, name) for name in KEPT},
        )


class Digests:
    """The content that each digest stands for, recorded when vLLM hashes."""

    def __init__(self, release: Release, block_size: int) -> None:
        self.release = release
        self.block_size = block_size
        self.key_of: dict[bytes, BlockKey] = {}
        self.collisions: list[tuple[BlockKey, BlockKey]] = []
        """Pairs of different contents with the same digest: vLLM cannot tell them apart."""

    def learn(
        self,
        known: RequestRecord,
        num_before: int,
        digests: Sequence[bytes],
        token_ids: Sequence[int],
        items: tuple[MultiModalItem, ...],
    ) -> None:
        """Record the digests of a request's next full blocks at the time they are computed.

        A session may lose tokens later; a digest stands for the tokens at that time.

        Args:
            known: The request.
            num_before: Digests that it has; keys beyond are forgotten.
            digests: Those that are new.
            token_ids: All of its tokens.
            items: Its items where the release has them, which may be elsewhere than they should be.
        """
        keys, size, request = known.keys, self.block_size, known.request
        if request.items != items:
            request = replace(request, items=items)
        del keys[num_before:]
        is_continued = bool(keys)
        for digest in digests:
            start = len(keys) * size
            key = compute_block_key(
                self.release,
                request,
                keys[-1] if keys else None,
                tuple(token_ids[start : start + size]),
                start,
                is_continued=is_continued,
            )
            keys.append(key)
            first = self.key_of.setdefault(digest, key)
            if first != key:
                self.collisions.append((first, key))

    def read(self, name: bytes, group: int) -> BlockKey:
        """Return the key of a block of a group, from the digest of its last tokens.

        A larger block may have the digests of all its tokens, one after the other.

        Raises:
            EngineFault: the digests are not those of one prompt, one behind the other.
        """
        starts = range(0, len(name), DIGEST_SIZE)
        links = [self.key_of[name[start : start + DIGEST_SIZE]] for start in starts]
        for before, link in pairwise(links):
            if link.parent != before:
                raise EngineFault(f"one block has the digests {before!r} and then {link!r}")
        return links[-1].in_group(group)


def compute_block_key(
    release: Release,
    request: Request,
    parent: BlockKey | None,
    token_ids: TokenIds,
    start: int,
    is_continued: bool,
) -> BlockKey:
    """Return the content that the digest of one full block stands for.

        prompt    |------------------------------|
        items         |--- a ---|   |--- b ---|
        blocks    |  [(a,2)]  | [(a,-6),(b,2)] | ...       offsets count from the block's start

    Some releases look at the last item alone, except where they begin with the first block: behind
    a prompt (`_gen_mm_extra_hash_keys` with `start_mm_idx` -1), so that is what the digest names;
    and some of them take it also if it ends where the block begins. Where the place of an item is
    no part of the digest, every offset is 0.
    Source: `generate_block_hash_extra_keys`.

    Args:
        release: Whose digest it is.
        request: As it was submitted.
        parent: The key of the block before; None for the first.
        token_ids: The tokens of this block, exactly block-size many.
        start: Position of its first token.
        is_continued: Whether digests of blocks before it were there already.
    """
    end = start + len(token_ids)
    only_last = is_continued and not release.has_all_items
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
        embeds=request.prompt_embeds[start:end] if release.has_named_embeds else (),
    )
