"""Transition: the one entry. `transition(state, event)` is Accepted, or Rejected; never a third.

Pure, total and deterministic (D2). An `AssertionError` from here means that the spec is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from blockstep.spec import vocabulary as v
from blockstep.spec.core.commit import process_commit
from blockstep.spec.core.lifecycle import process_abort, process_pause, process_submit
from blockstep.spec.core.schedule import process_schedule
from blockstep.spec.core.speculation import process_drafts
from blockstep.spec.core.state import State
from blockstep.spec.features.encoder import process_encoder_offer, process_encoder_reset
from blockstep.spec.features.forks import process_fork
from blockstep.spec.features.kv_transfer import process_kv_offer, process_transfers_reported
from blockstep.spec.features.pins import process_clock, process_estimate
from blockstep.spec.features.resets import process_reset
from blockstep.spec.features.sessions import process_streaming_update
from blockstep.spec.features.structured_output import (
    process_bitmask,
    process_grammar_failed,
    process_grammar_ready,
)


@dataclass(frozen=True, slots=True)
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
    return Accepted(*result)


def process_event(state: State, event: v.Event) -> tuple[State, v.Observation] | v.Rejected:
    """Apply a well-formed event by the function for it. Source: architecture D1."""
    match event:
        case v.Submit(request=request):
            return process_submit(state, request)
        case v.Schedule():
            return process_schedule(state)
        case v.Commit():
            return process_commit(state, event)
        case v.Drafts(drafts=drafts):
            return process_drafts(state, drafts)
        case v.Abort(request_ids=request_ids):
            return process_abort(state, request_ids)
        case v.GrammarReady(request_id=request_id):
            return process_grammar_ready(state, request_id)
        case v.GrammarFailed(request_id=request_id):
            return process_grammar_failed(state, request_id)
        case v.GrammarBitmask():
            return state.rules[process_bitmask](state, event)
        case v.StreamingUpdate(request=request):
            return process_streaming_update(state, request)
        case v.SetPause(pause_state=pause_state):
            return process_pause(state, pause_state)
        case v.Reset():
            return state.rules[process_reset](state, event)
        case v.EncoderReset():
            return process_encoder_reset(state)
        case v.EncoderOffer(identifiers=identifiers):
            return process_encoder_offer(state, identifiers)
        case v.KVOffer():
            return process_kv_offer(state, event)
        case v.TransfersReported(transfers=transfers):
            return process_transfers_reported(state, transfers)
        case v.Clock(now=now):
            return process_clock(state, now)
        case v.PinEstimate():
            return process_estimate(state, event)
        case v.Fork():
            return process_fork(state, event)
        case _:
            assert_never(event)
