"""Planted: wrong decisions in an engine that follows a release, with the words of their cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Planted:
    """One wrong decision."""

    name: str
    plant: Callable[..., Any]
    """Changes the engine."""
    pattern: str
    """A pattern of headlines that name the cause: written from the wrong decision, not from what is
    printed."""
    features: tuple[str, ...] = ()
    """Features that the check must draw."""
    unseen: str = ""
    """Why no check of the release can meet it, so that no headline is measured; "" if one can."""

    def is_named_by(self, headline: str) -> bool:
        """Whether a headline names the cause."""
        return re.search(self.pattern, headline) is not None


def make_list() -> tuple[list[Planted], Callable[..., Callable[[Callable[..., Any]], Any]]]:
    """An empty list, and a decorator that adds a function to it."""
    entries: list[Planted] = []

    def planted(
        pattern: str, *features: str, unseen: str = ""
    ) -> Callable[[Callable[..., Any]], Any]:
        def keep(plant: Callable[..., Any]) -> Callable[..., Any]:
            entries.append(Planted(plant.__name__, plant, pattern, features, unseen))
            return plant

        return keep

    return entries, planted
