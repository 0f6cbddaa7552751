"""Sentence: what must hold of one step, and the property of `properties.md` that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from typing import NamedTuple, TypeAlias, TypeVar

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.protocol.findings import (
    NO_SUBJECTS,
    Difference,
    Finding,
    Subjects,
    blocks_apart,
    requests_apart,
    shown,
    tell_error,
    violated,
)
from blockstep.spec import vocabulary as v

ENDINGS = (v.Commit, v.Abort, v.GrammarFailed, v.TransfersReported)
"""Events that may end requests, and whoever is left goes on as before."""
NO_FORKS = tuple([kind for kind in v.EVENT_TYPES if kind is not v.Fork])
"""Events where there is a store or pins: nobody forks beside them."""


class Complaint(NamedTuple):
    """What is wrong with a step; the sentence that says so adds its name and property."""

    message: str
    differences: tuple[Difference, ...] = ()
    subjects: Subjects = NO_SUBJECTS


Complaints: TypeAlias = Iterable[Complaint]
Judge: TypeAlias = Callable[[Step, Ledger], Complaints]
"""Says what is wrong with a step; nothing if it is right."""
T = TypeVar("T")
WorkOut: TypeAlias = Callable[[Step, Ledger], T]
"""Finds something of a step, from nothing but the step and what was known before it."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence that every step of some kinds must satisfy."""

    property_id: str
    sentence: str
    """Its name: what should hold."""
    explanation: str
    kinds: tuple[type, ...]
    """Event types whose accepted steps it judges; `Rejected` for every refused one."""
    judge: Judge = field(repr=False)
    needs: str = ""
    """A field of the config without which it says nothing, and is not asked."""
    of: str = ""
    """What of a step it speaks of, a field of `Step`: where there is none, it is not asked."""
    fixes: str = ""
    """The policy that it would fix for an engine that decides otherwise, so that `safety` does not
    ask it."""
    said_by: str = ""
    """Likewise: the sentence that `safety` asks in its place, for it sees the same from outside."""

    @property
    def is_asked_at_safety(self) -> bool:
        """Whether it holds for every engine, and nothing else says the same."""
        return not (self.fixes or self.said_by)

    @property
    def why_not_at_safety(self) -> str:
        """Why `safety` does not ask it, in words; "" if it does."""
        if self.said_by:
            return f"there {self.said_by} sees the same from outside"
        return f"it fixes a policy: {self.fixes}" if self.fixes else ""

    def __call__(self, step: Step, ledger: Ledger) -> list[Finding]:
        """What is wrong; `ledger` knows everything up to this step, without it."""
        return [self.finding(*complaint) for complaint in self.judge(step, ledger)]

    def finding(
        self,
        message: str,
        differences: tuple[Difference, ...] = (),
        subjects: Subjects = NO_SUBJECTS,
    ) -> Finding:
        """What is found, in the name of this sentence."""
        return violated(self.property_id, self.sentence, message, *differences, subjects=subjects)


def once_a_step(work_out: WorkOut[T]) -> WorkOut[T]:
    """Have what several sentences ask of a step worked out once. None of them may change it."""

    @wraps(work_out)
    def get(step: Step, ledger: Ledger) -> T:
        known = step.worked_out
        if work_out not in known:
            known[work_out] = work_out(step, ledger)
        found: T = known[work_out]
        return found

    return get


def judge(sentences: Iterable[Sentence], step: Step, ledger: Ledger) -> list[Finding]:
    """What some sentences say of a step."""
    findings: list[Finding] = []
    for sentence in sentences:
        try:
            for complaint in sentence.judge(step, ledger):
                findings += (sentence.finding(*complaint),)
        except Exception as error:
            # Plan and states contradict each other so much that the sentence has no meaning.
            what = f"the step makes no sense: {tell_error(error)}"
            findings.append(sentence.finding(what))
    return findings


def sentence(
    property_id: str,
    *kinds: type,
    needs: str = "",
    of: str = "",
    fixes: str = "",
    said_by: str = "",
) -> Callable[[Judge], Sentence]:
    """Make a sentence of a function whose name says it."""

    def wrap(judge: Judge) -> Sentence:
        name, text = getattr(judge, "__name__", ""), judge.__doc__ or ""
        return Sentence(property_id, name, text, kinds, judge, needs, of, fixes, said_by)

    return wrap


def differing(
    what: str, expected: object, seen: object, subjects: Subjects = NO_SUBJECTS
) -> Complaints:
    """A complaint if two values differ."""
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


def each_differing(*triples: tuple[str, object, object]) -> Complaints:
    """A complaint for each of several things whose two values differ."""
    return [complaint for triple in triples for complaint in differing(*triple)]


def unequal(
    message: str, what: str, expected: object, seen: object, subjects: Subjects = NO_SUBJECTS
) -> Complaint:
    """A complaint about one value, with what is demanded and what is seen."""
    return Complaint(message, list_differences(what, expected, seen), subjects)


def list_differences(what: str, expected: object, seen: object) -> tuple[Difference, ...]:
    """The fields in which two records of one type differ; of other values one difference."""
    if is_dataclass(expected) and type(expected) is type(seen):
        names = [part.name for part in fields(expected) if part.compare]
        triples = [(name, getattr(expected, name), getattr(seen, name)) for name in names]
        found = [difference(f"{what} {n}", due, got) for n, due, got in triples if due != got]
        if found:
            return tuple(found)
    return (difference(what, expected, seen),)


def difference(what: str, expected: object, seen: object) -> Difference:
    """A difference between what is demanded and what is seen."""
    return Difference(what, shown(expected), shown(seen))
