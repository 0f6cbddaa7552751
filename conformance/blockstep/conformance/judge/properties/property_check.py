"""A property check of one step, with the property of `properties.md` that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from typing import NamedTuple, TypeAlias, TypeVar

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.protocol.findings import (
    NO_SUBJECTS,
    About,
    Difference,
    Finding,
    blame_check,
    blocks_apart,
    requests_apart,
    shown,
    violated,
)
from blockstep.spec import vocabulary as v

ENDINGS = (v.Commit, v.Abort, v.GrammarFailed, v.TransfersReported)
"""Events that may end requests."""
NO_FORKS = tuple([kind for kind in v.EVENT_TYPES if kind is not v.Fork])
"""Events that exist with features that exclude forks."""


class Complaint(NamedTuple):
    """A defect of a step; the check that finds it adds its name and property."""

    message: str
    differences: tuple[Difference, ...] = ()
    subjects: About = NO_SUBJECTS


Complaints: TypeAlias = Iterable[Complaint]
Judge: TypeAlias = Callable[[Step, History], Complaints]
"""Returns what is wrong with a step; nothing if it is right."""
T = TypeVar("T")
WorkOut: TypeAlias = Callable[[Step, History], T]
"""Computes a value from a step and what was known before it."""


@dataclass(frozen=True, slots=True)
class PropertyCheck:
    """A check of every step of some kinds."""

    property_id: str
    sentence: str
    """The name, which says what should hold."""
    explanation: str
    kinds: tuple[type, ...]
    """Event types whose accepted steps it checks; `Rejected` for rejected ones."""
    judge: Judge = field(repr=False)
    needs: str = ""
    """A setting without which it has nothing to check and is not made."""
    of: str = ""
    """A field of `Step` that it is about: it is not made where the field is empty."""
    fixes: str = ""
    """The policy that it would impose on an engine that decides otherwise, so that `safety` leaves
    it out."""
    covered_by: str = ""
    """The check that `safety` makes in its place, since it sees the same from outside."""

    @property
    def is_asked_at_safety(self) -> bool:
        """Whether it holds for every engine, and no other check sees the same."""
        return not (self.fixes or self.covered_by)

    @property
    def why_not_at_safety(self) -> str:
        """The reason why `safety` leaves it out, in words; "" if it does not."""
        if self.covered_by:
            return f"there {self.covered_by} sees the same from outside"
        return f"it fixes a policy: {self.fixes}" if self.fixes else ""

    def __call__(self, step: Step, history: History) -> list[Finding]:
        """Return the findings about a step; `history` knows everything before it."""
        return [self.finding(*complaint) for complaint in self.judge(step, history)]

    def finding(
        self,
        message: str,
        differences: tuple[Difference, ...] = (),
        subjects: About = NO_SUBJECTS,
    ) -> Finding:
        """Return a finding with the name of this check."""
        return violated(self.property_id, self.sentence, message, *differences, subjects=subjects)


def once_a_step(work_out: WorkOut[T]) -> WorkOut[T]:
    """Compute a value once per step for all checks that ask for it. They must not change it."""

    @wraps(work_out)
    def get(step: Step, history: History) -> T:
        known = step.worked_out
        if work_out not in known:
            known[work_out] = work_out(step, history)
        found: T = known[work_out]
        return found

    return get


def judge(sentences: Iterable[PropertyCheck], step: Step, history: History) -> list[Finding]:
    """Return the findings of some checks about a step, and one for each check that raised (see
    `leave_out_raised`)."""
    findings: list[Finding] = []
    for sentence in sentences:
        try:
            for complaint in sentence.judge(step, history):
                findings += (sentence.finding(*complaint),)
        except Exception as error:
            findings.append(blame_check(error, f"the check {sentence.sentence}"))
    return findings


def sentence(
    property_id: str,
    *kinds: type,
    needs: str = "",
    of: str = "",
    fixes: str = "",
    covered_by: str = "",
) -> Callable[[Judge], PropertyCheck]:
    """Make a check of a function, named after it."""

    def wrap(judge: Judge) -> PropertyCheck:
        name, text = getattr(judge, "__name__", ""), judge.__doc__ or ""
        return PropertyCheck(property_id, name, text, kinds, judge, needs, of, fixes, covered_by)

    return wrap


def differing(
    what: str, expected: object, seen: object, subjects: About = NO_SUBJECTS
) -> Complaints:
    """Return what is wrong with a value, if it is not the expected one."""
    if expected == seen:
        return ()
    return (unequal(f"{what} is not as it should be", what, expected, seen, subjects),)


def differing_requests(what: str, expected: Sequence[object], seen: Sequence[object]) -> Complaints:
    """Return what is wrong with a list of request ids, or of records that have one, if anything."""
    return differing(what, expected, seen, requests_apart(expected, seen))


def differing_blocks(
    what: str, expected: Sequence[v.BlockId], seen: Sequence[v.BlockId]
) -> Complaints:
    """Return what is wrong with a list of blocks, if it is not the expected one."""
    return differing(what, expected, seen, blocks_apart(expected, seen))


def unequal(
    message: str, what: str, expected: object, seen: object, subjects: About = NO_SUBJECTS
) -> Complaint:
    """Return what is wrong with one value, with the expected and the seen one."""
    return Complaint(message, list_differences(what, expected, seen), subjects)


def list_differences(what: str, expected: object, seen: object) -> tuple[Difference, ...]:
    """Return the fields in which two records of one type differ, or the values in which two tuples
    do if `what` names each of their values; one difference for anything else."""
    triples: list[tuple[str, object, object]] = []
    if is_dataclass(expected) and type(expected) is type(seen):
        names = [part.name for part in fields(expected) if part.compare]
        triples = [(f"{what} {it}", getattr(expected, it), getattr(seen, it)) for it in names]
    elif isinstance(expected, tuple) and isinstance(seen, tuple):
        names = what.split(", ")
        if len(names) == len(expected) == len(seen) > 1:
            triples = [*zip(names, expected, seen, strict=True)]
    found = [difference(name, due, got) for name, due, got in triples if due != got]
    return tuple(found) or (difference(what, expected, seen),)


def difference(what: str, expected: object, seen: object) -> Difference:
    """Return a difference between the expected and the seen value."""
    return Difference(what, shown(expected), shown(seen))
