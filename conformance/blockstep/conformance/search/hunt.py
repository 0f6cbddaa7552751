"""Hunt: every distinct defect of an engine, not only the first one.

A check stops at the first finding. A hunt goes on: it shrinks what failed, finds out which known
defects account for it, forgives those from then on (`forgiving`), and plays the same episode again.
So each defect is found by a run in which nobody knew of it, and only named afterwards.

Where nothing known accounts for it, nothing can be forgiven: the episode ends there, another is
drawn, and what is found again is told from what is new (`distinct`). An engine that is judged by
the properties alone is hunted once more with its state hidden, if that is what was wrong: what
stood behind shows in its plans and answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, TypeVarTuple

from blockstep.conformance.draw.presets import SMALL, TINY
from blockstep.conformance.engine import Capability, EngineFactory, Safety
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search import digging
from blockstep.conformance.search.distinct import (
    Mark,
    Symptoms,
    can_follow,
    list_masked,
    saying,
    saying_of_loss,
)
from blockstep.conformance.search.episodes import EPISODES_WITHOUT_EVENTS, EpisodeResult
from blockstep.conformance.search.floor import require_wish
from blockstep.conformance.search.forgiving import Cause, follow
from blockstep.conformance.search.found import (
    Defect,
    Group,
    HuntResult,
    describe_loss,
    gather,
    name_of,
)
from blockstep.conformance.search.isolation import LostError
from blockstep.conformance.search.isolation.place import lose_episode
from blockstep.conformance.search.known import play_known, tell_counts, tell_untried
from blockstep.conformance.search.lookouts import LOOKOUTS, Lookout, can_take
from blockstep.conformance.search.options import CheckOptions, find_profile, get_wish
from blockstep.conformance.search.wrapped import hide_state
from blockstep.spec.profiles import Quirk

SCOPES = (TINY.name, SMALL.name)
EPISODES_PER_BATCH = 32
SHORT = 10
"""Actions of a program for which no shorter one is looked for."""
PATIENCE = 6
"""Failures of one cause, or of one saying with nothing new in it, that are shrunk, at most."""
LOOKOUT_EPISODES = 1000
"""Episodes in which a decision is looked out for, at most."""
LOSSES_MAX = 12
"""Engines that are lost before a hunt ends: each may have cost the seconds of an event."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Call(Protocol):
    """Where a hunt has its work done: in this process, or in others (`Isolation.call`)."""

    def __call__(
        self,
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = ...,
    ) -> T:
        """What the function comes to with the engine; what it yields goes to `on_part`."""
        ...


def call_here(make_engine: EngineFactory) -> Call:
    """Work in this process, with this engine."""

    def call(
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = lambda _part: None,
    ) -> T:
        hunted = hide_state(make_engine) if options.hide_state else make_engine
        value = function(options, hunted, *args)
        if isinstance(value, Iterator):
            for part in value:
                on_part(part)
        return value

    return call


