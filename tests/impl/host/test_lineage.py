"""Lineages: contents are named once, and never renamed."""

from __future__ import annotations

import pytest

from blockstep.impl.digests import SHA256, Digest
from blockstep.impl.host import HostEngine
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.telling import EventLog
from blockstep.spec.vocabulary import BlockKey, BlockStored, Config, MultiModalItem, Request


def lineage_of(request: Request, block_size: int = 2, digest: Digest = SHA256) -> Lineage:
    return Lineage(request, block_size, digest)


def test_each_block_is_hashed_once() -> None:
    messages: list[bytes] = []

    def record(message: bytes) -> bytes:
        messages.append(message)
        return SHA256.function(message)

    lineage = lineage_of(Request("a", (1, 2, 3)), digest=Digest("recorded", True, record))
    first = lineage.digest_of(0)
    for token in (4, 5, 6):
        lineage.append(token)
    assert [lineage.digest_of(i) for i in (2, 1, 0)][-1] == first
    assert len(messages) == len(set(messages)) == 3


def test_long_prompts_are_hashed_in_batches_with_the_same_result() -> None:
    tokens = tuple(range(1000))
    ahead, stepwise = lineage_of(Request("a", tokens)), lineage_of(Request("a", tokens))
    last = ahead.digest_of(499)
    assert [stepwise.digest_of(i) for i in range(500)][-1] == last


def test_equal_contents_have_equal_digests_and_keys() -> None:
    one, two = lineage_of(Request("a", (1, 2, 3, 4))), lineage_of(Request("b", (1, 2, 3)))
    two.append(4)
    assert one.digest_of(1) == two.digest_of(1)
    assert one.key_of(1) == two.key_of(1)


@pytest.mark.parametrize(
    "other",
    [
        Request("b", (1, 2, 3, 5)),
        Request("b", (0, 2, 3, 4)),
        Request("b", (1, 2, 3, 4), adapter="x"),
        Request("b", (1, 2, 3, 4), cache_salt="x"),
        Request("b", (1, 2, 3, 4), items=(MultiModalItem("x", 3, 1),)),
        Request("b", (1, 2, 3, 4), items=(MultiModalItem("x", 0, 1),)),
        Request("b", (1, 2, 3, 4), prompt_embeds=(0, 0, 0, 0)),
    ],
)
def test_different_contents_differ(other: Request) -> None:
    one, two = lineage_of(Request("a", (1, 2, 3, 4))), lineage_of(other)
    assert one.digest_of(1) != two.digest_of(1)
    assert one.key_of(1) != two.key_of(1)
    assert not one.agrees_with(two, 1)


def test_agreement_ends_where_the_contents_part() -> None:
    one, two = lineage_of(Request("a", (1, 2, 3, 4))), lineage_of(Request("b", (1, 2, 3)))
    assert one.agrees_with(two, 0)
    assert not one.agrees_with(two, 1)


def test_a_key_is_built_once_and_survives_growth() -> None:
    lineage = lineage_of(Request("a", (1, 2, 3, 4), adapter="x", cache_salt="s"))
    key = lineage.key_of(1)
    lineage.append(5)
    lineage.append(6)
    assert lineage.key_of(1) is key
    assert lineage.key_of(2).parent is key
    first = BlockKey(None, (1, 2), adapter="x", cache_salt="s")
    assert key == BlockKey(first, (3, 4), adapter="x")


def test_a_hit_shares_the_key_objects() -> None:
    one, two = lineage_of(Request("a", (1, 2, 3, 4))), lineage_of(Request("b", (1, 2, 3, 4)))
    one.key_of(1)
    two.adopt_keys(one, 2)
    assert two.key_of(1) is one.key_of(1)


def test_items_belong_to_the_blocks_that_they_overlap() -> None:
    #        0 1 | 2 3 | 4 5 | 6 7
    # image    p   p p   p
    # sound                q   q
    items = (MultiModalItem("p", 1, 4), MultiModalItem("q", 5, 2))
    lineage = lineage_of(Request("a", tuple(range(8)), items=items))
    assert lineage.items_of(0) == (("p", 1),)
    assert lineage.items_of(1) == (("p", -1),)
    assert lineage.items_of(2) == (("p", -3), ("q", 1))
    assert lineage.items_of(3) == (("q", -1),)
    assert lineage.key_of(2).items == (("p", -3), ("q", 1))


def test_blocks_on_both_sides_of_one_left_out_are_two_events() -> None:
    log = EventLog(2)
    log.stored(lineage_of(Request("r", (1, 2, 3, 4, 5, 6, 7, 8))), (0, 2, 3))
    first = BlockKey(None, (1, 2))
    second = BlockKey(first, (3, 4))
    third = BlockKey(second, (5, 6))
    assert log.take() == (
        BlockStored((first,), None, (1, 2), 2),
        BlockStored((third, BlockKey(third, (7, 8))), second, (5, 6, 7, 8), 2),
    )


def test_an_unknown_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest = 'md5'"):
        HostEngine(Config(num_blocks=2), digest="md5")
