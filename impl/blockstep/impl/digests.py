"""Digests: hashes of block contents, and the bytes that are hashed."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from typing import Final

from blockstep.impl.interning import list_extras
from blockstep.spec.vocabulary import Request, RequestId, TokenIds

LENGTHS: Final = [bytes((length,)) for length in range(256)]


def pack_tokens(token_ids: array[int]) -> bytes:
    """Return four bytes per token, little-endian on every machine, so that digests are portable."""
    if sys.byteorder == "little":
        return token_ids.tobytes()
    swapped = token_ids[:]
    swapped.byteswap()
    return swapped.tobytes()


def pack_extras(
    adapter: str | None = None,
    cache_salt: str | None = None,
    items: tuple[tuple[RequestId, int], ...] = (),
    embeds: TokenIds = (),
) -> bytes:
    """Return the bytes of everything but tokens that determines a block's KV; empty if nothing.

    Each part starts with its kind and its length, so an adapter, a salt and an item of the same
    name are different, and parts cannot be confused (P6). `embeds` are the embeddings of the
    block's prompt positions, by number.
    """
    parts: list[bytes] = []
    if adapter is not None:
        parts.append(_pack_name(b"a", adapter))
    if cache_salt is not None:
        parts.append(_pack_name(b"s", cache_salt))
    for identifier, offset in items:
        parts.append(_pack_name(b"i", identifier) + struct.pack("<q", offset))
    if embeds:
        parts.append(b"e" + struct.pack("<I", len(embeds)) + pack_tokens(array("i", embeds)))
    return b"".join(parts)


def _pack_name(kind: bytes, name: str) -> bytes:
    # A client may send any str; "surrogatepass" encodes even those that are no valid Unicode.
    data = name.encode("utf-8", "surrogatepass")
    return kind + struct.pack("<I", len(data)) + data


def chain_message(parent: bytes, packed_tokens: bytes, packed_extras: bytes) -> bytes:
    """Return the bytes that a block's digest is computed from.

    `parent` is the digest of the block before it, empty for the first. Its length comes first and
    all blocks have the same number of tokens, so the bytes can be parsed in one way only.
    """
    return LENGTHS[len(parent)] + parent + packed_tokens + packed_extras


def name_blocks(request: Request, block_size: int) -> list[bytes]:
    """Return the SHA-256 of the full blocks of a request's prompt, each chained to the one before
    it: equal names mean equal contents (P3, P6)."""
    tokens, names, size = array("i", request.prompt_token_ids), list[bytes](), block_size
    packed, parent = pack_tokens(tokens), b""
    full = len(tokens) // size
    for index, extras in enumerate(list_extras(request, size, full)):
        of_block = packed[4 * size * index : 4 * size * (index + 1)]
        message = chain_message(parent, of_block, pack_extras(*extras))
        parent = hashlib.sha256(message).digest()
        names.append(parent)
    return names
