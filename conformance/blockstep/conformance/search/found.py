"""Found: what a hunt found, and which failures are one defect."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.search.digging import Ground
from blockstep.conformance.search.distinct import Mark, Symptoms, saying_of_loss
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.forgiving import Cause
from blockstep.conformance.search.lookouts import Lookout
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.shrink import Shrunk

CONSEQUENCES = {
    "P1": frozenset({"P2", "P3", "P4", "P6", "P10"}),
    "P3": frozenset({"P4", "P6"}),
}
"""What becomes of a state that breaks a property: of a pool that is out of count, who is in a block
and what, and who waits for one; of a block under a wrong name, what is read there."""


@dataclass(frozen=True, slots=True)
class Defect:
    """What was found: the shortest program for it, and what accounts for it."""

    causes: tuple[Cause, ...]
    """Together they account for it; () if nothing known does."""
    first: Finding
    """What it was found by."""
    options: CheckOptions
    """With these and `episode` it was found."""
    episode: int
    num_actions: int
    """Of the program before it was shrunk."""
    num_events: int
    """Played in this hunt when it was first seen."""
    symptoms: Symptoms
    forgiven: frozenset[Cause] = frozenset()
    """What was forgiven when it was found."""
    shrunk: Shrunk | None = None
    """None if the engine did not live to be asked again."""
    loss: Loss | None = None
    """What became of an engine that did not live."""
    also: tuple[str, ...] = ()
    """Sentences that other programs break for the same reason."""
    behind: str = ""
    """What ends the program before, where the state of the engine is judged."""
    raised_at: str = ""
    """Where the engine raised, if it did: function, file and line."""
    num_seen: int = 1
    """Failures in this hunt that were taken for this defect."""

    @property
    def length(self) -> int:
        """Actions or events of its program."""
        if self.shrunk is not None:
            return len(self.shrunk.program.actions)
        return len(self.loss.events) if self.loss is not None else self.num_actions


@dataclass(slots=True)
class HuntResult:
    """All that a hunt found."""

    options: CheckOptions
    ground: Ground
    defects: list[Defect] = field(default_factory=list)
    policies: list[tuple[Lookout, Defect]] = field(default_factory=list)
    """Decisions that may surprise; both sides take them, so nothing diverges."""
    num_events: int = 0
    num_again: Counter[str] = field(default_factory=Counter)
    """Failures that were like a defect which nothing accounts for, by what it says."""
    excused: Counter[str] = field(default_factory=Counter)
    """What was excused: deviations that the adapter declares, by name."""
    stopped: str = ""
    """Why the hunt ended before its budget was spent; "" if it did not."""


@dataclass(slots=True)
class Group:
    """Failures that are one defect, as far as can be said."""

    defects: list[Defect]
    num_seen: int = 0

    @property
    def plainest(self) -> Defect:
        """The plainest of those that say what the first one did."""
        says = self.defects[0].symptoms.own.saying
        alike = (it for it in self.defects if it.symptoms.own.saying == says)
        return min(alike, key=lambda it: (bool(it.behind), it.length))

    def is_near(self, symptoms: Symptoms) -> int:
        """How near these are to its own: 2, one of its failures again; 1, a symptom; 0, neither."""
        if any(symptoms.own.is_like(defect.symptoms.own) for defect in self.defects):
            return 2
        return int(symptoms.is_symptom_of(self.plainest.symptoms))

    def conclude(self) -> Defect:
        """The plainest of them, with what the others say."""
        plainest = self.plainest
        names = dict.fromkeys(map(_place, self.defects))
        also = tuple(name for name in names if name != _place(plainest))
        return replace(plainest, also=also, num_seen=self.num_seen)


def follows_from(state: Finding, later: Finding) -> bool:
    """Whether what is said of a plan or an answer is what had to come of a wrong state."""
    mine = later.property_id
    return mine == state.property_id or mine in CONSEQUENCES.get(state.property_id, ())


def name_of(finding: Finding) -> str:
    """Property and sentence of a finding, or its kind and sentence."""
    return f"{finding.property_id or finding.kind} {finding.sentence}"


def _place(defect: Defect) -> str:
    """What a defect is found by, and of an exception where it was raised."""
    name = name_of(defect.first)
    return f"{name}, raised in {defect.raised_at}" if defect.raised_at else name


def describe_loss(options: CheckOptions, loss: Loss) -> Defect:
    """An engine that did not live to say what it is."""
    first = loss.finding
    symptoms = Symptoms(Mark(saying_of_loss(loss.message)))
    return Defect((), first, options, 0, 0, len(loss.events), symptoms, loss=loss)
