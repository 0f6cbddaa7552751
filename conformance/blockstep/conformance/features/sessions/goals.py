"""Goals that need sessions: requests that continue with further input."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.vocabulary import (
    Commit,
    PauseState,
    Schedule,
    Status,
    StreamingUpdate,
)

RESTING = Status.WAITING_FOR_STREAMING_REQ
TEXTS = {
    "sessions_chunk_at_rest": "an idle session got its next input",
    "sessions_end_at_rest": "an idle session got the end of its input, and ended",
    "sessions_chunk_ahead": "a session got an input before its stop",
    "sessions_several_chunks_ahead": "a session had two or more inputs waiting",
    "sessions_end_ahead": "a session got the end of its input before its last stop",
    "sessions_update_of_the_preempted": "a session was updated while it was preempted",
    "sessions_update_in_flight": "a session got an input while it had a row in flight",
    "sessions_stop_rests": "a session stopped and became idle",
    "sessions_stop_goes_on": "a session stopped and continued with its next input",
    "sessions_stop_ends": "a session stopped after the end of its input, and ended",
    "sessions_announced_again": "a session that had run got a row as a new request",
    "sessions_back_under_a_grammar": (
        "a session with a grammar continued, and its grammar began again"
    ),
    "sessions_rest_while_others_wait": "requests waited for blocks while an idle session held some",
}


def of_update(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of an input to a session."""
    assert isinstance(step.event, StreamingUpdate)
    request = step.event.request
    name, is_end = request.request_id, not request.resumable
    old = step.old[name]
    if old.status is RESTING:
        yield "sessions_end_at_rest" if is_end else "sessions_chunk_at_rest"
        return
    yield "sessions_end_ahead" if is_end else "sessions_chunk_ahead"
    if old.num_streaming_updates:
        yield "sessions_several_chunks_ahead"
    if old.status is Status.PREEMPTED:
        yield "sessions_update_of_the_preempted"
    if history.in_flight(name):
        yield "sessions_update_in_flight"


def of_stops(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of sessions that stopped in a commit."""
    for row in step.output_rows if history.has_sessions else ():
        life = history.lives.get(row.request_id)
        if row.finish_reason is None or life is None or not life.request.resumable:
            continue
        new = step.new.get(row.request_id)
        if new is None:
            yield "sessions_stop_ends"
        else:
            yield "sessions_stop_rests" if new.status is RESTING else "sessions_stop_goes_on"


def of_returns(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with sessions."""
    if not history.has_sessions:
        return
    for row in step.plan.new:
        life = history.lives[row.request_id]
        if life.request.resumable and life.admitted_in >= 0:
            yield "sessions_announced_again"
            if life.request.grammar is not None:
                yield "sessions_back_under_a_grammar"
    if history.pause_state is not PauseState.UNPAUSED or step.after.free_queue:
        return
    resting = [one for one in step.after.requests if one.status is RESTING]
    if any(any(one.block_tables) for one in resting) and step.after.waiting:
        yield "sessions_rest_while_others_wait"


GOALS = Goals(TEXTS, {Schedule: of_returns, Commit: of_stops, StreamingUpdate: of_update})
