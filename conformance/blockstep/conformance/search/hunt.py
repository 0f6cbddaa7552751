"""Hunt: every distinct defect of an engine, not only the first one.

A check stops at the first finding. A hunt goes on: it shrinks what failed, finds out which known
defects account for it, forgives those from then on, and plays the same episode again. So each
defect is found by a run in which nobody knew of it, and only named afterwards.

What may be forgiven: a quirk that the specification can follow, an event that an adapter declines
to give (`Declining`), and a workaround of an adapter (`EngineTraits.workarounds`: flags of its
engines, true where something is done against a defect). All of them are off at first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from blockstep.conformance.draw.presets import SMALL, TINY
from blockstep.conformance.engine import (
    Engine,
    EngineFactory,
    get_declines,
    get_judged,
    get_traits,
)
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search.episodes import EpisodeResult, fit_depth, run_episode
from blockstep.conformance.search.floor import look, require_wish
from blockstep.conformance.search.options import CheckOptions, find_profile
from blockstep.conformance.search.shrink import Shrunk, shrink
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import SPARING, Profile, Quirk

SCOPES = (TINY.name, SMALL.name)
SHORT = 10
"""Actions of a program for which no shorter one is looked for."""
LOOKOUT_EPISODES = 1000
"""Episodes in which a decision is looked out for, at most."""
PATIENCE = 6
"""Failures of one cause that are shrunk, at most, before the shortest is taken."""


class Means(StrEnum):
    """How a defect is forgiven."""

    QUIRK = "quirk"
    WORKAROUND = "workaround"
    DECLINED = "declined"


@dataclass(frozen=True, slots=True, order=True)
class Cause:
    """A known defect that may account for a failure."""

    means: Means
    name: str
    """The quirk, the flag of the engine, or why an event is declined."""


@dataclass(frozen=True, slots=True)
class Defect:
    """What was found: the shortest program for it, and what accounts for it."""

    causes: tuple[Cause, ...]
    """Together they account for it; () if nothing known does."""
    shrunk: Shrunk
    preset: str
    episode: int
    num_actions: int
    """Of the program before it was shrunk."""
    num_events: int
    """Played in this hunt when it was first seen."""


@dataclass(frozen=True, slots=True)
class Lookout:
    """A decision worth a reader's knowing, and the moment in which it shows."""

    name: str
    title: str
    upstream: str
    is_seen: Callable[[v.Config, Mapping[v.RequestId, v.Request], v.Snapshot], bool]
    """Whether it shows in the state after a plan."""


@dataclass(slots=True)
class HuntResult:
    """All that a hunt found."""

    options: CheckOptions
    engine_version: str = ""
    """What the factory says its version is; "" if it says nothing."""
    defects: list[Defect] = field(default_factory=list)
    policies: list[tuple[Lookout, Defect]] = field(default_factory=list)
    """Decisions that may surprise; both sides take them, so nothing diverges."""
    num_events: int = 0
    num_again: Counter[str] = field(default_factory=Counter)
    """Failures that were like a defect which nothing accounts for, by what it says."""


def waits_for_a_seat(
    config: v.Config, requests: Mapping[v.RequestId, v.Request], after: v.Snapshot
) -> bool:
    """All seats are taken, one by a request less urgent than one that waits."""
    if config.policy is not v.Policy.PRIORITY or len(after.running) < config.max_num_seqs:
        return False
    least_urgent = max(requests[name].priority for name in after.running)
    return any(requests[name].priority < least_urgent for name in after.waiting)


LOOKOUTS = (
    Lookout(
        "urgent_waits_for_a_seat",
        "however urgent a request is, it waits until one of max_num_seqs seats is free",
        "#40004, #45561 (open)",
        waits_for_a_seat,
    ),
)


class PolicySeenError(Exception):
    """A lookout saw what it looks out for."""


