"""Goals of outside events: aborts, resets, grammars, ids."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.judge.witnesses.frames import num_frames
from blockstep.spec.vocabulary import Abort, RequestId, Reset, Status

SIGNALS = {
    "abort_waiting": "a request that had never run was aborted",
    "abort_running": "a running request without a frame in flight was aborted",
    "abort_preempted": "a preempted request was aborted",
    "abort_in_flight": "a request with a row in flight was aborted",
    "abort_unknown": "an abort named an id that is not unfinished",
    "abort_of_shared_block": "a request was aborted whose blocks have other holders",
    "grammar_ready_twice": "a grammar was reported as compiled again",
    "reset_refused": "a reset failed because blocks were held",
    "reset_done": "a reset without force emptied a cache that was not empty",
    "reset_forced": "a forced reset preempted a request",
    "reset_forced_in_flight": "a forced reset preempted a request with a row in flight",
    "id_used_again": "an id was submitted again before a plan named its last request as finished",
}


def of_abort(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of an abort."""
    assert isinstance(step.event, Abort)
    ref_counts = step.before.ref_counts
    for name in dict.fromkeys(step.event.request_ids):
        old = step.old.get(name)
        if old is None:
            yield "abort_unknown"
            continue
        yield _kind_of_abort(ledger, name, old.status)
        if old.status is Status.PREEMPTED and ledger.placeholders(name):
            yield "abort_stale"
        if num_frames(ledger, name) > 1:
            yield "abort_with_two_frames_in_flight"
        if any(ref_counts[block] > 1 for table in old.block_tables for block in table):
            yield "abort_of_shared_block"


def _kind_of_abort(ledger: Ledger, name: RequestId, status: Status) -> str:
    if ledger.in_flight(name):
        return "abort_in_flight"
    if status is Status.RUNNING:
        return "abort_running"
    return "abort_preempted" if status is Status.PREEMPTED else "abort_waiting"


def of_reset(step: Step, ledger: Ledger, success: bool) -> Iterator[str]:
    """Yield the goals of a reset."""
    assert isinstance(step.event, Reset)
    if not success:
        yield "reset_refused"
    elif not step.event.reset_running_requests:
        if step.before.cached:
            yield "reset_done"
    elif step.before.running:
        yield "reset_forced"
        if any(map(ledger.in_flight, step.before.running)):
            yield "reset_forced_in_flight"
        if any(num_frames(ledger, name) > 1 for name in step.before.running):
            yield "reset_forced_with_two_frames_in_flight"
