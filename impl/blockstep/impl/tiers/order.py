"""Order: in which tier each block is kept, and which of them go down, come up, or go.

    keep  -->  tier 0  --overflow-->  tier 1  --overflow-->  ..  --overflow-->  gone
    fetch <--  tier 0  <------------  tier 1  <------------  ..

It knows names only. Each change is a list of moves, to be done in their order: a tier is never
asked to hold more than it has room for. Source: seed 002 "The Offloading Pipeline", made sound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

Name: TypeAlias = str | bytes


class Move(NamedTuple):
    """A block changes its tier. None: it was in none before; it is gone."""

    name: Name
    source: int | None
    target: int | None


class TierOrder:
    """Tiers with room for so many blocks each, the fastest first.

    Raises:
        ValueError: no tier, or a capacity that is no whole number, or below 0.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        if not capacities or any(type(room) is not int or room < 0 for room in capacities):
            raise ValueError(f"capacities = {capacities!r}: must be whole numbers, 0 or more")
        self.capacities = tuple(capacities)
        self.clear()

    def clear(self) -> None:
        """Nothing is held."""
        self._tiers: list[OrderedDict[Name, None]] = [OrderedDict() for _ in self.capacities]
        """Of each: next to go first."""
        self._levels: dict[Name, int] = {}

    def list_tiers(self) -> tuple[tuple[Name, ...], ...]:
        """Names in each tier, the least recently used first."""
        return tuple(tuple(tier) for tier in self._tiers)

    def count(self, names: Sequence[Name]) -> int:
        """Leading names that are held."""
        lacking = (at for at, name in enumerate(names) if name not in self._levels)
        return next(lacking, len(names))

    def level_of(self, name: Name) -> int | None:
        """In which tier it is."""
        return self._levels.get(name)

    def count_in(self, level: int) -> int:
        """Blocks in a tier."""
        return len(self._tiers[level])

    def lose(self, name: Name) -> None:
        """It is held nowhere any more."""
        level = self._levels.pop(name, None)
        if level is not None:
            del self._tiers[level][name]

    def keep(self, names: Sequence[Name], first: int) -> list[Move]:
        """Hold the blocks of a text from `first` on; those of it that are held are used, too.

        None of them goes to make room for more of them: the first without room ends it.
        """
        self._touch(names)
        kept, moves = frozenset(names), list[Move]()
        for name in names[first:]:
            if name in self._levels:
                continue
            if not self._put(name, None, 0, kept, moves):
                break
        self._touch(names)
        return moves

    def fetch(self, names: Sequence[Name]) -> list[Move]:
        """Bring these, which are held, up as far as there is room for them."""
        kept, moves = frozenset(names), list[Move]()
        for name in names:
            level = self._levels[name]
            if level:
                self.lose(name)
                self._put(name, level, 0, kept, moves)
        self._touch(names)
        return moves

    def _touch(self, names: Sequence[Name]) -> None:
        """The first of a text is its most recent one: the others are of no use without it."""
        for name in reversed(names):
            level = self._levels.get(name)
            if level is not None:
                self._tiers[level].move_to_end(name)

    def _put(
        self, name: Name, source: int | None, level: int, kept: Collection[Name], moves: list[Move]
    ) -> bool:
        """Into the first tier from `level` down that has room or makes some; whether one has."""
        for target in range(level, len(self.capacities)):
            tier = self._tiers[target]
            if len(tier) == self.capacities[target]:
                victim = next((other for other in tier if other not in kept), None)
                if victim is None:
                    continue
                self.lose(victim)
                if not self._put(victim, target, target + 1, kept, moves):
                    moves.append(Move(victim, target, None))
            tier[name] = None
            self._levels[name] = target
            if target != source:
                moves.append(Move(name, source, target))
            return True
        return False
