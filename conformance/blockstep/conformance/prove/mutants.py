"""Mutants that a law must refute: one-point changes of the functions that it is about.

The functions are found by running the law's witness: those that the law or its helpers call come
first, then those that these call. Their changes are tried on small arguments in plain Python, which
takes no solver: a law that some argument breaks is refuted.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, Final

from blockstep.conformance.prove.changes import CannotPlantError, Change, find_changes, planted
from blockstep.conformance.prove.counterexamples import Arguments, Outcome, try_law
from blockstep.conformance.prove.law import Law

SEED: Final = 0
"""The seed of the drawn changes and arguments."""
NUM_SAMPLED: Final = 8
"""The number of changes that are tried for each law."""
NUM_TRIED_MAX: Final = 120
"""The most changes that are tried until one breaks the law."""
NUM_POINTS: Final = 60
"""The number of arguments on which each change is tried."""
NUM_DRAWN_MAX: Final = 4_000
"""The most arguments that are drawn for them; most satisfy no assumption."""
POINT_SECONDS: Final = 0.5
"""The processor time of a law with a change; one that takes longer does not end."""
SMALL: Final = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64)

_HERE = str(Path(__file__).parent)
_MUTATED = ("blockstep.spec.", "blockstep.impl.")
_SHARED = tuple(
    f"blockstep.spec.{name}" for name in ("vocabulary", "frozen_map", "copies", "invariants")
)
"""Modules that are not mutated: both sides share them, or they only check."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of a module that a law runs."""

    file: str
    change: Change

    @property
    def name(self) -> str:
        """The function and the change in one line."""
        return f"`{self.change.function}`: {self.change.show(_read(self.file))}"

    def planted(self) -> AbstractContextManager[None]:
        """Return the context in which the change is in place."""
        return planted(self.change, _read(self.file), self.file)


@dataclass(frozen=True, slots=True)
class Tried:
    """The verdict of a law on the mutants of its functions."""

    num_tried: int
    refuted: tuple[tuple[Mutant, Arguments], ...]
    """Mutants that break the law, with the first arguments that show it."""


@cache
def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


# Functions.


def find_subjects(law: Law) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (file, function) that the law calls, and those that these call, when its witness
    runs.
    """
    called: dict[tuple[str, str], None] = {}
    inner: dict[tuple[str, str], None] = {}

    def look(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_mutated(frame):
            return
        outer = frame.f_back
        is_direct = outer is not None and outer.f_code.co_filename.startswith(_HERE)
        while outer is not None and not outer.f_code.co_filename.startswith(_HERE):
            outer = outer.f_back
        if outer is None or outer.f_code.co_name.startswith("build_"):
            return  # it only makes the state of the law
        name = code.co_qualname.partition(".<locals>")[0]
        (called if is_direct else inner)[code.co_filename, name] = None

    sys.setprofile(look)
    try:
        try_law(law.check, law.witness)
    finally:
        sys.setprofile(None)
    return list(called), [one for one in inner if one not in called]


def _is_mutated(frame: FrameType) -> bool:
    """Whether a function has a text in which changes are made; the methods that `dataclass` makes
    have none.
    """
    module, has_text = frame.f_globals.get("__name__", ""), frame.f_code.co_filename[0] != "<"
    return has_text and module.startswith(_MUTATED) and not module.startswith(_SHARED)


def draw_mutants(law: Law, seed: int = SEED) -> list[Mutant]:
    """Return the mutants of the functions that a law runs, in an order drawn by the seed; those of
    functions that the law calls itself come first.
    """
    drawn: list[Mutant] = []
    for subjects in find_subjects(law):
        found = [
            Mutant(file, change)
            for file, name in subjects
            for change in find_changes(_read(file))
            if change.function == name
        ]
        drawn += sorted(found, key=lambda one: _rank(one, seed))
    return drawn


def _rank(mutant: Mutant, seed: int) -> bytes:
    """Return a rank that stays the same for mutants that still exist after a change."""
    name = f"{seed} {Path(mutant.file).name} {mutant.change.function} {mutant.name}"
    return sha256(name.encode()).digest()


# Arguments.


def draw_points(law: Law, seed: int = SEED, number: int = NUM_POINTS) -> list[Arguments]:
    """Return arguments for which the law holds and its assumptions are satisfied, small ones
    first.
    """
    points = [law.witness]
    seen = {law.witness}
    for arguments in _draw_arguments(law.witness, seed):
        if arguments not in seen:
            seen.add(arguments)
            if try_law(law.check, arguments) is Outcome.HOLDS:
                points.append(arguments)
        if len(points) == number:
            break
    return sorted(points, key=lambda one: (sum(map(abs, one)), one))


def _draw_arguments(witness: Arguments, seed: int) -> Iterator[Arguments]:
    """Yield arguments near the witness: one changed, some changed, then small ones."""
    draw = random.Random(f"{seed} {witness}")  # noqa: S311
    near = sorted({value + by for value in witness for by in (-1, 0, 1)} | {*SMALL})
    for at, value in enumerate(witness):
        for other in (False, True) if isinstance(value, bool) else near:
            yield (*witness[:at], other, *witness[at + 1 :])
    for number in range(NUM_DRAWN_MAX):
        share = 0.5 if number % 2 else 1.0
        numbers = near if number % 3 else SMALL[:6]
        yield tuple(
            (draw.random() < 0.5 if isinstance(value, bool) else draw.choice(numbers))
            if draw.random() < share
            else value
            for value in witness
        )


# Trials.


class EndlessError(BaseException):
    """A law with a change takes too long; no handler of errors should catch it."""


def try_mutants(law: Law, seed: int = SEED) -> Tried:
    """Try the mutants of a law's functions: a sample, and more until one breaks the law."""
    points: list[Arguments] = []
    refuted: list[tuple[Mutant, Arguments]] = []
    num_tried = 0
    for mutant in draw_mutants(law, seed)[:NUM_TRIED_MAX]:
        if num_tried >= NUM_SAMPLED and refuted:
            break
        points = points or draw_points(law, seed)
        try:
            broken_by = find_breaking(law, mutant, points)
        except CannotPlantError:
            continue
        num_tried += 1
        if broken_by is not None:
            refuted.append((mutant, broken_by))
    return Tried(num_tried, tuple(refuted))


def find_breaking(law: Law, mutant: Mutant, points: Sequence[Arguments]) -> Arguments | None:
    """Return the first of some arguments that break the law with a mutant.

    Raises:
        CannotPlantError: the mutant cannot be made.
    """
    with mutant.planted():
        return next((one for one in points if fails(law, one)), None)


def fails(law: Law, arguments: Arguments) -> bool:
    """Whether arguments that satisfy the assumptions break the law, or it does not end."""
    try:
        with limit_seconds(POINT_SECONDS):
            return try_law(law.check, arguments) is not Outcome.HOLDS
    except EndlessError:
        return True


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise EndlessError in the body of a `with` statement after this processor time."""

    def stop(*_: Any) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
