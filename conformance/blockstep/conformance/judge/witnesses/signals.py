"""Situations of what comes from outside: aborts, resets, grammars, ids."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.judge.witnesses.frames import num_frames
from blockstep.spec.vocabulary import Abort, RequestId, Reset, Status

SIGNALS = {
    "abort_waiting": "one that had never run was aborted",
    "abort_running": "one that runs was aborted, not in flight",
    "abort_preempted": "a preempted one was aborted",
    "abort_in_flight": "one in flight was aborted",
    "abort_unknown": "an abort named an id that is not unfinished",
    "abort_of_shared_block": "one was aborted whose blocks others go on holding",
    "grammar_ready_twice": "a grammar was reported as compiled again",
    "reset_refused": "a reset failed because blocks were held",
    "reset_done": "a reset without force emptied a cache that was not empty",
    "reset_forced": "a reset by force preempted somebody",
    "reset_forced_in_flight": "a reset by force preempted somebody in flight",
    "id_used_again": "an id was submitted again, before a plan told of its end",
}


def of_abort(step: Step, ledger: Ledger) -> Iterator[str]:
    """What an abort met."""
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
    """What a reset met."""
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
