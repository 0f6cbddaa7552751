"""Order: which tier holds which block name, and which names are evicted for others.

    keep(a b c)    tier 0 [x a b c]    tier 1 [y x]    y is gone
                          out first -> last

This module knows names only. The store that has the content carries out the moves it returns.
Source: seed 002 "The Offloading Pipeline", made sound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

Name: TypeAlias = str | bytes


class Move(NamedTuple):
    """Move of a name from a tier (None: from outside) to another tier (None: it is dropped)."""

    name: Name
    source: int | None
    target: int | None


class TierOrder:
    """Tiers from the fastest to the slowest; a name is in at most one tier.

    The first name of a call counts as the most recently used: later blocks of a prefix are of no
    use without the first.

    Args:
        capacities: the maximum number of names of each tier.

    Raises:
        ValueError: a capacity is no whole number, or below 0.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        if any(type(one) is not int or one < 0 for one in capacities):
            raise ValueError(f"capacities {tuple(capacities)} must be whole numbers from 0 on")
        self._capacities = tuple(capacities)
        self._tiers: list[dict[Name, None]] = [{} for _ in capacities]
        """Names of each tier, least recently used first, as an ordered set."""

    def list_tiers(self) -> tuple[tuple[Name, ...], ...]:
        """Return the names of each tier, least recently used first."""
        return tuple(map(tuple, self._tiers))

    def level_of(self, name: Name) -> int | None:
        """Return the index of the tier that holds `name`; None if none does."""
        return next((level for level, tier in enumerate(self._tiers) if name in tier), None)

    def count(self, names: Sequence[Name]) -> int:
        """Return the length of the longest prefix of `names` whose names are all in a tier."""
        lacking = (i for i, name in enumerate(names) if self.level_of(name) is None)
        return next(lacking, len(names))

    def count_in(self, level: int) -> int:
        """Return the number of names in a tier."""
        return len(self._tiers[level])

    def keep(self, names: Sequence[Name], first: int) -> list[Move]:
        """Mark `names` as used, and add the missing ones from index `first` on.

        Each goes into the first tier that has room or can evict a name that is not of this call.
        The call ends at the first name that fits nowhere: later blocks would be of no use.

        Returns:
            Moves in order; an eviction precedes the move that needs its place.
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
        """Mark `names` as used, and move them up from lower tiers as far as there is room.

        Names stay where they are if names of this call fill the tiers above.

        Returns:
            Moves in order; a name leaves its tier before an evicted name takes its place.
        """
        moves: list[Move] = []
        call = set(names)
        self._touch(names)
        for name in names:
            level = self.level_of(name)
            if not level:
                continue
            # It leaves its tier first, so that the name evicted for it can take its place.
            del self._tiers[level][name]
            at = len(moves)
            target = self._find_room(range(level), call, moves)
            self._tiers[level if target is None else target][name] = None
            if target is not None:
                moves.insert(at, Move(name, level, target))
        self._touch(names)
        return moves

    def lose(self, name: Name) -> None:
        """Remove `name` from all tiers, because its content is lost."""
        for tier in self._tiers:
            tier.pop(name, None)

    def clear(self) -> None:
        """Remove all names."""
        for tier in self._tiers:
            tier.clear()

    def _touch(self, names: Sequence[Name]) -> None:
        for name in reversed(names):
            for tier in self._tiers:
                if name in tier:
                    del tier[name]
                    tier[name] = None

    def _make_room(self, level: int, call: Collection[Name], moves: list[Move]) -> bool:
        """Make room for one name in a tier, evicting the least recently used one if it is full.

        Returns False, and changes nothing, if only names of `call` could be evicted.
        """
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
