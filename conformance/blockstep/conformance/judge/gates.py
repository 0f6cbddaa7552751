"""Gates of features: limits at which a waiting request is skipped, with no outside event due.

The module `properties` in a feature's folder may have a class `GATE`.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.protocol.features import is_off, load_parts
from blockstep.spec import vocabulary as v


class Gate(Protocol):
    """A limit that an admission may meet, while a plan admits requests."""

    def __init__(self, ledger: Ledger) -> None: ...

    def has_room_for(self, name: v.RequestId) -> bool:
        """Whether a request may be admitted."""
        ...

    def take(self, name: v.RequestId) -> None:
        """Note that a request runs."""
        ...


@cache
def get_gates(lacked: frozenset[str]) -> tuple[type[Gate], ...]:
    """Return the gates of the features that a config does not switch off (`Ledger.lacked`)."""
    modules = load_parts("properties").items()
    found = [it.GATE for name, it in modules if hasattr(it, "GATE") and not is_off(name, lacked)]
    return tuple(found)
