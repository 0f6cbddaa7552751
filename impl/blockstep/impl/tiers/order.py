"""Order: which tier holds which name, and which names make room for others.

    keep(a b c)    tier 0 [x a b c]    tier 1 [y x]    y is gone
                          out first -> last

It knows names and no content. Whoever has the content does the moves that it answers.
Source: seed 002 "The Offloading Pipeline", made sound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

Name: TypeAlias = str | bytes


class Move(NamedTuple):
    """A name goes from a tier (None: it comes from outside) to another (None: it is forgotten)."""

    name: Name
    source: int | None
    target: int | None


class TierOrder:
    """Tiers from the fastest to the slowest; a name is in one of them at most.

    Of names used in one call the first is the most recent: the others are of no use without it.

    Args:
        capacities: how many names each tier holds at most.

    Raises:
        ValueError: a capacity is no whole number, or below 0.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        if any(type(one) is not int or one < 0 for one in capacities):
            raise ValueError(f"capacities {tuple(capacities)} must be whole numbers from 0 on")
        self._capacities = tuple(capacities)
        self._tiers: list[dict[Name, None]] = [{} for _ in capacities]
        """Names of each, least recently used first."""

    def list_tiers(self) -> tuple[tuple[Name, ...], ...]:
        """Names of each tier, least recently used first."""
        return tuple(map(tuple, self._tiers))

    def level_of(self, name: Name) -> int | None:
        """The tier that holds it, if any."""
        return next((level for level, tier in enumerate(self._tiers) if name in tier), None)

    def count(self, names: Sequence[Name]) -> int:
        """How many there are in any tier, from the first on up to the first that lacks."""
        lacking = (i for i, name in enumerate(names) if self.level_of(name) is None)
        return next(lacking, len(names))

    def count_in(self, level: int) -> int:
        """How many names a tier holds."""
        return len(self._tiers[level])

    def keep(self, names: Sequence[Name], first: int) -> list[Move]:
        """Use `names`, and take those from `first` on that lack into the first tier with room.

        The first that finds room in none ends it: those behind it would be of no use.

        Returns:
            Moves in order; a tier has made room before a name comes in.
        """
        moves: list[Move] = []
        call = set(names)
        self._touch(names)
        for name in names[first:]:
            if self.level_of(name) is not None:
                continue
            target = self._find_room(range(len(self._tiers)), call, moves)
            if target is None:
                break
            self._tiers[target][name] = None
            moves.append(Move(name, None, target))
        self._touch(names)
        return moves

    def fetch(self, names: Sequence[Name]) -> list[Move]:
        """Use `names`, and bring those that are held up as far as there is room.

        Where those of this call fill the tiers above, the rest stay where they are.

        Returns:
            Moves in order; a name leaves its tier before others come down.
        """
        moves: list[Move] = []
        call = set(names)
        self._touch(names)
        for name in names:
            level = self.level_of(name)
            if not level:
                continue
            # Its own place is for whoever goes down, so it leaves before room is made.
            del self._tiers[level][name]
            at = len(moves)
            target = self._find_room(range(level), call, moves)
            self._tiers[level if target is None else target][name] = None
            if target is not None:
                moves.insert(at, Move(name, level, target))
        self._touch(names)
        return moves

    def lose(self, name: Name) -> None:
        """Its content is gone: no tier holds it."""
        for tier in self._tiers:
            tier.pop(name, None)

    def clear(self) -> None:
        """No tier holds anything."""
        for tier in self._tiers:
            tier.clear()

    def _touch(self, names: Sequence[Name]) -> None:
        for name in reversed(names):
            for tier in self._tiers:
                if name in tier:
                    del tier[name]
                    tier[name] = None

    def _make_room(self, level: int, call: Collection[Name], moves: list[Move]) -> bool:
        """Room for one more; False, and nothing has changed, if only names of `call` could go."""
        tier = self._tiers[level]
        if len(tier) < self._capacities[level]:
            return True
        name = next((one for one in tier if one not in call), None)
        if name is None:
            return False
        del tier[name]
        target = self._find_room(range(level + 1, len(self._tiers)), call, moves)
        if target is not None:
            self._tiers[target][name] = None
        moves.append(Move(name, level, target))
        return True

    def _find_room(
        self, levels: Iterable[int], call: Collection[Name], moves: list[Move]
    ) -> int | None:
        return next((level for level in levels if self._make_room(level, call, moves)), None)
