"""Transition: the one entry. `transition(state, event)` is Accepted, or Rejected; never a third.

Pure, total and deterministic (D2). An `AssertionError` from here means that the spec is wrong.
"""

from __future__ import annotations

from blockstep.spec import vocabulary as v
from blockstep.spec.copies import wide_dataclass
from blockstep.spec.core.commit import process_commit
from blockstep.spec.core.lifecycle import process_abort, process_pause, process_submit
from blockstep.spec.core.schedule import process_schedule
from blockstep.spec.core.speculation import process_drafts
from blockstep.spec.core.state import State
from blockstep.spec.features import EVENTS


@wide_dataclass(frozen=True, slots=True)
class Accepted:
    """The event was accepted."""

    state: State
    observation: v.Observation


def transition(state: State, event: v.Event) -> Accepted | v.Rejected:
    """Return the state and observation after `event`. A rejection leaves `state` as it is.

    Source: architecture D2.
    """
    problem = v.event_problem(event)
    if problem is not None:
        return problem
    result = process_event(state, event)
    if isinstance(result, v.Rejected):
        return result
    after, observation = result
    return Accepted(after, observation)


def process_event(state: State, event: v.Event) -> tuple[State, v.Observation] | v.Rejected:
    """Apply a well-formed event by the function for it; those of features are in their
    `Feature.events`. Source: architecture D1, D11.
    """
    match event:
        case v.Schedule():
            return process_schedule(state)
        case v.Commit():
            return process_commit(state, event)
        case v.Submit(request=request):
            return process_submit(state, request)
        case v.Drafts(drafts=drafts):
            return process_drafts(state, drafts)
        case v.Abort(request_ids=request_ids):
            return process_abort(state, request_ids)
        case v.SetPause(pause_state=pause_state):
            return process_pause(state, pause_state)
        case _:
            return state.rules[EVENTS[type(event)]](state, event)
