"""Records: the values that a store holds, as JSON with a limit on their size.

A store may be shared with others, so what is read back is only parsed into these types. Nothing of
a record names code: engines and interpreters are taken from the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.search.dedup import Symptoms
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.isolation import HarnessError
from blockstep.conformance.search.verdict_requirements import EngineFacts

RECORD_BYTES_MAX = 1 << 22
TOTALS_BYTES_MAX = 1 << 26

T = TypeVar("T")


class RecordError(HarnessError):
    """A record of the store cannot be read."""


class Unit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A few episodes of one cell, which one worker plays."""

    cell: int
    """Index in the cells of the plan."""
    seed: int
    start: int
    """First episode; the number of episodes is the plan's."""
    looks: bool = False
    """Whether the engine is asked for facts, instead of playing episodes."""
    parents: tuple[str, ...] = ()
    """Digests of the programs whose mutants are played, one for each episode."""


class Past(msgspec.Struct, frozen=True):
    """Totals at the time when a round was opened, for the course of the campaign."""

    at: float
    """Time in seconds since 1970."""
    episodes: int = 0
    events: int = 0
    goals: int = 0
    """Number of different goals and pairs that were reached, added up over the targets."""
    findings: int = 0
    lines: int = 0
    """Number of different lines of engines that were reached, added up over the targets."""


class Round(msgspec.Struct, frozen=True):
    """The units of a round, and the number of units that each cell has had up to its end."""

    number: int
    units: tuple[Unit, ...]
    given: tuple[int, ...]
    past: Past

    def list_names(self) -> list[str]:
        """Return the names of the units."""
        return [f"{self.number:07}-{place:05}" for place in range(len(self.units))]


def split_name(name: str) -> tuple[int, int]:
    """Return the round of a unit, and its place in the round."""
    number, _, place = name.partition("-")
    return int(number), int(place)


class Look(msgspec.Struct, frozen=True):
    """Facts about the engine of a target, and the findings of the known programs."""

    facts: EngineFacts
    version: str
    canary: int | None
    """Events until the canary was caught; None if it was not."""
    known: dict[str, str]
    """Digest of the finding of each known program, by its file; "" if it does not fail."""
    untried: tuple[str, ...]


class UnitResult(msgspec.Struct):
    """The results of a unit."""

    episodes: int = 0
    events: int = 0
    goals: dict[str, int] = {}
    """Number of episodes that reached each goal or pair."""
    lines: dict[str, int] = {}
    """Number of episodes that ran each line of the engine, of lines that are not common."""
    sayings: dict[str, int] = {}
    """Number of failures of each message (`dedup.describe_failure`)."""
    shrunk: dict[str, int] = {}
    """Number of those failures that were shrunk."""
    findings: dict[str, int] = {}
    """Number of failures of each finding, by digest."""
    kept: dict[str, str] = {}
    """Digest of a short program, by the rare goal or line that it reaches."""
    deviations: dict[str, int] = {}
    num_spurious: int = 0
    """Number of crashes and hangs that did not happen again."""
    look: Look | None = None
    at: float = 0.0
    seconds: float = 0.0


class Found(msgspec.Struct, frozen=True):
    """A failure, shrunk, as it was first found."""

    digest: str
    name: str
    """Property and check."""
    target: str
    unit: str
    episode: int
    length: int
    """Actions of the program, or events up to a crash."""
    first: Finding
    symptoms: Symptoms
    program: str
    """Text of a program file; "" if the engine's process died in a drawn episode."""
    causes: tuple[str, ...] = ()
    """Quirks or workarounds that account for it, named as `suppressions.KnownCause` is."""
    raised_at: str = ""
    loss: Loss | None = None


class Seen(msgspec.Struct):
    """Number, times and units of the sightings of a finding in one target."""

    count: int
    first_at: float
    last_at: float
    first_unit: str
    last_unit: str


class TargetTotals(msgspec.Struct):
    """Totals of one target."""

    look: Look | None = None
    episodes: int = 0
    events: int = 0
    goals: dict[str, int] = {}
    lines: dict[str, int] = {}
    sayings: dict[str, int] = {}
    shrunk: dict[str, int] = {}
    kept: dict[str, str] = {}
    deviations: dict[str, int] = {}
    findings: dict[str, Seen] = {}
    num_spurious: int = 0

    def count(self, name: str) -> int:
        """Return the number of episodes that reached a goal, a pair or a line."""
        return self.goals.get(name, 0) + self.lines.get(name, 0)


class CellTotals(msgspec.Struct):
    """Totals of one cell; reward and cost are discounted in each round."""

    units: int = 0
    episodes: int = 0
    events: int = 0
    reward: float = 0.0
    cost: float = 0.0


class Totals(msgspec.Struct):
    """Sums over all units of the first rounds."""

    round: int
    """The last round that is included; -1: none."""
    targets: list[TargetTotals]
    cells: list[CellTotals]
    seconds: float = 0.0

    @property
    def episodes(self) -> int:
        """Return the number of episodes."""
        return sum(target.episodes for target in self.targets)

    @property
    def events(self) -> int:
        """Return the number of events."""
        return sum(target.events for target in self.targets)


def encode(value: msgspec.Struct) -> bytes:
    """Return a record as JSON."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record in `data`. Raises RecordError."""
    if len(data) > (TOTALS_BYTES_MAX if kind is Totals else RECORD_BYTES_MAX):
        raise RecordError(f"a {kind.__name__} of {len(data)} bytes is too long")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RecordError(f"not a {kind.__name__}: {error}") from None


def digest(parts: Sequence[str]) -> str:
    """Return the name of a finding or a program: 16 hexadecimal digits of its content."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
