"""Explanations of the mutants that survive: survivors.toml, class by class.

No program can decide what a survivor means. Most are one of few things many times over, so a class
is explained: a kind of change, its places, a reason, and the most mutants that it may explain, so
that it does not cover a gap that opens later.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.mutants import is_in

VERDICTS: Final[Mapping[str, str]] = {
    "equivalent": "no program can tell it from the original",
    "unreachable": "what is played does not come there, or not in a state where it matters",
    "hole": "it should have been caught: a rule or a property is missing",
}
SCORE_MIN: Final = 0.95
"""The least score of each engine."""
GATED: Final = ("impl/host", "impl/compiled")
_ANY_CHANGE: Final = r"\{[^{}]* => [^{}]*\}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a class of survivors, or of one."""

    why: str
    what: str = ""
    """The kind of mutant; "" for one that is explained by itself."""
    verdict: str = "equivalent"
    most: int = 1
    """The most survivors of this class."""
    where: tuple[str, ...] = ("",)
    """Prefixes of the module, or of the module and the function."""
    changes: tuple[str, ...] = ()
    """The change that replaces `{}` in `lines`: `== => <=`; none: any change."""
    lines: tuple[str, ...] = ("{}",)
    """Parts of the line with the change in it: `refs[block] {} 0`; `...` is any text."""

    def is_about(self, survivor: Mapping[str, Any]) -> bool:
        """Whether the explanation fits this survivor."""
        place = f"{survivor['module']} {survivor['function']}"
        return place.startswith(self.where) and any(
            _compile(line, self.changes).search(survivor["change"]) for line in self.lines
        )


@cache
def _compile(line: str, changes: tuple[str, ...]) -> re.Pattern[str]:
    change = "|".join(_escape(f"{{{change}}}") for change in changes) or _ANY_CHANGE
    return re.compile(f"(?:{change})".join(map(_escape, line.split("{}"))))


def _escape(text: str) -> str:
    return ".*".join(map(re.escape, text.split("...")))


def read_explanations(file: Path) -> list[Explanation]:
    """Return the hand-written classes, in the order of the file within each verdict.

    Raises:
        ValueError: a verdict is unknown, a reason is missing, or a pattern has no place for
            the change.
    """
    found = []
    for verdict, entries in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for entry in entries:
            values: dict[str, Any] = {"why": "", "verdict": verdict}
            values |= {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
            one = Explanation(**values)
            if verdict not in VERDICTS or not one.why or not all("{" in line for line in one.lines):
                raise ValueError(
                    f"{file.name}: {entry} needs a verdict ({' or '.join(VERDICTS)}), a why, "
                    "and {}, the place of the change, in each of its lines"
                )
            found.append(one)
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one module or one package."""

    mutants: int
    killed: int
    told_apart: int
    """Mutants without those explained as equivalent or unreachable."""

    @property
    def of_all(self) -> float:
        """Share of all mutants that were killed."""
        return self.killed / self.mutants if self.mutants else 1.0

    @property
    def of_told_apart(self) -> float:
        """Share of the mutants that can be killed that were killed."""
        return self.killed / self.told_apart if self.told_apart else 1.0


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Each survivor with its explanation."""

    results: Mapping[str, Any]
    explained: list[tuple[Mapping[str, Any], Explanation | None]]
    idle: list[Explanation] = field(default_factory=list)
    """Explanations that no survivor needs any more."""
    overfull: list[Explanation] = field(default_factory=list)
    """Explanations of more survivors than they may explain."""

    @property
    def unexplained(self) -> list[Mapping[str, Any]]:
        """Survivors without an explanation."""
        return [survivor for survivor, said in self.explained if said is None]

    @property
    def holes(self) -> list[Mapping[str, Any]]:
        """Survivors that should have been caught."""
        return [one for one, said in self.explained if said is not None and said.verdict == "hole"]

    def count(self, said: Explanation) -> int:
        """Return the number of survivors that this explains."""
        return sum(one is said for _, one in self.explained)

    def list_misfits(self) -> list[str]:
        """Return a line for each explanation that explains nothing, or too much."""
        nothing = [f"EXPLAINS NOTHING {said.what or said.why}" for said in self.idle]
        too_much = [
            f"EXPLAINS TOO MUCH {self.count(said)}, at most {said.most}: {said.what or said.why}"
            for said in self.overfull
        ]
        return nothing + too_much

    def score(self, place: str) -> Score:
        """Return the score of a module, or of a package."""
        modules = [one for one in self.results["modules"] if is_in(one["module"], place)]
        mutants = sum(one["mutants"] for one in modules)
        killed = sum(sum(one["killed"].values()) for one in modules)
        beyond = sum(
            is_in(one["module"], place) and said is not None and said.verdict != "hole"
            for one, said in self.explained
        )
        return Score(mutants, killed, mutants - beyond)

    @property
    def is_good(self) -> bool:
        """Whether all survivors are explained, no explanation is unused, and the scores suffice."""
        is_enough = all(self.score(wing).of_told_apart >= SCORE_MIN for wing in GATED)
        return is_enough and not (self.unexplained or self.holes or self.idle or self.overfull)


def judge(
    results: Mapping[str, Any], explanations: Sequence[Explanation], is_whole: bool = True
) -> Verdicts:
    """Match survivors with explanations; the first one that fits counts.

    The results of a part of a campaign are not checked for unused explanations.
    """
    explained = [
        (survivor, next((one for one in explanations if one.is_about(survivor)), None))
        for survivor in results["survivors"]
    ]
    counts = Counter(id(said) for _, said in explained)
    idle = [one for one in explanations if is_whole and not counts[id(one)]]
    overfull = [one for one in explanations if counts[id(one)] > one.most]
    return Verdicts(results, explained, idle, overfull)
