"""Goals that need a store: loads, holds, and reports of transfers."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.attention_ranges import is_recurrent
from blockstep.conformance.judge.goals import Find, Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import RowKind, Step, is_parked
from blockstep.conformance.judge.properties.queue_replay import find_waiting, in_policy_order
from blockstep.spec import vocabulary as v

TEXTS = {
    "transfers_parked": "a request got blocks for an asynchronous load",
    "transfers_parked_behind_a_hit": "an asynchronous load began after a local hit",
    "transfers_parked_while_nobody_runs": "an asynchronous load began while no request ran",
    "transfers_load_of_all_it_knows": "all but the last known token was loaded",
    "transfers_load_at_once": "a request was loaded and ran in one step",
    "transfers_state_loaded": "a state of a recurrent layer was to be loaded",
    "transfers_state_out_of_reach": "an offer of too many tokens brought no usable state",
    "transfers_returned": "a request was admitted after its load was done",
    "transfers_returned_behind_a_head": (
        "such a request was admitted although one before it did not fit"
    ),
    "transfers_asked_anew": "a load failed completely, and the store was asked again",
    "transfers_not_known_yet": "a request was skipped because the store has no offer yet",
    "transfers_gave_back": "a request with a finished load had its blocks reclaimed",
    "transfers_preempted_unsettled": "a forced reset preempted a request with an unconfirmed load",
    "transfers_settled": "a commit confirmed the load of its plan",
    "transfers_failed_at_once": "a load of a plan in flight failed",
    "transfers_failed_at_its_first_block": "a load failed completely",
    "transfers_failed_at_a_later_block": "a load failed after its first block",
    "transfers_failure_ends": "a request ended because its load had failed",
    "transfers_failure_recomputed": "a request continued after the present part of its load",
    "transfers_received": "an asynchronous load was done",
    "transfers_ended_under_way": "a request ended before its load was done",
    "transfers_ended_and_read": "a request ended whose blocks the store reads",
    "transfers_held_twice": "blocks were held for a load and for the store at once",
    "transfers_read_by_its_end": (
        "a request ended with the commit that reports that its blocks were read"
    ),
    "transfers_released": "the last hold of blocks ended",
    "transfers_reported_again": "a transfer was reported that had ended or never was",
    "transfers_reset_refused": "a reset failed because of a load or a hold",
    "transfers_reset_of_the_store": "a reset reached the store",
    "transfers_deferred_by_an_end": "a request ended, and its blocks wait for a frame in flight",
    "transfers_deferred_by_a_reset": "a forced reset left blocks that wait for a frame in flight",
    "transfers_deferred_by_a_window": "skipped blocks wait for a frame in flight",
    "transfers_deferred_until_now": "a commit freed blocks that had waited for it",
    "transfers_waits_for_an_answer": "a running request waited for blocks that a commit frees",
}


def of_loads(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with loads."""
    for load in step.plan.kv_loads:
        end = load.num_computed_tokens + load.num_external_tokens
        if end == history.lives[load.request_id].num_known - 1:
            yield "transfers_load_of_all_it_knows"
        if any(map(is_recurrent, step.config.groups)):
            yield "transfers_state_loaded"
        if not load.is_async:
            yield "transfers_load_at_once"
            continue
        yield "transfers_parked"
        if load.num_computed_tokens:
            yield "transfers_parked_behind_a_hit"
        if not step.after.running:
            yield "transfers_parked_while_nobody_runs"
        if is_parked(step.old[load.request_id]):
            yield "transfers_asked_anew"
    if any(map(is_recurrent, step.config.groups)):
        yield from _of_offers_too_long(step, history)
    if find_waiting(step, history) is not None:
        yield "transfers_waits_for_an_answer"
    if any(is_parked(step.old[name]) for name in step.giving):
        yield "transfers_gave_back"
    yield from _of_returns(step, history)


def _of_offers_too_long(step: Step, history: History) -> Iterator[str]:
    """Yield a goal for each request without a load because the state of its offer is of too many
    tokens."""
    for row in step.askers:
        offer = history.store.transfers.get_offer(row.request_id)
        is_too_long = (offer.num_tokens or 0) >= history.lives[row.request_id].num_known
        if is_too_long and row.request_id not in step.loads:
            yield "transfers_state_out_of_reach"