class Watched:
    """An engine of which some defects are forgiven, and others are not."""

    def __init__(
        self,
        engine: Engine,
        config: v.Config,
        forgives: Callable[[Cause], bool],
        lookout: Lookout | None,
    ) -> None:
        self.engine, self.config, self.forgives, self.lookout = engine, config, forgives, lookout
        self.judges = get_judged(engine)
        self._declines = get_declines(engine)
        self.requests: dict[v.RequestId, v.Request] = {}

    def capabilities(self) -> frozenset[str]:
        """Those of the engine, as its flags stand now."""
        return self.engine.capabilities()

    def apply(self, event: v.Event) -> v.Observation:
        """Hand it on, and look at what came of it."""
        seen = self.engine.apply(event)
        if self.lookout is not None:
            if isinstance(event, v.Submit):
                self.requests[event.request.request_id] = event.request
            after = self.engine.snapshot()
            if not isinstance(event, v.Schedule) or after is None:
                return seen
            if self.lookout.is_seen(self.config, self.requests, after):
                raise PolicySeenError(self.lookout.name)
        return seen

    def snapshot(self) -> v.Snapshot | None:
        """The state of the engine."""
        return self.engine.snapshot()

    def declines(self, event: v.Event) -> str | None:
        """Why the engine declines it, if that is forgiven."""
        reason = None if self._declines is None else self._declines(event)
        if reason is None:
            return None
        return reason if self.forgives(Cause(Means.DECLINED, reason)) else None


class Forgiving:
    """A factory of engines of which these defects are forgiven; None: all that can be."""

    def __init__(
        self,
        make_engine: EngineFactory,
        forgiven: frozenset[Cause] | None,
        lookout: Lookout | None = None,
    ) -> None:
        self.make_engine, self.forgiven, self.lookout = make_engine, forgiven, lookout
        self.traits = get_traits(make_engine)

    def __call__(self, config: v.Config) -> Watched:
        """Build one."""
        engine = self.make_engine(config)
        for name in self.traits.workarounds:
            setattr(engine, name, self._forgives(Cause(Means.WORKAROUND, name)))
        return Watched(engine, config, self._forgives, self.lookout)

    def _forgives(self, cause: Cause) -> bool:
        return self.forgiven is None or cause in self.forgiven


def follow(forgiven: Iterable[Cause]) -> Profile:
    """The profile of the forgiven quirks, with a name that `--profile` takes."""
    quirks = frozenset(Quirk(cause.name) for cause in forgiven if cause.means is Means.QUIRK)
    return Profile("+".join((SPARING.name, *sorted(quirks))), quirks)


def find_causes(
    program: Program,
    make_engine: EngineFactory,
    forgiven: frozenset[Cause],
    quirks: Iterable[Quirk],
) -> tuple[Cause, ...]:
    """A least set of known defects that, forgiven as well, lets the program pass; () if none does.

    One alone is tried first, a quirk before anything else: what declines an event hides more.

    Args:
        program: What fails.
        make_engine: The engine that it fails with.
        forgiven: What is forgiven already.
        quirks: What may account for it, besides workarounds and what the engine declines.
    """
    asked = [Cause(Means.QUIRK, quirk) for quirk in quirks]
    asked += [Cause(Means.WORKAROUND, name) for name in get_traits(make_engine).workarounds]
    lenient = Forgiving(make_engine, None)
    run, findings = run_program(program, lenient, follow([*forgiven, *asked]))
    asked += [Cause(Means.DECLINED, reason) for reason in run.skipped]
    asked = [cause for cause in asked if cause not in forgiven]
    for cause in asked:
        if _passes(program, make_engine, forgiven | {cause}):
            return (cause,)
    if findings:
        return ()
    for cause in tuple(reversed(asked)):
        fewer = [other for other in asked if other != cause]
        if _passes(program, make_engine, forgiven.union(fewer)):
            asked = fewer
    return tuple(asked)


def _passes(program: Program, make_engine: EngineFactory, forgiven: frozenset[Cause]) -> bool:
    return not run_program(program, Forgiving(make_engine, forgiven), follow(forgiven))[1]


