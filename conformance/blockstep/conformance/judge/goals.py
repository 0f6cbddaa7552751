"""Coverage goals of features (`judge.witnesses`).

The module `goals` in a feature's folder has an object `GOALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step

Find: TypeAlias = Callable[[Step, Ledger], Iterable[str]]
"""Returns the goals that a step reaches, each as often as it does. The ledger knows all steps
before it."""


@dataclass(frozen=True, slots=True)
class Goals:
    """The coverage goals of a feature."""

    texts: Mapping[str, str]
    """Meanings of the goals, by their names."""
    find: Mapping[type, Find]
    """The functions that find them, by the type of the accepted event; under `Rejected` that of a
    rejected event. They are not asked where the config lacks the feature."""
