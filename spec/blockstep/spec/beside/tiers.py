"""Tiers: where a store keeps blocks below the pool, and which of them go down, come up, or go.

    pool  --keep-->  host memory  --overflow-->  file  --overflow-->  gone
    pool  <--fetch-  host memory  <---fetch----  file

A machine of its own (architecture D11), behind the store that a scheduler asks: it knows names of
blocks, and neither blocks nor requests. Equal names mean equal content, so a name is in one tier at
most. A block is of no use without those before it in its text: what is used together goes down from
its end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from blockstep.spec.copies import replace

Name: TypeAlias = str | bytes
Names: TypeAlias = tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Tiers:
    """What is kept, from the fastest tier down."""

    capacities: tuple[int, ...]
    """Of each tier, in blocks."""
    tiers: tuple[Names, ...]
    """Names in each, the least recently used first."""


def create_tiers(capacities: Sequence[int]) -> Tiers:
    """Tiers of so many blocks, with nothing in them. Source: seed 002 "The Memory Hierarchy"."""
    return Tiers(tuple(capacities), ((),) * len(capacities))


def count_held(tiers: Tiers, names: Sequence[Name]) -> int:
    """Leading names that are kept, in any tier. Source: seed 002 "Prefix Cache Lookup"; P5."""
    held = {name for tier in tiers.tiers for name in tier}
    return next((at for at, name in enumerate(names) if name not in held), len(names))


def keep(tiers: Tiers, names: Sequence[Name], first: int = 0) -> Tiers:
    """With the blocks of a text from `first` on, and with those before as recent as they are.

    The first that finds no room ends it: none of the text goes to make room for more of it.
    Source: seed 002 "The Offloading Pipeline".
    """
    tiers, kept = touch(tiers, names), frozenset(names)
    for name in names[first:]:
        if is_held(tiers, name):
            continue
        after = put(tiers, 0, name, kept)
        if after is None:
            break
        tiers = after
    return touch(tiers, names)


def fetch(
    tiers: Tiers, names: Sequence[Name], unreadable: Collection[Name] = ()
) -> tuple[Tiers, Names]:
    """The leading names that are kept and can be read, as high up as there is room for them.

    The first of them that cannot be read is lost: nobody is to ask for it again, and nobody reads
    what is behind it. Source: seed 002 "Restoration (CPU to GPU)"; P19.
    """
    held = tuple(names[: count_held(tiers, names)])
    num_read = next((at for at, name in enumerate(held) if name in unreadable), len(held))
    tiers = without(tiers, held[num_read : num_read + 1])
    found = held[:num_read]
    kept = frozenset(found)
    for name in found:
        after = put(without(tiers, (name,)), 0, name, kept)
        assert after is not None, "there is room at least where it was"
        tiers = after
    return touch(tiers, found), found


def clear(tiers: Tiers) -> Tiers:
    """With nothing in any tier. Source: P25."""
    return create_tiers(tiers.capacities)


def is_held(tiers: Tiers, name: Name) -> bool:
    """Whether a name is kept, in any tier. Source: architecture D11."""
    return any(name in tier for tier in tiers.tiers)


def put(tiers: Tiers, level: int, name: Name, kept: Collection[Name]) -> Tiers | None:
    """With a name in the first tier from `level` down that has room, or makes some; None: nowhere.

    Room is made by the least recently used that is none of `kept`, which goes one tier down in the
    same way, and is gone where there is none. Source: seed 002 "SSD spill"; P16.
    """
    if level == len(tiers.capacities):
        return None
    tier = tiers.tiers[level]
    if len(tier) == tiers.capacities[level]:
        victim = next((other for other in tier if other not in kept), None)
        if victim is None:
            return put(tiers, level + 1, name, kept)
        tiers = without(tiers, (victim,))
        tiers = put(tiers, level + 1, victim, kept) or tiers
    return with_tier(tiers, level, (*tiers.tiers[level], name))


def touch(tiers: Tiers, names: Sequence[Name]) -> Tiers:
    """With these as the most recent of their tiers, the first of a text as the most recent of all.

    Source: seed 002 "Eviction from the Prefix Cache"; P16.
    """
    for level, tier in enumerate(tiers.tiers):
        used = [name for name in reversed(names) if name in tier]
        others = [name for name in tier if name not in used]
        tiers = with_tier(tiers, level, (*others, *used))
    return tiers


def without(tiers: Tiers, gone: Sequence[Name]) -> Tiers:
    """With these in no tier. Source: architecture D11."""
    for level, tier in enumerate(tiers.tiers):
        left = tuple([name for name in tier if name not in gone])
        tiers = with_tier(tiers, level, left)
    return tiers


def with_tier(tiers: Tiers, level: int, names: Names) -> Tiers:
    """With these names in one tier. Source: architecture D11."""
    return replace(tiers, tiers=(*tiers.tiers[:level], names, *tiers.tiers[level + 1 :]))
