"""Results of a hunt, and the grouping of failures into defects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from blockstep.conformance.protocol.features import RESET
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.search.dedup import SHAPE, FailureSignature, Symptoms, describe_crash
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.hunt_jobs import HuntContext
from blockstep.conformance.search.options import CheckOptions, ExitCode, exit_code_of_all
from blockstep.conformance.search.shrink import Shrunk
from blockstep.conformance.search.suppressions import KnownCause
from blockstep.conformance.search.watchpoints import Watchpoint


@dataclass(frozen=True, slots=True)
class Defect:
    """Defect with its shortest program, and the causes that explain it."""

    causes: tuple[KnownCause, ...]
    """Causes that together explain it; () if no known ones do."""
    first: Finding
    """Finding by which it was found."""
    options: CheckOptions
    """Options with which, and with `episode`, it was found."""
    episode: int
    num_actions: int
    """Actions of the program before it was shrunk."""
    num_events: int
    """Events played in this hunt when it was first seen."""
    symptoms: Symptoms
    forgiven: frozenset[KnownCause] = frozenset()
    """Causes that were suppressed when it was found."""
    shrunk: Shrunk | None = None
    """None if the engine's process died and could not be asked again."""
    loss: Loss | None = None
    """Crash or hang of the engine's process, if any."""
    also: tuple[Defect, ...] = ()
    """Simplest failure of each other check that fails for the same reason."""
    behind: str = ""
    """Earlier finding of the program, if the state of the engine is judged."""
    follows: frozenset[FailureSignature] = frozenset()
    """Findings about the state before, of which this one is a consequence."""
    is_masked: bool = False
    """Whether it was seen at the same event as a malformed plan, which was found first."""
    raised_at: str = ""
    """Function, file and line in which the engine raised, if it did."""
    num_seen: int = 1
    """Number of failures in this hunt that were attributed to this defect."""

    @property
    def length(self) -> int:
        """Return the number of actions or events of its program."""
        if self.shrunk is not None:
            return len(self.shrunk.program.actions)
        return len(self.loss.events) if self.loss is not None else self.num_actions


@dataclass(slots=True)
class HuntResult:
    """Results of a hunt."""

    options: CheckOptions
    ground: HuntContext
    defects: list[Defect] = field(default_factory=list)
    policies: list[tuple[Watchpoint, Defect]] = field(default_factory=list)
    """Watchpoints that were reached; both sides decide so, so nothing diverges."""
    num_events: int = 0
    num_again: Counter[str] = field(default_factory=Counter)
    """Number of failures like an unexplained defect, by their text."""
    excused: Counter[str] = field(default_factory=Counter)
    """Number of findings that deviations of the adapter cover, by name."""
    known_programs: dict[str, int | None] = field(default_factory=dict)
    """Number of failures like those of a known program, by its file; None if it does not fail."""
    untried: list[str] = field(default_factory=list)
    """Known programs that could not be played, with the reason."""
    stopped: str = ""
    """Why the hunt ended before its budget was spent; "" if it did not."""

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the process. A known program that passes is an error: it would
        hide its defect if that came back."""
        if self.defects:
            return exit_code_of_all(defect.first for defect in self.defects)
        return ExitCode.USAGE if None in self.known_programs.values() else ExitCode.CONFORMS


@dataclass(slots=True)
class Group:
    """Failures that are probably one defect."""

    defects: list[Defect]

    @property
    def plainest(self) -> Defect:
        """Return the simplest failure with the same text as the first one."""
        message = self.defects[0].symptoms.own.message
        alike = (it for it in self.defects if it.symptoms.own.message == message)
        return min(alike, key=_plainness)

    @property
    def is_of_shape(self) -> bool:
        """Return whether the group is about malformed plans."""
        return self.plainest.symptoms.own.property_id in SHAPE

    @property
    def plain(self) -> list[Defect]:
        """Return the failures that need no more features than the simplest one."""
        means = self.plainest.symptoms.own.means
        return [it for it in self.defects if it.symptoms.own.means <= means]

    def conclude(self) -> Defect:
        """Return the simplest failure, with the simplest ones of the other checks."""
        plainest, others = self.plainest, dict[str, Defect]()
        for it in sorted(self.defects, key=_plainness):
            others.setdefault(place_of(it), it)
        names = dict.fromkeys(map(place_of, self.defects))  # by first appearance
        also = tuple(others[name] for name in names if name != place_of(plainest))
        return replace(plainest, also=also, num_seen=sum(it.num_seen for it in self.defects))


def group_failures(defects: Iterable[Defect]) -> list[Group]:
    """Return the failures of each defect, ordered by first appearance."""
    alike = _join([Group([defect]) for defect in defects], _are_alike)
    plans = [it.symptoms for group in alike if group.is_of_shape for it in group.defects]

    def are_one(one: Group, other: Group) -> bool:
        for masked, mask in ((one, other), (other, one)):
            if mask.is_of_shape and _occurs_apart(masked, plans):
                return False
        return _are_one(one, other)

    return _join(alike, are_one)


def _join(groups: list[Group], are_one: Callable[[Group, Group], bool]) -> list[Group]:
    """Return the groups, with those joined that are one defect, directly or through a third."""
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
    """Return whether the failures of one group are symptoms of the other."""
    for it in one.defects:
        for this in other.defects:
            if _is_behind(it, this) or _is_behind(this, it):
                return True
            if it.symptoms.comes_with(this.symptoms):
                return True
    cause, symptom = sorted((one, other), key=lambda group: group.plainest.length)
    return any(it.symptoms.comes_of(cause.plainest.symptoms) for it in symptom.plain)


def _occurs_apart(masked: Group, plans: Sequence[Symptoms]) -> bool:
    """Return whether a malformed plan occurs as well without the findings that came with another
    one."""
    return any(
        plan.own.means <= it.symptoms.own.means
        and any(map(plan.own.is_like, it.symptoms.beside))
        and not any(map(it.symptoms.own.is_like, plan.beside | plan.onward | plan.near))
        for it in masked.defects
        if it.is_masked
        for plan in plans
    )


def _is_behind(defect: Defect, later: Defect) -> bool:
    """Return whether a defect is the wrong state that causes the later one, with any kind of
    reset."""
    own = defect.symptoms.own
    plain = replace(own, acts=own.acts - {RESET.name})
    return any(plain.is_like(replace(it, acts=it.acts - {RESET.name})) for it in later.follows)


def name_of(finding: Finding) -> str:
    """Return property and check of a finding, or its kind and check."""
    return f"{finding.property_id or finding.kind} {finding.sentence}"


def _plainness(defect: Defect) -> tuple[bool, int]:
    return bool(defect.behind), defect.length


def place_of(defect: Defect) -> str:
    """Return the name of a defect's finding, and where an exception was raised."""
    name = name_of(defect.first)
    return f"{name}, raised in {defect.raised_at}" if defect.raised_at else name


def describe_loss(options: CheckOptions, loss: Loss) -> Defect:
    """Return the defect of an engine whose process died."""
    first = loss.finding
    symptoms = Symptoms(FailureSignature(describe_crash(loss.message)))
    return Defect((), first, options, 0, 0, len(loss.events), symptoms, loss=loss)
