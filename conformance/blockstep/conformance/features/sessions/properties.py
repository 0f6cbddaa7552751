"""Sessions: P13 outputs and inputs form one token sequence, and nothing is lost."""

from __future__ import annotations

from blockstep.conformance.judge.properties.history import WHOLE, History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import (
    Complaint,
    Complaints,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.spec import vocabulary as v

RESTING = v.Status.WAITING_FOR_STREAMING_REQ


@sentence("P13", v.Commit, v.StreamingUpdate, needs=WHOLE)
def session_keeps_all_but_its_last_token(step: Step, history: History) -> Complaints:
    """A session that stops is idle or continues with its next input: its prompt is then all its
    known tokens but the last one, and the input. An input that comes before the stop waits for it.
    """
    for name in (*step.old, *step.new.keys() - step.old.keys()) if history.has_sessions else ():
        life, new = history.lives.get(name), step.new.get(name)
        if life is None or life.session is None or name in history.list_ended(step):
            continue
        if _is_over(step, history, name):
            continue
        request, session = history.foresee(step, name)
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


def _is_over(step: Step, history: History, name: str) -> bool:
    """Return whether this event is the end of the input of an idle session."""
    match step.event:
        case v.StreamingUpdate(request=update) if update.request_id == name:
            session = history.lives[name].session
            return session is not None and session.is_resting and not update.resumable
    return False


@sentence("P13", v.StreamingUpdate)
def end_of_input_finishes_an_idle_session(step: Step, history: History) -> Complaints:
    """The end of its input ends an idle session; any other session ends at its stop."""
    assert isinstance(step.event, v.StreamingUpdate)
    update = step.event.request
    is_over = _is_over(step, history, update.request_id)
    yield from differing_requests("aborted", [update.request_id] if is_over else [], step.ended)
    if (update.request_id in step.new) is is_over:
        yield Complaint(
            f"{update.request_id!r} should{' not' * is_over} be there any more",
            subjects=update.request_id,
        )
