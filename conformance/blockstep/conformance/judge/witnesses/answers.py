"""Situations that answers alone show: for engines whose states are not followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from blockstep.spec import vocabulary as v


class AnswerWitnesses:
    """Names situations of one run from what was asked and answered."""

    def __init__(self) -> None:
        self._num_preemptions: Counter[v.RequestId] = Counter()

    def observe(
        self,
        event: v.Event,
        seen: v.Observation,
        live: Mapping[v.RequestId, v.Request],
        said: Mapping[v.RequestId, v.TokenIds],
        num_in_flight: int,
    ) -> Iterator[str]:
        """The situations that an answer shows, each as often as it does.

        The last three are as they were before it: who has not ended, what was delivered to them,
        how many frames were in flight.
        """
        match event, seen:
            case v.Submit(request=request), _:
                self._num_preemptions.pop(request.request_id, None)
            case _, v.Plan() as plan:
                yield from self._of_plan(plan, bool(live), num_in_flight)
                for row in plan.rows:
                    yield from _of_row(row, live[row.request_id], said.get(row.request_id, ()))
            case v.Commit(sampled=sampled), v.Outputs(rows=rows):
                ended = [row for row in rows if row.finish_reason is not None]
                yield from map(_stop_of, ended)
                if len(ended) > 1:
                    yield "several_ended_in_one_commit"
                if not all(row.token_ids for row in sampled):
                    yield "prefill_row_sampled_nothing"

    def _of_plan(self, plan: v.Plan, is_anybody_live: bool, num_in_flight: int) -> Iterator[str]:
        if not plan.rows:
            yield "empty_plan_with_work" if is_anybody_live else "empty_plan"
        if num_in_flight in (1, 3):
            yield "several_frames_in_flight" if num_in_flight == 1 else "four_frames_in_flight"
        if len(plan.preempted_req_ids) > 1:
            yield "several_preempted_in_one_step"
        for name in plan.preempted_req_ids:
            self._num_preemptions[name] += 1
            yield "preempted"
            if self._num_preemptions[name] > 1:
                yield "preempted_twice"


def _of_row(row: v.NewRow | v.CachedRow, request: v.Request, said: v.TokenIds) -> Iterator[str]:
    end = row.num_computed_tokens + row.num_scheduled_tokens
    if end < len(request.prompt_token_ids) + len(said):
        yield "chunked_prefill"
    if isinstance(row, v.NewRow):
        yield "admitted"
        if row.num_computed_tokens:
            yield "prefix_hit"
    elif row.resumed:
        yield "preempted_then_resumed"
        if row.num_computed_tokens:
            yield "resumed_with_hit"
        if said:
            yield "resumed_with_outputs"


def _stop_of(row: v.OutputRow) -> str:
    if row.finish_reason is v.FinishReason.STOP:
        return "stop_eos" if row.stop_token_id is None else "stop_token"
    return f"stop_{row.finish_reason}"
