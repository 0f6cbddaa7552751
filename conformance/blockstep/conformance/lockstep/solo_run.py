"""Sides: a scheduler that plays a program on its own, with its own client and worker.

Two sides are not compared event by event: each is given the same program, with arrivals between the
same steps, and model outputs follow from its own plans. So both continue after a difference, and
their decisions can be counted (`score`). Tokens depend on the token sequence alone, so a request
gets the same tokens on both sides, whenever it runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blockstep.conformance.engine import Engine
from blockstep.conformance.judge.checks import find_wrong_kind
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.action_resolver import ask_mask
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.features import SIGNAL_OF
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Answer, Mask, Propose, Report
from blockstep.conformance.protocol.type_check import fault_of_types
from blockstep.spec import vocabulary as v


class Row(NamedTuple):
    """Part of a row that `SamePlans` compares."""

    kind: str
    """`new`, `runs` or `resumed`."""
    num_computed: int
    num_scheduled: int
    num_drafts: int


class Ending(NamedTuple):
    """Finish of a request: step, reason and outputs."""

    step: int
    reason: str
    outputs: v.TokenIds


@dataclass(frozen=True, slots=True)
class SoloStep:
    """A plan without block ids and without the order of rows."""

    rows: dict[v.RequestId, Row]
    preempted: frozenset[v.RequestId]

    def __bool__(self) -> bool:
        return bool(self.rows or self.preempted)


NOTHING = SoloStep({}, frozenset())
"""A step that was not planned, or in which no request ran."""


@dataclass(slots=True, kw_only=True)
class SoloRun(Client):
    """One scheduler and its history. Not reusable."""

    config: v.Config
    scheduler: Engine
    worker: Worker
    plans_ahead: bool = False
    """See `Equivalence.plans_ahead`."""
    steps: list[SoloStep] = field(default_factory=list)
    admissions: dict[tuple[v.RequestId, int], tuple[int, int]] = field(default_factory=dict)
    """Step and hit tokens of each request's n-th admission."""
    preemptions: dict[tuple[v.RequestId, int], int] = field(default_factory=dict)
    """Step of each request's n-th preemption."""
    endings: dict[v.RequestId, Ending] = field(default_factory=dict)
    tokens: list[tuple[v.RequestId, int, bool, bool]] = field(default_factory=list)
    """Rows that sample or deliver: the request, the number of the plan from 1, whether the row
    sampled a token, and whether the answer delivered one."""
    num_events: int = 0
    last: tuple[v.Event, v.Observation] | None = None
    """Last event and its answer."""
    raised: Exception | None = None
    """Exception that the scheduler raised, or None."""
    unusable: Finding | None = None
    """Finding about an answer of a wrong type, or of a wrong kind for its event; None if there was
    none. It is not followed."""
    wrong: list[Finding] = field(default_factory=list)
    """Findings of the worker about the last answer."""
    is_fresh: bool = False
    """Whether the last event was a commit, so that drafts may be proposed."""
    preempted: set[v.RequestId] = field(default_factory=set)
    """Preempted requests without a row since: an engine may drop drafts for them."""
    _counts: Counter[tuple[str, v.RequestId]] = field(default_factory=Counter)
    _numbers: dict[v.FrameId, int] = field(default_factory=dict)
    """The number of each plan in flight whose tokens are due."""

    def play(self, action: Action) -> v.Observation | None:
        """Do one action; return its answer, or None if it has no event here. Errors of the
        scheduler pass."""
        if isinstance(action, v.Schedule):
            self.steps.append(NOTHING)
        if isinstance(action, Answer) and self._is_answered():
            oldest = self.plans[0]
            if oldest.has_structured_output_requests:  # its mask comes first
                self._exchange(ask_mask(self.worker, oldest))
                if self.unusable is not None:
                    return None
        event = self.resolve(action)
        return None if event is None else self._exchange(event)

    def _exchange(self, event: v.Event) -> v.Observation:
        self.num_events += 1
        try:
            seen = self.scheduler.apply(event)
        except Exception as error:
            self.raised = error
            raise
        self.last, self.wrong = (event, seen), []
        is_accepted = not isinstance(seen, v.Rejected)
        self.unusable = fault_of_types(event, seen, None)
        if self.unusable is None and is_accepted:
            self.unusable = find_wrong_kind(event, seen)
        if is_accepted and self.unusable is None:
            self.wrong = self.worker.observe(event, seen)
            self._record(event, seen)
            self.follow(event, seen)
        return seen

    def resolve(self, action: Action) -> v.Event | None:
        """Return the event of an action on this side, or None."""
        match action:
            case v.Schedule() if self._must_answer():
                return None
            case Answer(report=report) if self._is_answered():
                frame_id, sizes = self.plans[0].frame_id, self.config.block_sizes
                resolved = self.transfers.resolve(report, sizes, frame_id)
                return v.Commit(frame_id, self.worker.answer(frame_id), resolved)
            case Propose(counts=counts):
                return self._propose(*counts[0])
            case Mask(place=place):
                return ask_mask(self.worker, self.plans[: place + 1][-1]) if self.plans else None
            case v.GrammarReady(request_id=name) | v.GrammarFailed(request_id=name):
                request = self.live.get(name)
                return action if request is not None and request.structured_output else None
            case v.StreamingUpdate(request=request):
                session = self.sessions.get(request.request_id)
                return None if session is None or session.is_closed else action
            case v.Submit() | v.Schedule() | v.Abort() | v.SetPause() | v.Reset():
                return action
            case v.EncoderReset() | v.EncoderOffer() | v.KVOffer():
                return action
            case v.Fork(request_id=name):
                return action if name in self.live else None
            case Report():
                return v.TransfersReported(self.transfers.resolve(action, self.config.block_sizes))
            case _:
                signal: Any = action
                return signal if type(action) in SIGNAL_OF else None

    def _is_answered(self) -> bool:
        """Return whether a commit is due now, in an action that may be one."""
        return bool(self.plans) and (not self.plans_ahead or self._must_answer())

    def _must_answer(self) -> bool:
        """Return whether nothing can be planned before a commit."""
        if len(self.plans) >= self.config.max_frames_in_flight:
            return True
        is_idle = self.last_plan is not None and not self.last_plan.rows
        return self.plans_ahead and is_idle and bool(self.plans)

    def _propose(self, count: int, num_right: int) -> v.Drafts | None:
        """Return equal numbers of drafts for all requests, so that the order of rows does not
        matter."""
        count = min(count, self.config.num_speculative_tokens)
        if self.config.async_scheduling:
            self.worker.acceptance = (num_right,)
            return None
        able = self.live.keys() - self.preempted if self.is_fresh else ()
        names = [name for name in self.sampled if name in able]
        if not (names and count):
            return None
        return v.Drafts(
            tuple(v.RowTokens(name, self.worker.propose(name, count, num_right)) for name in names)
        )

    def _record(self, event: v.Event, seen: v.Observation) -> None:
        self.is_fresh = isinstance(event, v.Commit)
        match event, seen:
            case v.Schedule(), v.Plan() as plan:
                self._record_plan(plan)
                self._numbers[plan.frame_id] = len(self.steps)
            case v.Commit(), v.Outputs(rows=rows):
                self._record_tokens(event, seen)
                for row in rows:
                    if row.finish_reason is not None:
                        outputs = self.delivered.get(row.request_id, ()) + row.new_token_ids
                        self._note_end(row.request_id, str(row.finish_reason), outputs)
            case v.Reset(reset_running_requests=True), v.ResetDone(success=True):
                self.preempted.update(self.live)
                self._numbers.clear()  # a release may drop the tokens in flight
            case v.Abort() | v.StreamingUpdate(), v.Aborted(request_ids=names):
                for name in names:
                    self._note_end(name, "aborted", self.delivered.get(name, ()))
            case v.GrammarFailed(request_id=name), v.Outputs():
                self._note_end(name, str(v.FinishReason.ERROR), self.delivered.get(name, ()))

    def _record_tokens(self, event: v.Commit, seen: v.Outputs) -> None:
        """Record which rows sampled and which were delivered; sessions and failed loads aside."""
        number = self._numbers.pop(event.frame_id, None)
        if number is None or event.transfers.invalid_block_ids:
            return
        sampled = {row.request_id for row in event.sampled if row.token_ids}
        delivered = {row.request_id for row in seen.rows if row.new_token_ids}
        for name in sorted((sampled | delivered) & self.live.keys() - self.sessions.keys()):
            self.tokens.append((name, number, name in sampled, name in delivered))

    def _note_end(self, name: v.RequestId, reason: str, outputs: v.TokenIds) -> None:
        self.endings[name] = Ending(len(self.steps), reason, outputs)

    def _record_plan(self, plan: v.Plan) -> None:
        rows: dict[v.RequestId, Row] = {}
        for row in plan.rows:
            kind = "new"
            if isinstance(row, v.CachedRow):
                kind = "resumed" if row.resumed else "runs"
            numbers = (row.num_computed_tokens, row.num_scheduled_tokens, len(row.draft_token_ids))
            rows[row.request_id] = Row(kind, *numbers)
            if kind != "runs":
                at = (row.request_id, self._count("admission", row.request_id))
                self.admissions[at] = (len(self.steps), row.num_computed_tokens)
        for name in plan.preempted_req_ids:
            self.preemptions[name, self._count("preemption", name)] = len(self.steps)
        self.preempted.update(plan.preempted_req_ids)
        self.preempted.difference_update(rows)
        self.steps[-1] = SoloStep(rows, frozenset(plan.preempted_req_ids))

    def _count(self, what: str, name: v.RequestId) -> int:
        self._counts[what, name] += 1
        return self._counts[what, name]
