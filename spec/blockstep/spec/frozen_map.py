"""FrozenMap: a mapping that is a value.

The standard library has no immutable mapping, and a state must be hashable and comparable (D2).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import TypeVar, final, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


@final
class FrozenMap(Mapping[K, V]):
    """An immutable mapping; equality and hash ignore the order of insertion.

    Iteration follows insertion, so no decision may iterate over it.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[K, V] = dict(items)

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    @overload
    def get(self, key: K, /) -> V | None: ...

    @overload
    def get(self, key: K, /, default: V | T) -> V | T: ...

    def get(self, key: K, /, default: object = None) -> object:
        """Return the value for a key, or `default`."""
        return self._items.get(key, default)

    # The views of `Mapping` look up one key after the other.

    def keys(self) -> KeysView[K]:
        """Return the keys in order of insertion."""
        return self._items.keys()

    def values(self) -> ValuesView[V]:
        """Return the values in order of insertion."""
        return self._items.values()

    def items(self) -> ItemsView[K, V]:
        """Return the items in order of insertion."""
        return self._items.items()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self._items == other._items
        return self._items == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def having(self, key: K, value: V) -> FrozenMap[K, V]:
        """Return the mapping with this value for this key, replacing an earlier one."""
        return freeze({**self._items, key: value})

    def without(self, key: K) -> FrozenMap[K, V]:
        """Return the mapping without this key, whether or not it is there."""
        if key not in self._items:
            return self
        return freeze({other: self._items[other] for other in self._items if other != key})

    def to_dict(self) -> dict[K, V]:
        """Return a mutable copy."""
        return self._items.copy()


def freeze(items: dict[K, V]) -> FrozenMap[K, V]:
    """Return the mapping with this very dictionary, which nothing may change afterwards.

    Source: architecture D2.
    """
    frozen: FrozenMap[K, V] = FrozenMap.__new__(FrozenMap)
    frozen._items = items
    return frozen
