"""Digests: short names for block contents, and the bytes that they are taken of."""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from blockstep.spec.vocabulary import RequestId, TokenIds


@dataclass(frozen=True, slots=True)
class Digest:
    """A function from bytes to a short name.

    With a cryptographic one, equal digests are taken to mean equal contents. Any other only
    narrows the search: each candidate is compared with what is looked for (P3, P6).
    """

    name: str
    cryptographic: bool
    function: Callable[[bytes], bytes]
    """Returns at most 255 bytes, always equally many."""


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _crc32(message: bytes) -> bytes:
    return zlib.crc32(message).to_bytes(4, "little")


SHA256: Final = Digest("sha256", cryptographic=True, function=_sha256)
CRC32: Final = Digest("crc32", cryptographic=False, function=_crc32)
LENGTHS: Final = [bytes((length,)) for length in range(256)]
DIGESTS: Final[Mapping[str, Digest]] = {digest.name: digest for digest in (SHA256, CRC32)}


def find_digest(digest: str | Digest) -> Digest:
    """The digest of this name, or the one given.

    Raises:
        ValueError: no digest has this name.
    """
    if isinstance(digest, Digest):
        return digest
    if digest not in DIGESTS:
        known = ", ".join(DIGESTS)
        raise ValueError(f"digest = {digest!r}: must be a known name; use one of {known}")
    return DIGESTS[digest]


def pack_tokens(token_ids: array[int]) -> bytes:
    """Four bytes per token, little-endian on every machine, so that digests can travel."""
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
    """What beside tokens shapes a block's KV, as bytes; empty if there is nothing.

    Each part starts with its kind and its length, so an adapter, a salt and an item of the same
    name stay apart and no part can run into the next (P6). `embeds` are the embeddings of the
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
    """The bytes that a block's digest is taken of.

    `parent` is the digest of the block before it, empty for the first. Its length comes first and
    a block's tokens are always equally many, so the message can be read back in one way only.
    """
    return LENGTHS[len(parent)] + parent + packed_tokens + packed_extras
