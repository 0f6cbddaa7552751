"""Client: the knowledge of clients and of the model runner, from events and their answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from blockstep.conformance.draw.client_view import Text
from blockstep.conformance.protocol.session_tracker import Session
from blockstep.conformance.protocol.transfer_tracker import Transfers
from blockstep.spec import vocabulary as v

TEXTS_MAX = 6


@dataclass(slots=True)
class Client:
    """State of a run as its events and the answers to them show it."""

    live: dict[v.RequestId, v.Request] = field(default_factory=dict)
    """Accepted, unfinished requests, in order of submission."""
    sessions: dict[v.RequestId, Session] = field(default_factory=dict)
    """State of each unfinished resumable request."""
    dropped: set[tuple[v.FrameId, v.RequestId]] = field(default_factory=set)
    """Rows of frames in flight that sample for an input of a session that was stopped since."""
    ended: list[v.RequestId] = field(default_factory=list)
    texts: deque[v.TokenIds] = field(default_factory=lambda: deque(maxlen=TEXTS_MAX))
    """Token sequences of the requests that finished last."""
    turns: deque[Text] = field(default_factory=lambda: deque(maxlen=TEXTS_MAX))
    """Token sequences of turns of jobs that finished lately."""
    now: int = 0
    """Latest time that was reported."""
    preempted_texts: deque[Text] = field(default_factory=lambda: deque(maxlen=TEXTS_MAX))
    """Token sequences of requests preempted lately. Filled only if states are not compared
    (`lockstep.safety_equivalence`)."""
    rejected_texts: deque[Text] = field(default_factory=lambda: deque(maxlen=TEXTS_MAX))
    """Token sequences with lately rejected drafts that would have filled a block. Filled only if
    states are not compared."""
    delivered: dict[v.RequestId, v.TokenIds] = field(default_factory=dict)
    """Outputs delivered to unfinished requests."""
    plans: list[v.Plan] = field(default_factory=list)
    """Plans in flight, oldest first."""
    last_plan: v.Plan | None = None
    first_blocks: dict[v.RequestId, frozenset[int]] = field(default_factory=dict)
    """First block of each table of the unfinished requests that have blocks, as far as plans show
    it."""
    last_commit: v.Commit | None = None
    transfers: Transfers = field(default_factory=Transfers)
    """Transfers under way."""
    ending: tuple[v.RequestId, ...] = ()
    """Requests that an abort ends with the next plan (`Aborted.ending_req_ids`)."""
    sampled: tuple[v.RequestId, ...] = ()
    """Requests that sampled in the last committed plan: drafts are proposed for them."""
    chunked: tuple[v.RequestId, ...] = ()
    """Requests whose row of the last committed plan was a part of their prompt."""

    def follow(self, event: v.Event, observation: v.Observation) -> None:
        """Update the state with one event and its answer."""
        match event, observation:
            case _, v.Rejected():
                return
            case v.Submit(request=request), _:
                self.live[request.request_id] = request
                if request.resumable:
                    self.sessions[request.request_id] = Session()
            case v.Fork(request_id=name, child_id=child_id, output_token_ids=outputs), _:
                self.live[child_id] = replace(self.live[name], request_id=child_id)
                self.delivered[child_id] = outputs
            case v.Schedule(), v.Plan() as plan:
                self.end_aborted()
                self.last_plan = plan
                if plan.rows:
                    self.plans.append(plan)
                self._note_blocks(plan)
                self.transfers.plan(plan)
            case v.Commit() as commit, v.Outputs(rows=rows):
                self._follow_commit(commit, rows)
            case v.TransfersReported(transfers=report), v.Outputs(rows=rows):
                self._end(row.request_id for row in rows)
                self.transfers.take(report, self.live)
            case v.Clock(now=now), _:
                self.now = max(self.now, now)
            case v.KVOffer(request_id=name), _ if name in self.live:
                self.transfers.offer(event)
            case v.Reset(reset_connector=True), v.ResetDone(success=True):
                self.transfers.forget_offers()
            case v.StreamingUpdate(request=request), v.Aborted(request_ids=request_ids):
                self._end(request_ids)
            case v.StreamingUpdate(request=request), _:
                self._go_on(request)
            case v.GrammarFailed(), v.Outputs(rows=rows):
                self._end(row.request_id for row in rows)
            case v.Abort(), v.Aborted(request_ids=request_ids, ending_req_ids=ending):
                self._end(request_ids)
                self.ending = tuple(dict.fromkeys((*self.ending, *ending)))

    def _follow_commit(self, commit: v.Commit, rows: Sequence[v.OutputRow]) -> None:
        """Update the state with a model output and the rows that it delivers."""
        frame_id, sampled = commit.frame_id, commit.sampled
        self.last_commit = commit
        self.plans = [plan for plan in self.plans if plan.frame_id != frame_id]
        if self.dropped:
            self.dropped = {row for row in self.dropped if row[0] != frame_id}
        self.sampled = tuple([row.request_id for row in sampled if row.token_ids])
        self.chunked = tuple([row.request_id for row in sampled if not row.token_ids])
        for row in rows:
            if row.request_id in self.live:  # a request that has ended may be submitted again
                delivered = self.delivered.get(row.request_id, ())
                self.delivered[row.request_id] = delivered + row.new_token_ids
        over = [row for row in rows if row.finish_reason is not None]
        if over:
            self._end(row.request_id for row in over if self._is_over(row))
        self.transfers.at_once.pop(frame_id, None)
        if commit.transfers is not v.NO_TRANSFERS:
            self.transfers.take(commit.transfers, self.live)

    def list_sharing(self) -> list[v.RequestId]:
        """Return the requests whose first block another request has as well, through a shared
        prefix."""
        firsts = [*chain.from_iterable(self.first_blocks.values())]
        if len({*firsts}) == len(firsts):
            return []
        counts = Counter(firsts)
        return [
            name
            for name, blocks in self.first_blocks.items()
            if any(counts[block] > 1 for block in blocks)
        ]

    def _note_blocks(self, plan: v.Plan) -> None:
        """Update the first blocks: a plan frees those of preempted requests and gives tables to
        others."""
        for name in plan.preempted_req_ids:
            self.first_blocks.pop(name, None)
        tables = [(row.request_id, row.block_ids) for row in plan.new]
        tables += [
            (row.request_id, row.new_block_ids)
            for row in plan.cached
            if row.resumed or row.request_id in plan.remapped_req_ids
        ]
        for name, table in tables:
            firsts = [next(filter(None, blocks), None) for blocks in table]
            self.first_blocks[name] = frozenset(filter(None, firsts))

    def _go_on(self, update: v.Request) -> None:
        """Continue a session with an input, at once if it is idle."""
        name = update.request_id
        outputs = self.delivered.get(name, ())
        self._continue(name, self.sessions[name].update(self.live[name], outputs, update))

    def _continue(self, name: v.RequestId, request: v.Request | None) -> None:
        """Replace the request of a session, unless `request` is None."""
        if request is not None:
            self.live[name] = request
            self.delivered.pop(name, None)

    def _is_over(self, row: v.OutputRow) -> bool:
        """Return whether an output with a finish reason finishes its request; a session may become
        idle or take its next input."""
        session, name = self.sessions.get(row.request_id), row.request_id
        if row.finish_reason is v.FinishReason.ERROR:
            return True
        if session is None or name not in self.live or session.ends_at_its_stop:
            return True
        self.texts.append(self.live[name].prompt_token_ids + self.delivered[name])
        self._continue(name, session.stop(self.live[name], self.delivered[name]))
        for plan in self.plans:
            if any(row.request_id == name for row in plan.rows):
                self.dropped.add((plan.frame_id, name))
        return False

    def end_aborted(self) -> None:
        """End the requests that an abort ends with this plan."""
        if self.ending:
            self._end(self.ending)

    def _end(self, request_ids: Iterable[v.RequestId]) -> None:
        for request_id in request_ids:
            self.sessions.pop(request_id, None)
            self.transfers.end(request_id)
            self.first_blocks.pop(request_id, None)
            request, delivered = self.live.pop(request_id, None), self.delivered.pop(request_id, ())
            self.ended.append(request_id)
            if self.ending:
                self.ending = tuple(name for name in self.ending if name != request_id)
            if request is not None and delivered:
                self.texts.append(request.prompt_token_ids + delivered)
            if request is not None and delivered and request.job_id is not None:
                self.turns.append((request, request.prompt_token_ids + delivered))
