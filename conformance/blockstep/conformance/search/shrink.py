"""Shrink: reduces a failing program to one in which every action is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Protocol, TypeAlias

from blockstep.conformance.draw.requests import request_name
from blockstep.conformance.engine import EngineFactory, get_traits
from blockstep.conformance.lockstep.driver import put_causes_first
from blockstep.conformance.lockstep.exchange import Exchange
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import (
    ASYNC,
    FEATURES,
    PIPELINE,
    find_lacking,
    get_missing,
)
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Drain,
    Program,
    Propose,
    describe_observation,
)
from blockstep.conformance.search.shrink_candidates import (
    get_request,
    rename_brought,
    rename_requests,
    simpler_contents,
    with_request,
    with_requests,
)
from blockstep.conformance.search.simpler import (
    cut_prompt,
    halved,
    simpler_actions,
    simpler_configs,
)
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import STRICT, Profile

MAX_RUNS = 1200
STRAIGHT_ROUNDS = 24
OVERLAPPING_MAX = 3
"""Longest run of actions that is tried at every place."""
PAIRED_MAX = 24
"""Most actions of a program in which all pairs are tried."""


ARRIVALS = (v.Submit, v.StreamingUpdate, v.GrammarReady)
"""Actions of clients and grammar compilers."""


@dataclass(frozen=True, slots=True)
class LastAnswers:
    """Last event of a failing run and the answers of both sides, as text."""

    event: str
    expected: str
    seen: str | None
    """None if the engine raised."""
    are_alike: bool


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Smallest failing program found, and the result of its last run. It can cross process
    boundaries, a run cannot."""

    program: Program
    findings: tuple[Finding, ...]
    num_runs: int
    num_events: int
    equivalence: str
    last: LastAnswers | None


class Run(Protocol):
    """Part of a run of a program that the shrinker uses."""

    exchanges: list[Exchange]
    equivalence: str
    capabilities: frozenset[str]

    @property
    def num_events(self) -> int:
        """Return the number of events that the engine was given."""
        ...


Play: TypeAlias = Callable[[Program, EngineFactory, Profile], tuple[Run, list[Finding]]]
"""Plays a program: returns its run and the findings."""


def conclude(program: Program, run: Run, findings: Iterable[Finding], num_runs: int = 0) -> Shrunk:
    """Return the result of a program's run; `num_runs` programs were tried to shrink it."""
    last, findings = None, tuple(findings)
    if run.exchanges:
        exchange = run.exchanges[-1]
        has_answer = all(found.kind is not FindingKind.SPEC for found in findings)
        last = LastAnswers(
            type(exchange.event).__name__.lower(),
            describe_observation(exchange.expected) if has_answer else "it failed an assertion",
            None if exchange.seen is None else describe_observation(exchange.seen),
            has_answer and exchange.expected == exchange.seen,
        )
    return Shrunk(program, findings, num_runs, run.num_events, run.equivalence, last)


def get_symptom(finding: Finding) -> tuple[FindingKind, str, str]:
    """Return what two findings of one defect have in common: the check, and of an engine that
    raised the type of the exception."""
    raised = [it.seen for it in finding.differences if finding.kind is FindingKind.FAULT]
    return (finding.kind, finding.property_id, " ".join((finding.sentence, *raised)))


class _Budget(Exception):
    """The limit of tries is reached."""


