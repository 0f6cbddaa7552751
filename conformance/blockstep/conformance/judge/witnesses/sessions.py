"""Situations that there are only with sessions: requests that go on with further input."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import PauseState, Request, Status

RESTING = Status.WAITING_FOR_STREAMING_REQ
SESSIONS = {
    "sessions_chunk_at_rest": "a session that rested was given its next chunk",
    "sessions_end_at_rest": "a session that rested was told that no more comes, and ended",
    "sessions_chunk_ahead": "a session was given a chunk before the stop of the one before",
    "sessions_several_chunks_ahead": "a session had two chunks or more before it",
    "sessions_end_ahead": "a session was told that no more comes before its last stop",
    "sessions_update_of_the_preempted": "a session was updated while it was preempted",
    "sessions_update_in_flight": "a session was updated while a frame in flight had a row of it",
    "sessions_stop_rests": "a session came to a stop, and rests until further input comes",
    "sessions_stop_goes_on": "a session came to a stop, and went on with the next chunk",
    "sessions_stop_ends": "a session came to a stop behind which there was no more, and ended",
    "sessions_announced_again": "a session came back with a row as if it were new",
    "sessions_back_under_a_grammar": "a session with a grammar came back, and begins it anew",
    "sessions_rest_while_others_wait": "some waited for blocks, and a resting session holds some",
}


def of_update(step: Step, ledger: Ledger, request: Request) -> Iterator[str]:
    """Where a session stood when its client went on with it."""
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
    if ledger.in_flight(name):
        yield "sessions_update_in_flight"


def of_stops(step: Step, ledger: Ledger) -> Iterator[str]:
    """What became of sessions that a commit brought to a stop."""
    for row in step.output_rows:
        life = ledger.lives.get(row.request_id)
        if row.finish_reason is None or life is None or not life.request.resumable:
            continue
        new = step.new.get(row.request_id)
        if new is None:
            yield "sessions_stop_ends"
        else:
            yield "sessions_stop_rests" if new.status is RESTING else "sessions_stop_goes_on"


def of_returns(step: Step, ledger: Ledger) -> Iterator[str]:
    """What a plan shows of sessions."""
    for row in step.plan.new:
        life = ledger.lives[row.request_id]
        if life.request.resumable and life.admitted_in >= 0:
            yield "sessions_announced_again"
            if life.request.grammar is not None:
                yield "sessions_back_under_a_grammar"
    if ledger.pause_state is not PauseState.UNPAUSED or step.after.free_queue:
        return
    resting = [one for one in step.after.requests if one.status is RESTING]
    if any(any(one.block_tables) for one in resting) and step.after.waiting:
        yield "sessions_rest_while_others_wait"