class Hunter:
    """One hunt: what is forgiven by now, and what was found."""

    def __init__(
        self,
        options: CheckOptions,
        make_engine: EngineFactory,
        on_progress: Callable[[float, str], None] = lambda _done, _text: None,
    ) -> None:
        self.options = fit_depth(options, make_engine)
        self.make_engine = make_engine
        self.result = HuntResult(self.options, get_traits(make_engine).version)
        self.forgiven: frozenset[Cause] = frozenset()
        self._on_progress = on_progress
        profile = find_profile(options.profile)
        self._quirks = sorted(profile.quirks) if profile.quirks else tuple(Quirk)
        self._tried: dict[tuple[Cause, ...] | str, list[Defect]] = {}
        """Programs for one set of causes, or for one thing that nothing accounts for."""

    def hunt(self) -> HuntResult:
        """Play the budget at each scope, then look out for surprising decisions."""
        budget = self.options.max_events or 0
        for number, scope in enumerate(SCOPES, 1):
            index = 0
            while self.result.num_events < number * budget:
                self._play(replace(self.options, preset=scope), index)
                index += 1
                done = self.result.num_events / (budget * len(SCOPES))
                text = f"{self.result.num_events:,} events, {len(self._tried)} defects"
                self._on_progress(min(done, 1.0), text)
        found = [min(tried, key=_length) for tried in self._tried.values()]
        alone = {defect.causes for defect in found if len(defect.causes) == 1}
        self.result.defects = [
            defect
            for defect in found
            if len(defect.causes) < 2 or not all((cause,) in alone for cause in defect.causes)
        ]
        for lookout in LOOKOUTS:
            self._look_out(lookout)
        return self.result

    def _play(self, options: CheckOptions, index: int) -> None:
        """Play an episode until nothing new fails in it."""
        is_new = True
        while is_new:
            factory = Forgiving(self.make_engine, self.forgiven)
            episode = self._run(options, index, factory)
            is_new = episode.first is not None and self._learn(options, episode, factory)

    def _run(self, options: CheckOptions, index: int, factory: Forgiving) -> EpisodeResult:
        options = replace(options, profile=follow(self.forgiven).name)
        episode = run_episode(options, index, factory)
        self.result.num_events += episode.num_events
        return episode

    def _learn(self, options: CheckOptions, episode: EpisodeResult, factory: Forgiving) -> bool:
        """Shrink and explain a failure; whether the episode should be played again."""
        assert episode.first is not None
        said = saying(episode.first)
        if len(self._tried.get(said, ())) >= PATIENCE:
            self.result.num_again[said] += 1
            return False
        defect = self._shrink(options, episode, factory)
        program = defect.shrunk.program
        causes = find_causes(program, self.make_engine, self.forgiven, self._quirks)
        tried = self._tried.setdefault(causes or said, [])
        tried.append(replace(defect, causes=causes))
        # What has two causes at once may come apart in another program.
        is_plain = len(causes) == 1 and _length(defect) <= SHORT
        is_done = bool(causes) and (is_plain or len(tried) >= PATIENCE)
        if is_done:
            self.forgiven |= frozenset(causes)
        return is_done

    def _shrink(self, options: CheckOptions, episode: EpisodeResult, factory: Forgiving) -> Defect:
        assert episode.first is not None
        assert episode.program is not None
        profile = follow(self.forgiven)
        return Defect(
            causes=(),
            shrunk=shrink(episode.program, factory, episode.first, profile),
            preset=options.preset,
            episode=episode.index,
            num_actions=len(episode.program.actions),
            num_events=self.result.num_events,
        )

    def _look_out(self, lookout: Lookout) -> None:
        """Play small episodes until it sees something, at most so many."""
        factory = Forgiving(self.make_engine, self.forgiven, lookout)
        options = replace(self.options, preset=TINY.name)
        for index in range(LOOKOUT_EPISODES):
            episode = self._run(options, index, factory)
            if episode.first is not None and lookout.name in episode.first.message:
                self.result.policies.append((lookout, self._shrink(options, episode, factory)))
                return


def _length(defect: Defect) -> int:
    return len(defect.shrunk.program.actions)


def saying(finding: Finding) -> str:
    """What tells one unexplained failure from another: what it says, numbers left out."""
    message = "" if finding.kind is FindingKind.DIVERGENCE else finding.message
    text = f"{finding.kind} {finding.property_id} {finding.sentence} {message}"
    return "".join("#" if letter.isdigit() else letter for letter in text)


def hunt(
    options: CheckOptions,
    make_engine: EngineFactory,
    on_progress: Callable[[float, str], None] = lambda _done, _text: None,
) -> HuntResult:
    """Everything that is wrong with an engine, each defect once, with a program for it.

    Args:
        options: Seed, budget in events for each scope, depth. The profile says whose quirks may
            account for what is found; one without quirks: all that there are.
        make_engine: The engine.
        on_progress: Told the share that is done, and a line about it.

    Raises:
        UsageError: if the options want what the engine lacks.
    """
    require_wish(options, look(options, make_engine))
    return Hunter(options, make_engine, on_progress).hunt()