def _of_returns(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of requests that were admitted after a load, or skipped for the store."""
    rows = {row.request_id: row for row in step.admitted_rows}
    is_behind = False
    for name in in_policy_order(history, step.before):
        old = step.old[name]
        offer = history.store.transfers.get_offer(name)
        if name not in rows and not old.num_computed_tokens and offer.num_tokens is None:
            yield "transfers_not_known_yet"
        if name not in rows and name in step.after.waiting:
            is_behind = True
        if name in rows and is_parked(old):
            kept = rows[name].kind is RowKind.CONTINUED
            yield "transfers_returned" if kept else "transfers_asked_anew"
            if kept and is_behind:
                yield "transfers_returned_behind_a_head"


def of_reports(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a report."""
    store, report = history.store, history.store.get_report(step)
    under_way = store.transfers
    failed, void = store.find_failed(step), history.find_void(step)
    if store.list_confirmed(step):
        yield "transfers_settled"
    if void:
        yield "transfers_failed_at_once"
    for name, valid in (failed | void).items():
        load = store.parked.get(name) if name in failed else None
        if load is not None:
            is_first = valid == load.num_computed_tokens
            where = "its_first_block" if is_first else "a_later_block"
            yield f"transfers_failed_at_{where}"
        yield "transfers_failure_recomputed" if name in step.new else "transfers_failure_ends"
    for name in report.finished_recving:
        yield "transfers_received" if name in under_way.loading else "transfers_reported_again"
    after = step.after.transfers
    left = {held.request_id for held in after.held} if after else set()
    for name in report.finished_sending:
        if name in step.ended and name not in left:
            yield "transfers_read_by_its_end"
        elif name not in store.held:
            yield "transfers_reported_again"
    if store.held.keys() - left:
        yield "transfers_released"
    yield from of_held(step, history)


def of_held(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of requests whose end leaves blocks to transfers."""
    after = step.after.transfers
    for held in after.held if after else ():
        if held.request_id not in history.store.held:
            if held.is_recving:
                yield "transfers_ended_under_way"
            if held.is_sending:
                yield "transfers_ended_and_read"
            if held.is_recving and held.is_sending:
                yield "transfers_held_twice"


def of_reset_beside(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a reset with a store."""
    assert isinstance(step.event, v.Reset)
    assert isinstance(step.observation, v.ResetDone)
    success = step.observation.success
    under_way = any(map(history.store.is_under_way, step.before.requests))
    if not success and (under_way or history.store.held):
        yield "transfers_reset_refused"
    if success and step.event.reset_connector:
        yield "transfers_reset_of_the_store"
    if any(name in history.store.unsettled for name in step.preempted):
        yield "transfers_preempted_unsettled"


def of_deferred(step: Step, _history: History) -> Iterator[str]:
    """Yield the goals of blocks that begin or cease to wait for frames in flight."""
    before, after = step.before.transfers, step.after.transfers
    if before is None or after is None or step.config.max_frames_in_flight == 1:
        return
    if isinstance(step.event, v.Commit):
        frame_id = step.event.frame_id
        if any(entry.frame_id == frame_id for entry in before.deferred_frees):
            yield "transfers_deferred_until_now"
    if not {*after.deferred_frees} - {*before.deferred_frees}:
        return
    if isinstance(step.event, v.Reset):
        yield "transfers_deferred_by_a_reset"
    elif not isinstance(step.event, v.Schedule):
        yield "transfers_deferred_by_an_end"
    elif step.config.groups:
        yield "transfers_deferred_by_a_window"


def also_deferred(find: Find) -> Find:
    """Return a function that finds these goals and those of `of_deferred`."""
    return lambda step, history: [*of_deferred(step, history), *find(step, history)]


GOALS = Goals(
    TEXTS,
    {
        **dict.fromkeys(v.EVENT_TYPES, of_deferred),
        v.Schedule: also_deferred(of_loads),
        v.Commit: also_deferred(of_reports),
        v.TransfersReported: also_deferred(of_reports),
        v.Abort: also_deferred(of_held),
        v.Reset: also_deferred(of_reset_beside),
    },
)
