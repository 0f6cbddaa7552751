"""Progress (P10): preemption cannot go on for ever in place of work.

A victim computes again what it had, so preempting is the one thing that a scheduler can do without
end and without effect. Two sentences exclude it. Somebody must survive each preemption; and before
a request is preempted again, a survivor must have run beside it all the time. A survivor that is
never preempted gains a token of its text for each such round, and its text is finite: so between
two events that count as progress, each request is preempted at most as often as a text is long.
"""

from __future__ import annotations

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import victims_of
from blockstep.conformance.judge.properties.sentence import Complaint, Complaints, sentence
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import Schedule


@sentence("P10", Schedule)
def preemption_leaves_somebody_running(step: Step, ledger: Ledger) -> Complaints:
    """A request alone in the pool fits it, so the last victim had somebody to give way to.

    Unless tokens are promised to it: planned ahead it may need more than it ever will. Then
    delivering them is the progress.
    """
    if not step.plan.preempted_req_ids or step.after.running:
        return ()
    last = victims_of(step, ledger)[-1]
    if ledger.placeholders(last):
        return ()
    return [Complaint(f"all who ran were preempted, {last!r} last")]


@sentence("P10", Schedule)
def nobody_is_preempted_again_without_progress(step: Step, ledger: Ledger) -> Complaints:
    """Between two preemptions of a request somebody gets further, for want of whose blocks it was.

    Tokens were delivered, or who competes has changed; or one who runs on has run ever since this
    request was last admitted, and has computed since then, or is promised tokens.
    """
    if not step.plan.preempted_req_ids or not step.after.running:
        return
    rows = {row.request_id for row in step.running_rows}
    for name in step.plan.preempted_req_ids:
        life = ledger.lives[name]
        if life.preempted_at is None or life.preempted_at != ledger.num_progress:
            continue
        since = life.admitted_in
        survivors = [ledger.lives[other] for other in step.after.running]
        if not any(
            other.admitted_in <= since
            and (
                other.last_planned_in >= since
                or other.request.request_id in rows
                or ledger.promised.get(other.request.request_id)
            )
            for other in survivors
        ):
            yield Complaint(
                f"{name!r} was preempted again, and nobody has got further since the last time"
            )
