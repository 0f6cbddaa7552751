"""Coverage goals of features (`judge.witnesses`).

The module `goals` in a feature's folder has an object `GOALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step


@dataclass(frozen=True, slots=True)
class Goals:
    """The coverage goals of a feature."""

    texts: Mapping[str, str]
    """Meanings of the goals, by their names."""
    find: Callable[[Step, Ledger], Iterable[str]]
    """Returns the goals that a step reaches, each as often as it does; of any step, rejected ones
    included. It is not asked where the config lacks the feature."""
