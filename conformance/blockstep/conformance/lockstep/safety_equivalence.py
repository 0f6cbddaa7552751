"""Safety: the equivalence of an engine that decides differently: properties, no comparison.

The specification is one way to schedule. An engine that admits, evicts or preempts by other rules
is not wrong, so no answer is compared with the specification's. It is judged by what holds for
every engine: the worker can execute its plans and finds in each slot what was written for that very
prefix (P2, P3, P4, P6, P24, P26), budgets are kept (P9), delivered tokens were sampled (P13), all
requests finish once arrivals stop (P10), plans and outputs agree with earlier ones
(`judge.reported`), and, if it shows its state, the checks of `judge.properties.JUDGED`.

Unfinished requests and plans in flight follow from the engine's own answers. The specification is
used for one question, always in its empty state: whether a request can ever fit (P11).

An engine with `Capability.REJECTION` is also given events that it may reject
(`lockstep.expected_rejections`): a request that seems too long for it, wrong and stale commits, one
plan too many. A rejection must leave its state unchanged; what it accepts by mistake is judged by
what follows.

A factory declares the equivalence among its traits:

    class Adapter:
        traits = EngineTraits(equivalence=Safety(fit_config=..., fit_request=...))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from blockstep.conformance.engine import Capability, EngineFactory, PartOfState, Safety
from blockstep.conformance.judge.answers import judge_answer, judge_state
from blockstep.conformance.judge.checks import find_wrong_kind
from blockstep.conformance.judge.coverage_goals.answers import AnswerGoals
from blockstep.conformance.judge.properties.history import SLOTS, STATISTICS, WHOLE
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.rejections import rejected_event_changes_nothing
from blockstep.conformance.judge.reported import Reported
from blockstep.conformance.lockstep.driver import NOT_SHOWN, LockStep
from blockstep.conformance.lockstep.exchange import Exchange, fault_of, find_blame
from blockstep.conformance.lockstep.expected_rejections import (
    ILL_FORMED,
    check_rejection,
    find_expected_rejection,
    find_problem_of_fork,
    find_problem_of_update,
    list_in_flight,
    may_take,
)
from blockstep.conformance.lockstep.scoped_run import ScopedRun
from blockstep.conformance.protocol.findings import Finding, leave_out_raised
from blockstep.conformance.protocol.shown import shows_holders
from blockstep.conformance.protocol.transfer_tracker import list_failed
from blockstep.conformance.protocol.type_check import fault_of_types
from blockstep.spec import vocabulary as v


@dataclass(slots=True, kw_only=True)
class SafetyRun(ScopedRun):
    """One run of one engine, checked without comparison. Not reusable."""

    answers: AnswerGoals = field(init=False)
    reported: Reported = field(init=False)
    may_propose: bool = False
    """Whether no plan was made since the last commit."""
    idle: set[v.RequestId] = field(default_factory=set)
    """Requests without a row since they were submitted or preempted."""
    not_begun: set[v.RequestId] = field(default_factory=set)
    """Requests without any row."""

    def __post_init__(self) -> None:
        ScopedRun.__post_init__(self)
        self.answers = AnswerGoals(self.config)
        counts = {Capability.STATISTICS, Capability.CACHE_STATISTICS} & self.capabilities
        self.reported = Reported(self.config, bool(counts), self.worker.keeps_requests)
        if Capability.STATISTICS not in self.capabilities:
            self.history.lacked |= {STATISTICS}

    @classmethod
    def start(cls, config: v.Config, make_engine: EngineFactory, *args: Any, **kwargs: Any) -> Self:
        """Build the engine, its worker and its checks. Raises as `ScopedRun.start` does."""
        run = super(SafetyRun, cls).start(config, make_engine, *args, **kwargs)
        if isinstance(run.scope, Safety) and not run.scope.has_slots:
            run.reported.has_slots = False
            run.history.lacked |= {SLOTS}
        if isinstance(run.engine.snapshot(), PartOfState):
            run.history.lacked |= {STATISTICS, WHOLE}
        return run

    def _comparable(self, snapshot: v.Snapshot | None) -> v.Snapshot | None:
        """Return the state as the engine shows it: it is compared with nothing."""
        return snapshot

    def _proposal(self, rows: tuple[v.RowTokens, ...]) -> v.Drafts | None:
        """Return drafts for unfinished requests, within the limit.

        An engine that neither rejects nor drops late drafts is given only those that it must
        accept: right after a commit, for requests that it did not preempt, that are in no other
        frame, and that are not new under the id of a finished request.
        """
        most = self.config.num_speculative_tokens
        rows = tuple(
            v.RowTokens(row.request_id, row.token_ids[:most])
            for row in rows
            if row.request_id in self.live
        )
        if not {Capability.REJECTION, Capability.LATE_DRAFTS} & self.capabilities:
            rows = self._list_timely(rows)
        return v.Drafts(rows) if rows and most else None

    def _list_timely(self, rows: tuple[v.RowTokens, ...]) -> tuple[v.RowTokens, ...]:
        """Return the drafts that any engine must accept: right after a commit, for running requests
        without a row in flight."""
        busy = list_in_flight(self.plans) | self.idle | {*self.chunked}
        rows = tuple(row for row in rows if row.request_id in self.live.keys() - busy)
        return rows if self.may_propose else ()

    def follow(self, event: v.Event, observation: v.Observation) -> None:
        """Update with one event and its answer."""
        self._note_texts(event, observation)
        self._drop_tokens(event, observation)
        LockStep.follow(self, event, observation)
        self.reported.follow(event, observation, self.live)
        match event, observation:
            case v.Submit(request=request), _:
                self._note_newcomer(request.request_id)
            case v.Fork(child_id=child_id), _:
                self._note_newcomer(child_id)
            case v.Schedule(), v.Plan() as plan:
                self.may_propose = False
                self.idle.update(plan.preempted_req_ids)
                self.idle.difference_update(row.request_id for row in plan.rows)
                self.not_begun.difference_update(row.request_id for row in plan.new)
            case v.Commit(), v.Outputs():
                self.may_propose = True
            case v.Reset(reset_running_requests=True), v.ResetDone(success=True):
                self.may_propose = False
                self.idle.update(self.live)

    def _drop_tokens(self, event: v.Event, observation: v.Observation) -> None:
        """Note the rows in flight whose tokens an engine drops, because their requests are
        preempted."""
        if not self.worker.drops_tokens_in_flight:
            return
        match event, observation:
            case v.Schedule(), v.Plan(preempted_req_ids=names):
                self._drop_rows(set(names))
            case v.Reset(reset_running_requests=True), v.ResetDone(success=True):
                self._drop_rows(set(self.live))
        if self.worker.num_run_again:
            self.witnesses["dropped_token_runs_again"] = self.worker.num_run_again

    def _drop_rows(self, names: set[v.RequestId]) -> None:
        for plan in self.plans:
            for row in plan.rows:
                if row.request_id in names:
                    self.dropped.add((plan.frame_id, row.request_id))

    def _note_newcomer(self, name: v.RequestId) -> None:
        self.idle.add(name)
        self.not_begun.add(name)

    def _note_texts(self, event: v.Event, observation: v.Observation) -> None:
        """Note token sequences that were rolled back or preempted: none of their keys may give a
        wrong hit."""
        match event, observation:
            case _, v.Plan(preempted_req_ids=names):
                for name in names:
                    if name in self.live:
                        self.preempted_texts.append((self.live[name], self._text_of(name)))
            case v.Commit(frame_id=frame_id, sampled=sampled), v.Outputs():
                tokens_of = {row.request_id: row.token_ids for row in sampled}
                for row in next(plan for plan in self.plans if plan.frame_id == frame_id).cached:
                    name, drafts = row.request_id, row.draft_token_ids
                    if len(drafts) >= len(tokens_of[name]) and name in self.live:
                        self._note_rejected(name, drafts)

    def _note_rejected(self, name: v.RequestId, drafts: v.TokenIds) -> None:
        text = self._text_of(name) + drafts
        if v.DRAFT_PLACEHOLDER not in drafts and len(text) % self.config.block_size < len(drafts):
            self.rejected_texts.append((self.live[name], text))

    def _text_of(self, name: v.RequestId) -> v.TokenIds:
        return self.live[name].prompt_token_ids + self.delivered.get(name, ())

    def _find_problem(self, event: v.Event) -> v.RejectCode | None:
        if isinstance(event, v.StreamingUpdate):
            return find_problem_of_update(event, self.spec.state, self)
        if isinstance(event, v.Fork):
            return find_problem_of_fork(event, self.spec.state, self, self.not_begun)
        return find_expected_rejection(event, self.spec.state, self.live, self.plans, self.worker)

    def _is_welcome(self, event: v.Event) -> bool:
        """Return whether any engine must accept the event now, by this engine's own answers."""
        return self._find_problem(event) is None

    def _is_for(self, event: v.Event, problem: v.RejectCode | None) -> bool:
        """Return whether the engine is given an event that it may reject for `problem`.

        A request under the id of a finished one is held back while a plan in flight has a row of
        that one, since outputs could not be told apart. So is a fork of a request that is about to
        end.
        """
        if self.excuses.is_over or self._is_early(event):
            return False
        if isinstance(event, v.Fork) and event.request_id in self.ending:
            return False
        if isinstance(event, v.Submit) and problem in ILL_FORMED:
            return problem in self.judged and self._understands_ill(event.request)
        if isinstance(event, v.Submit):
            if self._is_declined(event) or problem is v.RejectCode.REQUEST_IN_FLIGHT:
                return False
            if self._fit_request(event.request) != event.request:
                return False
        return problem is None or problem in self.judged

    def _understands_ill(self, request: v.Request) -> bool:
        """Return whether an adapter lets an ill-formed request through; it need not be able to read
        it."""
        try:
            return self.scope.fit_request(request, self.config) == request
        except Exception:
            return False

    def _apply(self, event: v.Event) -> list[Finding]:
        """Give one event to the engine and check what can be checked without a reference.

        An event that the engine declines is left out, under a profile that allows it (`sparing`).
        """
        reason = self._find_decline(event)
        if reason is not None:
            self.skip(reason)
            return []
        problem = self._find_problem(event)
        if not self._is_for(event, problem):
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
        self.found = []
        try:
            return self._judge_seen(event, problem, seen, after)
        except Exception as error:
            found = find_blame(error, event, seen, after, self.found)
            return self.excuses.take(found, event, None, None)

    def _judge_seen(
        self,
        event: v.Event,
        problem: v.RejectCode | None,
        seen: v.Observation,
        after: v.Snapshot | None,
    ) -> list[Finding]:
        """Return the findings about an answer and the state after it, and follow them."""
        refused = isinstance(seen, v.Rejected) and self._may_refuse(event, problem)
        wrong = None if refused else find_wrong_kind(event, seen)
        if wrong is not None:
            return self.excuses.take([wrong], event, None, None)
        if isinstance(seen, v.Rejected) and isinstance(event, v.Submit) and not problem:
            self.skip(f"requests refused as {seen.code}")
        if refused or (problem and not may_take(problem, event, self.plans, self.worker)):
            findings = self._judge_mistake(event, seen, after)
            return self.excuses.take(findings, event, None, None)
        return self._judge_step(event, seen, after)

    def _judge_step(
        self, event: v.Event, seen: v.Observation, after: v.Snapshot | None
    ) -> list[Finding]:
        """Return the findings about an accepted event; `found` has them so far if a check
        raises."""
        findings = self.found
        if isinstance(event, v.Schedule):
            self.end_aborted()
        failing = self._list_failing(event), self._list_doubtful(event)
        findings += judge_answer(
            self.config, self.live, self.delivered, event, seen, self.dropped, *failing, self.ending
        )
        findings += self.reported.judge(event, seen, self.live, self.sessions)
        findings += self.worker.observe(event, seen)
        if after is not None and not shows_holders(after, self.config):
            self.skip(NOT_SHOWN)
            after = None
        if after is not None and self.before is not None:
            findings += self._judge_state(event, seen, self.before, after)
        findings = self.excuses.take(leave_out_raised(findings), event, None, seen)
        self.reported.slots.difference_update(failing[0])  # one of them may have been preempted
        if not findings:
            met = self.answers.observe(event, seen, self.live, self.delivered, self.plans)
            self.witnesses.update(met)
        self.before = after
        self.follow(event, seen)
        return findings

    def _list_failing(self, event: v.Event) -> list[v.RequestId]:
        """Return the unfinished requests whose load this event reports as invalid: they wait for
        it, or it was part of the committed plan, and they still have a row of that plan."""
        if not isinstance(event, v.Commit | v.TransfersReported) or not self.config.kv_connector:
            return []
        sizes, found = self.config.block_sizes, self.transfers
        failing = [*list_failed(found.loading.values(), sizes, event.transfers)]
        if isinstance(event, v.Commit):
            frame_id, anew = event.frame_id, self.list_begun_anew(event.frame_id)
            sampling = {
                row.request_id
                for plan in self.plans
                for row in self.worker.answer(plan.frame_id)
                if row.token_ids and (plan.frame_id, row.request_id) not in self.dropped
            }
            failing += [
                name
                for name in list_failed(found.at_once.get(frame_id, ()), sizes, event.transfers)
                # A request preempted since waits for tokens of frames in flight, or for nothing.
                if name not in anew and (name not in self.idle or name in sampling)
            ]
        return [name for name in failing if name in self.live]

    def _list_doubtful(self, event: v.Event) -> list[v.RequestId]:
        """Return the requests whose completed load this event reports as invalid; they may have
        lost its blocks since."""
        if not isinstance(event, v.Commit | v.TransfersReported):
            return []
        loads = self.transfers.received.values()
        return [*list_failed(loads, self.config.block_sizes, event.transfers)]

    def _may_refuse(self, event: v.Event, problem: v.RejectCode | None) -> bool:
        """Return whether a rejection is correct: of a bad event, of any request, and of late
        drafts."""
        if isinstance(event, v.Drafts) and problem is None:
            return self._list_timely(event.drafts) != event.drafts
        return problem is not None or isinstance(event, v.Submit)

    def _judge_mistake(
        self, event: v.Event, seen: v.Observation, after: v.Snapshot | None
    ) -> list[Finding]:
        """Return the findings about an event that must have no effect: it was accepted, or changed
        the state."""
        findings, before = [*check_rejection(event, seen)], self.before
        self.before = after
        if before is None or after is None or not isinstance(seen, v.Rejected | v.Outputs):
            return findings
        step = Step(self.config, self.num_events, event, seen, before, after)
        return findings + rejected_event_changes_nothing(step, self.history)

    def _judge_state(
        self, event: v.Event, seen: v.Observation, before: v.Snapshot, after: v.Snapshot
    ) -> list[Finding]:
        """Return the findings of the worker and of the checks about states."""
        step = Step(self.config, self.num_events, event, seen, before, after)
        findings = [*self.worker.check_published(after)]
        if isinstance(event, v.Schedule | v.Commit):
            planned = {row.request_id for row in seen.rows} if isinstance(seen, v.Plan) else ()
            findings += self.worker.check_view(after, planned)
        findings += judge_state(step, self.history)
        self.history.record(step)
        return findings
