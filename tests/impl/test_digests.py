"""Digests of block keys: different for different content, and equal on every machine."""

from __future__ import annotations

from array import array

from blockstep.impl.digests import (
    chain_message,
    name_blocks,
    pack_extras,
    pack_tokens,
)
from blockstep.spec.vocabulary import MultiModalItem, Request


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens(array("i", (1, 2**31 - 1))) == b"\1\0\0\0\xff\xff\xff\x7f"


def test_extra_keys_of_different_kinds_have_different_bytes() -> None:
    packed = [
        pack_extras(),
        pack_extras(adapter="x"),
        pack_extras(cache_salt="x"),
        pack_extras(items=(("x", 0),)),
        pack_extras(items=(("x", -1),)),
        pack_extras(adapter="x", cache_salt="x"),
        pack_extras(adapter="xs"),
        pack_extras(items=(("x", 0), ("x", 1))),
        pack_extras(adapter="\ud800"),
        pack_extras(embeds=(1,)),
        pack_extras(embeds=(1, 0)),
        pack_extras(items=(("x", 0),), embeds=(1,)),
    ]
    assert len(set(packed)) == len(packed)


def test_the_first_block_differs_from_one_with_its_tokens_as_parent() -> None:
    assert chain_message(b"", b"ab", b"") != chain_message(b"ab", b"", b"")
    assert chain_message(b"a", b"b", b"") != chain_message(b"", b"ab", b"")


ALIKE = Request("a", (1, 2, 3, 4))
OTHERS = (
    Request("b", (1, 2, 3, 5)),
    Request("b", (0, 2, 3, 4)),
    Request("b", (1, 2, 3, 4), adapter="x"),
    Request("b", (1, 2, 3, 4), cache_salt="x"),
    Request("b", (1, 2, 3, 4), items=(MultiModalItem("x", 3, 1),)),
    Request("b", (1, 2, 3, 4), items=(MultiModalItem("x", 0, 1),)),
    Request("b", (1, 2, 3, 4), prompt_embeds=(0, 0, 0, 0)),
)


def test_names_of_full_blocks_depend_on_everything_in_the_key() -> None:
    names = name_blocks(ALIKE, 2)
    assert names == name_blocks(Request("b", (1, 2, 3, 4, 5)), 2)
    assert len(names) == 2
    assert len({name_blocks(other, 2)[1] for other in OTHERS} - {names[1]}) == len(OTHERS)


def test_names_of_blocks_never_change() -> None:
    """Stores keep blocks under these names; with other names, their content would be lost."""
    first, last = name_blocks(Request("a", (1, 2, 3), adapter="x", cache_salt="s"), 1)[::2]
    assert (first.hex()[:16], last.hex()[:16]) == ("0d11d71142e23bca", "809244dc21ff5bca")
