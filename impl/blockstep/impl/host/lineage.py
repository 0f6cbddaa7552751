"""Lineage: the tokens of one request, and the digests and keys of its full blocks."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import takewhile

from blockstep.impl.digests import Digest, chain_message, pack_extras, pack_tokens
from blockstep.spec.vocabulary import BlockKey, Request, TokenIds


class Lineage:
    """The tokens of one request, and the digests and keys of its full blocks.

    Tokens are only appended, never changed: a published block refers to its lineage as long as it
    can be hit, even after the request has finished (P3). A session that continues drops some of its
    last tokens, but no computed one, and so none of a published block.

        tokens   | block 0 | block 1 | block 2 | .. tail
        digests  |   d0    |   d1    |          each computed once, when first needed
        keys     |   k0    |                    built for snapshots only, and then kept
    """

    __slots__ = (
        "_block_size",
        "_digest",
        "_digests",
        "_ends",
        "_every",
        "_group_keys",
        "_keys",
        "request",
        "tokens",
    )

    def __init__(self, request: Request, block_size: int, digest: Digest) -> None:
        self.request = request
        # array("i") grows in place at amortised O(1); one scalar costs half of what numpy takes.
        self.tokens: array[int] = array("i", request.prompt_token_ids)
        self._block_size = block_size
        self._digest = digest
        self._digests: list[bytes] = []
        self._keys: list[BlockKey] = []
        self._group_keys: dict[tuple[int, int], BlockKey] = {}
        self._every = pack_extras(request.adapter)
        self._ends = [item.offset + item.length for item in request.items]

    def append(self, token_id: int) -> None:
        """Append a verified output token."""
        self.tokens.append(token_id)

    def go_on(self, request: Request, num_kept: int) -> None:
        """Continue a session with its next input: `request` is the whole request now, and its
        tokens begin with the first `num_kept` of the old ones."""
        full = num_kept // self._block_size
        del self._digests[full:], self._keys[full:]
        self._group_keys = {at: key for at, key in self._group_keys.items() if at[0] < full}
        self.request = request
        self.tokens = array("i", request.prompt_token_ids)
        self._ends = [item.offset + item.length for item in request.items]

    def adopt_names(self, other: Lineage) -> int:
        """Take over the digests and keys of the common leading tokens; return the number of these
        tokens.

        The requests are equal but for their outputs, and this one has no digests yet.
        """
        common = self._count_common(other)
        full = common // self._block_size
        self._digests = other._digests[:full]
        self._keys = other._keys[:full]
        self._group_keys = {at: key for at, key in other._group_keys.items() if at[0] < full}
        return common

    def _count_common(self, other: Lineage) -> int:
        """Return the number of leading tokens that are equal in both; their prompts are."""
        num_prompt = len(self.request.prompt_token_ids)
        pairs = zip(self.tokens[num_prompt:], other.tokens[num_prompt:], strict=False)
        return num_prompt + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def name_blocks(self) -> list[bytes]:
        """Return the digests of all full blocks."""
        full = len(self.tokens) // self._block_size
        if len(self._digests) < full:
            self._extend_digests(full)
        return self._digests

    def digest_of(self, index: int) -> bytes:
        """Return the digest of block `index`, which must be full."""
        if index >= len(self._digests):
            self._extend_digests(index + 1)
        return self._digests[index]

    def key_of(self, index: int, group: int = 0) -> BlockKey:
        """Return the structural key of block `index`, which must be full; the same object each
        time."""
        keys = self._keys
        while index >= len(keys):
            keys.append(self._build_key(len(keys)))
        if group == 0:
            return keys[index]
        key = self._group_keys.get((index, group))
        if key is None:
            key = self._group_keys[index, group] = keys[index].in_group(group)
        return key

    def adopt_keys(self, other: Lineage, count: int) -> None:
        """Share the keys that `other` has built for its first `count` blocks, which have equal
        contents.

        Equal keys that are the same object compare fast, and snapshots compare many.
        """
        mine = len(self._keys)
        if mine < count and mine < len(other._keys):
            self._keys.extend(other._keys[mine:count])

    def agrees_with(self, other: Lineage, index: int) -> bool:
        """Return whether both have the same content up to the end of block `index`, which is
        full."""
        if self is other:
            return True
        end = (index + 1) * self._block_size
        return (
            self.request.adapter == other.request.adapter
            and self.request.cache_salt == other.request.cache_salt
            and len(other.tokens) >= end
            and self.tokens[:end] == other.tokens[:end]
            and self.request.prompt_embeds[:end] == other.request.prompt_embeds[:end]
            and self._has_equal_items(other, index)
        )

    def items_of(self, index: int) -> tuple[tuple[str, int], ...]:
        """Return the items that overlap block `index`: identifier, and offset from the block's
        start."""
        ends = self._ends
        if not ends:
            return ()
        start = index * self._block_size
        first = bisect_right(ends, start)
        found: list[tuple[str, int]] = []
        for item in self.request.items[first:]:
            if item.offset >= start + self._block_size:
                break
            found.append((item.identifier, item.offset - start))
        return tuple(found)

    def _has_equal_items(self, other: Lineage, index: int) -> bool:
        if not self._ends and not other._ends:
            return True
        return all(self.items_of(i) == other.items_of(i) for i in range(index + 1))

    def _extend_digests(self, count: int) -> None:
        digests, function = self._digests, self._digest.function
        parent = digests[-1] if digests else b""
        begin = len(digests)
        size = self._block_size
        packed = pack_tokens(self.tokens[begin * size : count * size])
        for index in range(begin, count):
            at = (index - begin) * size * 4
            message = chain_message(parent, packed[at : at + size * 4], self._extras_of(index))
            parent = function(message)
            digests.append(parent)

    def _extras_of(self, index: int) -> bytes:
        if index and not self._ends and not self.request.prompt_embeds:
            return self._every
        salt = None if index else self.request.cache_salt
        items, embeds = self.items_of(index), self._embeds_of(index)
        return pack_extras(self.request.adapter, salt, items, embeds)

    def _embeds_of(self, index: int) -> TokenIds:
        """Return the embeddings of the block's prompt positions; none where tokens are embedded."""
        size = self._block_size
        return self.request.prompt_embeds[index * size : (index + 1) * size]

    def _tokens_of(self, index: int) -> TokenIds:
        size = self._block_size
        return tuple(self.tokens[index * size : (index + 1) * size])

    def _build_key(self, index: int) -> BlockKey:
        return BlockKey(
            self._keys[index - 1] if index else None,
            self._tokens_of(index),
            self.request.adapter,
            None if index else self.request.cache_salt,
            self.items_of(index),
            embeds=self._embeds_of(index),
        )