class Shrinker:
    """Keeps the smallest program that fails like the first one.

    "Like" means: some finding is of the same check. A finding of another check of the same property
    may be of another defect, or of none. No program is tried that the engine need not accept.
    """

    def __init__(
        self,
        program: Program,
        make_engine: EngineFactory,
        first: Finding,
        profile: Profile = STRICT,
        on_run: Callable[[Shrinker], None] = lambda _shrinker: None,
        play: Play = run_program,
    ) -> None:
        self._make_engine = make_engine
        self._play = play
        self._profile = profile
        self._wanted = get_symptom(first)
        self._on_run = on_run
        self.num_runs = 0
        self._rejected: set[Program] = set()
        self._adopted = Counter([program])
        """Number of times each program was the best one. Two are allowed, since a pass may undo
        what an earlier one halved; with more, two programs could alternate for ever."""
        self.best = program
        self.run, self.findings = play(program, make_engine, profile)
        self._lacking = find_lacking(self.run.capabilities)
        most = get_traits(make_engine).max_depth or 0
        self._depth_max = max(most, program.config.max_frames_in_flight) if most else None

    def shrink(self) -> Shrunk:
        """Try ever smaller programs until none fails or `MAX_RUNS` are spent."""
        try:
            self._unroll_drain()
            self._cut_tail()
            self._straighten()
            while True:
                before = self.best
                self._pipeline()
                self._halve()
                self._simplify_config()
                self._simplify_requests()
                self._remove_actions()
                self._simplify_actions()
                self._scale_down()
                if self.best == before:
                    self._remove_pairs()
                if self.best == before:
                    break
            self._rename()
        except _Budget:
            pass
        return self.conclude()

    def conclude(self) -> Shrunk:
        """Return the smallest program until now, with its findings."""
        findings = self.findings
        if self._wanted[0] is not FindingKind.DIVERGENCE:  # a property says more than a divergence
            wanted_first = sorted(findings, key=lambda it: get_symptom(it) != self._wanted)
            findings = put_causes_first(wanted_first)
        return conclude(self.best, self.run, findings, self.num_runs)

    def _try(self, program: Program) -> bool:
        """Adopt `program` if it fails in the same way, and is one for this engine."""
        depth = program.config.max_frames_in_flight
        if program == self.best or program in self._rejected or self._adopted[program] > 1:
            return False
        if get_missing(program.config, self._lacking) is not None or (
            self._depth_max is not None and depth > self._depth_max
        ):
            return False
        if self.num_runs >= MAX_RUNS:
            raise _Budget
        self.num_runs += 1
        self._on_run(self)
        try:
            run, findings = self._play(program, self._make_engine, self._profile)
        except v.ConfigError:
            self._rejected.add(program)
            return False
        if not any(get_symptom(found) == self._wanted for found in findings):
            self._rejected.add(program)
            return False
        self._adopted[program] += 1
        self.best, self.run, self.findings = program, run, findings
        return True

    def _with(self, actions: tuple[Action, ...]) -> Program:
        return replace(self.best, actions=actions)

    def _unroll_drain(self) -> None:
        """Replace a drain by the actions that it consists of, so that they can be removed."""
        actions = self.best.actions
        if not actions or not isinstance(actions[-1], Drain):
            return
        submitted = [action.request for action in actions if isinstance(action, v.Submit)]
        waiting = [v.GrammarReady(it.request_id) for it in submitted if it.structured_output]
        ends = [
            v.StreamingUpdate(v.Request(it.request_id, (0,))) for it in submitted if it.resumable
        ]
        head = (*actions[:-1], v.SetPause(v.PauseState.UNPAUSED), *waiting, *ends)
        fill = (v.Schedule(),) * (self.best.config.max_frames_in_flight - 1)
        for steps in (4, 16, 64, 256):
            if self._try(self._with((*head, Answer(), *fill, *((v.Schedule(), Answer()) * steps)))):
                return

    def _cut_tail(self) -> None:
        """Drop what comes after the failing action: find the shortest failing head by bisection."""
        low, high = 0, len(self.best.actions)
        actions = self.best.actions
        while low < high:
            middle = (low + high) // 2
            if self._try(self._with(actions[:middle])):
                high = middle
            else:
                low = middle + 1

    def _straighten(self) -> None:
        """Try the simplest programs: all requests are submitted at once, then steps follow.

        Most defects need nothing more, and removing single actions would not find that out.
        """
        actions = self.best.actions
        submits = tuple(action for action in actions if isinstance(action, v.Submit))
        brought = tuple(action for action in actions if isinstance(action, ARRIVALS))
        fill = (v.Schedule(),) * (self.best.config.max_frames_in_flight - 1)
        proposals = [action for action in self.best.actions if isinstance(action, Propose)][:1]
        rounds: list[tuple[Action, ...]] = [(v.Schedule(), Answer())]
        rounds += [(v.Schedule(), Answer(), proposal) for proposal in proposals]
        for arrivals in dict.fromkeys((submits, brought)):
            for one_round in rounds:
                actions = (*arrivals, *fill, *one_round * STRAIGHT_ROUNDS)
                if self._try(self._with(actions)):
                    self._cut_tail()
                    return

    def _remove_actions(self) -> None:
        """Remove runs of actions, long ones first, from the end to the start."""
        size = max(len(self.best.actions) // 2, 1)
        while size >= 1:
            # Short runs are tried at every place, long ones without overlap.
            stride = size if size > OVERLAPPING_MAX else 1
            start = len(self.best.actions) - size
            while start >= 0:
                actions = self.best.actions
                shorter = actions[:start] + actions[start + size :]
                start -= size if self._try(self._with(shorter)) else stride
            size = size // 2 if size > OVERLAPPING_MAX else size - 1

    def _remove_pairs(self) -> None:
        """Remove any two actions at once: a pause and its end, a step and a step elsewhere."""
        num_actions = len(self.best.actions)
        if num_actions > PAIRED_MAX:
            return
        for first, second in combinations(range(num_actions), 2):
            actions = self.best.actions
            if second < len(actions):
                kept = (*actions[:first], *actions[first + 1 : second], *actions[second + 1 :])
                self._try(self._with(kept))

    def _pipeline(self) -> None:
        """Let all plans be in flight at once, so that no commit is needed between them."""
        actions = tuple(action for action in self.best.actions if not isinstance(action, Answer))
        depth = sum(isinstance(action, v.Schedule) for action in actions)
        is_async = not PIPELINE.is_asked_by(self.best.config) and ASYNC not in self._lacking
        if depth > 1 and len(actions) < len(self.best.actions):
            flight = {"max_frames_in_flight": depth, "async_scheduling": is_async}
            config = replace(self.best.config, **flight)  # type: ignore[arg-type]
            self._try(replace(self.best, config=config, actions=actions))

    def _halve(self) -> None:
        """Halve all numbers of tokens at once, as long as the failure remains."""
        while self._try(halved(self.best)):
            pass

    def _scale_down(self) -> None:
        """Remove blocks from the pool and tokens from one prompt at once: single changes would not
        fail."""
        for index in range(len(self.best.actions)):
            for num_blocks in (4, 2, 1):
                while self._without_blocks(index, num_blocks):
                    pass

    def _without_blocks(self, index: int, num_blocks: int) -> bool:
        action, config = self.best.actions[index], self.best.config
        request = get_request(action)
        total = config.num_blocks - num_blocks * len(config.kv_groups)
        if request is None or total < 2:
            return False
        left = len(request.prompt_token_ids) - num_blocks * config.block_size
        if left < 1:
            return False
        shorter = with_request(action, lambda it: cut_prompt(it, left))
        actions = (*self.best.actions[:index], shorter, *self.best.actions[index + 1 :])
        smaller = replace(config, num_blocks=total)
        return self._try(replace(self.best, config=smaller, actions=actions))

    def _simplify_requests(self) -> None:
        """Remove a feature from all requests at once: some share a block because both have it.

        Actions that need the feature are removed with it.
        """
        for feature in FEATURES:
            actions = with_requests(self.best.actions, feature.take_from)
            left = tuple([action for action in actions if not isinstance(action, feature.actions)])
            if not self._try(self._with(left)):
                self._try(self._with(actions))
        progress = True
        while progress:
            progress = any(
                self._try(self._with(simpler)) for simpler in simpler_contents(self.best.actions)
            )

    def _simplify_actions(self) -> None:
        for index in range(len(self.best.actions)):
            progress = True
            while progress:
                actions = self.best.actions
                progress = any(
                    self._try(self._with((*actions[:index], simpler, *actions[index + 1 :])))
                    for simpler in simpler_actions(actions[index])
                )

    def _simplify_config(self) -> None:
        """Adopt simplifications of the config one after the other."""
        base = self.best.config
        names = [field.name for field in fields(base)]
        for simpler in simpler_configs(base):
            pairs = ((name, getattr(simpler, name)) for name in names)
            change = {name: value for name, value in pairs if value != getattr(base, name)}
            now = self.best.config
            if change and all(getattr(now, name) == getattr(base, name) for name in change):
                self._try(replace(self.best, config=replace(now, **change)))

    def _rename(self) -> None:
        """Rename the requests A, B, C in order of submission, or of their names, since names break
        ties.

        Adapters and items are renamed x, y, z, if their names do not matter either.
        """
        names = dict.fromkeys(
            action.request.request_id
            for action in self.best.actions
            if isinstance(action, v.Submit)
        )
        for order in (list(names), sorted(names)):
            plain = {name: request_name(index) for index, name in enumerate(order)}
            if self._try(self._with(rename_requests(self.best.actions, plain))):
                break
        self._try(rename_brought(self.best))


def shrink(
    program: Program,
    make_engine: EngineFactory,
    first: Finding,
    profile: Profile = STRICT,
    on_run: Callable[[Shrinker], None] = lambda _shrinker: None,
    play: Play = run_program,
) -> Shrunk:
    """Return the smallest program found that fails as `program` does with `first`, played by
    `play`."""
    return Shrinker(program, make_engine, first, profile, on_run, play).shrink()
