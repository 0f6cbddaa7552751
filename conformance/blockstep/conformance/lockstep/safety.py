"""Safety: the equivalence of an engine that decides differently: properties, no comparison.

The specification is one way to schedule. An engine that admits, evicts or preempts by other rules
is not wrong for it, so no answer is compared with the specification's. It is judged by what holds
for every engine: the worker lives on its plans and finds in each slot what was written for that
very prefix (P2, P3, P4, P6, P24, P26), budgets are kept (P9), what is delivered is what was sampled
(P13), all ends once arrivals stop (P10), and, where it shows its state, the sentences of
`judge.answers.JUDGED`.

Who is live and what is in flight follows from the engine's own answers. The specification is asked
one question, and always in its empty state: whether a request can ever fit (P11).

A factory declares the equivalence among its traits:

    class Adapter:
        traits = EngineTraits(equivalence=Safety(fit_config=..., fit_request=...))
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blockstep.conformance.engine import Capability
from blockstep.conformance.judge.answers import judge_answer, judge_state
from blockstep.conformance.judge.properties import ANSWER_TYPES, Step
from blockstep.conformance.judge.witnesses.answers import AnswerWitnesses
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.exchange import Exchange, fault_of
from blockstep.conformance.lockstep.scoped import ScopedRun
from blockstep.conformance.protocol.findings import Finding, violated
from blockstep.conformance.protocol.program import Action, Hostile, Misanswer
from blockstep.conformance.protocol.typed import fault_of_types
from blockstep.spec import vocabulary as v
from blockstep.spec.transition import transition


@dataclass(slots=True, kw_only=True)
class SafetyRun(ScopedRun):
    """One run of one engine, watched and not compared. Not reusable."""

    answers: AnswerWitnesses = field(init=False)
    may_propose: bool = False
    """No plan was made since the last commit."""
    idle: set[v.RequestId] = field(default_factory=set)
    """Who had no row since they were submitted or preempted."""

    def __post_init__(self) -> None:
        self.answers = AnswerWitnesses(self.config)

    def resolve(self, action: Action) -> v.Event | None:
        """The event that an action comes to. Mistakes come to nothing: refusals are not judged."""
        if isinstance(action, Hostile | Misanswer):
            return None
        return LockStep.resolve(self, action)

    def _proposal(self, rows: tuple[v.RowTokens, ...]) -> v.Drafts | None:
        """Drafts for those who have not ended, no more than there may be.

        An engine that neither refuses nor drops late ones is given those only that it must take:
        right after a commit, for requests that it did not preempt, that are in no other frame, and
        that are not new under the name of one that has ended.
        """
        most = self.config.num_speculative_tokens
        rows = tuple(
            v.RowTokens(row.request_id, row.token_ids[:most])
            for row in rows
            if row.request_id in self.live
        )
        if not {Capability.REJECTION, Capability.LATE_DRAFTS} & self.capabilities:
            busy = {row.request_id for plan in self.plans for row in plan.rows} | self.idle
            rows = tuple(row for row in rows if row.request_id not in busy)
            rows = rows if self.may_propose else ()
        return v.Drafts(rows) if rows and most else None

    def follow(self, event: v.Event, observation: v.Observation) -> None:
        """Take in one event and the answer to it."""
        LockStep.follow(self, event, observation)
        match event, observation:
            case v.Submit(request=request), _:
                self.idle.add(request.request_id)
            case v.Schedule(), v.Plan() as plan:
                self.may_propose = False
                self.idle.update(plan.preempted_req_ids)
                self.idle.difference_update(row.request_id for row in plan.rows)
            case v.Commit(), v.Outputs():
                self.may_propose = True
            case v.Reset(reset_running_requests=True), v.ResetDone(success=True):
                self.may_propose = False
                self.idle.update(self.live)

    def _is_welcome(self, event: v.Event) -> bool:
        """Whether any engine must take the event now; decided by what this one has answered."""
        match event:
            case v.Submit(request=request):
                name = request.request_id
                return (
                    name not in self.live
                    and not any(row.request_id == name for plan in self.plans for row in plan.rows)
                    and self.scope.fit_request(request, self.config) == request
                    and not isinstance(transition(self.spec.state, event), v.Rejected)
                )
            case v.Schedule():
                return len(self.plans) < self.config.max_frames_in_flight
            case v.GrammarReady(request_id=name):
                return name in self.live and self.live[name].structured_output
            case _:
                return True

    def apply(self, event: v.Event) -> list[Finding]:
        """Give one event to the engine and check what can be checked without a reference."""
        if (
            self.excuses.is_over
            or self._is_declined(event)
            or self._is_early(event)
            or not self._is_welcome(event)
        ):
            return []
        self.num_events += 1
        try:
            seen = self.engine.apply(event)
            after = self.engine.snapshot()
        except Exception as error:
            self._keep(Exchange(event, v.Ack(), None))
            return self.excuses.take([fault_of(error)], event, None, None)
        self._keep(Exchange(event, seen, seen))
        ill_typed = fault_of_types(event, seen, after)
        if ill_typed is not None:
            return self.excuses.take([ill_typed], event, None, None)
        if isinstance(seen, v.Rejected) and isinstance(event, v.Submit):
            self.skip(f"requests refused as {seen.code}")
            return []
        due = ANSWER_TYPES[type(event)]
        if type(seen) is not due:
            what = f"{type(event).__name__} was answered with {type(seen).__name__}"
            found = violated("P18", "answer_is_of_the_kind_of_the_event", what)
            return self.excuses.take([found], event, None, None)
        if isinstance(event, v.Schedule):
            self.end_aborted()
        findings = [*judge_answer(self.config, self.live, self.said, event, seen)]
        findings += self.worker.observe(event, seen)
        if after is not None and self.before is not None:
            findings += self._judge_state(event, seen, self.before, after)
        findings = self.excuses.take(findings, event, None, seen)
        if not findings:
            met = self.answers.observe(event, seen, self.live, self.said, self.plans)
            self.witnesses.update(met)
        self.before = after
        self.follow(event, seen)
        return findings

    def _judge_state(
        self, event: v.Event, seen: v.Observation, before: v.Snapshot, after: v.Snapshot
    ) -> list[Finding]:
        """What the sentences about a state and the worker say."""
        step = Step(self.config, self.num_events, event, seen, before, after)
        findings = [*self.worker.check_published(after)]
        if isinstance(event, v.Schedule | v.Commit):
            told = {row.request_id for row in seen.rows} if isinstance(seen, v.Plan) else ()
            findings += self.worker.check_view(after, told)
        findings += judge_state(step, self.ledger)
        self.ledger.record(step)
        return findings