class Hunter:
    """One hunt: what is forgiven by now, and what was found."""

    def __init__(
        self,
        options: CheckOptions,
        call: Call,
        on_progress: Callable[[float, str], None] = lambda _done, _text: None,
        scopes: Sequence[str] = SCOPES,
        forgiven: frozenset[Cause] = frozenset(),
        pool: Executor | None = None,
        known: Mapping[str, Program] = MappingProxyType({}),
        on_found: Callable[[Defect], None] = lambda _defect: None,
    ) -> None:
        get_wish(options)
        self._call = call
        ground = call(digging.ask, options)
        require_wish(options, ground.facts)
        self.options = replace(options, max_depth=ground.facts.max_depth)
        self.ground = ground
        self.result = HuntResult(self.options, ground)
        self.scopes = scopes
        self.forgiven = forgiven
        self._on_progress = on_progress
        self._on_found = on_found
        self._told: set[str] = set()
        """Sayings of failures that `on_found` was given."""
        self._pool = pool
        profile = find_profile(options.profile)
        self._quirks = tuple(sorted(profile.quirks) if profile.quirks else Quirk)
        if ground.facts.equivalence == Safety().name:
            self._quirks = ()  # the specification's decisions are not asked for
        self._named: dict[tuple[Cause, ...], list[Defect]] = {}
        """Programs for one set of causes."""
        self._failures: list[Defect] = []
        """What nothing accounts for, in the order in which it was seen."""
        self._groups: list[Group] = []
        """The same, by what is one defect."""
        self._in_vain: Counter[str] = Counter()
        """Failures in a row that were shrunk and were nothing new, by what they said at first."""
        self._last: dict[str, int] = {}
        """Which of the failures those that said this were taken for last."""
        self._num_lost = 0
        self._end = 0
        """Events after which the hunt ends."""
        self._known = play_known(self.options, call, known, forgiven, self._quirks)
        self._failures += [it.defect for it in self._known if it.defect and not it.defect.causes]
        self._groups = gather(self._failures)

    def hunt(self) -> HuntResult:
        """Play the budget at each scope, then look out for surprising decisions."""
        if self.options.episode is not None:
            self._play_batch(self.options, range(self.options.episode, self.options.episode + 1), 1)
        else:
            self._play_budget(self.options.max_events or 0)
        found = [min(tried, key=lambda it: it.length) for tried in self._named.values()]
        alone = {defect.causes for defect in found if len(defect.causes) == 1}
        found = [
            defect
            for defect in found
            if len(defect.causes) < 2 or not all((cause,) in alone for cause in defect.causes)
        ]
        self.result.defects = self._leave_out_known(found, gather(self._failures))
        for lookout in LOOKOUTS if self.options.episode is None else ():
            if can_take(lookout, self.ground.capabilities, self.ground.facts.equivalence):
                self._look_out(lookout)
        return self.result

    def _leave_out_known(self, found: list[Defect], groups: list[Group]) -> list[Defect]:
        """The defects of which no known program is an example; the others are counted."""
        counts: Counter[str] = Counter()
        defects = []
        for members in [[defect] for defect in found] + [group.defects for group in groups]:
            name = next((it.name for it in self._known if it.is_one_of(members)), None)
            if name is None:
                defects.append(Group(members).conclude())
            else:
                counts[name] += sum(it.num_seen for it in members if it.options.program is None)
        self.result.known_programs = tell_counts(self._known, counts)
        self.result.untried = tell_untried(self._known)
        return defects

    def _play_budget(self, budget: int) -> None:
        """Play so many events at each scope, and half as many with the state hidden."""
        self._end = budget * len(self.scopes)
        self._pass(budget, hides=self.options.hide_state)
        if self._hides_something():
            self._end += budget // 2 * len(self.scopes)
            self._pass(budget // 2, hides=True)

    def _pass(self, budget: int, *, hides: bool) -> None:
        for scope in self.scopes:
            options = replace(self.options, preset=scope, hide_state=hides)
            first, start = self.result.num_events, 0
            end = first + budget
            while self.result.num_events < end and not self.result.stopped:
                if start >= EPISODES_WITHOUT_EVENTS and self.result.num_events == first:
                    break
                indices = range(start, start + EPISODES_PER_BATCH)
                start = self._play_batch(options, indices, end - self.result.num_events)

    def _play_batch(self, options: CheckOptions, indices: Sequence[int], max_events: int) -> int:
        """Play some episodes, or one until nothing new fails in it; the index of the next."""
        episodes = self._play(options, indices, max_events)
        last = episodes[-1]
        while last.first is not None and self._learn(options, last):
            last = self._play(options, (last.index,), max_events)[-1]
        named = len(self._named) + len(self._groups)
        text = f"{self.result.num_events:,} events, {named} defects"
        self._on_progress(min(self.result.num_events / max(self._end, 1), 1.0), text)
        return last.index + 1

    def _play(
        self, options: CheckOptions, indices: Sequence[int], max_events: int
    ) -> list[EpisodeResult]:
        """Episodes up to the first that fails, or in which the engine is lost.

        They are the same however many are played side by side: what was played behind the last of
        them is dropped.
        """
        if self._pool is None or len(indices) == 1:
            parts: Iterator[list[EpisodeResult]] = iter(
                [self._play_part(options, indices, max_events)]
            )
        else:
            parts = self._play_apart(self._pool, options, indices, max_events)
        episodes: list[EpisodeResult] = []
        num_events = 0
        for episode in chain.from_iterable(parts):
            episodes.append(episode)
            num_events += episode.num_events
            self.result.num_events += max(episode.num_events, 1)
            self.result.excused.update(episode.deviations)
            if episode.first is not None or num_events >= max_events:
                break
        return episodes

    def _play_apart(
        self, pool: Executor, options: CheckOptions, indices: Sequence[int], max_events: int
    ) -> Iterator[list[EpisodeResult]]:
        """Episodes in order, in parts that are played side by side."""
        size = -(-len(indices) // self.options.jobs)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        futures = [pool.submit(self._play_part, options, part, max_events) for part in parts]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def _play_part(
        self, options: CheckOptions, indices: Sequence[int], max_events: int
    ) -> list[EpisodeResult]:
        """Episodes up to the first that fails, or in which the engine is lost, in one place."""
        episodes: list[EpisodeResult] = []
        wanted = (self.forgiven, indices, max_events)
        try:
            self._call(digging.play, options, *wanted, on_part=episodes.append)
        except LostError as lost:
            episodes.append(lose_episode(indices[len(episodes)], lost.loss))
        return episodes

    def _learn(self, options: CheckOptions, episode: EpisodeResult) -> bool:
        """Shrink and explain a failure; whether the episode should be played again."""
        if episode.loss is not None:
            self._lose(self._describe(options, episode))
            return False
        assert episode.first is not None
        said = saying(episode.first)
        if self._in_vain[said] >= PATIENCE:
            self._count_again(said)
            self._dig_masked(options, episode)
            return False
        defect = self._describe(options, episode)
        if said not in self._told:
            self._told.add(said)
            self._on_found(defect)
        try:
            dug = self._call(digging.dig, options, self.forgiven, self._quirks, episode)
        except LostError as lost:
            self._lose(replace(defect, loss=lost.loss))
            return False
        if dug.refuted:
            self._take_back(dug.refuted)
            return True
        should_play_again = self._name(defect, dug)
        if not dug.causes:
            self._dig_masked(options, episode)
        return should_play_again

    def _take_back(self, refuted: Collection[Cause]) -> None:
        """Drop some quirks from the profile, and name the failures anew that they accounted for."""
        self.forgiven = self.forgiven.difference(refuted)
        names = {cause.name for cause in refuted}
        self._quirks = tuple(quirk for quirk in self._quirks if quirk not in names)
        for causes in [it for it in self._named if set(it) & set(refuted)]:
            for defect in self._named.pop(causes):
                assert defect.shrunk is not None, "what is accounted for was shrunk"
                try:
                    dug = self._call(
                        digging.dig_program,
                        defect.options,
                        self.forgiven,
                        self._quirks,
                        defect.shrunk.program,
                    )
                except LostError as lost:
                    self._lose(replace(defect, loss=lost.loss))
                    continue
                if isinstance(dug, digging.Dug) and not dug.refuted:
                    options = replace(defect.options, profile=follow(self.forgiven).name)
                    self._name(replace(defect, options=options, forgiven=self.forgiven), dug)

    def _name(self, defect: Defect, dug: digging.Dug) -> bool:
        """Put a failure to what accounts for it; whether its episode should be played again."""
        said = saying(defect.first)
        defect = replace(defect, shrunk=dug.shrunk, causes=dug.causes)
        defect = replace(defect, first=dug.first, raised_at=dug.raised_at)
        if not dug.causes:
            assert dug.symptoms is not None
            self._group(said, replace(defect, symptoms=dug.symptoms))
            return False
        tried = self._named.setdefault(dug.causes, [])
        tried.append(defect)
        # What has two causes at once may come apart in another program.
        is_plain = len(dug.causes) == 1 and defect.length <= SHORT
        is_done = is_plain or len(tried) >= PATIENCE
        if is_done:
            self.forgiven |= frozenset(dug.causes)
        return is_done

    def _dig_masked(self, options: CheckOptions, episode: EpisodeResult) -> None:
        """Shrink what else was wrong at the event, where it may be a defect by itself."""
        assert episode.first is not None
        for finding in list_masked(episode.first, episode.beside):
            said = saying(finding)
            if self._in_vain[said] >= PATIENCE:
                self._count_again(said)
                continue
            wanted = replace(options, sentence=finding.sentence)
            masked = replace(episode, first=finding)
            defect = self._describe(wanted, masked)
            try:
                dug = self._call(digging.dig, options, self.forgiven, self._quirks, masked)
            except LostError as lost:
                self._lose(replace(defect, loss=lost.loss))
                return
            if dug.symptoms is not None and dug.first.sentence == finding.sentence:
                dug_up = replace(defect, shrunk=dug.shrunk, symptoms=dug.symptoms)
                self._group(said, replace(dug_up, first=dug.first, is_masked=True))

    def _describe(self, options: CheckOptions, episode: EpisodeResult) -> Defect:
        """A failure that nobody has looked into."""
        assert episode.first is not None
        return Defect(
            causes=(),
            first=episode.first,
            options=replace(options, profile=follow(self.forgiven).name),
            episode=episode.index,
            num_actions=0 if episode.program is None else len(episode.program.actions),
            num_events=self.result.num_events,
            symptoms=Symptoms(Mark(saying(episode.first))),
            forgiven=self.forgiven,
            loss=episode.loss,
        )

    def _lose(self, defect: Defect) -> None:
        """Note an engine that did not live, and end the hunt when that is all that happens."""
        assert defect.loss is not None
        said = saying_of_loss(defect.loss.message)
        symptoms = Symptoms(Mark(said))
        self._group(said, replace(defect, first=defect.loss.finding, symptoms=symptoms))
        self._num_lost += 1
        if self._num_lost >= LOSSES_MAX:
            self.result.stopped = f"the engine did not live {self._num_lost} times"

    def _group(self, said: str, defect: Defect) -> None:
        """Put a failure to those that are the same defect, or by itself."""
        shown = self._show_state(defect)
        if shown and all(finding.sentence != defect.first.sentence for finding, _ in shown):
            defect = replace(defect, behind=name_of(shown[0][0]))
        mine = defect.first.property_id
        follows = {
            mark
            for finding, mark in shown
            if mine == finding.property_id or can_follow(mine, finding.property_id)
        }
        self._failures.append(replace(defect, follows=frozenset(follows)))
        self._last[said] = len(self._failures) - 1
        groups = gather(self._failures)
        if len(groups) > len(self._groups):
            self._in_vain[said] = 0
        else:
            self._in_vain[said] += 1
            self.result.num_again[said] += 1
        self._groups = groups

    def _count_again(self, said: str) -> None:
        """Count a failure that is not looked into."""
        last = self._failures[self._last[said]]
        self._failures[self._last[said]] = replace(last, num_seen=last.num_seen + 1)
        self.result.num_again[said] += 1

    def _show_state(self, defect: Defect) -> Sequence[tuple[Finding, Mark]]:
        """What ends a program that was found with the state hidden, where it is judged as well."""
        if not defect.options.hide_state or defect.shrunk is None:
            return ()
        shown = replace(defect.options, hide_state=False)
        try:
            return self._call(digging.show, shown, self.forgiven, defect.shrunk.program)
        except LostError:
            return ()

    def _hides_something(self) -> bool:
        """Whether a state was found wrong where plans and answers are not, or not yet."""
        is_judged = self.ground.facts.equivalence == Safety().name
        if not is_judged or Capability.SNAPSHOT not in self.ground.capabilities:
            return False
        for defect in self._failures:
            if defect.shrunk is None:
                continue
            hidden = replace(defect.options, hide_state=True)
            try:
                seen = self._call(digging.show, hidden, self.forgiven, defect.shrunk.program)
            except LostError:
                continue
            if all(finding.sentence != defect.first.sentence for finding, _ in seen):
                return True
        return False

    def _look_out(self, lookout: Lookout) -> None:
        """Play small episodes until it sees something, at most so many."""
        options = replace(self.options, preset=TINY.name)
        for start in range(0, LOOKOUT_EPISODES, EPISODES_PER_BATCH):
            indices = range(start, min(start + EPISODES_PER_BATCH, LOOKOUT_EPISODES))
            try:
                num_events, episode, shrunk = self._call(
                    digging.look_for, options, self.forgiven, lookout.name, indices
                )
            except LostError:
                continue
            self.result.num_events += num_events
            if episode is not None:
                seen = replace(self._describe(options, episode), shrunk=shrunk)
                self.result.policies.append((lookout, seen))
                return


def hunt(
    options: CheckOptions,
    call: Call,
    on_progress: Callable[[float, str], None] = lambda _done, _text: None,
    scopes: Sequence[str] = SCOPES,
    forgiven: frozenset[Cause] = frozenset(),
    pool: Executor | None = None,
    known: Mapping[str, Program] = MappingProxyType({}),
    on_found: Callable[[Defect], None] = lambda _defect: None,
) -> HuntResult:
    """Everything that is wrong with an engine, each defect once, with a program for it.

    Args:
        options: Seed, budget in events for each scope, depth. The profile says whose quirks may
            account for what is found; one without quirks: all that there are. With `episode`, only
            this one is played, at the preset of the options.
        call: Where the engine is: `call_here(factory)`, or `Isolation.call`.
        on_progress: Told the share that is done, and a line about it.
        scopes: Presets that are played.
        forgiven: Passed over from the start.
        on_found: Given the first failure of each saying, before it is made short.
        known: Programs whose defects are counted and are no findings, by their files.
        pool: Threads in which `call` may be called, as many as `jobs` of the options: episodes are
            played side by side. What is found is the same.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
        UsageError: if the options want what the engine lacks.
    """
    try:
        hunter = Hunter(options, call, on_progress, scopes, forgiven, pool, known, on_found)
    except LostError as lost:  # nobody could even be asked
        return HuntResult(options, digging.UNKNOWN, [describe_loss(options, lost.loss)])
    return hunter.hunt()
