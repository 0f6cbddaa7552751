"""Goals that need several frames in flight."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.amounts import ends_in_flight
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import passed_over
from blockstep.conformance.judge.properties.step import RowKind, Step
from blockstep.spec.vocabulary import PauseState, Policy, RequestId

FRAMES = {
    "several_frames_in_flight": "a second plan was made before the first was committed",
    "four_frames_in_flight": "a fourth plan was made before the first was committed",
    "planned_before_its_token": "a row was to run a token that a frame in flight would sample",
    "chunks_in_two_frames": "two chunks of one prompt were in flight",
    "skip_ahead": "a running request had no row, because its last output might be in flight",
    "preempted_in_flight": (
        "a request was preempted for lack of blocks while a frame in flight samples for it"
    ),
    "all_preempted_in_flight": "the only running request, with tokens in flight, preempted itself",
    "stale_tokens_delivered": "a request preempted in flight for lack of blocks got its tokens",
    "ended_while_stale": "a request preempted in flight for lack of blocks ended with those tokens",
    "passed_over_for_its_tokens": "a request that waits for its own tokens in flight was skipped",
    "admitted_past_a_stale_one": "a request was admitted before one that waits for its own tokens",
    "resumed_after_stale_tokens": "a request that had got tokens while preempted was resumed",
    "abort_stale": "a preempted request with tokens in flight was aborted",
    "published_by_commit": "a commit published a block of a request that continues",
    "published_by_the_last_commit": "a commit published a block of a request that it ended",
    "draft_placeholders_scheduled": "a row carried placeholders for drafts",
    "draft_placeholders_dropped": "a running request had no row, and lost its placeholders",
    "rollback_with_frames_behind": (
        "drafts were rejected while a later frame had a row of the request"
    ),
    "row_of_an_ended_request_ignored": (
        "a commit had a row of a request that an earlier commit had ended"
    ),
    "abort_with_two_frames_in_flight": "a request with rows in two frames in flight was aborted",
    "reset_forced_with_two_frames_in_flight": (
        "a forced reset preempted a request with rows in two frames in flight"
    ),
    "rejected_pipeline_full_async": "a plan was rejected with several frames in flight",
    "pipeline_chunks_in_two_frames": (
        "two chunks of one prompt were in flight, without placeholders"
    ),
    "pipeline_waits_for_its_token": (
        "a running request had no row, because a frame in flight samples its token"
    ),
    "pipeline_preempted_in_flight": (
        "a request was preempted while a frame in flight samples its token"
    ),
    "pipeline_token_after_preemption": "a request preempted in flight got the token of that frame",
    "dropped_token_runs_again": (
        "a preempted request lost a token in flight, and is resumed before its position (of "
        "engines whose traits say that they drop such tokens)"
    ),
}


def of_frames(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a plan made while others are in flight."""
    if step.rows and len(step.after.frames_in_flight) > 1:
        yield "several_frames_in_flight"
        if len(step.after.frames_in_flight) > 3:
            yield "four_frames_in_flight"
    yield from (_of_promises if step.config.async_scheduling else _of_pipeline)(step, ledger)


def _of_promises(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield these goals under asynchronous scheduling."""
    for row in step.rows:
        if row.drafts:
            yield "draft_placeholders_scheduled"
        if ledger.placeholders(row.request_id):
            yield "planned_before_its_token"
        elif row.kind is RowKind.RUNNING and ledger.in_flight(row.request_id):
            yield "chunks_in_two_frames"
        life = ledger.lives[row.request_id]
        if row.kind is RowKind.RESUMED and life.num_known_then not in (0, life.num_known):
            yield "resumed_after_stale_tokens"
    for name in _without_row(step):
        if step.old[name].spec_token_ids:
            yield "draft_placeholders_dropped"
        if _met_all_who_run(step, ledger) and ends_in_flight(ledger, step.old[name]):
            yield "skip_ahead"
    if any(map(ledger.placeholders, step.plan.preempted_req_ids)):
        yield "preempted_in_flight"
        if not step.after.running:
            yield "all_preempted_in_flight"
    if any(name not in step.place for name in ledger.promised):
        yield from _of_stale(step, ledger)


def _of_pipeline(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield these goals where each request waits for its own token."""
    for row in step.rows:
        if row.kind is RowKind.RUNNING and ledger.in_flight(row.request_id):
            yield "pipeline_chunks_in_two_frames"
    if any(map(ledger.promised.get, _without_row(step))) and _met_all_who_run(step, ledger):
        yield "pipeline_waits_for_its_token"
    if any(map(ledger.promised.get, step.plan.preempted_req_ids)):
        yield "pipeline_preempted_in_flight"


def _without_row(step: Step) -> list[RequestId]:
    """Running requests without a row."""
    if len(step.running_rows) == len(step.before.running):
        return []
    others = {*step.plan.preempted_req_ids, *(row.request_id for row in step.rows)}
    return [name for name in step.before.running if name not in others]


def _met_all_who_run(step: Step, ledger: Ledger) -> bool:
    """Whether a plan tried all running requests: budget, blocks and pause allowed it."""
    rest = step.config.max_num_batched_tokens - step.plan.total_num_scheduled_tokens
    is_paused = ledger.pause_state is PauseState.PAUSED_ALL
    return rest > 0 and not step.plan.preempted_req_ids and not is_paused


def _of_stale(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of requests that were skipped for their own tokens."""
    met = [name for name in passed_over(step, ledger) if ledger.placeholders(name)]
    if not met:
        return
    yield "passed_over_for_its_tokens"
    admitted = [ledger.lives[row.request_id].order for row in step.admitted_rows]
    first = min(ledger.lives[name].order for name in met)
    if admitted and (step.config.policy is Policy.FCFS or max(admitted) > first):
        yield "admitted_past_a_stale_one"


def num_frames(ledger: Ledger, name: RequestId) -> int:
    """Number of frames in flight with a row of a request."""
    return sum(any(row.request_id == name for row in rows) for rows in ledger.frames.values())
