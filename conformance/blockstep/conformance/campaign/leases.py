"""Store: what the workers of a campaign share, and the leases of its units.

Each unit of a published round is *open* until its result is committed, and is leased to at most one
worker at a time. A lease that is not renewed expires, and the unit is given to another worker. The
result of a unit is committed once, in one atomic operation that also closes the unit: a second
commit is refused. So nothing has to be counted in the store, and nothing can be counted twice.

All other keys are written once and not changed (`put`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from blockstep.conformance.search.isolation import HarnessError

PATIENCE_SECONDS = 600.0
"""Time for which a store may be away."""
WAIT_SECONDS_MAX = 3.2
LOG_SECONDS_MIN = 0.4
"""Time between two tries from which on they are reported."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Patient")


class Lease(msgspec.Struct, frozen=True):
    """An open unit, and its lease if there is one."""

    unit: str
    owner: str = ""
    seconds: float = 0.0
    """Time that is left of the lease."""


class Store(Protocol):
    """Store of one campaign. Every method waits while the store is away, for
    `PATIENCE_SECONDS`, then raises HarnessError."""

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, None for those that are absent."""
        ...

    def put(self, key: str, data: bytes) -> bool:
        """Write a value unless there is one; return whether it was written."""
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Delete keys."""
        ...

    def publish(self, number: int, data: bytes, units: Sequence[str]) -> bool:
        """Write `round/NUMBER` and open its units, all or nothing; return False if that round was
        published before."""
        ...

    def count_rounds(self) -> int:
        """Return the number of published rounds."""
        ...

    def take(self, owner: str, seconds: float) -> str | None:
        """Lease an open unit that has no valid lease; return the unit's name, or None."""
        ...

    def renew(self, unit: str, owner: str, seconds: float) -> bool:
        """Extend a lease; return False if it has passed to another owner, or the unit is closed."""
        ...

    def commit(self, unit: str, data: bytes) -> bool:
        """Write `result/UNIT` and close the unit, in one step; return False if it was closed
        before, and then write nothing."""
        ...

    def list_leases(self) -> list[Lease]:
        """Return the open units with their leases."""
        ...


class Patient:
    """Base of stores that may be away for a while."""

    name: str
    away: tuple[type[Exception], ...]
    """Exceptions that mean that the store is away."""


def patiently(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method of a store try again, more and more slowly, while the store is away."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        started, seconds = time.monotonic(), 0.05
        while True:
            try:
                value = method(self, *args, **kwargs)
            except self.away as error:
                waited = time.monotonic() - started
                if waited > PATIENCE_SECONDS:
                    what = f"the store {self.name} was away for {waited:.0f} s"
                    raise HarnessError(f"{what}: {error}") from error
                if seconds == LOG_SECONDS_MIN:
                    _log(f"the store {self.name} is away: {error}; trying again")
                time.sleep(seconds)
                seconds = min(2 * seconds, WAIT_SECONDS_MAX)
                continue
            if seconds > LOG_SECONDS_MIN:
                _log(f"the store {self.name} is back after {time.monotonic() - started:.1f} s")
            return value

    return call


def _log(text: str) -> None:
    print(f"blockstep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - from a thread
