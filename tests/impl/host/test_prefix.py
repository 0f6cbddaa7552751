"""The prefix map: the first published wins, and a collision is never a hit."""

from __future__ import annotations

from blockstep.impl.host import SHA256, Digest
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.prefix import PrefixMap
from blockstep.spec.vocabulary import Request

COLLIDING = Digest("colliding", cryptographic=False, function=lambda message: b"same")


def lineage_of(*tokens: int, digest: Digest = SHA256, adapter: str | None = None) -> Lineage:
    return Lineage(Request("a", tokens, adapter=adapter), 2, digest)


def test_the_block_published_first_is_hit_until_it_is_withdrawn() -> None:
    prefix, lineage = PrefixMap(9, verify=False), lineage_of(1, 2)
    for block in (5, 3, 4):
        prefix.publish(block, lineage, 0)
    assert prefix.hits(lineage, 1) == [5]
    assert prefix.cached(prefix.keys()) == {lineage.key_of(0): (5, 3, 4)}
    prefix.withdraw(5)
    assert prefix.hits(lineage, 1) == [3]
    prefix.withdraw(5)
    assert prefix.cached(prefix.keys()) == {lineage.key_of(0): (3, 4)}


def test_hits_end_at_the_first_miss_and_at_the_limit() -> None:
    prefix, lineage = PrefixMap(9, verify=False), lineage_of(1, 2, 3, 4, 5, 6)
    prefix.publish(1, lineage, 0)
    prefix.publish(3, lineage, 2)
    assert prefix.hits(lineage, 3) == [1]
    prefix.publish(2, lineage, 1)
    assert prefix.hits(lineage, 3) == [1, 2, 3]
    assert prefix.hits(lineage, 2) == [1, 2]
    assert prefix.hits(lineage, 0) == []


def test_clear_forgets_every_block() -> None:
    prefix, lineage = PrefixMap(9, verify=False), lineage_of(1, 2)
    prefix.publish(1, lineage, 0)
    prefix.clear()
    assert prefix.hits(lineage, 1) == []
    assert prefix.keys() == [None] * 9
    prefix.publish(1, lineage, 0)
    assert prefix.hits(lineage, 1) == [1]


def test_colliding_contents_are_told_apart() -> None:
    prefix = PrefixMap(9, verify=True)
    one, two = lineage_of(1, 2, 3, 4, digest=COLLIDING), lineage_of(5, 6, digest=COLLIDING)
    adapted = lineage_of(1, 2, digest=COLLIDING, adapter="x")
    prefix.publish(1, one, 0)
    prefix.publish(2, one, 1)
    prefix.publish(3, two, 0)
    prefix.publish(4, two, 0)
    assert prefix.hits(lineage_of(1, 2, 3, 4, digest=COLLIDING), 2) == [1, 2]
    assert prefix.hits(lineage_of(5, 6, digest=COLLIDING), 1) == [3]
    assert prefix.hits(adapted, 1) == []
    assert prefix.hits(lineage_of(3, 4, digest=COLLIDING), 1) == []
    assert prefix.cached(prefix.keys()) == {
        one.key_of(0): (1,), one.key_of(1): (2,), two.key_of(0): (3, 4),
    }  # fmt: skip
    prefix.withdraw(1)
    assert prefix.hits(lineage_of(1, 2, 3, 4, digest=COLLIDING), 2) == []
