"""Runner: turns actions into events, with the client and the worker of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockstep.conformance.draw.wrong_inputs import make_mistake
from blockstep.conformance.engine import Capability
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.program import (
    NO_REPORT,
    Action,
    Answer,
    Drain,
    Hostile,
    Mask,
    Misanswer,
    Mistake,
    Propose,
    Report,
)
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.protocol.transfer_tracker import list_failed
from blockstep.spec import vocabulary as v
from blockstep.spec.core.speculation import can_take_drafts
from blockstep.spec.transition import transition


@dataclass(slots=True, kw_only=True)
class ActionResolver(Client):
    """Client that turns actions into events."""

    config: v.Config
    worker: Worker
    spec: SpecEngine
    capabilities: frozenset[str]

    def resolve(self, action: Action) -> v.Event | None:
        """Return the event of an action now; None if the action has no effect."""
        match action:
            case v.Schedule() | v.Submit():
                return action
            case Answer(report=report):
                if not self.plans:
                    return None
                return self._answer(self.plans[0], report)
            case Report():
                return v.TransfersReported(self.transfers.resolve(action, self.config.block_sizes))
            case Misanswer(mistake=Mistake.FORBIDDEN_TOKEN):
                return forbid(self.worker, self.plans)
            case Misanswer(mistake=mistake):
                answers = [self._answer(plan) for plan in self.plans]
                return make_mistake(mistake, self.plans, answers, self.last_commit)
            case Mask(place=place):
                return ask_mask(self.worker, self.plans[: place + 1][-1]) if self.plans else None
            case Propose(counts=counts) if self.config.async_scheduling:
                self.worker.acceptance = tuple(right for _, right in counts)
                return None
            case Propose(counts=counts, for_chunks=for_chunks):
                names = (*self.sampled, *(self.chunked if for_chunks and self.sampled else ()))
                rows = tuple(
                    v.RowTokens(name, self.worker.propose(name, *counts[index % len(counts)]))
                    for index, name in enumerate(names)
                )
                return self._proposal(rows) if rows else None
            case Hostile(event=v.Commit() as event) if self._is_welcome(event):
                return None  # accepting it would lose the worker's own tokens
            case Hostile(event=event):
                return event
            case Drain():
                return None
            case _:
                return action

    def _answer(self, plan: v.Plan, report: Report = NO_REPORT) -> v.Commit:
        rows = self.worker.answer(plan.frame_id)
        if report == NO_REPORT or not self.config.kv_connector:
            return v.Commit(plan.frame_id, rows)
        resolved = self.transfers.resolve(report, self.config.block_sizes, plan.frame_id)
        return v.Commit(plan.frame_id, rows, resolved)

    def follow(self, event: v.Event, observation: v.Observation) -> None:
        """Update with one event and its answer."""
        if isinstance(event, v.Commit) and self.config.kv_connector:
            self.dropped |= self.list_dropped(event)
        Client.follow(self, event, observation)

    def list_dropped(self, event: v.Commit) -> set[tuple[v.FrameId, v.RequestId]]:
        """Return the rows of this plan and of later ones in flight whose tokens are not delivered,
        because blocks of their load were invalid."""
        loads = self.transfers.at_once.get(event.frame_id, ())
        failed = set(list_failed(loads, self.config.block_sizes, event.transfers))
        failed -= self.list_begun_anew(event.frame_id) if failed else set()
        return {
            (plan.frame_id, row.request_id)
            for plan in (self.plans if failed else ())
            for row in plan.rows
            if row.request_id in failed
        }

    def list_begun_anew(self, frame_id: v.FrameId) -> set[v.RequestId]:
        """Return the requests that were admitted again in a later plan in flight than this one; a
        load of this plan does not matter for them any more."""
        return {
            row.request_id
            for plan in self.plans
            for row in (plan.rows if plan.frame_id > frame_id else ())
            if isinstance(row, v.NewRow) or row.resumed
        }

    def _owes_a_mask(self) -> bool:
        """Return whether the oldest plan samples under a grammar, so that its bitmask precedes its
        commit."""
        can_ask = Capability.MASKS in self.capabilities and self.plans
        return bool(can_ask) and self.plans[0].has_structured_output_requests

    def _is_welcome(self, event: v.Event) -> bool:
        """Return whether the spec would accept the event now."""
        return not isinstance(transition(self.spec.state, event), v.Rejected)

    def _proposal(self, rows: tuple[v.RowTokens, ...]) -> v.Drafts | None:
        """Return the drafts of all requests, or only timely ones if the engine requires it."""
        if not {Capability.REJECTION, Capability.LATE_DRAFTS} & self.capabilities:
            rows = tuple(row for row in rows if self._is_timely(row.request_id))
        return v.Drafts(rows) if rows else None

    def _is_timely(self, name: v.RequestId) -> bool:
        """Return whether an engine that takes no late drafts may get drafts for this request."""
        state = self.spec.state
        request = state.requests.get(name)
        if request is None or can_take_drafts(state, request):
            return request is not None
        is_in_flight = any(row.request_id == name for plan in self.plans for row in plan.rows)
        return request.status is v.Status.RUNNING and request.is_prefill_chunk and not is_in_flight


def ask_mask(worker: Worker, plan: v.Plan) -> v.GrammarBitmask:
    """Return the request for the bitmask of a plan in flight, with drafts that only the worker
    knows."""
    is_async = worker.config.async_scheduling
    return v.GrammarBitmask(plan.frame_id, worker.list_drafts(plan.frame_id) if is_async else ())


def forbid(worker: Worker, plans: Sequence[v.Plan]) -> v.Commit | None:
    """Return a commit of the oldest plan with a token that a grammar forbids, if possible."""
    if not plans:
        return None
    rows = worker.answer_wrongly(plans[0].frame_id)
    return None if rows is None else v.Commit(plans[0].frame_id, rows)
