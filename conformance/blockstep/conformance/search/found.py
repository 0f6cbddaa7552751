"""Found: what a hunt found, and which failures are one defect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from blockstep.conformance.protocol.features import RESET
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.search.digging import Ground
from blockstep.conformance.search.distinct import SHAPE, Mark, Symptoms, saying_of_loss
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.forgiving import Cause
from blockstep.conformance.search.lookouts import Lookout
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.shrink import Shrunk


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
    follows: frozenset[Mark] = frozenset()
    """What is said of the state before, and this had to come of it."""
    is_masked: bool = False
    """Whether it was seen beside a plan that is out of shape, which was found first."""
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
    known_programs: dict[str, int | None] = field(default_factory=dict)
    """Failures that were those of a known program, by its file; None if it does not fail."""
    untried: list[str] = field(default_factory=list)
    """Known programs that could not be played, with the reason."""
    stopped: str = ""
    """Why the hunt ended before its budget was spent; "" if it did not."""


@dataclass(slots=True)
class Group:
    """Failures that are one defect, as far as can be said."""

    defects: list[Defect]

    @property
    def plainest(self) -> Defect:
        """The plainest of those that say what the first one did."""
        says = self.defects[0].symptoms.own.saying
        alike = (it for it in self.defects if it.symptoms.own.saying == says)
        return min(alike, key=lambda it: (bool(it.behind), it.length))

    @property
    def is_of_shape(self) -> bool:
        """Whether it is of plans that are out of shape."""
        return self.plainest.symptoms.own.property_id in SHAPE

    @property
    def plain(self) -> list[Defect]:
        """Those that need no more than the plainest: a longer program holds other defects too."""
        means = self.plainest.symptoms.own.means
        return [it for it in self.defects if it.symptoms.own.means <= means]

    def conclude(self) -> Defect:
        """The plainest of them, with what the others say."""
        plainest = self.plainest
        names = dict.fromkeys(map(_place, self.defects))
        also = tuple(name for name in names if name != _place(plainest))
        return replace(plainest, also=also, num_seen=sum(it.num_seen for it in self.defects))


def gather(defects: Iterable[Defect]) -> list[Group]:
    """The failures of each defect, in the order of what was seen first."""
    alike = _join([Group([defect]) for defect in defects], _are_alike)
    plans = [it.symptoms for group in alike if group.is_of_shape for it in group.defects]

    def are_one(one: Group, other: Group) -> bool:
        for masked, mask in ((one, other), (other, one)):
            if mask.is_of_shape and _is_told_apart(masked, plans):
                return False
        return _are_one(one, other)

    return _join(alike, are_one)


def _join(groups: list[Group], are_one: Callable[[Group, Group], bool]) -> list[Group]:
    """The groups, where those that are one, or one with a third, are joined."""
    joined: list[list[Group]] = []
    for group in groups:
        near = [others for others in joined if any(are_one(it, group) for it in others)]
        if not near:
            joined.append([group])
            continue
        for others in near[1:]:
            near[0] += others
            joined.remove(others)
        near[0].append(group)
    return [Group([defect for group in others for defect in group.defects]) for others in joined]


def _are_alike(one: Group, other: Group) -> bool:
    return any(
        it.symptoms.own.is_like(this.symptoms.own) for it in one.defects for this in other.defects
    )


def _are_one(one: Group, other: Group) -> bool:
    """Whether the failures of the one are symptoms of the other's."""
    for it in one.defects:
        for this in other.defects:
            if _is_behind(it, this) or _is_behind(this, it):
                return True
            if it.symptoms.comes_with(this.symptoms):
                return True
    cause, symptom = sorted((one, other), key=lambda group: group.plainest.length)
    return any(it.symptoms.comes_of(cause.plainest.symptoms) for it in symptom.plain)


def _is_told_apart(masked: Group, plans: Sequence[Symptoms]) -> bool:
    """Whether a plan is as much out of shape by no greater means without what came beside one."""
    return any(
        plan.own.means <= it.symptoms.own.means
        and any(map(plan.own.is_like, it.symptoms.beside))
        and not any(map(it.symptoms.own.is_like, plan.beside | plan.onward | plan.near))
        for it in masked.defects
        if it.is_masked
        for plan in plans
    )


def _is_behind(defect: Defect, later: Defect) -> bool:
    """Whether it is the wrong state that the other comes of; a reset may be by force or not."""
    own = defect.symptoms.own
    plain = replace(own, acts=own.acts - {RESET.name})
    return any(plain.is_like(replace(it, acts=it.acts - {RESET.name})) for it in later.follows)


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
