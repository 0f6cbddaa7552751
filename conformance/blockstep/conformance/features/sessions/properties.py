"""Sessions: P13 outputs and inputs form one token sequence, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.ledger import WHOLE, Ledger
from blockstep.conformance.judge.properties.sentence import (
    Complaint,
    Complaints,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec import vocabulary as v

RESTING = v.Status.WAITING_FOR_STREAMING_REQ


@sentence("P13", v.Commit, v.StreamingUpdate, needs=WHOLE)
def session_goes_on_behind_all_but_its_last_token(step: Step, ledger: Ledger) -> Complaints:
    """A session that stops is idle or continues with its next input: its prompt is then all its
    known tokens but the last one, and the input. An input that comes before the stop waits for it.
    """
    for name in (*step.old, *step.new.keys() - step.old.keys()) if ledger.has_sessions else ():
        life, new = ledger.lives.get(name), step.new.get(name)
        if life is None or life.session is None or name in ledger.list_ended(step):
            continue
        if _is_over(step, ledger, name):
            continue
        request, session = ledger.foresee(step, name)
        if new is None:
            what = f"{name!r} has ended, and its input has not"
            yield unequal(what, "unfinished", True, False, subjects=name)
            continue
        due = (request.prompt_token_ids, len(session.updates), session.is_resting)
        seen = (new.prompt_token_ids, new.num_streaming_updates, new.status is RESTING)
        if seen != due:
            what = f"{name!r} is not what its inputs make it"
            yield unequal(
                what, "prompt, inputs that wait, whether it is idle", due, seen, subjects=name
            )


def _is_over(step: Step, ledger: Ledger, name: str) -> bool:
    """Return whether this event is the end of the input of an idle session."""
    match step.event:
        case v.StreamingUpdate(request=update) if update.request_id == name:
            session = ledger.lives[name].session
            return session is not None and session.is_resting and not update.resumable
    return False


@sentence("P13", v.StreamingUpdate)
def end_of_its_input_ends_who_rests(step: Step, ledger: Ledger) -> Complaints:
    """The end of its input ends an idle session; any other session ends at its stop."""
    assert isinstance(step.event, v.StreamingUpdate)
    update = step.event.request
    is_over = _is_over(step, ledger, update.request_id)
    yield from differing_requests("aborted", [update.request_id] if is_over else [], step.ended)
    if (update.request_id in step.new) is is_over:
        yield Complaint(
            f"{update.request_id!r} should{' not' * is_over} be there any more",
            subjects=update.request_id,
        )


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


def of_update(step: Step, ledger: Ledger, request: v.Request) -> Iterator[str]:
    """Yield the goals of an input to a session."""
    name, is_end = request.request_id, not request.resumable
    old = step.old[name]
    if old.status is RESTING:
        yield "sessions_end_at_rest" if is_end else "sessions_chunk_at_rest"
        return
    yield "sessions_end_ahead" if is_end else "sessions_chunk_ahead"
    if old.num_streaming_updates:
        yield "sessions_several_chunks_ahead"
    if old.status is v.Status.PREEMPTED:
        yield "sessions_update_of_the_preempted"
    if ledger.in_flight(name):
        yield "sessions_update_in_flight"


def of_stops(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of sessions that stopped in a commit."""
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
    """Yield the goals of a plan with sessions."""
    for row in step.plan.new:
        life = ledger.lives[row.request_id]
        if life.request.resumable and life.admitted_in >= 0:
            yield "sessions_announced_again"
            if life.request.grammar is not None:
                yield "sessions_back_under_a_grammar"
    if ledger.pause_state is not v.PauseState.UNPAUSED or step.after.free_queue:
        return
    resting = [one for one in step.after.requests if one.status is RESTING]
    if any(any(one.block_tables) for one in resting) and step.after.waiting:
        yield "sessions_rest_while_others_wait"


def find(step: Step, ledger: Ledger) -> Iterable[str]:
    """Return the goals of a step of a run that has had a session."""
    return _find(step, ledger) if ledger.has_sessions else ()


def _find(step: Step, ledger: Ledger) -> Iterator[str]:
    match step.event, step.observation:
        case v.Schedule(), v.Plan():
            yield from of_returns(step, ledger)
        case v.Commit(), v.Outputs():
            yield from of_stops(step, ledger)
        case v.StreamingUpdate(request=request), v.Ack() | v.Aborted():
            yield from of_update(step, ledger, request)


GOALS = Goals(TEXTS, find)
