"""Goals that answers alone show, for engines without a shown state.

Plans take the place of a state: a request with a row runs, one that a plan preempts does not. Names
and meanings are those of the other goals; `ANSWERED` has the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from blockstep.spec import vocabulary as v

ANSWERED = frozenset(
    (
        *("admitted", "prefix_hit", "chunked_prefill", "prefill_row_sampled_nothing"),
        *("preempted", "preempted_twice", "several_preempted_in_one_step"),
        *("preempted_then_resumed", "resumed_with_hit", "resumed_with_outputs"),
        *("stop_eos", "stop_token", "stop_length", "stop_model_length", "stop_repetition"),
        *("several_ended_in_one_commit", "empty_plan", "empty_plan_with_work", "id_used_again"),
        *("several_frames_in_flight", "four_frames_in_flight"),
        *("planned_before_its_token", "chunks_in_two_frames", "pipeline_chunks_in_two_frames"),
        *("abort_waiting", "abort_running", "abort_preempted", "abort_in_flight", "abort_unknown"),
        *("abort_with_two_frames_in_flight", "commit_for_aborted"),
        *("drafts_taken", "drafts_dropped", "drafts_scheduled", "draft_placeholders_scheduled"),
        *("drafts_all_accepted", "drafts_some_accepted", "drafts_none_accepted"),
        *("grammar_promoted", "grammar_ready_twice", "paused_new", "paused_all"),
        *("reset_refused", "reset_done", "reset_forced", "reset_forced_in_flight"),
        "dropped_token_runs_again",
    )
)
"""Goals that answers show."""


class AnswerGoals:
    """Finds the goals of one run from events and answers."""

    def __init__(self, config: v.Config) -> None:
        self._is_async = config.async_scheduling
        self._num_preemptions: Counter[v.RequestId] = Counter()
        self._running: set[v.RequestId] = set()
        self._preempted: set[v.RequestId] = set()
        self._aborted: set[v.RequestId] = set()
        """Aborted requests, of which frames in flight may have rows."""
        self._ended: set[v.RequestId] = set()
        """Requests that ended since the last plan."""
        self._grammars: set[v.RequestId] = set()
        self._pause_state = v.PauseState.UNPAUSED

    def observe(
        self,
        event: v.Event,
        seen: v.Observation,
        live: Mapping[v.RequestId, v.Request],
        delivered: Mapping[v.RequestId, v.TokenIds],
        plans: Sequence[v.Plan],
    ) -> Iterator[str]:
        """Yield the goals that an answer shows, each as often as it does.

        The last three arguments are as before the answer: unfinished requests, tokens delivered to
        them, and plans in flight.
        """
        match event, seen:
            case v.Submit(request=request), v.Ack():
                name = request.request_id
                self._num_preemptions.pop(name, None)
                if name in self._ended:
                    yield "id_used_again"
            case _, v.Plan() as plan:
                yield from self._of_plan(plan, live, plans)
                for row in plan.rows:
                    known = live.get(row.request_id)
                    if known is not None:  # or an adapter declares that it continues it
                        yield from _of_row(row, known, delivered.get(row.request_id, ()))
                        yield from self._of_flight(row, known, delivered, plans)
                self._learn(plan)
            case v.Commit(), v.Outputs(rows=rows):
                yield from self._of_commit(event, rows, live, delivered, plans)
            case v.Drafts(drafts=drafts), v.DraftsTaken(request_ids=taken):
                for proposal in drafts:
                    yield "drafts_taken" if proposal.request_id in taken else "drafts_dropped"
            case v.Abort(request_ids=names), v.Aborted(request_ids=ended):
                for name in dict.fromkeys(names):
                    yield from self._of_abort(name, live, plans)
                self._forget(ended)
                self._aborted.update(ended)
            case v.GrammarReady(request_id=name), v.Ack():
                if name in self._grammars:
                    yield "grammar_ready_twice"
                self._grammars.add(name)
            case v.SetPause(pause_state=state), v.Ack():
                self._pause_state = state
            case v.Reset(reset_running_requests=forced), v.ResetDone(success=success):
                yield from self._of_reset(forced, success, plans)

    def _of_plan(
        self, plan: v.Plan, live: Mapping[v.RequestId, v.Request], plans: Sequence[v.Plan]
    ) -> Iterator[str]:
        if not plan.rows:
            yield "empty_plan_with_work" if live else "empty_plan"
        elif len(plans) in (1, 3):
            yield "several_frames_in_flight" if len(plans) == 1 else "four_frames_in_flight"
        if self._pause_state is v.PauseState.PAUSED_NEW and live.keys() - self._running:
            yield "paused_new"
        if self._pause_state is v.PauseState.PAUSED_ALL and self._running:
            yield "paused_all"
        if len(plan.preempted_req_ids) > 1:
            yield "several_preempted_in_one_step"
        for name in plan.preempted_req_ids:
            self._num_preemptions[name] += 1
            yield "preempted"
            if self._num_preemptions[name] > 1:
                yield "preempted_twice"

    def _of_flight(
        self,
        row: v.NewRow | v.CachedRow,
        request: v.Request,
        delivered: Mapping[v.RequestId, v.TokenIds],
        plans: Sequence[v.Plan],
    ) -> Iterator[str]:
        """Yield the goals of a row with drafts, or with other frames in flight."""
        name = row.request_id
        if row.draft_token_ids:
            yield "drafts_scheduled"
            if self._is_async:
                yield "draft_placeholders_scheduled"
        if isinstance(row, v.CachedRow) and not row.resumed and _count_frames(name, plans):
            known = len(request.prompt_token_ids) + len(delivered.get(name, ()))
            if row.num_computed_tokens >= known:
                yield "planned_before_its_token"
            else:
                yield "chunks_in_two_frames" if self._is_async else "pipeline_chunks_in_two_frames"

    def _learn(self, plan: v.Plan) -> None:
        rows = {row.request_id for row in plan.rows}
        self._forget(plan.finished_req_ids)
        self._running = (self._running - set(plan.preempted_req_ids)) | rows
        self._preempted = (self._preempted | set(plan.preempted_req_ids)) - rows
        self._ended = set()

    def _forget(self, names: Sequence[v.RequestId]) -> None:
        """Note that requests ended."""
        self._ended.update(names)
        for gone in (self._running, self._preempted, self._grammars):
            gone.difference_update(names)

    def _of_commit(
        self,
        event: v.Commit,
        rows: Sequence[v.OutputRow],
        live: Mapping[v.RequestId, v.Request],
        delivered: Mapping[v.RequestId, v.TokenIds],
        plans: Sequence[v.Plan],
    ) -> Iterator[str]:
        sampled = {row.request_id: row.token_ids for row in event.sampled}
        for plan in plans:
            for row in plan.rows if plan.frame_id == event.frame_id else ():
                yield from _of_acceptance(row, sampled.get(row.request_id, ()))
                if row.request_id in self._aborted and row.request_id not in live:
                    yield "commit_for_aborted"
        ended = [row for row in rows if row.finish_reason is not None and row.request_id in live]
        for end in ended:
            yield _stop_of(end, live[end.request_id], delivered.get(end.request_id, ()))
        if len(ended) > 1:
            yield "several_ended_in_one_commit"
        if not all(sampled.values()):
            yield "prefill_row_sampled_nothing"
        self._forget([row.request_id for row in ended])

    def _of_abort(
        self, name: v.RequestId, live: Mapping[v.RequestId, v.Request], plans: Sequence[v.Plan]
    ) -> Iterator[str]:
        num_frames = _count_frames(name, plans)
        if name not in live:
            yield "abort_unknown"
        elif num_frames:
            yield "abort_in_flight"
            if num_frames > 1:
                yield "abort_with_two_frames_in_flight"
        elif name in self._preempted:
            yield "abort_preempted"
        else:
            yield "abort_running" if name in self._running else "abort_waiting"

    def _of_reset(self, forced: bool, success: bool, plans: Sequence[v.Plan]) -> Iterator[str]:
        if not success:
            yield "reset_refused"
        elif not forced:
            yield "reset_done"
        elif self._running:
            yield "reset_forced"
            if any(_count_frames(name, plans) for name in self._running):
                yield "reset_forced_in_flight"
            self._preempted |= self._running
            self._running = set()


def _count_frames(name: v.RequestId, plans: Sequence[v.Plan]) -> int:
    """Number of frames in flight with a row of a request."""
    return sum(any(row.request_id == name for row in plan.rows) for plan in plans)


def _of_row(
    row: v.NewRow | v.CachedRow, request: v.Request, delivered: v.TokenIds
) -> Iterator[str]:
    end = row.num_computed_tokens + row.num_scheduled_tokens
    if end < len(request.prompt_token_ids) + len(delivered):
        yield "chunked_prefill"
    if isinstance(row, v.NewRow):
        yield "admitted"
        if request.structured_output:
            yield "grammar_promoted"
        if row.num_computed_tokens:
            yield "prefix_hit"
    elif row.resumed:
        yield "preempted_then_resumed"
        if row.num_computed_tokens:
            yield "resumed_with_hit"
        if delivered:
            yield "resumed_with_outputs"


def _of_acceptance(row: v.NewRow | v.CachedRow, sampled: v.TokenIds) -> Iterator[str]:
    """Yield the goal for the number of accepted drafts of a row."""
    drafts, accepted = len(row.draft_token_ids), len(sampled) - 1
    if not drafts or not sampled:
        return
    if accepted == drafts:
        yield "drafts_all_accepted"
    else:
        yield "drafts_some_accepted" if accepted else "drafts_none_accepted"


def _stop_of(row: v.OutputRow, request: v.Request, delivered: v.TokenIds) -> str:
    if row.finish_reason is v.FinishReason.STOP:
        return "stop_eos" if row.stop_token_id is None else "stop_token"
    if row.finish_reason is v.FinishReason.LENGTH:
        num_outputs = len(delivered) + len(row.new_token_ids)
        return "stop_length" if num_outputs >= request.max_tokens else "stop_model_length"
    return f"stop_{row.finish_reason}"
