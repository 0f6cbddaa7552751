"""Exhibit: one planted defect, and how a page of the museum shows one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Methods: TypeAlias = dict[str, Any]
Plant: TypeAlias = Callable[[Any], Methods]
"""From the clean engine class to the methods that the defect replaces. Typed loosely on purpose:
the museum reaches into an engine that it must not import (architecture D3)."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One planted defect."""

    name: str
    title: str
    upstream: str
    """Where it happened, or the rule that it breaks."""
    properties: tuple[str, ...]
    """Properties that speak of it; any of them, or a divergence, kills it."""
    plant: Plant
    wrong_fix_of: str = ""
    """The exhibit that this one was meant to repair, where it is a repair that was tried."""


class Page:
    """The exhibits of one theme, in order of appearance."""

    def __init__(self) -> None:
        self.exhibits: list[Exhibit] = []

    def exhibit(
        self, title: str, upstream: str, *properties: str, wrong_fix_of: str = ""
    ) -> Callable[[Plant], Plant]:
        """Put a planted defect, named like its function, on this page."""

        def register(plant: Plant) -> Plant:
            name = plant.__name__.replace("_", "-")
            self.exhibits.append(Exhibit(name, title, upstream, properties, plant, wrong_fix_of))
            return plant

        return register


def collect(pages: Iterable[Page]) -> dict[str, Exhibit]:
    """All exhibits by name.

    Raises:
        ValueError: two exhibits have one name, or a wrong fix is of nothing that is shown.
    """
    exhibits: dict[str, Exhibit] = {}
    for page in pages:
        for entry in page.exhibits:
            if entry.name in exhibits:
                raise ValueError(f"exhibit {entry.name!r}: the name is taken; choose another")
            exhibits[entry.name] = entry
    for entry in exhibits.values():
        if entry.wrong_fix_of and entry.wrong_fix_of not in exhibits:
            raise ValueError(f"exhibit {entry.name!r}: there is no {entry.wrong_fix_of!r} to fix")
    return exhibits


def in_pool(clean: Any, **methods: Any) -> Methods:
    """The defect sits in the pool."""
    return {"pool_type": type("PlantedPool", (clean.pool_type,), methods)}


def in_prefix_map(clean: Any, **methods: Any) -> Methods:
    """The defect sits in the prefix map."""
    return {"prefix_type": type("PlantedMap", (clean.prefix_type,), methods)}
