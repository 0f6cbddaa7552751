"""Coverage goals of features (`judge.coverage_goals`).

The module `goals` in a feature's folder has an object `GOALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step

Find: TypeAlias = Callable[[Step, History], Iterable[str]]
"""Returns the goals that a step reaches, each as often as it does. The history knows all steps
before it."""


@dataclass(frozen=True, slots=True)
class Goals:
    """The coverage goals of a feature."""

    texts: Mapping[str, str]
    """Meanings of the goals, by their names."""
    find: Mapping[type, Find]
    """The functions that find them, by the type of the accepted event; under `Rejected` that of a
    rejected event. They are not asked where the config lacks the feature."""
