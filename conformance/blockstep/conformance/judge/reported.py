"""Told: checks of an answer against what earlier plans and answers said.

`judge.answers` looks at one answer. These checks hold for every engine as well, with or without a
shown state, but need a memory: accepted drafts, hits of first admissions, and requests that ended
and that no plan has named as finished.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blockstep.conformance.protocol.findings import (
    SUBJECTS_MAX,
    Difference,
    Finding,
    Subjects,
    violated,
)
from blockstep.conformance.protocol.session_tracker import Session
from blockstep.spec import vocabulary as v


@dataclass(slots=True)
class Reported:
    """The memory of one run: what its plans and answers have said. Not reusable."""

    config: v.Config
    reports_hits: bool
    """Whether its outputs have cached tokens: it has a capability of statistics."""
    reports_finished: bool
    """Whether its worker keeps requests until a plan names them as finished."""
    has_slots: bool = True
    """Whether its worker has a slot for each running request, `max_num_seqs` in all."""
    proposed: dict[v.RequestId, v.TokenIds] = field(default_factory=dict)
    """Accepted drafts of a request that are still for its next position."""
    first_hits: dict[v.RequestId, int] = field(default_factory=dict)
    """Tokens that each request did not have to compute at its first admission."""
    known: set[v.RequestId] = field(default_factory=set)
    """Unfinished requests that had a row."""
    ended: set[v.RequestId] = field(default_factory=set)
    """Requests that had a row and ended since the last plan."""
    slots: set[v.RequestId] = field(default_factory=set)
    """Requests that a worker keeps: they had a row, and no plan named them as finished or
    preempted.

    Left out are those of which no plan says so: preempted by a reset or a failed load, and idle
    sessions, for which a worker must have separate slots.
    """

    def judge(
        self,
        event: v.Event,
        seen: v.Observation,
        live: Mapping[v.RequestId, v.Request],
        sessions: Mapping[v.RequestId, Session],
    ) -> Iterator[Finding]:
        """Yield the findings about an answer of the right kind. `live` and `sessions` are as before
        it."""
        if isinstance(seen, v.Outputs) and self.reports_hits:
            yield from self._judge_hits(seen.rows, live)
        match event, seen:
            case v.Schedule(), v.Plan() as plan:
                yield from self._judge_ends(plan, live)
                if self.has_slots:
                    yield from self._judge_slots(plan)
                if not self.config.async_scheduling:
                    yield from self._judge_drafts(plan)
            case v.GrammarFailed(request_id=name), v.Outputs(rows=rows):
                yield from _judge_failed_grammar(name, rows)
            case v.StreamingUpdate(request=update), _:
                ended = seen.request_ids if isinstance(seen, v.Aborted) else ()
                yield from _judge_update(update, sessions, ended)

    def _judge_hits(
        self, rows: Sequence[v.OutputRow], live: Collection[v.RequestId]
    ) -> Iterator[Finding]:
        for row in rows:
            due, seen = self.first_hits.get(row.request_id, 0), row.num_cached_tokens
            if row.request_id in live and seen != due:
                what = f"{row.request_id!r} got a wrong number of cached tokens"
                difference = Difference("num_cached_tokens", str(due), str(seen))
                yield violated(
                    "P21",
                    "reported_cached_tokens_are_of_the_first_hit",
                    what,
                    difference,
                    subjects=row.request_id,
                )

    def _judge_ends(self, plan: v.Plan, live: Collection[v.RequestId]) -> Iterator[Finding]:
        """A plan names each request that the worker knows and that has ended, and no other."""
        self._note_ends(live)
        named = set(plan.finished_req_ids)
        kept = sorted(self.ended - named) if self.reports_finished else []
        lost = sorted(named & self.known)
        for names, what in ((kept, "ended, and no plan says so"), (lost, "did not end")):
            if names:
                difference = Difference(
                    "finished_req_ids", str(sorted(self.ended)), str(plan.finished_req_ids)
                )
                subjects = Subjects(tuple(names[:SUBJECTS_MAX]))
                message = f"{names} {what}"
                yield violated(
                    "P26", "plan_names_the_finished", message, difference, subjects=subjects
                )

    def _judge_slots(self, plan: v.Plan) -> Iterator[Finding]:
        """A worker keeps no more requests than it has slots."""
        kept, limit = self._list_kept(plan), self.config.max_num_seqs
        if len(kept) > limit >= len(plan.rows):  # more rows than slots are another finding
            what = f"{sorted(kept)} are at the worker, which has {limit} slots"
            yield violated("P9", "worker_keeps_at_most_max_num_seqs_requests", what)

    def _list_kept(self, plan: v.Plan) -> set[v.RequestId]:
        """Requests that a worker keeps after a plan."""
        left = self.slots.difference(plan.finished_req_ids, plan.preempted_req_ids)
        if not self.reports_finished:
            left &= self.known
        return left.union(row.request_id for row in plan.rows)

    def _judge_drafts(self, plan: v.Plan) -> Iterator[Finding]:
        """A row verifies a prefix of the drafts proposed last for its request's next position."""
        for row in plan.cached:
            drafts, due = row.draft_token_ids, self.proposed.get(row.request_id, ())
            if drafts != due[: len(drafts)]:
                what = f"{row.request_id!r} verifies drafts that were not proposed for its position"
                difference = Difference("draft_token_ids", str(due), str(drafts))
                yield violated(
                    "P24",
                    "dispatched_drafts_are_the_last_proposed_ones",
                    what,
                    difference,
                    subjects=row.request_id,
                )

    def follow(
        self, event: v.Event, seen: v.Observation, live: Mapping[v.RequestId, v.Request]
    ) -> None:
        """Learn from an answer that was judged. `live`: requests that are unfinished after it."""
        match event, seen:
            case v.Drafts(drafts=drafts), v.DraftsTaken(request_ids=taken):
                for row in drafts:
                    if row.request_id in taken:
                        self.proposed[row.request_id] = row.token_ids
            case v.Schedule(), v.Plan() as plan:
                self._follow_plan(plan)
            case v.Commit(sampled=sampled), v.Outputs(rows=rows):
                self._outdate(row.request_id for row in sampled if row.token_ids)
                stopped = {row.request_id for row in rows if row.finish_reason is not None}
                self.slots -= stopped & live.keys()  # sessions that are idle or continue
            case v.Reset(reset_running_requests=True), v.ResetDone(success=True):
                self.proposed.clear()
                self.slots.clear()
            case v.Fork(request_id=name, child_id=child_id), v.Ack():
                if name in self.first_hits:
                    self.first_hits[child_id] = self.first_hits[name]
        self._note_ends(live)

    def _follow_plan(self, plan: v.Plan) -> None:
        self.ended.clear()
        self.slots = self._list_kept(plan)
        self._outdate(plan.preempted_req_ids)
        for row in plan.rows:
            self.known.add(row.request_id)
            self.first_hits.setdefault(row.request_id, row.num_computed_tokens)
        self._outdate(row.request_id for row in plan.rows)

    def _outdate(self, names: Iterable[v.RequestId]) -> None:
        """Forget the drafts of requests whose next position has changed."""
        for name in names:
            self.proposed.pop(name, None)

    def _note_ends(self, live: Collection[v.RequestId]) -> None:
        gone = {name for name in self.known if name not in live}
        self.known -= gone
        self.ended |= gone
        for name in [name for name in self.first_hits if name not in live]:
            del self.first_hits[name]
        self._outdate(gone)


def _judge_failed_grammar(name: v.RequestId, rows: Sequence[v.OutputRow]) -> Iterator[Finding]:
    seen = [(row.request_id, row.new_token_ids, row.finish_reason) for row in rows]
    due = [(name, (), v.FinishReason.ERROR)]
    if seen != due:
        what = f"the grammar of {name!r} cannot be had: it ends by that, and nothing else"
        difference = Difference("rows", str(due), str(seen))
        yield violated("P23", "failed_grammar_ends_its_request", what, difference, subjects=name)


def _judge_update(
    update: v.Request, sessions: Mapping[v.RequestId, Session], ended: Sequence[v.RequestId]
) -> Iterator[Finding]:
    session = sessions.get(update.request_id)
    is_over = session is not None and session.is_resting and not update.resumable
    due = [update.request_id] if is_over else []
    if list(ended) != due:
        what = f"{update.request_id!r} rests: {is_over}; further input: {update.resumable}"
        difference = Difference("aborted", str(due), str(list(ended)))
        yield violated(
            "P13",
            "end_of_input_finishes_an_idle_session",
            what,
            difference,
            subjects=update.request_id,
        )
