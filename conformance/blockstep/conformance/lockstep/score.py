"""Score: how far an engine does the same as the specification, counted past every difference.

Both sides play one program on their own (`lockstep.solo_run`). These are counted, on either side,
with the condition under which they agree:

    steps        with a row or a preemption       the same rows by request, the same preempted
    admissions   a request's n-th admission       in the same step
    hits         of an admission on both sides    as many tokens
    preemptions  a request's n-th preemption      in the same step
    endings      a request's end                  after as many steps, same reason, same tokens
    tokens       a row of the engine's own plans  delivered in the answer to the plan, if it sampled

A step that comes late shifts what follows it, so steps after a first difference rarely agree; hits
and endings show whether the shift matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Self, TypeVar

from blockstep.conformance.engine import (
    EngineFactory,
    EngineFault,
    Equivalence,
    build,
    get_declines,
    get_traits,
)
from blockstep.conformance.judge.worker import Worker, make_worker
from blockstep.conformance.lockstep.exchange import (
    Exchange,
    ask_adapter,
    blame_spec,
    fault_of,
    find_blame,
)
from blockstep.conformance.lockstep.liveness import drain_bound
from blockstep.conformance.lockstep.plan_equivalence import fit_worker
from blockstep.conformance.lockstep.scoped_run import DECLINED, fit_submit, require_fitting
from blockstep.conformance.lockstep.solo_run import NOTHING, Ending, Row, SoloRun, SoloStep
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.findings import (
    Difference,
    Finding,
    FindingKind,
    blame_check,
)
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program, Report
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.token_function import token_function
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import STRICT, Profile

K = TypeVar("K")
T = TypeVar("T")


NOT_YET = "not by the end of the program"


class Aspect(StrEnum):
    """Kind of thing that is counted."""

    STEPS = "steps"
    ADMISSIONS = "admissions"
    HITS = "hits"
    PREEMPTIONS = "preemptions"
    ENDINGS = "endings"
    TOKENS = "tokens"


@dataclass(slots=True)
class Tally:
    """Number of times something happened on either side, and alike, and the first difference."""

    total: int = 0
    agreed: int = 0
    firsts: dict[str, Difference] = field(default_factory=dict)
    """The first difference of each shape, in the order in which they were found."""

    @property
    def first(self) -> Difference | None:
        """The first difference, or None."""
        return next(iter(self.firsts.values()), None)

    def count(
        self, is_alike: bool, make_difference: Callable[[], Difference], shape: str = ""
    ) -> None:
        """Count one more; `shape` separates differences of one aspect."""
        self.total += 1
        self.agreed += is_alike
        if not is_alike and shape not in self.firsts:
            self.firsts[shape] = make_difference()


@dataclass(slots=True, kw_only=True)
class ScoreRun:
    """One program on both sides. Not reusable."""

    config: v.Config
    reference: SoloRun
    engine: SoloRun
    scope: Equivalence
    capabilities: frozenset[str]
    declines: Callable[[v.Event], str | None] | None = None
    """Returns why neither side is given an event, or None."""
    equivalence: str = "plan"
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of events left out because the engine lacks a capability, or the specification
    rejected them."""
    exchanges: list[Exchange] = field(default_factory=list)
    """Always empty: nothing is compared event by event."""
    names: set[v.RequestId] = field(default_factory=set)

    @classmethod
    def start(
        cls,
        config: v.Config,
        make_engine: EngineFactory,
        token_seed: int = 0,
        vocabulary_size: int = 50,
        profile: Profile = STRICT,
    ) -> Self:
        """Build both sides.

        Raises:
            ConfigError: the engine cannot be built with this config.
        """
        traits = get_traits(make_engine)
        scope = traits.equivalence or Equivalence()
        require_fitting(config, scope)
        engine, next_token = build(make_engine, config), token_function(token_seed, vocabulary_size)
        worker = fit_worker(make_worker(traits, config, next_token), make_engine)
        ahead = scope.plans_ahead
        return cls(
            config=config,
            reference=SoloRun(
                config=config,
                scheduler=SpecEngine(config, profile),
                worker=Worker(config, next_token),
                plans_ahead=ahead,
            ),
            engine=SoloRun(config=config, scheduler=engine, worker=worker, plans_ahead=ahead),
            scope=scope,
            capabilities=engine.capabilities(),
            declines=get_declines(engine) if profile.spares else None,
        )

    @property
    def num_events(self) -> int:
        """Return the number of events that the engine was given."""
        return self.engine.num_events

    def skip(self, reason: str) -> None:
        """Count something that was left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def fit(self, action: Action) -> Action | None:
        """Return the action that both sides can be given; None if the engine can be given none of
        it."""
        lacking = find_lacking(self.capabilities)
        if isinstance(action, v.Submit):
            fitting = fit_submit(action, self.scope, self.config, lacking, self.skip)
            if fitting is None:
                self.skip(DECLINED)
            return fitting
        missing = get_missing(action, lacking)
        if missing is not None:
            self.skip(missing)
        return action if missing is None else None

    def perform(self, action: Action) -> list[Finding]:
        """Do one action on both sides. Return a finding only if a side cannot continue, or if
        Blockstep raised."""
        try:
            return self._perform(action)
        except Exception as error:
            return self._find_blame(error, action)

    def _find_blame(self, error: Exception, action: Action) -> list[Finding]:
        """Return the finding about an exception."""
        if error is self.engine.raised or isinstance(error, EngineFault):
            return [fault_of(error)]
        if error is self.reference.raised:
            return [blame_spec(error)]
        if self.engine.last is None:
            what = f"Blockstep, in action {type(action).__name__.lower()},"
            return [blame_check(error, what)]
        return find_blame(error, *self.engine.last, found=self.engine.wrong)[:1]

    def _perform(self, action: Action) -> list[Finding]:
        if isinstance(action, Drain):
            return self._drain()
        event = None if self.declines is None else self.engine.resolve(action)
        reason = None
        if self.declines is not None and event is not None:
            reason = ask_adapter("declines", self.declines, event)
        if reason is not None:
            self.skip(reason)
            return []
        if isinstance(action, v.Submit):
            name = action.request.request_id
            if name in self.names or self.fit(action) != action:
                return []
            if isinstance(self.reference.play(action), v.Rejected):
                self.skip("requests that the specification rejects")
                return []
            self.names.add(name)
        elif isinstance(self.reference.play(action), v.Rejected) and not isinstance(action, Answer):
            self.skip("events that the specification rejects")
            return []
        seen = self.engine.play(action)
        if self.engine.unusable is not None:
            return [self.engine.unusable]
        if isinstance(seen, v.Rejected) and isinstance(action, Answer):
            what = f"the engine rejects the model output of its own plan: {seen.code} {seen.detail}"
            return [Finding(FindingKind.FAULT, "", "engine_takes_model_outputs_of_its_plans", what)]
        return []

    def _drain(self) -> list[Finding]:
        """End all faults, then step until all requests finish on both sides, or a bound."""
        sides = (self.reference, self.engine)
        live = {**self.engine.live, **self.reference.live}
        grammars = [name for name, request in live.items() if request.structured_output]
        fill = (v.Schedule(),) * (self.config.max_frames_in_flight - 1)
        start: list[Action | None] = [self.fit(v.SetPause(v.PauseState.UNPAUSED))]
        start += [v.GrammarReady(name) for name in grammars]
        sessions = {**self.engine.sessions, **self.reference.sessions}
        start += [v.StreamingUpdate(v.Request(name, (0,))) for name in sessions]
        answers = [offer for side in sides for offer in side.transfers.list_answers()]
        start += {offer.request_id: offer for offer in answers}.values()
        start += [Answer(), *fill]
        num_left = drain_bound(live, self.config.max_model_len, sessions)
        while start or (num_left and any(side.live for side in sides)):
            for action in start or (*self._end_transfers(), v.Schedule(), Answer()):
                findings = [] if action is None else self.perform(action)
                if findings:
                    return findings
            num_left, start = num_left - (not start), []
        return []

    def _end_transfers(self) -> list[Action]:
        """Complete all loads and reads of the store."""
        both = (self.engine.transfers, self.reference.transfers)
        loading = dict.fromkeys(name for one in both for name in one.loading)
        sending = dict.fromkeys(name for one in both for name in one.sending)
        return [Report((*loading,), (*sending,))] if loading or sending else []

    def tallies(self) -> Mapping[Aspect, Tally]:
        """Return the counts up to now."""
        found = {aspect: Tally() for aspect in Aspect}
        mine, theirs = self.reference, self.engine
        pairs = zip_longest(mine.steps, theirs.steps, fillvalue=NOTHING)
        for number, (left, right) in enumerate(pairs, 1):
            if left or right:
                found[Aspect.STEPS].count(
                    left == right, _lazy_difference(f"step {number}", left, right)
                )
        for key, one, other in _both(mine.admissions, theirs.admissions):
            steps = (one and one[0], other and other[0])
            difference = _lazy_difference(_nth("admission", *key), *map(_at, steps))
            found[Aspect.ADMISSIONS].count(steps[0] == steps[1], difference)
            if one and other and (one[1] or other[1]):
                hits = (f"{hit[1]} token{'s' * (hit[1] != 1)}" for hit in (one, other))
                difference = _lazy_difference(_nth("hit at admission", *key), *hits)
                found[Aspect.HITS].count(one[1] == other[1], difference)
        for key, when, then in _both(mine.preemptions, theirs.preemptions):
            difference = _lazy_difference(_nth("preemption", *key), _at(when), _at(then))
            found[Aspect.PREEMPTIONS].count(when == then, difference)
        for name, end, stop in _both(mine.endings, theirs.endings):
            difference = _lazy_difference(f"end of {name}", _ending(end), _ending(stop))
            found[Aspect.ENDINGS].count(end == stop, difference)
        for name, number, has_sampled, is_delivered in theirs.tokens:
            difference = _lazy_difference(
                f"token of {name} in plan {number}", *map(_due, (has_sampled, is_delivered))
            )
            found[Aspect.TOKENS].count(has_sampled == is_delivered, difference, _due(is_delivered))
        return found

    def differing(self, aspect: Aspect, shape: str | None = None) -> list[Finding]:
        """Return the first difference of an aspect, of this shape or any, as a finding; [] if there
        is none."""
        tally = self.tallies()[aspect]
        first = tally.first if shape is None else tally.firsts.get(shape)
        if first is None:
            return []
        what = f"{tally.agreed} of {tally.total} {aspect} agree; the first that does not:"
        return [Finding(FindingKind.DIVERGENCE, "", f"{aspect}_agree", what, (first,))]


def _both(left: Mapping[K, T], right: Mapping[K, T]) -> Iterator[tuple[K, T | None, T | None]]:
    for key in dict.fromkeys((*left, *right)):
        yield key, left.get(key), right.get(key)


def _lazy_difference(what: str, one: object, other: object) -> Callable[[], Difference]:
    return lambda: Difference(what, _format_side(one), _format_side(other))


def _format_side(side: object) -> str:
    if not isinstance(side, SoloStep):
        return str(side)
    parts = [f"{name} {_format_row(row)}" for name, row in sorted(side.rows.items())]
    parts += [f"{name} preempted" for name in sorted(side.preempted)]
    return "; ".join(parts) or "no request runs"


def _format_row(row: Row) -> str:
    drafts = f", {row.num_drafts} draft{'s' * (row.num_drafts > 1)}" if row.num_drafts else ""
    first, last = row.num_computed, row.num_computed + row.num_scheduled - 1
    where = f"position {first}" if first == last else f"positions {first}-{last}"
    return f"{row.kind}, {where}{drafts}"


def _due(is_there: bool) -> str:
    return "delivered" if is_there else "not delivered"


def _nth(what: str, name: v.RequestId, number: int) -> str:
    return f"{what} of {name}" if number == 1 else f"{what} {number} of {name}"


def _at(step: int | None) -> str:
    return NOT_YET if step is None else f"step {step}"


def _ending(ending: Ending | None) -> str:
    if ending is None:
        return NOT_YET
    return f"{ending.reason} after step {ending.step}: {list(ending.outputs)}"


def score_program(
    program: Program, make_engine: EngineFactory, profile: Profile = STRICT
) -> tuple[ScoreRun, list[Finding]]:
    """Play a program on both sides to its end, or as far as the engine can continue."""
    run = ScoreRun.start(
        program.config, make_engine, program.token_seed, program.vocabulary_size, profile
    )
    for action in program.actions:
        findings = run.perform(action)
        if findings:
            return run, findings
    return run, []
