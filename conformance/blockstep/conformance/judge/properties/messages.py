"""Messages (P26): what a plan tells the worker is what happened, and all of it."""

from __future__ import annotations

from blockstep.conformance.engine import PartOfState
from blockstep.conformance.judge.attended import without_given_back
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.sentence import (
    ENDINGS,
    Complaint,
    Complaints,
    differing,
    differing_requests,
    each_differing,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.protocol.findings import of_request
from blockstep.spec.vocabulary import Commit, Schedule, Status, StreamingUpdate


@sentence("P26", Schedule)
def plan_tells_who_ended(step: Step, ledger: Ledger) -> Complaints:
    """A plan names all that ended since the plan before, sorted; then they are forgotten."""
    ended = tuple(sorted(ledger.ended))
    yield from differing_requests("finished_req_ids", ended, step.plan.finished_req_ids)
    yield from differing_requests("finished_req_ids kept", (), step.after.finished_req_ids)


@sentence("P26", *ENDINGS, StreamingUpdate, said_by="plan_tells_who_ended")
def ended_are_kept_for_the_next_plan(step: Step, ledger: Ledger) -> Complaints:
    """Who ends is remembered until the next plan."""
    ended = tuple(sorted(ledger.ended.union(ledger.list_ended(step))))
    return differing_requests("finished_req_ids", ended, step.after.finished_req_ids)


@sentence("P26", Schedule)
def plan_tells_who_was_preempted(step: Step, _ledger: Ledger) -> Complaints:
    """A plan names all that were preempted while it was made, sorted."""
    is_shown = any(request.status is Status.PREEMPTED for request in step.after.requests)
    if isinstance(step.after, PartOfState) and not is_shown:
        return ()  # why a request waits need not be shown
    victims = tuple(sorted(step.victims))
    return differing_requests("preempted_req_ids", victims, step.plan.preempted_req_ids)


@sentence("P26", Schedule, fixes="how plans are numbered")
def plan_has_its_place_in_the_sequence(step: Step, _ledger: Ledger) -> Complaints:
    """Frame ids go up by one; a plan with rows is in flight, and its rows are remembered."""
    plan, before, after = step.plan, step.before, step.after
    flying = before.frames_in_flight + ((plan.frame_id,) if step.rows else ())
    scheduled = tuple(sorted([row.request_id for row in step.rows]))
    return each_differing(
        ("frame_id", before.next_frame_id, plan.frame_id),
        ("next_frame_id", before.next_frame_id + 1, after.next_frame_id),
        ("frames_in_flight", flying, after.frames_in_flight),
        ("prev_scheduled_req_ids", scheduled, after.prev_scheduled_req_ids),
    )


@sentence("P26", Commit, fixes="how plans are numbered")
def committed_frame_leaves_flight(step: Step, _ledger: Ledger) -> Complaints:
    """A committed frame is in flight no more, the others still are."""
    before = step.before.frames_in_flight
    left = tuple(frame for frame in before if frame != step.commit.frame_id)
    return differing("frames_in_flight", left, step.after.frames_in_flight)


@sentence("P26", Schedule, of="rows", fixes="the order of rows in a plan")
def rows_stand_in_the_order_of_the_running_list(step: Step, _ledger: Ledger) -> Complaints:
    """New rows, running rows and resumed rows each follow the running list; each request once."""
    plan, runs = step.plan, step.after.running
    new = [row.request_id for row in plan.new]
    resumed = [row.request_id for row in plan.cached if row.resumed]
    running = [row.request_id for row in plan.cached if not row.resumed]
    for names in filter(None, (new, running, resumed)):
        if any(name not in runs for name in names):
            yield Complaint(f"{names} have rows, but not all of them run")
        elif len(names) > 1 and names != sorted(names, key=runs.index):
            yield unequal(f"rows {names} are out of order", "order", runs, names)
    if [row.request_id for row in plan.cached] != running + resumed:
        yield Complaint("a resumed row stands before a running one")
    if len({*new, *running, *resumed}) != len(new) + len(running) + len(resumed):
        yield Complaint("a request has two rows")


@sentence("P26", Schedule, of="rows")
def new_row_carries_the_request_as_submitted(step: Step, ledger: Ledger) -> Complaints:
    """The worker is told the very request that the client handed in."""
    for row in step.plan.new:
        life = ledger.lives.get(row.request_id)
        if life is None or (row.request is not life.request and row.request != life.request):
            yield Complaint(
                f"the new row of {row.request_id!r} is not the request submitted",
                subjects=of_request(row.request_id),
            )


@sentence("P26", Schedule, of="rows", said_by="plans_alone_rebuild_the_request")
def table_in_the_plan_is_the_table_in_the_state(step: Step, _ledger: Ledger) -> Complaints:
    """Old table and blocks gained, or the whole new table, are what the request then holds.

    No plan tells what it gives back because it attends to it no more.
    """
    for row in step.rows:
        told, seen = step.tables_of(row), step.new[row.request_id].block_tables
        if step.config.groups:
            told = tuple([without_given_back(*pair) for pair in zip(told, seen, strict=True)])
        if seen != told:
            what = f"the plan gives {row.request_id!r} another table than the state"
            yield unequal(what, "block_tables", told, seen, subjects=of_request(row.request_id))
