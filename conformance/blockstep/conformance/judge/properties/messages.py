"""Messages (P26): a plan tells the worker all that happened."""

from __future__ import annotations

from blockstep.conformance.engine import PartOfState
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.sentence import (
    ENDINGS,
    Complaint,
    Complaints,
    differing_requests,
    sentence,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import Schedule, Status, StreamingUpdate


@sentence("P26", Schedule)
def plan_tells_who_ended(step: Step, ledger: Ledger) -> Complaints:
    """A plan names all requests that ended since the plan before, sorted; the state then forgets
    them."""
    ended = tuple(sorted(ledger.ended))
    yield from differing_requests("finished_req_ids", ended, step.plan.finished_req_ids)
    yield from differing_requests("finished_req_ids kept", (), step.after.finished_req_ids)


@sentence("P26", *ENDINGS, StreamingUpdate, said_by="plan_tells_who_ended")
def ended_are_kept_for_the_next_plan(step: Step, ledger: Ledger) -> Complaints:
    """A request that ends is kept until the next plan names it."""
    ended = tuple(sorted(ledger.ended.union(ledger.list_ended(step))))
    return differing_requests("finished_req_ids", ended, step.after.finished_req_ids)


@sentence("P26", Schedule)
def plan_tells_who_was_preempted(step: Step, _ledger: Ledger) -> Complaints:
    """A plan names all requests that were preempted while it was made, sorted."""
    is_shown = any(request.status is Status.PREEMPTED for request in step.after.requests)
    if isinstance(step.after, PartOfState) and not is_shown:
        return ()  # the reason why a request waits need not be shown
    victims = tuple(sorted(step.victims))
    return differing_requests("preempted_req_ids", victims, step.plan.preempted_req_ids)


@sentence("P26", Schedule, of="rows")
def new_row_carries_the_request_as_submitted(step: Step, ledger: Ledger) -> Complaints:
    """A new row has the request as the client submitted it."""
    for row in step.plan.new:
        life = ledger.lives.get(row.request_id)
        if life is None or (row.request is not life.request and row.request != life.request):
            yield Complaint(
                f"the new row of {row.request_id!r} is not the request submitted",
                subjects=row.request_id,
            )
