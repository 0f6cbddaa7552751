"""Tiers: the levels of a store below the pool, and which blocks move down, up, or out.

    pool  --keep-->  host memory  --overflow-->  file  --overflow-->  gone
    pool  <--fetch-  host memory  <---fetch----  file

A state machine of its own (architecture D11), behind the store that a scheduler asks: it knows
block names (store keys), and neither blocks nor requests. Equal names mean equal content, so a name
is in at most one tier. A block is useless without those before it in its token sequence: of blocks
used together, the last moves down first.
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
    """The names kept in each tier, from the fastest tier down."""

    capacities: tuple[int, ...]
    """Capacity of each tier, in blocks."""
    tiers: tuple[Names, ...]
    """Names in each tier, the least recently used first."""


def create_tiers(capacities: Sequence[int]) -> Tiers:
    """Return empty tiers of these capacities. Source: seed 002 "The Memory Hierarchy"."""
    return Tiers(tuple(capacities), ((),) * len(capacities))


def count_held(tiers: Tiers, names: Sequence[Name]) -> int:
    """Return how many leading names are kept, in any tier.

    Source: seed 002 "Prefix Cache Lookup"; P5.
    """
    held = {name for tier in tiers.tiers for name in tier}
    return next((at for at, name in enumerate(names) if name not in held), len(names))


def keep(tiers: Tiers, names: Sequence[Name], first: int = 0) -> Tiers:
    """Keep the blocks of a token sequence from `first` on; those before become as recent.

    Stops at the first one without room: no block of the sequence is evicted for a later one.
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
    """Return the leading names that are kept and readable, moved up as far as there is room.

    The first one that cannot be read is removed, so that it is not asked for again; those after it
    are not read. Source: seed 002 "Restoration (CPU to GPU)"; P19.
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
    """Return empty tiers. Source: P25."""
    return create_tiers(tiers.capacities)


def is_held(tiers: Tiers, name: Name) -> bool:
    """Whether a name is kept, in any tier. Source: architecture D11."""
    return any(name in tier for tier in tiers.tiers)


def put(tiers: Tiers, level: int, name: Name, kept: Collection[Name]) -> Tiers | None:
    """Put a name into the first tier from `level` down with room for it; None if there is none.

    Room is made by moving the least recently used name that is not in `kept` one tier down in the
    same way, or out of the last tier. Source: seed 002 "SSD spill"; P16.
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
    """Make these names the most recent of their tiers, the first of a sequence the most recent of
    all.

    Source: seed 002 "Eviction from the Prefix Cache"; P16.
    """
    for level, tier in enumerate(tiers.tiers):
        used = [name for name in reversed(names) if name in tier]
        others = [name for name in tier if name not in used]
        tiers = with_tier(tiers, level, (*others, *used))
    return tiers


def without(tiers: Tiers, gone: Sequence[Name]) -> Tiers:
    """Remove these names from all tiers. Source: architecture D11."""
    for level, tier in enumerate(tiers.tiers):
        left = tuple([name for name in tier if name not in gone])
        tiers = with_tier(tiers, level, left)
    return tiers


def with_tier(tiers: Tiers, level: int, names: Names) -> Tiers:
    """Return the tiers with these names in one of them. Source: architecture D11."""
    return replace(tiers, tiers=(*tiers.tiers[:level], names, *tiers.tiers[level + 1 :]))
