"""Client: what clients and a runner remember of a run, from what was asked and answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Commit,
    Event,
    Observation,
    Outputs,
    Plan,
    Rejected,
    Request,
    RequestId,
    Schedule,
    Submit,
    TokenIds,
)

TEXTS_MAX = 6


@dataclass(slots=True)
class Client:
    """What follows from the events of a run and the answers to them, and from nothing else."""

    live: dict[RequestId, Request] = field(default_factory=dict)
    """Accepted and not ended, in order of submission."""
    ended: list[RequestId] = field(default_factory=list)
    texts: deque[TokenIds] = field(default_factory=lambda: deque(maxlen=TEXTS_MAX))
    """Prompt and outputs of those that ended last."""
    said: dict[RequestId, TokenIds] = field(default_factory=dict)
    """Outputs delivered to those in `live`."""
    plans: list[Plan] = field(default_factory=list)
    """In flight, oldest first."""
    last_plan: Plan | None = None
    last_commit: Commit | None = None
    sampled: tuple[RequestId, ...] = ()
    """Requests that sampled in the last answered plan: drafts are proposed for them."""

    def follow(self, event: Event, observation: Observation) -> None:
        """Take in one event and the answer to it."""
        match event, observation:
            case _, Rejected():
                return
            case Submit(request=request), _:
                self.live[request.request_id] = request
            case Schedule(), Plan() as plan:
                self.last_plan = plan
                if plan.rows:
                    self.plans.append(plan)
            case Commit(frame_id=frame_id, sampled=sampled), Outputs(rows=rows):
                self.last_commit = event
                self.plans = [plan for plan in self.plans if plan.frame_id != frame_id]
                self.sampled = tuple(row.request_id for row in sampled if row.token_ids)
                for row in rows:
                    said = self.said.get(row.request_id, ())
                    self.said[row.request_id] = said + row.new_token_ids
                self._end(row.request_id for row in rows if row.finish_reason is not None)
            case Abort(), Aborted(request_ids=request_ids):
                self._end(request_ids)

    def _end(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            request, said = self.live.pop(request_id, None), self.said.pop(request_id, ())
            self.ended.append(request_id)
            if request is not None and said:
                self.texts.append(request.prompt_token_ids + said)
