"""What a feature adds to the coverage goals (`judge.witnesses`).

The module `goals` in a feature's folder has an object `GOALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import Config


@dataclass(frozen=True, slots=True)
class Goals:
    """The coverage goals of a feature."""

    texts: Mapping[str, str]
    """What each goal means, by its name."""
    is_on: Callable[[Config, Ledger], bool]
    """Whether a run may reach any of them."""
    find: Callable[[Step, Ledger], Iterator[str]]
    """Yields the goals that a step reaches, each as often as it does; of any step, rejected ones
    included."""
