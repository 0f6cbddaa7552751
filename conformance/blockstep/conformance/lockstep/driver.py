"""Driver: spec, engine and worker in lock-step; everything is compared after every event.

    action -> event --> spec   --> observation, snapshot --+
                 |                                          |-- equal?
                 +----> engine --> observation, snapshot --+
                          |              |
                          +--> worker    +--> properties: no reference needed

Three sources of findings: the spec says what is right, the engine shows what it did, and the
worker, which sees only the plans, whether they can be executed.

Properties are checked on demand. If both sides have the same answer and the same state, a property
could only find a defect of the spec, which tests and `explore` check against all properties. If
something differs, or the worker finds something, all are checked, to name the defect. Those that
need no reference are checked if the engine's state is its own, though equal by its equivalence. If
the spec follows quirks, all are checked at each step: their findings are known, and not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Self

from blockstep.conformance.engine import (
    BadEngineError,
    Capability,
    Engine,
    EngineFactory,
    EngineFault,
    PartOfState,
    build,
    get_declines,
    get_judged,
    get_traits,
)
from blockstep.conformance.judge.checks import NONE, Asked, check_step
from blockstep.conformance.judge.coverage_goals import situations
from blockstep.conformance.judge.pairs import PairCounter
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.worker import make_worker
from blockstep.conformance.lockstep.action_resolver import ActionResolver, ask_mask
from blockstep.conformance.lockstep.deviations import DeviationCounter
from blockstep.conformance.lockstep.exchange import (
    Exchange,
    Unbuilt,
    ask_adapter,
    blame_raised,
    blame_spec,
    fault_of,
    find_blame,
    get_first_state,
)
from blockstep.conformance.lockstep.liveness import Watch, drain_bound
from blockstep.conformance.lockstep.quirks import WatchedSpec
from blockstep.conformance.protocol.compare import (
    find_subjects,
    observation_differences,
    snapshot_differences,
)
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.features import find_lacking, fit, get_missing
from blockstep.conformance.protocol.findings import (
    MUST_WAIT,
    Difference,
    Finding,
    FindingKind,
    leave_out_raised,
    shown_apart,
)
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Drain,
    Report,
)
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.shown import complete_state, shows_holders
from blockstep.conformance.protocol.token_function import token_function
from blockstep.conformance.protocol.type_check import fault_of_types
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import STRICT, Profile

COMMON_PREFIX, WORK = Capability.COMMON_PREFIX, Capability.WORK
NOT_SHOWN = "fields of states that `show_state` does not take"
"""Name under which they are counted."""
EXPLICABLE = frozenset({FindingKind.PROPERTY, FindingKind.LIVENESS})
"""Kinds of findings that a quirk may cause."""
GENERAL = frozenset(
    {
        "commit_changes_only_outputs_and_computed_tokens",
        "event_changes_only_what_it_is_about",
        "event_leaves_other_requests_alone",
        "empty_plan_changes_nothing",
        "plans_alone_rebuild_the_request",
        "request_without_a_row_stays_the_same",
    }
)
"""Checks that say that something changed or differs, and not what is wrong with it."""
OF_A_STATUS = frozenset(
    {
        "only_running_requests_hold_anything",
        "preempted_request_starts_again",
    }
)
"""Checks that a request has what its status allows: blocks and counters are wrong as a result."""
PARKED = "loading_request_matches_its_load"
CAUSES = {
    "P3": frozenset({"P13"}),
    "P13": frozenset({"P19"}),
    "P16": frozenset({"P17", "P18", "P19", "P22", "P23", "P24", "P25"}),
    "load_is_what_the_store_offers": frozenset(
        {"hit_is_the_longest_possible", "hit_is_whole_blocks_and_leaves_a_token", PARKED}
    ),
    **dict.fromkeys(
        (
            "block_in_transfer_is_not_written",
            "attended_slot_was_loaded",
            "hit_is_whole_blocks_and_leaves_a_token",
            "admission_leaves_room_for_the_whole_prompt",
        ),
        frozenset({PARKED}),
    ),
    "finished_requests_leave_the_state": frozenset({"session_keeps_all_but_its_last_token"}),
    **dict.fromkeys(
        (
            "computed_full_blocks_are_published",
            "published_block_holds_the_right_prefix",
            "published_block_was_written",
        ),
        frozenset(
            {"block_still_to_be_written_is_not_published", "only_computed_blocks_are_published"}
        ),
    ),
}
"""Properties and checks that others break with them: a finding of the first comes after theirs."""
VALUE_CHARS_MAX = 60
"""Most characters of a value in the message of a divergence."""


def list_uncounted(capabilities: Collection[str]) -> frozenset[str]:
    """Return the counters (fields of `Stats`) that an engine with these capabilities does not
    have."""
    if Capability.STATISTICS in capabilities:
        return frozenset()
    if Capability.CACHE_STATISTICS in capabilities:
        return frozenset({"preemptions"})
    return frozenset(part.name for part in fields(v.Stats))


def put_causes_first(findings: list[Finding]) -> list[Finding]:
    """Return the findings of a step, causes first.

    An admission of a request that must wait is first, then what a request has against its status; a
    divergence is last. A check that only says that something changed or differs comes after those
    that say what, and the order of a queue comes after what decides which requests wait and which
    blocks are free.

    A completed transfer that is missed or taken too early leaves blocks held or frees them, so the
    order of the free queue differs, too. A failed load that is not noticed leaves a request
    running, so its outputs are wrong, too.
    """
    found = {
        name
        for one in findings
        if one.sentence not in GENERAL
        for name in (one.property_id, one.sentence)
    }

    def rank(one: Finding) -> int:
        if one.message.endswith(MUST_WAIT):
            return -2
        if one.sentence in OF_A_STATUS:
            return -1
        if one.kind in (FindingKind.FAULT, FindingKind.DIVERGENCE):
            return 3
        if one.sentence in GENERAL:
            return 2
        names = (one.property_id, one.sentence)
        return int(any(not CAUSES.get(it, frozenset()).isdisjoint(found) for it in names))

    return sorted(findings, key=rank)


def _put_beside(found: Finding, diverged: Sequence[Finding]) -> Finding:
    """Return a finding, if it is of a property with where spec and engine differ in its step."""
    if found.kind is not FindingKind.PROPERTY or not diverged:
        return found
    return replace(found, diverged=diverged[0].differences)


def describe_divergence(event: v.Event, differences: Sequence[Difference]) -> str:
    """Return a message with the first differing field, both values, and the number of other
    fields."""
    first, more = differences[0], len(differences) - 1
    expected, seen = shown_apart(first.expected, first.seen, VALUE_CHARS_MAX)
    others = f", and {more} more field{'s' * (more > 1)} differ{'s' * (more == 1)}" * (more > 0)
    after = type(event).__name__.lower()
    return f"after {after}, {first.field} is {seen}, the spec has {expected}{others}"


@dataclass(slots=True, kw_only=True)
class LockStep(ActionResolver):
    """One run of an engine and the specification in lock-step. Not reusable."""

    engine: Engine
    unbuilt: Finding | None = None
    """Error that the engine's constructor raised; None if it was built."""
    history: History
    witnesses: Counter[str]
    pairs: PairCounter
    lacking: tuple[Feature, ...]
    """Features that the engine is not given, because it lacks a capability."""
    judged: frozenset[v.RejectCode]
    """Reject codes of the specification for which the engine is given the event, too."""
    declines: Callable[[v.Event], str | None] | None = None
    """Returns why the engine is not given an event, or None."""
    keep_exchanges: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    last: Exchange | None = None
    """Last event that both sides were given, or that only the specification was given and
    rejected."""
    compare_every: int | None = None
    """Events between two comparisons of whole states, 0: none; answers are compared at each event
    and no property is checked. None: every state is compared, and properties are checked."""
    asks_all: bool = False
    """Whether to check every property at every step, not only after a difference."""
    num_compared: int = 0
    """Number of states compared."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of events left out, by missing capability or by reason of the engine's adapter."""
    before: v.Snapshot | None = None
    """State of the engine, if it shows any."""
    spec_before: v.Snapshot | None
    """State of the specification, if the engine has shown none yet."""
    num_events: int = 0
    found: list[Finding] = field(default_factory=list)
    """Findings of the step, kept for the case that a check raises."""
    has_failed: bool = False
    """Whether there were findings; both sides may differ from then on."""
    equivalence: str = ""
    """Weaker equivalence of the run; "" if the engine is compared with the spec exactly."""
    known: dict[str, int] = field(default_factory=dict)
    """Number of findings that the quirks of the profile explain, by property."""
    standing: set[Finding] = field(default_factory=set)
    """Findings that the quirks explain, each once: they repeat as long as their effect."""
    excuses: DeviationCounter = field(default_factory=DeviationCounter)
    """Findings that the adapter declares."""

    @classmethod
    def start(
        cls,
        config: v.Config,
        make_engine: EngineFactory,
        token_seed: int = 0,
        vocabulary_size: int = 50,
        keep_exchanges: bool = False,
        profile: Profile = STRICT,
        compare_every: int | None = None,
    ) -> Self:
        """Build both sides. If the engine's constructor raises, the run ends with its first action.

        Raises:
            BadEngineError: as `engine.build`.
            ConfigError: the engine rejects the config.
        """
        traits, unbuilt = get_traits(make_engine), None
        engine: Engine
        try:
            engine = build(make_engine, config)
        except (BadEngineError, v.ConfigError):
            raise
        except Exception as error:
            unbuilt, engine = fault_of(error, "while being built"), Unbuilt(error)
        # The worker allocates all slots; it needs none if it sees no plan.
        room = config if compare_every is None else v.Config(num_blocks=2)
        capabilities = engine.capabilities()
        is_watched = profile.quirks and compare_every is None
        spec = (WatchedSpec if is_watched else SpecEngine)(config, profile)
        first = spec.snapshot()
        run = cls(
            config=config,
            engine=engine,
            unbuilt=unbuilt,
            worker=make_worker(traits, room, token_function(token_seed, vocabulary_size)),
            spec=spec,
            spec_before=first,
            history=History(
                config, traits.drops_tokens_in_flight, uncounted=list_uncounted(capabilities)
            ),
            witnesses=Counter(),
            pairs=PairCounter(config),
            capabilities=capabilities,
            lacking=find_lacking(capabilities),
            judged=get_judged(engine),
            declines=get_declines(engine) if profile.spares else None,
            keep_exchanges=keep_exchanges,
            compare_every=compare_every,
            excuses=DeviationCounter(traits.deviations),
        )
        if compare_every is None:
            run.before = run._comparable(get_first_state(engine, first))
        return run

    def fit(self, action: Action) -> Action:
        """Return the action without what the engine lacks; what is left out is counted."""
        if not isinstance(action, v.Submit):
            return action
        request, missing = fit(action.request, self.lacking)
        for capability in missing:
            self.skip(capability)
        return v.Submit(request) if missing else action

    def perform(self, action: Action) -> list[Finding]:
        """Do one action on both sides. Return the findings; the run is over after the first
        ones."""
        try:
            findings = self._perform(action)
        except Exception as error:
            findings = [
                blame_raised(error, f"Blockstep, in action {type(action).__name__.lower()},")
            ]
        if findings:
            self.has_failed = True
        return findings

    def _perform(self, action: Action) -> list[Finding]:
        if self.unbuilt is not None:
            return [self.unbuilt]
        if isinstance(action, Drain):
            return self._drain()
        lacking, event = self.lacking, None
        missing = get_missing(action, lacking) if lacking else None
        if isinstance(action, Answer) and self._owes_a_mask():
            findings = self.apply(ask_mask(self.worker, self.plans[0]))
            if findings:
                return findings
        if missing is None:
            event = self.resolve(action)
            missing = get_missing(event, lacking) if lacking and event is not None else None
        if missing is not None:
            self.skip(missing)
        elif event is not None:
            return self.apply(event)
        return []

    def apply(self, event: v.Event) -> list[Finding]:
        """Give one event to both sides and check everything that can be checked. Return the
        findings. An exception is a finding, too: `find_blame` decides whether about the engine.

        An event that the engine declines is given to neither side, and is not counted.
        """
        try:
            return self._apply(event)
        except Exception as error:
            return [blame_raised(error, f"Blockstep, at {type(event).__name__.lower()},")]

    def _apply(self, event: v.Event) -> list[Finding]:
        if self.excuses.is_over:
            return []
        reason = self._find_decline(event)
        if reason is not None:
            self.skip(reason)
            return []
        self.num_events += 1
        try:
            expected = self.spec.apply(event)
        except Exception as error:
            return [blame_spec(error), *self._give_to_engine_alone(self._translate(event))]
        if isinstance(expected, v.Rejected) and expected.code not in self.judged:
            self.skip(Capability.REJECTION)
            self.last = Exchange(event, expected, expected)
            return []
        sent = self._translate(event)
        try:
            seen, after, faults = self._ask(sent)
        except Exception as error:
            self._keep(Exchange(sent, expected, None))
            return self.excuses.take([fault_of(error)], sent, expected, None)
        self._keep(Exchange(sent, expected, seen))
        if faults:
            faults = self.excuses.take(faults, sent, expected, None)
        self.found = []
        try:
            found = self._compare(event, sent, expected, seen, after)
            if not faults:
                return found
            leading = list(takewhile(lambda it: it.kind is FindingKind.PROPERTY, found))
            return [*leading, *faults, *found[len(leading) :]]
        except Exception as error:
            blamed = find_blame(error, sent, seen, after, faults or self.found)
            return self.excuses.take(blamed, sent, expected, None)

    def _find_decline(self, event: v.Event) -> str | None:
        """Return why the engine declines an event, or None. Raises EngineFault as `ask_adapter`."""
        return None if self.declines is None else ask_adapter("declines", self.declines, event)

    def _ask(self, event: v.Event) -> tuple[v.Observation, v.Snapshot | None, list[Finding]]:
        """Return the engine's answer to an event, its state after it where that is compared, and
        the first fault if they contradict themselves."""
        faults: list[Finding] = []
        try:
            seen = self.engine.apply(event)
        except EngineFault as fault:
            if fault.answer is None:
                raise
            seen, faults = fault.answer, [fault_of(fault)]
        every = self.compare_every
        if every is not None and (every == 0 or self.num_events % every):
            return seen, None, faults
        try:
            return seen, self.engine.snapshot(), faults
        except EngineFault as fault:
            if fault.state is None:
                raise
            return seen, fault.state, faults or [fault_of(fault)]

    def follow(self, event: v.Event, observation: v.Observation) -> None:
        """Update the client and the worker, and count the goals of `pairs`."""
        if self.compare_every is not None:
            ActionResolver.follow(self, event, observation)
            return
        before = [*self.live]
        self.pairs.note(event, observation, self)
        ActionResolver.follow(self, event, observation)
        self.pairs.settle(event, before, self)

    def _give_to_engine_alone(self, sent: v.Event) -> list[Finding]:
        """Return the findings about the engine's step at an event at which the specification
        failed."""
        try:
            seen, after = self.engine.apply(sent), self.engine.snapshot()
        except Exception as error:
            self._keep(Exchange(sent, v.Ack(), None))
            return [fault_of(error)]
        self._keep(Exchange(sent, seen, seen))
        if (ill_typed := fault_of_types(sent, seen, after)) is not None:
            return [ill_typed]
        if self.compare_every is not None:
            return []
        if self.before is None or after is None:
            return self._check_answer(sent, seen)
        after = replace(after, stats=self._fill(after.stats, self.before.stats))
        step = Step(self.config, self.num_events, sent, seen, self.before, after)
        return leave_out_raised(self._check_step(step))

    def _translate(self, event: v.Event) -> v.Event:
        """Return the event in the engine's terms."""
        return event

    def _compare(
        self,
        event: v.Event,
        sent: v.Event,
        expected: v.Observation,
        seen: v.Observation,
        after: v.Snapshot | None,
    ) -> list[Finding]:
        """Return the findings of comparison and checks. Types are checked if something differs, or
        if not everything is compared.

        Raises:
            Exception: the engine's answer or state is too ill-typed to be compared.
        """
        comparable = self._comparable(after) if after is not None else None
        findings = self.found = self._diverge(sent, expected, seen, comparable)
        if findings or self.equivalence:
            found = fault_of_types(sent, seen, after)
            if found is not None:
                return self.excuses.take([found], sent, expected, None)
        elif comparable is not None:
            # They are equal, and parts that the event did not change are the same objects as
            # before.
            comparable = self.spec.snapshot()
        if self.compare_every is None:  # the checks need every state
            findings = self._judge(event, sent, expected, seen, comparable, findings)
        else:
            findings = self.excuses.take(findings, sent, expected, seen)
        self.before = comparable
        self.follow(event, expected)
        return findings

    def _judge(
        self,
        event: v.Event,
        sent: v.Event,
        expected: v.Observation,
        seen: v.Observation,
        after: v.Snapshot | None,
        diverged: list[Finding],
    ) -> list[Finding]:
        """Return the findings of worker and properties and those `diverged`, unless quirks explain
        them.

        If the engine shows no state, or a part of one, goals are counted on the specification's
        side, whose answers were equal up to now.
        """
        step: Step | None
        of_spec = self._judge_spec(sent, expected) if diverged else []
        if after is None or self.before is None or NOT_SHOWN in self.skipped:
            step = self._step_of_spec(event, expected)
            findings = [*self._check_answer(sent, seen), *diverged]
        else:
            self.spec_before = None
            if diverged and self.history.uncounted:  # these counters are the specification's
                after = replace(after, stats=self._fill(after.stats, self.before.stats))
            step = Step(self.config, self.num_events, sent, seen, self.before, after)
            findings = [*self._check_step(step, self._choose_asked(diverged)), *diverged]
        findings = leave_out_raised(findings)
        if findings:
            left = self._unexplained(put_causes_first(findings), of_spec)
            findings = self.excuses.take(left, sent, expected, seen)
            findings = [_put_beside(found, diverged) for found in findings]
        if step is not None:
            if not findings:  # also after findings that a quirk explains
                for goal in situations(step, self.history):
                    self.witnesses[goal] += 1
            self.history.record(step)
        return findings

    def _check_answer(self, event: v.Event, seen: v.Observation) -> list[Finding]:
        """Return the findings that need an answer alone."""
        return self.worker.observe(event, seen)

    def _choose_asked(self, diverged: Sequence[Finding]) -> Asked:
        """Return which properties to check after a step with these divergences."""
        if diverged or self.asks_all or self.spec.state.rules.changes:
            return Asked.ALL  # what a quirk leaves behind must be known when something else differs
        return Asked.WITHOUT_REFERENCE if self.equivalence else NONE

    def _check_step(self, step: Step, asked: Asked = Asked.ALL) -> list[Finding]:
        """Return the findings of worker and properties about an answer and the states around it."""
        return check_step(step, self.history, self.worker, asked=asked)

    def _step_of_spec(self, event: v.Event, expected: v.Observation) -> Step | None:
        before = self.spec_before
        if before is None:
            return None
        after = self.spec_before = self.spec.snapshot()
        return Step(self.config, self.num_events, event, expected, before, after)

    def compare_states(self) -> list[Finding]:
        """Compare both states at the end of a run, if steps compare only some states."""
        if self.last is None:
            return []
        event, expected, seen = self.last.event, self.last.expected, self.last.seen
        try:
            shown = self.engine.snapshot()
        except Exception as error:
            return [fault_of(error)]
        if (ill_typed := fault_of_types(event, seen, shown)) is not None:
            return [ill_typed]
        return self._diverge(event, expected, seen, self._comparable(shown))

    def _judge_spec(self, sent: v.Event, expected: v.Observation) -> list[Finding]:
        """Return the findings about the specification's own step, which its quirks cause.

        Called before the worker observes the engine's answer. Under a weaker equivalence the worker
        knows blocks by the engine's ids, so the list is empty.
        """
        if self.equivalence or not self.spec.state.rules.changes:
            return []
        worker, self.worker = self.worker, self.worker.fork()
        try:
            if self.before is None:
                return self._check_answer(sent, expected)
            sides = self.before, self.spec.snapshot()
            return self._check_step(Step(self.config, self.num_events, sent, expected, *sides))
        finally:
            self.worker = worker

    def _unexplained(self, findings: list[Finding], of_spec: Sequence[Finding]) -> list[Finding]:
        """Return the findings that the quirks of the profile do not explain.

        If the engine did exactly what the specification does, quirks explain every violated
        property. If they diverge, quirks explain only findings that the specification's own step
        has as well, or that an earlier step had. A finding of the same check about the same
        subjects, with other values, is a consequence of the divergence, which is reported instead;
        one about other subjects may be, and comes last.
        """
        if not self.spec.state.rules.changes:
            return findings
        if all(found.kind in EXPLICABLE for found in findings):
            known = findings
        else:
            known = [found for found in findings if found in of_spec or found in self.standing]
        self.standing.update(known)
        for found in known:
            self.known[found.property_id] = self.known.get(found.property_id, 0) + 1
        alike = {(found.sentence, found.subjects) for found in of_spec}
        left = [
            found
            for found in findings
            if found not in known and (found.sentence, found.subjects) not in alike
        ]
        broken = {found.sentence for found in of_spec}
        return sorted(left, key=lambda found: found.sentence in broken)

    def _comparable(self, snapshot: v.Snapshot | None) -> v.Snapshot | None:
        """Return the snapshot in the form in which it is compared with the specification's.

        Parts that the engine does not show are taken from the specification; so are counters with
        another meaning, and `has_work` of an engine that does not show it.
        """
        if snapshot is not None and WORK not in self.capabilities:
            snapshot = replace(snapshot, has_work=self.spec.snapshot().has_work)
        if isinstance(snapshot, PartOfState):
            self.skip(NOT_SHOWN)
            if not shows_holders(snapshot, self.config):
                return None
            return complete_state(snapshot, self.spec.snapshot(), bool(self.equivalence))
        if snapshot is None or not self.history.uncounted:
            return snapshot
        return replace(snapshot, stats=self._fill(snapshot.stats, self.spec.snapshot().stats))

    def _fill(self, shown: v.Stats, others: v.Stats) -> v.Stats:
        """Return the engine's counters, with those that it lacks taken from `others`."""
        missing = {name: getattr(others, name) for name in self.history.uncounted}
        return replace(shown, **missing)

    def list_quirk_goals(self) -> list[str]:
        """Return the goals of `lockstep.quirks` that the run has reached, sorted."""
        return sorted(self.spec.watch.met) if isinstance(self.spec, WatchedSpec) else []

    def skip(self, reason: str) -> None:
        """Count something that was left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _diverge(
        self, event: v.Event, expected: v.Observation, seen: object, after: v.Snapshot | None
    ) -> list[Finding]:
        """Return the finding that answers or states differ; the list is empty if they are equal."""
        with_hints = COMMON_PREFIX in self.capabilities
        differences = observation_differences(expected, seen, with_hints)
        if after is not None:
            self.num_compared += 1
            differences += snapshot_differences(self.spec.snapshot(), after)
        if not differences:
            return []
        message = describe_divergence(event, differences)
        names = [*self.live]
        if isinstance(event, v.Submit):
            names.append(event.request.request_id)
        subjects = find_subjects(differences[0], names)
        kind, name = FindingKind.DIVERGENCE, "engine_equals_spec"
        return [Finding(kind, "", name, message, differences, subjects)]

    def _keep(self, exchange: Exchange) -> None:
        self.last = exchange
        if self.keep_exchanges:
            self.exchanges.append(exchange)

    def _drain(self) -> list[Finding]:
        """End all faults, then step until all requests finish, within a bound (P10, P11).

        The pipeline is kept as full as possible, as engines run. If the engine declines all
        remaining events, the drain ends without a finding.
        """
        resume = v.SetPause(v.PauseState.UNPAUSED)
        # An engine without pause cannot be paused.
        findings = [] if get_missing(resume, self.lacking) else self.perform(resume)
        for name, request in list(self.live.items()):
            if request.structured_output and not findings:
                findings = self.perform(v.GrammarReady(name))
        for name in [name for name, one in self.sessions.items() if not one.is_closed]:
            findings = findings or self.perform(v.StreamingUpdate(v.Request(name, (0,))))
        for offer in self.transfers.list_answers():
            findings = findings or self.perform(offer)
        findings = findings or self._end_transfers()
        bound, watch = self._bound(), Watch()
        for _ in range(bound):
            if findings or not self.live:
                break
            num_before = self.num_events
            findings, why = self._drain_step(watch)
            if why:
                return self._stall(watch, why)
            if self.num_events == num_before:
                return []
        if self.live and not findings:
            return self._stall(watch, f"{bound} steps did not end them")
        return findings or self._answer_all()

    def _bound(self) -> int:
        return drain_bound(self.live, self.config.max_model_len, self.sessions)

    def _stall(self, watch: Watch, why: str) -> list[Finding]:
        findings = self._unexplained([watch.stall(self.live, why)], ())
        return self.excuses.take(findings, v.Schedule(), None, None)

    def _drain_step(self, watch: Watch) -> tuple[list[Finding], str]:
        """Plan until the pipeline is full or a plan is empty, then commit the oldest plan.

        Return the findings, and the reason why no progress is possible, or "".
        """
        while len(self.plans) < self.config.max_frames_in_flight:
            findings, num_before = self._end_transfers(), self.num_events
            findings = findings or self.apply(v.Schedule())
            if findings:
                return findings, ""
            if self.num_events == num_before or self.excuses.is_over:
                break  # declined
            plan = self.last_plan
            assert plan is not None, "an accepted Schedule is answered with a plan"
            progress = sum(map(len, self.delivered.values())), len(self.live)
            due = bool(self.history.promised)
            why = watch.see(plan, bool(self.plans), due, self.before, progress)
            if why and self.live:  # the requests may have ended with this plan
                return [], why
            if not plan.rows:
                break
        before = self.last
        findings = self.perform(Answer())
        last = self.last
        if findings or last is None or last is before or not isinstance(last.seen, v.Rejected):
            return findings, ""
        return [], f"the output of the oldest plan is refused: {last.seen.detail}"

    def _end_transfers(self) -> list[Finding]:
        """Complete all loads and reads of the store."""
        under_way = self.transfers
        if not (under_way.loading or under_way.sending):
            return []
        return self.perform(Report(tuple(under_way.loading), tuple(under_way.sending)))

    def _answer_all(self) -> list[Finding]:
        """Commit all plans in flight, although all requests have finished."""
        findings: list[Finding] = []
        num_before = -1
        while self.plans and not findings and len(self.plans) != num_before:
            num_before = len(self.plans)
            findings = self.perform(Answer())
        return findings or self._end_transfers()
