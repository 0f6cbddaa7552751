"""Hunt: finds every distinct defect of an engine, not only the first one.

A check stops at the first finding. A hunt continues: it shrinks the failing program, looks for the
known defects that account for the failure, suppresses those from then on (`suppressions`), and
plays the same episode again. So each defect is found by a run that did not expect it, and named
afterwards.

A failure that no known defect accounts for cannot be suppressed. Its episode ends there, and the
hunt continues with another one; `dedup` decides whether later failures are the same defect. If
the state of an engine that is held to `safety` was wrong, the hunt is repeated with the state
hidden, so that defects in plans and answers are found too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from blockstep.conformance.draw.presets import SMALL, TINY
from blockstep.conformance.engine import Capability, Safety
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.search import hunt_jobs
from blockstep.conformance.search.call import Call
from blockstep.conformance.search.dedup import (
    FailureSignature,
    Symptoms,
    can_follow,
    describe_crash,
    describe_failure,
    list_masked,
)
from blockstep.conformance.search.defects import (
    Defect,
    Group,
    HuntResult,
    describe_loss,
    group_failures,
    name_of,
)
from blockstep.conformance.search.episodes import EPISODES_WITHOUT_EVENTS, EpisodeResult
from blockstep.conformance.search.isolation import LostError
from blockstep.conformance.search.isolation.executor import lose_episode
from blockstep.conformance.search.known import count_by_file, list_untried, play_known
from blockstep.conformance.search.options import CheckOptions, find_profile, get_wish
from blockstep.conformance.search.suppressions import KnownCause, follow
from blockstep.conformance.search.verdict_requirements import require_wish
from blockstep.conformance.search.watchpoints import WATCHPOINTS, Watchpoint, can_take
from blockstep.spec.profiles import Quirk

SCOPES = (TINY.name, SMALL.name)
EPISODES_PER_BATCH = 32
SHORT = 10
"""A cause is suppressed at once if its shrunk program has at most this number of actions."""
PATIENCE = 6
"""Most failures of one cause, or in a row of one message without a new defect, that are shrunk."""
LOOKOUT_EPISODES = 1000
"""Most episodes that are played to find one surprising decision."""
LOSSES_MAX = 12
"""Most crashes and hangs of the engine in a hunt: each may take the time limit of an event."""


class Hunter:
    """One hunt: the causes that are suppressed so far, and the defects found."""

    def __init__(
        self,
        options: CheckOptions,
        call: Call,
        on_progress: Callable[[float, str], None] = lambda _done, _text: None,
        scopes: Sequence[str] = SCOPES,
        forgiven: frozenset[KnownCause] = frozenset(),
        pool: Executor | None = None,
        known: Mapping[str, Program] = MappingProxyType({}),
        on_found: Callable[[Defect], None] = lambda _defect: None,
        on_interrupted: Callable[[HuntResult], None] = lambda _result: None,
    ) -> None:
        get_wish(options)
        self._call = call
        ground = call(hunt_jobs.read_hunt_context, options)
        require_wish(options, ground.facts)
        self.options = replace(options, max_depth=ground.facts.max_depth)
        self.ground = ground
        self.result = HuntResult(self.options, ground)
        self.scopes = scopes
        self.forgiven = forgiven
        self._on_progress = on_progress
        self._on_found = on_found
        self._on_interrupted = on_interrupted
        self._reported: set[str] = set()
        """Descriptions of the failures that were given to `on_found`."""
        self._pool = pool
        profile = find_profile(options.profile)
        self._quirks = tuple(sorted(profile.quirks) if profile.quirks else Quirk)
        if ground.facts.equivalence == Safety().name:
            self._quirks = ()  # the specification's decisions are not asked for
        self._named: dict[tuple[KnownCause, ...], list[Defect]] = {}
        """Defects by the causes that account for them."""
        self._failures: list[Defect] = []
        """Failures that no known defect accounts for, in the order in which they were seen."""
        self._groups: list[Group] = []
        """The same failures, those of one defect in one group."""
        self._in_vain: Counter[str] = Counter()
        """Shrunk failures in a row that were no new defect, by their first message."""
        self._last: dict[str, int] = {}
        """Index of the failure that the last failure of each message was counted with."""
        self._num_lost = 0
        self._end = 0
        """Events after which the hunt ends."""
        self._known = play_known(self.options, call, known, forgiven, self._quirks)
        self._failures += [it.defect for it in self._known if it.defect and not it.defect.causes]
        self._groups = group_failures(self._failures)

    def hunt(self) -> HuntResult:
        """Play the budget at each scope, then look for surprising decisions."""
        try:
            self._play_all()
        except BaseException:  # a signal, too: the defects so far took minutes or hours
            self.result.stopped = "it was interrupted"
            self._conclude()
            if self.result.defects:
                self._on_interrupted(self.result)
            raise
        return self.result

    def _play_all(self) -> None:
        if self.options.episode is not None:
            self._play_batch(self.options, range(self.options.episode, self.options.episode + 1), 1)
        else:
            self._play_budget(self.options.max_events or 0)
        self._conclude()
        for watchpoint in WATCHPOINTS if self.options.episode is None else ():
            if can_take(watchpoint, self.ground.capabilities, self.ground.facts.equivalence):
                self._watch(watchpoint)

    def _conclude(self) -> None:
        """Set the defects of the result, from the failures so far."""
        found = [min(tried, key=lambda it: it.length) for tried in self._named.values()]
        alone = {defect.causes for defect in found if len(defect.causes) == 1}
        found = [
            defect
            for defect in found
            if len(defect.causes) < 2 or not all((cause,) in alone for cause in defect.causes)
        ]
        self.result.defects = self._leave_out_known(found, group_failures(self._failures))

    def _leave_out_known(self, found: list[Defect], groups: list[Group]) -> list[Defect]:
        """Return the defects that no known program shows; failures of the others are counted."""
        counts: Counter[str] = Counter()
        defects = []
        for members in [[defect] for defect in found] + [group.defects for group in groups]:
            name = next((it.name for it in self._known if it.is_one_of(members)), None)
            if name is None:
                defects.append(Group(members).conclude())
            else:
                counts[name] += sum(it.num_seen for it in members if it.options.program is None)
        self.result.known_programs = count_by_file(self._known, counts)
        self.result.untried = list_untried(self._known)
        return defects

    def _play_budget(self, budget: int) -> None:
        """Play `budget` events at each scope, and half as many with the state hidden if need be."""
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
        """Play episodes up to a failure, and that one until no new cause is found in it.

        Returns the index of the next episode.
        """
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
        """Return the results of episodes up to the first that fails or loses the engine.

        They do not depend on the number of jobs: episodes played after the last one are dropped.
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
        """Yield the results in the order of episodes, in parts that are played side by side."""
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
        """Return the results of episodes up to the first that fails or loses the engine."""
        episodes: list[EpisodeResult] = []
        wanted = (self.forgiven, indices, max_events)
        try:
            self._call(hunt_jobs.play_episode_job, options, *wanted, on_part=episodes.append)
        except LostError as lost:
            episodes.append(lose_episode(indices[len(episodes)], lost.loss))
        return episodes

    def _learn(self, options: CheckOptions, episode: EpisodeResult) -> bool:
        """Shrink and explain a failure; return whether the episode should be played again."""
        if episode.loss is not None:
            self._lose(self._describe(options, episode))
            return False
        assert episode.first is not None
        description = describe_failure(episode.first)
        if self._in_vain[description] >= PATIENCE:
            self._count_again(description)
            self._dig_masked(options, episode)
            return False
        defect = self._describe(options, episode)
        if description not in self._reported:
            self._reported.add(description)
            self._on_found(defect)
        try:
            dug = self._analyse(options, episode)
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

    def _analyse(self, options: CheckOptions, episode: EpisodeResult) -> hunt_jobs.FailureAnalysis:
        """Return a failure, shrunk and explained. Raises LostError."""
        settled = frozenset(
            message for message, number in self._in_vain.items() if number >= PATIENCE
        )
        known = self.forgiven, self._quirks
        return self._call(hunt_jobs.analyse_failure, options, *known, episode, settled)

    def _take_back(self, refuted: Collection[KnownCause]) -> None:
        """Drop quirks from the profile, and look for other causes of the failures of each."""
        self.forgiven = self.forgiven.difference(refuted)
        names = {cause.name for cause in refuted}
        self._quirks = tuple(quirk for quirk in self._quirks if quirk not in names)
        for causes in [it for it in self._named if set(it) & set(refuted)]:
            for defect in self._named.pop(causes):
                assert defect.shrunk is not None, "what is accounted for was shrunk"
                try:
                    dug = self._call(
                        hunt_jobs.dig_program,
                        defect.options,
                        self.forgiven,
                        self._quirks,
                        defect.shrunk.program,
                    )
                except LostError as lost:
                    self._lose(replace(defect, loss=lost.loss))
                    continue
                if isinstance(dug, hunt_jobs.FailureAnalysis) and not dug.refuted:
                    options = replace(defect.options, profile=follow(self.forgiven).name)
                    self._name(replace(defect, options=options, forgiven=self.forgiven), dug)

    def _name(self, defect: Defect, dug: hunt_jobs.FailureAnalysis) -> bool:
        """Store a failure under its causes; return whether its episode should be played again."""
        description = describe_failure(defect.first)
        defect = replace(defect, shrunk=dug.shrunk, causes=dug.causes)
        defect = replace(defect, first=dug.first, raised_at=dug.raised_at)
        if not dug.causes:
            assert dug.symptoms is not None
            self._group(description, replace(defect, symptoms=dug.symptoms))
            return False
        tried = self._named.setdefault(dug.causes, [])
        tried.append(defect)
        # Another program may show one of two causes alone.
        is_plain = len(dug.causes) == 1 and defect.length <= SHORT
        is_done = is_plain or len(tried) >= PATIENCE
        if is_done:
            self.forgiven |= frozenset(dug.causes)
        return is_done

    def _dig_masked(self, options: CheckOptions, episode: EpisodeResult) -> None:
        """Shrink other findings at the event that may be defects of their own."""
        assert episode.first is not None
        for finding in list_masked(episode.first, episode.beside):
            description = describe_failure(finding)
            if self._in_vain[description] >= PATIENCE:
                self._count_again(description)
                continue
            wanted = replace(options, sentence=finding.sentence)
            masked = replace(episode, first=finding)
            defect = self._describe(wanted, masked)
            try:
                dug = self._analyse(options, masked)
            except LostError as lost:
                self._lose(replace(defect, loss=lost.loss))
                return
            if dug.symptoms is not None and dug.first.sentence == finding.sentence:
                dug_up = replace(defect, shrunk=dug.shrunk, symptoms=dug.symptoms)
                self._group(description, replace(dug_up, first=dug.first, is_masked=True))

    def _describe(self, options: CheckOptions, episode: EpisodeResult) -> Defect:
        """Return a failure as a defect that was not shrunk yet."""
        assert episode.first is not None
        return Defect(
            causes=(),
            first=episode.first,
            options=replace(options, profile=follow(self.forgiven).name),
            episode=episode.index,
            num_actions=0 if episode.program is None else len(episode.program.actions),
            num_events=self.result.num_events,
            symptoms=Symptoms(FailureSignature(describe_failure(episode.first))),
            forgiven=self.forgiven,
            loss=episode.loss,
        )

    def _lose(self, defect: Defect) -> None:
        """Note a crash or a hang of the engine, and end the hunt after `LOSSES_MAX` of them."""
        assert defect.loss is not None
        description = describe_crash(defect.loss.message)
        symptoms = Symptoms(FailureSignature(description))
        self._group(description, replace(defect, first=defect.loss.finding, symptoms=symptoms))
        self._num_lost += 1
        if self._num_lost >= LOSSES_MAX:
            self.result.stopped = f"the engine did not live {self._num_lost} times"

    def _group(self, description: str, defect: Defect) -> None:
        """Put a failure into the group of its defect, or into a new one."""
        shown = (self._show(defect, hides=False) if defect.options.hide_state else None) or ()
        if shown and all(finding.sentence != defect.first.sentence for finding, _ in shown):
            defect = replace(defect, behind=name_of(shown[0][0]))
        mine = defect.first.property_id
        follows = {
            mark
            for finding, mark in shown
            if mine == finding.property_id or can_follow(mine, finding.property_id)
        }
        self._failures.append(replace(defect, follows=frozenset(follows)))
        self._last[description] = len(self._failures) - 1
        groups = group_failures(self._failures)
        if len(groups) > len(self._groups):
            self._in_vain[description] = 0
        else:
            self._in_vain[description] += 1
            self.result.num_again[description] += 1
        self._groups = groups

    def _count_again(self, description: str) -> None:
        """Count a failure that is not shrunk with the last one of its message."""
        last = self._failures[self._last[description]]
        self._failures[self._last[description]] = replace(last, num_seen=last.num_seen + 1)
        self.result.num_again[description] += 1

    def _show(
        self, defect: Defect, *, hides: bool
    ) -> Sequence[tuple[Finding, FailureSignature]] | None:
        """Return the findings of a defect's program with the state hidden or judged, each with its
        mark; None if there is no program or the engine is lost."""
        if defect.shrunk is None:
            return None
        options = replace(defect.options, hide_state=hides)
        try:
            return self._call(hunt_jobs.show, options, self.forgiven, defect.shrunk.program)
        except LostError:
            return None

    def _hides_something(self) -> bool:
        """Return whether a failure of the state does not show in plans and answers."""
        is_judged = self.ground.facts.equivalence == Safety().name
        if not is_judged or Capability.SNAPSHOT not in self.ground.capabilities:
            return False
        for defect in self._failures:
            seen = self._show(defect, hides=True)
            if seen is not None and all(
                finding.sentence != defect.first.sentence for finding, _ in seen
            ):
                return True
        return False

    def _watch(self, watchpoint: Watchpoint) -> None:
        """Play tiny episodes until the decision is seen, at most `LOOKOUT_EPISODES`."""
        options = replace(self.options, preset=TINY.name)
        for start in range(0, LOOKOUT_EPISODES, EPISODES_PER_BATCH):
            indices = range(start, min(start + EPISODES_PER_BATCH, LOOKOUT_EPISODES))
            try:
                num_events, episode, shrunk = self._call(
                    hunt_jobs.find_watchpoint, options, self.forgiven, watchpoint.name, indices
                )
            except LostError:
                continue
            self.result.num_events += num_events
            if episode is not None:
                seen = replace(self._describe(options, episode), shrunk=shrunk)
                self.result.policies.append((watchpoint, seen))
                return


def hunt(
    options: CheckOptions,
    call: Call,
    on_progress: Callable[[float, str], None] = lambda _done, _text: None,
    scopes: Sequence[str] = SCOPES,
    forgiven: frozenset[KnownCause] = frozenset(),
    pool: Executor | None = None,
    known: Mapping[str, Program] = MappingProxyType({}),
    on_found: Callable[[Defect], None] = lambda _defect: None,
    on_interrupted: Callable[[HuntResult], None] = lambda _result: None,
) -> HuntResult:
    """Return every defect of an engine that is found, each once and with a program.

    Args:
        options: Seed, budget in events for each scope, depth. The profile says whose quirks
            may account for a failure; a profile without quirks stands for all quirks. With
            `episode`, only this one is played, at the preset of the options.
        call: Calls functions with the engine: `call_here(factory)`, or `Isolation.call`.
        on_progress: Given the share that is done, 0 to 1, and a line about it.
        scopes: Presets whose episodes are played.
        forgiven: Known causes that are suppressed from the start.
        on_found: Given the first failure of each message, before it is shrunk.
        on_interrupted: Given the result so far if a signal or an error ends the hunt and it has
            defects.
        known: Programs whose defects are counted and not reported, by file.
        pool: Threads that use `call`, as many as `jobs` of the options. The defects are the same
            with and without.

    Raises:
        EngineNotFoundError: if the engine cannot be loaded.
        UsageError: if the options want what the engine lacks.
    """
    try:
        arguments = on_progress, scopes, forgiven, pool, known, on_found, on_interrupted
        hunter = Hunter(options, call, *arguments)
    except LostError as lost:  # the engine was lost before the first event
        return HuntResult(options, hunt_jobs.UNKNOWN, [describe_loss(options, lost.loss)])
    return hunter.hunt()
